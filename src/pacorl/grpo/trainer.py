"""PaCo-GRPO: sample groups, judge them, and make samples above their group's mean more likely.

    pacorl train-policy configs/flux_t2is.yaml

`grpo.epoch` is one epoch from top to bottom, and `PolicyTrainer` its state, built once in the order in which things can
fail. Evaluation is at full size, without noise, with the averaged adapter (arXiv 2512.04784, §3.3 and §7).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pacorl.core.metric_names import ALARM
from pacorl.core.objectives import OBJECTIVES
from pacorl.grpo import builders, checkpoint
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.epoch import run_epoch
from pacorl.grpo.evaluate import evaluate, weighted_reward
from pacorl.grpo.lora_training import BadGradientsError, LoraTraining
from pacorl.grpo.monitor import Alarm, HackingMonitor
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rollout import Draw
from pacorl.grpo.rows import divide
from pacorl.grpo.scoring import PER_CALL, Scorer, overlaps
from pacorl.io.documents import JsonObject
from pacorl.io.files import disk_errors, own_folder, write_atomic
from pacorl.io.net import OUTAGE_SECONDS, UnreachableError
from pacorl.io.quiet import quiet, quiet_loading
from pacorl.judge.judge import Judge, RemoteJudge, close_judge
from pacorl.records.leaks import LEAKS
from pacorl.rewards.consistency import Consistency
from pacorl.rewards.reward import RewardFunction
from pacorl.runtime.logbook import Logbook, Progress, TrainResult, log_lines
from pacorl.runtime.processes import Runtime, SharedFault, allow_tf32, lost_ranks
from pacorl.runtime.stopping import Interrupted
from pacorl.runtime.turns import Turns
from pacorl.types import Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

ExtraMetrics = Callable[[Sequence[Prompt], Sequence["Image"]], Mapping[str, float]]
"""Additional evaluation metrics from prompts and images, such as an oracle's. They are logged and never rewarded."""
Listener = Callable[["PolicyTrainer", JsonObject], None]
"""Called on every process with the trainer and each line of metrics.jsonl: its `kind` is `epoch` or `evaluation`."""


