"""Runs whose checkpoints somebody damaged: resumed, they end as if they had never stopped, or name the file."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

from qa.attack.damage import damage_bytes, damage_file, damage_value
from qa.attack.harness import Target, WrongError

OVERRIDES = ("epochs=3", "group_size=2", "evaluation.every=1", "prompts.evaluation=tiny:dev:1")
REFERENCE = "reference"


def prepare(folder: Path) -> None:
    """A run that ended after three epochs, and its twin that still has one to go."""
    from toy_world import toy_config, toy_world

    from pacorl.grpo.trainer import train_policy

    with toy_world(), contextlib.chdir(folder):  # the config says where the run is, and it will be moved
        train_policy(toy_config(Path("run"), *OVERRIDES))
        shutil.copytree("run", REFERENCE)
        newest = sorted((folder / "run/checkpoints").glob("step-*"))[-1]
        shutil.rmtree(newest)


def files_of(folder: Path) -> list[Path]:
    run = folder / "run"
    paths = [path for path in sorted((run / "checkpoints").rglob("*")) if path.is_file()]
    return [*paths, run / "config.yaml"]


def mutate(folder: Path, draw: random.Random) -> str:
    """Damages a file, or several, of the run's checkpoints or beside them."""
    said = []
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        paths = files_of(folder)
        # Half of the time the newest checkpoint's, which is the one that is read.
        newest = [
            path for path in paths if path.parent.name == max(p.name for p in (folder / "run/checkpoints").iterdir())
        ]
        path = draw.choice(newest or paths) if draw.random() < 0.5 else draw.choice(paths)
        what = draw.choices(["bytes", "file", "value"], [50, 25, 25])[0]
        if what == "value" and path.suffix == ".json":
            what = damage_value(path, draw)
        elif what == "file":
            what = damage_file(path, draw)
        else:
            what = damage_bytes(path, draw)
        said.append(f"{what} in {path.relative_to(folder / 'run')}")
    return "; ".join(said)


def resume(folder: Path) -> None:
    """Resumes as `pacorl train-policy --resume auto` does. Raises WrongError if the run ends otherwise."""
    from toy_world import toy_config, toy_world

    from pacorl.grpo.trainer import train_policy

    with toy_world(), contextlib.chdir(folder):
        train_policy(toy_config(Path("run"), *OVERRIDES), resume="auto")
    for name, (reference, value) in _compared(folder):
        if reference != value:
            raise WrongError("wrong", f"{name} differs from the run that was never stopped")


def _compared(folder: Path) -> Any:
    from pacorl.io.files import digests

    reference, run = folder / REFERENCE, folder / "run"
    yield "metrics.jsonl", (_lines(reference), _lines(run))
    ends = [sorted((path / "checkpoints").glob("step-*"))[-1] for path in (reference, run)]
    # Not diffusers' form of the adapter: safetensors writes a file's metadata in another order each time.
    names = ("adapter.safetensors", "average.safetensors", "optimizer.safetensors", "lora/adapter_model.safetensors")
    yield "the last checkpoint", tuple([digests(end).get(name) for name in names] for end in ends)
    yield "adapter/", tuple(digests(path / "adapter").get("adapter_model.safetensors") for path in (reference, run))
    yield "best.json", tuple((path / "checkpoints/best.json").read_text() for path in (reference, run))


def _lines(run: Path) -> list[dict[str, Any]]:
    """The log without clocks. A config that was damaged in a key which may change is such a change, and has a line."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] != "changes"]
    return [{key: value for key, value in row.items() if not key.startswith("seconds")} for row in rows]


def targets() -> list[Target]:
    names = ("step-0", "metrics.jsonl", "config.yaml", "work/run", "best.json")
    return [Target(name="checkpoints/policy", prepare=prepare, mutate=mutate, run=resume, names=names)]
