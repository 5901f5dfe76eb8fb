"""`pacorl generate`: sets, edits and storyboards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from typer import Argument, Exit

from pacorl.cli.shared import check_report, echo, echo_errors, print_json, progress
from pacorl.config.options import (
    LARGEST,
    MEMORY,
    STRONGEST,
    TEMPLATE,
    FrugalJudge,
    GeneratorOptions,
    JudgeOptions,
    UsageError,
    WriterOptions,
    check_previous,
    inherited,
    one_of,
    option,
)
from pacorl.types import TINY, Size

if TYPE_CHECKING:
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.generate.generated_images import GeneratedImage, SavedImage
    from pacorl.generate.generator import Generator
    from pacorl.generate.storyboard import Storyboard
    from pacorl.models.policies.spec import PolicySpec
    from pacorl.types import Prompt


SOURCES = ("--prompt", "--record", "--storyboard", "--instruction")
BOARD_PAGE = "storyboard.html"
IMAGE_MARK = b"Software" + bytes(5) + b"pacorl "
"""The first text chunk of a generated PNG (`generate.generated_images.recipe_texts`)."""
PDF_MARK = "pacorl".encode("utf-16-be")
"""The producer of its PDFs."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions(WriterOptions):
    """The request: a prompt, a record, a storyboard or an edit."""

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
    characters: list[str] = option(
        [], "A character's folder, or its name in characters/; may be repeated.", flags=("--character",)
    )
    separate: bool = option(False, "Generate each panel as an image of its own, of --size.")
    previous: bool = option(False, "With --separate: give each panel the image before it as a reference.")

    def __post_init__(self) -> None:
        check_previous(separate=self.separate, previous=self.previous)

    @property
    def sources(self) -> list[str]:
        """Flags of the prompts that are given."""
        return [flag for flag in SOURCES if getattr(self, flag.removeprefix("--"))]


@dataclass(frozen=True, kw_only=True)
class AdaptedGenerator(GeneratorOptions):
    """The generator, and the strength of its adapter."""

    lora_scale: float = option(1.0, "The adapter's strength: 1 as it was trained, 0 the base.", least=0, most=STRONGEST)

    def __post_init__(self) -> None:
        if self.lora_scale != 1 and not self.adapter:
            raise ValueError(f"--lora-scale {self.lora_scale:g} has no LoRA to act on; name one with --adapter")


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions(FrugalJudge):
    """Number of images, and the choice among candidates."""

    panel: ClassVar[str] = "Choice"

    judge: str = inherited(
        JudgeOptions, "judge", default="", help="Who ranks and scores: folder, hub name, URL, or tiny."
    )
    count: int = option(1, "Images per prompt.", least=1, most=LARGEST)
    # Each candidate is an image in memory until the best is known.
    best_of: int = option(1, "Generate so many candidates for each, and keep the judge's best.", least=1, most=1000)
    keep_all: bool = option(False, "Keep every candidate, with its rank in the name.")
    ask: str = option(
        "theme", "What the judge is asked of pairs: theme, or the written criteria.", parse=one_of("theme", "criteria")
    )
    statistic: str = option(
        "mean",
        "A set's score: the mean over its pairs, or worst, the lowest panel's median.",
        parse=one_of("mean", "worst"),
    )


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where the images go."""

    panel: ClassVar[str] = "Output"

    out: Path = option(Path("generated"), "The folder for the images.")
    report: Path | None = option(None, "Also write a self-contained page (a storyboard always gets one).")
    pdf: Path | None = option(None, "Also write the grid images as a PDF.")
    write: Path | None = option(None, "Write the panels as a storyboard YAML to edit, and generate nothing.")
    as_json: bool = option(False, "Print JSON.", flags=("--json",))
    dry_run: bool = option(
        False, "Print what generator and judge would need, and load nothing. Exit code 2: one is absent."
    )

    def page(self, request: GenerationRequest) -> Path | None:
        """Return the page's path, which a storyboard always has."""
        return self.report or (self.out / BOARD_PAGE if request.board else None)


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
    if output.dry_run:
        _dry_run(generator, choice, request, as_json=output.as_json)
    if output.write:
        _write_storyboard(request, output.write)
        return

    # Check all arguments before torch and weights are loaded.
    requested = read_request(request, generator.model, kind=generator.kind)
    judge = _judge_source(choice, generator.model, requested.prompts)
    if requested.board:
        _check_storyboard(choice)
    _check_output(output, requested)
    spec = check_models(generator, choice, judge, requested.prompts)
    if request.separate:
        _check_separate(request, spec, generator.model, requested.prompts)

    # Import and load.
    from pacorl.io.imports import frozen_imports

    with frozen_imports():
        from pacorl.generate.sets import generate_sets
        from pacorl.generate.storyboard import generate_storyboard
        from pacorl.io.quiet import quiet_loading
        from pacorl.runtime.cores import use_cores

        _ = spec.pipeline_type
    quiet_loading()
    use_cores()
    model = load_generator(generator, memory=choice.memory, edits=bool(request.images))
    if not requested.board:
        model.check(requested.prompts, generator.size, lora_scale=generator.lora_scale)

    # Count denoising steps and not images: with one image the bar would jump from 0 to its end.
    sampled = sum(prompt.grid.count if request.separate else 1 for prompt in requested.prompts)
    total = sampled * choice.count * choice.best_of * (generator.steps or model.default_steps)
    done = 0
    with load_judge(model, judge, choice) if judge else nullcontext() as reward:
        with progress("generating", shown=not output.as_json) as advance:

            def on_step(images: int) -> None:
                nonlocal done
                done += images
                advance(done, total)

            # Options of sets and storyboards alike.
            common: dict[str, Any] = {
                "judge": reward.judge if reward else None,
                "seed": generator.seed,
                "best_of": choice.best_of,
                "ask": choice.ask,
                "statistic": choice.statistic,
                "size": generator.size,
                "steps": generator.steps,
                "lora_scale": generator.lora_scale,
                "separate": request.separate,
                "previous": request.previous,
                "on_step": on_step,
            }
            if requested.board:
                images = generate_storyboard(model, requested.board, **common)
            else:
                common |= {"count": choice.count, "keep_all": choice.keep_all}
                images = generate_sets(model, requested.prompts, **common)
        _deliver(images, requested, model, reward, output)


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
        writer = open_writer(options.writer, options.writer_model)
        draft = write_panels(options.prompt, count=count, writer=writer)
        lines = []
        for number, text in enumerate(draft.panels, 1):
            lines.append(f"  {number}. {text}")
        # The error stream, since the standard output may be JSON.
        echo_errors(f"{len(lines)} panels (change them with --panel, or with --write and --storyboard):", *lines)
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


