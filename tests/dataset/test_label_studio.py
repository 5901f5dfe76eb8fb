"""Rankings go to Label Studio as tasks and come back from its export."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from pacorl.dataset.folder import Answer, Instance, read_answers, write_records
from pacorl.dataset.importing import import_folder
from pacorl.dataset.label_studio import LOCAL, load_label_studio, write_tasks

EXAMPLE = Path(__file__).parents[2] / "examples" / "rankings" / "rankings.csv"


def known(answer: Answer) -> tuple[object, ...]:
    names = [Path(name).name for name in (answer.reference, *answer.candidates)]
    return (Path(answer.reference).parent.name, *names, answer.theme, answer.annotator)


def test_rankings_go_there_and_come_back(tmp_path: Path) -> None:
    """Ties aside, which a Ranker does not have; those tasks go without a ranking."""
    import_folder(tmp_path / "set", EXAMPLE, kind="rankings")
    here = read_answers(tmp_path / "set/imported/rankings/rankings.jsonl")
    tied = [answer for answer in here if answer.has_ties]
    counts = write_tasks(tmp_path / "set", tmp_path / "tasks")
    assert counts["rankings"] == len(here) - len(tied)
    assert counts["left out as tied"] == len(tied) > 0
    back = import_folder(tmp_path / "other", tmp_path / "tasks/tasks.json", kind="label_studio")
    assert back["rankings"] == counts["rankings"]
    there = read_answers(tmp_path / "other/imported/tasks/rankings.jsonl")
    assert {known(answer) for answer in there} == {known(answer) for answer in here if not answer.has_ties}


def test_an_order_does_not_show_in_the_task_and_its_images_are_there(tmp_path: Path) -> None:
    import_folder(tmp_path / "set", EXAMPLE, kind="rankings")
    write_tasks(tmp_path / "set", tmp_path / "tasks")
    config = ET.fromstring((tmp_path / "tasks/config.xml").read_text())
    fields = {value.removeprefix("$") for tag in config if (value := tag.get("value", ""))}
    for task in json.loads((tmp_path / "tasks/tasks.json").read_text()):
        assert fields <= task["data"].keys()
        ids = [item["id"] for item in task["data"]["items"]]
        assert ids == sorted(ids)
        shown = [re.findall(r'src="([^"]+)"', item["html"])[0] for item in task["data"]["items"]]
        for source in (task["data"]["reference"], *shown):
            assert (tmp_path / "tasks" / source.removeprefix(LOCAL)).is_file()


def test_instances_without_a_ranking_are_tasks_too(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.png").write_bytes(b"image")
    write_records(tmp_path / "instances.jsonl", [Instance("1", "g", "a.png", ("b.png", "c.png"))])
    assert write_tasks(tmp_path, tmp_path / "out")["tasks"] == 1
    (task,) = json.loads((tmp_path / "out/tasks.json").read_text())
    assert task["annotations"] == []
    with pytest.raises(ValueError, match="none of its 1 tasks has an annotation"):
        load_label_studio(tmp_path / "out/tasks.json")


def test_a_folder_with_nothing_to_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has nothing to rank; make instances"):
        write_tasks(tmp_path, tmp_path / "out")


def exported(**changes: Any) -> dict[str, Any]:
    """A task as Label Studio exports it: numbers for people, keys of its own beside."""
    result = {"type": "ranker", "from_name": "order", "value": {"ranker": {"order": ["x/b.png", "x/a.png"]}}}
    choice = {"type": "choices", "value": {"choices": ["good"]}}
    annotation = {"id": 3, "completed_by": 7, "was_cancelled": False, "result": [choice, result], "lead_time": 4.2}
    return {"id": 1, "data": {"reference": "x/r.png", "theme": "A fox"}, "annotations": [annotation], **changes}


def test_an_export_of_another_project_is_read(tmp_path: Path) -> None:
    skipped = {**exported()["annotations"][0], "was_cancelled": True}
    path = tmp_path / "export.json"
    path.write_text(json.dumps([exported(), exported(annotations=[skipped])]))
    (ranking,) = load_label_studio(path)
    assert (ranking.reference, ranking.candidates) == ("x/r.png", ("x/b.png", "x/a.png"))
    assert (ranking.theme, ranking.annotator, ranking.line) == ("A fox", "7", 1)


def buckets() -> dict[str, Any]:
    task = exported()
    task["annotations"][0]["result"][1]["value"]["ranker"] = {"good": ["a"], "bad": ["b"]}
    return task


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ({"tasks": []}, "is not a list of tasks"),
        ([{"reference": "a.png"}], "task 1: has no 'data' and 'annotations'; export the project as JSON"),
        ([exported(data={})], "task 1: its data name no 'reference'"),
        ([exported(), buckets()], "task 2: sorts into buckets good, bad"),
    ],
)
def test_a_fault_names_the_task_and_the_fix(tmp_path: Path, document: Any, fault: str) -> None:
    path = tmp_path / "export.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=re.escape(fault)):
        load_label_studio(path)
