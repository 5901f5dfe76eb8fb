"""Callbacks of a run, and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pacorl.core.metric_names import shown_names
from pacorl.core.ranking import Interval
from pacorl.io.documents import JsonObject, read_jsonl
from pacorl.report.figures import amount, interval_text
from pacorl.report.folder import read_run
from pacorl.report.results import rows_of

if TYPE_CHECKING:
    from pacorl.grpo.run import Run


@dataclass(frozen=True, slots=True, repr=False)
class TrainResult:
    """Output of a finished training."""

    folder: Path
    """The run's folder."""
    adapter: Path
    """Folder of the trained LoRA, for `Generator.from_pretrained(…, adapter=…)`, diffusers and PEFT."""
    metrics: JsonObject
    """Line of the last evaluation in metrics.jsonl: `kind`, `epoch`, `step`, and a number per metric, None if it was
    not finite."""
    before: JsonObject
    """Line of the first evaluation, before training, in the same form."""
    changes: Mapping[str, Interval | None]
    """Change of each measure by the page's names, over the prompts and seeds of both evaluations: mean, number of
    prompts (`groups`) and ends of its 95 % interval, which are None below 8 prompts. None if the page has none; empty
    without saved images."""
    history: Sequence[JsonObject]
    """All lines of metrics.jsonl in their order; `kind` is `epoch` or `evaluation`."""
    page: Path
    """The run's report, an HTML file."""

    @classmethod
    def of(cls, folder: Path, *, adapter: Path) -> TrainResult:
        """Read the result of a run's folder, whose page is written."""
        history = read_jsonl(folder / "metrics.jsonl")
        evaluations = [line for line in history if line["kind"] == "evaluation"]
        changes = {row.name: row.difference for row in rows_of(read_run(folder))}
        return cls(folder, adapter, evaluations[-1], evaluations[0], changes, history, folder / "report.html")

    def __repr__(self) -> str:
        """Return each measure before and after, its change with the interval, and the paths."""
        before = shown_names(self.before)
        after = shown_names(self.metrics)
        lines = []
        for name, difference in self.changes.items():
            change = f", change {interval_text(difference, signed=True)}" if difference else ""
            lines.append(f"{name}: {amount(before.get(name))} before, {amount(after.get(name))} after{change}")
        return "\n".join([*lines, f"adapter: {self.adapter}", f"page: {self.page}"])


class TrainerCallback:
    """Hooks of a run, under the names of transformers' callbacks; a subclass overrides those that it needs.

    Every process calls them, so each needs the same callbacks. `trainer.should_training_stop = True` on any process
    ends the run on all after the epoch, evaluated and saved. Before the first epoch the saved adapter is untrained.

    Example:
        from pacorl import TrainerCallback

        class StopAtTarget(TrainerCallback):
            def on_epoch_end(self, trainer, metrics):
                trainer.should_training_stop = metrics["reward/redness/mean"] > 0.9
    """

    def on_train_begin(self, trainer: Run) -> None:
        """Called before the first evaluation."""

    def on_epoch_end(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        """Called after each epoch, with its line of metrics.jsonl."""

    def on_evaluate(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        """Called after each evaluation, with its line of metrics.jsonl."""

    def on_save(self, trainer: Run, checkpoint: Path) -> None:
        """Called after each regular checkpoint."""

    def on_train_end(self, trainer: Run, result: TrainResult) -> None:
        """Called at the end of an uninterrupted training."""
