"""`pacorl generate`: sets, edits and storyboards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from pacorl.engine.generator import Generator
    from pacorl.generate.files import Saved
    from pacorl.generate.sets import Made
    from pacorl.score.reward import PacoReward
    from pacorl.types import Prompt


def register(app: typer.Typer) -> None:
    """Adds this file's command."""
    app.command("generate")(generate)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be painted: prompts, or a storyboard."""

    title: str
    prompts: list[Prompt]
    board: Any = None


def generate(
    *,
    prompt: str = typer.Option("", help="What all panels share, or a whole prompt with panel tags."),
    panel: list[str] = typer.Option([], help="What one panel shows; repeat it, row by row."),
    layout: str = typer.Option("", help="ROWSxCOLS of the panels; the squarest if left out."),
    record: str = typer.Option("", help="A T2IS record, as FILE.jsonl:IDX (or a line number)."),
    storyboard: Path | None = typer.Option(None, help="A YAML of characters, style and scenes."),
    image: list[Path] = typer.Option([], help="A picture to edit; may be repeated for editors of several."),
    instruction: str = typer.Option("", help="What to change in it."),
    model: str = typer.Option("tiny", help="A diffusers folder, a hub name, or the embedded tiny generator."),
    kind: str = typer.Option("", help="The policy that runs the model; found out from it if left out."),
    adapter: str = typer.Option("", help="A LoRA of any form: folder, file, ORG/NAME or ORG/NAME:FILE on the hub."),
    size: str = typer.Option("", help="HEIGHTxWIDTH of a sheet; the record's, 128x128 for tiny, else 1024x1024."),
    steps: int | None = typer.Option(None, min=1, help="Denoising steps; 10 for tiny, else 20."),
    guidance_scale: float | None = typer.Option(None, min=0, help="Guidance scale; the model's own default."),
    true_cfg_scale: float | None = typer.Option(
        None, min=1, help="True guidance, with a second pass; the model's default."
    ),
    negative_prompt: str | None = typer.Option(None, help="What true guidance steers away from."),
    max_sequence_length: int | None = typer.Option(
        None, min=1, help="Text tokens per prompt; the model's own default."
    ),
    seed: int = typer.Option(0, min=0, help="Of the first picture; the next ones count on from it."),
    count: int = typer.Option(1, min=1, help="Pictures per prompt."),
    best_of: int = typer.Option(1, min=1, help="Paint so many candidates for each, and keep the judge's best."),
    keep_all: bool = typer.Option(False, "--keep-all", help="Keep every candidate, with its rank in the name."),
    judge: str = typer.Option("", help="Who ranks and scores: folder, hub name, URL, endpoints YAML, or tiny."),
    ask: str = typer.Option("theme", help="What the judge is asked of pairs: the theme, or the written criteria."),
    judge_model: str = typer.Option("", help="The judge's name at a server."),
    judge_adapter: str = typer.Option("", help="A PEFT adapter on the judge's checkpoint."),
    api_key_env: str = typer.Option("", help="The environment variable that holds the judge server's key."),
    out: Path = typer.Option(Path("generated"), help="The folder for the pictures."),
    report: Path | None = typer.Option(None, help="Also write a self-contained page (a storyboard always gets one)."),
    pdf: Path | None = typer.Option(None, help="Also write the sheets as a PDF."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Paint sets of pictures, edits and storyboards; each PNG says what made it."""
    wanted = _wanted(
        prompt=prompt,
        panels=panel,
        layout=layout,
        record=record,
        storyboard=storyboard,
        images=image,
        instruction=instruction,
        model=model,
    )
    painted_size = _size(size)
    if ask not in ("theme", "criteria"):
        raise ValueError(f"--ask is theme or criteria, not {ask!r}")
    judging = _Judging(judge or ("tiny" if best_of > 1 and model == "tiny" else ""), best_of)
    if keep_all and storyboard:
        raise ValueError("--keep-all and --storyboard do not go together: a later page depends on the choice before it")
    if storyboard and count > 1:
        raise ValueError(f"--count {count} and --storyboard do not go together; give another --seed instead")

    from pacorl.engine.threads import use_cores
    from pacorl.io.quiet import quiet_loading

    quiet_loading()
    use_cores()
    painter = _load(
        model,
        image,
        kind=kind,
        adapter=adapter,
        guidance_scale=guidance_scale,
        true_cfg_scale=true_cfg_scale,
        negative_prompt=negative_prompt,
        max_sequence_length=max_sequence_length,
    )
    options: dict[str, Any] = {"size": painted_size, "steps": steps, "seed": seed, "best_of": best_of, "ask": ask}
    if not wanted.board:
        painter.check(wanted.prompts, painted_size)
    with judging:
        reward = judging.open(model=judge_model, adapter=judge_adapter, api_key_env=api_key_env)
        made = _paint(painter, wanted, reward, options, count=count, keep_all=keep_all, shown=not as_json)
    _deliver(made, wanted, out, painter, reward, report=report, pdf=pdf, as_json=as_json)


