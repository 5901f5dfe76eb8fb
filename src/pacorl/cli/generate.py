"""`pacorl generate`: sets, edits and storyboards, and pages whose failing panels are drawn again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typer import Argument, Exit, Option

from pacorl.cli.gate import CheckOptions, Gate
from pacorl.cli.generator import AdaptedGenerator, ChoiceOptions, print_plan
from pacorl.cli.redraw import IMAGE_MARK, Redrawing, read_page
from pacorl.cli.shared import CARD, JSON, check_card, echo, echo_errors, print_json, progress
from pacorl.config.options import UsageError, option
from pacorl.types import TINY

if TYPE_CHECKING:
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.generate.generated_images import GeneratedImage
    from pacorl.generate.generator import Generator
    from pacorl.generate.repair import FinishedPage
    from pacorl.generate.storyboard import Storyboard
    from pacorl.records.panels import PanelDraft
    from pacorl.types import Grid, Prompt


PROMPTS = (".txt", ".jsonl")
"""Suffixes of files of prompts."""
BOARDS = (".yaml", ".yml")
"""Suffixes of storyboards."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Options that go with the text of a request, or a finished page in its place."""

    panel: ClassVar[str] = "Request"

    panels: list[str] = option([], "What one panel shows; repeat it, row by row.", "--panel")
    layout: str = option("", "ROWSxCOLS of the panels; the squarest if left out.")
    images: list[Path] = option([], "An image to edit by the text; may be repeated for editors of several.", "--image")
    page: Path | None = option(
        None, "A finished page, whose failing panels are drawn again by the recipe in the file.", "--from"
    )
    characters: list[str] = option(
        [], "A character's folder, or its name in characters/; may be repeated.", "--character"
    )
    separate: bool = option(False, "Generate each panel as an image of its own, of --size.")

    def check(self, text: str) -> None:
        """Raise ValueError unless there is a text or a page, with the flags that go with it."""
        if bool(text) == bool(self.page):
            raise ValueError("give either a text or a file, or a finished page with --from, whose recipe has its texts")
        unfit: dict[str, Any] = {"--panel": self.panels, "--layout": self.layout, "--character": self.characters}
        request = ""
        if text.endswith(PROMPTS + BOARDS):
            request = text
            unfit["--image"] = self.images
        elif self.images:
            request = "--image"
            unfit["--from"] = self.page
        for flag, value in unfit.items():
            if request and value:
                raise ValueError(f"{flag} does not go with {request}; leave one out")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Prompts of images, or of the panels of a finished page."""

    prompts: Sequence[Prompt]
    stem: str = "set"
    """Beginning of the images' names; a redrawn page keeps its own."""
    page: FinishedPage | None = None
    """The page whose panels the prompts are."""


@dataclass(frozen=True, slots=True)
class ImageJob:
    """An image to generate."""

    path: Path
    prompt: Prompt
    seed: int
    digest: str
    """Digest of everything that decides the image."""


def generate(
    text: str = Argument(
        "",
        help="One image, a sentence that asks for several, what all panels share, or a whole prompt with panel tags; a "
        "FILE.txt or FILE.jsonl of prompts; a storyboard's FILE.yaml; with --image, what to change.",
    ),
    *,
    request: RequestOptions,
    generator: AdaptedGenerator,
    choice: ChoiceOptions,
    out: Path = Option(Path("generated"), help="The folder for the images."),
    dry_run: bool = Option(
        False,
        "--dry-run",
        help="Print what generator and judge would need, and load nothing. Exit code 2: one is absent.",
    ),
    card: int = CARD,
    as_json: bool = JSON,
) -> None:
    """Generate sets of images, edits and storyboards; each PNG contains its recipe."""
    from pacorl.io.files import check_writable

    check_card(card, dry_run=dry_run)
    request.check(text)
    gate = None
    if choice.least is not None or request.page:
        gate = Gate(CheckOptions(character=request.characters, least=choice.least), choice.calibration)
    if request.page:
        from pacorl.io.images import recipe_of

        generator = generator.by_recipe(recipe_of(request.page))

    # Check all arguments before torch and weights are loaded.
    requested = read_request(text, request, generator, gate)
    judge = _check_request(requested, generator, choice, gate, separate=request.separate)
    if dry_run:
        print_plan(generator, choice, judge, requested.prompts, card=card, as_json=as_json)
    check_writable(out, folder=True)
    jobs, codes = _unfinished(requested, generator, choice, out, separate=request.separate)
    generator.check(requested.prompts)
    if judge:
        from pacorl.judge import check_judge

        check_judge(judge, calibration=choice.calibration or "")

    # Load; the libraries are imported now, which takes seconds.
    from pacorl.io.quiet import quiet_loading
    from pacorl.report.html import render
    from pacorl.runtime.cores import use_cores

    quiet_loading()
    use_cores()
    model = generator.load(memory=choice.memory, edits=any(prompt.sources for prompt in requested.prompts))
    model.check(requested.prompts, generator.size)

    made: list[dict[str, Any]] = []

    def deliver(document: dict[str, Any]) -> None:
        made.append(document)
        codes.append(document.get("code", 0))
        if not as_json:
            echo(render("made.txt", made=document))

    with choice.load(judge, model) if judge else nullcontext() as reward:
        redrawing = Redrawing(generator, choice, gate, model, reward) if gate and reward else None
        if redrawing and requested.page:
            deliver(redrawing.repaired(requested.page, out / requested.stem, seed=generator.seed))
        judge_name = reward.name if reward else ""
        for job in jobs:
            image = _draw(model, job, generator, choice, reward, separate=request.separate)
            deliver(_finish(image, job.path, judge=judge_name, redrawing=redrawing))

    notes = list(filter(None, [model.note, reward.note if reward else ""]))
    if as_json:
        names = {"model": model.model, "adapter": model.adapter, "judge": judge_name, "notes": notes}
        print_json(names | {"made": made})
    # On the error stream, which a pipe does not read.
    echo_errors(*notes)
    raise Exit(max(codes, default=0))


