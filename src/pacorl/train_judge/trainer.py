"""The transformers `Trainer` with the judge's loss: which logits are computed, how batches are normalised, what is
measured."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import reduce
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional as F
from transformers import Trainer
from transformers.trainer_utils import EvalPrediction

from pacorl.core.objectives.decision_weighted import decision_weighted

OURS = ("answer", "index", "consistent")
"""What `Collator` adds for us and the model does not take."""
SUMS = ("pairs", "loss", "decision_nll", "reasons_nll", "decision_accuracy")


@dataclass(frozen=True, slots=True)
class Answers:
    """What a forward says about the answers of a batch."""

    log_prob_BL: Tensor
    """Of each answer token, 0 elsewhere; fp32 or wider."""
    p_yes_B: Tensor


def read_answers(model: Any, batch: Mapping[str, Tensor], *, yes: int, no: int) -> Answers:
    """Log-probabilities of the answers' tokens, and P(Yes | Yes or No) where they begin.

    The language-model head runs on the positions before answer tokens alone: of a prompt with images these are few,
    and a row of logits has as many numbers as the vocabulary has words.
    """
    answer_BL, ids_BL = batch["answer"], batch["input_ids"]
    asked_BL = answer_BL.roll(-1, 1)  # a token is foretold one position before; no answer begins a row
    inputs = {name: tensor for name, tensor in batch.items() if name not in OURS}
    logits_TV = model(**inputs, use_cache=False, logits_to_keep=asked_BL).logits
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    log_prob_T = -F.cross_entropy(logits_TV.to(wide), ids_BL[answer_BL], reduction="none")
    log_prob_BL = torch.zeros(answer_BL.shape, dtype=wide, device=ids_BL.device).masked_scatter(answer_BL, log_prob_T)
    count_B = answer_BL.sum(1)
    first_B = count_B.cumsum(0) - count_B
    decision_B2 = logits_TV.detach()[first_B][:, [yes, no]].to(wide)
    return Answers(log_prob_BL, decision_B2.softmax(-1)[:, 0])


@dataclass
class Tally:
    """Sums over the pairs since the last line of the log; a checkpoint keeps them, so that a resumed run's next line
    is the uninterrupted one's."""

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))

    def add(self, *, pairs: int, loss: float, right: int, **means: float) -> None:
        values = {"loss": loss, **means}
        for name, value in values.items():
            self.sums[name] += value * pairs
        self.sums["pairs"] += pairs
        self.sums["decision_accuracy"] += right

    def over_ranks(self, device: torch.device) -> dict[str, float]:
        """The sums of all processes."""
        sums = torch.tensor([self.sums[name] for name in SUMS], dtype=torch.float64)
        return dict(zip(SUMS, reduce(sums.to(device), "sum").tolist(), strict=True))

    def take(self, device: torch.device) -> dict[str, float]:
        """The means over all processes; the sums start over."""
        sums = self.over_ranks(device)
        self.sums = dict.fromkeys(SUMS, 0.0)
        pairs = sums.pop("pairs")
        return {name: value / pairs for name, value in sums.items()} if pairs else {}


class JudgeTrainer(Trainer):  # type: ignore[misc]
    """Minimises `decision_weighted`; P(Yes) of every evaluation row goes to `measure`.

    The loss of an optimizer step is the mean over its comparisons, however they are cut into micro-batches and dealt
    to processes. `Trainer` by itself counts tokens for that, or takes the mean of the micro-batches' means.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        *,
        alpha: float | None,
        yes: int,
        no: int,
        tally: Tally,
        measure: Callable[[Mapping[int, float]], dict[str, float]],
        **trainer: Any,
    ) -> None:
        super().__init__(**trainer, compute_metrics=lambda found: measure(_by_row(found)))
        self.alpha, self.yes, self.no, self.tally = alpha, yes, no, tally

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Tensor]:
        """The micro-batches of one optimizer step, and its comparisons per process (a mean over processes, since
        gradients are averaged over them)."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        own = torch.tensor(float(sum(len(batch["index"]) for batch in batches)), device=device)
        return batches, reduce(own, "mean")

    def compute_loss(
        self, model: Any, inputs: Mapping[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """This micro-batch's part of the optimizer step's mean."""
        loss, answers, metrics = self._judge(model, inputs)
        consistent_B = inputs["consistent"]
        right = int(((answers.p_yes_B > 0.5) == consistent_B).sum())
        self.tally.add(pairs=len(consistent_B), loss=loss.item(), right=right, **metrics)
        part = loss * len(consistent_B) / num_items_in_batch
        return (part, answers) if return_outputs else part

    def prediction_step(
        self, model: Any, inputs: Mapping[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, P(Yes), row) of a batch."""
        batch = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, answers, _ = self._judge(model, batch)
        return loss, answers.p_yes_B, batch["index"]

    def _judge(self, model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Answers, dict[str, float]]:
        answers = read_answers(model, batch, yes=self.yes, no=self.no)
        loss, metrics = decision_weighted(answers.log_prob_BL, batch["answer"], alpha=self.alpha)
        return loss, answers, metrics

    def _save_checkpoint(self, *model_and_trial: Any) -> None:
        """Raises OSError with the fix where the disk is full; earlier checkpoints stay as they were."""
        try:
            super()._save_checkpoint(*model_and_trial)
        except (OSError, RuntimeError, SafetensorError) as error:  # of files, torch.save and safetensors
            torn = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            shutil.rmtree(torn, ignore_errors=True)
            raise OSError(
                f"checkpoint {torn} could not be written ({error}); earlier checkpoints are untouched, make room and "
                "go on with --resume"
            ) from error

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Puts the tally's means in place of `Trainer`'s loss, which forgets at a resume."""
        if "loss" in logs:
            logs |= self.tally.take(self.args.device)
        super().log(logs, start_time)


def _by_row(found: EvalPrediction) -> dict[int, float]:
    return dict(zip(found.label_ids.tolist(), found.predictions.tolist(), strict=True))
