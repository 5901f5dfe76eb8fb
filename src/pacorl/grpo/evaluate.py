"""What a policy has learned: its evaluation prompts at full size, without noise, judged and kept."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from statistics import StatisticsError, correlation, fmean
from typing import TYPE_CHECKING, TypeVar

import torch

from pacorl.core.sampler import Sampler
from pacorl.grpo.monitor import panel_statistics
from pacorl.grpo.rollout import sample_images
from pacorl.grpo.rows import one_size_batches
from pacorl.grpo.scoring import time_limit, torch_context
from pacorl.judge.pairwise import matrix_of
from pacorl.models.lora.layers import FusedLora, fuse_lora
from pacorl.rewards.consistency import Consistency
from pacorl.rewards.reward import Reward, scores_of
from pacorl.runtime.workers import LimitedCall, Workers
from pacorl.types import Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image

from pacorl.grpo.evaluated import EvaluatedSample, Evaluation, Job, noise_seed, weighted_reward
from pacorl.grpo.run import Run

Outcome = TypeVar("Outcome")

# Below it a reward at the training size says little of itself at full size.
LEAST_CORRELATION = 0.3
# Images below which a correlation says too little to warn of.
LEAST_FOR_WARNING = 10
NORMAL_95 = 1.96
# The trained adapter is compared on every fourth image if the average was sampled at full size alone, so that a
# comparison never costs as much as the evaluation.
TRAINED_STRIDE = 4


def evaluate(run: Run) -> dict[str, float]:
    """Sample the evaluation prompts at full size without noise, score and log them.

    Returns:
        The evaluation's line in metrics.jsonl.

    Raises:
        Exception: raised by a reward on any rank; on all ranks, when the state is saved.
    """
    seconds_before = run.clock.seconds["evaluation"]
    small = run.config.sampling.size_at(max(0, run.epoch - 1))
    with run.guard():
        with run.clock.timed("evaluation"):
            evaluation = measure(run, small)
        evaluation.keep(run.logbook, run.epoch)

        samples, metrics = evaluation.samples, dict(evaluation.metrics)
        if run.extra_metrics:
            metrics |= run.extra_metrics([s.prompt for s in samples], [s.image for s in samples])
        metrics |= run.watch("evaluation", [s.panel_statistics for s in samples if s.panel_statistics], metrics)
        metrics["seconds/evaluation"] = run.clock.seconds["evaluation"] - seconds_before
        run.finish_evaluation(samples, metrics, evaluation.score_by(run.config.best_by, metrics))
    return metrics


def full_size(run: Run) -> Size:
    """Size of the evaluation's images, as configured."""
    return Size(*run.config.evaluation.size)


@torch.no_grad()
def measure(run: Run, small: Size) -> Evaluation:
    """Sample the evaluation prompts with the averaged adapter, and score them with everything that measures.

    Args:
        run: between two epochs.
        small: the training size, at which the rewards are compared with themselves at full size.

    Raises:
        SharedFault: what a reward raised on any rank.
    """
    repeats = run.config.evaluation.samples_per_prompt
    jobs = [(prompt, index) for prompt in run.evaluation_prompts for index in range(repeats)]
    full, reduced = _sample_average(run, jobs, small)
    # Before the first step the average is the trained adapter.
    compares = run.config.evaluation.compare_trained and run.step > 0
    trained = _sample_trained(run, jobs, small if reduced else None) if compares else []
    held_out = {f"held_out/{name}": [(s.held_out or {}).get(name) for s in full] for name in run.held_out}
    metrics = _means(run, full) | _mean_of_each(held_out)
    if reduced:
        metrics |= _correlations(run, full, reduced, small)
    if trained:
        # Means over equal prompts, seeds and size.
        of_trained, of_average = _means(run, trained), _means(run, reduced or full[::TRAINED_STRIDE])
        shared = [name for name in of_trained if name in of_average]
        metrics |= {f"trained/{name}": of_trained[name] for name in shared}
        metrics |= {f"average/{name}": of_average[name] for name in shared}
    return Evaluation(full, metrics, run.config.rewards)


