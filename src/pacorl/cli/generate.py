"""`pacorl generate`: sets, edits and storyboards, and pages whose failing panels are drawn again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from typer import Argument, Exit

from pacorl.cli.gate import SEVERITY, CheckOptions, Gate
from pacorl.cli.generator import (
    AdaptedGenerator,
    ChoiceOptions,
    OutputOptions,
    check_models,
    dry_run,
    load_generator,
    load_judge,
)
from pacorl.cli.redraw import IMAGE_MARK, FinishedPage, Redrawing, panels_again, redraw_page
from pacorl.cli.shared import check_report, echo, echo_errors, print_json, progress
from pacorl.config.options import TEMPLATE, UsageError, WriterOptions, option
from pacorl.types import TINY, Size

if TYPE_CHECKING:
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.generate.generated_images import GeneratedImage, SavedImage
    from pacorl.generate.generator import Generator
    from pacorl.generate.storyboard import Storyboard
    from pacorl.models.policies.spec import PolicySpec
    from pacorl.types import Prompt


SOURCES = ("--prompt", "--record", "--storyboard", "--instruction", "--from")
BOARD_PAGE = "storyboard.html"


@dataclass(frozen=True, kw_only=True)
class RequestOptions(WriterOptions):
    """The request: a prompt, a record, a storyboard, an edit, or a finished page."""

    panel: ClassVar[str] = "Request"

    prompt: str = option(
        "", "One image, a sentence that asks for several, what all panels share, or a whole prompt with panel tags."
    )
    panels: list[str] = option([], "What one panel shows; repeat it, row by row.", flags=("--panel",))
    layout: str = option("", "ROWSxCOLS of the panels; the squarest if left out.")
    record: str = option("", "A T2IS record, as FILE.jsonl:IDX (or a line number).")
    storyboard: Path | None = option(None, "A YAML of characters, style and scenes.")
    images: list[Path] = option([], "An image to edit; may be repeated for editors of several.", flags=("--image",))
    instruction: str = option("", "What to change in it.")
    pages: list[str] = option(
        [],
        "A finished page, or its panels one by one, whose failing panels are drawn again by the recipe in the file.",
        flags=("--from",),
    )
    characters: list[str] = option(
        [], "A character's folder, or its name in characters/; may be repeated.", flags=("--character",)
    )
    separate: bool = option(False, "Generate each panel as an image of its own, of --size.")

    @property
    def sources(self) -> list[str]:
        """Flags of the prompts that are given."""
        given = (self.prompt, self.record, self.storyboard, self.instruction, self.pages)
        return [flag for flag, value in zip(SOURCES, given, strict=True) if value]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Prompts, or the storyboard whose pages they are."""

    title: str
    prompts: list[Prompt]
    board: Storyboard | None = None
    panels: Sequence[str] = ()
    """Text of each panel for people; empty for one image, an edit or a record."""


def generate(
    text: str = Argument("", help="Short for --prompt."),
    *,
    request: RequestOptions,
    generator: AdaptedGenerator,
    choice: ChoiceOptions,
    output: OutputOptions,
) -> None:
    """Generate sets of images, edits and storyboards; each PNG contains its recipe."""
    # The positional text is the prompt.
    if text and request.prompt:
        raise ValueError(f"{text!r} and --prompt {request.prompt!r} are two prompts; give one")
    request = replace(request, prompt=text or request.prompt)
    gate = None
    if choice.least is not None or request.pages:
        gate = Gate(CheckOptions(character=request.characters, least=choice.least), choice.calibration)
    if gate and request.sources == ["--from"]:
        page = FinishedPage.read(request.pages, request.layout)
        of_page: Any = {"options": generator, "choice": choice, "output": output, "gate": gate}
        raise Exit(redraw_page(page, request.panels, gate.whole, **of_page))
    if output.dry_run:
        _dry_run(generator, choice, request, as_json=output.as_json)

    # Check all arguments before torch and weights are loaded.
    requested = read_request(request, generator.model, kind=generator.kind)
    judge = _judge_source(choice, generator.model, requested.prompts)
    _check_request(requested, generator, choice, gate, separate=request.separate)
    _check_output(output, requested)
    spec = check_models(generator, judge, requested.prompts)
    if request.separate:
        _check_separate(spec, generator.model, requested.prompts)

    # Import and load.
    from pacorl.io.imports import frozen_imports

    with frozen_imports():
        from pacorl.generate import sets, storyboard  # noqa: F401 - the most that generating imports
        from pacorl.io.quiet import quiet_loading
        from pacorl.runtime.cores import use_cores

        _ = spec.pipeline_type
    quiet_loading()
    use_cores()
    model = load_generator(generator, memory=choice.memory, edits=bool(request.images))
    if not requested.board:
        model.check(requested.prompts, generator.size)

    with load_judge(model, judge, choice) if judge else nullcontext() as reward:
        images = _generate(model, requested, generator, choice, reward, separate=request.separate)
        redrawing = Redrawing(generator, choice, gate, model, reward) if gate and reward else None
        code = _deliver(images, requested, output, model=model, reward=reward, redrawing=redrawing)
    raise Exit(code)


