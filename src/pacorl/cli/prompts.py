"""`pacorl prompts`: are training prompts also measured on, and splits that keep them apart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pacorl.cli.output import print_json

if TYPE_CHECKING:
    from pacorl.types import Prompt

app = typer.Typer(no_args_is_help=True, help="Check and split files of prompts and edits.")

SOURCE = typer.Argument(help="A .jsonl, .txt, .parquet or .json of prompts, or tiny:train|dev|test.")
AGAINST = typer.Option(..., "--against", help="Prompts that results are reported on; may be given several times.")
NEAR = typer.Option(None, "--near", min=0, max=1, help="Share of word triples from which two texts count as one.")


@app.command("check")
def check(
    source: str = SOURCE,
    against: list[str] = AGAINST,
    near: float = NEAR,
    as_json: bool = typer.Option(False, "--json", help="One JSON object with every leak."),
) -> None:
    """Say which prompts are also in the others; exit code 1 where any is."""
    from pacorl.data.leaks import find_leaks, leak_report
    from pacorl.data.records import prompts_from

    train = prompts_from(source)
    leaks = find_leaks(train, {name: prompts_from(name) for name in against}, near=near)
    if as_json:
        rows = [
            {
                "prompt": leak.prompt.id,
                "text": leak.prompt.text,
                "in": leak.against,
                "is": leak.other.id,
                "why": leak.why,
            }
            for leak in leaks
        ]
        print_json({"prompts": len(train), "leaks": rows})
    else:
        typer.echo(leak_report(leaks, total=len(train)) or f"none of {len(train)} prompts is in {', '.join(against)}")
    raise typer.Exit(1 if leaks else 0)


@app.command("split")
def split(
    source: str = SOURCE,
    *,
    out: Path = typer.Option(..., help="A folder for train.jsonl and test.jsonl."),
    test: int = typer.Option(128, min=1, help="About how many to hold out; what belongs together stays together."),
    seed: int = typer.Option(42, help="Of the draw."),
    keep_out: list[str] = typer.Option([], "--keep-out", help="Benchmarks whose prompts go to neither side."),
    near: float = NEAR,
) -> None:
    """Split prompts into training and test, benchmarks kept out of both."""
    from pacorl.data.leaks import split_prompts
    from pacorl.data.records import prompts_from

    benchmarks = {name: prompts_from(name) for name in keep_out}
    train, held, leaks = split_prompts(prompts_from(source), test=test, seed=seed, keep_out=benchmarks, near=near)
    for name, part in (("train", train), ("test", held)):
        _save(part, out / f"{name}.jsonl")
    typer.echo(f"{out}: {len(train)} to train on, {len(held)} to test on, {len(leaks)} kept out")


def _save(prompts: list[Prompt], path: Path) -> None:
    from pacorl.data.leaks import save_edits
    from pacorl.data.records import save_prompts

    edits = any(prompt.sources for prompt in prompts)
    save_edits(prompts, path) if edits else save_prompts(prompts, path)
