"""A PaCo-GRPO run: its models, records and state, built once in the order in which things can fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from pacorl.config import base as configs
from pacorl.core.devices import check_card_used
from pacorl.core.metric_names import ALARM, NOT_FINITE, SECONDS
from pacorl.core.objectives import OBJECTIVES, RATIO_DEVIATION, ObjectiveSpec
from pacorl.core.sampler import Sampler
from pacorl.grpo import builders
from pacorl.grpo.checkpoint import (
    changes_since,
    code_identities,
    judge_identities,
    restore,
    save_run,
    starting_point,
)
from pacorl.grpo.conditioning import ConditioningFiles
from pacorl.grpo.lora_run import LoraRun
from pacorl.grpo.monitor import Alarm, HackingMonitor, Kind, PanelStatistics
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rollout import Draw
from pacorl.grpo.rows import check_division, check_image_counts
from pacorl.grpo.scoring import Parts, Scorer, Scores, scoring_overlaps
from pacorl.grpo.start import Resume
from pacorl.io.documents import read_jsonl
from pacorl.io.files import PRIVATE, disk_errors, own_folder, write_atomic
from pacorl.io.outage import UnreachableError, WaitsForOutages
from pacorl.judge.judge import Judge, counts_of
from pacorl.models.adapters import OldPolicy
from pacorl.report.folder import LEAKS
from pacorl.rewards.reward import RewardFunction, named
from pacorl.runtime.clock import PhaseClock
from pacorl.runtime.logbook import Logbook, ProgressBars
from pacorl.runtime.processes import Runtime, SharedFault, allow_tf32, wait_after
from pacorl.runtime.stopping import Interrupted, lost_ranks
from pacorl.runtime.turns import Turns
from pacorl.runtime.workers import CallTimeout
from pacorl.types import Prompt, Samples

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

ExtraMetrics = Callable[[Sequence[Prompt], Sequence["Image"]], Mapping[str, float]]
"""Additional evaluation metrics from prompts and images, such as an oracle's. They are logged and never rewarded."""


