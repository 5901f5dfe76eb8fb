"""`pacorl generate`: sets, edits and storyboards, and pages whose failing panels are drawn again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typer import Argument, Exit, Option

from pacorl.cli.gate import CheckOptions, Gate
from pacorl.cli.generator import AdaptedGenerator, ChoiceOptions, print_plan
from pacorl.cli.redraw import IMAGE_MARK, FinishedPage, Redrawing, read_page
from pacorl.cli.shared import JSON, echo, echo_errors, print_json, progress
from pacorl.config.options import UsageError, option
from pacorl.types import TINY, Size

if TYPE_CHECKING:
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.generate.generated_images import GeneratedImage
    from pacorl.generate.generator import Generator
    from pacorl.generate.storyboard import Storyboard
    from pacorl.records.panels import PanelDraft
    from pacorl.types import Grid, Prompt


SOURCES = ("--prompt", "--storyboard", "--instruction", "--from")


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The request: a prompt, a storyboard, an edit, or a finished page."""

    panel: ClassVar[str] = "Request"

    prompt: str = option(
        "",
        "One image, a sentence that asks for several, what all panels share, a whole prompt with panel tags; or a "
        "FILE.txt or FILE.jsonl of prompts.",
    )
    panels: list[str] = option([], "What one panel shows; repeat it, row by row.", "--panel")
    layout: str = option("", "ROWSxCOLS of the panels; the squarest if left out.")
    storyboard: Path | None = option(None, "A YAML of characters, style and scenes.")
    images: list[Path] = option([], "An image to edit; may be repeated for editors of several.", "--image")
    instruction: str = option("", "What to change in it.")
    page: Path | None = option(
        None, "A finished page, whose failing panels are drawn again by the recipe in the file.", "--from"
    )
    characters: list[str] = option(
        [], "A character's folder, or its name in characters/; may be repeated.", "--character"
    )
    separate: bool = option(False, "Generate each panel as an image of its own, of --size.")

    @property
    def is_file(self) -> bool:
        """Whether the prompt is a file of prompts."""
        return self.prompt.strip().endswith((".txt", ".jsonl"))

    def check(self) -> None:
        """Raise ValueError unless there is one source, with the flags that go with it."""
        sources = (self.prompt, self.storyboard, self.instruction, self.page)
        flags = [flag for flag, value in zip(SOURCES, sources, strict=True) if value]
        if len(flags) != 1:
            raise ValueError(f"give one of {', '.join(SOURCES)}, not {' and '.join(flags) or 'none'}")
        of_prompt: dict[str, Any] = {"--panel": self.panels, "--layout": self.layout, "--character": self.characters}
        for flag, value in of_prompt.items():
            if value and (self.is_file or not (self.prompt or self.page)):
                raise ValueError(f"{flag} goes with one --prompt, not with {self.prompt or flags[0]}")
        if bool(self.images) != bool(self.instruction):
            raise ValueError("an edit needs both --image and --instruction")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Prompts, or the storyboard whose pages they are."""

    prompts: Sequence[Prompt]
    board: Storyboard | None = None
    stem: str = "set"
    """Beginning of the images' names; a redrawn page keeps its own."""
    page: FinishedPage | None = None
    """The page whose panels the prompts are."""

    @property
    def panels(self) -> Sequence[str]:
        """Text of each panel; empty for one image or an edit."""
        if self.page:
            return self.page.panels.texts
        return [text for prompt in self.prompts for text in prompt.panels]


def generate(
    text: str = Argument("", help="Short for --prompt."),
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
    as_json: bool = JSON,
) -> None:
    """Generate sets of images, edits and storyboards; each PNG contains its recipe."""
    from pacorl.io.files import check_writable

    # The positional text is the prompt.
    if text and request.prompt:
        raise ValueError(f"{text!r} and --prompt {request.prompt!r} are two prompts; give one")
    request = replace(request, prompt=text or request.prompt)
    request.check()
    gate = None
    if choice.least is not None or request.page:
        gate = Gate(CheckOptions(character=request.characters, least=choice.least), choice.calibration)
    if request.page:
        from pacorl.io.images import recipe_of

        generator = generator.by_recipe(recipe_of(request.page))

    # Check all arguments before torch and weights are loaded.
    requested = read_request(request, generator, gate)
    judge = _check_request(requested, generator, choice, gate, separate=request.separate)
    if dry_run:
        print_plan(generator, choice, judge, prompts=requested.prompts, panels=requested.panels, as_json=as_json)
    check_writable(out, folder=True)
    unfinished, codes = _unfinished(requested, generator, choice, out, separate=request.separate)
    spec = generator.check(requested.prompts)
    if judge:
        from pacorl.judge import check_judge

        check_judge(judge, calibration=choice.calibration or "")

    # Import and load.
    from pacorl.io.imports import frozen_imports

    with frozen_imports():
        from pacorl.generate import sets, storyboard  # noqa: F401 - the most that generating imports
        from pacorl.io.quiet import quiet_loading
        from pacorl.runtime.cores import use_cores

        _ = spec.pipeline_type
    quiet_loading()
    use_cores()
    model = generator.load(memory=choice.memory, edits=any(prompt.sources for prompt in requested.prompts))
    if not requested.board:
        model.check(requested.prompts, generator.size)

    with choice.load(judge, model) if judge else nullcontext() as reward:
        redrawing = Redrawing(generator, choice, gate, model, reward) if gate and reward else None
        if redrawing and requested.page:
            raise Exit(_redraw_page(redrawing, requested.page, out / requested.stem, as_json=as_json))
        separate = request.separate
        images = _generate(model, requested, generator, choice, reward, separate=separate, unfinished=unfinished)
        codes += _deliver(images, out, as_json=as_json, model=model, reward=reward, redrawing=redrawing)
    raise Exit(max(codes))


