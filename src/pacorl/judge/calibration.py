"""Calibration file of a judge, written by `pacorl calibrate`: a curve of P(Yes), and thresholds per set size.

{"judge": "tiny", "identity": "sha256 …", "pairs": 240, "curve": {"temperature": 1.9, "bias": 0.4},
    "thresholds": {"panels": {"4": 0.31}}}
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from pacorl.config.options import UsageError
from pacorl.core.calibration import Curve
from pacorl.io.documents import blamed_on, read_object, typed, write_json
from pacorl.types import Verdict

LEAST = 0.5
"""Threshold of a check without another."""
Mode = Literal["panels", "references"]
"""panels: each panel is compared with the other panels. references: with a character's reference images."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A curve of P(Yes), and thresholds by set size."""

    judge: str
    """Name of the judge that was calibrated."""
    curve: Curve
    thresholds: Mapping[Mode, Mapping[PositiveInt, Annotated[float, Field(ge=0, le=1)]]] = field(default_factory=dict)
    """Mode → number of panels → least score of a panel."""
    identity: str = ""
    """A digest of the judge's weights, or its name on a server without (`judge.identity_at`); if empty, names count."""
    pairs: int = 0
    """Number of labelled pairs that the curve was fitted to; 0 if unknown."""

    def check_judge(self, source: str, name: str, identity: str) -> None:
        """Raise UsageError for another judge than the calibrated one: its curve and thresholds would mean nothing."""
        is_same = identity == self.identity if self.identity else name == self.judge
        if not is_same:
            raise UsageError(
                f"the calibration is of the judge {self.judge} ({self.identity or 'weights unknown'}), and {name} is "
                f"another ({identity}): make one by `pacorl calibrate {source} PAIRS`, or, if a server has the "
                f'calibrated judge, write "identity": "{identity}" into the file'
            )

    def calibrated(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Calibrate verdicts; missing verdicts stay missing."""
        curve = self.curve
        return [it if it.p_yes is None else replace(it, p_yes=curve(it.p_yes)) for it in verdicts]

    def save(self, path: Path) -> None:
        """Write the file."""
        write_json(path, asdict(self), indent=1)


def read_calibration(path: str | Path) -> Calibration | None:
    """Read a calibration file; None for an empty path. Raises ValueError that names the file and the fault."""
    if not str(path):
        return None
    document = read_object(Path(path), fix="name a file that `pacorl calibrate` wrote")
    with blamed_on(path):
        return typed(document, Calibration)


def threshold(
    calibration: Calibration | None,
    least: float | None,
    *,
    panels: int,
    references: Sequence[int] = (),
    plain: bool = True,
) -> float:
    """Return the given threshold, else the calibration's for the largest listed size up to `panels`, else `LEAST`.

    Args:
        references: Number of reference images of each character.
        plain: Whether the plain question alone is asked.

    Raises:
        ValueError: One panel has nothing to be compared with.
        UsageError: The calibration's thresholds are not for this case.
    """
    if panels < 2 and not references:
        raise ValueError(f"{panels} image has nothing to be compared with; give two or more")
    if least is not None:
        return least
    # Scores against references and scores among panels have thresholds of their own.
    by_size: Mapping[int, float] | None = None
    if calibration:
        by_size = calibration.thresholds.get("references" if references else "panels")
    if not by_size:
        return LEAST
    if not plain or sum(references) > 1:
        raise UsageError(
            "the calibration's thresholds are for one character, one reference image and the plain question; give --min"
        )
    # The threshold of the nearest smaller size, or of the smallest.
    return by_size[max((size for size in by_size if size <= panels), default=min(by_size))]