class Run(LoraRun):
    """Models, records and state of a PaCo-GRPO run, the argument of `run_epoch` and `evaluate`."""

    remedy: ClassVar[str] = "Lower optimizer.lr or look for a reward that is not finite"
    config: PolicyConfig

    def __init__(
        self,
        config: PolicyConfig,
        *,
        resume: Resume = False,
        allow_changes: bool = False,
        rewards: Mapping[str, RewardFunction] | None = None,
        extra_metrics: ExtraMetrics | None = None,
        pipeline: Any = None,
    ) -> None:
        """Load and check everything that the run needs, cheap checks first.

        Args:
            config: the run.
            resume: False for a new run, True or "auto" to continue from the newest checkpoint, or a checkpoint folder.
            allow_changes: whether a resumed run may change its config. The log records the changes.
            rewards: Python functions by name. The config's reward of the same name sets weight and label. Names
                missing from the config are added with weight 1.
            extra_metrics: additional metrics of each evaluation's images.
            pipeline: a loaded diffusers pipeline in place of the checkpoint; the run keeps it and drops its encoders.

        Raises:
            ValueError: if the config cannot be run; the message names the key, the value and the fix.
        """
        # Arguments.
        functions = rewards or {}
        self.extra_metrics = extra_metrics
        self._pipeline = pipeline
        # The given config is not kept: its judges may be idle, and it lacks the functions.
        self.config = config = builders.checked_config(config, functions, pipeline=pipeline)
        """The config with the reward functions added and unused judges removed."""
        # Once, as the files are executed: somebody may edit them during the run.
        self.code = code_identities(config, functions)
        """Digest of the user's code by its name."""
        updates = config.optimizer.updates_per_epoch
        self.total_steps = min(config.epochs * updates, config.max_steps or config.epochs * updates)
        # Progress, which a checkpoint restores.
        self.epoch = 0
        """Finished epochs."""
        self.evaluated = -1
        """Epoch of the newest evaluation; −1 before the first."""
        self.score: float | None = None
        """Score of the newest evaluation, by `best_by`."""
        self.should_training_stop = False
        """Whether the run ends after this epoch, evaluated and saved."""
        self.alarms: list[Alarm] = []
        """Alarms of the monitor that are not raised yet."""
        self.warned: set[str] = set()
        """Topics of the warnings so far."""
        self._guarded = False

        # Cheap checks first: an impossible config fails before weights load.
        self.train_prompts, self.evaluation_prompts, leaks = builders.read_prompts(config)
        self.config, self.credit_note = builders.with_credit(config, functions, self.train_prompts)
        """The choice of `advantages.credit`; empty if the config made it."""
        self.runtime = Runtime(patience=builders.patience(config))
        """Processes of the run."""
        check_card_used(config.model.dtype, self.runtime.device)
        self.clock = PhaseClock()
        """Seconds of each phase since the start of the run."""
        allow_tf32(allowed=config.tf32 and config.model.dtype == "bfloat16")
        self._leaks = leaks
        if leaks and self.runtime.is_main:
            logger.warning(leaks)
        prompts = [*self.train_prompts, *self.evaluation_prompts]
        foreign = "" if pipeline else config.generator.foreign_prompt(config.model.checkpoint, prompts)
        if foreign and self.runtime.is_main:
            logger.warning(foreign)

        # Shared parts, then everything that needs the other ranks.
        self.turns: Turns | None = None
        """Generator and scorers that alternate on the device, with little memory."""
        self._judges = builders.RunJudges()
        self._folder = ExitStack()
        with lost_ranks(self.runtime.rank, self.runtime.processes):
            self._build(functions, resume=resume, allow_changes=allow_changes)

    def _build(self, functions: Mapping[str, RewardFunction], *, resume: Resume, allow_changes: bool) -> None:
        with ExitStack() as on_fault:
            on_fault.callback(self._judges.close)
            on_fault.enter_context(self._folder)
            self.runtime.on_main(self._own_folder)
            start = self.runtime.on_main(partial(starting_point, self.config, resume))
            changes: Mapping[str, list[Any]] = {}
            if start:
                # Only the main process reads a local judge's weights for their digest.
                compare = partial(changes_since, start, self.config, code=self.code, allowed=allow_changes)
                changes = self.runtime.on_main(compare)
            check_division(self.config, world=self.runtime.world, sharded=self.runtime.sharded)
            if self.runtime.sharded:
                check_image_counts(self.config, self.train_prompts, self.evaluation_prompts)

            self._build_models(functions, resumed=start is not None)
            self._build_records(start, changes)
            on_fault.pop_all()  # `train` closes them

    def _own_folder(self) -> None:
        # No return value: the lock cannot be sent to other processes.
        self._folder.enter_context(own_folder(self.config.out))

    def _build_models(self, functions: Mapping[str, RewardFunction], *, resumed: bool) -> None:
        config = self.config
        device = self.runtime.device

        # 1. Connect to remote judges before any weights load.
        self._judges.open(config, in_process=False, device=device, processes=self.runtime.world, resumed=resumed)
        for warning in (config.model.warning, config.tree_warning):
            if warning and self.runtime.is_main:
                logger.warning(warning)

        # 2. Policy, and the conditionings of its prompts.
        self.policy = builders.build_adapted_policy(config, device=device, pipeline=self._pipeline)
        self.cache = ConditioningFiles(self.policy, config.out / "conditionings", runtime=self.runtime)
        try:
            builders.encode_prompts(config, self.policy, self.train_prompts, self.evaluation_prompts, cache=self.cache)
        except SharedFault as error:
            raise error.fault from None
        first = self.train_prompts[0]
        builders.place_transformer(config, self.policy, self.cache, first, device=device, sharded=self.runtime.sharded)

        # 3. Scorers, after the text encoders are freed: both together may not fit on the device.
        if config.in_turns:
            self.turns = Turns(self.policy.transformer, device=device)
        with self.scoring():
            self._load_scorers(functions, resumed=resumed)
            if self.turns:
                judges = (self._judges.rewards, self._judges.held_out)
                self.turns.add([*judges, *self.rewards.values(), *self.held_out.values()])
        if self.turns and not self.turns.scorers:  # all scores come from other processes
            self.turns = None

        # 4. Optimizer, then copies of the adapter, whose weights may be sharded now.
        self.prepare()
        self.begin_average()
        if self.objective.needs == "endpoint":
            self.old = OldPolicy(self.transformer)

    def _load_scorers(self, functions: Mapping[str, RewardFunction], *, resumed: bool) -> None:
        config = self.config
        device = self.runtime.device
        # After the text encoders are freed: a judge of this process loads now.
        self._judges.open(config, in_process=True, device=device, processes=self.runtime.world)
        self.rewards = builders.build_run_rewards(
            config.rewards,
            functions,
            judge=self._judges.rewards,
            device=device,
            checked=[*self.train_prompts, *self.evaluation_prompts],
            tried=self.train_prompts,
            size=config.sampling.size,
            resumed=resumed,
            by_panel=self.by_panel,
            timeout=config.reward_timeout,
        )
        # Without panel credit: held-out scores are only logged.
        self.held_out = builders.build_run_rewards(
            config.evaluation.rewards,
            {},
            judge=self._judges.held_out or self._judges.rewards,
            device=device,
            checked=self.evaluation_prompts,
            tried=self.evaluation_prompts,
            size=config.evaluation.size,
            resumed=resumed,
            timeout=config.reward_timeout,
        )

    def _build_records(self, start: Path | None, changes: Mapping[str, list[Any]]) -> None:
        config = self.config
        is_main = self.runtime.is_main
        folder = config.out if is_main else None

        # 1. Log and monitor. Lines that a crash left after the checkpoint are dropped and written again.
        self.logbook = Logbook(folder, trackers=config.trackers, settings=config.model_dump(mode="json"))
        self.bars = ProgressBars(epochs=config.epochs, shown=is_main)
        self.monitor = HackingMonitor.of(config.monitor, prompts=config.prompts_per_epoch)
        self.logbook.truncate(self._restore(start) if start else 0)
        self.changes = changes
        """Config keys changed by a resumed run → both values."""
        self.logbook.note_changes(self.changes, epoch=self.epoch, step=self.step)
        if start:
            log = config.out / "metrics.jsonl"
            self.monitor.restore(self.runtime.on_main(lambda: read_jsonl(log) if log.exists() else []))
        if is_main:
            write_atomic(config.out / "config.yaml", configs.dump(config), mode=PRIVATE)
            if self._leaks:
                write_atomic(config.out / LEAKS, f"{self._leaks}\n")

        # 2. The judges' identities. From now on an outage is waited for.
        self.judge_identities = self.runtime.on_main(partial(judge_identities, config))
        """Identity of each judge by its config key: weights, prompt and version that determine its verdicts."""
        services: list[object] = [self._judges.rewards, self._judges.held_out]
        for service in (*services, *self.rewards.values(), *self.held_out.values()):
            if isinstance(service, WaitsForOutages):
                service.wait_for_outages()

    # --- state -------------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write a checkpoint to resume from, and the averaged adapter for use elsewhere. All ranks call it.

        Returns:
            The checkpoint.

        Raises:
            OSError: on all ranks, if the disk is full.
        """
        targets = builders.adapter_targets(self.config, self.policy)
        return save_run(self, self._state(), targets=targets)

    def _state(self) -> dict[str, Any]:
        """Content of state.json, except the config."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seed": self.config.seed,
            "evaluated": self.evaluated,
            # Of these weights: None if the newest evaluation is older.
            "score": self.score if self.evaluated == self.epoch else None,
            "best_by": self.config.best_by,
            "bad_steps": self.bad_steps,
            "log_lines": self.logbook.count_lines(),
            "processes": self.runtime.world,
            "judges": self.judge_identities,
            "code": self.code,
        }

    def _restore(self, checkpoint: Path) -> int:
        """Restore a checkpoint's state, and return the number of its log lines."""
        state = restore(self, checkpoint)
        self.epoch = state["epoch"]
        self.step = state["step"]
        self.bad_steps = state["bad_steps"]
        self.evaluated = state["evaluated"]
        self.score = state["score"]

        is_own = checkpoint.parents[1].resolve() == self.config.out.resolve()
        if self.runtime.is_main and is_own and self.logbook.count_lines() < state["log_lines"]:
            logger.warning(
                "%s has %d lines, and %s counts %d: the log of this run will have a gap",
                self.config.out / "metrics.jsonl",
                self.logbook.count_lines(),
                checkpoint,
                state["log_lines"],
            )
        return int(state["log_lines"])

    def close(self) -> None:
        """End the log, the judges' processes and the lock on the folder."""
        self.logbook.close()
        if self.runtime.is_main:
            self.cache.remove()
        self._judges.close()
        self._folder.close()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Save the state and raise on all ranks if a rank fails or a signal stops the block.

        A nested guard has no effect: the outer guard saves once swapped-out weights are back in place.

        Raises:
            Interrupted: after a signal or a time limit; the run goes on with --resume auto.
            UnreachableError: after an outage; the run goes on with --resume auto.
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
                    self.save()
                    if not isinstance(error.fault, UnreachableError):
                        raise error.fault from error.fault.__cause__
                    saved = f"the run is saved after epoch {self.epoch}"
                    raise UnreachableError(f"{error.fault}, and go on with --resume auto: {saved}") from None
        finally:
            self._guarded = False

    def _save_stopped(self, stop: Interrupted) -> NoReturn:
        self.save()
        cause = f"{stop}; " if isinstance(stop, CallTimeout) else ""
        raise Interrupted(f"{cause}stopped after epoch {self.epoch}, and saved; go on with --resume auto") from None

    # --- an epoch's services -----------------------------------------------------------------------------------

    @contextmanager
    def scorer(self, *, samples: int) -> Iterator[Scorer]:
        """Open the scorer of an epoch's samples, counted over all ranks; it overlaps with sampling if possible."""
        # The part of scoring that sampling hid is the busy time beyond the time waited.
        waited = self.clock.seconds["reward"]
        # The whole epoch's budget: each rank stops alone, without the counts of the rest.
        max_missing = self.config.advantages.max_missing * samples * len(self.rewards)
        # In turns the scorers are off the device during sampling.
        overlap = not self.turns and scoring_overlaps(self.config.judge, device=self.runtime.device)
        options = self.scorer_options | {"overlap": overlap, "max_missing": max_missing}

        with Scorer(self.rewards, monitored=True, by_panel=self.by_panel, **options) as scorer:
            yield scorer

        if scorer.overlap:
            idle = self.clock.seconds["reward"] - waited
            self.clock.seconds["hidden_reward"] += max(0.0, scorer.busy_seconds - idle)

    @property
    def scorer_options(self) -> dict[str, Any]:
        """Options of every `Scorer` of the run: time limit and stop check."""
        return {
            "scoring": self.scoring,
            "timeout": self.config.reward_timeout,
            # Not `check_stop`, a collective: each rank waits for its own scores.
            "check_stop": self.runtime.check_signal,
        }

    @property
    def by_panel(self) -> bool:
        """Whether each panel has an advantage of its own."""
        return self.config.advantages.panel_share > 0

    def gather_scores(self, scorer: Scorer) -> tuple[dict[int, Scores], dict[int, Parts] | None]:
        """Wait for the scores of all ranks.

        Returns:
            Global row → one score per reward; and global row → parts of its scores, None without panel credit.

        Raises:
            SharedFault: wraps a reward's exception on any rank.
        """
        with self.clock.timed("reward"), self.bars.phase("scoring", total=1):
            scores = self.runtime.gather_rows(scorer.results)
        if not self.by_panel:
            return scores, None

        return scores, self.runtime.gather_rows(lambda: scorer.parts)

    def sampling_policy(self) -> AbstractContextManager[None]:
        """Swap in the sampling policy, if it differs from the trained policy."""
        # Path objectives sample with the trained weights themselves.
        if self.old is None:
            return nullcontext()
        # Without a lag the sampling policy is the policy at the start of the epoch.
        if self.objective.lag is None:
            self.old.follow(0.0)
        return self.old.swapped_in()

    def draw(self, sampler: Sampler) -> Draw:
        """Create the parameters of the next epoch's rollouts."""
        config = self.config
        return Draw(
            self.policy,
            sampler,
            self.cache,
            seed=config.seed,
            epoch=self.epoch,
            batch=config.sampling.batch,
            as_trained=config.model.compile != "none" and self.objective.needs == "path",
            by_panel=self.by_panel,
        )

    def finish_epoch(
        self,
        samples: Sequence[Samples],
        statistics: Sequence[PanelStatistics],
        metrics: Mapping[str, float],
        *,
        seconds_before: Mapping[str, float],
    ) -> dict[str, float]:
        """Count the epoch, check for reward hacking, and write its log line and, at times, an image.

        Args:
            samples: samples of this rank.
            statistics: image statistics of this rank, for the monitor.
            metrics: metrics of the epoch so far.
            seconds_before: the clock at the start of the epoch.

        Returns:
            All metrics of the line.
        """
        # 1. Metrics: scheduled settings, seconds of each phase, and signs of reward hacking.
        line = dict(metrics)
        sampling = self.config.sampling
        if sampling.window.kind != "fixed":
            line["sampling/first_noise_step"] = float(self.sampler.sde_steps[0])
        for phase, seconds in self.clock.seconds.items():
            line[f"{SECONDS}{phase}"] = seconds - seconds_before.get(phase, 0.0)
        # Each rank observes the images of all ranks, so all raise the same alarms.
        line |= self.watch("epoch", [*chain(*self.runtime.gather(statistics))], line)

        # 2. Count and record.
        self.epoch += 1
        self.logbook.write("epoch", epoch=self.epoch, step=self.step, values=line)
        self.runtime.limit_waiting(wait_after(self.clock.longest))
        if self.epoch % self.config.save_every == 0 or self.epoch == 1:
            self.logbook.image(f"epoch-{self.epoch:06d}", samples[0].rollouts[0].images[0])
        return line

    def judge_counts(self, *, before: Mapping[str, int]) -> dict[str, float]:
        """Count the judge's requests, retries and failures over all ranks since `before`, as `judge/…`."""
        # Differences: the judge counts over the whole run.
        counts = {}
        for name, count in counts_of(self.judge).items():
            counts[f"judge/{name}"] = float(count - before[name])
        ranks = self.runtime.gather(counts)
        return {name: sum(rank[name] for rank in ranks) for name in counts}

    # --- warnings ----------------------------------------------------------------------------------------------

    def watch(
        self, kind: Kind, statistics: Sequence[PanelStatistics], metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Measure signs of reward hacking as metrics; alarms wait until the epoch is evaluated and saved."""
        signs, raised = self.monitor.observe(kind, statistics, metrics)
        self.alarms += raised
        return signs

    def warn_once(self, topic: str, message: str) -> None:
        """Log a warning on the main process, once per topic."""
        if topic not in self.warned:
            self.warned.add(topic)
            if self.runtime.is_main:
                logger.warning(message)

    def check_finite(self, not_finite: Sequence[tuple[str, Prompt]], *, when: str) -> dict[str, float]:
        """Warn, once per reward, of scores that are not finite, and return an alarm with their number.

        Args:
            not_finite: reward and prompt of each such score, of all ranks.
            when: their epoch or evaluation, for the message.
        """
        prompts: dict[str, list[Prompt]] = {}
        for name, prompt in not_finite:
            prompts.setdefault(name, []).append(prompt)
        for name, of_reward in prompts.items():
            self.warn_once(
                f"{NOT_FINITE}{name}",
                f"{when}: reward {name!r} returned NaN or an infinity for {len(of_reward)} of the images, first for "
                f"{named(of_reward[:1])}; these scores count as missing: mend the reward, or return None where it has "
                "no score",
            )
        return {f"{ALARM}{NOT_FINITE}{name}": float(len(of_reward)) for name, of_reward in prompts.items()}

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

    # --- derived from the state --------------------------------------------------------------------------------

    def scoring(self) -> AbstractContextManager[None]:
        """Move the scorers to the device during the block, with `memory: low`."""
        return self.turns.scoring() if self.turns else nullcontext()

    @property
    def judge(self) -> Judge | None:
        """Judge of the rewards; None if no reward uses a judge."""
        return self._judges.rewards

    @property
    def objective(self) -> ObjectiveSpec:
        """Training objective."""
        return OBJECTIVES[self.config.objective.name]

    @property
    def sampler(self) -> Sampler:
        """Sampler of the next epoch."""
        config = self.config
        return config.sampling.sampler(
            self.epoch,
            group_size=config.group_size,
            seed=config.seed,
            spec=self.objective,
        )

    @property
    def finished(self) -> bool:
        """Whether all epochs or all optimizer steps are done, or a callback stopped the training."""
        limit = self.config.max_steps
        return self.should_training_stop or self.epoch >= self.config.epochs or bool(limit and self.step >= limit)
