"""A PaCo-GRPO run: its models, records and state, built once in the order in which things can fail."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from pacorl.config import base as configs
from pacorl.core.devices import check_card_used
from pacorl.core.objectives import OBJECTIVES, RATIO_DEVIATION, ObjectiveSpec
from pacorl.core.sampler import Sampler
from pacorl.core.schedule import learning_rate
from pacorl.grpo import builders
from pacorl.grpo.activations import AUTO, decide_checkpointing
from pacorl.grpo.checkpoint import (
    Changes,
    TrainedWeights,
    changes_since,
    judge_identities,
    restore,
    save_run,
    starting_point,
)
from pacorl.grpo.conditioning import ConditioningFiles
from pacorl.grpo.evaluated import EvaluatedSample
from pacorl.grpo.last_state import LastState
from pacorl.grpo.ledger import Ledger, start_facts
from pacorl.grpo.monitor import Alarm, HackingMonitor, Kind, PanelStatistics
from pacorl.grpo.pending import PendingEpoch
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rollout import Draw
from pacorl.grpo.rows import check_division
from pacorl.grpo.scoring import Scorer, Scores, scoring_overlaps
from pacorl.grpo.start import Resume
from pacorl.io.documents import read_jsonl
from pacorl.io.files import PRIVATE, disk_errors, own_folder, write_atomic
from pacorl.io.outage import UnreachableError
from pacorl.judge.judge import Judge, counts_of
from pacorl.models.lora.adapters import MovingAverage, OldPolicy
from pacorl.rewards.reward import RewardFunction
from pacorl.runtime.clock import PhaseClock
from pacorl.runtime.logbook import Logbook, ProgressBars
from pacorl.runtime.processes import MAX_BAD_STEPS, Interrupted, Runtime, SharedFault, allow_tf32, lost_ranks
from pacorl.runtime.turns import Turns
from pacorl.runtime.workers import CallTimeout
from pacorl.types import Advantages, Prompt, Samples, Size

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

ExtraMetrics = Callable[[Sequence[Prompt], Sequence["Image"]], Mapping[str, float]]
"""Further measures of an evaluation's images, such as an oracle's; they are logged and never rewarded."""


@dataclass(frozen=True, slots=True)
class Before:
    """Counters at the beginning of an epoch."""

    seconds: Mapping[str, float]
    """By phase."""
    judge: Mapping[str, int]
    """Requests, retries and the like of the judge."""


class Run:
    """Models, records and state of a PaCo-GRPO run, which `run_epoch` and `evaluate` take whole."""

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
        """Topics of the warnings so far."""
        self._guarded = False
        # The order is from cheap to dear: a config that cannot work fails before weights load.
        self.train_prompts, self.evaluation_prompts, leaks = builders.read_prompts(config)
        self.runtime = Runtime(patience=builders.patience(config))
        """The processes of the run."""
        check_card_used(config.model.dtype, self.runtime.device)
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
            builders.build_optimizer(config, self.policy, device=device),
            batch=config.sampling.batch,
            max_norm=config.optimizer.max_grad_norm,
        )
        if config.model.gradient_checkpointing == AUTO:
            self._decide_checkpointing()
        # Copies are made of what the launcher left: its weights may be sharded now.
        averaging = config.optimizer
        self.average = MovingAverage(self.transformer, decay=averaging.ema_decay, interval=averaging.ema_interval)
        self.old = OldPolicy(self.transformer) if self.objective.needs == "endpoint" else None

    def _decide_checkpointing(self) -> None:
        config, sampler, batch = self.config, self.sampler, self.config.sampling.batch
        if sampler.stochastic:  # a forward of training has nodes; for an objective of the endpoint, samples
            batch = sampler.tree.nodes_of_batch(batch, len(sampler.stochastic_steps) - 1)

        prompt = self.train_prompts[0]
        size = self.policy.size_of(prompt, Size(*config.sampling.size))
        conditioning = self.cache.batch([prompt], size)

        checkpointed = decide_checkpointing(config, self.policy, conditioning, size, batch=batch, runtime=self.runtime)
        if self.runtime.is_main:
            logger.info("model.gradient_checkpointing: auto is %s", "on" if checkpointed else "off")

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
        facts = start_facts(config, start, self.rewards, self.held_out)
        self.ledger.start(
            self._weights(),
            epoch=self.epoch,
            step=self.step,
            evaluated=self.evaluated,
            score=self._score_of_weights,
            **facts,
        )

    # --- state -------------------------------------------------------------------------------------------------

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

    def keep_state(self) -> None:
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
            "score": self._score_of_weights,
            "best_by": self.config.best_by,
            "bad_steps": self.bad_steps,
            "log_lines": self.logbook.count_lines(),
            "processes": self.runtime.world,
            "judges": self.judge_identities,
        }

    @property
    def _score_of_weights(self) -> float | None:
        """Score of an evaluation of the current weights; None if the newest evaluation is of earlier ones."""
        return self.score if self.evaluated == self.epoch else None

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

    def close(self) -> None:
        """End the log, the judges' processes and the lock on the folder."""
        self.logbook.close()
        if self.runtime.is_main:
            self.cache.remove()
        self._judges.close()
        self._folder.close()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Save what is finished before a fault of any rank or a signal to stop ends the block; then raise on all ranks.

        A guard within a guard does nothing: the outer one saves when weights that were set aside are back in place.

        Raises:
            Interrupted: after a signal or a time limit; the run goes on with --resume auto.
            UnreachableError: after an outage. The epoch's samples and answers are saved too.
            Exception: raised by a reward on any rank.
        """
        if self._guarded:
            yield
            return

        self._guarded = True
        try:
            with lost_ranks(self.runtime.rank, self.runtime.processes), disk_errors(self.config.out):
                try:
                    yield
                except Interrupted as stop:
                    self._save_stopped(stop)
                except SharedFault as error:
                    if isinstance(error.fault, Interrupted):
                        self._save_stopped(error.fault)
                    self._save_failed(error.fault)
        finally:
            self._guarded = False

    def _save_stopped(self, stop: Interrupted) -> NoReturn:
        self.pending.keep(self.save())
        cause = f"{stop}; " if isinstance(stop, CallTimeout) else ""
        raise Interrupted(f"{cause}stopped after epoch {self.epoch}, and saved; go on with --resume auto") from None

    def _save_failed(self, fault: Exception) -> NoReturn:
        checkpoint = self.save()
        if not isinstance(fault, UnreachableError):
            raise fault from None
        saved = f"the run is saved after epoch {self.epoch}, and {self.pending.keep(checkpoint)}"
        raise UnreachableError(f"{fault}, and go on with --resume auto: {saved}") from None

    # --- an epoch's services -----------------------------------------------------------------------------------

    def begin_epoch(self) -> Before:
        """Note where the coming epoch begins."""
        self.runtime.position.epoch = self.epoch + 1
        return Before(dict(self.clock.seconds), counts_of(self.judge))

    @contextmanager
    def scorer(self, make: Callable[..., Scorer], *, samples: int) -> Iterator[Scorer]:
        """Open a scorer of the rewards, which score while the next samples are drawn if the device allows it.

        Args:
            make: its constructor.
            samples: of the epoch, over all ranks.
        """
        waited = self.clock.seconds["reward"]
        # Of the whole epoch: each rank stops at this number alone, since what one misses says nothing of the others.
        max_missing = self.config.advantages.max_missing * samples * len(self.rewards)
        options = self.scorer_options | {"overlap": self.scoring_overlaps, "max_missing": max_missing}

        with make(self.rewards, monitored=True, **options) as scorer:
            yield scorer

        if scorer.overlap:
            idle = self.clock.seconds["reward"] - waited
            self.clock.seconds["hidden_reward"] += max(0.0, scorer.busy_seconds - idle)

    @property
    def scorer_options(self) -> dict[str, Any]:
        """Options of every `Scorer` of the run: its time limit, and what it does while it waits."""
        return {
            "scoring": self.scoring,
            "timeout": self.config.reward_timeout,
            # Not `check_stop`, which meets the other ranks: each waits for its own scores.
            "check_stop": self.runtime.check_signal,
            "advance": self.runtime.position.advance,
        }

    @property
    def scoring_overlaps(self) -> bool:
        """Whether rewards score while samples are drawn."""
        if self.turns:  # the models that score are not on the device then
            return False
        return scoring_overlaps(self.config.judge, device=self.runtime.device)

    def gather_scores(self, scorer: Scorer) -> dict[int, Scores]:
        """Wait for the scores of all ranks: global row → one score per reward.

        Raises:
            SharedFault: what a reward raised on any rank.
        """
        with self.clock.timed("reward"), self.bars.phase("scoring", total=1):
            return self.runtime.gather_rows(scorer.results)

    def sampling_policy(self) -> AbstractContextManager[None]:
        """Swap in the policy that samples, if it is not the trained one."""
        if self.old is None:
            return nullcontext()
        if self.objective.lag is None:
            self.old.follow(0.0)
        return self.old.swapped_in()

    def draw(self, sampler: Sampler, *, exact: bool = False) -> Draw:
        """Parameters of the coming epoch's rollouts; with `exact` by exact products at the ODE steps too."""
        config = self.config
        products = "exact" if exact else config.sampling.products
        with self.clock.timed("rollout"):
            fused = builders.ode_form(self.transformer, products, fuse=config.sampling.fuse_lora)
        return Draw(
            self.policy,
            sampler,
            self.cache,
            seed=config.seed,
            epoch=self.epoch,
            batch=config.sampling.batch,
            fused=fused,
            as_trained=config.model.compile != "none",
        )

    def note_samples(
        self, samples: Sequence[Samples], scores: Mapping[int, Scores], epoch_advantages: Advantages
    ) -> None:
        """Hash the epoch's samples, scores and advantages for the ledger."""
        with self.clock.timed("hashes"):
            self.ledger.note_samples(samples, scores)
            self.ledger.note_advantages(epoch_advantages)

    def finish_epoch(
        self,
        samples: Sequence[Samples],
        statistics: Sequence[PanelStatistics],
        metrics: Mapping[str, float],
        *,
        since: Before,
    ) -> dict[str, float]:
        """Count the epoch, look for reward hacking, and write its line, its record and, at times, an image.

        Args:
            samples: this rank's.
            statistics: of this rank's images, for the monitor.
            metrics: of the epoch so far.
            since: where the epoch began.

        Returns:
            All metrics of the line.
        """
        with self.clock.timed("hashes"):
            self.ledger.note_weights(self._weights())
        line = {**metrics, **self.clock.since(since.seconds)}
        # Every rank observes the images of all, and so raises the same alarms.
        line |= self.watch("epoch", [*chain(*self.runtime.gather(statistics))], line)

        self.epoch += 1
        written = self.logbook.write("epoch", epoch=self.epoch, step=self.step, values=line)
        self.ledger.write(epoch=self.epoch, step=self.step, line=written)
        self.pending.clear()
        if self.epoch % self.config.save_every == 0 or self.epoch == 1:
            self.logbook.image(f"epoch-{self.epoch:06d}", samples[0].rollouts[0].images[0])
        return line

    def finish_evaluation(
        self, samples: Sequence[EvaluatedSample], metrics: Mapping[str, float], score: float | None
    ) -> None:
        """Write an evaluation's line and record.

        Args:
            samples: with their images and scores.
            metrics: of the line.
            score: by `best_by`; None if a judge failed.
        """
        line = self.logbook.write("evaluation", epoch=self.epoch, step=self.step, values=metrics)
        self.evaluated, self.score = self.epoch, score
        with self.clock.timed("hashes"):
            self.ledger.write_evaluation(self._weights(), samples, seed=self.config.seed, line=line, score=score)
        self.pending.clear()

    def judge_counts(self, *, since: Before) -> dict[str, float]:
        """`judge/…`: requests, retries and the like of all ranks' judges."""
        counts = {name: count - since.judge[name] for name, count in counts_of(self.judge).items()}
        ranks = self.runtime.gather(counts)
        return {f"judge/{name}": float(sum(rank[name] for rank in ranks)) for name in ranks[0]}

    def schedule_metrics(self, sampler: Sampler) -> dict[str, float]:
        """Settings of sampling that the config changes from epoch to epoch."""
        sampling, metrics = self.config.sampling, {}
        if sampling.window.kind != "fixed":
            metrics["sampling/first_noise_step"] = float(sampler.sde_steps[0])
        if sampling.curriculum:
            metrics["sampling/height"] = float(sampling.size_at(self.epoch).height)
        return metrics

    # --- one optimizer step ------------------------------------------------------------------------------------

    def step_optimizer(self) -> float:
        """Take one optimizer step with the gradients so far, on all ranks or, if one is not finite, on none.

        Returns:
            The gradient's norm before clipping; the step was skipped if it is not finite.

        Raises:
            ValueError: after `MAX_BAD_STEPS` skipped steps in a row, when the state is saved.
        """
        norm = self.runtime.step(self.optimizer, self.parameters, max_norm=self.config.optimizer.max_grad_norm)
        if not math.isfinite(norm):
            self._count_bad_step()
            return norm

        self.bad_steps = 0
        self.step += 1
        self.average.follow(self.step)
        return norm

    def set_learning_rate(self) -> float:
        """Set the rate of the coming step by the schedule, and return it."""
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

    # --- warnings ----------------------------------------------------------------------------------------------

    def watch(
        self, kind: Kind, statistics: Sequence[PanelStatistics], metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Look for reward hacking; alarms wait until the epoch is evaluated and saved.

        Returns:
            The signs as metrics.
        """
        signs, raised = self.monitor.observe(kind, statistics, metrics)
        self.alarms += raised
        return signs

    def warn_once(self, topic: str, message: str) -> None:
        """Log a warning on the main process, once per topic."""
        if topic not in self.warned:
            self.warned.add(topic)
            if self.runtime.is_main:
                logger.warning(message)

    def warn_of_deviation(self, metrics: Mapping[str, float]) -> None:
        """Warn if the first update does not replay sampling exactly."""
        worst = max((value for name, value in metrics.items() if name.startswith(RATIO_DEVIATION)), default=0.0)
        tolerance = self.config.objective.ratio_tolerance
        if worst > tolerance:
            self.warn_once(
                RATIO_DEVIATION,
                f"epoch {self.epoch + 1}: before its first update the ratio deviates from 1 by {worst:.1e}, more than "
                f"{tolerance:.1e}: training does not replay sampling exactly; set sampling.batch to 1 or model.dtype "
                "to float32, or raise objective.clip_range",
            )

    def warn_of_empty(self, empty: int, updates: int) -> None:
        """Warn of updates without a sample to train on."""
        self.warn_once(
            "empty",
            f"epoch {self.epoch + 1}: {empty} of {updates} optimizer steps were skipped, since "
            f"selection.min_std {self.config.selection.min_std:g} dropped all of their groups; lower it, or take fewer "
            "optimizer.updates_per_epoch",
        )

    # --- what follows from the state ---------------------------------------------------------------------------

    def scoring(self) -> AbstractContextManager[None]:
        """Within the block the models that score are on the device."""
        return self.turns.scoring() if self.turns else nullcontext()

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
            group_size=config.group_size,
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