def _unfinished(
    request: GenerationRequest, options: AdaptedGenerator, choice: ChoiceOptions, out: Path, *, separate: bool
) -> tuple[list[ImageJob], list[int]]:
    """Check the output, and leave out the images that an equal command has finished, with a line about each.

    Returns:
        The other images, and the exit codes of the finished ones.

    Raises:
        ValueError: for an existing image of another request, or that was not generated.
    """
    from pacorl.io.files import check_made
    from pacorl.io.images import png_texts

    if request.page:
        check_made(out / request.stem, mark=IMAGE_MARK)
        return [], []
    for path in sorted(out.glob(f"{request.stem}-[0-9]*.png")):
        check_made(path, mark=IMAGE_MARK)
    jobs = []
    codes = []
    prompts = [prompt for prompt in request.prompts for _ in range(choice.count)]
    for number, prompt in enumerate(prompts):
        path = out / f"{request.stem}-{number + 1}.png"
        digest = _digest_of(prompt, number, options, choice, separate=separate)
        texts = png_texts(path)
        if texts.get("request") == digest:
            codes.append(int(texts.get("code", 0)))
            echo_errors(f"{path} is finished, and is kept")
        elif path.exists():
            raise ValueError(f"{path} is of another command, and is not replaced; name another folder with --out")
        else:
            # Each image continues the seeds of the one before.
            jobs.append(ImageJob(path, prompt, options.seed + number * choice.best_of, digest))
    return jobs, codes


def _digest_of(prompt: Prompt, number: int, options: AdaptedGenerator, choice: ChoiceOptions, *, separate: bool) -> str:
    """Return a digest of everything that decides an image: of files their content, of other weights their name."""
    from pacorl import __version__
    from pacorl.io.files import kept_digest, text_digest

    files = [*prompt.sources, *prompt.references]
    for character in prompt.characters:
        files += character.images
    for adapter in map(Path, options.adapters):
        files += [adapter] if adapter.is_file() else sorted(adapter.rglob("*.safetensors"))
    if choice.calibration:
        files.append(choice.calibration)
    contents = list(map(kept_digest, files))
    return text_digest(repr((__version__, prompt, number, options, replace(choice, count=1), separate, contents)))


def _draw(
    model: Generator,
    job: ImageJob,
    options: AdaptedGenerator,
    choice: ChoiceOptions,
    reward: PacoReward | None,
    *,
    separate: bool,
) -> GeneratedImage:
    """Generate an image under a progress bar."""
    from pacorl.generate.sets import generate_sets

    # Count denoising steps and not images: with one image the bar would jump from 0 to its end.
    sampled = job.prompt.grid.count if separate else 1
    done, total = 0, sampled * choice.best_of * (options.steps or model.default_steps)

    def on_step(images: int) -> None:
        nonlocal done
        done += images
        advance(done, total)

    with progress(f"generating {job.path.stem}") as advance:
        (image,) = generate_sets(
            model,
            job.prompt,
            judge=reward,
            seed=job.seed,
            best_of=choice.best_of,
            size=options.size,
            steps=options.steps,
            separate=separate,
            on_step=on_step,
        )
    return replace(image, recipe={**image.recipe, "request": job.digest})


