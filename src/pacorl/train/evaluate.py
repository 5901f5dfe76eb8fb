"""What a policy has learned: its evaluation prompts at full size, without noise, judged and kept."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import StatisticsError, correlation, fmean
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from pacorl.config.policy_run import PolicyConfig
from pacorl.core.sampling import Sampler
from pacorl.core.schedule import seed_of
from pacorl.engine.conditioning import ConditioningCache
from pacorl.engine.cores import available_cores
from pacorl.engine.logbook import Logbook, ProgressBars
from pacorl.engine.monitor import PanelStatistics, panel_statistics
from pacorl.engine.rollout import sample_images
from pacorl.engine.rows import one_size_batches
from pacorl.engine.runtime import Runtime
from pacorl.engine.scoring import time_limit, torch_context
from pacorl.engine.workers import LimitedCall, Workers
from pacorl.judges.judge import Judge
from pacorl.judges.pairwise import matrix_of
from pacorl.lora.adapters import MovingAverage
from pacorl.lora.layers import FusedLora, fuse_lora
from pacorl.policies.policy import Policy
from pacorl.rewards.consistency import Consistency
from pacorl.rewards.reward import Reward, scores_of
from pacorl.types import Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.config.policy_run import RewardConfig

Outcome = TypeVar("Outcome")
Job = tuple[Prompt, int]
"""A prompt to be sampled, and which of its images this is."""

# Below it a reward at the training size says little of itself at full size.
LEAST_CORRELATION = 0.3
# Images below which a correlation says too little to warn of.
LEAST_FOR_WARNING = 10
NORMAL_95 = 1.96
# The trained adapter is compared on every fourth image if the average was sampled at full size alone, so that a
# comparison never costs as much as the evaluation.
TRAINED_STRIDE = 4


@dataclass(frozen=True, slots=True)
class EvaluatedSample:
    """An image of an evaluation and what was measured of it; a score that could not be had is None."""

    prompt: Prompt
    index: int
    """Which of its prompt's images it is."""
    image: Image
    scores: Mapping[str, float | None]
    """By the rewards that are trained on."""
    p_yes: list[list[float | None]]
    """P(Yes) of each pair of panels, symmetric; one row of all pairs at the training size; empty without a judge."""
    reward: float | None = None
    """The weighted sum of the scores."""
    held_out: Mapping[str, float | None] | None = None
    """By the measures that are never trained on; None if they were not asked."""
    panel_statistics: PanelStatistics | None = None

    def record(self, image: str) -> dict[str, Any]:
        """Its line in samples/evaluation-….jsonl."""
        return {
            "prompt_id": self.prompt.id,
            "text": self.prompt.text,
            "theme": self.prompt.theme,
            "grid": str(self.prompt.grid),
            "panels": list(self.prompt.panels),
            "p_yes": self.p_yes,
            "scores": dict(self.scores),
            "reward": self.reward,
            "held_out": dict(self.held_out or {}),
            "seed": self.index,
            "image": image,
        }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation's samples at full size, and its measures."""

    samples: Sequence[EvaluatedSample]
    metrics: Mapping[str, float]
    rewards: Sequence[RewardConfig]

    def keep(self, logbook: Logbook, name: str) -> None:
        """Write images and records into the run's folder."""
        # zlib lets other threads run: 64 PNGs of 1024² take .2 to .6 s each, while the card idles.
        with ThreadPoolExecutor(available_cores()) as pool:
            list(pool.map(lambda n: logbook.image(f"{name}/{n:04d}", self.samples[n].image), range(len(self.samples))))
        logbook.records(name, [s.record(f"{name}/{number:04d}.png") for number, s in enumerate(self.samples)])

    def score_by(self, best_by: str, metrics: Mapping[str, float]) -> float | None:
        """What the best checkpoint is kept by; None if a judge failed.

        Raises:
            ValueError: if `best_by` names no measure of the evaluation.
        """
        if best_by == "reward":
            return weighted_reward(self.rewards, metrics)
        if best_by and best_by not in metrics:
            measures = ", ".join(name for name in metrics if "/" not in name)
            raise ValueError(f"best_by {best_by!r} is no measure of the evaluation; it has reward, {measures}")
        return metrics.get(best_by)


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Samples the evaluation prompts with the averaged adapter and asks everything that measures."""

    config: PolicyConfig
    runtime: Runtime
    policy: Policy
    cache: ConditioningCache
    prompts: Sequence[Prompt]
    rewards: Mapping[str, Reward]
    held_out: Mapping[str, Reward]
    judge: Judge | None
    average: MovingAverage
    bars: ProgressBars
    scoring: Callable[[], AbstractContextManager[None]] = nullcontext
    """What is entered while images are scored, such as `Turns.scoring`."""

    @torch.no_grad()
    def evaluate(self, small: Size, *, epoch: int, trained_differs: bool) -> Evaluation:
        """Sample and measure.

        Args:
            small: the training size, at which the rewards are compared with themselves at full size.
            epoch: finished epochs, for the warnings.
            trained_differs: whether there was an optimizer step, before which the average is the trained adapter.

        Raises:
            SharedFault: what a reward raised on any rank.
        """
        repeats = self.config.evaluation.samples_per_prompt
        jobs = [(prompt, index) for prompt in self.prompts for index in range(repeats)]
        full, reduced = self._sample_average(jobs, small)
        compares = self.config.evaluation.compare_trained and trained_differs
        trained = self._sample_trained(jobs, small if reduced else None) if compares else []
        held_out = {f"held_out/{name}": [(s.held_out or {}).get(name) for s in full] for name in self.held_out}
        metrics = self._means(full) | _mean_of_each(held_out)
        if reduced:
            metrics |= self._correlations(full, reduced, small, epoch=epoch)
        if trained:
            # Means over equal prompts, seeds and size.
            of_trained, of_average = self._means(trained), self._means(reduced or full[::TRAINED_STRIDE])
            shared = [name for name in of_trained if name in of_average]
            metrics |= {f"trained/{name}": of_trained[name] for name in shared}
            metrics |= {f"average/{name}": of_average[name] for name in shared}
        return Evaluation(full, metrics, self.config.rewards)

    @property
    def full_size(self) -> Size:
        """The evaluation's size, as the config says it."""
        return Size(*self.config.evaluation.size)

    def _sample_average(self, jobs: Sequence[Job], small: Size) -> tuple[list[EvaluatedSample], list[EvaluatedSample]]:
        """The averaged adapter at full size, and at the training size if the two are compared."""
        full_size, size_of = self.full_size, self.policy.size_of
        compared = self.config.evaluation.compare_sizes and any(
            size_of(prompt, small) != size_of(prompt, full_size) for prompt in self.prompts
        )
        total = (1 + compared) * len(jobs) // self.runtime.world
        with self.average.swapped_in(), self.bars.phase("evaluating", total=total, stage=True) as advance:
            fused = self._fused()
            full = self._sample(jobs, full_size, fused, advance, everything=True)
            if not compared:
                return full, []
            return full, self._sample(jobs, small, fused, advance, everything=False)

    def _sample_trained(self, jobs: Sequence[Job], small: Size | None) -> list[EvaluatedSample]:
        """The trained adapter: all jobs at the training size, or every fourth at full size."""
        jobs = jobs if small else jobs[::TRAINED_STRIDE]
        with self.bars.phase("evaluating the trained", total=len(jobs) // self.runtime.world, stage=True) as advance:
            return self._sample(jobs, small or self.full_size, self._fused(), advance, everything=False)

    def _fused(self) -> FusedLora | None:
        transformer = self.runtime.unwrap(self.policy.transformer)
        return fuse_lora(transformer, enabled=self.config.sampling.fuse_lora)

    def _sample(
        self,
        jobs: Sequence[Job],
        size: Size,
        fused: FusedLora | None,
        advance: Callable[[int], None],
        *,
        everything: bool,
    ) -> list[EvaluatedSample]:
        """Sample at a size and measure each of `jobs`, spread over the ranks."""
        config, runtime = self.config, self.runtime
        # Batches are cut before they are sharded, so that what is in one does not depend on the number of processes.
        prompts = [prompt for prompt, _ in jobs]
        batches = one_size_batches(self.policy, prompts, size=size, batch=config.evaluation.batch)
        numbered = runtime.shard(batches)
        own_jobs = [jobs[row] for _, batch in numbered for row in batch]
        # A batch under a negative number only keeps other ranks' forwards going: its results are thrown away.
        rows = [row if number >= 0 else -1 for number, batch in numbered for row in batch]

        def count_batch(size: int) -> None:
            advance(size)
            runtime.check_stop()

        images = sample_images(
            self.policy,
            [prompt for prompt, _ in own_jobs],
            sampler=Sampler(size=size, steps=config.evaluation.steps),
            cache=self.cache,
            seeds=[seed_of(config.seed, "evaluation", prompt.id, index) for prompt, index in own_jobs],
            batch=config.evaluation.batch,
            fused=fused,
            progress=count_batch,
        )
        for _ in range(runtime.rounds(len(batches)) - len(numbered)):
            runtime.check_stop()  # as often as the ranks that have a batch more

        def measure() -> dict[int, EvaluatedSample]:
            with self.scoring(), closing(Workers(1, name="pacorl-evaluation")) as workers:
                measured = self._measure(own_jobs, images, workers, everything=everything)
            return {row: s for row, s in zip(rows, measured, strict=True) if row >= 0}

        return list(runtime.gather_rows(measure).values())

    def _measure(
        self, jobs: Sequence[Job], images: Sequence[Image], workers: Workers, *, everything: bool
    ) -> list[EvaluatedSample]:
        """The rewards' scores and P(Yes) of the pairs that one asks about; or everything, each question once."""
        prompts = [prompt for prompt, _ in jobs]

        def limited(name: str, reward: Reward, act: Callable[[], Outcome]) -> Outcome:
            return self._limited_call(name, reward, act, images=len(images), workers=workers).result()

        def scores(name: str, reward: Reward) -> list[float | None]:
            return limited(name, reward, partial(_finite, name, reward, prompts, images))

        # Its answers about pairs serve the reward and the matrix.
        consistency = next((reward for reward in self.rewards.values() if isinstance(reward, Consistency)), None)
        asking = consistency or (Consistency(self.judge) if everything and self.judge else None)
        answers = (
            limited("consistency", asking, partial(asking.pairs, prompts, images)) if asking else [{} for _ in images]
        )
        columns: dict[str, Sequence[float | None]] = {
            name: consistency.reduce(answers) if consistency and reward is consistency else scores(name, reward)
            for name, reward in self.rewards.items()
        }
        samples = [
            EvaluatedSample(prompt, index, image, scores, [[verdict.p_yes for verdict in verdicts.values()]])
            for (prompt, index), image, scores, verdicts in zip(
                jobs, images, _rows_of(columns, len(images)), answers, strict=True
            )
        ]
        if not everything:
            return samples
        held_out = _rows_of({name: scores(name, reward) for name, reward in self.held_out.items()}, len(images))
        return [
            replace(
                sample,
                p_yes=[list(cells) for cells in matrix_of(verdicts, sample.prompt.grid.count)] if asking else [],
                reward=weighted_reward(self.config.rewards, sample.scores),
                held_out=measures,
                panel_statistics=panel_statistics(sample.prompt, sample.image),
            )
            for sample, verdicts, measures in zip(samples, answers, held_out, strict=True)
        ]

    def _limited_call(
        self, name: str, reward: Reward, act: Callable[[], Outcome], *, images: int, workers: Workers
    ) -> LimitedCall[Outcome]:
        """A call of a reward about this rank's images, all at once; each batch of them adds to its time limit."""
        context, batches = torch_context(), max(1, math.ceil(images / self.config.evaluation.batch))

        def act_in_context() -> Outcome:
            with context():
                return act()

        return LimitedCall(
            workers,
            act_in_context,
            name=f"reward {name} (evaluation of {images} images)",
            seconds=time_limit(reward, batches * self.config.reward_timeout),
            check_stop=self.runtime.check_signal,
        )

    # --- comparisons -------------------------------------------------------------------------------------------

    def _correlations(
        self, full: Sequence[EvaluatedSample], reduced: Sequence[EvaluatedSample], small: Size, *, epoch: int
    ) -> dict[str, float]:
        """How each reward at the training size goes with itself at full size, over equal prompts and seeds (Pearson).

        Warns if a reward's is low: then what is learned at the one may be lost at the other.
        """
        correlations = {}
        for name in self.rewards:
            both = [(large.scores[name], little.scores[name]) for large, little in zip(full, reduced, strict=True)]
            scored = [(a, b) for a, b in both if a is not None and b is not None]
            with suppress(StatisticsError):  # all alike
                if len(scored) > 1:
                    correlations[f"correlation/{name}"] = correlation(*zip(*scored, strict=True))
            if _surely_below(LEAST_CORRELATION, correlations.get(f"correlation/{name}", 1.0), count=len(scored)):
                warnings.warn(
                    f"after epoch {epoch} reward {name} at {small} and at {self.full_size} correlate by "
                    f"{correlations[f'correlation/{name}']:.2f}, surely less than {LEAST_CORRELATION}: "
                    "what is learned at the training size may not carry over; train at a larger sampling.size",
                    stacklevel=2,
                )
        return correlations

    def _means(self, samples: Sequence[EvaluatedSample]) -> dict[str, float]:
        """The mean of each reward, and of P(Yes) over the pairs; left out if none has a value."""
        columns = {name: [sample.scores[name] for sample in samples] for name in self.rewards}
        columns["p_yes"] = [value for sample in samples for row in sample.p_yes for value in row]
        return _mean_of_each(columns)


def weighted_reward(rewards: Sequence[RewardConfig], scores: Mapping[str, float | None]) -> float | None:
    """Σ weight · score over all rewards; None if a score is missing."""
    weighted = [reward.weight * value for reward in rewards if (value := scores.get(reward.key)) is not None]
    return sum(weighted) if len(weighted) == len(rewards) else None


def _finite(name: str, reward: Reward, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
    """A reward's scores; what is no finite number is missing too."""
    scores = scores_of(name, reward, prompts, images, masked=True)
    return [value if value is not None and math.isfinite(value) else None for value in scores]


def _rows_of(columns: Mapping[str, Sequence[float | None]], count: int) -> list[dict[str, float | None]]:
    return [{name: column[row] for name, column in columns.items()} for row in range(count)]


def _mean_of_each(columns: Mapping[str, Sequence[float | None]]) -> dict[str, float]:
    values = {name: [value for value in column if value is not None] for name, column in columns.items()}
    return {name: fmean(column) for name, column in values.items() if column}


def _surely_below(least: float, estimate: float, *, count: int) -> bool:
    """Whether the whole 95 % interval of a correlation over `count` pairs lies below `least` (Fisher's z)."""
    if count < LEAST_FOR_WARNING:
        return False
    # atanh is infinite at ±1.
    z = math.atanh(max(-0.999999, min(0.999999, estimate)))
    return math.tanh(z + NORMAL_95 / math.sqrt(count - 3)) < least