def _generate(
    model: Generator,
    request: GenerationRequest,
    options: AdaptedGenerator,
    choice: ChoiceOptions,
    reward: PacoReward | None,
    *,
    separate: bool,
) -> list[GeneratedImage]:
    """Generate the images under a progress bar."""
    from pacorl.generate.sets import generate_sets
    from pacorl.generate.storyboard import generate_storyboard

    # Count denoising steps and not images: with one image the bar would jump from 0 to its end.
    sampled = sum(prompt.grid.count if separate else 1 for prompt in request.prompts)
    total = sampled * choice.count * choice.best_of * (options.steps or model.default_steps)
    done = 0
    with progress("generating") as advance:

        def on_step(images: int) -> None:
            nonlocal done
            done += images
            advance(done, total)

        # Options of sets and storyboards alike.
        common: dict[str, Any] = {
            "judge": reward.judge if reward else None,
            "seed": options.seed,
            "best_of": choice.best_of,
            "ask": choice.ask,
            "size": options.size,
            "steps": options.steps,
            "separate": separate,
            "on_step": on_step,
        }
        if request.board:
            return generate_storyboard(model, request.board, **common)
        return generate_sets(model, request.prompts, count=choice.count, keep_all=choice.keep_all, **common)


# --- the request -----------------------------------------------------------------------------------------------


def read_request(options: RequestOptions, model: str, *, kind: str = "") -> GenerationRequest:
    """Read the request without heavy imports.

    Raises:
        ValueError: if there is not exactly one source, or the model does not support it.
    """
    # Exactly one source.
    flags = options.sources
    if not flags:
        raise ValueError(f"give one of {', '.join(SOURCES)}")
    if len(flags) > 1:
        raise ValueError(f"give one of {', '.join(SOURCES)}, not {' and '.join(flags)}")

    # Flags of other sources.
    if options.panels and not options.prompt:
        raise ValueError(f"--panel goes with --prompt, not with {flags[0]}")
    if options.layout and not options.prompt:
        raise ValueError(f"--layout goes with --prompt; {flags[0]} has its own")
    if options.characters and not options.prompt:
        raise ValueError(f"--character goes with --prompt, not with {flags[0]}; a storyboard lists its own characters")
    if bool(options.images) != bool(options.instruction):
        raise ValueError("an edit needs both --image and --instruction")

    # The prompts.
    if options.storyboard:
        from pacorl.generate.storyboard import pages, read_storyboard

        board = read_storyboard(options.storyboard)
        limit = _max_references(board, model, kind)
        prompts = pages(board, model, max_references=limit, separate=options.separate)
        return GenerationRequest(board.title, prompts, board, shown_panels(options, board))
    # A prompt may need a writer, whose panels become a storyboard.
    written = written_storyboard(options) if options.prompt else None
    prompt = _prompt(options, model, kind, written)
    title = options.instruction or options.prompt[:80] or prompt.theme or prompt.text[:80]
    return GenerationRequest(title, [prompt], panels=shown_panels(options, written))


def _max_references(board: Storyboard, model: str, kind: str) -> int:
    """Return the number of references that a model takes, and note on the error stream which images act."""
    from pacorl.generate.storyboard import references_note
    from pacorl.models.policies import POLICIES, kind_of

    if not board.images:
        return 0
    limit = POLICIES.named(kind or kind_of(model)).policy.max_references
    echo_errors(references_note(board, model, limit=limit))
    return limit


