"""The gate of an image set: least P(same) per panel, after controls with known answers.

A panel's score is the lowest, over the questions and the characters, of its median P(Yes) with a character's reference
images; without a character, with the other panels. A set passes if no panel's score is below the threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL.Image import Resampling

from pacorl.core.set_scores import median_with
from pacorl.gate.scores import QuestionSpec, Scores, p_yes_text, questions_about, score_set
from pacorl.io.images import as_rgb, open_image
from pacorl.io.terminal import Progress, silent
from pacorl.report.figures import pair_matrix_svg, show
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


@dataclass(frozen=True, slots=True)
class Control:
    """A pair with a known answer.

    Attributes:
        image: Name of the first image.
        name: Description of the second image.
        same: Whether the answer is Yes.
        p_yes: Lowest P(Yes) over the questions, from 0 to 1.
    """

    image: str
    name: str
    same: bool
    p_yes: float


class ControlError(RuntimeError):
    """The judge answers a control of every image wrongly, so its other answers mean nothing here."""

    exit_code = 5

    def __init__(self, control: Control, least: float) -> None:
        side = "must reach" if control.same else "must stay below"
        super().__init__(
            f"the judge cannot judge these images, controls of each fail: {control.image} beside {control.name} "
            f"has P(Yes) {control.p_yes:.4f}, and {side} {least:g}; look at that image, take another judge, calibrate "
            "it, or ask another question"
        )
        self.control = control
        """The first wrong answer."""
        self.least = least

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of a refusal, without a verdict."""
        document = {"passed": None, "refused": str(self), "image": self.control.image}
        return document | {"control": asdict(self.control), "least": self.least}


