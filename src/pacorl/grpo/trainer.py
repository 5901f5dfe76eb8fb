"""PaCo-GRPO: sample groups, judge them, and make samples above their group's mean more likely.

    pacorl train-policy configs/flux_t2is.yaml

`grpo.epoch` is one epoch from top to bottom, and `Run` its state. The trainer decides when to evaluate, to save and to
stop. Evaluation is at full size, without noise, with the averaged adapter (arXiv 2512.04784, §3.3 and §7).
"""

from __future__ import annotations

import logging
from pathlib import Path

from pacorl.config import base as configs
from pacorl.grpo.epoch import run_epoch
from pacorl.grpo.evaluate import evaluate
from pacorl.grpo.monitor import HackingSuspectedError
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.run import ExtraMetrics, Run
from pacorl.grpo.start import Resume
from pacorl.report.page import write_report

logger = logging.getLogger(__name__)


def train_policy(
    config: PolicyConfig,
    *,
    resume: Resume = False,
    allow_changes: bool = False,
    extra_metrics: ExtraMetrics | None = None,
) -> Path:
    """Run a config to its end; see `PolicyTrainer`.

    Returns:
        The run's folder.
    """
    return PolicyTrainer(config, resume=resume, allow_changes=allow_changes, extra_metrics=extra_metrics).train()


class PolicyTrainer(Run):
    """A PaCo-GRPO run that is trained to its end.

    Example:
        from pacorl import PolicyConfig, PolicyTrainer

        def redness(prompts, images):
            return [image.convert("RGB").resize((1, 1)).getpixel((0, 0))[0] / 255 for image in images]

        config = PolicyConfig.model_validate({
            "out": "runs/red", "epochs": 2, "prompts_per_epoch": 2, "group_size": 4, "trackers": [],
            "model": {"checkpoint": "tiny", "dtype": "float32", "max_sequence_length": 48},
            "adapter": {"rank": 4, "alpha": 8}, "judge": "none", "rewards": [{"name": "redness"}],
            "prompts": {"train": "tiny:train:4", "evaluation": "tiny:dev:2"},
            "sampling": {"size": [32, 32], "steps": 3, "batch": 4}, "evaluation": {"size": [64, 64], "steps": 2},
        })
        folder = PolicyTrainer(config, rewards={"redness": redness}).train()
    """

    def train(self) -> Path:
        """Train to the end.

        Returns:
            The run's folder.

        Raises:
            Interrupted: after a SIGTERM or SIGINT, when the state is saved.
            ValueError: if training cannot go on, when the state is saved; the message names the cause and the fix.
        """
        if self.runtime.is_main:
            for change in configs.described(self.changes):
                logger.warning("resumed with another setting: %s", change)
        try:
            # The guard is inside: a second SIGTERM must not end the process while it saves.
            with self.runtime.signals(save=self.last_state.save, release=self._release), self.bars, self.guard():
                self._run_epochs()
        finally:
            self.close()
        return self.config.out

    def run_epoch(self) -> dict[str, float]:
        """Run the coming epoch and return its metrics; see `grpo.epoch`."""
        return run_epoch(self)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the averaged adapter and return the metrics; see `grpo.evaluate`."""
        return evaluate(self)

    def _run_epochs(self) -> None:
        self.bars.epoch(self.epoch, note="")
        self.keep_state()
        if self._evaluate_if_due() and self.epoch:
            # The run was stopped in this evaluation, and its checkpoint has no score yet.
            self._save_if_due()
        self._write_page()

        while not self.finished:
            metrics = self.run_epoch()
            self.keep_state()
            means = {name.split("/")[1]: metrics[name] for name in metrics if name.endswith("/mean")}
            self.bars.epoch(self.epoch, note="  ".join(f"{name} {mean:.3f}" for name, mean in means.items()))
            self._evaluate_if_due()
            self._write_page_if_due()
            self._save_if_due()
            self._raise_alarms()

    def _evaluate_if_due(self) -> bool:
        """Evaluate before the first epoch, after the last, and every so many between; once each, also after a stop.

        Returns:
            Whether it did.
        """
        every = self.config.evaluation.every
        due = self.epoch == 0 or self.finished or (every and self.epoch % every == 0)
        if not due or self.evaluated == self.epoch:
            return False
        self.evaluate()
        self.keep_state()
        return True

    def _save_if_due(self) -> None:
        """Save after the last epoch, and every so many before it."""
        if self.finished or self.epoch % self.config.save_every == 0:
            self.save()

    def _raise_alarms(self) -> None:
        """Warn once per sign. If a limit's action is stop, save and raise HackingSuspectedError."""
        raised = self.alarms
        self.alarms = []
        for alarm in raised:
            self.warn_once(alarm.sign, f"reward hacking? after epoch {self.epoch}: {alarm}")
        stops = [alarm for alarm in raised if alarm.action == "stop"]
        if stops:
            self.save()
            raise HackingSuspectedError(stops, epoch=self.epoch)

    def _write_page_if_due(self) -> None:
        """Build report.html with each evaluation and each checkpoint."""
        if self.evaluated == self.epoch or self.epoch % self.config.save_every == 0:
            self._write_page()

    def _write_page(self) -> None:
        """Build report.html, on the main process."""
        if not self.runtime.is_main:
            return
        try:
            write_report(self.config.out)
        except (OSError, ValueError) as fault:  # the run is worth more than its page
            logger.warning("report.html was not built after epoch %d: %s", self.epoch, fault)

    def _release(self) -> None:
        """Close processes and locks when the main thread hangs; called on another thread."""
        self.bars.__exit__()
        self.close()
