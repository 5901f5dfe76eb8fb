"""Files of claims and of their results, checked as they are read."""

from __future__ import annotations

import hashlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pacorl.io.documents import blamed_on, read_jsonl, read_yaml, typed

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = Path(__file__).resolve().parent
CPU_MINUTES = 15
"""Limit of a run."""
NUMBER = r"(-?\d+(?:\.\d+)?)"
RULE = re.compile(rf"at least {NUMBER}|at most {NUMBER}|between {NUMBER} and {NUMBER}")

Name = Annotated[str, Field(pattern=r"^[\w.-]+$")]


class Prediction(BaseModel):
    """A figure of one or two arms, its predicted interval and the rule that decides."""

    model_config = ConfigDict(extra="forbid")
    text: str
    figure: Literal["difference", "ratio", "mean"]
    """Of the means of `arm` and `against`, over the seeds that both have; or the mean of `arm` alone."""
    metric: Name
    arm: Name
    against: Name | None = None
    interval: tuple[float, float]
    """Where the figure is expected."""
    rule: str = Field(pattern=f"^({RULE.pattern})$")
    """`at least X`, `at most X` or `between X and Y`: it holds if the figure's whole interval lies there."""

    @property
    def sides(self) -> list[str]:
        """The arms of the figure."""
        return [self.arm] if self.against is None else [self.arm, self.against]

    @property
    def region(self) -> tuple[float, float]:
        """The figures that the rule accepts."""
        least, most, low, high = RULE.fullmatch(self.rule).groups()  # type: ignore[union-attr]  # as validated
        return float(least or low or "-inf"), float(most or high or "inf")


class Claim(BaseModel):
    """A claim of the paper with its arms, seeds and predictions."""

    model_config = ConfigDict(extra="forbid")
    name: Name
    title: str
    claim: str
    paper: str
    """The paper's figure."""
    revision: str = Field(pattern=r"^[0-9a-f]{40}$")
    """Commit whose code runs."""
    price: float = Field(gt=0, le=CPU_MINUTES)
    """CPU minutes of the dearest arm's run."""
    command: str
    """Its words `{settings}`, `{seed}` and `{out}` are filled in."""
    result: str
    """JSON file that the command leaves in `{out}`."""
    metrics: dict[Name, str]
    """Metric → its keys in the JSON, joined by dots; a number is an index."""
    arms: dict[Name, str]
    """Arm → the command's settings."""
    seeds: tuple[int, ...] = Field(min_length=2)
    predictions: tuple[Prediction, ...] = Field(min_length=1)
    quick: str
    """Further settings that make a run tiny."""
    needs: str = ""
    """Missing part without which the claim cannot run."""
    answer: str = ""
    """Outcome in a sentence. Written after the runs and left out of the hash, like `not_asked` and `notes`."""
    not_asked: str = ""
    """Part of the paper's claim that cannot be asked here."""
    notes: str = ""
    """Likely reason of a miss, and its check."""

    @model_validator(mode="after")
    def _names_exist(self) -> Claim:
        for prediction in self.predictions:
            if prediction.metric not in self.metrics:
                raise ValueError(f"metric {prediction.metric} is not in metrics; there are {', '.join(self.metrics)}")
            if prediction.figure == "mean" and prediction.against is not None:
                raise ValueError(f"{prediction.text!r}: a mean is of one arm; leave against out")
            if prediction.figure != "mean" and prediction.against is None:
                raise ValueError(f"{prediction.text!r}: a {prediction.figure} compares two arms; name against")
            for arm in prediction.sides:
                if arm not in self.arms:
                    raise ValueError(f"arm {arm} is not in arms; there are {', '.join(self.arms)}")
        for word in ("{settings}", "{seed}", "{out}"):
            if word not in shlex.split(self.command):
                raise ValueError(f"command lacks the word {word}")
        return self

    @property
    def hash(self) -> str:
        """SHA-256 of the claim without `answer`, `not_asked` and `notes`."""
        return hashlib.sha256(self.model_dump_json(exclude={"answer", "not_asked", "notes"}).encode()).hexdigest()

    def argv(self, settings: str, seed: int, out: Path) -> list[str]:
        """Fill in the command."""
        words = []
        for word in shlex.split(self.command):
            if word == "{settings}":
                words += shlex.split(settings)
            else:
                words.append({"{seed}": str(seed), "{out}": str(out), "python": sys.executable}.get(word, word))
        return words


class Result(BaseModel):
    """One finished run."""

    model_config = ConfigDict(extra="forbid")
    arm: Name
    seed: int
    claim: str
    """Hash of the claim."""
    revision: str
    seconds: float
    """CPU seconds of its process."""
    machine: str
    metrics: dict[str, float]


def read_claims(only: Sequence[str] = ()) -> list[Claim]:
    """Read the claims in the order of their names.

    Raises:
        ValueError: if a file is not valid, or `only` names an absent claim.
    """
    claims = []
    for path in sorted(CLAIMS.glob("*.yaml")):
        with blamed_on(path):
            claims.append(typed({"name": path.stem, **read_yaml(path)}, Claim))
    names = [claim.name for claim in claims]
    absent = set(only) - set(names)
    if absent:
        raise ValueError(f"--only {', '.join(sorted(absent))}: no such claim; there are {', '.join(names)}")
    return [claim for claim in claims if not only or claim.name in only]


Results = Mapping[tuple[str, int], Result]
"""Arm and seed → the finished run."""


def results_of(claim: Claim) -> Path:
    """Return the file of a claim's results."""
    return CLAIMS / "results" / f"{claim.name}.jsonl"


def read_results(claim: Claim) -> Results:
    """Read the finished runs, by arm and seed.

    Raises:
        ValueError: if a line is not valid, or stale: of another version of the claim.
    """
    path = results_of(claim)
    results = {}
    for row in read_jsonl(path) if path.exists() else ():
        with blamed_on(path):
            result = typed(row, Result)
        # A result of an earlier version would mix two experiments in one mean.
        if result.claim != claim.hash:
            raise ValueError(f"{path}: {result.arm}, seed {result.seed} is stale: delete its line to run it again")
        results[result.arm, result.seed] = result
    return results
