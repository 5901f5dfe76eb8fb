"""Drawing failing panels again: of the sets that `pacorl generate --min` makes, and of a page that `--from` names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pacorl.cli.gate import Gate, code_of
from pacorl.cli.generator import AdaptedGenerator, ChoiceOptions, OutputOptions, dry_run
from pacorl.cli.shared import check_report, echo, echo_errors, print_json
from pacorl.config.options import UsageError
from pacorl.types import TINY, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.gate.paco_reward import PacoReward
    from pacorl.generate.generated_images import SavedImage
    from pacorl.generate.generator import Generator
    from pacorl.generate.repair import Repair, Try
    from pacorl.types import Prompt

IMAGE_MARK = b"Software" + bytes(5) + b"pacorl "
"""The first text chunk of a generated PNG (`generate.generated_images.recipe_texts`)."""


@dataclass(frozen=True, slots=True)
class Redrawing:
    """Generator and judge that draw panels again."""

    options: AdaptedGenerator
    choice: ChoiceOptions
    gate: Gate
    model: Generator
    reward: PacoReward

    def passing(
        self, panels: Sequence[Image], names: Sequence[str], prompts: Sequence[Prompt], seeds: Sequence[int], page: Path
    ) -> tuple[Repair, dict[str, Any]]:
        """Draw failing panels again until the gate passes, and write every try at once, with its recipe.

        Args:
            panels: Images of the set.
            names: Their files or other names.
            prompts: Prompt of each panel (`panels_again`).
            seeds: Seed of each panel, to which the number of the try is added.
            page: File of the set's page, beside which tries are written.

        Returns:
            The repair and its JSON document.
        """
        from pacorl.generate.repair import redraw_by, repair_set, save_try

        tries: list[dict[str, Any]] = []

        def keep(attempt: Try) -> None:
            # At once: an interrupted command leaves its tries.
            tries.append(attempt.to_dict() | {"image": str(save_try(attempt, page))})
            echo_errors(f"{page.name}, panel {attempt.panel + 1}, try {attempt.number}: {attempt.verdict}")

        def judged(images: Sequence[Image]) -> Any:
            with self.model.judging():
                return self.gate.check(self.reward, names, images)

        # A new panel has the size of the others; the tiny model has one of its own.
        size = self.options.size
        if size is None and self.model.model != TINY:
            size = Size(panels[0].height, panels[0].width)
        redraw = redraw_by(self.model, prompts, seeds=seeds, size=size, steps=self.options.steps)
        repair = repair_set(panels, gate=judged, redraw=redraw, tries=self.choice.tries, on_try=keep)
        return repair, repair.to_dict() | {"tries": tries}

    def improved(self, saved: SavedImage) -> tuple[SavedImage, dict[str, Any], int]:
        """Check a saved set, and replace its failing panels; the set as it was before is among the tries.

        Returns:
            The set, a JSON document, and the exit code of the verdict.
        """
        from pacorl.generate.repair import tries_folder
        from pacorl.io.files import write_atomic
        from pacorl.io.images import png_texts

        image = saved.image
        prompts = panels_again(image.prompt, self.options, separate=image.recipe.separate)
        seeds = [image.recipe.seed] * len(prompts)
        repair, document = self.passing(image.panels, list(map(str, saved.panels)), prompts, seeds, saved.path)
        if repair.replaced:
            before = tries_folder(saved.path) / f"{saved.path.stem}-before.png"
            write_atomic(before, saved.path.read_bytes())
            # The score was the earlier page's.
            texts = png_texts(saved.path)
            texts.pop("score", None)
            page = repair.save(saved.path, texts, list(map(png_texts, saved.panels)))
            saved = replace(saved, image=replace(image, image=page, judged=None))
        return saved, document, code_of(repair.after)


def panels_again(prompt: Prompt, options: AdaptedGenerator, *, separate: bool) -> list[Prompt]:
    """Compose the prompt of each panel of a set, by which it is drawn again.

    Raises:
        ValueError: There is no text for a panel, or the generator does not take it.
    """
    from pacorl.generate.repair import panel_prompt
    from pacorl.generate.separate import panel_prompts
    from pacorl.records.characters import characters_of

    if separate:
        return panel_prompts(prompt, options.model, options.spec_of([]).policy.max_references)
    if len(prompt.panels) != prompt.grid.count:
        raise ValueError(f"{prompt.grid.count} panels have {len(prompt.panels)} texts; give --panel for every panel")
    again = []
    for text, cast in zip(prompt.panels, characters_of(prompt), strict=True):
        references = [path for character in cast for path in character.images]
        again.append(panel_prompt(options.model, text, theme=prompt.theme, kind=options.kind, references=references))
    return again


# --- a finished page -------------------------------------------------------------------------------------------


def redraw_page(
    source: Path,
    *,
    layout: str,
    texts: Sequence[str],
    gate: Gate,
    generator: AdaptedGenerator,
    choice: ChoiceOptions,
    output: OutputOptions,
) -> int:
    """Draw the failing panels of a finished page again; returns the exit code of the verdict.

    Args:
        source: File of the page.
        layout: ROWSxCOLS of the page; empty for the recipe's.
        texts: What each panel shows; empty for the recipe's texts.
    """
    from pacorl.core.grid import parse_layout
    from pacorl.gate.check import check_lines, check_page
    from pacorl.gate.panels import layout_of, open_panels
    from pacorl.io.files import check_made, check_writable, write_atomic
    from pacorl.io.images import recipe_of
    from pacorl.io.quiet import quiet_loading
    from pacorl.judge import check_judge, default_judge
    from pacorl.runtime.cores import use_cores
    from pacorl.types import Prompt

    # Panels, texts and gate, before weights are loaded.
    names, panels = open_panels([source], grid=layout)
    layout = layout or layout_of(str(source))
    if not layout:
        raise UsageError(f"{source} has no layout in a recipe; give --layout, such as 2x2")
    recipe = recipe_of(source)
    generator = generator.by_recipe(recipe)
    page = Prompt(
        0,
        "",
        grid=parse_layout(layout),
        theme=recipe.get("theme", ""),
        panels=tuple(texts or json.loads(recipe.get("panels", "[]"))),
        characters=tuple(gate.whole),
    )
    again = panels_again(page, generator, separate=False)
    gate.least(len(panels))
    judge = choice.judge or default_judge([source, *map(Path, gate.references)])
    if output.dry_run:
        dry_run(generator, choice, judge, prompts=again, panels=page.panels, as_json=output.as_json)

    # Files and models.
    path = output.out / f"{source.stem}-repaired.png"
    check_writable(output.out, folder=True)
    check_made(path, mark=IMAGE_MARK, limit=4096)
    check_report(output.report)
    generator.check(again)
    check_judge(judge)
    quiet_loading()
    use_cores()
    model = generator.load(memory=choice.memory, edits=any(prompt.sources for prompt in again))
    model.check(again, generator.size)

    # Draw, and write the page with its panels.
    seeds = [int(recipe.get("seed", 0)) + generator.seed] * len(panels)
    with choice.load(judge, model) as reward:
        judge_names = {"judge": reward.name, "note": reward.note}
        echo_errors(model.note, reward.note)
        redrawing = Redrawing(generator, choice, gate, model, reward)
        repair, document = redrawing.passing(panels, names, again, seeds, path)
    of_page = {**recipe, "layout": layout}
    repair.save(path, of_page, [of_page | {"panel": text} for text in page.panels])

    # Output.
    if output.report:
        write_atomic(output.report, check_page(repair.after, tries=repair.shown, **judge_names))
        echo_errors(f"page: {output.report}")
    if output.as_json:
        print_json(judge_names | document | {"file": str(path)})
    else:
        echo("\n".join([*check_lines(repair.after, judge=reward.name), str(path)]))
    return code_of(repair.after)
