"""The gate of an image set: least P(same) per panel, after controls with known answers.

A panel's score is the lowest, over the questions and the characters, of its median P(Yes) with a character's reference
images; without a character, with the other panels. A set passes if no panel's score is below the threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL.Image import Resampling

from pacorl.core.set_scores import median_with
from pacorl.gate.score_set import check_count, questions_about, score_set
from pacorl.gate.scores import QuestionSpec, Scores, p_yes_text
from pacorl.io.images import as_rgb, open_image
from pacorl.io.terminal import Progress, silent
from pacorl.judge.calibration import Calibration, threshold
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
        return {
            "passed": None,
            "refused": str(self),
            "image": self.control.image,
            "control": asdict(self.control),
            "least": self.least,
        }


@dataclass(frozen=True, slots=True)
class PanelScore:
    """The gate's score of one panel."""

    panel: int
    """Index among the images of the scores."""
    score: float | None
    """Lowest median P(Yes); None if a question failed or no pair was asked."""
    question: str = ""
    """Label of the lowest question."""
    group: int = 0
    """Index of the group of images with the lowest median."""


@dataclass(frozen=True, slots=True)
class Control:
    """A pair with a known answer."""

    image: str
    """Name of the first image."""
    name: str
    """Description of the second image."""
    same: bool
    """Whether the answer is Yes."""
    p_yes: float
    """Lowest P(Yes) over the questions."""


@dataclass(frozen=True, slots=True)
class Check:
    """Result of the gate."""

    scores: Scores
    """Scores of the reference images, then of the panels."""
    references: tuple[tuple[str, tuple[int, ...]], ...]
    """Name of each character and the indices of its reference images."""
    least: float
    """Threshold of a panel's score."""
    controls: tuple[Control, ...]
    """The pairs with known answers: of the first image, then of further ones until one passes."""
    panels: tuple[PanelScore, ...]
    """Deciding scores."""
    asked: int
    """Number of questions, the controls' included."""
    casts: tuple[tuple[str, ...], ...] = ()
    """Names of the characters that each panel was compared with."""

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

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of `--json`, with names in place of images."""
        names = self.scores.names
        failed = self.failed
        panels = []
        for panel, cast in zip(self.panels, self.casts, strict=True):
            entry = {
                "image": names[panel.panel],
                "passed": panel not in failed,
                "score": panel.score,
                "lowest_question": panel.question,
                "lowest_character": None,
            }
            if self.references:
                entry |= {"lowest_character": self.references[panel.group][0], "characters": list(cast)}
            panels.append(entry)

        # The verdict first.
        return {
            "passed": self.passed,
            "least": self.least,
            "calibrated": self.scores.calibrated,
            "odd_one_out": names[failed[0].panel] if failed else None,
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
        middle = median_with(
            {(pair.first, pair.second): pair.by_question[column] for pair in scores.pairs}, panel, group
        )
        if middle is None:
            return PanelScore(panel, None, question.label, number)
        if lowest.score is None or middle < lowest.score:
            lowest = PanelScore(panel, middle, question.label, number)
    return lowest


def panel_scores(scores: Scores, references: Sequence[Sequence[int]] = ()) -> list[PanelScore]:
    """Score each panel against the groups of references; without references, against all other panels."""
    every = range(len(scores.names))
    shown = set(chain(*references))
    scored = []
    for panel in every:
        # References are no panels: they are not scored.
        if panel not in shown:
            others = [index for index in every if index != panel]
            scored.append(panel_score(scores, panel, references or [others]))
    return scored


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
        least: Threshold of a panel's score.
        names: Display names; numbered if empty.
        characters: Name and reference images of each character.
        casts: Names of the characters that each image shows, one or more; all of them in every image if empty.
        questions: Questions about each pair; empty for plain consistency.
        symmetric: Ask in both orders and take the mean.
        progress: Callback with (done, total) questions about the panels.

    Raises:
        ControlError: if a control of every image is answered wrongly.
        ValueError: for an invalid image, or for a single image without a reference.
    """
    # Defaults.
    specs = tuple(questions) or questions_about()
    names = tuple(names) or tuple(f"image {number + 1}" for number in range(len(images)))

    # References first, then panels.
    references: list[tuple[str, tuple[int, ...]]] = []
    shown: list[Image] = []
    shown_names: list[str] = []
    for name, of_character in characters:
        references.append((name, tuple(range(len(shown), len(shown) + len(of_character)))))
        shown += of_character
        shown_names += [f"{name}, reference {number + 1}" for number in range(len(of_character))]
    panels = range(len(shown), len(shown) + len(images))
    casts = casts or [[name for name, _ in references]] * len(images)
    # Each panel with the references of its characters.
    groups: list[list[Sequence[int]]] = []
    for cast in casts:
        groups.append([indices if name in cast else () for name, indices in references])
    pairs: list[tuple[int, int]] = []
    for panel, of_panel in zip(panels, groups, strict=True):
        pairs += product(chain(*of_panel), [panel])
    if not references:
        pairs += combinations(panels, 2)

    # Controls first: a judge that fails them is not asked about the set.
    every = [*shown, *images]
    every_name = [*shown_names, *names]
    controls = controlled(judge, every, least, names=every_name, questions=specs, symmetric=symmetric)
    scores = score_set(
        judge, every, names=every_name, questions=specs, pairs=pairs, symmetric=symmetric, progress=progress
    )
    # Scores of the panels, and the number of questions for the report.
    judged = panel_scores(scores)
    if references:
        judged = [panel_score(scores, panel, of_panel) for panel, of_panel in zip(panels, groups, strict=True)]
    count = (len(pairs) + len(controls)) * len(specs) * (2 if symmetric else 1)
    shows = tuple(map(tuple, casts))
    return Check(scores, tuple(references), least, tuple(controls), tuple(judged), count, shows)


