"""What a judge's run does beside learning: log, mark checkpoints complete, stop on a signal, skip bad gradients."""

from __future__ import annotations

import math
import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pacorl.engine.logbook import TIME, Logbook
from pacorl.io.documents import write_json
from pacorl.train_judge.trainer import LossSums

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
MARK = "complete.json"
"""Written last of all: a checkpoint without it was cut short, or is still being written."""
UNLOGGED = ("runtime", "samples_per_second", "steps_per_second")


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints that carry the mark, oldest first."""
    marked = (path for path in folder.glob("checkpoint-*") if (path / MARK).exists())
    return sorted((path for path in marked if CHECKPOINT.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimizer steps that a checkpoint's name says."""
    return int(checkpoint.name.rpartition("-")[2])


class RunLog(TrainerCallback):  # type: ignore[misc]
    """Write the Trainer's logs as lines of kind `train` and `evaluation`; the last step is always logged, evaluated
    and saved."""

    def __init__(self, logbook: Logbook, *, evaluates: bool) -> None:
        self.logbook, self.evaluates = logbook, evaluates

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if state.global_step >= state.max_steps:
            control.should_log = control.should_save = True
            control.should_evaluate = self.evaluates
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        logs = logs or {}
        measured = {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_")}
        if measured:
            measured[f"{TIME}evaluation"] = measured["runtime"]
            self._write("evaluation", state, {name: v for name, v in measured.items() if name not in UNLOGGED})
        elif "loss" in logs:
            self._write("train", state, {name: value for name, value in logs.items() if name != "epoch"})

    def _write(self, kind: str, state: TrainerState, values: Mapping[str, float]) -> None:
        # Counted from the step: the Trainer's own epoch is a rounded share.
        share = state.global_step / state.max_steps * state.num_train_epochs if state.max_steps else 0.0
        self.logbook.write(kind, epoch=math.floor(share + 1e-9), step=state.global_step, values=values)


class Checkpoints(TrainerCallback):  # type: ignore[misc]
    """Mark a checkpoint once every process has written its part, then deletes all but the newest `keep`.

    The Trainer's own rotation would delete the last good one before the new one is known to be whole.
    """

    def __init__(self, sums: LossSums, *, keep: int) -> None:
        self.sums, self.keep = sums, keep

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        sums = self.sums.over_ranks(args.device)
        PartialState().wait_for_everyone()
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        write_json(folder / f"checkpoint-{state.global_step}" / MARK, {"step": state.global_step, "tally": sums})
        for path in complete_checkpoints(folder)[: -self.keep]:
            shutil.rmtree(path)


class StopOnSignal(TrainerCallback):  # type: ignore[misc]
    """SIGTERM and SIGINT end training after the optimizer step that is going on, with a checkpoint; a second one
    kills."""

    def __init__(self) -> None:
        self.requested = self.stopped = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within the block, a signal requests the stop."""

        def request(number: int, frame: FrameType | None) -> None:
            if self.requested:
                raise KeyboardInterrupt
            self.requested = True

        before = {number: signal.signal(number, request) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        # A signal may reach one process only, and all have to stop at the same step: the next one is a collective.
        if reduce(torch.tensor(float(self.requested), device=args.device), "sum").item():
            self.stopped = state.global_step < state.max_steps
            control.should_save = control.should_training_stop = True
        return control


class SkipBadSteps(TrainerCallback):  # type: ignore[misc]
    """A step whose gradients are not finite changes no weight, on all processes alike; after `limit` of them in a row
    training ends with a checkpoint, and `failure` says why."""

    def __init__(self, *, limit: int) -> None:
        self.limit, self.in_a_row, self.failure = limit, 0, ""

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        bad = float(not all(bool(gradient.isfinite().all()) for gradient in gradients))
        if not reduce(torch.tensor(bad, device=args.device), "sum").item():
            self.in_a_row = 0
            return
        self.in_a_row += 1
        for parameter in model.parameters():
            parameter.grad = None  # AdamW passes over it: neither weights nor moments move

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if self.in_a_row >= self.limit:
            self.failure = (
                f"{self.in_a_row} optimizer steps in a row had gradients that are not finite; the state is saved. "
                "Lower optimizer.lr or look for an image or answer that is broken"
            )
            control.should_save = control.should_training_stop = True
        return control


class Progress(ProgressCallback):  # type: ignore[misc]
    """The Trainer's bars, with the loss beside them instead of a line per log."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{logs['loss']:.3f}", accuracy=f"{logs['decision_accuracy']:.3f}")