def _sample_average(run: Run, jobs: Sequence[Job], small: Size) -> tuple[list[EvaluatedSample], list[EvaluatedSample]]:
    """The averaged adapter at full size, and at the training size if the two are compared."""
    size, size_of = full_size(run), run.policy.size_of
    compared = run.config.evaluation.compare_sizes and any(
        size_of(prompt, small) != size_of(prompt, size) for prompt in run.evaluation_prompts
    )
    total = (1 + compared) * len(jobs) // run.runtime.world
    with run.average.swapped_in(), run.bars.phase("evaluating", total=total, stage=True) as advance:
        fused = _fused(run)
        full = _sample(run, jobs, size, fused, advance, everything=True)
        if not compared:
            return full, []
        return full, _sample(run, jobs, small, fused, advance, everything=False)


def _sample_trained(run: Run, jobs: Sequence[Job], small: Size | None) -> list[EvaluatedSample]:
    """The trained adapter: all jobs at the training size, or every fourth at full size."""
    jobs = jobs if small else jobs[::TRAINED_STRIDE]
    with run.bars.phase("evaluating the trained", total=len(jobs) // run.runtime.world, stage=True) as advance:
        return _sample(run, jobs, small or full_size(run), _fused(run), advance, everything=False)


def _fused(run: Run) -> FusedLora | None:
    transformer = run.runtime.unwrap(run.policy.transformer)
    return fuse_lora(transformer, enabled=run.config.sampling.fuse_lora)


def _sample(
    run: Run,
    jobs: Sequence[Job],
    size: Size,
    fused: FusedLora | None,
    advance: Callable[[int], None],
    *,
    everything: bool,
) -> list[EvaluatedSample]:
    """Sample at a size and measure each of `jobs`, spread over the ranks."""
    config, runtime = run.config, run.runtime
    # Batches are cut before they are sharded, so that what is in one does not depend on the number of processes.
    prompts = [prompt for prompt, _ in jobs]
    batches = one_size_batches(run.policy, prompts, size=size, batch=config.evaluation.batch)
    numbered = runtime.shard(batches)
    own_jobs = [jobs[row] for _, batch in numbered for row in batch]
    # A batch under a negative number only keeps other ranks' forwards going: its results are thrown away.
    rows = [row if number >= 0 else -1 for number, batch in numbered for row in batch]

    def count_batch(size: int) -> None:
        advance(size)
        runtime.check_stop()

    images = sample_images(
        run.policy,
        [prompt for prompt, _ in own_jobs],
        sampler=Sampler(size=size, steps=config.evaluation.steps),
        cache=run.cache,
        seeds=[noise_seed(config.seed, job) for job in own_jobs],
        batch=config.evaluation.batch,
        fused=fused,
        progress=count_batch,
    )
    for _ in range(runtime.rounds(len(batches)) - len(numbered)):
        runtime.check_stop()  # as often as the ranks that have a batch more

    def measure() -> dict[int, EvaluatedSample]:
        with run.scoring(), closing(Workers(1, name="pacorl-evaluation")) as workers:
            measured = _measure(run, own_jobs, images, workers, everything=everything)
        return {row: s for row, s in zip(rows, measured, strict=True) if row >= 0}

    return list(runtime.gather_rows(measure).values())


def _measure(
    run: Run, jobs: Sequence[Job], images: Sequence[Image], workers: Workers, *, everything: bool
) -> list[EvaluatedSample]:
    """The rewards' scores and P(Yes) of the pairs that one asks about; or everything, each question once."""
    prompts = [prompt for prompt, _ in jobs]

    def limited(name: str, reward: Reward, act: Callable[[], Outcome]) -> Outcome:
        return _limited_call(run, name, reward, act, images=len(images), workers=workers).result()

    def scores(name: str, reward: Reward) -> list[float | None]:
        return limited(name, reward, partial(_finite, name, reward, prompts, images))

    # Its answers about pairs serve the reward and the matrix.
    consistency = next((reward for reward in run.rewards.values() if isinstance(reward, Consistency)), None)
    asking = consistency or (Consistency(run.judge) if everything and run.judge else None)
    answers = limited("consistency", asking, partial(asking.pairs, prompts, images)) if asking else [{} for _ in images]
    columns: dict[str, Sequence[float | None]] = {
        name: consistency.reduce(answers) if consistency and reward is consistency else scores(name, reward)
        for name, reward in run.rewards.items()
    }
    samples = [
        EvaluatedSample(prompt, index, image, scores, [[verdict.p_yes for verdict in verdicts.values()]])
        for (prompt, index), image, scores, verdicts in zip(
            jobs, images, _rows_of(columns, len(images)), answers, strict=True
        )
    ]
    if not everything:
        return samples
    held_out = _rows_of({name: scores(name, reward) for name, reward in run.held_out.items()}, len(images))
    return [
        replace(
            sample,
            p_yes=[list(cells) for cells in matrix_of(verdicts, sample.prompt.grid.count)] if asking else [],
            reward=weighted_reward(run.config.rewards, sample.scores),
            held_out=measures,
            panel_statistics=panel_statistics(sample.prompt, sample.image),
        )
        for sample, verdicts, measures in zip(samples, answers, held_out, strict=True)
    ]


def _limited_call(
    run: Run, name: str, reward: Reward, act: Callable[[], Outcome], *, images: int, workers: Workers
) -> LimitedCall[Outcome]:
    """A call of a reward about this rank's images, all at once; each batch of them adds to its time limit."""
    context, batches = torch_context(), max(1, math.ceil(images / run.config.evaluation.batch))

    def act_in_context() -> Outcome:
        with context():
            return act()

    return LimitedCall(
        workers,
        act_in_context,
        name=f"reward {name} (evaluation of {images} images)",
        seconds=time_limit(reward, batches * run.config.reward_timeout),
        check_stop=run.runtime.check_signal,
    )


# --- comparisons -----------------------------------------------------------------------------------------------


def _correlations(
    run: Run, full: Sequence[EvaluatedSample], reduced: Sequence[EvaluatedSample], small: Size
) -> dict[str, float]:
    """How each reward at the training size goes with itself at full size, over equal prompts and seeds (Pearson).

    Warns if a reward's is low: then what is learned at the one may be lost at the other.
    """
    correlations = {}
    for name in run.rewards:
        both = [(large.scores[name], little.scores[name]) for large, little in zip(full, reduced, strict=True)]
        scored = [(a, b) for a, b in both if a is not None and b is not None]
        with suppress(StatisticsError):  # all alike
            if len(scored) > 1:
                correlations[f"correlation/{name}"] = correlation(*zip(*scored, strict=True))
        if _surely_below(LEAST_CORRELATION, correlations.get(f"correlation/{name}", 1.0), count=len(scored)):
            warnings.warn(
                f"after epoch {run.epoch} reward {name} at {small} and at {full_size(run)} correlate by "
                f"{correlations[f'correlation/{name}']:.2f}, surely less than {LEAST_CORRELATION}: "
                "what is learned at the training size may not carry over; train at a larger sampling.size",
                stacklevel=2,
            )
    return correlations


def _means(run: Run, samples: Sequence[EvaluatedSample]) -> dict[str, float]:
    """The mean of each reward, and of P(Yes) over the pairs; left out if none has a value."""
    columns = {name: [sample.scores[name] for sample in samples] for name in run.rewards}
    columns["p_yes"] = [value for sample in samples for row in sample.p_yes for value in row]
    return _mean_of_each(columns)


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
