"""PaCo-GRPO: sample groups, judge them, and make what was better than its group more likely.

    pacorl train-policy configs/flux_t2is.yaml

One epoch: draw `prompts_per_epoch` groups at the training size with a few stochastic steps, score them, turn scores
into advantages, take `updates_per_epoch` optimizer steps. Evaluation is at full size, without noise, with the
averaged adapter (arXiv 2512.04784, §3.3 and §7).
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pacorl.config import base as configs
from pacorl.config.policy_run import PolicyConfig
from pacorl.core.metric_names import SCOUTS_CORRELATION, SUFFIX_CORRELATION
from pacorl.core.objectives import OBJECTIVES, RATIO_DEVIATION, ObjectiveSpec
from pacorl.core.sampling import Sampler
from pacorl.core.schedule import learning_rate
from pacorl.core.selection import best_and_worst
from pacorl.engine.clock import PhaseClock
from pacorl.engine.conditioning import ConditioningFiles
from pacorl.engine.logbook import Logbook, ProgressBars
from pacorl.engine.monitor import (
    Alarm,
    HackingMonitor,
    HackingSuspectedError,
    Kind,
    PanelStatistics,
)
from pacorl.engine.rows import Row, check_division, epoch_rows
from pacorl.engine.runtime import MAX_BAD_STEPS, Interrupted, Runtime, SharedFault, allow_tf32, lost_ranks
from pacorl.engine.turns import Turns
from pacorl.engine.workers import CallTimeout
from pacorl.io.documents import read_jsonl
from pacorl.io.files import PRIVATE, disk_errors, own_folder, write_atomic
from pacorl.io.outage import UnreachableError
from pacorl.judges.judge import Judge, counts_of
from pacorl.lora.adapters import MovingAverage, OldPolicy
from pacorl.report.page import write_report
from pacorl.rewards.reward import RewardFunction
from pacorl.train import builders
from pacorl.train.checkpoint import (
    Changes,
    TrainedWeights,
    changes_since,
    judge_identities,
    restore,
    save_run,
    starting_point,
)
from pacorl.train.evaluate import Evaluator
from pacorl.train.last_state import LastState
from pacorl.train.ledger import Ledger, start_facts
from pacorl.train.pending import PendingEpoch
from pacorl.train.sampling import EpochSampler
from pacorl.train.start import Resume
from pacorl.train.suffix_check import LEAST_CORRELATION, advantage_correlation
from pacorl.train.update import PolicyLoss, gather_metrics, update_policy
from pacorl.types import Advantages, Prompt, Samples, Size

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

ExtraMetrics = Callable[[Sequence[Prompt], Sequence["Image"]], Mapping[str, float]]
"""Further measures of an evaluation's images, such as an oracle's; they are logged and never rewarded."""


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


class PolicyTrainer:
    """A PaCo-GRPO run. It owns the epoch, the optimizer step and the alarms; everything else it is made of is built
    once and asked.

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

    def __init__(
        self,
        config: PolicyConfig,
        *,
        resume: Resume = False,
        allow_changes: bool = False,
        rewards: Mapping[str, RewardFunction] | None = None,
        extra_metrics: ExtraMetrics | None = None,
    ) -> None:
        """Load and check everything that the run needs; cheap checks come first.

        Args:
            config: the run.
            resume: False for a new run, True or "auto" to go on from the newest checkpoint, or a checkpoint's folder.
            allow_changes: whether a resumed run may have another config than it had; the log says what changed.
            rewards: Python functions by name. A reward of the config that has the name gives the weight and the label;
                a name that the config lacks joins its rewards with weight 1.
            extra_metrics: further measures of each evaluation's images.

        Raises:
            ValueError: if the config cannot be run; the message names the key, the value and the fix.
        """
        self.extra_metrics, functions = extra_metrics, rewards or {}
        self.config = config = builders.checked_config(config, functions)
        """The config as it is run: functions among its rewards, judges that nothing asks left out."""
        self.epoch = 0
        """Finished epochs."""
        self.step = 0
        """Optimizer steps taken."""
        self.evaluated = -1
        """The epoch after which the newest evaluation was made; −1 before the first."""
        self.score: float | None = None
        """The newest evaluation's, by `best_by`."""
        self.bad_steps = 0
        """Consecutive steps skipped for a gradient that is not finite."""
        self.alarms: list[Alarm] = []
        """The monitor's, not yet raised."""
        self.warned: set[str] = set()
        """What was warned of once."""
        # The order is from cheap to dear: a config that cannot work fails before weights load.
        self.train_prompts, self.evaluation_prompts, leaks = builders.read_prompts(config)
        self.runtime = Runtime(patience=builders.patience(config))
        """The processes of the run."""
        self.clock = PhaseClock(self.runtime.position)
        """Seconds of each phase since the run began."""
        allow_tf32(allowed=config.tf32 and config.model.dtype == "bfloat16")
        if leaks and self.runtime.is_main:
            logger.warning(leaks)
        self.turns: Turns | None = None
        """Of generator and scoring models on the device, with little memory."""
        self._judges, self._folder = builders.RunJudges(), ExitStack()
        with lost_ranks(self.runtime.rank, self.runtime.processes):
            self._build(functions, resume=resume, allow_changes=allow_changes)

    def _build(self, functions: Mapping[str, RewardFunction], *, resume: Resume, allow_changes: bool) -> None:
        config = self.config
        with ExitStack() as on_fault:
            on_fault.callback(self._judges.close)
            on_fault.enter_context(self._folder)
            self.runtime.on_main(self._own_folder)
            start = self.runtime.on_main(partial(starting_point, config, resume))
            # The main process alone reads a local judge's weights for their digest.
            compare = partial(changes_since, start, config, allowed=allow_changes) if start else Changes
            changes = self.runtime.on_main(compare)
            check_division(config, world=self.runtime.world, sharded=self.runtime.sharded)
            self._build_models(functions, resumed=start is not None)
            self._build_records(start, changes)
            on_fault.pop_all()  # `train` closes them

    def _own_folder(self) -> None:
        # Nothing is returned: the main process's lock cannot be sent to the others.
        self._folder.enter_context(own_folder(self.config.out))

    def _build_models(self, functions: Mapping[str, RewardFunction], *, resumed: bool) -> None:
        config, device, processes = self.config, self.runtime.device, self.runtime.world
        # A judge elsewhere is met before weights load, and one of this process is loaded after the encoders left, so
        # that both never lie on the device together.
        self._judges.open(config, in_process=False, device=device, processes=processes, resumed=resumed)
        if config.model.warning and self.runtime.is_main:
            logger.warning(config.model.warning)
        self.policy = builders.build_adapted_policy(config, device=device)
        self.cache = ConditioningFiles(self.policy, config.out / "conditionings", runtime=self.runtime)
        try:
            builders.encode_prompts(config, self.policy, self.train_prompts, self.evaluation_prompts, cache=self.cache)
        except SharedFault as error:
            raise error.fault from None
        first, sharded = self.train_prompts[0], self.runtime.sharded
        builders.place_transformer(config, self.policy, self.cache, first, device=device, sharded=sharded)
        if config.in_turns:
            self.turns = Turns(self.policy.transformer, device=device)
        with self.scoring():
            self._load_scorers(functions, resumed=resumed)
            if self.turns:
                judges = (self._judges.rewards, self._judges.held_out)
                self.turns.add([*judges, *self.rewards.values(), *self.held_out.values()])
        if self.turns and not self.turns.scorers:  # all scores come from elsewhere
            self.turns = None
        # Gradient checkpointing acts in train mode only; there is no dropout, so nothing else changes with it.
        self.policy.transformer.train()
        self.policy.transformer, self.optimizer = self.runtime.prepare(
            self.policy.transformer,
            builders.build_optimizer(config, self.policy),
            batch=config.sampling.batch,
            max_norm=config.optimizer.max_grad_norm,
        )
        # Copies are made of what the launcher left: its weights may be sharded now.
        averaging = config.optimizer
        self.average = MovingAverage(self.transformer, decay=averaging.ema_decay, interval=averaging.ema_interval)
        self.old = OldPolicy(self.transformer) if self.objective.needs == "endpoint" else None

    def _load_scorers(self, functions: Mapping[str, RewardFunction], *, resumed: bool) -> None:
        config, device, processes = self.config, self.runtime.device, self.runtime.world
        self._judges.open(config, in_process=True, device=device, processes=processes)
        self.rewards = builders.build_run_rewards(
            config.rewards,
            functions,
            judge=self._judges.rewards,
            device=device,
            checked=[*self.train_prompts, *self.evaluation_prompts],
            tried=self.train_prompts,
            size=config.sampling.size,
            resumed=resumed,
        )
        self.held_out = builders.build_run_rewards(
            config.evaluation.rewards,
            {},
            judge=self._judges.held_out or self._judges.rewards,
            device=device,
            checked=self.evaluation_prompts,
            tried=self.evaluation_prompts,
            size=config.evaluation.size,
            resumed=resumed,
        )

    def _build_records(self, start: Path | None, changes: Changes) -> None:
        config, is_main = self.config, self.runtime.is_main
        settings = config.model_dump(mode="json")
        self.logbook = Logbook(config.out if is_main else None, trackers=config.trackers, settings=settings)
        self.bars = ProgressBars(epochs=config.epochs, shown=is_main)
        self.monitor = HackingMonitor.of(config.monitor)
        # What a crash left behind the checkpoint, or before the first one, is written again.
        self.logbook.truncate(self._restore(start) if start else 0)
        self.changes = changes.all
        """Keys of the config that a resumed run changes → both values."""
        self.logbook.note_changes(self.changes, epoch=self.epoch, step=self.step)
        if start:
            log = config.out / "metrics.jsonl"
            self.monitor.restore(self.runtime.on_main(lambda: read_jsonl(log) if log.exists() else []))
        if is_main:
            write_atomic(config.out / "config.yaml", configs.dump(config), mode=PRIVATE)
        self.pending = PendingEpoch(config.out, self.runtime, self._services())
        self.pending.open(start, same_config=not changes.frozen)
        self.judge_identities = self.runtime.on_main(partial(judge_identities, config))
        """What decides the judges' verdicts, by their keys in the config."""
        self.ledger = Ledger(config.out if is_main else None, self.runtime)
        self.last_state = LastState(config, builders.adapter_targets(config, self.policy))
        """For a stop that this thread cannot meet."""
        facts = start_facts(config, start, self.rewards)
        self.ledger.start(self._weights(), epoch=self.epoch, step=self.step, **facts)

    # --- the run -----------------------------------------------------------------------------------------------

    def train(self) -> Path:
        """Train to the end.

        Returns:
            The run's folder.

        Raises:
            Interrupted: after a SIGTERM or SIGINT, when the state is saved.
            ValueError: if training cannot go on, when the state is saved; the message names the cause and the fix.
        """
        runtime = self.runtime
        if runtime.is_main:
            for change in configs.described(self.changes):
                logger.warning("resumed with another setting: %s", change)
        try:
            with (
                runtime.signals(save=self.last_state.save, release=self._release),
                lost_ranks(runtime.rank, runtime.processes),
                self.bars,
                disk_errors(self.config.out),
            ):
                self._run_epochs()
        finally:
            self.close()
        return self.config.out

    def close(self) -> None:
        """End the log and what the judges run beside the training; `train` does."""
        self.logbook.close()
        if self.runtime.is_main:
            self.cache.remove()
        self._judges.close()
        self._folder.close()

    def _release(self) -> None:
        """End what must not outlive the process, on a thread beside the one that hangs."""
        self.bars.__exit__()
        self.close()

    def _run_epochs(self) -> None:
        try:
            self.bars.epoch(self.epoch, note="")
            self._keep_state()
            self._evaluate_if_due()
            self._write_page_if_due()
            while not self.finished:
                metrics = self.run_epoch()
                self._keep_state()
                means = {name.split("/")[1]: metrics[name] for name in metrics if name.endswith("/mean")}
                self.bars.epoch(self.epoch, note="  ".join(f"{name} {mean:.3f}" for name, mean in means.items()))
                self._evaluate_if_due()
                self._write_page_if_due()
                if self.finished or self.epoch % self.config.save_every == 0:
                    self.save()
                self._raise_alarms()
        except Interrupted as stop:
            # Still within `signals`: a second SIGTERM must not end the process in the middle of this save.
            self.pending.keep(self.save())
            cause = f"{stop}; " if isinstance(stop, CallTimeout) else ""
            raise Interrupted(f"{cause}stopped after epoch {self.epoch}, and saved; go on with --resume auto") from None

    def run_epoch(self) -> dict[str, float]:
        """Sample, score, compare and learn: one epoch.

        An epoch that is told to stop while it samples is abandoned: nothing has changed yet, and a resumed run samples
        the same again. Once it updates, it is finished.

        Returns:
            Its line in the log.
        """
        self.runtime.position.epoch = self.epoch + 1
        config, seconds_before, judge_before = self.config, dict(self.clock.seconds), counts_of(self.judge)
        rows = epoch_rows(
            self.train_prompts,
            epoch=self.epoch,
            count=config.prompts_per_epoch,
            group_size=config.drawn_per_prompt,
            seed=config.seed,
        )
        with self._saved_on_fault():
            sampler = self.epoch_sampler
            rows, scouted = self._scout(sampler, rows)
            scored = sampler.score_samples(rows)
            samples, epoch_advantages, metrics = scored.samples, scored.advantages, dict(scored.metrics)
            agreement = advantage_correlation(scouted, epoch_advantages, rows) if scouted else None
            metrics |= {} if agreement is None else {SCOUTS_CORRELATION: agreement}
            metrics |= sampler.check_suffix(rows, scored)
        self._warn_of_suffix(metrics)
        metrics |= self._judge_counts(since=judge_before)
        metrics |= self._sampling_metrics() | self.learn(samples, epoch_advantages)
        with self.clock.timed("hashes"):
            self.ledger.note_weights(self._weights())
        metrics |= self.clock.since(seconds_before)
        # Every rank sees all of them, and so comes to the same alarms.
        metrics |= self._monitor("epoch", list(chain(*self.runtime.gather(scored.statistics))), metrics)
        self.epoch += 1
        line = self.logbook.write("epoch", epoch=self.epoch, step=self.step, values=metrics)
        self.ledger.write(epoch=self.epoch, step=self.step, line=line)
        self.pending.clear()
        if self.epoch % config.save_every == 0 or self.epoch == 1:
            self.logbook.image(f"epoch-{self.epoch:06d}", samples[0].rollouts[0].images[0])
        return metrics

    def _scout(self, sampler: EpochSampler, rows: list[Row]) -> tuple[list[Row], Advantages | None]:
        """The rows to train on: of each group the best half and the worst, by samples that are finished cheaply.

        Returns:
            The rows and the scouts' advantages; without scouts all rows, and None.
        """
        scouts = self.config.selection.scouts
        if scouts is None:
            return rows, None
        values = sampler.score_samples(rows, scouts=scouts).advantages
        redone = set(best_and_worst(values, drawn=scouts.per_prompt, keep=self.config.group_size))
        return [row for row in rows if row.number in redone], values

    def scoring(self) -> AbstractContextManager[None]:
        """Within the block the models that score are on the device."""
        return self.turns.scoring() if self.turns else nullcontext()

    @property
    def epoch_sampler(self) -> EpochSampler:
        """Who samples and scores the epoch that comes next."""
        return EpochSampler(
            config=self.config,
            runtime=self.runtime,
            policy=self.policy,
            sampler=self.sampler,
            cache=self.cache,
            rewards=self.rewards,
            old=self.old,
            epoch=self.epoch,
            clock=self.clock,
            bars=self.bars,
            turns=self.turns,
            ledger=self.ledger,
            pending=self.pending,
        )

    def _judge_counts(self, *, since: Mapping[str, int]) -> dict[str, float]:
        """`judge/…`: what the rewards' judges of all processes did."""
        ranks = self.runtime.gather({name: count - since[name] for name, count in counts_of(self.judge).items()})
        return {f"judge/{name}": float(sum(rank[name] for rank in ranks)) for name in ranks[0]}

    # --- updates -----------------------------------------------------------------------------------------------

    def learn(self, samples: Sequence[Samples], epoch_advantages: Advantages) -> dict[str, float]:
        """Take the epoch's optimizer steps.

        Returns:
            Their metrics, over all ranks.
        """
        config = self.config
        updates = [(inner, update) for inner in range(config.objective.inner_epochs) for update in samples]
        sampled_at = self.step
        history: dict[str, list[float]] = defaultdict(list)
        empty = 0
        with self.clock.timed("update"), self.bars.phase("updating", total=len(updates)) as advance:
            for inner, update in updates:
                if config.max_steps and self.step >= config.max_steps:
                    break
                update_metrics = self.update(update, epoch_advantages, inner=inner, moved=self.step > sampled_at)
                empty += not update_metrics
                for name, value in update_metrics.items():
                    history[name].append(value)
                advance(1)
        if self.old and self.objective.lag:
            self.old.follow(self.objective.lag(self.step))
        metrics = gather_metrics(history, self.runtime)
        self._warn_of_deviation(metrics)
        if empty:
            self._warn_once(
                "empty",
                f"epoch {self.epoch + 1}: {empty} of {len(updates)} optimizer steps were skipped, since "
                f"selection.min_std {config.selection.min_std:g} dropped all of their groups; lower it, or take fewer "
                "optimizer.updates_per_epoch",
            )
        return metrics | ({"updates/empty": float(empty)} if config.selection.min_std else {})

    def update(self, samples: Samples, epoch_advantages: Advantages, *, inner: int, moved: bool) -> dict[str, float]:
        """Take one optimizer step; it is skipped, on all ranks alike, if a gradient is not finite or no sample is left.

        Args:
            samples: this rank's, for this step.
            epoch_advantages: of all samples of the epoch.
            inner: how often the epoch's samples were trained on before.
            moved: whether the trained policy has taken a step since they were sampled.

        Returns:
            Its metrics; none if no sample was left.
        """
        config, rate = self.config, self._set_learning_rate()
        metrics = update_policy(
            self._policy_loss(moved=moved),
            samples,
            epoch_advantages,
            runtime=self.runtime,
            draw=(config.seed, self.epoch, inner),
        )
        if not metrics:
            return {}
        norm = self.runtime.step(self.optimizer, self.parameters, max_norm=config.optimizer.max_grad_norm)
        skipped = not math.isfinite(norm)
        if skipped:
            self._count_bad_step()
        else:
            self.bad_steps = 0
            self.step += 1
            self.average.follow(self.step)
        return {"lr": rate, **metrics, "grad_norm": norm, "skipped": float(skipped)}

    def _policy_loss(self, *, moved: bool) -> PolicyLoss:
        return PolicyLoss(
            self.policy,
            self.sampler,
            self.cache,
            options=self.config.objective,
            advantage_clip=self.config.advantages.clip,
            # A policy that has not moved is the one that sampled: its forward serves as both.
            old=self.old if moved or self.objective.lag else None,
        )

    def _set_learning_rate(self) -> float:
        options = self.config.optimizer
        rate = learning_rate(
            self.step,
            peak=options.lr,
            schedule=options.schedule,
            warmup=options.warmup_steps,
            total=self.total_steps,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _count_bad_step(self) -> None:
        self.bad_steps += 1
        if self.bad_steps >= MAX_BAD_STEPS:
            self.save()
            raise ValueError(
                f"{self.bad_steps} optimizer steps in a row had gradients that are not finite; the state is saved. "
                "Lower optimizer.lr or look for a reward that is not finite"
            )

    def _warn_of_deviation(self, metrics: Mapping[str, float]) -> None:
        worst = max((value for name, value in metrics.items() if name.startswith(RATIO_DEVIATION)), default=0.0)
        tolerance = self.config.objective.ratio_tolerance
        if worst > tolerance:
            self._warn_once(
                RATIO_DEVIATION,
                f"epoch {self.epoch + 1}: before its first update the ratio deviates from 1 by {worst:.1e}, more than "
                f"{tolerance:.1e}: training does not replay sampling exactly; set sampling.batch to 1 or model.dtype "
                "to float32, or raise objective.clip_range",
            )

    def _warn_of_suffix(self, metrics: Mapping[str, float]) -> None:
        agreement = metrics.get(SUFFIX_CORRELATION, 1.0)
        if agreement < LEAST_CORRELATION:
            self._warn_once(
                SUFFIX_CORRELATION,
                f"epoch {self.epoch + 1}: with sampling.suffix {self.config.sampling.suffix.says} a group's advantages "
                f"correlate by {agreement:.2f} with those of all steps, less than {LEAST_CORRELATION}; give it more "
                "steps, solver ab2 or no cache, or leave sampling.suffix out",
            )

    def _warn_once(self, topic: str, message: str) -> None:
        if topic not in self.warned:
            self.warned.add(topic)
            if self.runtime.is_main:
                logger.warning(message)

    # --- evaluation, alarms, page and checkpoints --------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Sample the evaluation prompts at full size without noise, judge and log them.

        Raises:
            Exception: what a reward raised on any rank, on every rank, when the state is saved.
        """
        seconds_before = self.clock.seconds["evaluation"]
        small = self.config.sampling.size_at(max(0, self.epoch - 1))
        # A fault leaves the average's weights first: what is saved is the trained adapter.
        with self._saved_on_fault(), self.clock.timed("evaluation"):
            evaluator = Evaluator(
                config=self.config,
                runtime=self.runtime,
                policy=self.policy,
                cache=self.cache,
                prompts=self.evaluation_prompts,
                rewards=self.rewards,
                held_out=self.held_out,
                judge=self.judge,
                average=self.average,
                bars=self.bars,
                scoring=self.scoring,
            )
            evaluation = evaluator.evaluate(small, epoch=self.epoch, trained_differs=self.step > 0)
        evaluation.keep(self.logbook, f"evaluation-{self.epoch:06d}")
        samples, metrics = evaluation.samples, dict(evaluation.metrics)
        if self.extra_metrics:
            metrics |= self.extra_metrics([s.prompt for s in samples], [s.image for s in samples])
        metrics |= self._monitor("evaluation", [s.panel_statistics for s in samples if s.panel_statistics], metrics)
        metrics["seconds/evaluation"] = self.clock.seconds["evaluation"] - seconds_before
        self.logbook.write("evaluation", epoch=self.epoch, step=self.step, values=metrics)
        self.evaluated, self.score = self.epoch, evaluation.score_by(self.config.best_by, metrics)
        self.pending.clear()
        return metrics

    def _evaluate_if_due(self) -> None:
        """Before the first epoch, after the last, and every so many between; once each, also if the run was stopped
        meanwhile."""
        every = self.config.evaluation.every
        due = self.epoch == 0 or self.finished or (every and self.epoch % every == 0)
        if due and self.evaluated != self.epoch:
            self.evaluate()
            self._keep_state()

    def _monitor(
        self, kind: Kind, statistics: Sequence[PanelStatistics], metrics: Mapping[str, float]
    ) -> dict[str, float]:
        signs, raised = self.monitor.observe(kind, statistics, metrics)
        # They wait for `_raise_alarms`: the epoch is evaluated and saved before one of them stops the run.
        self.alarms += raised
        return signs

    def _raise_alarms(self) -> None:
        """Warn of each sign once. If a limit says stop, save and raise HackingSuspectedError."""
        raised, self.alarms = self.alarms, []
        for alarm in raised:
            self._warn_once(alarm.sign, f"reward hacking? after epoch {self.epoch}: {alarm}")
        if stops := [alarm for alarm in raised if alarm.action == "stop"]:
            self.save()
            raise HackingSuspectedError(stops, epoch=self.epoch)

    def _write_page_if_due(self) -> None:
        """Build report.html with each evaluation and each checkpoint, on the main process."""
        due = self.evaluated == self.epoch or self.epoch % self.config.save_every == 0
        if not due or not self.runtime.is_main:
            return
        try:
            write_report(self.config.out)
        except (OSError, ValueError) as fault:  # the run is worth more than its page
            logger.warning("report.html was not built after epoch %d: %s", self.epoch, fault)

    def save(self) -> Path:
        """Write a checkpoint to resume from, and the averaged adapter for use elsewhere. All ranks call it.

        Returns:
            The checkpoint.

        Raises:
            OSError: on all ranks, if the disk is full.
        """
        self.runtime.position.enter("checkpoint")
        targets = builders.adapter_targets(self.config, self.policy)
        return save_run(self._weights(), self.config, self._state(), targets=targets)

    def _keep_state(self) -> None:
        """Copy the state to host memory, from where it can be saved if this thread hangs. All ranks call it."""
        self.runtime.position.enter("copy")
        self.last_state.take(self._weights(), self._state())

    def _state(self) -> dict[str, Any]:
        """What state.json holds, but the config."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seed": self.config.seed,
            "evaluated": self.evaluated,
            # Only an evaluation of these very weights says how good they are.
            "score": self.score if self.evaluated == self.epoch else None,
            "best_by": self.config.best_by,
            "bad_steps": self.bad_steps,
            "log_lines": self.logbook.count_lines(),
            "processes": self.runtime.world,
            "judges": self.judge_identities,
        }

    def _restore(self, checkpoint: Path) -> int:
        """Put a checkpoint's state in place; how many lines its log had."""
        state = restore(self._weights(), checkpoint, seed=self.config.seed)
        self.epoch, self.step, self.bad_steps = state["epoch"], state["step"], state["bad_steps"]
        self.evaluated, self.score = state["evaluated"], state["score"]
        if self.runtime.is_main and self.logbook.count_lines() < state["log_lines"] and self._is_own(checkpoint):
            logger.warning(
                "%s has %d lines, and %s counts %d: the log of this run will have a gap",
                self.config.out / "metrics.jsonl",
                self.logbook.count_lines(),
                checkpoint,
                state["log_lines"],
            )
        return int(state["log_lines"])

    def _is_own(self, checkpoint: Path) -> bool:
        return checkpoint.parents[1].resolve() == self.config.out.resolve()

    def _weights(self) -> TrainedWeights:
        return TrainedWeights(self.runtime, self.policy.transformer, self.optimizer, self.average, self.old)

    @contextmanager
    def _saved_on_fault(self) -> Iterator[None]:
        """Within the block what any rank raised is raised on every rank, when the state is saved.

        After an outage the epoch's samples and answers are saved too.
        """
        try:
            yield
        except SharedFault as error:
            if isinstance(error.fault, Interrupted):  # `_run_epochs` saves
                raise error.fault from None
            checkpoint = self.save()
            if not isinstance(error.fault, UnreachableError):
                raise error.fault from None
            saved = f"the run is saved after epoch {self.epoch}, and {self.pending.keep(checkpoint)}"
            raise UnreachableError(f"{error.fault}, and go on with --resume auto: {saved}") from None

    # --- what follows from the state ---------------------------------------------------------------------------

    def _services(self) -> dict[str, object]:
        """What scores, by its key in the config."""
        judges = {"judge": self._judges.rewards, "evaluation.judge": self._judges.held_out}
        rewards = {f"rewards.{name}": reward for name, reward in self.rewards.items()}
        held_out = {f"evaluation.rewards.{name}": reward for name, reward in self.held_out.items()}
        return {**judges, **rewards, **held_out}

    @property
    def judge(self) -> Judge | None:
        """Who answers the rewards' questions; None if nothing asks it."""
        return self._judges.rewards

    @property
    def objective(self) -> ObjectiveSpec:
        """What is minimised."""
        return OBJECTIVES[self.config.objective.name]

    @property
    def sampler(self) -> Sampler:
        """How the epoch that comes next is sampled."""
        config = self.config
        return config.sampling.sampler(
            self.epoch,
            group_size=config.drawn_per_prompt,
            seed=config.seed,
            spec=self.objective,
            evaluation_size=Size(*config.evaluation.size),
        )

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        updates = self.config.optimizer.updates_per_epoch * self.config.objective.inner_epochs
        planned = self.config.epochs * updates
        return min(planned, self.config.max_steps or planned)

    @property
    def finished(self) -> bool:
        """Whether all epochs, or all optimizer steps, are done."""
        limit = self.config.max_steps
        return self.epoch >= self.config.epochs or bool(limit and self.step >= limit)

    @property
    def transformer(self) -> torch.nn.Module:
        """The transformer without the launcher's wrapper."""
        return self.runtime.unwrap(self.policy.transformer)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The weights that are trained."""
        return [p for p in self.policy.transformer.parameters() if p.requires_grad]

    def _sampling_metrics(self) -> dict[str, float]:
        """What changes from epoch to epoch, if the config says that it does."""
        sampling, metrics = self.config.sampling, {}
        if sampling.window.kind != "fixed":
            metrics["sampling/first_noise_step"] = float(self.sampler.sde_steps[0])
        if sampling.curriculum:
            metrics["sampling/height"] = float(sampling.size_at(self.epoch).height)
        return metrics
