"""An objective from outside the package; docs/python.md explains it."""

from typing import Literal

from pacorl.core.objectives import ObjectiveOptions, ObjectiveSpec, Step


class Reinforce(ObjectiveOptions):
    """REINFORCE with a constant baseline."""

    name: Literal["reinforce"] = "reinforce"
    baseline: float = 0.0


def reinforce(step: Step, options: Reinforce):
    """−log p · (A − b), as in Williams (1992)."""
    return -(step.log_prob_B * (step.advantage_B - options.baseline)).mean(), {}


REINFORCE = ObjectiveSpec(Reinforce, reinforce, needs="path")