# --- what is wanted --------------------------------------------------------------------------------------------


def _wanted(
    *,
    prompt: str,
    panels: Sequence[str],
    layout: str,
    record: str,
    storyboard: Path | None,
    images: Sequence[Path],
    instruction: str,
    model: str,
) -> Wanted:
    """Reads what is asked for, before anything heavy is loaded."""
    given = {"--prompt": prompt, "--record": record, "--storyboard": storyboard, "--instruction": instruction}
    chosen = [name for name, value in given.items() if value]
    if len(chosen) != 1:
        raise ValueError(f"give one of {', '.join(given)}" + (f", not {' and '.join(chosen)}" if chosen else ""))
    if panels and not prompt:
        raise ValueError(f"--panel goes with --prompt, not with {chosen[0]}")
    if layout and not prompt:
        raise ValueError(f"--layout goes with --prompt; {chosen[0]} says its own")
    if bool(images) != bool(instruction):
        raise ValueError("an edit needs both --image and --instruction")
    if storyboard:
        return _board(storyboard, model)
    if instruction:
        return Wanted(instruction, [_edit(images, instruction, model)])
    if record:
        one = _record(record, model)
        return Wanted(one.theme or one.text[:80], [one])
    return Wanted(prompt[:80], [_set(prompt, panels, layout, model)])


def _board(path: Path, model: str) -> Wanted:
    from pacorl.generate.storyboard import pages, read_storyboard

    board = read_storyboard(path)
    return Wanted(board.title, pages(board, model), board)


def _set(prompt: str, panels: Sequence[str], layout: str, model: str) -> Prompt:
    from pacorl.core.grid import parse_layout
    from pacorl.generate.compose import prompt_from

    return prompt_from(model, theme=prompt, panels=panels, grid=parse_layout(layout) if layout else None)


def _edit(images: Sequence[Path], instruction: str, model: str) -> Prompt:
    from pacorl.generate.compose import check_for
    from pacorl.io.images import open_image
    from pacorl.types import Prompt

    for path in images:
        open_image(path)  # refused by name before weights are loaded
    prompt = Prompt(id=0, text=instruction, sources=tuple(images))
    check_for(model, prompt)
    return prompt


def _record(record: str, model: str) -> Prompt:
    from pacorl.generate.compose import check_for
    from pacorl.generate.records import find_record

    found = find_record(record)
    check_for(model, found)
    return found


def _size(text: str) -> Any:
    if not text:
        return None
    from pacorl.core.grid import parse_layout
    from pacorl.types import Size

    try:
        sides = parse_layout(text)
    except ValueError:
        raise ValueError(f"--size {text!r} is not of the form HEIGHTxWIDTH, e.g. 1024x1024") from None
    return Size(sides.rows, sides.cols)


# --- painting --------------------------------------------------------------------------------------------------


