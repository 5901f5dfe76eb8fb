"""`pacorl repair`: redraw the worst panel of a set until the gate passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typer import Argument, Exit

from pacorl.cli.check import CheckJudge, CheckOptions
from pacorl.cli.generate import AdaptedGenerator, check_models, dry_run, load_generator, load_judge
from pacorl.cli.shared import BELOW, JsonOption, echo, echo_errors, print_json
from pacorl.config.options import FrugalJudge, GeneratorOptions, inherited, option
from pacorl.types import TINY, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.gate.check import Check
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.generate.generator import Generator
    from pacorl.generate.repair import Repair
    from pacorl.types import Prompt


@dataclass(frozen=True, kw_only=True)
class RepairJudge(FrugalJudge):
    """The judge of a repair."""

    calibration: Path | None = inherited(CheckJudge, "calibration")


@dataclass(frozen=True, kw_only=True)
class RepairGenerator(AdaptedGenerator):
    """The generator of a repair."""

    seed: int = inherited(GeneratorOptions, "seed", help="Added to the seed of a panel; each try adds its number.")

    def sized(self, images: Sequence[Image]) -> RepairGenerator:
        """Set the size of redrawn images to the first panel's, unless it is given or the model is tiny."""
        if self.size or self.model == TINY:
            return self
        return replace(self, size=Size(images[0].height, images[0].width))


@dataclass(frozen=True, kw_only=True)
class RepairOptions(CheckOptions):
    """The gate, the panels' texts and the number of tries."""

    grid: str = ""
    text: list[str] = option([], "What one panel shows; repeat it, in order. By default the recipe in the PNG.")
    tries: int = option(4, "Redrawn panels at most.", least=1, most=1000)

    def prompts(self, sources: Sequence[str], model: str, *, kind: str = "") -> list[Prompt]:
        """Compose the prompt of each panel, before a generator is loaded.

        Raises:
            ValueError: A panel has no text, or the generator does not take a text or the characters.
        """
        from pacorl.generate.repair import panel_prompt
        from pacorl.io.images import recipe_of

        if self.text and len(self.text) != len(sources):
            raise ValueError(f"{len(self.text)} texts and {len(sources)} panels; give one --text per panel, in order")
        # Every new panel is drawn from all images of its characters.
        characters = self.characters()
        casts = self.casts(sources, characters)
        prompts = []
        for index, source in enumerate(sources):
            shown = [character.images for character in characters if character.name in casts[index]]
            references = [path for images in shown for path in images]
            recipe = recipe_of(Path(source))
            text = self.text[index] if self.text else recipe.get("panel") or recipe.get("prompt")
            if not text:
                raise ValueError(f"{source} has no recipe of pacorl generate; give --text for every panel, in order")
            theme = recipe.get("theme", "")
            prompts.append(panel_prompt(model, text, theme=theme, kind=kind, references=references))
        return prompts


@dataclass(frozen=True, kw_only=True)
class RepairOutput(JsonOption):
    """Output of the repair."""

    panel: ClassVar[str | None] = "Output"

    out: Path = option(Path("repaired"), "A new folder for the tries, the repaired panels and their page.")
    dry_run: bool = option(
        False, "Print what generator and judge would need, and load nothing. Exit code 2: one is absent."
    )


def repair(
    images: list[str] = Argument(help="Panels: files, folders or URLs."),
    *,
    generator: RepairGenerator,
    judge: RepairJudge,
    ask: RepairOptions,
    output: RepairOutput,
) -> None:
    """Redraw the worst panel until the set passes `pacorl check`; exit code 4 if it still fails."""
    from pacorl.gate.check import check_lines
    from pacorl.gate.score_set import open_panels
    from pacorl.io.files import check_new, check_writable
    from pacorl.io.quiet import quiet_loading
    from pacorl.judge import default_judge
    from pacorl.runtime.cores import use_cores

    # Panels, gate and prompts, before weights are loaded.
    names, opened, _, _ = open_panels(images, whole_sets=False)
    gate = ask.gate(names, panels=len(opened), calibration=judge.calibration)
    prompts = ask.prompts(names, generator.model, kind=generator.kind)
    source = judge.judge or default_judge(ask.pictures(images))
    # New panels have the size of the set's panels.
    generator = generator.sized(opened)
    # A plan of both models ends the command.
    if output.dry_run:
        texts = [prompt.panels[0] for prompt in prompts]
        dry_run(generator, judge, source, prompts=prompts, panels=texts, as_json=output.as_json)
    check_writable(output.out, folder=True)
    check_new(output.out, fix="name a new folder with --out")
    check_models(generator, judge, source, prompts)

    # Load.
    quiet_loading()
    use_cores()
    edits = any(prompt.sources for prompt in prompts)
    model = load_generator(generator, memory=judge.memory, edits=edits)
    with load_judge(model, source, judge, calibration=judge.calibration or "") as reward:
        echo_errors(model.note, reward.note)
        repaired, document = redraw_panels(
            names,
            opened,
            prompts,
            gate=gate,
            model=model,
            options=generator,
            reward=reward,
            tries=ask.tries,
            out=output.out,
        )

    # Output.
    if output.as_json:
        print_json(document)
    else:
        echo("\n".join([*check_lines(repaired.after, judge=reward.name), *document["panels"]]))
    # The page exists in either form of the output.
    echo_errors(f"page: {output.out / 'repair.html'}")
    if not repaired.after.passed:
        raise Exit(BELOW)


def redraw_panels(
    files: Sequence[str],
    images: Sequence[Image],
    prompts: Sequence[Prompt],
    *,
    gate: Callable[..., Check],
    model: Generator,
    options: RepairGenerator,
    reward: PacoReward,
    tries: int,
    out: Path,
) -> tuple[Repair, dict[str, Any]]:
    """Repair a set into the folder `out`, and note each try on the error stream; returns also the JSON document."""
    from pacorl.generate.repair import redraw_by, repair_into
    from pacorl.io.images import recipe_of

    # The generator and its options, before the first try.
    model.check(prompts, options.size, lora_scale=options.lora_scale)

    # The judge takes the generator's place on a small card.
    def judged(panels: Sequence[Image]) -> Check:
        with model.judging():
            return gate(reward.judge, panels, names=files)

    # The page, the tries and the JSON document are written below `out`.
    return repair_into(
        out,
        images,
        files,
        judge=reward.name,
        note=reward.note,
        gate=judged,
        redraw=redraw_by(
            model,
            prompts,
            # An image without a recipe has no seed.
            seeds=[int(recipe_of(Path(file)).get("seed", 0)) + options.seed for file in files],
            size=options.size,
            steps=options.steps,
            lora_scale=options.lora_scale,
        ),
        tries=tries,
        on_try=lambda attempt: echo_errors(f"try {attempt.number}, panel {attempt.panel + 1}: {attempt.verdict}"),
    )
