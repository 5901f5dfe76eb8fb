"""Evaluation of a policy: evaluation prompts at full size without noise, scored and logged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, product
from statistics import fmean
from typing import TYPE_CHECKING, TypeVar

import torch

from pacorl.core.metric_names import HELD_OUT
from pacorl.core.sampler import Sampler
from pacorl.grpo.monitor import panel_statistics
from pacorl.grpo.rollout import sample_images
from pacorl.grpo.rows import one_size_batches
from pacorl.grpo.scoring import time_limit, torch_context
from pacorl.judge.pairwise import matrix_of
from pacorl.rewards.consistency import Consistency
from pacorl.rewards.reward import Reward, scores_of
from pacorl.runtime.workers import LimitedCall, Workers
from pacorl.types import Size

if TYPE_CHECKING:
    from PIL.Image import Image

from pacorl.grpo.evaluated import EvaluatedSample, Evaluation, Job, noise_seed, weighted_reward
from pacorl.grpo.run import Run

Outcome = TypeVar("Outcome")


def evaluate(run: Run) -> dict[str, float]:
    """Sample the evaluation prompts at full size without noise, score and log them.

    Returns:
        The evaluation's line in metrics.jsonl.

    Raises:
        Exception: raised by a reward on any rank; on all ranks, when the state is saved.
    """
    # 1. Sample and score.
    seconds_before = run.clock.seconds["evaluation"]
    with run.guard():
        with run.clock.timed("evaluation"):
            evaluation = measure(run)
        evaluation.keep(run.logbook, run.epoch)

        # 2. Further metrics and the monitor.
        samples = evaluation.samples
        metrics = dict(evaluation.metrics)
        not_finite = [(name, sample.prompt) for sample in samples for name in sample.not_finite]
        metrics |= run.check_finite(not_finite, when=f"evaluation after epoch {run.epoch}")
        if run.extra_metrics:
            metrics |= run.extra_metrics([s.prompt for s in samples], [s.image for s in samples])
        metrics |= run.watch("evaluation", [s.panel_statistics for s in samples if s.panel_statistics], metrics)
        metrics["seconds/evaluation"] = run.clock.seconds["evaluation"] - seconds_before

        # 3. Record.
        score = evaluation.score_by(run.config.best_by, metrics)
        run.logbook.write("evaluation", epoch=run.epoch, step=run.step, values=metrics)
        run.evaluated = run.epoch
        run.score = score
    return metrics


@torch.no_grad()
def measure(run: Run) -> Evaluation:
    """Sample the evaluation prompts with the averaged adapter, and score them with all rewards.

    Args:
        run: the run, between two epochs.

    Raises:
        SharedFault: wraps a reward's exception on any rank.
    """
    jobs = list(product(run.evaluation_prompts, range(run.config.evaluation.samples_per_prompt)))
    total = len(jobs) // run.runtime.world
    with run.average.swapped_in(), run.bars.phase("evaluating", total=total, stage=True) as advance:
        samples = _sample(run, jobs, advance)

    columns = {}
    for name in run.held_out:
        columns[f"held_out/{name}"] = [(sample.held_out or {}).get(name) for sample in samples]
    return Evaluation(samples, _means(run, samples) | _mean_of_each(columns), run.config.rewards)


def _sample(run: Run, jobs: Sequence[Job], advance: Callable[[int], None]) -> list[EvaluatedSample]:
    """Sample and measure each of `jobs`, spread over the ranks."""
    config = run.config
    runtime = run.runtime
    size = Size(*config.evaluation.size)

    # 1. Cut batches, then shard them, so that batches do not depend on the number of processes.
    prompts = [prompt for prompt, _ in jobs]
    batches = one_size_batches(run.policy, prompts, size=size, batch=config.evaluation.batch)
    numbered = runtime.shard(batches)
    own_jobs: list[Job] = []
    rows: list[int] = []
    for number, batch in numbered:
        own_jobs += [jobs[row] for row in batch]
        # A negative number marks padding for the forwards of other ranks: its results are dropped.
        rows += batch if number >= 0 else [-1] * len(batch)

    # 2. Sample.
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
        progress=count_batch,
    )
    for _ in range(runtime.rounds(len(batches)) - len(numbered)):
        runtime.check_stop()  # a collective: as often as the ranks with one more batch

    # 3. Score.
    def measure() -> dict[int, EvaluatedSample]:
        with run.scoring(), closing(Workers(1, name="pacorl-evaluation")) as workers:
            measured = _measure(run, own_jobs, images, workers)
        return {row: s for row, s in zip(rows, measured, strict=True) if row >= 0}

    return list(runtime.gather_rows(measure).values())


def _measure(run: Run, jobs: Sequence[Job], images: Sequence[Image], workers: Workers) -> list[EvaluatedSample]:
    """Score images by the rewards, P(Yes) of pairs and the held-out rewards."""
    prompts = [prompt for prompt, _ in jobs]

    def limited(name: str, reward: Reward, act: Callable[[], Outcome]) -> Outcome:
        # One call for all images, so that a judge shares prefixes; its limit grows with the batches.
        count = len(images)
        context = torch_context()
        batches = max(1, math.ceil(count / run.config.evaluation.batch))

        def act_in_context() -> Outcome:
            with context():
                return act()

        return LimitedCall(
            workers,
            act_in_context,
            name=f"reward {name} (evaluation of {count} images)",
            seconds=time_limit(reward, batches * run.config.reward_timeout),
            check_stop=run.runtime.check_signal,
        ).result()

    def scores(name: str, reward: Reward) -> list[float | None]:
        return limited(name, reward, partial(scores_of, name, reward, prompts, images, masked=True))

    # 1. P(Yes) of pairs, asked once for the reward and the matrix.
    consistency = next((reward for reward in run.rewards.values() if isinstance(reward, Consistency)), None)
    asking = consistency or (Consistency(run.judge) if run.judge else None)
    answers = limited("consistency", asking, partial(asking.pairs, prompts, images)) if asking else [{} for _ in images]

    # 2. The rewards.
    columns: dict[str, Sequence[float | None]] = {}
    for name, reward in run.rewards.items():
        if consistency and reward is consistency:
            columns[name] = [consistency.score(verdicts) for verdicts in answers]
        else:
            columns[name] = scores(name, reward)

    # 3. Held-out rewards, the matrix of pairs, and the monitor's statistics.
    held_out = {name: scores(name, reward) for name, reward in run.held_out.items()}
    samples = []
    for (prompt, index), image, (row, faulty), (held_out_row, held_out_faulty), verdicts in zip(
        jobs, images, _rows_of(columns, len(images)), _rows_of(held_out, len(images)), answers, strict=True
    ):
        matrix = matrix_of(verdicts, prompt.grid.count) if asking else []
        samples.append(
            EvaluatedSample(
                prompt,
                index,
                image,
                row,
                p_yes=[list(cells) for cells in matrix],
                reward=weighted_reward(run.config.rewards, row),
                held_out=held_out_row,
                panel_statistics=panel_statistics(prompt, image),
                not_finite=[*faulty, *(f"{HELD_OUT}{name}" for name in held_out_faulty)],
            )
        )
    return samples


def _means(run: Run, samples: Sequence[EvaluatedSample]) -> dict[str, float]:
    """Average each reward, and P(Yes) over the pairs; columns without a value are left out."""
    columns: dict[str, list[float | None]] = {}
    for name in run.rewards:
        columns[name] = [sample.scores[name] for sample in samples]
    columns["p_yes"] = list(chain(*chain(*(sample.p_yes for sample in samples))))
    return _mean_of_each(columns)


def _rows_of(
    columns: Mapping[str, Sequence[float | None]], count: int
) -> list[tuple[dict[str, float | None], list[str]]]:
    """Turn columns into each image's scores, None if missing or not finite, and the names of the latter."""
    rows = []
    for row in range(count):
        scores = {name: column[row] for name, column in columns.items()}
        faulty = [name for name, value in scores.items() if value is not None and not math.isfinite(value)]
        rows.append((scores | dict.fromkeys(faulty), faulty))
    return rows


def _mean_of_each(columns: Mapping[str, Sequence[float | None]]) -> dict[str, float]:
    means = {}
    for name, column in columns.items():
        values = [value for value in column if value is not None]
        if values:
            means[name] = fmean(values)
    return means