@dataclass(frozen=True, slots=True)
class PanelScore:
    """The gate's score of one panel.

    Attributes:
        panel: Index among the images of the scores.
        score: Lowest median P(Yes), from 0 to 1; None if a question failed or no pair was asked.
        question: Label of the lowest question.
        group: Index of the group of images with the lowest median.
    """

    panel: int
    score: float | None
    question: str = ""
    group: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """Result of the gate.

    Attributes:
        scores: Scores of the reference images, then of the panels.
        references: Name of each character and the indices of its reference images.
        least: Threshold of a panel's score, from 0 to 1.
        controls: The pairs with known answers: of the first image, then of further ones until one passes.
        panels: Deciding scores.
        asked: Number of questions, the controls' included.
        casts: Names of the characters that each panel was compared with.
    """

    scores: Scores
    references: tuple[tuple[str, tuple[int, ...]], ...]
    least: float
    controls: tuple[Control, ...]
    panels: tuple[PanelScore, ...]
    asked: int
    casts: tuple[tuple[str, ...], ...] = ()

    @property
    def failed(self) -> tuple[PanelScore, ...]:
        """The panels below the threshold or without a score, lowest first."""
        return failing(self.panels, self.least)

    @property
    def passed(self) -> bool:
        """Whether every panel reaches the threshold."""
        return not self.failed

    @property
    def odd_one_out(self) -> int | None:
        """Index of the lowest failing panel among the panels; None if all pass."""
        return self.panels.index(self.failed[0]) if self.failed else None

    def name_of(self, panel: PanelScore) -> str:
        """Return the name of a panel's image."""
        return self.scores.names[panel.panel]

    def reason(self, panel: PanelScore) -> str:
        """Name a failing panel's lowest question, of several, and its character, in brackets; empty if it passes."""
        if panel not in self.failed:
            return ""
        reasons = []
        if len(self.scores.questions) > 1:
            reasons.append(f"lowest for {panel.question}")
        if self.references:
            reasons.append(self.references[panel.group][0])
        return f" ({', '.join(reasons)})" if reasons else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of `--json`, with names in place of images; the verdict comes first."""
        failed = self.failed
        panels = []
        for panel, cast in zip(self.panels, self.casts, strict=True):
            entry = {
                "image": self.name_of(panel),
                "passed": panel not in failed,
                "score": panel.score,
                "lowest_question": panel.question,
                "lowest_character": None,
            }
            if self.references:
                entry |= {"lowest_character": self.references[panel.group][0], "characters": list(cast)}
            panels.append(entry)
        return {
            "passed": self.passed,
            "least": self.least,
            "calibrated": self.scores.calibrated,
            "odd_one_out": self.name_of(failed[0]) if failed else None,
            "panels": panels,
            "controls": list(map(asdict, self.controls)),
            "questions": {question.label: question.text for question in self.scores.questions},
            "asked": self.asked,
        }


def panel_score(scores: Scores, panel: int, groups: Sequence[Sequence[int]]) -> PanelScore:
    """Score one panel: the lowest median P(Yes) over the questions and the groups of images.

    Args:
        groups: Indices of the images that the panel is compared with, e.g. the references of each character; an empty
            group is left out.
    """
    lowest = PanelScore(panel, None)
    for (number, group), (column, question) in product(enumerate(groups), enumerate(scores.questions)):
        if not group:
            continue
        of_question = {(pair.first, pair.second): pair.by_question[column] for pair in scores.pairs}
        middle = median_with(of_question, panel, group)
        if middle is None:
            return PanelScore(panel, None, question.label, number)
        if lowest.score is None or middle < lowest.score:
            lowest = PanelScore(panel, middle, question.label, number)
    return lowest


def panel_scores(scores: Scores, references: Sequence[Sequence[int]] = ()) -> list[PanelScore]:
    """Score each panel against the groups of references, which are no panels; without any, against all other panels."""
    every = set(range(len(scores.names)))
    panels = sorted(every.difference(*references))
    return [panel_score(scores, panel, references or [sorted(every - {panel})]) for panel in panels]


def failing(panels: Sequence[PanelScore], least: float) -> tuple[PanelScore, ...]:
    """Select the panels below the threshold or without a score, lowest first."""
    failed = [panel for panel in panels if panel.score is None or panel.score < least]
    return tuple(sorted(failed, key=lambda panel: -1.0 if panel.score is None else panel.score))


def check_set(
    judge: Judge,
    images: Sequence[Image],
    *,
    least: float,
    names: Sequence[str] = (),
    characters: Sequence[tuple[str, Sequence[Image]]] = (),
    casts: Sequence[Sequence[str]] = (),
    questions: Sequence[QuestionSpec] = (),
    symmetric: bool = False,
    progress: Progress = silent,
) -> Check:
    """Check whether images show the same, after the controls.

    Args:
        least: Threshold of a panel's score, from 0 to 1 (`judge.calibration.threshold`).
        names: Display names; numbered if empty.
        characters: Name and reference images of each character.
        casts: Names of the characters that each image shows, one or more; all of them in every image if empty.
        questions: Questions about each pair (`questions_about`); empty for plain consistency.
        symmetric: Ask in both orders and take the mean.
        progress: Callback with (done, total) questions about the panels.

    Raises:
        ControlError: if a control of every image is answered wrongly.
        ValueError: for an invalid image, or for a single image without a reference.
    """
    specs = tuple(questions) or questions_about()
    # References first, then panels.
    every: list[Image] = []
    every_name: list[str] = []
    references: list[tuple[str, tuple[int, ...]]] = []
    for name, of_character in characters:
        references.append((name, tuple(range(len(every), len(every) + len(of_character)))))
        every += of_character
        every_name += [f"{name}, reference {number}" for number in range(1, len(of_character) + 1)]
    panels = range(len(every), len(every) + len(images))
    every += images
    every_name += names or [f"image {number}" for number in range(1, len(images) + 1)]

    # Each panel with the references of its characters, or with all other panels.
    casts = casts or [[name for name, _ in references]] * len(images)
    groups: list[list[Sequence[int]]] = []
    for panel, cast in zip(panels, casts, strict=True):
        of_panel: list[Sequence[int]] = [indices if name in cast else () for name, indices in references]
        groups.append(of_panel or [[other for other in panels if other != panel]])
    pairs = list(combinations(panels, 2))
    if references:
        pairs = [(shown, panel) for panel, group in zip(panels, groups, strict=True) for shown in chain(*group)]

    # Controls first: a judge that fails them is not asked about the set.
    of_set: Any = {"questions": specs, "symmetric": symmetric}
    controls = _controlled(judge, every, least, names=every_name, **of_set)
    scores = score_set(judge, every, names=every_name, pairs=pairs, progress=progress, **of_set)
    judged = [panel_score(scores, panel, group) for panel, group in zip(panels, groups, strict=True)]
    questions_asked = (len(pairs) + len(controls)) * len(specs) * (2 if symmetric else 1)
    return Check(
        scores, tuple(references), least, tuple(controls), tuple(judged), questions_asked, tuple(map(tuple, casts))
    )


# --- controls ----------------------------------------------------------------------------------------------------


def _controlled(
    judge: Judge, images: Sequence[Image], least: float, *, names: Sequence[str], **of_set: Any
) -> list[Control]:
    """Ask the controls of one image after the other until one passes them; return all answers.

    Raises:
        ControlError: if none does.
    """
    controls: list[Control] = []
    for image, name in zip(images, names, strict=True):
        of_image = ask_controls(judge, image, name=name, **of_set)
        controls += of_image
        if not wrong(of_image, least):
            return controls
    raise ControlError(wrong(controls, least)[0], least)


def ask_controls(
    judge: Judge, image: Image, *, name: str, questions: Sequence[QuestionSpec], symmetric: bool = False
) -> list[Control]:
    """Ask about an image beside itself, beside a crop of itself, and beside the drawn figure of another character."""
    image = as_rgb(image, name)
    width, height = image.size
    # At least one pixel: an uncropped copy of a small image would repeat the first control.
    margin_x = max(1, width // CROP)
    margin_y = max(1, height // CROP)
    crop = image.crop((margin_x, margin_y, width - margin_x, height - margin_y)).resize(image.size, Resampling.BICUBIC)
    figure = open_image(CONTROL_FIGURE)

    # As a ranking: each control is compared with the image, and not with the other controls.
    scores = score_set(judge, [image, image, crop, figure], questions=questions, ranking=True, symmetric=symmetric)
    controls = []
    for pair, second in zip(scores.pairs, CONTROLS, strict=True):
        p_yes = panel_score(scores, pair.second, [[0]]).score
        if p_yes is None:
            raise RuntimeError(f"the judge gave no answer about a control: {pair.error}")
        controls.append(Control(name, second, second != CONTROLS[-1], p_yes))
    return controls


def wrong(controls: Sequence[Control], least: float) -> list[Control]:
    """Select the controls on the wrong side of the threshold."""
    return [control for control in controls if (control.p_yes >= least) != control.same]


# --- for people --------------------------------------------------------------------------------------------------


def check_lines(check: Check, *, judge: str) -> list[str]:
    """Format the result for a terminal: a line per panel, then the verdict; `judge` is the name of the judge."""
    lines = []
    for panel in check.panels:
        verdict = "fails" if panel in check.failed else "ok"
        lines.append(f"{p_yes_text(panel.score):>7}  {verdict:<5}  {check.name_of(panel)}{check.reason(panel)}")
    return [*lines, *verdict_lines(check, judge=judge)]


def verdict_lines(check: Check, *, judge: str) -> list[str]:
    """Summarize the result in sentences."""
    # The threshold means something only beside its comparison.
    side = "the references" if check.references else "the other panels"
    count = len(check.panels)
    limit = f"{check.least:g} with {side} ({check.scores.calibration})"
    lines = [f"Passed: all {count} panels have P(same) of at least {limit}."]
    if check.failed:
        odd = check.failed[0]
        lines = [
            f"Failed: {len(check.failed)} of {count} panels are below {limit}.",
            f"Odd one out: {check.name_of(odd)}, {p_yes_text(odd.score)}{check.reason(odd)}.",
        ]
    # The last image asked about is the one whose controls passed.
    failed = dict.fromkeys(control.image for control in wrong(check.controls, check.least))
    controls = "all 3 controls passed"
    if failed:
        controls = f"controls passed for {check.controls[-1].image} and failed for {', '.join(failed)}"
    return [*lines, f"{check.asked} questions to {judge}, {controls}."]


def check_page(check: Check, *, judge: str, note: str = "") -> str:
    """Render the self-contained page."""
    title = f"{len(check.failed)} of {len(check.panels)} panels fail" if check.failed else "All panels pass"
    return render(
        "check.html",
        title=title,
        name="check",
        # A caveat about the judge comes before its verdict: it decides how the verdict is to be read.
        verdict=[*filter(None, [note]), *verdict_lines(check, judge=judge)],
        check=check,
        cards=[(name, show(image)) for name, image in zip(check.scores.names, check.scores.images, strict=True)],
        judge=judge,
        matrix=pair_matrix_svg(check.scores.matrix),
    )