def read_request(
    text: str, options: RequestOptions, generator: AdaptedGenerator, gate: Gate | None
) -> GenerationRequest:
    """Read the request without heavy imports. Raises ValueError if the model does not support it."""
    from pacorl.core.grid import parse_layout
    from pacorl.generate.storyboard import board_prompt, pages, read_storyboard, storyboard_of
    from pacorl.io.images import open_image
    from pacorl.records.characters import find_character
    from pacorl.records.compose import check_for, prompt_from
    from pacorl.records.prompts import load_prompts
    from pacorl.types import Prompt

    model = generator.model
    if options.page and gate:
        page = read_page(options.page, generator, gate.characters, layout=options.layout, texts=options.panels)
        return GenerationRequest(page.prompts, stem=f"{options.page.stem}-repaired.png", page=page)
    if text.endswith(BOARDS):
        board = read_storyboard(Path(text))
        prompts = pages(board, model, max_references=_max_references(board, generator), separate=options.separate)
        return GenerationRequest(prompts, stem="page")
    if text.endswith(PROMPTS):
        return GenerationRequest(load_prompts(text, model=model))
    if options.images:
        for path in options.images:
            open_image(path)  # refused by name before weights are loaded
        prompt = check_for(model, Prompt(id=0, text=text, sources=tuple(options.images)))
        return GenerationRequest([prompt], stem="edit")

    # A set, or one image.
    grid = parse_layout(options.layout) if options.layout else None
    if options.characters:
        characters = [find_character(name) for name in options.characters]
        board = storyboard_of(drafted(text, options.panels, grid), characters, layout=grid)
        limit = _max_references(board, generator)
        prompt = board_prompt(board, model, max_references=limit, separate=options.separate)
    else:
        prompt = prompt_from(model, theme=text, panels=options.panels, grid=grid)
    if not options.panels and prompt.panels:
        lines = [f"  {number}. {text}" for number, text in enumerate(prompt.panels, 1)]
        # The error stream, since the standard output may be JSON.
        echo_errors(f"{len(lines)} panels (change them with --panel):", *lines)
    return GenerationRequest([prompt])


def _max_references(board: Storyboard, generator: AdaptedGenerator) -> int:
    """Return the number of references that a model takes, and note on the error stream if it leaves some out."""
    limit = generator.spec_of([]).policy.max_references
    images = sum(len(character.images) for character in board.characters)
    if images > limit:
        echo_errors(
            f"{generator.model} takes {limit} reference images of {images}: the first of each character come first, "
            "and a character without one acts by its description alone"
        )
    return limit


def drafted(text: str, panels: Sequence[str], grid: Grid | None) -> PanelDraft:
    """Draft the panels that show the characters: the user's own, or those of a sentence that asks for several."""
    from pacorl.records.panels import PanelDraft, read_request, write_panels

    if not panels and read_request(text) and (grid is None or grid.count > 1):
        draft = write_panels(text, count=grid.count if grid else None)
        echo_errors(draft.note)
        return draft
    return PanelDraft(text, tuple(panels or [text]))


def _check_request(
    request: GenerationRequest, generator: AdaptedGenerator, choice: ChoiceOptions, gate: Gate | None, *, separate: bool
) -> str:
    """Return the judge's name, a tiny judge for the tiny generator's images; empty for no judge.

    Raises:
        ValueError: for a set without a judge, or for panels that cannot be drawn one by one.
    """
    from pacorl.generate.separate import panel_prompts
    from pacorl.judge import NO_JUDGE, default_judge, judge_for

    source = choice.judge
    if request.page and gate:
        gate.least(len(request.page.prompts))
        return source or default_judge([request.page.path, *gate.references])
    for prompt in request.prompts:
        if gate:
            gate.least(prompt.grid.count)
        if gate or (separate and prompt.grid.count > 1):
            panel_prompts(prompt, generator.model, kind=generator.kind)
    if not source and (choice.best_of > 1 or choice.least is not None or choice.calibration):
        if generator.model != TINY:
            raise UsageError(NO_JUDGE)
        source = TINY
    return judge_for(source, edits=any(prompt.sources for prompt in request.prompts))


def _finish(image: GeneratedImage, path: Path, *, judge: str, redrawing: Redrawing | None) -> dict[str, Any]:
    """Save an image, after its failing panels are drawn again; returns its entry in the JSON."""
    from pacorl.generate.generated_images import recipe_texts, save, to_dict
    from pacorl.io.files import write_atomic
    from pacorl.io.images import png_bytes

    if not redrawing:
        save(image, path, judge=judge)
        return to_dict(image, path)
    # A finished page alone has its name: an interrupted command leaves no draft there.
    draft = path.parent / "tries" / f"{path.stem}-before.png"
    write_atomic(draft, png_bytes(image.image, recipe_texts(image, judge=judge)))
    page = read_page(draft, redrawing.options, image.prompt.characters)
    # The score was that of the draft.
    return to_dict(replace(image, judged=None), path) | redrawing.repaired(page, path)
