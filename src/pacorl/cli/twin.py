"""`pacorl twin`: a checkpoint of random weights, to try a recipe's memory and speed without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from typer import Argument, Option

from pacorl.cli.shared import echo

JUDGE_NAME = "judge"


def twin(
    kind: str = Argument(help="A model.kind (flux, kontext, qwen_edit, …), or judge."),
    folder: Path = Argument(help="Where the checkpoint is written; a new folder."),
    *,
    width: Literal["published", "tiny"] = Option(
        "published", help="published: the released shapes in bf16; tiny: the tiny twin's."
    ),
    depth: int = Option(None, min=1, max=1000, help="Blocks of the transformer or the judge; all by default."),
) -> None:
    """Write a checkpoint of random weights. It makes noise, at the released model's cost in memory and time."""
    from pacorl.judge import JUDGES
    from pacorl.lab.twin import write_generator, write_judge
    from pacorl.models.policies import POLICIES

    if kind == JUDGE_NAME:
        write_judge(JUDGES["local"], folder, width=width, depth=depth)
        key = "judge.checkpoint"
    else:
        write_generator(POLICIES.named(kind), folder, width=width, depth=depth)
        key = "model.checkpoint"
    written = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    echo(f"{folder}: {written / 2**30:.2f} GiB of random weights; try a recipe on them with {key}={folder}")