def _unfinished(
    request: GenerationRequest, options: AdaptedGenerator, choice: ChoiceOptions, out: Path, *, separate: bool
) -> tuple[dict[str, str], list[int]]:
    """Check the output, and leave out the images that an equal command has finished, with a line about each.

    Returns:
        The digest of each other image's request, by its name, and the exit codes of the finished ones.

    Raises:
        ValueError: for an existing image of another request, or that was not generated.
    """
    from pacorl.io.files import check_made
    from pacorl.io.images import png_texts

    if request.page:
        check_made(out / request.stem, mark=IMAGE_MARK)
        return {}, []
    for path in sorted(out.glob(f"{request.stem}-[0-9]*.png")):
        check_made(path, mark=IMAGE_MARK)
    prompts = [prompt for prompt in request.prompts for _ in range(choice.count)]
    unfinished = {}
    codes = []
    for number, prompt in enumerate(prompts):
        name = f"{request.stem}-{number + 1}"
        path = out / f"{name}.png"
        digest = _digest_of(prompt, number, options, choice, separate=separate)
        texts = png_texts(path)
        if not path.exists():
            unfinished[name] = digest
        elif texts.get("request") == digest:
            codes.append(int(texts.get("code", 0)))
            echo_errors(f"{path} is finished, and is kept")
        else:
            raise ValueError(f"{path} is of another command, and is not replaced; name another folder with --out")
    return unfinished, codes


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


def _generate(
    model: Generator,
    request: GenerationRequest,
    options: AdaptedGenerator,
    choice: ChoiceOptions,
    reward: PacoReward | None,
    *,
    separate: bool,
    unfinished: Mapping[str, str],
) -> Iterator[tuple[str, GeneratedImage]]:
    """Generate one image after the other under a progress bar; yields its name and the image.

    Args:
        unfinished: Digest of the request of each image to generate, by its name.
    """
    from pacorl.generate.sets import generate_sets
    from pacorl.generate.storyboard import page_sizes

    sizes: Sequence[Size | None] = [options.size] * len(request.prompts)
    if request.board:
        sizes = page_sizes(model, request.board, request.prompts, size=options.size, separate=separate)
    images = [pair for pair in zip(request.prompts, sizes, strict=True) for _ in range(choice.count)]
    done = total = 0

    def on_step(images: int) -> None:
        nonlocal done
        done += images
        advance(done, total)

    for number, (prompt, size) in enumerate(images):
        name = f"{request.stem}-{number + 1}"
        if name not in unfinished:
            continue
        # Count denoising steps and not images: with one image the bar would jump from 0 to its end.
        sampled = prompt.grid.count if separate else 1
        done, total = 0, sampled * choice.best_of * (options.steps or model.default_steps)
        with progress(f"generating {name}") as advance:
            (image,) = generate_sets(
                model,
                prompt,
                judge=reward,
                # Each image continues the seeds of the one before.
                seed=options.seed + number * choice.best_of,
                best_of=choice.best_of,
                size=size,
                steps=options.steps,
                separate=separate,
                on_step=on_step,
            )
        yield name, replace(image, recipe={**image.recipe, "request": unfinished[name]})


# --- the request -----------------------------------------------------------------------------------------------


