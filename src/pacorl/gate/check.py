"""The gate of an image set: least P(Yes) per panel, after controls with known answers.

A panel's score is the lowest, over the characters, of its median P(Yes) with a character's reference images; without a
character, with the other panels. A set passes if no panel's score is below the threshold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL.Image import Resampling

from pacorl.config.options import BELOW, INCOMPLETE
from pacorl.core.set_scores import median_with
from pacorl.gate.scores import Scores, opened, p_yes_text, score_set
from pacorl.io.images import as_rgb, open_image
from pacorl.io.terminal import Progress, silent
from pacorl.judge.pairwise import Pair
from pacorl.report.figures import show
from pacorl.report.html import render

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.judge.judge import Judge

CONTROL_FIGURE = Path(__file__).with_name("control.png")
"""A drawn figure."""
CONTROLS = ("the same image", "a crop of the image", "a drawn figure of another character")
"""Second images of the controls; only the last shows another character."""
CROP = 64
"""The cropped control loses 1/CROP of its width and height on each side."""

PASSED = {"ok": True, "fails": False, "unsure": None}
"""Status of a panel → whether it passes."""
CODES = {True: 0, False: BELOW, None: INCOMPLETE}
"""Whether a set passes → exit code."""

Group = tuple[str | None, Sequence[int]]
"""A character and the indices of its reference images; None and the indices of the other panels."""


@dataclass(frozen=True, slots=True)
class Control:
    """A pair with a known answer.

    Attributes:
        image: Name of the first image.
        name: Description of the second image.
        same: Whether the answer is Yes.
        p_yes: P(Yes), from 0 to 1.
    """

    image: str
    name: str
    same: bool
    p_yes: float

    def passes(self, least: float) -> bool:
        """Whether P(Yes) is on the right side of the threshold."""
        return (self.p_yes >= least) == self.same

    def fault(self, least: float) -> str:
        """Describe a failed control."""
        side = "must reach" if self.same else "must stay below"
        return f"{self.image} with {self.name} has P(Yes) {self.p_yes:.4f}, and {side} {least:g}"


class ControlError(RuntimeError):
    """The judge answers a control of every image wrongly, so its other answers mean nothing here."""

    exit_code = 5

    def __init__(self, control: Control, least: float) -> None:
        super().__init__(
            f"the judge cannot judge these images, controls of each fail: {control.fault(least)}; look at that image, "
            "take another judge, calibrate it (or, if that is what moved P(Yes), choose another --min), or ask another "
            "question"
        )


@dataclass(frozen=True, slots=True)
class PanelScore:
    """The gate's score of one panel.

    Attributes:
        image: Name of the panel.
        score: Lowest median P(Yes), from 0 to 1; None if a question failed, or the judge fails the panel's controls.
        character: Character with this median; None if the panel is compared with the other panels.
    """

    image: str
    score: float | None
    character: str | None = None

    @property
    def rank(self) -> float:
        """The score; −1, below any other, without one."""
        return -1.0 if self.score is None else self.score


@dataclass(frozen=True, slots=True)
class Check:
    """Result of the gate.

    Attributes:
        scores: Scores of the reference images, then of the panels.
        least: Threshold of a panel's score, from 0 to 1.
        controls: The pairs with known answers: of the first image, then of further ones until one passes, and of each
            panel below the threshold.
        panels: Deciding scores.
        question_count: Number of questions, the controls' included.
    """

    scores: Scores
    least: float
    controls: tuple[Control, ...]
    panels: tuple[PanelScore, ...]
    question_count: int

    @property
    def with_characters(self) -> bool:
        """Whether the panels were compared with characters."""
        return any(panel.character is not None for panel in self.panels)

    @property
    def unsure(self) -> tuple[int, ...]:
        """Numbers, from 0, of the panels without a score, which have no verdict."""
        return tuple(number for number, panel in enumerate(self.panels) if panel.score is None)

    @property
    def failed(self) -> tuple[int, ...]:
        """Numbers, from 0, of the panels below the threshold, lowest first."""
        by_rank = sorted(range(len(self.panels)), key=lambda number: self.panels[number].rank)
        return tuple(number for number in by_rank if self.status(number) == "fails")

    @property
    def passed(self) -> bool | None:
        """Whether every panel reaches the threshold; None if none fails and one is unsure."""
        # A low score outranks a missing score: it is certain.
        if self.failed:
            return False
        return None if self.unsure else True

    @property
    def code(self) -> int:
        """Exit code of the verdict."""
        return CODES[self.passed]

    @property
    def failed_controls(self) -> list[Control]:
        """The controls that the judge fails."""
        return [control for control in self.controls if not control.passes(self.least)]

    @property
    def odd_one_out(self) -> int | None:
        """Number, from 0, of the lowest failing panel; None if all pass, or another is as low, as of two always."""
        scores = [self.panels[number].score for number in self.failed]
        return self.failed[0] if scores and scores[0] not in scores[1:] else None

    def reason(self, number: int) -> str:
        """Name the character that a failing panel is not like, in brackets; empty without one, or if it passes."""
        character = self.panels[number].character
        return f" ({character})" if character and number in self.failed else ""

    def status(self, number: int) -> str:
        """Return a panel's verdict in a word: ok, fails, or unsure if there is none."""
        score = self.panels[number].score
        if score is None:
            return "unsure"
        return "ok" if score >= self.least else "fails"

    def with_lower(self, other: Check) -> Check:
        """Add a check of the same panels by other comparisons: each panel has the lower of its two scores."""
        panels = []
        for pair in zip(self.panels, other.panels, strict=True):
            panels.append(min(pair, key=attrgetter("rank")))
        controls = (*self.controls, *other.controls)
        questions = self.question_count + other.question_count
        return replace(self, panels=tuple(panels), controls=controls, question_count=questions)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of `--json`, with names in place of images; the verdict comes first."""
        odd = self.odd_one_out
        return {
            "passed": self.passed,
            "code": self.code,
            "least": self.least,
            "calibrated_on": self.scores.calibrated_on,
            "odd_one_out": None if odd is None else self.panels[odd].image,
            "panels": [{"passed": PASSED[self.status(n)], **asdict(each)} for n, each in enumerate(self.panels)],
            "controls": list(map(asdict, self.controls)),
            "question": self.scores.question,
            "asked": self.question_count,
        }


def panel_score(name: str, panel: int, groups: Sequence[Group], answers: Mapping[Pair, float | None]) -> PanelScore:
    """Score one panel: the lowest median P(Yes) with a group of images that it is compared with.

    Args:
        groups: Reference images of each character, or the other panels.
        answers: Pair of images → P(Yes).
    """
    lowest = PanelScore(name, None)
    for character, group in groups:
        middle = median_with(answers, panel, group)
        if middle is None:
            return PanelScore(name, None, character)
        if lowest.score is None or middle < lowest.score:
            lowest = PanelScore(name, middle, character)
    return lowest


def check_set(
    judge: Judge,
    images: Sequence[Any],
    *,
    least: float,
    names: Sequence[str] = (),
    characters: Sequence[tuple[str, Sequence[Any]]] = (),
    casts: Sequence[Sequence[str]] = (),
    theme: str = "",
    progress: Progress = silent,
) -> Check:
    """Check whether images show the same, after the controls.

    Args:
        images: Files, http(s) URLs or PIL images, as those of the characters.
        least: Threshold of a panel's score, from 0 to 1 (`pacorl.judge.calibration.threshold` gives the default).
        names: Display names; numbered if empty.
        characters: Name and reference images of each character.
        casts: Names of the characters that each image shows, one or more; all of them in every image if empty.
        theme: The panels' theme; without one the judge is asked about plain consistency.
        progress: Callback with (done, total) questions about the panels.

    Raises:
        ControlError: if a control of every image is answered wrongly.
        ValueError: for an invalid image or threshold, or for a single image without a reference.
    """
    if not 0 <= least <= 1:
        raise ValueError(f"least {least} is no threshold of P(Yes); give one from 0 to 1")
    # References first, then panels.
    every: list[Image] = []
    labels: list[str] = []
    references: list[Group] = []
    for name, of_character in characters:
        references.append((name, range(len(every), len(every) + len(of_character))))
        every += opened(of_character)
        labels += [f"{name}, reference {number}" for number in range(1, len(of_character) + 1)]
    panels = range(len(every), len(every) + len(images))
    every += opened(images)
    labels += names or [f"image {number}" for number in range(1, len(images) + 1)]

    # Each panel with the references of its characters, or with all other panels.
    groups: dict[int, list[Group]] = {}
    pairs: dict[Pair, None] = {}
    for number, panel in enumerate(panels):
        groups[panel] = [(None, [other for other in panels if other != panel])]
        if references:
            groups[panel] = [group for group in references if not casts or group[0] in casts[number]]
        for _, group in groups[panel]:
            pairs |= {(min(other, panel), max(other, panel)): None for other in group}

    # Controls first: a failure saves the questions about the set.
    controls = _controlled(judge, every, least, names=labels, theme=theme)
    scores = score_set(judge, every, names=labels, pairs=pairs, theme=theme, progress=progress)
    answers = {(pair.first, pair.second): pair.p_yes for pair in scores.pairs}

    # No panel fails if the judge fails its controls, or by an image whose controls it fails.
    suspects = set(labels[: panels.start])
    while True:
        wrong = suspects.intersection(control.image for control in controls if not control.passes(least))
        judged = []
        for panel in panels:
            sound = [(who, [each for each in group if labels[each] not in wrong]) for who, group in groups[panel]]
            judged.append(panel_score(labels[panel], panel, [] if labels[panel] in wrong else sound, answers))
        low = {panel.image for panel in judged if panel.score is not None and panel.score < least}
        if low <= suspects:
            break
        # Leaving an image out may lower other panels, which are suspects in the next round.
        suspects |= low
        for name in sorted(low.difference(control.image for control in controls)):
            controls += _controls_of(judge, every[labels.index(name)], name, theme)
    return Check(scores, least, tuple(controls), tuple(judged), len(pairs) + len(controls))


def _controlled(
    judge: Judge, images: Sequence[Image], least: float, *, names: Sequence[str], theme: str
) -> list[Control]:
    """Ask the controls of one image after the other until one passes them. Raises ControlError if none does."""
    controls: list[Control] = []
    for image, name in zip(images, names, strict=True):
        of_image = _controls_of(judge, image, name, theme)
        controls += of_image
        if all(control.passes(least) for control in of_image):
            return controls
    raise ControlError(next(control for control in controls if not control.passes(least)), least)


def _controls_of(judge: Judge, image: Image, name: str, theme: str) -> list[Control]:
    """Ask about an image with itself, with a crop of itself, and with the drawn figure of another character."""
    image = as_rgb(image, name)
    width, height = image.size
    # At least one pixel: an uncropped copy of a small image would repeat the first control.
    margin_x = max(1, width // CROP)
    margin_y = max(1, height // CROP)
    crop = image.crop((margin_x, margin_y, width - margin_x, height - margin_y)).resize(image.size, Resampling.BICUBIC)

    # As a ranking: each control is compared with the image, and not with the other controls.
    images = [image, image, crop, open_image(CONTROL_FIGURE)]
    controls = []
    for pair, second in zip(score_set(judge, images, ranking=True, theme=theme).pairs, CONTROLS, strict=True):
        if pair.p_yes is None:
            raise RuntimeError(f"the judge gave no answer about a control: {pair.error}")
        controls.append(Control(name, second, second != CONTROLS[-1], pair.p_yes))
    return controls


def check_lines(check: Check, *, judge: str, panels: bool = True) -> list[str]:
    """Format the result for a terminal: a line per panel if `panels`, then the verdict; `judge` is the judge's name."""
    return render("check.txt", check=check, judge=judge, panels=panels, p_yes_text=p_yes_text).splitlines()


def check_page(check: Check, *, judge: str, note: str = "") -> str:
    """Render the self-contained page."""
    verdict = check_lines(check, judge=judge, panels=False)
    return render("check.html", name="check", check=check, verdict=verdict, note=note, judge=judge, show=show)
