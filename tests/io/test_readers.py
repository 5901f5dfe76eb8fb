"""Files that somebody else wrote wrongly: whatever stands where, a reader takes it or says one line with the file."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from pacorl.config.base import load
from pacorl.config.policy_run import PolicyRun
from pacorl.data.comparisons import comparisons_from, missing_file, sharegpt_names
from pacorl.data.edits import load_sharegpt_4o
from pacorl.data.rankings import load_rankings
from pacorl.data.records import load_prompts
from pacorl.dataset.prompts import PAPER, read_taxonomy
from pacorl.dataset.records import read_answers, read_instances, read_pairs
from pacorl.generate.storyboard import read_storyboard
from pacorl.io.documents import dump_yaml, write_json, write_jsonl
from pacorl.report.folder import read_run
from pacorl.report.publish import write_card

MUTANTS = 60
STRANGE = [None, 5, -1, 1.5, True, "x", "", [], {}, [1], {"x": 1}, [[1]], [None], {"a": None}, 10**30, 1e308, 10**400]
CONFIGS = Path(__file__).parents[2] / "configs"

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
TABLES = {"tables": [{"title": "t", "columns": ["a"], "rows": [ROW]}], "complete": False, "measured": 1, "wanted": 2}


def sharegpt(path: Path) -> object:
    folder = path.parent
    return missing_file(f"{folder}:d"), sharegpt_names(folder), comparisons_from(f"{folder}:d")


def run_and_card(path: Path) -> object:
    folder = next(parent for parent in path.parents if (parent / "run").is_dir())
    return read_run(folder / "run"), write_card(folder / "run", licence="mit", benchmarks=[folder / "bench"])


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
    "run/config.yaml": (yaml.safe_load((CONFIGS / "tiny.yaml").read_text()), run_and_card),
    "bench/summary.json": (TABLES, run_and_card),
    "config.yaml": (yaml.safe_load((CONFIGS / "tiny.yaml").read_text()), lambda path: load(PolicyRun, path)),
    "story.yaml": (yaml.safe_load((CONFIGS / "cases/tiny_journey.yaml").read_text()), read_storyboard),
    "taxonomy.yaml": (yaml.safe_load(PAPER.read_text()), read_taxonomy),
}


def write(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".yaml":
        path.write_text(dump_yaml(document))
    elif path.suffix == ".jsonl":
        write_jsonl(path, [document])
    else:
        write_json(path, document)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "ab":
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    for name, (document, _) in READERS.items():
        write(tmp_path / name, document)
    (tmp_path / "run" / "adapter").mkdir()
    return tmp_path


def paths_in(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in pairs:
        yield (*path, key)
        yield from paths_in(value, (*path, key))


def mutant(document: Any, draw: random.Random) -> Any:
    """The document with a value removed, under another key, or of another kind."""
    document = copy.deepcopy(document)
    *path, key = draw.choice(list(paths_in(document)))
    section = document
    for step in path:
        section = section[step]
    change = draw.choice(["remove", "rename", "replace", "replace", "replace"])
    if change == "remove":
        del section[key]
    elif change == "rename" and isinstance(section, dict):
        section[f"x{key}"] = section.pop(key)
    else:
        section[key] = draw.choice(STRANGE)
    return document


@pytest.mark.parametrize("name", READERS)
def test_a_strange_document_is_read_or_named_in_a_line(name: str, folder: Path) -> None:
    document, read = READERS[name]
    read(folder / name)
    draw, faults = random.Random(name), []
    for _ in range(MUTANTS):
        strange = mutant(document, draw)
        write(folder / name, strange)
        try:
            read(folder / name)  # anything but a ValueError is a traceback to a user
        except ValueError as error:
            faults.append(str(error))
    assert faults
    # An entry that names other columns finds its own file at fault.
    files = (Path(name).name, f"{folder}:d", "d.json", str(folder / "run"))
    assert [fault for fault in faults if not any(file in fault for file in files)] == []