def _write_storyboard(options: RequestOptions, path: Path) -> None:
    from pacorl.generate.storyboard import save_storyboard

    board = written_storyboard(options) if options.prompt else None
    if board is None:
        raise ValueError(f"--write {path} goes with a --prompt that asks for several images, or with --character")
    save_storyboard(board, path)
    echo(f"{path}: edit it, then run pacorl generate --storyboard {path}")


def _judge_source(choice: ChoiceOptions, model: str, prompts: Sequence[Prompt]) -> str:
    """Return the judge's name, a tiny judge for the tiny generator's candidates; empty for no judge."""
    from pacorl.judge import NO_JUDGE, judge_for

    source = choice.judge
    if not source and choice.best_of > 1:
        if model != TINY:
            raise UsageError(f"--best-of {choice.best_of}: {NO_JUDGE}")
        source = TINY
    return judge_for(source, choice.judge_adapter, edits=any(prompt.sources for prompt in prompts))


def _check_storyboard(choice: ChoiceOptions) -> None:
    if choice.keep_all:
        raise ValueError("--keep-all and --storyboard do not go together: a later page depends on the choice before it")
    if choice.count > 1:
        raise ValueError(f"--count {choice.count} and --storyboard do not go together; give another --seed instead")


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

    # The page, and the PDF.
    check_report(output.page(request))
    if output.pdf:
        check_writable(output.pdf)
        check_made(output.pdf, mark=PDF_MARK)


def check_models(options: GeneratorOptions, choice: FrugalJudge, judge: str, prompts: Sequence[Prompt]) -> PolicySpec:
    """Check generator, judge and size before diffusers is imported; returns the generator's kind."""
    from pacorl.judge import check_judge

    spec = _checked_spec(options, prompts)
    spec.check_source(options.model, adapter=options.adapter, size=options.size)
    if judge:
        check_judge(judge, adapter=choice.judge_adapter)
    return spec


def _check_separate(request: RequestOptions, spec: PolicySpec, model: str, prompts: Sequence[Prompt]) -> None:
    from pacorl.generate.separate import panel_prompts

    for prompt in prompts:
        if prompt.grid.count > 1:
            panel_prompts(prompt, model, spec.policy.max_references, previous=request.previous)


def _checked_spec(options: GeneratorOptions, prompts: Sequence[Prompt]) -> PolicySpec:
    """Return the generator's kind. Raises ValueError if it does not take the prompts' images."""
    from pacorl.models.policies import POLICIES, kind_of
    from pacorl.models.policies.policy import check_images

    spec = POLICIES.named(options.kind or kind_of(options.model, edits=any(prompt.sources for prompt in prompts)))
    for prompt in prompts:
        check_images(spec.policy, prompt, options.model)
    return spec


# --- generating ------------------------------------------------------------------------------------------------


