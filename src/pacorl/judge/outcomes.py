"""Outcomes of checked sets, verdict or error, and the page that shows them: of a folder of sets, or of one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pacorl.io.images import open_image
from pacorl.judge.check import CONTROL_FIGURE, Check, ControlError, verdict_lines
from pacorl.judge.scores import p_yes_text
from pacorl.report.figures import ShownImage, pair_matrix_svg, show
from pacorl.report.page import render

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Outcome:
    """Verdict about a set, or the error that took its place."""

    name: str
    """Name of the set; empty for the only one."""
    code: int
    """Exit code."""
    title: str
    """The outcome in a few words."""
    lines: tuple[str, ...]
    """The verdict or the error in sentences."""
    images: tuple[tuple[str, ShownImage, bool, str], ...]
    """Caption and image, whether it fails, and its score."""
    document: Mapping[str, Any]
    """JSON document."""
    matrix: str = ""
    """Picture of every image against every other; empty for an error."""

    @classmethod
    def of_check(cls, check: Check, *, code: int, judge: str, name: str = "") -> Outcome:
        """Describe a verdict."""
        failed = {panel.panel for panel in check.failed}
        scores = {panel.panel: p_yes_text(panel.score) for panel in check.panels}
        images = []
        for index, (caption, image) in enumerate(zip(check.scores.names, check.scores.images, strict=True)):
            images.append((caption, show(image), index in failed, scores.get(index, "")))

        title = f"{len(failed)} of {len(check.panels)} panels fail" if failed else "passes"
        matrix = pair_matrix_svg(check.scores.matrix)
        return cls(name, code, title, tuple(verdict_lines(check, judge=judge)), tuple(images), check.to_dict(), matrix)

    @classmethod
    def of_error(cls, error: Exception, message: str, *, name: str = "", panels: Mapping[str, Image]) -> Outcome:
        """Describe an error, with the panels that were opened and the control that failed."""
        document: dict[str, Any] = {"passed": None, "error": message}
        asked = error.control.image if isinstance(error, ControlError) else None
        images = [(caption, show(image), caption == asked, "") for caption, image in panels.items()]
        if isinstance(error, ControlError):
            document = error.to_dict()
            if not error.control.same:
                images.append((error.control.name, show(open_image(CONTROL_FIGURE)), True, ""))
        code = int(getattr(error, "exit_code", 1))
        return cls(name, code, "no verdict", tuple(message.split("\n")), tuple(images), document)


def outcomes_page(outcomes: Sequence[Outcome], *, command: str = "check", judge: str = "", note: str = "") -> str:
    """Render the self-contained page of a command, with the time at which it is written."""
    failed = [outcome for outcome in outcomes if outcome.code]
    title = f"All {len(outcomes)} sets pass"
    if failed:
        title = f"{len(failed)} of {len(outcomes)} sets {'does' if len(failed) == 1 else 'do'} not pass"
    if len(outcomes) == 1 and not outcomes[0].name:
        title = "No verdict"
    return render(
        "outcomes.html",
        title=title,
        name=command,
        note=note,
        judge=judge,
        outcomes=sorted(outcomes, key=lambda outcome: outcome.code == 0),  # what needs a look comes first
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
    )
