"""Documents that somebody else wrote wrongly: JSON, JSONL, YAML and CSV, by every reader of the project."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from PIL import Image
from qa.attack.damage import content_of, damage_bytes, damage_file, damage_line, mutant, put
from qa.attack.harness import Target, WrongError

from pacorl.config.base import load
from pacorl.dataset.folder import read_answers, read_instances, read_pairs, read_prompts
from pacorl.dataset.manifest import DatasetStep
from pacorl.dataset.prompts import PAPER, read_taxonomy
from pacorl.generate.storyboard import read_storyboard
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.documents import Journal, dump_yaml, read_text, write_json, write_jsonl
from pacorl.judge.calibration import read_calibration
from pacorl.judge.http.endpoints import load_endpoints
from pacorl.judge_training.judge_config import JudgeConfig
from pacorl.records.characters import read_character
from pacorl.records.comparisons import comparisons_from, missing_file, sharegpt_files
from pacorl.records.edits import load_sharegpt_4o
from pacorl.records.prompts import load_prompts
from pacorl.records.rankings import load_rankings
from pacorl.report.folder import read_run
from pacorl.report.publish import write_card

CONFIGS = Path(__file__).parents[2] / "configs"
RECORDS = 4
"""In a good JSONL."""

CRITERIA = {"Dimension": {"name": "text"}}
COMPARISON = {"images": ["a.png", "b.png"], "question": "Same?", "consistent": True, "reasons": "r", "answer": "Yes. r"}
PROMPT = {"prompt": "Hats.", "layout": "2x1", "theme": "t", "criteria": CRITERIA, "height": 64, "width": 64}
EDIT = {"image": ["a.png"], "instruction": "A hat.", "category": "c", "panels": ["x"]}
RANKING = {"reference": "a.png", "candidates": ["b.png", ["c.png", "d.png"]], "criteria": CRITERIA, "group": "g"}
INSTANCE = {"id": "i", "group": "g", "reference": "a.png", "candidates": ["b.png", "c.png"], "must": [[0, 1]]}
ANSWER = {"instance": "i", "annotator": "p", "group": "g", "reference": "a", "candidates": ["b", "c"], "ranks": [1, 2]}
PAIR = {"key": "k", "group": "g", "images": ["a.png"], "consistent": True, "question": "q", "votes": [1, 2]}
ENTRY = {"file_name": "d.json", "formatting": "sharegpt", "columns": {"messages": "m"}, "tags": {"role_tag": "from"}}
TURNS = [{"from": "human", "value": "<image>q"}, {"from": "gpt", "value": "Yes. r"}]
SAMPLE = {"prompt_id": 1, "seed": 2, "image": "a.png", "grid": "1x2", "p_yes": [[None, 0.5]], "scores": {"a": 0.5}}
FIGURE = {"a": {"mean": 0.5, "low": 0.4, "high": 0.6}}
ROW = {"source": "measured", "name": "n", "values": FIGURE}
JUDGE = {"name": "judge", "checkpoint": "tiny", "endpoints": ["http://127.0.0.1:8000/v1"]}
CARD = {"description": "a dentist", "keep": {"face": "round glasses", "hair": "black"}, "may_change": ["pose"]}
CURVE = {"temperature": 1.9, "bias": 0.4}
CALIBRATION = {"judge": "tiny", "curves": {"": CURVE, "Same?": CURVE}, "thresholds": {"panels": {"4": 0.3, "8": 0.2}}}
TABLES = {"tables": [{"title": "t", "columns": ["a"], "rows": [ROW]}], "complete": False, "measured": 1, "wanted": 2}


def sharegpt(path: Path) -> object:
    folder = path.parent
    return missing_file(f"{folder}:d"), list(sharegpt_files(folder)), comparisons_from(f"{folder}:d")


def run_and_card(path: Path) -> object:
    folder = next(parent for parent in path.parents if (parent / "run").is_dir())
    return read_run(folder / "run"), write_card(folder / "run", licence="mit", benchmarks=[folder / "bench"])


def _manifest(path: Path) -> object:
    return DatasetStep(path.parents[1], "s").counts_if_done()


def _yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


READERS: dict[str, tuple[Any, Callable[[Path], object]]] = {
    "c.jsonl": (COMPARISON, lambda path: comparisons_from(str(path))),
    "p.jsonl": (PROMPT, load_prompts),
    "e.jsonl": (EDIT, load_prompts),
    "r.jsonl": (RANKING, load_rankings),
    "i.jsonl": (INSTANCE, read_instances),
    "a.jsonl": (ANSWER, read_answers),
    "l.jsonl": (PAIR, read_pairs),
    "dataset_info.json": ({"d": ENTRY}, sharegpt),
    "d.json": ([{"m": TURNS, "images": ["a.png"]}], sharegpt),
    "s.json": ([{"input_prompt": "x", "input_image": ["a.png"]}], load_sharegpt_4o),
    "run/metrics.jsonl": ({"kind": "evaluation", "epoch": 1, "step": 2, "reward/x": 0.5}, run_and_card),
    "run/samples/evaluation-000001.jsonl": (SAMPLE, run_and_card),
    "run/summary.json": ({"after": FIGURE, "before": FIGURE, "difference": {"a": 0.1}}, run_and_card),
    "run/config.yaml": (_yaml(CONFIGS / "tiny.yaml"), run_and_card),
    "bench/summary.json": (TABLES, run_and_card),
    "w.jsonl": (PROMPT | {"idx": "i"}, read_prompts),
    "rankings.csv": ("reference,candidates,theme\na.png,b.png > c.png = d.png,t\nb.png,a.png|c.png,u\n", load_rankings),
    "journal/j.jsonl": ({"key": "k", "score": 1.5}, Journal),
    "manifests/s.json": ({"plan": {}, "outputs": {"a.png": "0"}, "counts": {"n": 1}}, _manifest),
    "endpoints.yaml": ({"judges": [JUDGE]}, load_endpoints),
    "hero/card.yaml": (CARD, lambda path: read_character(path.parent)),
    "calibration.json": (CALIBRATION, read_calibration),
    "taxonomy.yaml": (_yaml(PAPER), read_taxonomy),
    **{path.name: (_yaml(path), read_storyboard) for path in sorted((CONFIGS / "cases").glob("*.yaml"))},
    **{path.name: (_yaml(path), partial(load, PolicyConfig)) for path in sorted(CONFIGS.glob("*.yaml"))},
    **{
        f"reward/{path.name}": (_yaml(path), partial(load, JudgeConfig)) for path in (CONFIGS / "reward").glob("*.yaml")
    },
    "full.yaml": (load(PolicyConfig, CONFIGS / "tiny.yaml").model_dump(mode="json"), partial(load, PolicyConfig)),
    "full_reward.yaml": (
        load(JudgeConfig, CONFIGS / "reward/tiny.yaml").model_dump(mode="json"),
        partial(load, JudgeConfig),
    ),
}


def write(path: Path, document: Any) -> None:
    """A document as its file has it; JSONL and CSV hold it a few times, under ids of their own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".yaml":
        path.write_text(dump_yaml(document), encoding="utf-8")
    elif path.suffix == ".jsonl":
        write_jsonl(path, [{**document, **_own_ids(document, number)} for number in range(RECORDS)])
    elif path.suffix == ".csv":
        path.write_text(document, encoding="utf-8")
    else:
        write_json(path, document)