class PolicyTrainer:
    """A PaCo-GRPO run: its models, records and progress.

    Example:
        from pacorl import PolicyConfig, PolicyTrainer

        def redness(prompts, images):
            return [image.convert("RGB").resize((1, 1)).getpixel((0, 0))[0] / 255 for image in images]

        config = PolicyConfig.from_yaml(
            "tiny", "rewards=[{name: redness}]", "prompts.train=tiny:train:2", "prompts.evaluation=tiny:dev:2",
            "prompts_per_epoch=2", "group_size=4", "objective={}", "epochs=1", "out=runs/red",
        )
        result = PolicyTrainer(config, rewards={"redness": redness}).train()
        print(result.before["redness"], result.metrics["redness"], result.folder)
    """

    def __init__(
        self,
        config: PolicyConfig,
        *,
        rewards: Mapping[str, RewardFunction] | None = None,
        listeners: Sequence[Listener] = (),
        extra_metrics: ExtraMetrics | None = None,
        resume: bool = False,
    ) -> None:
        """Load and check everything that the run needs, cheap checks first.

        Args:
            rewards: functions of prompts and images, by their names among the config's rewards.
            listeners: functions that are called with each line of the log.
            extra_metrics: additional metrics of each evaluation's images.
            resume: whether to continue from the newest checkpoint, if there is one.

        Raises:
            ValueError: if the run cannot be made; one line with the key, the value and the fix.
        """
        self.functions = rewards or {}
        """Rewards that are Python functions, by name."""
        self.listeners = list(listeners)
        self.extra_metrics = extra_metrics
        # The given config is not kept: its judges may be idle.
        self.config = builders.checked_config(config, self.functions)
        """The config without unused judges."""

        # Progress, which a checkpoint and the log restore.
        self.epoch = 0
        """Finished epochs."""
        self.evaluated = -1
        """Epoch of the newest evaluation; −1 before the first."""
        self.score: float | None = None
        """Score of the newest evaluation: the weighted sum of its rewards."""
        self.alarms: list[Alarm] = []
        """Alarms of the monitor that are not raised yet."""
        self._warned: set[str] = set()

        quiet_loading()
        with quiet("transformers"):  # it notes that torchvision is missing, which nothing here uses
            self._build(resume=resume)

    # --- building, in the order in which things can fail -------------------------------------------------------

    def _build(self, *, resume: bool) -> None:
        # 1. Cheap checks: an impossible config fails before weights load.
        self.train_prompts, self.evaluation_prompts, self._leaks = builders.read_prompts(self.config)
        self.config, self._credit_note = builders.with_credit(self.config, self.functions, self.train_prompts)
        config = self.config
        self.runtime = Runtime(patience=max(config.reward_timeout, OUTAGE_SECONDS))
        """Processes of the run."""
        self.objective = OBJECTIVES[config.objective.name]
        """Training objective."""
        if self.runtime.sharded and config.memory == "lowest":
            raise ValueError(
                "memory lowest and FSDP2: what is streamed is not there to be sharded; take memory: low, or launch "
                "with ddp.yaml"
            )
        allow_tf32(allowed=config.model.dtype == "bfloat16")
        prompts = [*self.train_prompts, *self.evaluation_prompts]
        foreign = config.generator.foreign_prompt(config.model.checkpoint, prompts)
        for warning in (self._leaks, foreign):
            self.warn_once(warning, warning)

        # 2. The folder and its checkpoint, then models and records. Any of it may need the other ranks.
        self._open = ExitStack()
        """Judges' processes and the lock on the folder."""
        with lost_ranks(self.runtime.rank, self.runtime.world), ExitStack() as on_fault:
            on_fault.callback(self._open.close)
            self.runtime.on_main(lambda: self._open.enter_context(own_folder(config.out)))
            start = self.runtime.on_main(checkpoint.starting_point, config, resume=resume)
            # Remote judges first: a server publishes the digest of its weights.
            runtime = self.runtime
            open_judges = partial(builders.open_judges, config, device=runtime.device, processes=runtime.world)
            judges = open_judges(remote=True, resumed=start is not None)
            for judge in judges.values():
                self._open.callback(close_judge, judge)
            # Only the main process reads a local judge's weights for their digest.
            self.identities = self.runtime.on_main(checkpoint.identities_of, config, judges, self.functions)
            """Identities of everything but the config that decides rewards: judges, and the user's code as executed."""
            if start:
                self.runtime.on_main(checkpoint.check_changes_since, start, config, identities=self.identities)
            self._build_models(judges, open_judges)
            # A judge's checkpoint may have been fetched only now.
            identities = self.runtime.on_main(checkpoint.identities_of, config, judges, self.functions)
            self.identities = identities | self.identities
            self._build_records(start)
            on_fault.pop_all()  # `close` closes them

    def _build_models(self, judges: dict[str, Judge], open_judges: Callable[..., dict[str, Judge]]) -> None:
        config = self.config
        device = self.runtime.device

        # 1. Policy, and the conditionings of its prompts.
        size, evaluation_size = Size(*config.sampling.size), Size(*config.evaluation.size)
        self.policy = builders.build_adapted_policy(config, sizes=[size, evaluation_size], device=device)
        keys = {self.policy.forward_key(prompt, size) for prompt in self.train_prompts}
        self.division = divide(config, world=self.runtime.world, sharded=self.runtime.sharded, mixed=len(keys) > 1)
        """Prompts and batches of an epoch that divide over updates and processes."""
        self.cache = ConditioningCache(self.policy)
        self.cache.prepare(self.train_prompts, size)
        self.cache.prepare(self.evaluation_prompts, evaluation_size)
        self.policy.free_encoders()  # now: encoders, transformer and judge together may exceed the device's memory
        torch.cuda.empty_cache()
        builders.place_transformer(config, self.policy, device=device, sharded=self.runtime.sharded)

        # 2. Scorers, after the text encoders are freed: both together may not fit on the device.
        in_turns = config.memory != "normal" and not self.runtime.sharded
        self.turns = Turns(self.policy.transformer, device=device, enabled=in_turns)
        """Generator and scorers that alternate on the device, with little memory."""
        with self.turns.scoring():
            judges = judges | open_judges(remote=False)
            self.rewards, self.held_out = builders.build_run_rewards(
                config,
                self.functions,
                judges,
                device=device,
                train=self.train_prompts,
                evaluation=self.evaluation_prompts,
            )
            self.turns.add([*judges.values(), *self.rewards.values(), *self.held_out.values()])
        if not self.turns.scorers:  # all scores come from other processes
            self.turns.enabled = False
        own_judge = judges.get("rewards")
        asking = (reward for reward in self.rewards.values() if isinstance(reward, Consistency))
        self.consistency = next(asking, Consistency(own_judge) if own_judge else None)
        """The reward of consistency, or one of the run's judge, which asks for the theme; None without a judge."""
        has_local_judge = config.judge is not None and not config.judge.remote
        self.scorer = Scorer(
            self.rewards,
            # In turns the scorers are off the device during sampling.
            overlap=not self.turns.enabled and overlaps(config.judge, device=device),
            timeout=config.reward_timeout,
            # Not `check_stop`, a collective: each rank waits for its own scores.
            check_stop=self.runtime.check_signal,
            group_size=config.group_size if self.division.whole_groups else 1,
            per_call=PER_CALL if has_local_judge and device.type == "cuda" else 1,
        )
        self._open.callback(self.scorer.close)

        # 3. Optimizer and copies of the adapter.
        lags = self.objective.needs == "endpoint"
        self.lora = LoraTraining(self.policy, config.optimizer, runtime=self.runtime, lags=lags)
        # From now on an outage is waited for.
        for judge in judges.values():
            if isinstance(judge, RemoteJudge):
                judge.wait_for_outages()

    def _build_records(self, start: Path | None) -> None:
        config = self.config
        is_main = self.runtime.is_main
        if start:
            self.epoch = checkpoint.restore(self.lora, start)["epoch"]
        # The checkpoint decides the length of the log: later lines are written again.
        self.logbook = Logbook(config, step=self.lora.step if start else -1, epoch=self.epoch, main=is_main)
        self.monitor = HackingMonitor(prompts=self.division.prompts)
        # Replay the log: the monitor compares with values from the start of the run.
        for line in self.runtime.on_main(log_lines, config.out):
            self.monitor.update(line)
            if line["kind"] == "evaluation":
                self.evaluated = line["epoch"]
                self.score = weighted_reward(config.rewards, line)
        self.progress = Progress(epochs=config.epochs)
        self.checkpoints = checkpoint.CheckpointWriter(self.lora, config, progress=self.progress)
        """Writer of checkpoints, on a thread."""
        self._open.callback(self.checkpoints.close)
        if is_main and self._leaks:
            write_atomic(config.out / LEAKS, f"{self._leaks}\n")

    # --- training ----------------------------------------------------------------------------------------------

    def train(self) -> TrainResult:
        """Train to the end.

        Raises:
            Interrupted: after a SIGTERM or SIGINT, when the state is saved.
            ValueError: if training cannot go on, when the state is saved; the message names the cause and the fix.
        """
        self.progress.shown = self.runtime.is_main
        try:
            # The guard is inside: a second SIGTERM must not end the process while it saves.
            with self.runtime.signals, self._guard():
                self._run_epochs()
        finally:
            self.close()
        return TrainResult.of(self.config.out)

    def _run_epochs(self) -> None:
        for note in (self._credit_note, self.division.differences(self.config)):
            if note:
                self.progress.say(note)
        self.progress.epoch(self.epoch)
        if self._evaluate_if_due() and self.epoch:
            # The run was stopped in this evaluation, and its checkpoint has no score yet.
            self._save_if_due()

        while not self.finished:
            metrics = self.run_epoch()
            means = []
            for name, value in metrics.items():
                if name.endswith("/mean"):
                    means.append(f"{name.split('/')[1]} {value:.3f}")
            self.progress.epoch(self.epoch, note="  ".join(means))
            self._evaluate_if_due()
            self._save_if_due()
            self._raise_alarms()
        self.checkpoints.finish()

    run_epoch = run_epoch
    """Run the next epoch, and return its metrics (`grpo.epoch`)."""
    evaluate = evaluate
    """Evaluate the averaged adapter, and return the metrics (`grpo.evaluate`)."""

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
        return True

    def _save_if_due(self) -> None:
        """Save after the last epoch, and every so many before it."""
        if self.finished or self.epoch % self.config.save_every == 0:
            self.save(wait=False)

    def _raise_alarms(self) -> None:
        """Warn once per sign of reward hacking. If a limit's action is stop, save before the error."""
        alarms, self.alarms = self.alarms, []
        for alarm in alarms:
            self.warn_once(alarm.sign, f"reward hacking? after epoch {self.epoch}: {alarm}")
        if alarms and self.config.monitor == "stop":
            self.save()
            raise ValueError(
                f"stopped after epoch {self.epoch}, and saved: {'; '.join(map(str, alarms))}. Look at the samples; "
                "reward what is lost as well, or lower optimizer.lr, or go on with monitor=warn"
            )

    @property
    def finished(self) -> bool:
        """Whether all epochs are done."""
        return self.epoch >= self.config.epochs

    # --- policies of the epoch ---------------------------------------------------------------------------------

    def draw_of(self, epoch: int) -> Draw:
        """Choose the parameters of an epoch's rollouts; its noise window decides the stochastic steps."""
        config = self.config
        return Draw(
            self.policy,
            config.sampling.sampler(epoch, group_size=config.group_size, seed=config.seed, spec=self.objective),
            self.cache,
            seed=config.seed,
            epoch=epoch,
            batch=self.division.batch,
            nodes=config.nodes_of_step,
            as_trained=config.model.compile != "none" and self.objective.needs == "path",
            by_panel=config.advantages.credit == "panel",
        )

    def sampling_policy(self) -> AbstractContextManager[None]:
        """Swap in the sampling policy, if it differs from the trained policy."""
        old = self.lora.old
        # Path objectives sample with the trained weights themselves.
        if old is None:
            return nullcontext()
        # Without a lag the sampling policy is the policy at the start of the epoch.
        if self.objective.lag is None:
            old.approach(1.0)
        return old.swapped_in()

    # --- records -----------------------------------------------------------------------------------------------

    def record(self, kind: str, metrics: Mapping[str, float]) -> dict[str, float]:
        """Write a line of the log with the monitor's alarms, hand it to the listeners, and return its metrics."""
        metrics = dict(metrics)
        alarms = self.monitor.update(metrics)
        if self.config.monitor != "off":
            # They wait until the epoch is evaluated and saved.
            self.alarms += alarms
            metrics |= {f"{ALARM}{alarm.sign}": 1.0 for alarm in alarms}
        self.logbook.write(kind, epoch=self.epoch, step=self.lora.step, values=metrics)
        for listener in self.listeners:
            listener(self, {"kind": kind, "epoch": self.epoch, "step": self.lora.step, **metrics})
        return metrics

    def warn_once(self, topic: str, message: str) -> None:
        """Log a warning on the main process, once per topic; an empty message is none."""
        if message and topic not in self._warned:
            self._warned.add(topic)
            if self.runtime.is_main:
                logger.warning(message)

    # --- saving and stopping -----------------------------------------------------------------------------------

    def save(self, *, wait: bool = True) -> Path:
        """Write a checkpoint to resume from, and the averaged adapter for use elsewhere. All ranks call it.

        Args:
            wait: whether it is on the disk at the return; else it is written on a thread while the run goes on.

        Returns:
            The checkpoint.

        Raises:
            OSError: on all ranks, if the disk is full.
        """
        state = {
            "epoch": self.epoch,
            # Of these weights: None if the newest evaluation is older.
            "score": self.score if self.evaluated == self.epoch else None,
            "identities": self.identities,
        }
        target = self.checkpoints.save(state)
        if wait:
            self.checkpoints.finish()
        return target

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Save the state and raise on all ranks if a rank fails or a signal stops the block.

        Raises:
            Interrupted: after a signal or a time limit; the run goes on with --resume auto.
            UnreachableError: after an outage; the run goes on with --resume auto.
            Exception: raised by a reward on any rank.
        """
        with lost_ranks(self.runtime.rank, self.runtime.world), disk_errors(self.config.out):
            try:
                yield
            except (Interrupted, SharedFault, BadGradientsError) as error:
                self.save()
                fault = error.fault if isinstance(error, SharedFault) else error
                for kind in (Interrupted, UnreachableError):
                    if isinstance(fault, kind):
                        saved = f"stopped after epoch {self.epoch}, and saved; go on with --resume auto"
                        raise kind(f"{fault}; {saved}") from None
                raise fault from fault.__cause__

    def close(self) -> None:
        """Close the log, end the judges' processes, and release the lock on the folder."""
        self.logbook.close()
        self._open.close()
