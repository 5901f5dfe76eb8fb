"""Loss and metrics of judge training: the loss on the answers, its normalisation over batches, the metrics."""

import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import reduce
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import EvalPrediction

from pacorl.core.calibration import calibration_error
from pacorl.core.objectives.decision_weighted import decision_weighted, items_of
from pacorl.io.documents import write_json
from pacorl.io.files import digests, weight_write_errors
from pacorl.judge_training.judge_config import DecisionLossConfig, JudgeConfig

Values = NDArray[np.float64]
Labels = NDArray[np.bool_]

LABEL_KEYS = ("answer", "index", "consistent")
"""Tensors of `Collator` for the loss and the metrics, which the model does not accept."""
DIGESTS = "digests.json"
"""Last file of a checkpoint, with the SHA-256 of the other files. A checkpoint without it was cut short by a kill."""


def processes() -> PartialState:
    """Return accelerate's state of this process; without a GPU, processes communicate over gloo."""
    return PartialState(cpu=not torch.accelerator.is_available())


def read_answers(model: Any, batch: Mapping[str, Tensor], *, yes: int, no: int) -> tuple[Tensor, Tensor]:
    """Compute the log-probabilities of the answers' tokens, and P(Yes | Yes or No) at their first token, in a forward.

    The language-model head runs only before answer tokens: these are few in a prompt with images, and a row of logits
    spans the whole vocabulary.

    Returns:
        (B, L) log-probability of each answer token, 0 elsewhere, in fp32 or wider; and (B,) P(Yes).
    """
    # The logits before each answer token.
    answer_BL = batch["answer"]
    ids_BL = batch["input_ids"]
    before_BL = answer_BL.roll(-1, 1)  # a token is predicted one position before it; no answer begins a row
    inputs = {name: tensor for name, tensor in batch.items() if name not in LABEL_KEYS}
    logits_TV = model(**inputs, use_cache=False, logits_to_keep=before_BL).logits
    wide = torch.promote_types(logits_TV.dtype, torch.float32)

    # The log-probabilities, and the decision at each answer's first token.
    log_prob_T = -F.cross_entropy(logits_TV.to(wide), ids_BL[answer_BL], reduction="none")
    log_prob_BL = torch.zeros(answer_BL.shape, dtype=wide, device=ids_BL.device).masked_scatter(answer_BL, log_prob_T)
    count_B = answer_BL.sum(1)
    first_B = count_B.cumsum(0) - count_B
    decision_B2 = logits_TV.detach()[first_B][:, [yes, no]].to(wide)
    return log_prob_BL, decision_B2.softmax(-1)[:, 0]