def _own_ids(document: dict[str, Any], number: int) -> dict[str, Any]:
    return {key: f"{document[key]}{number}" for key in ("id", "instance", "key", "idx") if key in document}


def prepare(name: str, folder: Path) -> None:
    """The document and what it is read with."""
    for letter, colour in zip("abcd", ("red", "green", "blue", "white"), strict=True):
        Image.new("RGB", (8, 8), colour).save(folder / f"{letter}.png")
    groups = (RUN, SHAREGPT)
    for other in next((group for group in groups if name in group), (name,)):
        write(folder / other, READERS[other][0])
    (folder / "run" / "adapter").mkdir(parents=True)
    if name == "hero/card.yaml":
        shutil.copyfile(folder / "a.png", folder / "hero" / "a.png")


def mutate(name: str, folder: Path, draw: random.Random) -> str:
    """Damages one document: its bytes, its values, or its keys."""
    path, document = folder / name, READERS[name][0]
    what = draw.choices(["bytes", "value", "file", "twice", "latin"], [45, 45, 3, 5, 2])[0]
    if what == "bytes" or (path.suffix == ".csv" and what == "value") or (path.suffix != ".yaml" and what == "twice"):
        return damage_bytes(path, draw)
    if what == "file":
        return damage_file(path, draw)
    if what == "latin":
        content = content_of(path)
        at = draw.randrange(len(content)) + 1 if content else 0
        put(path, content[:at] + b"\xe9 " + content[at:])  # a cut letter: whatever follows, it is no UTF-8
        return "must refuse Latin-1"
    if what == "twice":
        return _key_twice(path, draw)
    if path.suffix == ".jsonl":
        return damage_line(path, draw)
    if path.suffix == ".yaml":
        put(path, dump_yaml(mutant(document, draw)).encode(errors="surrogatepass"))
    else:
        put(path, json.dumps(mutant(document, draw)).encode())
    return "value"


def _key_twice(path: Path, draw: random.Random) -> str:
    try:
        text = content_of(path).decode()
    except ValueError:  # no document any more
        return damage_bytes(path, draw)
    keys = [line for line in text.split("\n") if line[:1].isalpha()] or ["key: 1"]
    put(path, f"{text}\n{draw.choice(keys).partition(':')[0]}: 12345\n".encode())
    return "must refuse a key twice"


def read_all(name: str, folder: Path) -> None:
    """Reads the document. Raises WrongError if it is taken and has other records than it has lines."""
    path = folder / name
    result = READERS[name][1](path)
    if name in COUNTED:
        lines = sum(bool(line.strip()) for line in read_text(path).split("\n"))
        if len(result) != lines:
            raise WrongError("silent", f"{len(result)} records of {lines} lines")


def targets() -> list[Target]:
    return [_target(name) for name in READERS]


def _target(name: str) -> Target:
    # An entry that names other columns finds its own file at fault.
    names = (Path(name).name, *(("d.json", ":d", "dataset_info") if name in SHAREGPT else ()))
    return Target(
        name=f"documents/{name}",
        prepare=lambda folder: prepare(name, folder),
        mutate=lambda folder, draw: mutate(name, folder, draw),
        run=lambda folder: read_all(name, folder),
        names=(*names, "work/run") if name in RUN else names,
    )


RUN = tuple(name for name in READERS if name.startswith(("run/", "bench/")))
SHAREGPT = ("d.json", "dataset_info.json")
COUNTED = ("c.jsonl", "p.jsonl", "e.jsonl", "r.jsonl", "i.jsonl", "a.jsonl", "l.jsonl", "w.jsonl")
