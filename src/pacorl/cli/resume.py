"""`--resume`, with a value or without: a bare one means `auto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

FLAG, AUTO = "--resume", "auto"


class ResumableCommand(TyperCommand):
    """A command whose `--resume` may stand alone, which options of text may not."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spelled_out(args))


def spelled_out(args: Sequence[str]) -> list[str]:
    """The arguments with `auto` after a `--resume` that nothing follows which could be a checkpoint's folder."""
    full: list[str] = []
    for place, word in enumerate(args):
        full.append(word)
        if word == FLAG and not _names_a_checkpoint(args[place + 1 : place + 2]):
            full.append(AUTO)
    return full


def _names_a_checkpoint(following: Sequence[str]) -> bool:
    return any(not (word.startswith("-") or "=" in word or word.endswith((".yaml", ".yml"))) for word in following)
