"""`pacorl adapter`: what a LoRA file is, and the same adapter in the forms that every tool reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pacorl.lora.formats import Lora


def register(app: typer.Typer) -> None:
    """Adds this file's command."""
    app.command("adapter")(adapter)


def adapter(
    source: str = typer.Argument(
        help="A generator's LoRA: a safetensors file, a folder, or ORG/NAME[:FOLDER/FILE] on the hub."
    ),
    *,
    out: Path | None = typer.Option(None, help="A new folder for the adapter in PEFT's and diffusers' form."),
) -> None:
    """Say what an adapter is; with --out, write it so that pacorl, PEFT, diffusers and ComfyUI all read it."""
    from pacorl.lora.formats import DIFFUSERS_WEIGHTS, PEFT_WEIGHTS, read_lora, write_lora

    lora = read_lora(source)
    typer.echo(f"{source}: {_summary(lora)}")
    if out is None:
        return
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out {out} is not empty; name a new folder")
    write_lora(out, lora)
    typer.echo(f"wrote {out / PEFT_WEIGHTS} (pacorl, PEFT) and {out / DIFFUSERS_WEIGHTS} (diffusers, ComfyUI)")


def _summary(lora: Lora) -> str:
    scales = {lora.alphas[module] / rank for module, rank in lora.ranks.items()}
    parts = [
        f"{len(lora.alphas)} modules",
        f"rank {_span(lora.ranks.values())}",
        f"alpha {_span(lora.alphas.values())}",
    ]
    parts.append(f"scale {_span(scales)}")
    return ", ".join([*parts, *([f"trained on {lora.base}"] if lora.base else [])])


def _span(values: Iterable[float]) -> str:
    """One number, or the least and the most."""
    low, high = min(several := list(values)), max(several)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
