"""An epoch's samples: drawn row by row, scored, and compared with their groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from pacorl.config.policy_run import PolicyConfig
from pacorl.core.advantages import advantages
from pacorl.core.metric_names import SUFFIX_CORRELATION
from pacorl.core.objectives import OBJECTIVES
from pacorl.core.sampling import Sampler
from pacorl.core.selection import drop_alike_groups
from pacorl.engine.clock import PhaseClock
from pacorl.engine.conditioning import ConditioningCache
from pacorl.engine.logbook import ProgressBars
from pacorl.engine.monitor import PanelStatistics
from pacorl.engine.rollout import Draw, collect
from pacorl.engine.rows import Row, assign_rows
from pacorl.engine.runtime import Runtime, SharedFault
from pacorl.engine.scoring import Scorer, Scores, overlaps, reward_table
from pacorl.engine.turns import Turns
from pacorl.judges import JUDGES
from pacorl.lora.adapters import OldPolicy
from pacorl.lora.layers import fuse_lora
from pacorl.train.ledger import Ledger
from pacorl.train.pending import PendingEpoch
from pacorl.train.suffix_check import advantage_correlation, full_scores
from pacorl.types import Advantages, Rollout, Samples

if TYPE_CHECKING:
    from pacorl.policies.policy import Policy
    from pacorl.rewards.reward import Reward


@dataclass(frozen=True, slots=True)
class ScoredSamples:
    """Samples of an epoch, and how they compare."""

    samples: list[Samples]
    """This rank's, by update."""
    scores: Mapping[int, Scores]
    """Of all ranks, by global row."""
    advantages: Advantages
    metrics: Mapping[str, float]
    statistics: list[PanelStatistics]
    """Of this rank's images, for the monitor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSampler:
    """What samples of one epoch are drawn and scored with."""

    config: PolicyConfig
    runtime: Runtime
    policy: Policy
    sampler: Sampler
    cache: ConditioningCache
    rewards: Mapping[str, Reward]
    old: OldPolicy | None
    """The policy that samples, if it is not the trained one."""
    epoch: int
    """From 0."""
    clock: PhaseClock
    bars: ProgressBars
    ledger: Ledger
    pending: PendingEpoch
    turns: Turns | None = None
    """Of generator and scoring models on the device."""
    scorer: Callable[..., Scorer] = Scorer
    """Who scores."""

    def score_samples(self, rows: Sequence[Row]) -> ScoredSamples:
        """Sample the epoch's rows, score them, and compare each with its group.

        Raises:
            SharedFault: on every rank, what a reward raised on any, or that too many scores are missing.
        """
        config, waited = self.config, self.clock.seconds["reward"]
        # Of the whole epoch: what one process misses says nothing of the others, so each stops at this number alone.
        max_missing = config.advantages.max_missing * len(rows) * len(self.rewards)
        with self.scorer(
            self.rewards,
            overlap=self._scoring_overlaps(),
            max_missing=max_missing,
            scoring=self._scoring,
            monitored=True,
            **self._limits,
        ) as scorer:
            samples = self.sample(rows, scorer)
            scores = self.gather_scores(scorer)
            values = self._advantages(scores, rows)
            metrics = {**values.stats, "samples/not_finite": _share_not_finite(scores)}
            self._check_failure_budget(metrics, scorer)
            statistics = scorer.statistics()
        with self.clock.timed("hashes"):
            self.ledger.note_samples(samples, scores)
            self.ledger.note_advantages(values)
        if scorer.overlap:
            idle = self.clock.seconds["reward"] - waited
            self.clock.seconds["hidden_reward"] += max(0.0, scorer.busy_seconds - idle)
        return ScoredSamples(samples, scores, values, metrics, statistics)

    def sample(self, rows: Sequence[Row], scorer: Scorer) -> list[Samples]:
        """This rank's samples of each update; each batch goes to the scorer as soon as it is decoded.

        Samples that a stopped run left are not drawn again.
        """
        updates = self._dealt(rows)
        kept = self.pending.recall([list(chain(*units)) for units in updates])
        with self.bars.phase("sampling", total=len(rows) // self.runtime.world) as advance, self._sampling_weights():

            def submit(rollout: Rollout) -> None:
                scorer.submit(rollout)
                advance(len(rollout))
                # Ranks meet here: they may have other units, but each has as many batches of samples.
                self.runtime.check_stop()

            for rollout in chain(*(update.rollouts for update in kept or ())):
                submit(rollout)
            if kept is None:
                draw = self._draw()
                kept = [self._sample_units(draw, units, submit) for units in updates]
        self.pending.hold(kept)
        return kept

    def gather_scores(self, scorer: Scorer) -> dict[int, Scores]:
        """Global row → one score per reward, from every rank. Raises SharedFault: what a reward raised on any rank."""
        with self.clock.timed("reward"), self.bars.phase("scoring", total=1):
            return self.runtime.gather_rows(scorer.results)

    def check_suffix(self, rows: Sequence[Row], scored: ScoredSamples) -> dict[str, float]:
        """How the first group's advantages go with those by all steps, if a check is due.

        Raises:
            SharedFault: what a reward raised on any rank.
        """
        config, suffix = self.config, self.config.sampling.suffix
        if suffix.is_full or not suffix.check_every or self.epoch % suffix.check_every:
            return {}
        group = rows[: config.group_size]
        with self._sampling_weights():
            draw = self._draw()
            with self.clock.timed("suffix_check"):
                full = full_scores(
                    draw,
                    group,
                    scored.samples,
                    rewards=self.rewards,
                    runtime=self.runtime,
                    scorer=partial(Scorer, scoring=self._scoring, **self._limits),
                )
        by_all_steps = self._advantages({**scored.scores, **full}, rows)
        agreement = advantage_correlation(scored.advantages, by_all_steps, group)
        return {} if agreement is None else {SUFFIX_CORRELATION: agreement}

    def _sampling_weights(self) -> AbstractContextManager[None]:
        """Within the block the policy is the one that samples."""
        if self.old is None:
            return nullcontext()
        if OBJECTIVES[self.config.objective.name].lag is None:
            self.old.follow(0.0)
        return self.old.swapped_in()

    def _dealt(self, rows: Sequence[Row]) -> list[list[list[Row]]]:
        return assign_rows(
            rows,
            tree=self.sampler.tree,
            batch=self.config.sampling.batch,
            updates=self.config.optimizer.updates_per_epoch,
            world=self.runtime.world,
            rank=self.runtime.rank,
            sharded=self.runtime.sharded,
        )

    def _draw(self) -> Draw:
        config = self.config
        with self.clock.timed("rollout"):
            transformer = self.runtime.unwrap(self.policy.transformer)
            fused = fuse_lora(transformer, enabled=config.sampling.fuse_lora)
        return Draw(
            self.policy,
            self.sampler,
            self.cache,
            seed=config.seed,
            epoch=self.epoch,
            batch=config.sampling.batch,
            fused=fused,
            as_trained=config.model.compile != "none",
        )

    def _sample_units(self, draw: Draw, units: Sequence[Sequence[Row]], submit: Callable[[Rollout], None]) -> Samples:
        samples = Samples()
        for rows in units:
            with self.clock.timed("rollout"):
                unit = collect(draw, rows, submit)
            samples.rollouts += unit.rollouts
            samples.nodes += unit.nodes
        return samples

    def _advantages(self, scores: Mapping[int, Scores], rows: Sequence[Row]) -> Advantages:
        """By global row."""
        table, numbers = reward_table(scores, rows, names=tuple(self.rewards)), [row.number for row in rows]
        options, weights = self.config.advantages, [reward.weight for reward in self.config.rewards]
        values = advantages(table, options, weights=weights, nodes=self.sampler.tree.nodes(numbers))
        return drop_alike_groups(values, table, self.config.selection, weights=weights)

    def _scoring(self) -> AbstractContextManager[None]:
        return self.turns.scoring() if self.turns else nullcontext()

    @property
    def _limits(self) -> dict[str, Any]:
        """How long scores are waited for, and what the wait reports: options of `Scorer`."""
        runtime = self.runtime
        return {
            "timeout": self.config.reward_timeout,
            # Not `check_stop`, which meets the other ranks: each waits for its own scores.
            "check_stop": runtime.check_signal,
            "advance": runtime.position.advance,
        }

    def _scoring_overlaps(self) -> bool:
        if self.turns:  # the models that score are not on the device while samples are drawn
            return False
        judge = self.config.judge
        in_process = judge is None or JUDGES[judge.backend].in_process
        return overlaps(judge.overlap if judge else "auto", in_process=in_process, device=self.runtime.device)

    def _check_failure_budget(self, metrics: Mapping[str, float], scorer: Scorer) -> None:
        missing, budget = metrics["samples/missing"], self.config.advantages.max_missing
        if missing <= budget:
            return
        errors = sorted({error for error in self.runtime.gather(scorer.last_error()) if error})
        if metrics["samples/not_finite"]:
            errors.append(f"{metrics['samples/not_finite']:.0%} were no finite numbers")
        fault = ValueError(
            f"{missing:.0%} of the scores of epoch {self.epoch + 1} are missing, and advantages.max_missing is "
            f"{budget:.0%}; the state is saved. {'; '.join(errors) or 'The rewards gave no reason'}"
        )
        raise SharedFault(fault)


def _share_not_finite(scores: Mapping[int, Scores]) -> float:
    values = [value is not None and not math.isfinite(value) for row in scores.values() for value in row]
    return sum(values) / len(values)
