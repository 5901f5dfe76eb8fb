"""A run's folder, as a small run leaves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

EVIL = "<script>alert('\"&')</script>"
TEXT = "2x1 grid layout of a fox. [TOP]: A fox sleeps. [BOTTOM]: A fox <b>runs</b>."


def json_lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def write_evaluation(run: Path, epoch: int, p_yes: dict[int, float], **extra: Any) -> None:
    folder = run / "samples" / f"evaluation-{epoch:06d}"
    folder.mkdir(parents=True)
    records = []
    for prompt, value in p_yes.items():
        Image.new("RGB", (16, 32), (prompt, epoch, 90)).save(folder / f"{prompt:04d}.png")
        record = {"prompt_id": prompt, "seed": 7, "text": TEXT, "theme": "a fox", "grid": "2x1", "scores": {"valid": 1}}
        image = f"{folder.name}/{prompt:04d}.png"
        records.append(record | {"image": image, "p_yes": [[None, value], [value, None]]} | extra)
    (run / "samples" / f"evaluation-{epoch:06d}.jsonl").write_text(json_lines(*records))


def write_metrics(run: Path, *records: dict[str, Any]) -> Path:
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text(json_lines(*records))
    return run


def finished_run(folder: Path) -> Path:
    """A small finished run."""
    write_metrics(
        folder,
        {"kind": "evaluation", "epoch": 0, "p_yes": 0.3},
        {"kind": "epoch", "epoch": 0, "step": 0, "reward/fit/mean": 0.3, "reward/fit/std": 0.1, "loss": 0.5, "odd": 1},
        {"kind": "epoch", "epoch": 1, "step": 2, "reward/fit/mean": 0.4, "reward/fit/std": 0.1, "loss": 0.4, "odd": 2},
        {"kind": "evaluation", "epoch": 2, "p_yes": 0.7},
    )
    write_evaluation(folder, 0, {1: 0.25, 2: 0.5, 3: 0.75})
    write_evaluation(folder, 2, {1: 0.875, 2: 0.5, 4: 0.75})
    Image.new("RGB", (64, 64)).save(folder / "samples" / "epoch-000001.png")
    (folder / "config.yaml").write_text(f"title: {EVIL}\nlr: 0.001\n")
    interval = {"mean": 0.25, "low": 0.125, "high": 0.375}
    summary = {
        "title": f"Foxes {EVIL}",
        "judge": {"pair_accuracy": 0.98},
        "before": {"p_yes": interval},
        "after": {"p_yes": interval | {"mean": 0.75, "high": 0.875}},
        "difference": {"p_yes": interval},
        "seconds": {"training": 90.0, "evaluation": 30},
        "seed": 42,
        "verdict": ["It got better.", EVIL, "See below."],
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder
