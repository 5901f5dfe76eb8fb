"""Repair of an image set: redraw failing panels until the gate passes or the tries are spent.

A redrawn panel is accepted if it fits better than the earlier one, raises the set's lowest score, and does not lower
its mean. Of sets whose lowest scores tie, the next lowest decides. The original images stay as they are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pacorl.core.grid import join, parse_layout
from pacorl.core.set_scores import TIE
from pacorl.gate.check import Check, ControlError
from pacorl.generate.generated_images import recipe_texts
from pacorl.generate.sets import generate_sets
from pacorl.io.files import write_atomic
from pacorl.io.images import png_bytes
from pacorl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.gate.panels import Panels
    from pacorl.generate.generator import Generator

Gate = Callable[[Sequence["Image"]], Check]
"""Panels → their check."""
Redraw = Callable[[int, int], tuple["Image", Mapping[str, str]]]
"""(index of a panel, number of the try) → another image of the panel, and the text chunks of its PNG."""


@dataclass(frozen=True, slots=True)
class FinishedPage:
    """A saved page with the prompts to redraw its panels.

    Attributes:
        path: Its file.
        panels: Panels with what each shows.
        prompts: Prompt of each panel.
        recipe: Text chunks of the page, with its layout.
    """

    path: Path
    panels: Panels
    prompts: Sequence[Prompt]
    recipe: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Try:
    """A redrawn panel and its verdict.

    Attributes:
        number: Number of the try, from 1.
        panel: Index of the panel.
        image: The redrawn panel.
        texts: Text chunks of its PNG.
        check: Check of the set with this panel; None if a control failed.
        accepted: Whether the panel replaces the earlier one.
        error: The failed control.
    """

    number: int
    panel: int
    image: Image
    texts: Mapping[str, str]
    check: Check | None
    accepted: bool
    error: str = ""

    @property
    def score(self) -> float | None:
        """Score of the redrawn panel in the set; None without one."""
        return self.check.panels[self.panel].score if self.check else None

    @property
    def verdict(self) -> str:
        """The verdict for people."""
        if not self.check:
            return self.error
        score = "not judged" if self.score is None else f"{self.score:.2f}, page {self.check.scores.mean:.2f}"
        return f"{score}, {'accepted' if self.accepted else 'rejected'}"

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of `--json`."""
        return {
            "try": self.number,
            "panel": self.panel + 1,
            "seed": self.texts.get("seed"),
            "score": self.score,
            "accepted": self.accepted,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class Repair:
    """A repaired set.

    Attributes:
        before: Check of the original set.
        after: Check of the repaired set.
        images: Panels of the repaired set.
        tries: All tries, in order.
    """

    before: Check
    after: Check
    images: tuple[Image, ...]
    tries: tuple[Try, ...]

    @property
    def replaced(self) -> dict[int, Try]:
        """Index of each replaced panel → the try in its place."""
        return {attempt.panel: attempt for attempt in self.tries if attempt.accepted}


def repair_set(
    images: Sequence[Image],
    *,
    gate: Gate,
    redraw: Redraw,
    tries: int = 4,
    on_try: Callable[[Try], None] = lambda attempt: None,
) -> Repair:
    """Redraw failing panels until the gate passes or the tries are spent.

    With references the failing panels take turns, the worst first: an undrawable panel must not use up all tries.
    Without references always the worst, since it lowers the scores of every other panel.

    Args:
        gate: The check, such as `check_set` with its judge and threshold.
        redraw: Source of new panels, such as `redraw_by(generator, prompts)`.
        tries: Maximum number of redrawn panels.
        on_try: Callback after each try.

    Raises:
        ControlError: if the gate refuses the original set.
    """
    panels = list(images)
    before = after = gate(panels)
    attempts: list[Try] = []
    tried: Counter[int] = Counter()
    for number in range(1, tries + 1):
        if after.passed:
            break
        # Panels without a score first, then the lowest scores.
        faulty = after.unsure + after.failed
        worst = faulty[0]
        if after.with_characters:
            # The panel with the fewest tries; of several the first.
            worst = min(faulty, key=lambda panel: tried[panel])
        tried[worst] += 1
        image, texts = redraw(worst, number)
        # Check the whole set again: a new panel changes all scores.
        changed = [*panels[:worst], image, *panels[worst + 1 :]]
        try:
            check = gate(changed)
        except ControlError as error:
            # A new set that the judge cannot be trusted with replaces nothing.
            attempt = Try(number, worst, image, texts, None, accepted=False, error=str(error))
        else:
            # The panel and the whole set must gain, since one may gain at the cost of the other.
            fits_better = check.panels[worst].rank - after.panels[worst].rank >= TIE
            accepted = fits_better and _is_better(check, than=after)
            attempt = Try(number, worst, image, texts, check, accepted)
            if accepted:
                panels = changed
                after = check

        attempts.append(attempt)
        on_try(attempt)
    return Repair(before, after, tuple(panels), tuple(attempts))


def _is_better(check: Check, *, than: Check) -> bool:
    """Compare the panels' scores, lowest first; the first that are no tie decide, unless the mean is lower."""
    if (check.scores.mean or 0.0) < (than.scores.mean or 0.0):
        return False
    ranks = sorted(panel.rank for panel in check.panels)
    earlier = sorted(panel.rank for panel in than.panels)
    for new, old in zip(ranks, earlier, strict=True):
        if abs(new - old) >= TIE:
            return new > old
    return False


def repair_page(
    page: FinishedPage, target: Path, *, gate: Gate, redraw: Redraw, tries: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Repair a page, and write it, its panels, and every try at once, so that a stop leaves the tries.

    Args:
        target: File to write; its tries go into the subfolder `tries/`, or they would count among its panels.
        say: Called with a line about each try.

    Returns:
        The JSON document of the page that was written.
    """

    def file_of(attempt: Try) -> Path:
        return target.parent / "tries" / f"{target.stem}-try-{attempt.number}-panel-{attempt.panel + 1}.png"

    def keep(attempt: Try) -> None:
        write_atomic(file_of(attempt), png_bytes(attempt.image, {**attempt.texts, "verdict": attempt.verdict}))
        say(f"{target.name}, panel {attempt.panel + 1}, try {attempt.number}: {attempt.verdict}")

    repair = repair_set(page.panels.images, gate=gate, redraw=redraw, tries=tries, on_try=keep)
    # The score was the earlier page's.
    recipe = {name: text for name, text in page.recipe.items() if name != "score"}
    # The panels, then the page: a redrawn panel has the recipe of its own drawing.
    for panel, image in enumerate(repair.images):
        texts = {**recipe, "panel": page.panels.texts[panel], "place": str(panel + 1)}
        if panel in repair.replaced:
            texts = dict(repair.replaced[panel].texts)
        write_atomic(target.with_name(f"{target.stem}-panel-{panel + 1}.png"), png_bytes(image, texts))
    # Panels of several sizes are joined at the first one's.
    size = repair.images[0].size
    joined = join([image.resize(size) for image in repair.images], parse_layout(recipe["layout"]))
    seeds = {panel + 1: attempt.texts.get("seed") for panel, attempt in sorted(repair.replaced.items())}
    verdict = {"redrawn": json.dumps(seeds), "code": str(repair.after.code)}
    write_atomic(target, png_bytes(joined, {**recipe, **verdict}))
    return {
        "file": str(target),
        "passed": repair.after.passed,
        "code": repair.after.code,
        "before": repair.before.to_dict(),
        "after": repair.after.to_dict(),
        "tries": [{**attempt.to_dict(), "image": str(file_of(attempt))} for attempt in repair.tries],
    }


def redraw_by(generator: Generator, prompts: Sequence[Prompt], *, seed: int = 0, **options: Any) -> Redraw:
    """Redraw panels with a generator.

    Args:
        prompts: The prompt of each panel (`separate.panel_prompts`).
        seed: The number of the try is added to it.
        options: Further arguments of `generate_sets`, such as `size` and `steps`.
    """

    def redraw(panel: int, number: int) -> tuple[Image, dict[str, str]]:
        prompt = prompts[panel]
        (made,) = generate_sets(generator, prompt, seed=seed + number, **options)
        return made.panels[0], recipe_texts(made) | {"panel": prompt.panels[0]}

    return redraw
