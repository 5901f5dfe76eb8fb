"""`pacorl twin`: a checkpoint of random weights, to try a recipe's memory and speed without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from typer import Argument, Option

from pacorl.cli.shared import echo

JUDGE_NAME = "judge"
"""The judge with the first base."""


def twin(
    kind: str = Argument(help="A model.kind (flux, kontext, qwen_edit, …), judge, or Qwen3.5-9B."),
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

    judge = JUDGES["local"]
    if kind == JUDGE_NAME or kind in judge.bases:
        base = next(iter(judge.bases)) if kind == JUDGE_NAME else kind
        write_judge(judge, folder, base=base, width=width, depth=depth)
        key = "judge.checkpoint"
    else:
        write_generator(POLICIES.named(kind), folder, width=width, depth=depth)
        key = "model.checkpoint"
    written = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    echo(f"{folder}: {written / 2**30:.2f} GiB of random weights; try a recipe on them with {key}={folder}")