def gate_of(
    panels: int,
    *,
    least: float | None,
    calibration: Calibration | None = None,
    characters: Sequence[tuple[str, Sequence[Image]]] = (),
    theme: str = "",
    criteria: Mapping[str, str] | None = None,
    symmetric: bool = False,
    name: str = "least",
) -> Callable[..., Check]:
    """Return `check_set` with the rule of a verdict, before a judge is loaded; every door takes its gate from here.

    Args:
        panels: Number of images.
        least: Threshold of a panel's score; None for the calibration's.
        characters: Name and reference images of each character.
        theme, criteria: Of the question, as in `questions_about`.
        name: Name of the threshold where it is given, for errors.

    Raises:
        ValueError: There is no threshold, or a single panel is to be compared with none.
    """
    # A panel is compared with the characters, or without any with the other panels.
    if not characters:
        check_count(panels)
    references = [len(images) for _, images in characters]
    # The calibration's thresholds hold for the plain question; a theme or criterion asks another.
    plain = not (theme or criteria)
    return partial(
        check_set,
        least=threshold(calibration, least, panels=panels, references=references, plain=plain, name=name),
        characters=characters,
        questions=questions_about(theme, criteria),
        symmetric=symmetric,
    )


# --- controls ----------------------------------------------------------------------------------------------------


def controlled(
    judge: Judge,
    images: Sequence[Image],
    least: float,
    *,
    names: Sequence[str],
    questions: Sequence[QuestionSpec],
    symmetric: bool,
) -> list[Control]:
    """Ask the controls of one image after the other until one passes them; return all answers.

    Raises:
        ControlError: if none does.
    """
    controls: list[Control] = []
    for image, name in zip(images, names, strict=True):
        of_image = ask_controls(judge, image, name=name, questions=questions, symmetric=symmetric)
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
        lines.append(f"{p_yes_text(panel.score):>7}  {verdict:<5}  {_title(check, panel)}{_reason(check, panel)}")
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
            f"Odd one out: {check.scores.names[odd.panel]}, {p_yes_text(odd.score)}{_reason(check, odd)}.",
        ]
        if count == 3 and not check.references:
            lines.append(
                "Of three panels one can fail all, since the median of two values is their mean; check four or more, "
                "or compare with a character."
            )
    # The last image asked about is the one whose controls passed.
    failed = dict.fromkeys(control.image for control in wrong(check.controls, check.least))
    controls = "all 3 controls passed"
    if failed:
        controls = f"controls passed for {check.controls[-1].image} and failed for {', '.join(failed)}"
    return [*lines, f"{check.asked} questions to {judge}, {controls}."]


def check_page(check: Check, *, judge: str, note: str = "", tries: Sequence[tuple[str, Image]] = ()) -> str:
    """Render the self-contained page. `tries`: captions and images of a repair."""
    names = check.scores.names
    cards = [(names[index], show(image)) for index, image in enumerate(check.scores.images)]
    rows = []
    for panel in check.panels:
        rows.append((panel, _title(check, panel), _reason(check, panel)))
    title = "All panels pass"
    if check.failed:
        title = f"{len(check.failed)} of {len(rows)} panels fail"
    verdict = verdict_lines(check, judge=judge)
    if note:
        # A caveat about the judge comes before its verdict: it decides how the verdict is to be read.
        verdict.insert(0, note)
    return render(
        "check.html",
        title=title,
        name="check",
        verdict=verdict,
        check=check,
        cards=cards,
        rows=rows,
        tries=[(caption, show(image)) for caption, image in tries],
        judge=judge,
        matrix=pair_matrix_svg(check.scores.matrix),
    )


def _title(check: Check, panel: PanelScore) -> str:
    """Name a panel and, if the characters of panels differ, those that it shows."""
    name = check.scores.names[panel.panel]
    if len(set(check.casts)) < 2:
        return name
    return f"{name}, {' and '.join(check.casts[check.panels.index(panel)])}"


def _reason(check: Check, panel: PanelScore) -> str:
    """Name the failing criterion, if there are several, and the character, in brackets; empty for a passing panel."""
    if panel not in check.failed:
        return ""
    reasons = []
    if len(check.scores.questions) > 1:
        reasons.append(f"lowest for {panel.question}")
    if check.references:
        reasons.append(check.references[panel.group][0])
    return f" ({', '.join(reasons)})" if reasons else ""