def read_request(options: RequestOptions, generator: AdaptedGenerator, gate: Gate | None) -> GenerationRequest:
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
        page = read_page(options.page, generator, gate.whole, layout=options.layout, texts=options.panels)
        stem = f"{options.page.stem}-repaired.png"
        return GenerationRequest(page.prompts, stem=stem, page=page)
    if options.storyboard:
        board = read_storyboard(options.storyboard)
        prompts = pages(board, model, max_references=_max_references(board, generator), separate=options.separate)
        return GenerationRequest(prompts, board, stem="page")
    if options.is_file:
        return GenerationRequest(load_prompts(options.prompt, model=model))
    if options.prompt:
        grid = parse_layout(options.layout) if options.layout else None
        if options.characters:
            characters = [find_character(name) for name in options.characters]
            board = storyboard_of(drafted(options, grid), characters, layout=grid)
            limit = _max_references(board, generator)
            prompt = board_prompt(board, model, max_references=limit, separate=options.separate)
        else:
            prompt = prompt_from(model, theme=options.prompt, panels=options.panels, grid=grid)
        if not options.panels and prompt.panels:
            lines = [f"  {number}. {text}" for number, text in enumerate(prompt.panels, 1)]
            # The error stream, since the standard output may be JSON.
            echo_errors(f"{len(lines)} panels (change them with --panel):", *lines)
        return GenerationRequest([prompt])
    for path in options.images:
        open_image(path)  # refused by name before weights are loaded
    prompt = check_for(model, Prompt(id=0, text=options.instruction, sources=tuple(options.images)))
    return GenerationRequest([prompt], stem="edit")


def _max_references(board: Storyboard, generator: AdaptedGenerator) -> int:
    """Return the number of references that a model takes, and note on the error stream if it leaves some out."""
    limit = generator.spec_of([]).policy.max_references
    images = sum(len(character.images) for character in board.characters)
    if images > limit:
        act = (
            "the first of each character act, then the second"
            if limit
            else "the characters act by their descriptions alone"
        )
        echo_errors(f"{generator.model} takes {limit or 'no'} reference images: {act}")
    return limit


def drafted(options: RequestOptions, grid: Grid | None) -> PanelDraft:
    """Draft the panels that show the characters: the user's own, or those of a sentence that asks for several."""
    from pacorl.records.panels import PanelDraft, read_request, write_panels

    if not options.panels and read_request(options.prompt) and (grid is None or grid.count > 1):
        draft = write_panels(options.prompt, count=grid.count if grid else None)
        echo_errors(draft.note)
        return draft
    return PanelDraft(options.prompt, tuple(options.panels or [options.prompt]))


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
        return source or default_judge([[request.page.path, *gate.references]])
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


# --- the result ------------------------------------------------------------------------------------------------


def _redraw_page(redrawing: Redrawing, page: FinishedPage, target: Path, *, as_json: bool) -> int:
    """Draw the failing panels of a finished page again, and print the verdict; returns its exit code."""
    from pacorl.gate.check import check_lines

    reward = redrawing.reward
    echo_errors(redrawing.model.note, reward.note)
    after, document = redrawing.repaired(page, target, seed=redrawing.options.seed)
    if as_json:
        print_json({**reward.about, **document, "file": str(target)})
    else:
        echo("\n".join([*check_lines(after, judge=reward.name), str(target)]))
    return after.code


def _deliver(
    images: Iterable[tuple[str, GeneratedImage]],
    out: Path,
    *,
    as_json: bool,
    model: Generator,
    reward: PacoReward | None,
    redrawing: Redrawing | None,
) -> list[int]:
    """Save each image as it is made, after its failing panels are drawn again, and print its path.

    Returns:
        Exit codes.
    """
    from pacorl.generate.generated_images import recipe_texts, save, to_dict
    from pacorl.io.files import write_atomic
    from pacorl.io.images import png_bytes

    judge = reward.name if reward else ""
    made: list[dict[str, Any]] = []
    codes = [0]
    for name, image in images:
        path = out / f"{name}.png"
        shown, verdict = image, dict[str, Any]()
        if redrawing:
            # A finished page alone has its name: an interrupted command leaves no draft there.
            draft = out / "tries" / f"{path.stem}-before.png"
            write_atomic(draft, png_bytes(image.image, recipe_texts(image, judge=judge)))
            page = read_page(draft, redrawing.options, image.prompt.characters)
            after, verdict = redrawing.repaired(page, path)
            codes.append(after.code)
            # The score was that of the draft.
            shown = replace(image, judged=None)
        else:
            save(image, path, judge=judge)
        made.append(to_dict(shown, path) | verdict)
        if not as_json:
            echo(_line(shown, path, verdict))

    notes = list(filter(None, [model.note, reward.note if reward else ""]))
    if as_json:
        names = {"model": model.model, "adapter": model.adapter, "judge": judge, "notes": notes}
        print_json(names | {"made": made})
    # On the error stream, which a pipe does not read.
    echo_errors(*notes)
    return codes


def _line(image: GeneratedImage, path: Path, check: Mapping[str, Any]) -> str:
    columns = [str(path), f"size {Size(image.image.height, image.image.width)}", f"seed {image.recipe['seed']}"]
    if image.judged:
        score = image.judged.score
        columns.append(f"no score: {image.judged.error}" if score is None else f"score {score:.4f}")
    if image.tied > 1:
        columns.append(f"a tie of {image.tied}")
    if check:
        verdict = {True: "passes", False: "fails", None: "unsure"}[check["passed"]]
        columns.append(f"{verdict}, tries: {len(check['tries'])}")
    return "  ".join(columns)