class WeightedLikelihoodTrainer(Trainer):  # type: ignore[misc]
    """Trainer that minimises `decision_weighted` and passes P(Yes) of every evaluation row, and the step, to `measure`.

    The loss of an optimizer step is a mean over its comparisons, or its tokens, independent of micro-batches and
    processes.
    `Trainer` itself would count tokens, or average the micro-batches' means.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        *,
        loss: DecisionLossConfig,
        measure: Callable[[Mapping[int, float], int], dict[str, float]],
        **trainer: Any,
    ) -> None:
        super().__init__(**trainer, compute_metrics=self._measured)
        self.alpha = None if loss.alpha == "uniform" else float(loss.alpha)
        self.form = loss.form
        self.sums = torch.zeros(3, dtype=torch.float64)
        """Pairs since the last line of the log, their losses, and their right decisions."""
        self.measure = measure

    def _measured(self, prediction: EvalPrediction) -> dict[str, float]:
        # By row, since rows of several processes are interleaved.
        p_yes = dict(zip(prediction.label_ids.tolist(), prediction.predictions.tolist(), strict=True))
        return self.measure(p_yes, self.state.global_step)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Tensor]:
        """Return the micro-batches of one optimizer step, and the items that its loss is divided by, per process.

        They are a mean over processes, since gradients are averaged over them.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        items = sum(items_of(batch["answer"], form=self.form) for batch in batches)
        count = torch.tensor(float(items), device=device)
        return batches, reduce(count, "mean")

    def compute_loss(
        self, model: Any, inputs: Mapping[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute this micro-batch's share of the optimizer step's mean."""
        loss, p_yes_B = self._loss(model, inputs)
        pairs = len(inputs["index"])
        right = ((p_yes_B > 0.5) == inputs["consistent"]).sum()
        self.sums += torch.tensor([pairs, loss.item() * pairs, right.item()], dtype=torch.float64)
        return loss * items_of(inputs["answer"], form=self.form) / num_items_in_batch

    def prediction_step(
        self, model: Any, inputs: Mapping[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute (loss, P(Yes), row) of a batch."""
        batch = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, p_yes_B = self._loss(model, batch)
        return loss, p_yes_B, batch["index"]

    def _loss(self, model: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Compute the mean loss over the rows, or over the answers' tokens, and P(Yes) of each row."""
        log_prob_BL, p_yes_B = read_answers(model, batch, yes=self.data_collator.yes, no=self.data_collator.no)
        loss = decision_weighted(log_prob_BL, batch["answer"], alpha=self.alpha, form=self.form)
        return loss, p_yes_B

    def _save_checkpoint(self, *model_and_trial: Any) -> None:
        """Add the digests of a checkpoint's files, the last of its files."""
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        with weight_write_errors(folder):
            if processes().is_main_process:  # an unfinished one of this step, with parts of files
                shutil.rmtree(folder, ignore_errors=True)
            super()._save_checkpoint(*model_and_trial)
            processes().wait_for_everyone()
            if processes().is_main_process:
                write_json(folder / DIGESTS, digests(folder))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Replace `Trainer`'s loss, which is lost at a resume, by means over the pairs since the last line."""
        if "loss" in logs:
            # fp64, since the means must not depend on the number of processes.
            pairs, loss, right = reduce(self.sums.to(self.args.device), "sum").tolist()
            self.sums.zero_()
            logs |= {"loss": loss / pairs, "decision_accuracy": right / pairs}
        super().log(logs, start_time)


def training_arguments(config: JudgeConfig, *, evaluates: bool, resumed: bool = False) -> TrainingArguments:
    """Build the transformers `Trainer`'s arguments for a run.

    Args:
        resumed: whether the run continues from a checkpoint, with the first evaluation already in the log.

    Raises:
        ValueError: the batch is no multiple of the processes.
    """
    micro, accumulate = micro_batches(config, world=processes().num_processes)
    every = config.evaluate_every
    checkpoints = config.model.gradient_checkpointing
    # Reentrant checkpointing requires an input with a gradient, and a judge's embeddings are frozen.
    not_reentrant = {"use_reentrant": False} if checkpoints else None
    return TrainingArguments(
        output_dir=str(config.out / "checkpoints"),
        use_cpu=not torch.accelerator.is_available(),
        # Length and optimizer.
        seed=config.seed,
        data_seed=config.seed,
        num_train_epochs=config.epochs,
        max_steps=config.max_steps or -1,
        learning_rate=config.optimizer.lr,
        lr_scheduler_type="cosine",
        warmup_steps=config.optimizer.warmup,
        max_grad_norm=config.optimizer.max_grad_norm,
        # Batches.
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=config.optimizer.micro_batch,
        gradient_accumulation_steps=accumulate,
        remove_unused_columns=False,  # rows are objects for the collator
        dataloader_num_workers=config.data.workers,
        dataloader_pin_memory=torch.cuda.is_available(),
        bf16=config.model.dtype == "bfloat16",
        activation_checkpointing=checkpoints,
        activation_checkpointing_kwargs=not_reentrant,
        ddp_find_unused_parameters=False,
        # Log, evaluations and checkpoints.
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,  # otherwise the last finite loss would hide the fault
        disable_tqdm=not sys.stderr.isatty(),
        report_to=[],
        eval_strategy="steps" if evaluates and every else "no",
        eval_steps=every or None,
        eval_on_start=evaluates and not resumed,
        save_steps=config.save_every,
        save_total_limit=2,
    )


def micro_batches(config: JudgeConfig, *, world: int) -> tuple[int, int]:
    """Return (comparisons per forward, forwards per optimizer step) of each of `world` processes.

    Raises:
        ValueError: the batch is no multiple of the processes.
    """
    batch = config.optimizer.batch
    if batch % world:
        raise ValueError(
            f"optimizer.batch {batch} cannot be shared by {world} processes; make it a multiple of {world}"
        )
    per_process = batch // world
    sizes = range(min(per_process, config.optimizer.micro_batch), 0, -1)
    micro = next(size for size in sizes if per_process % size == 0)
    return micro, per_process // micro


def decision_metrics(p_yes_N: Values, consistent_N: Labels, *, swapped_N: Values) -> dict[str, float]:
    """Measure a judge on N comparisons.

    Args:
        swapped_N: P(Yes) with the images exchanged.

    Returns:
        Accuracy, AUC (NaN without a Yes or a No), calibration error, and order gap, the mean |P(Yes | a, b) − P(Yes |
        b, a)|.
    """
    return {
        "decision_accuracy": float(((p_yes_N > 0.5) == consistent_N).mean()),
        "auc": auc(p_yes_N, consistent_N),
        "ece": calibration_error(p_yes_N, consistent_N),
        "order_gap": float(np.abs(p_yes_N - swapped_N).mean()),
    }


def auc(p_yes: Values, consistent: Labels) -> float:
    """Compute the probability that a Yes is scored above a No, ties counted half; NaN if either is absent."""
    yes = int(consistent.sum())
    no = int((~consistent).sum())
    if not yes or not no:
        return float("nan")
    # By ranks, since an interval draws it a thousand times, and pairs of a Yes and a No grow with the square.
    _, value_index, count = np.unique(p_yes, return_inverse=True, return_counts=True)
    rank = np.cumsum(count) - (count - 1) / 2  # the mean rank of each value, from 1
    return float((rank[value_index][consistent].sum() - yes * (yes + 1) / 2) / (yes * no))
