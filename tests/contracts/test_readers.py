"""Readers under damage: a file is read, or one line names the file and the place of the fault, with exit code 1.

`READERS` has everything that reads the files of a user: documents, images and weights; a new reader is one more row.
`make nightly` tries more inputs.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bench_examples import EXAMPLES
from edit_twins import flux_policy
from PIL import Image
from tests.contracts.damage import change_tensors, damage, put_in_place

from pacorl.bench.benchmarks import BENCHMARKS
from pacorl.cli import exit_code
from pacorl.config.base import load
from pacorl.config.recipes import recipe
from pacorl.dataset.folder import read_answers, read_instances, read_prompts
from pacorl.dataset.grids import pair
from pacorl.dataset.importing import joined_rankings
from pacorl.dataset.manifest import DatasetStep
from pacorl.dataset.prompts import PAPER, read_taxonomy
from pacorl.generate.storyboard import read_storyboard
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.documents import Journal, dump_yaml, read_text, write_json, write_jsonl
from pacorl.io.files import read_bytes, write_atomic
from pacorl.io.images import open_image, png_bytes, png_texts, upright_size
from pacorl.io.uploads import submit_upload
from pacorl.judge.calibration import read_calibration
from pacorl.judge_training.judge_config import JudgeConfig
from pacorl.models.adapters import load_lora
from pacorl.models.lora import save_lora
from pacorl.records.characters import read_character
from pacorl.records.comparisons import comparisons_from
from pacorl.records.prompts import load_prompts
from pacorl.records.rankings import load_rankings
from pacorl.report.folder import read_run
from pacorl.report.publish import write_card
from pacorl.types import Size

SECONDS, BYTES = 20.0, 2**31
"""An input takes less of a processor, and less memory beyond what the process has."""
PATIENCE = 30.0
LINES = 4
"""In a good JSONL."""


@dataclass(frozen=True)
class Reader:
    """Something that reads files which somebody else wrote."""

    files: dict[str, Any] | Callable[[Path], object]
    """The good files by name: documents, bytes, or a function that writes them into an empty folder."""
    read: Callable[[Path], Any]
    """Reads the damaged file as a command does."""
    counts: bool = False
    """Whether as many records must be read as a JSONL has lines."""
    names: tuple[str, ...] = ()
    """What a message may name in place of the file."""

    def write(self, folder: Path) -> None:
        for letter, colour in zip("abcd", ("red", "green", "blue", "white"), strict=True):
            Image.new("RGB", (8, 8), colour).save(folder / f"{letter}.png")
        if callable(self.files):
            self.files(folder)
            return
        for name, document in self.files.items():
            write_document(folder / name, document)


def write_document(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(document, bytes):
        path.write_bytes(document)
    elif path.suffix == ".yaml":
        path.write_text(dump_yaml(document), encoding="utf-8")
    elif path.suffix == ".jsonl":
        ids = {"id", "instance", "key", "idx"} & document.keys()
        write_jsonl(path, [document | {key: f"{document[key]}{number}" for key in ids} for number in range(LINES)])
    else:
        write_json(path, document)


# --- documents --------------------------------------------------------------------------------------------------

CRITERIA = {"Dimension": {"name": "text"}}
COMPARISON = {"images": ["a.png", "b.png"], "question": "Same?", "consistent": True, "reasons": "r"}
PROMPT = {"prompt": "Hats.", "layout": "2x1", "theme": "t", "criteria": CRITERIA, "height": 64, "width": 64}
EDIT = {"image": ["a.png"], "instruction": "A hat.", "category": "c", "panels": ["x"]}
RANKING = {"reference": "a.png", "candidates": ["b.png", ["c.png", "d.png"]], "criteria": CRITERIA, "group": "g"}
CSV = b"reference,candidates,theme\na.png,b.png | c.png = d.png,t\nb.png,a.png|c.png,u\n"
INSTANCE = {"id": "i", "group": "g", "reference": "a.png", "candidates": ["b.png", "c.png"], "foreign": 1}
ANSWER = {"instance": "i", "annotator": "p", "group": "g", "reference": "a", "tiers": [["b", "d"], ["c"]]}
ENTRY = {"file_name": "d.json", "formatting": "sharegpt"}
TURNS = [{"role": "user", "content": "<image><image>q"}, {"role": "assistant", "content": "Yes. r"}]
SAMPLE = {"prompt_id": 1, "seed": 2, "image": "a.png", "grid": "1x2", "p_yes": [[None, 0.5]], "scores": {"a": 0.5}}
FIGURE = {"a": {"mean": 0.5, "low": 0.4, "high": 0.6}}
CARD = {"description": "a dentist", "keep": {"face": "round glasses", "hair": "black"}}
CURVE = {"temperature": 1.9, "bias": 0.4}
CALIBRATION = {"judge": "tiny", "curve": CURVE, "thresholds": {"panels": {"4": 0.3, "8": 0.2}}}
STORY = yaml.safe_load((recipe().parent / "cases" / "tiny_hero.yaml").read_text(encoding="utf-8"))
RUN = {
    "run/metrics.jsonl": {"kind": "evaluation", "epoch": 1, "step": 2, "reward/x": 0.5},
    "run/samples/evaluation-000001.jsonl": SAMPLE,
    "run/summary.json": {"after": FIGURE, "before": FIGURE, "difference": {"a": 0.1}},
    "run/config.yaml": yaml.safe_load(recipe().read_text(encoding="utf-8")),
    "run/adapter/.keep": b"",
}
IMAGE = png_bytes(Image.new("RGB", (8, 8)), {})
SHAREGPT = {"dataset_info.json": {"d": ENTRY}, "d.json": [{"messages": TURNS, "images": ["a.png", "a.png"]}]}


def read_run_and_card(path: Path) -> object:
    folder = next(parent for parent in path.parents if (parent / "run").is_dir())
    return read_run(folder / "run"), write_card(folder / "run")


def read_sharegpt(path: Path) -> object:
    folder = path.parent
    return comparisons_from(f"{folder}:d")


def read_benchmark(path: Path, *, number: int) -> object:
    """Read the example of a benchmark, whose data are the damaged file or its folder."""
    name, example = EXAMPLES[number]
    (path.parent / "again").mkdir()
    data, options = example(path.parent / "again")
    return BENCHMARKS[name](path.parent / data.relative_to(path.parent / "again"), options)


def write_grids(folder: Path) -> None:
    """A dataset of one prompt with two grid images."""
    write_jsonl(folder / "diverse.jsonl", [PROMPT | {"idx": "i"}])
    files = [folder / "grids/i" / name for name in ("a.png", "b.png")]
    for file in files:
        write_atomic(file, (folder / file.name).read_bytes())
    DatasetStep(folder, "generate").finish(outputs=files, counts={})


JSONL: dict[str, tuple[Any, Callable[[Path], Any]]] = {
    "comparisons.jsonl": (COMPARISON, lambda path: comparisons_from(str(path))),
    "prompts.jsonl": (PROMPT, load_prompts),
    "edits.jsonl": (EDIT, load_prompts),
    "rankings.jsonl": (RANKING, load_rankings),
    "instances.jsonl": (INSTANCE, read_instances),
    "answers.jsonl": (ANSWER, read_answers),
    "dataset_prompts.jsonl": (PROMPT | {"idx": "i"}, read_prompts),
}
DOCUMENTS: dict[str, tuple[Any, Callable[[Path], Any]]] = {
    "rankings.csv": (CSV, load_rankings),
    "journal/j.jsonl": ({"key": "k", "score": 1.5}, Journal),
    "manifests/s.json": (
        {"plan": {}, "outputs": {"a.png": "0"}, "counts": {"n": 1}},
        lambda path: DatasetStep(path.parents[1], "s").counts_if_done(),
    ),
    "calibration.json": (CALIBRATION, read_calibration),
    "taxonomy.yaml": (yaml.safe_load(PAPER.read_text(encoding="utf-8")), read_taxonomy),
    "storyboard.yaml": (STORY, read_storyboard),
    "policy.yaml": (load(PolicyConfig, recipe()).model_dump(mode="json"), partial(load, PolicyConfig)),
    "judge.yaml": (load(JudgeConfig, recipe("reward/tiny")).model_dump(mode="json"), partial(load, JudgeConfig)),
}

# --- images and weights -----------------------------------------------------------------------------------------


def read_image(path: Path) -> None:
    upright_size.cache_clear()
    image = open_image(path)
    assert (image.mode, upright_size(path)) == ("RGB", Size(image.height, image.width))
    png_texts(path)


@cache
def generator() -> Any:
    return flux_policy().transformer


def write_lora(folder: Path, *, file: str) -> None:
    """An adapter of the tiny generator, in one of the two forms that are written."""
    layers = {name: module for name, module in generator().named_modules() if name.endswith(("attn.to_q", "attn.to_k"))}
    state = {}
    for name, layer in list(layers.items())[:3]:
        state[f"{name}.lora_A.weight"] = torch.ones(2, layer.in_features)
        state[f"{name}.lora_B.weight"] = torch.ones(layer.out_features, 2)
    save_lora(folder, state, rank=2, alpha=4, targets=("to_q", "to_k"), base="tiny")
    for other in {"adapter_model.safetensors", "pytorch_lora_weights.safetensors"} - {file}:
        (folder / other).unlink()


def read_lora(path: Path) -> None:
    model = copy.deepcopy(generator())
    load_lora(model, {str(path.parent): 1.0})
    weights = [value for name, value in model.named_parameters() if "lora" in name]
    assert weights
    assert all(torch.isfinite(value).all() for value in weights)


BENCHMARK_FILES = [
    (0, "prompt_data.jsonl"),
    (0, "consistency_full_rank.jsonl"),
    (1, "rows.jsonl"),
    (2, "rows.jsonl"),
    (3, "rows.json"),
    *((4, file) for file in ("T2IS-Bench.json", "prompt_consistency.json", "prompt_alignment.json")),
    (5, "rows.jsonl"),
]
"""Numbers of `EXAMPLES`, and a file of each."""
PEFT, DIFFUSERS = "adapter_model.safetensors", "pytorch_lora_weights.safetensors"
READERS: dict[str, tuple[str, Reader]] = {
    **{name: (name, Reader({name: good}, read, counts=True)) for name, (good, read) in JSONL.items()},
    **{name: (name, Reader({name: good}, read)) for name, (good, read) in DOCUMENTS.items()},
    **{name: (name, Reader(RUN, read_run_and_card, names=("/run",))) for name in RUN if name != "run/adapter/.keep"},
    # An entry that names other columns finds its own file at fault.
    **{name: (name, Reader(SHAREGPT, read_sharegpt, names=("d.json", ":d", "dataset_info"))) for name in SHAREGPT},
    **{
        f"{EXAMPLES[number][0]} {number} {file}": (
            file,
            Reader(EXAMPLES[number][1], partial(read_benchmark, number=number)),
        )
        for number, file in BENCHMARK_FILES
    },
    "import of rankings": (
        "rankings.csv",
        Reader({"rankings.csv": CSV}, lambda path: joined_rankings(path.parent / "set", [path])),
    ),
    # The image that it names, or a prompt without enough grids, may be at fault.
    "grids": (
        "manifests/generate.json",
        Reader(write_grids, lambda path: pair(path.parents[1]), names=("/work/", "i: ", "grids/")),
    ),
    "card.yaml": (
        "hero/card.yaml",
        Reader({"hero/card.yaml": CARD, "hero/a.png": IMAGE}, lambda path: read_character(path.parent)),
    ),
    "image": ("a.png", Reader({}, read_image)),
    "upload": ("a.png", Reader({}, lambda path: submit_upload(read_bytes(path), name="a.png").result())),
    **{
        f"{form} {file}": (file, Reader(partial(write_lora, file=form), read_lora, names=(form, "/work")))
        for form, file in ((PEFT, PEFT), (PEFT, "adapter_config.json"), (DIFFUSERS, DIFFUSERS))
    },
}

# --- the property -----------------------------------------------------------------------------------------------


class Overdue(BaseException):
    """An input stands still; no handler of the program catches it."""


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """End what stands still or takes too much memory, and fail what takes too much of a processor."""

    def stop(*_: object) -> None:
        raise Overdue

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    handler, started = signal.signal(signal.SIGALRM, stop), time.process_time()
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.process_time() - started < SECONDS


def outcome(name: str, work: Path, *, what: str = "good") -> str:
    """Read the file of a reader: "" if it is accepted, else the line of its refusal."""
    file, reader = READERS[name]
    said, results = io.StringIO(), list[Any]()
    with limits(), contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = exit_code(lambda: results.append(reader.read(work / file)))
    line = said.getvalue().strip()
    if code == 0:
        assert not what.startswith("must"), f"{what}: accepted"
        if reader.counts:
            assert len(results[0]) == sum(bool(text.strip()) for text in read_text(work / file).split("\n")), what
        return ""
    # Warnings stand before the line, details are indented below it.
    lines = [text for text in line.split("\n") if not text.startswith(("  ", "/"))]
    assert (code, lines[-1].startswith("pacorl: "), len(lines) <= 3) == (1, True, True), f"{what}: {code} {line}"
    assert any(known in line for known in (Path(file).name, *reader.names)), f"{what}: names no file: {line}"
    if what == "value" and reader.counts and "missing" not in line:  # images, which are listed
        assert re.search(rf"{re.escape(Path(file).name)}(:|, line |, record )\d+", line), (
            f"{what}: names no line: {line}"
        )
    return line


@pytest.fixture(params=READERS)
def good(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """A reader, and the folder of its good files."""
    (tmp_path / "good").mkdir()
    READERS[request.param][1].write(tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "work")
    assert outcome(request.param, tmp_path / "work") == ""
    return request.param, tmp_path / "good"


@pytest.mark.parametrize(
    ("seed", "inputs"), [pytest.param(1, 25, id="few"), pytest.param(2, 400, id="many", marks=pytest.mark.nightly)]
)
@pytest.mark.filterwarnings("ignore")  # of Pillow and PEFT, about what is wrong; a command prints them
def test_a_damaged_file_is_read_or_named(good: tuple[str, Path], seed: int, inputs: int) -> None:
    name, folder = good
    file, _ = READERS[name]
    work, refused = folder.with_name("work"), 0
    for number in range(inputs):
        shutil.rmtree(work)
        shutil.copytree(folder, work)
        what = damage(work / file, random.Random(f"{seed}/{name}/{number}"))
        try:
            refused += outcome(name, work, what=what) != ""
        except Exception as error:
            raise AssertionError(f"{name}: input {number} of seed {seed}, {what}") from error
    assert refused


WORST: list[tuple[str, Callable[[Path], object]]] = [
    ("comparisons.jsonl", lambda path: path.write_bytes(path.read_bytes().replace(b"true", b"9" * 5000))),
    ("comparisons.jsonl", lambda path: path.write_bytes(b'{"a":' * 3000)),
    ("journal/j.jsonl", lambda path: path.write_bytes(path.read_bytes().replace(b"1.5", b"NaN"))),
    ("prompts.jsonl", lambda path: put_in_place(path, "zeros")),
    ("policy.yaml", lambda path: path.write_bytes(b"out: !!python/object:os.system x\n")),
    ("policy.yaml", lambda path: path.write_bytes(path.read_bytes() + b"\nepochs: 3\nepochs: 4\n")),
    ("storyboard.yaml", lambda path: put_in_place(path, "pipe")),
    (f"{PEFT} {PEFT}", lambda path: change_tensors(path, "nan", random.Random(0))),
    (f"{DIFFUSERS} {DIFFUSERS}", lambda path: change_tensors(path, "inf", random.Random(0))),
    (f"{DIFFUSERS} {DIFFUSERS}", lambda path: path.write_bytes(b"\xff" * 7 + b"\x7f" + path.read_bytes()[8:])),
]
"""Inputs that were once accepted in silence, took minutes or gigabytes, or ended in a traceback."""


def refusal(name: str, work: Path, spoil: Callable[[Path], object]) -> str:
    """The line by which a reader refuses its good file once that is spoilt."""
    work.mkdir()
    file, reader = READERS[name]
    reader.write(work)
    spoil(work / file)
    return outcome(name, work, what="must")


@pytest.mark.parametrize(("name", "spoil"), WORST)
@pytest.mark.filterwarnings("ignore")
def test_the_worst_inputs_are_refused(name: str, spoil: Callable[[Path], object], tmp_path: Path) -> None:
    assert refusal(name, tmp_path / "work", spoil) != ""


# --- faults that only a reader knows ----------------------------------------------------------------------------

SET = "1x2 grid layout of a fox. [LEFT]: The fox naps. [RIGHT]: The fox runs."
RANKS, CASES = "consistency-rank 0 consistency_full_rank.jsonl", "t2is 4 T2IS-Bench.json"
EDITED, COMPARED, COMPASS, GEDIT = (
    f"{EXAMPLES[number][0]} {number} {file}" for number, file in BENCHMARK_FILES if file.startswith("rows")
)
FAULTS: list[tuple[str, dict[str, Any], str]] = [
    *(("prompts.jsonl", {"prompt": value}, "prompt") for value in (" ", 7)),
    *(("prompts.jsonl", {"layout": value}, value) for value in ("two", "0x2")),
    ("prompts.jsonl", {"prompt": SET, "layout": "2x2"}, "2x2"),
    ("prompts.jsonl", {"panels": ["runs", "stops", "sits"]}, "2x1"),
    *(("prompts.jsonl", {"panels": value}, "panels") for value in ("b", [" ", "b"], [3])),
    ("prompts.jsonl", {"pannels": ["b"]}, "'panels'"),
    ("prompts.jsonl", {"characters": {"ann": {"images": ["none.png"]}}}, "none.png"),
    *(("prompts.jsonl", {"references": value}, str(value[-1])) for value in (["../../secret.png"], ["none.png"])),
    *(("edits.jsonl", {"image": value}, value) for value in ("gone.png", "../a.png", "/etc/hostname")),
    ("edits.jsonl", {"panels": ["one", "two"]}, "panels"),
    ("comparisons.jsonl", {"question": " "}, "question"),
    *(("comparisons.jsonl", {"consistent": value}, "consistent") for value in (None, "yes")),
    ("comparisons.jsonl", {"question": "<image>Same?"}, "<image>"),
    ("comparisons.jsonl", {"reasons": "R.<|im_end|>"}, "<|im_end|>"),
    *(("rankings.jsonl", {"candidates": value}, "candidates") for value in ("a | b", ["a", []], ["a", ["b", 3]])),
    *(("rankings.jsonl", {"candidates": value}, "a.png") for value in (["b.png", "a.png"], ["a.png"])),
    ("instances.jsonl", {"candidates": ["b.png"]}, "b.png"),
    *(("dataset_prompts.jsonl", {"idx": value}, "idx") for value in ("../x", None)),
    *(
        ("d.json", {"images": value}, word)
        for value, word in (("a.png", "images"), (["../a.png", "a.png"], "../a.png"))
    ),
    ("d.json", {"messages": [TURNS[0], {"role": "assistant", "content": "Yesterday."}]}, "Yesterday"),
    *(("d.json", {"messages": value}, "messages") for value in (TURNS[:1], [TURNS[0], {"role": "assistant"}], None)),
    ("d.json", {"messages": [{"role": "user", "content": "<image>q<|im_end|>"}, TURNS[1]]}, "<|im_end|>"),
    ("card.yaml", {"keep": {"shoes": "red"}}, "shoes"),
    *(("storyboard.yaml", {"layout": value}, word) for value, word in (("wide", "2x2"), ("9x9", "81"))),
    ("storyboard.yaml", {"characters": ["eve"]}, "'eve'"),
    ("storyboard.yaml", {"scenes": ["{bob} runs"] * 4}, "'bob'"),
    *(("calibration.json", {"thresholds": {"panels": {"4": value}}}, "4") for value in (-0.1, 1.1, "0.5")),
    *((RANKS, {"rank_images": value}, "rank_images") for value in (["0_1.png"], None)),
    *((RANKS, {"ref_image": value}, value) for value in ("9_9.png", "../../../secret.png")),
    (RANKS, {"folder": "0009"}, "0009"),
    *((EDITED, {key: value}, key) for key, value in (("key", ["only"]), ("dimension", "beauty"), ("task_type", None))),
    *((COMPARED, {key: value}, key) for key, value in (("winner", "Tie"), ("task", None))),
    *((CASES, {key: None}, key) for key in ("sub_caption", "instruction")),
    (GEDIT, {"key": "../k"}, "../k"),
    ("grids", {"outputs": {"../i/secret.png": "0", "grids/i/a.png": "0"}}, "../i/secret.png"),
]
"""A reader, a change of a record of its good file, None for its loss, and what the refusal names."""


@pytest.mark.parametrize(("name", "change", "named"), FAULTS)
def test_a_faulty_value_is_refused_by_its_name(name: str, change: dict[str, Any], named: str, tmp_path: Path) -> None:
    def spoil(path: Path) -> None:
        text = path.read_text()
        if path.suffix == ".jsonl":
            first, second, *others = text.splitlines()
            path.write_text("\n".join([first, json.dumps(changed(json.loads(second), change)), *others]))
            return
        document = yaml.safe_load(text)
        record = document[0] if isinstance(document, list) else document
        record = record["0001_0001"] if name == CASES else record
        kept = changed(record, change)
        record.clear()
        record |= kept
        write_document(path, document)

    assert named in refusal(name, tmp_path / "work", spoil)


def changed(record: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in (record | change).items() if value is not None}


TWICE = ["instances.jsonl", "answers.jsonl", "dataset_prompts.jsonl", RANKS, GEDIT]


@pytest.mark.parametrize("name", TWICE)
def test_a_record_that_stands_twice_is_refused(name: str, tmp_path: Path) -> None:
    def spoil(path: Path) -> None:
        path.write_text(path.read_text() + path.read_text().splitlines()[-1])

    assert refusal(name, tmp_path / "work", spoil) != ""
