"""Judge cards per trainer, by the FLOPs of an image on either side.

Both sides are assumed to reach the same share of a card's peak.
"""

from __future__ import annotations

from dataclasses import dataclass

from pacorl.lab.plan.cost import Cost


@dataclass(frozen=True, slots=True)
class Balance:
    """Work of trainers and judges per training image."""

    trainer_tflop: float
    """From noise to the image's share of the update."""
    judge_tflop: float
    """All questions about the image."""
    questions: int
    trainers: int
    """Processes of the run."""
    judge_cards: int
    """Cards that judge as fast as the trainers sample."""
    trainers_per_judge: float

    @property
    def line(self) -> str:
        """The balance in one line."""
        cards, keep = f"{self.judge_cards} judge cards of the trainers' kind", "keep"
        if self.judge_cards == 1:
            cards, keep = "1 judge card of the trainers' kind", "keeps"
        return (
            f"balance: an image takes {self.trainer_tflop:.0f} TFLOP of training and {self.judge_tflop:.1f} of judging "
            f"({self.questions} questions); {cards} {keep} up with {self.trainers} that train, and one with "
            f"{self.trainers_per_judge:.1f}"
        )


def balance_of(cost: Cost) -> Balance | None:
    """Compare the work of trainers and judges; None if no reward asks a judge."""
    if not cost.questions:
        return None
    return Balance(
        trainer_tflop=cost.image / 1e12,
        judge_tflop=cost.judged.flops / 1e12,
        questions=cost.questions,
        trainers=cost.world,
        judge_cards=cost.judge_cards,
        trainers_per_judge=round(cost.image / cost.judged.flops, 2),
    )