def _prompt(options: RequestOptions, model: str, kind: str, board: Storyboard | None) -> Prompt:
    """Compose the prompt of a request; `board` has the panels that were written for it."""
    from pacorl.core.grid import parse_layout
    from pacorl.generate.storyboard import board_prompt
    from pacorl.io.images import open_image
    from pacorl.records.compose import check_for, prompt_from
    from pacorl.records.prompts import find_record
    from pacorl.types import Prompt

    if options.prompt:
        if board:
            limit = _max_references(board, model, kind)
            return board_prompt(board, model, max_references=limit, separate=options.separate)
        grid = parse_layout(options.layout) if options.layout else None
        return prompt_from(model, theme=options.prompt, panels=options.panels, grid=grid)
    for path in options.images:
        open_image(path)  # refused by name before weights are loaded
    if options.record:
        prompt = find_record(options.record)
    else:
        prompt = Prompt(id=0, text=options.instruction, sources=tuple(options.images))
    check_for(model, prompt)
    return prompt


def written_storyboard(options: RequestOptions) -> Storyboard | None:
    """Draft a prompt's panels as a storyboard of one page; None if they need no writer and have no characters.

    The writer's panels are shown on the error stream.
    """
    from pacorl.core.grid import parse_layout
    from pacorl.generate.language_writers import open_writer
    from pacorl.generate.storyboard import storyboard_of
    from pacorl.records.characters import find_character
    from pacorl.records.panels import PanelDraft, read_request, write_panels

    # The panels: the user's own, a writer's for a request of several images, or the prompt itself.
    layout = parse_layout(options.layout) if options.layout else None
    characters = [find_character(name) for name in options.characters]
    asks_for_set = options.writer != TEMPLATE or read_request(options.prompt) is not None
    if options.panels:
        draft = PanelDraft(options.prompt, tuple(options.panels))
    elif asks_for_set and (layout is None or layout.count > 1):
        count = layout.count if layout else None
        writer = open_writer(options.writer)
        draft = write_panels(options.prompt, count=count, writer=writer)
        lines = []
        for number, text in enumerate(draft.panels, 1):
            lines.append(f"  {number}. {text}")
        # The error stream, since the standard output may be JSON.
        echo_errors(f"{len(lines)} panels (change them with --panel):", *lines)
        echo_errors(draft.note)
    else:
        draft = PanelDraft(options.prompt, (options.prompt,))

    # A storyboard is needed for characters, and for panels of a writer.
    if not characters and (options.panels or len(draft.panels) == 1):
        return None
    return storyboard_of(draft, characters, layout=layout)


def shown_panels(options: RequestOptions, board: Storyboard | None) -> list[str]:
    """Return the text of each panel for people; empty for one image, an edit or a record."""
    from pacorl.core.grid import panel_texts
    from pacorl.generate.storyboard import spoken

    if board is None:
        return options.panels or list(panel_texts(options.prompt))
    return [spoken(scene, board.characters) for scene in board.scenes]


def _judge_source(choice: ChoiceOptions, model: str, prompts: Sequence[Prompt]) -> str:
    """Return the judge's name, a tiny judge for the tiny generator's candidates; empty for no judge."""
    from pacorl.judge import NO_JUDGE, judge_for

    source = choice.judge
    if not source and (choice.best_of > 1 or choice.least is not None):
        if model != TINY:
            flag = f"--best-of {choice.best_of}" if choice.best_of > 1 else f"--min {choice.least:g}"
            raise UsageError(f"{flag}: {NO_JUDGE}")
        source = TINY
    return judge_for(source, edits=any(prompt.sources for prompt in prompts))


def _check_request(
    request: GenerationRequest, options: AdaptedGenerator, choice: ChoiceOptions, gate: Gate | None, *, separate: bool
) -> None:
    """Raise ValueError for a choice that a storyboard does not leave, or a gate that a prompt cannot pass."""
    if request.board and choice.keep_all:
        raise ValueError("--keep-all and --storyboard do not go together: a later page depends on the choice before it")
    if request.board and choice.count > 1:
        raise ValueError(f"--count {choice.count} and --storyboard do not go together; give another --seed instead")
    for prompt in request.prompts if gate else ():
        assert gate
        gate.of([], panels=prompt.grid.count)
        panels_again(prompt, options, separate=separate)


