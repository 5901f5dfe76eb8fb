"""Rankings to and from Label Studio: its Ranker orders a List of candidates with the reference above them.

    pacorl dataset tasks SET --out tasks                                     tasks.json, config.xml and the images
    pacorl dataset import SET export.json --kind label_studio                the rankings made there

Label Studio shows the images from its local storage, whose root is the folder of the tasks. An item's id is its image's
path, so that an export (JSON; JSON_MIN is not enough) identifies the images.
"""

from __future__ import annotations

import html
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from pacorl.dataset.export import link_or_copy
from pacorl.dataset.folder import Answer, Instance, collect_answers, read_answers, read_instances
from pacorl.io.documents import JsonObject, blamed_on, read_json
from pacorl.io.files import claim_folder, flush_all, inside, write_atomic
from pacorl.records.rankings import Ranking

LOCAL = "/data/local-files/?d="
"""Prefix of the paths in Label Studio's local storage."""
RANKER = "rank"
LIST = "candidates"
CONFIG = f"""<View>
  <Header value="$theme"/>
  <Image name="reference" value="$reference"/>
  <List name="{LIST}" value="$items" title="The most consistent first"/>
  <Ranker name="{RANKER}" toName="{LIST}"/>
</View>
"""
"""The labelling interface of these tasks."""


def write_tasks(folder: Path, out: Path) -> dict[str, int]:
    """Write the instances of a dataset folder, and their rankings, as Label Studio's tasks.

    Returns:
        The number of tasks, rankings and images, and of rankings left out because the Ranker has no ties.

    Raises:
        ValueError: the folder has neither instances nor rankings, or an image is missing.
    """
    # The instances: the folder's own, and those of its rankings.
    answers = collect_answers(folder, dry_run=True)
    for file in sorted(folder.glob("imported/*/rankings.jsonl")):
        answers += read_answers(file)
    instances = _instances(folder, answers)
    if not instances:
        raise ValueError(f"{folder} has nothing to rank; make instances.jsonl with `pacorl dataset pair` first")

    if any(not item.reference for item in instances.values()):
        raise ValueError(
            f"{folder} ranks whole sets, which the labelling interface lacks; use `pacorl dataset annotate`"
        )

    # Copy their images.
    claim_folder(out)
    images = set[str]()
    for item in instances.values():
        images |= {item.reference, *item.candidates}
    for name in sorted(images):
        link_or_copy(inside(folder, name), out / name)
    flush_all(out)

    # Write the tasks with their rankings.
    untied: dict[str, list[Answer]] = defaultdict(list)
    tied = 0
    for answer in answers:
        if answer.has_ties:
            tied += 1
        else:
            untied[answer.instance].append(answer)
    tasks = [_task(item, untied[item.id]) for item in instances.values()]
    write_atomic(out / "tasks.json", json.dumps(tasks, indent=1, ensure_ascii=False) + "\n")
    write_atomic(out / "config.xml", CONFIG)
    counts = {"tasks": len(tasks), "rankings": len(answers) - tied, "images": len(images)}
    return counts | {"left out as tied": tied}


def _instances(folder: Path, answers: list[Answer]) -> dict[str, Instance]:
    """Instances of the folder and of its rankings, by id; without control questions."""
    instances = {}
    path = folder / "instances.jsonl"
    if path.is_file():
        for item in read_instances(path):
            if not item.is_control:
                instances[item.id] = item
    for answer in answers:
        # By name, because the order of the candidates would reveal the ranking.
        names = tuple(sorted(answer.candidates))
        identity = (answer.instance, answer.group, answer.reference)
        shown = Instance(*identity, names, answer.theme, answer.category, panels=answer.panels)
        instances.setdefault(answer.instance, shown)
    return instances


def _task(instance: Instance, answers: list[Answer]) -> JsonObject:
    items = []
    for number, name in enumerate(instance.candidates, 1):
        items.append({"id": name, "title": f"{number}", "html": f'<img src="{html.escape(LOCAL + name)}" width="256">'})

    texts = {"theme": instance.theme, "group": instance.group, "category": instance.category}
    data = {"id": instance.id, "reference": LOCAL + instance.reference, "items": items, **texts}

    annotations = []
    for answer in answers:
        order = {"ranker": {RANKER: list(answer.candidates)}}
        region = {"from_name": RANKER, "to_name": LIST, "type": "ranker", "value": order}
        annotations.append({"completed_by": {"email": answer.annotator}, "result": [region]})
    return {"data": data, "annotations": annotations}


def load_label_studio(path: Path) -> list[Ranking]:
    """Read the rankings of an export (JSON) of tasks in the form of `write_tasks`.

    Raises:
        ValueError: the message names file, task, fault and fix.
    """
    tasks = read_json(path)
    if not isinstance(tasks, list):
        raise ValueError(f"{path} is not a list of tasks; export the project from Label Studio as JSON")
    rankings: list[Ranking] = []
    for number, task in enumerate(tasks, 1):
        with blamed_on(f"{path}, task {number}"):
            rankings += _rankings_of(task, number)
    if not rankings:
        raise ValueError(f"{path} holds no rankings: none of its {len(tasks)} tasks has an annotation by a Ranker")
    return rankings


def _rankings_of(task: JsonObject, number: int) -> Iterator[Ranking]:
    if not isinstance(task, dict) or not isinstance(task.get("data"), dict) or "annotations" not in task:
        raise ValueError("has no 'data' and 'annotations'; export the project as JSON, not as JSON_MIN")
    # A task may have several annotators.
    data = task["data"]
    for annotation in task["annotations"]:
        orders = []
        for row in annotation["result"]:
            if row.get("type") == "ranker":
                orders.append(row["value"]["ranker"])

        # A skipped task has an annotation too.
        if annotation.get("was_cancelled") or not orders:
            continue
        # A Ranker without buckets saves one list, under its own name or bare.
        lists = list(orders[0].values()) if isinstance(orders[0], dict) else [orders[0]]
        if len(lists) != 1:
            raise ValueError(
                f"sorts into buckets {', '.join(orders[0])}; a ranking is one list, a Ranker without Bucket"
            )
        if "reference" not in data:
            raise ValueError("its data name no 'reference', the path of the image that candidates are compared with")
        # Label Studio writes a person as an object or as a bare id, by the kind of its export.
        person = annotation.get("completed_by", "")
        yield Ranking(
            line=number,
            reference=str(data["reference"]).removeprefix(LOCAL),
            tiers=tuple((str(name),) for name in lists[0]),
            annotator=str(person.get("email") or person.get("id") if isinstance(person, dict) else person),
            theme=str(data.get("theme") or ""),
            group=str(data.get("group") or ""),
            category=str(data.get("category") or ""),
        )
