"""A claim's file and its results, checked as they are read."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pacorl.io.documents import blamed_on, read_jsonl, read_yaml, typed

CLAIMS = Path(__file__).parent
AREA = "area"
"""Metric: the mean of a run's grades so far, so that a curve that rises earlier has more of it."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Prediction(Strict):
    """Where a metric of one arm is expected to end: its change from the untrained model, or its lead over an arm."""

    text: str
    metric: str
    arm: str
    against: str | None = None
    """Arm of the other side; None for the untrained model."""
    interval: tuple[float, float]


class Half(Strict):
    """Expected ratio of two arms' epochs until a metric has half of the better arm's best rise."""

    text: str
    metric: str
    arm: str
    against: str
    interval: tuple[float, float]


class Claim(Strict):
    """A question with its arms, seeds and budget."""

    name: str
    question: str
    trainer: Literal["policy", "judge"] = "policy"
    recipe: str
    """Recipe that all arms start from."""
    settings: dict[str, object] = Field(default_factory=dict)
    """Settings of all arms beside the recipe's."""
    arms: dict[str, dict[str, object]]
    """Arm → its own settings."""
    seeds: tuple[int, ...] = Field(min_length=3)
    budget: str
    """What all arms have alike, in words."""
    predictions: tuple[Prediction, ...]
    halves: tuple[Half, ...] = ()
    also: tuple[str, ...] = ()
    """Metrics that the table shows beside those of the predictions."""

    @property
    def grade(self) -> str:
        """The metric whose way to its end is compared by AREA."""
        return "kappa" if self.trainer == "policy" else "decision_accuracy"

    @model_validator(mode="after")
    def _arms_exist(self) -> Claim:
        for prediction in (*self.predictions, *self.halves):
            for arm in (prediction.arm, prediction.against):
                if arm is not None and arm not in self.arms:
                    raise ValueError(f"{prediction.text!r} names the arm {arm}; there are {', '.join(self.arms)}")
        return self


class Evaluation(Strict):
    """A line of results: the metrics of one run at one point of its training."""

    arm: str
    seed: int
    at: int
    """Epochs or steps done; 0 is the untrained model."""
    metrics: dict[str, float]


Curve = list[Evaluation]
"""The evaluations of one run, in their order."""


def read_claim(name: str) -> Claim:
    """Read a claim. Raises ValueError if there is none of this name, or its file is not valid."""
    path = CLAIMS / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(f"there is no claim {name}; there are {', '.join(claim_names())}")
    with blamed_on(path):
        return typed({"name": name, **read_yaml(path)}, Claim)


def claim_names() -> list[str]:
    return sorted(path.stem for path in CLAIMS.glob("*.yaml"))


def results_of(claim: Claim) -> Path:
    return CLAIMS / f"{claim.name}.jsonl"


def read_curves(claim: Claim) -> dict[tuple[str, int], Curve]:
    """Read the runs of a claim: (arm, seed) → its curve. Each evaluation gets the mean of the grades so far."""
    path = results_of(claim)
    curves: dict[tuple[str, int], Curve] = {}
    for row in read_jsonl(path) if path.is_file() else ():
        with blamed_on(path):
            evaluation = typed(row, Evaluation)
        curves.setdefault((evaluation.arm, evaluation.seed), []).append(evaluation)
    for curve in curves.values():
        curve.sort(key=lambda evaluation: evaluation.at)
        grades = []
        for evaluation in curve:
            grade = evaluation.metrics[claim.grade]
            # The untrained model is no part of the way.
            if evaluation.at:
                grades.append(grade)
            evaluation.metrics[AREA] = fmean(grades or [grade])
    return curves