def _check_output(output: OutputOptions, request: GenerationRequest) -> None:
    """Raise an error if the output cannot be written, or would replace files that were not generated."""
    from pacorl.io.files import check_made, check_writable

    # Images.
    check_writable(output.out, folder=True)
    edits = any(prompt.sources for prompt in request.prompts)
    stem = "edit" if edits else "set"
    if request.board:
        stem = "page"
    for image in sorted(output.out.glob(f"{stem}-[0-9]*.png")):
        check_made(image, mark=IMAGE_MARK, limit=4096)

    check_report(_page(output, request))


def _check_separate(spec: PolicySpec, model: str, prompts: Sequence[Prompt]) -> None:
    from pacorl.generate.separate import panel_prompts

    for prompt in prompts:
        if prompt.grid.count > 1:
            panel_prompts(prompt, model, spec.policy.max_references)


# --- generating ------------------------------------------------------------------------------------------------


def _dry_run(options: AdaptedGenerator, choice: ChoiceOptions, request: RequestOptions, *, as_json: bool) -> NoReturn:
    # The panels, and the images that the generator reads. A model alone can be planned too.
    requested = GenerationRequest("", [])
    if request.sources or request.images:
        requested = read_request(request, options.model, kind=options.kind)
    source = _judge_source(choice, options.model, requested.prompts)
    dry_run(
        options,
        choice,
        source,
        prompts=requested.prompts,
        panels=requested.panels,
        as_json=as_json,
    )


def _page(output: OutputOptions, request: GenerationRequest) -> Path | None:
    """Return the page's path, which a storyboard always has."""
    return output.report or (output.out / BOARD_PAGE if request.board else None)


def _deliver(
    images: Sequence[GeneratedImage],
    request: GenerationRequest,
    output: OutputOptions,
    *,
    model: Generator,
    reward: PacoReward | None,
    redrawing: Redrawing | None,
) -> int:
    """Save the images, draw failing panels again, write the page, and print the paths; returns the exit code."""
    from pacorl.gate.scores import UNCALIBRATED
    from pacorl.generate import generated_images

    # Images come first: an interrupted command leaves them, and the page embeds the saved files.
    judge = reward.name if reward else ""
    saved = generated_images.save(images, output.out, judge=judge, stem="page" if request.board else "")
    checks: list[dict[str, Any]] = [{} for _ in saved]
    codes = [0]
    for number, file in enumerate(saved):
        if redrawing and file.image.rank == 1:
            saved[number], checks[number], code = redrawing.improved(file)
            codes.append(code)

    # The page.
    remarks = [model.note]
    if reward:
        calibrated = getattr(reward.judge, "calibration", None)
        remarks += [reward.note, "" if calibrated else UNCALIBRATED]
    notes = list(filter(None, remarks))
    page = _page(output, request)
    if page:
        generated_images.write_page(page, saved, title=request.title, notes=notes, judge=judge)

    # The terminal. Notes go to the error stream, which a pipe does not read.
    if output.as_json:
        names = {"model": model.model, "adapter": model.adapter, "judge": judge, "notes": notes}
        made = [generated_images.to_dict(file) | check for file, check in zip(saved, checks, strict=True)]
        print_json(names | {"page": str(page) if page else None, "made": made})
    else:
        echo("\n".join(_line(file, check) for file, check in zip(saved, checks, strict=True)))
    echo_errors(*notes, f"page: {page}" if page else "")
    return max(codes, key=SEVERITY.index)


def _line(saved: SavedImage, check: Mapping[str, Any]) -> str:
    image = saved.image
    judged = image.judged
    columns = [str(saved.path), f"size {Size(image.image.height, image.image.width)}", f"seed {image.recipe.seed}"]
    if judged and judged.score is not None:
        columns.append(f"score {judged.score:.4f}")
    if judged and judged.error:
        columns.append(f"no score: {judged.error}")
    if image.candidates > 1:
        columns.append(image.place)
    if check:
        columns.append(f"{'passes' if check['passed'] else 'fails'} after {len(check['tries'])} tries")
    return "  ".join(columns)