def _load(model: str, images: Sequence[Path], **options: Any) -> Generator:
    from pacorl.engine.generator import Generator
    from pacorl.policies import kind_of

    options["kind"] = options["kind"] or kind_of(model, edits=bool(images))
    return Generator.load(model, **options)


class _Judging:
    """The judge, if one is wanted, let go of at the end."""

    def __init__(self, source: str, best_of: int) -> None:
        if best_of > 1 and not source:
            raise ValueError(f"--best-of {best_of} needs a judge to say which; name one with --judge")
        self.source = source
        self.reward: PacoReward | None = None

    def open(self, **options: Any) -> PacoReward | None:
        if self.source:
            from pacorl.score.reward import PacoReward

            self.reward = PacoReward.from_pretrained(self.source, **options)
        return self.reward

    def __enter__(self) -> _Judging:
        return self

    def __exit__(self, *fault: object) -> None:
        if self.reward:
            self.reward.close()


def _paint(
    painter: Generator,
    wanted: Wanted,
    reward: PacoReward | None,
    options: dict[str, Any],
    *,
    count: int,
    keep_all: bool,
    shown: bool,
) -> list[Made]:
    from pacorl.generate.sets import generate_sets
    from pacorl.generate.storyboard import paint_storyboard

    judge = reward.judge if reward else None
    steps = options["steps"] or painter.default_steps
    total = len(wanted.prompts) * count * options["best_of"] * steps
    with _bar(total, shown=shown) as advance:
        if wanted.board:
            return paint_storyboard(painter, wanted.board, judge=judge, on_step=advance, **options)
        return generate_sets(
            painter, wanted.prompts, judge=judge, count=count, keep_all=keep_all, on_step=advance, **options
        )


def _bar(total: int, *, shown: bool) -> Any:
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    @contextmanager
    def bar() -> Any:
        columns = (TextColumn("painting"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), disable=not shown, transient=True) as progress:
            task = progress.add_task("painting", total=total)
            advance: Callable[[int], None] = lambda pictures: progress.advance(task, pictures)  # noqa: E731
            yield advance

    return bar()


# --- handing over ----------------------------------------------------------------------------------------------


def _deliver(
    made: Sequence[Made],
    wanted: Wanted,
    out: Path,
    painter: Generator,
    reward: PacoReward | None,
    *,
    report: Path | None,
    pdf: Path | None,
    as_json: bool,
) -> None:
    from pacorl.generate import files

    judge = reward.name if reward else ""
    notes = [note for note in (painter.note, reward.note if reward else "") if note]
    for note in notes:  # before any number
        typer.echo(note, err=True)
    saved = files.save(made, out, judge=judge, stem="page" if wanted.board else "")
    page = report or (out / "storyboard.html" if wanted.board else None)
    if page:
        files.write_page(page, saved, title=wanted.title, notes=notes, judge=judge)
    if pdf:
        files.save_pdf(made, pdf, title=wanted.title)
    if as_json:
        _print_json(saved, painter, judge, notes, page)
    else:
        for one in saved:
            typer.echo(_line(one))
    for line in [*([f"page: {page}"] if page else []), *([f"pdf: {pdf}"] if pdf else [])]:
        typer.echo(line, err=True)


def _line(saved: Saved) -> str:
    made, judged = saved.made, saved.made.judged
    told = [str(saved.sheet), f"seed {made.recipe.seed}"]
    if judged and judged.score is not None:
        told.append(f"score {judged.score:.4f}")
    if judged and judged.error:
        told.append(f"no score: {judged.error}")
    if made.candidates > 1:
        told.append(f"number {made.rank} of {made.candidates}")
    return "  ".join(told)


def _print_json(
    saved: Sequence[Saved], painter: Generator, judge: str, notes: Sequence[str], page: Path | None
) -> None:
    import json

    from pacorl.generate.files import to_dict

    document = {
        "model": painter.model,
        "adapter": painter.adapter,
        "judge": judge,
        "notes": list(notes),
        "page": str(page) if page else None,
        "made": [to_dict(one) for one in saved],
    }
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
