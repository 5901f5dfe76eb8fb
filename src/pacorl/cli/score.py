"""`pacorl score`: do these pictures belong together?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pacorl.score.reward import Scores

INCOMPLETE = 3
"""Exit code if --keep-going left an image out, or a pair has no score."""


def register(app: typer.Typer) -> None:
    """Adds this file's commands."""
    app.command("score")(score)


def score(
    images: list[str] = typer.Argument(help="Two images or more, files or URLs; with --grid, one."),
    *,
    judge: str = typer.Option(
        "tiny", help="A model's or LoRA's folder or hub name, a server's URL or an endpoints YAML."
    ),
    model: str = typer.Option("", help="The judge's name at a server."),
    adapter: str = typer.Option("", help="A PEFT adapter on top of the checkpoint."),
    api_key_env: str = typer.Option("", help="The environment variable that holds the server's key."),
    theme: str = typer.Option("", help="What all pictures are to share."),
    criteria: list[str] = typer.Option([], help="A criterion in words, or a JSON file of them; may be repeated."),
    grid: str = typer.Option("", help="Cut the one picture into ROWSxCOLS panels, e.g. 2x2."),
    rank: bool = typer.Option(
        False, "--rank", help="Rank the pictures after the first by how well they fit the first."
    ),
    symmetric: bool = typer.Option(False, "--symmetric", help="Ask in both orders and take the mean."),
    reasons: bool = typer.Option(False, "--reasons", help="Have the judge explain every pair."),
    temperature: float = typer.Option(
        1.0, help="Divides the judge's logit; above 1 tells apart what it is too sure of."
    ),
    report: Path | None = typer.Option(None, help="Write a self-contained page."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    keep_going: bool = typer.Option(False, "--keep-going", help="Leave out what cannot be used; exit with code 3."),
) -> None:
    """Score how well pictures belong together: P(Yes) for two, a matrix and the odd one out for more."""
    from pacorl.core.grid import parse_layout
    from pacorl.engine.threads import use_cores
    from pacorl.score import reward as scoring
    from pacorl.score.page import table, write_page

    use_cores()
    asked = scoring.questions_about(theme, scoring.read_criteria(criteria))
    names, pictures, refused = scoring.open_images(images, keep_going=keep_going)
    if grid:
        if len(pictures) != 1:
            raise ValueError(f"--grid cuts one picture, {len(pictures)} are given")
        names, pictures = scoring.cut(names[0], pictures[0], parse_layout(grid))
    scoring.check_count(len(pictures), ranking=rank)
    how = scoring.rank if rank else scoring.score_set
    with scoring.PacoReward.from_pretrained(
        judge, adapter=adapter, model=model, api_key_env=api_key_env, temperature=temperature
    ) as reward:
        name, note = reward.name, reward.note
        if note:  # before any number
            typer.echo(note, err=True)
        scores = how(reward.judge, pictures, names=names, asked=asked, symmetric=symmetric, reasons=reasons)
        _check_complete(scores, keep_going=keep_going)
    _print_json(scores, judge=name, note=note, refused=refused) if as_json else typer.echo(table(scores, ranking=rank))
    for line in refused.values():
        typer.echo(line, err=True)
    if report:
        write_page(report, scores, judge=name, note=note, theme=theme, ranking=rank, refused=refused)
        typer.echo(f"page: {report}", err=True)
    if refused or scores.missing:
        raise typer.Exit(INCOMPLETE)


def _check_complete(scores: Scores, *, keep_going: bool) -> None:
    failed = [pair for pair in scores.missing if not pair.declined]
    if failed and not keep_going:
        first = failed[0]
        raise RuntimeError(
            f"{len(failed)} of {len(scores.pairs)} pairs have no score, the first because: {first.error}; "
            "--keep-going prints the others"
        )


def _print_json(scores: Scores, *, judge: str, note: str, refused: dict[str, str]) -> None:
    import json

    document = {"judge": judge, "note": note} | scores.to_dict() | {"left_out": refused}
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
