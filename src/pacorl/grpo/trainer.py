"""PaCo-GRPO: sample groups, judge them, and make samples above their group's mean more likely.

    pacorl train-policy configs/flux_t2is.yaml

`grpo.epoch` is one epoch from top to bottom, and `Run` its state. The trainer decides when to evaluate, to save and to
stop. Evaluation is at full size, without noise, with the averaged adapter (arXiv 2512.04784, §3.3 and §7).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pacorl.config import base as configs
from pacorl.grpo.callbacks import TrainerCallback, TrainResult
from pacorl.grpo.epoch import run_epoch
from pacorl.grpo.evaluate import evaluate
from pacorl.grpo.inputs import AnyPrompts, AnyRewards, run_inputs
from pacorl.grpo.monitor import HackingSuspectedError
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.run import ExtraMetrics, Run
from pacorl.grpo.start import Resume
from pacorl.io.quiet import quiet, quiet_loading
from pacorl.report.publish import push, write_card
from pacorl.rewards.reward import RewardError, shortened
from pacorl.runtime.stopping import Interrupted

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
    trainer = PolicyTrainer(config, resume=resume, allow_changes=allow_changes, extra_metrics=extra_metrics)
    return trainer.train_to_end().folder


class PolicyTrainer(Run):
    """A PaCo-GRPO run that is trained to its end.

    Example:
        from pacorl import PolicyTrainer, prompt_from

        def redness(prompts, images):
            return [image.convert("RGB").resize((1, 1)).getpixel((0, 0))[0] / 255 for image in images]

        scenes = ["waving, flag", "jumping, boat", "standing, tree", "waving, lamp"]
        heroes = ["red round hero, crown, night", "blue square hero, cap, day"]
        prompts = [prompt_from("tiny", theme=hero, panels=scenes) for hero in heroes]
        trainer = PolicyTrainer("tiny", rewards=[redness], prompts=prompts, epochs=1, out="runs/red")
        result = trainer.train()
        print(result.before["redness"], result.metrics["redness"], result.changes["redness"], result.page)
    """

    def __init__(
        self,
        model: Any,
        *,
        rewards: AnyRewards | None = None,
        reward_weights: Sequence[float] | None = None,
        prompts: AnyPrompts | None = None,
        evaluation_prompts: AnyPrompts | None = None,
        peft_config: Any = None,
        model_init_kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        resume: Resume = False,
        allow_changes: bool = False,
        extra_metrics: ExtraMetrics | None = None,
        **settings: Any,
    ) -> None:
        """Load and check everything that the run needs, cheap checks first.

        Args:
            model: a recipe's name, a YAML file, a kind of generator (its published checkpoint), a checkpoint (folder
                or hub name), a loaded diffusers pipeline, which the run keeps, or a whole PolicyConfig.
            rewards: functions of prompts and images, also of TRL's signature `f(prompts, completions, **kwargs)`;
                names of rewards; sections of a config's `rewards`. A mapping names functions. With a PolicyConfig, a
                mapping's functions join its rewards.
            reward_weights: one weight per reward of a list.
            prompts: texts, `Prompt`s, records with `prompt` (also of a `datasets.Dataset`), or a source as in a config.
            evaluation_prompts: prompts to evaluate; by default the training prompts, which the log notes.
            peft_config: a `peft.LoraConfig`, of which r, lora_alpha and target_modules hold.
            model_init_kwargs: keys of the config's section `model`, such as `dtype` or `guidance_scale`.
            callbacks: see `TrainerCallback`.
            resume: False for a new run, True or "auto" to continue from the newest checkpoint, or a checkpoint folder.
            allow_changes: whether a resumed run may change its config. The log records the changes.
            extra_metrics: additional metrics of each evaluation's images.
            settings: further keys of the config, e.g. `epochs=20, optimizer={"lr": 1e-4}`.

        Raises:
            ValueError: if the run cannot be made; one line with the argument or key, the value and the fix.
        """
        # A wrong callback would fail only at its first event, after everything is loaded.
        for position, callback in enumerate(callbacks):
            if not isinstance(callback, TrainerCallback):
                raise ValueError(
                    f"callbacks[{position}] is a {type(callback).__name__}; derive its class from TrainerCallback"
                )
        self.callbacks = list(callbacks)
        """Hooks of the run."""
        # Convert the arguments to a config, functions and a pipeline.
        inputs = run_inputs(
            model,
            rewards=rewards,
            reward_weights=reward_weights,
            prompts=prompts,
            evaluation_prompts=evaluation_prompts,
            peft_config=peft_config,
            model_init_kwargs=model_init_kwargs,
            resume=resume,
            **settings,
        )
        quiet_loading()
        try:
            with quiet("transformers"):  # it notes that torchvision is missing, which nothing here uses
                super().__init__(
                    inputs.config,
                    resume=resume,
                    allow_changes=allow_changes,
                    rewards=inputs.functions,
                    extra_metrics=extra_metrics,
                    pipeline=inputs.pipeline,
                )
            return
        except RewardError as error:
            fault = shortened(error)
        raise fault

    def train(self) -> TrainResult:
        """Train to the end.

        Raises:
            Interrupted: after a SIGTERM or SIGINT, when the state is saved.
            ValueError: if training cannot go on, when the state is saved; the message names the cause and the fix.
        """
        fault: Exception
        try:
            return self.train_to_end()
        except Interrupted as stop:
            # A script that was stopped shows one line of its own, and no frame of the epoch.
            fault = Interrupted(str(stop).replace("--resume auto", 'resume="auto"'))
        except RewardError as error:
            fault = shortened(error)
        raise fault

    def train_to_end(self) -> TrainResult:
        """Train as `train` does; the message of a stop names the command's option."""
        if self.runtime.is_main:
            # Once, not on every rank.
            for change in configs.described(self.changes):
                logger.warning("resumed with another setting: %s", change)
        try:
            # The guard is inside: a second SIGTERM must not end the process while it saves.
            with self.runtime.signals, self.bars, self.guard():
                self._call_back("on_train_begin")
                self._run_epochs()
        finally:
            self.close()

        # After the guard: the run is closed, and no rank waits for another.
        result = TrainResult.of(self.config.out, adapter=self.config.out / "adapter")
        self._call_back("on_train_end", result)
        return result

    def push_to_hub(self, repo_id: str, *, licence: str = "", private: bool = True) -> str:
        """Write the model card and upload it with the adapter, as `pacorl publish` does.

        Args:
            repo_id: OWNER/NAME on the hub.
            licence: the hub's identifier; the base's if it is known.
            private: whether only its owner sees a new repository.

        Returns:
            The repository's address; empty on other processes than the main one.

        Raises:
            ValueError: if the run is not finished, or its licence is not known.
        """
        if not self.runtime.is_main:
            return ""
        return push(write_card(self.config.out, licence=licence), repo_id, private=private)

    def _call_back(self, event: str, *values: object) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *values)
        # One rank that stopped alone would leave the others in a collective. After the end no rank waits.
        if self.callbacks and event != "on_train_end":
            self.should_training_stop = any(self.runtime.gather(self.should_training_stop))

    def run_epoch(self) -> dict[str, float]:
        """Run the coming epoch and return its metrics; see `grpo.epoch`."""
        return run_epoch(self)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the averaged adapter and return the metrics; see `grpo.evaluate`."""
        return evaluate(self)

    def _run_epochs(self) -> None:
        if self.credit_note:
            self.bars.say(self.credit_note)
        self.bars.epoch(self.epoch, note="")
        if self._evaluate_if_due() and (self.epoch or self.finished):
            # The run was stopped in this evaluation, and its checkpoint has no score yet; or a callback ends it before
            # its first epoch, and it has no checkpoint.
            self._save_if_due()
        self.write_page(moment=f"epoch {self.epoch}")

        while not self.finished:
            metrics = self.run_epoch()
            self._call_back("on_epoch_end", metrics)
            # Only the means fit beside the bar.
            means = {name.split("/")[1]: metrics[name] for name in metrics if name.endswith("/mean")}
            self.bars.epoch(self.epoch, note="  ".join(f"{name} {mean:.3f}" for name, mean in means.items()))
            self._evaluate_if_due()
            if self.evaluated == self.epoch or self.epoch % self.config.save_every == 0:
                self.write_page(moment=f"epoch {self.epoch}")
            self._save_if_due()

            # Warn once per sign. If a limit's action is stop, save before the error.
            alarms, self.alarms = self.alarms, []
            for alarm in alarms:
                self.warn_once(alarm.sign, f"reward hacking? after epoch {self.epoch}: {alarm}")
            stops = [alarm for alarm in alarms if alarm.action == "stop"]
            if stops:
                self.save()
                raise HackingSuspectedError(stops, epoch=self.epoch)

    def _evaluate_if_due(self) -> bool:
        """Evaluate before the first epoch, after the last, and every so many between; once each, also after a stop.

        Returns:
            Whether it did.
        """
        every = self.config.evaluation.every
        due = self.epoch == 0 or self.finished or (every and self.epoch % every == 0)
        if not due or self.evaluated == self.epoch:
            return False
        metrics = self.evaluate()
        self._call_back("on_evaluate", metrics)
        return True

    def _save_if_due(self) -> None:
        """Save after the last epoch, and every so many before it."""
        if self.finished or self.epoch % self.config.save_every == 0:
            checkpoint = self.save()
            self._call_back("on_save", checkpoint)