def _dry_run(options: GeneratorOptions, choice: ChoiceOptions, request: RequestOptions, *, as_json: bool) -> NoReturn:
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
        further_images=int(request.previous),
        as_json=as_json,
    )


def dry_run(
    options: GeneratorOptions,
    choice: FrugalJudge,
    source: str,
    *,
    prompts: Sequence[Prompt],
    panels: Sequence[str],
    further_images: int = 0,
    as_json: bool,
) -> NoReturn:
    """Print what generator and judge would need, and end the command.

    Args:
        options: The generator.
        choice: Access to the judge.
        source: The judge; empty for none.
        prompts: The prompts, whose images count.
        panels: Text of each panel for people.
        further_images: Images that the generator reads beside those of a prompt, such as the panel before.
        as_json: Print JSON.
    """
    from pacorl.io.documents import parse_json
    from pacorl.judge import judge_from
    from pacorl.plan.plan import judge_options, plan_generation
    from pacorl.plan.sources import silent_judge

    # The generator.
    spec = _checked_spec(options, prompts)
    # The prompt with the most images decides the peak.
    images = max((len(prompt.sources) + len(prompt.references) for prompt in prompts), default=0) + further_images
    weights = MEMORY[choice.memory]
    policy = spec.options_for(
        options.model,
        dtype="float32" if options.model == TINY else "bfloat16",
        **weights,
        **options.policy_options,
    )

    judge = judge_options(source, choice.judge_adapter, weights)

    # Both on the device, together or in turns; a judge over HTTP needs its server.
    plan = plan_generation(policy, size=options.size, low=choice.in_turns, judge=judge, images=images)
    if source and judge is None:
        silent = silent_judge("--judge", source, lambda: judge_from(source, **choice.judge_access)[0])
        plan = replace(plan, absences=(*plan.absences, silent)) if silent else plan
    # JSON with the panels, or a table.
    if as_json:
        print_json({"panels": list(panels)} | parse_json(plan.to_json()))
    else:
        echo(plan)
    raise Exit(plan.exit_code)


def load_judge(model: Generator, judge: str, choice: FrugalJudge, **access: Any) -> PacoReward:
    """Load the judge of the candidates; with little memory it takes turns with the generator."""
    from pacorl.gate.paco_reward import PacoReward

    with model.judging():
        reward = PacoReward.from_pretrained(judge, **choice.judge_access, **access)
        model.judged_by(reward.judge)
    return reward


def load_generator(options: GeneratorOptions, *, memory: str, edits: bool) -> Generator:
    """Load the generator of a command; `edits` selects the tiny editor."""
    from pacorl.generate.generator import Generator
    from pacorl.models.policies import kind_of

    # The request selects the tiny checkpoint: one makes sets, the other edits.
    kind = options.kind or kind_of(options.model, edits=edits)
    model = Generator.from_pretrained(
        options.model, kind=kind, adapter=options.adapter, memory=memory, **options.policy_options
    )
    echo_errors(*model.loras)
    return model


def _deliver(
    images: Sequence[GeneratedImage],
    request: GenerationRequest,
    model: Generator,
    reward: PacoReward | None,
    output: OutputOptions,
) -> None:
    """Save the images and their pages, and print their paths."""
    from pacorl.gate.scores import UNCALIBRATED
    from pacorl.generate import generated_images

    # Files.
    judge = reward.name if reward else ""
    remarks = [model.note]
    if reward:
        remarks += [reward.note, UNCALIBRATED]
    notes = list(filter(None, remarks))

    # Images come first: the page embeds the saved files.
    saved = generated_images.save(images, output.out, judge=judge, stem="page" if request.board else "")
    page = output.page(request)
    if page:
        generated_images.write_page(page, saved, title=request.title, notes=notes, judge=judge)
    if output.pdf:
        generated_images.save_pdf(images, output.pdf, title=request.title)

    # The terminal.
    if output.as_json:
        names = {"model": model.model, "adapter": model.adapter, "judge": judge, "notes": notes}
        made = [generated_images.to_dict(image) for image in saved]
        print_json(names | {"page": str(page) if page else None, "made": made})
    else:
        echo("\n".join(_line(image) for image in saved))
    # Notes go to the error stream, which a pipe does not read.
    echo_errors(*notes, f"page: {page}" if page else "", f"pdf: {output.pdf}" if output.pdf else "")


def _line(saved: SavedImage) -> str:
    image = saved.image
    judged = image.judged
    columns = [str(saved.path), f"size {Size(image.image.height, image.image.width)}", f"seed {image.recipe.seed}"]
    if judged and judged.score is not None:
        columns.append(f"score {judged.score:.4f}")
    if judged and judged.error:
        columns.append(f"no score: {judged.error}")
    if image.candidates > 1:
        columns.append(image.place)
    return "  ".join(columns)
