"""Evaluation of a policy: evaluation prompts at full size without noise, scored and logged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, product
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from pacorl.core.metric_names import ALARM
from pacorl.core.sampler import Sampler
from pacorl.core.schedule import seed_of
from pacorl.core.set_scores import whole_mean
from pacorl.grpo.rollout import sample_images
from pacorl.grpo.rows import forward_batches
from pacorl.grpo.scoring import check_scores
from pacorl.judge.pairwise import matrix_of
from pacorl.rewards.reward import scores_of
from pacorl.runtime.cores import available_cores
from pacorl.types import Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.config.reward_section import RewardConfig
    from pacorl.grpo.trainer import PolicyTrainer
    from pacorl.runtime.logbook import Logbook

Job = tuple[Prompt, int]
"""A prompt, and the index of the image among its images."""


@dataclass(frozen=True, slots=True)
class EvaluatedSample:
    """Image of an evaluation and its scores; a missing score is None."""

    prompt: Prompt
    index: int
    """Index among its prompt's images."""
    image: Image
    scores: Mapping[str, float | None] = field(default_factory=dict)
    """Scores by the training rewards, and by the held-out rewards as `held_out/NAME`."""
    p_yes: Sequence[Sequence[float | None]] = ()
    """P(Yes) of each pair of panels, symmetric; empty without a judge."""

    def record(self, image: str, rewards: Sequence[RewardConfig]) -> dict[str, Any]:
        """Return its line in samples/evaluation-….jsonl."""
        scores: dict[str, float | None] = {}
        for name, value in self.scores.items():
            scores[name] = value if value is not None and math.isfinite(value) else None
        return {
            "prompt_id": self.prompt.id,
            "text": self.prompt.text,
            "theme": self.prompt.theme,
            "grid": str(self.prompt.grid),
            "panels": list(self.prompt.panels),
            "p_yes": self.p_yes,
            "scores": scores,
            "reward": weighted_reward(rewards, scores),
            "seed": self.index,
            "image": image,
        }


def evaluate(trainer: PolicyTrainer) -> dict[str, float]:
    """Sample the evaluation prompts at full size without noise, score and log them; return the line in metrics.jsonl.

    Raises:
        SharedFault: on all ranks, for an error of a reward on any rank.
    """
    config = trainer.config
    # 1. The averaged adapter at full size, and its scores.
    jobs = list(product(trainer.evaluation_prompts, range(config.evaluation.samples_per_prompt)))
    progress = trainer.progress.phase("evaluating", total=len(jobs) // trainer.runtime.world)
    with trainer.lora.average.swapped_in(), progress as advance:
        samples = sample_and_score(trainer, jobs, advance)
    keep_samples(trainer.logbook, samples, epoch=trainer.epoch, rewards=config.rewards)

    # 2. Means of the finite scores, checks, and a caller's own metrics.
    columns = {}
    for name in samples[0].scores:
        columns[name] = [sample.scores[name] for sample in samples]
    metrics = {}
    # All verdicts of the judge, whatever a reward makes of them.
    p_yes: list[float | None] = []
    for sample in samples:
        p_yes += chain(*sample.p_yes)
    for name, column in (columns | {"p_yes": p_yes}).items():
        finite = [value for value in column if value is not None and math.isfinite(value)]
        if finite:
            metrics[name] = fmean(finite)
    prompts = [sample.prompt for sample in samples]
    checks, warning = check_scores(columns, prompts, when=f"evaluation after epoch {trainer.epoch}")
    trainer.warn_once(str([name for name in checks if name.startswith(ALARM)]), warning)
    metrics |= checks
    if trainer.extra_metrics:
        metrics |= trainer.extra_metrics(prompts, [sample.image for sample in samples])
    metrics |= trainer.progress.lap()

    # 3. Record.
    trainer.score = weighted_reward(config.rewards, metrics)
    trainer.evaluated = trainer.epoch
    return trainer.record("evaluation", metrics)


@torch.no_grad()
def sample_and_score(
    trainer: PolicyTrainer, jobs: Sequence[Job], advance: Callable[[int], object]
) -> list[EvaluatedSample]:
    """Sample and score each of `jobs`, spread over the ranks.

    Raises:
        SharedFault: wraps a reward's exception on any rank.
    """
    config = trainer.config
    runtime = trainer.runtime
    size = Size(*config.evaluation.size)
    most = trainer.config.evaluation.batch

    def count_batch(size: int) -> None:
        advance(size)
        runtime.check_stop()

    # 1. Cut batches, then shard and sample them, so that batches do not depend on the number of processes.
    rows: list[int] = []
    images: list[Image] = []
    batches = forward_batches(trainer.policy, [prompt for prompt, _ in jobs], size=size, batch=most)
    for number, batch in runtime.shard(batches):
        sampled = sample_images(
            trainer.policy,
            [jobs[row][0] for row in batch],
            sampler=Sampler(size=size, steps=config.evaluation.steps),
            cache=trainer.cache,
            seeds=[noise_seed(config.seed, jobs[row]) for row in batch],
            batch=most,
            progress=count_batch,
        )
        # A negative number marks padding, so that all ranks have as many forwards: nothing is asked about its images.
        if number >= 0:
            rows += batch
            images += sampled

    # 2. Score.
    def scored() -> dict[int, EvaluatedSample]:
        if not rows:
            return {}
        with trainer.turns.scoring():
            samples = score_images(trainer, [jobs[row] for row in rows], images)
        return dict(zip(rows, samples, strict=True))

    return list(runtime.gather_rows(scored).values())


def score_images(trainer: PolicyTrainer, jobs: Sequence[Job], images: Sequence[Image]) -> list[EvaluatedSample]:
    """Score images by the rewards, the held-out rewards and P(Yes) of pairs."""
    prompts = [prompt for prompt, _ in jobs]
    asking = trainer.consistency

    # One call for all images, so that a judge shares prefixes; its limit grows with the batches.
    def ask(name: str, reward: object, act: Callable[[], Any]) -> Any:
        batches = math.ceil(len(images) / trainer.config.evaluation.batch)
        what = f"reward {name} (evaluation of {len(images)} images)"
        return trainer.scorer.begin(reward, act, what, batches=batches)()

    # 1. P(Yes) of pairs, asked once for the reward and the matrix.
    answers = ask("consistency", asking, partial(asking.pairs, prompts, images)) if asking else [{} for _ in images]

    # 2. The rewards, held-out ones included.
    columns: dict[str, Sequence[float | None]] = {}
    for name, reward in {**trainer.rewards, **trainer.held_out}.items():
        if asking and reward is asking:
            columns[name] = [whole_mean(asking.p_yes_of(verdicts).values()) for verdicts in answers]
        else:
            columns[name] = ask(name, reward, partial(scores_of, name, reward, prompts, images, masked=True))

    # 3. Records with the matrix of pairs.
    samples = []
    for at, ((prompt, index), image, verdicts) in enumerate(zip(jobs, images, answers, strict=True)):
        scores = {name: column[at] for name, column in columns.items()}
        matrix = matrix_of(verdicts, prompt.grid.count) if asking else ()
        samples.append(EvaluatedSample(prompt, index, image, scores, matrix))
    return samples


def keep_samples(
    logbook: Logbook, samples: Sequence[EvaluatedSample], *, epoch: int, rewards: Sequence[RewardConfig] = ()
) -> None:
    """Write the records and images of the evaluation after an epoch into the run's folder."""
    folder = f"evaluation-{epoch:06d}"
    names = [f"{folder}/{at:04d}" for at in range(len(samples))]
    # zlib releases the GIL: a PNG of 1024² takes 0.2 to 0.6 s, during which the GPU idles.
    with ThreadPoolExecutor(available_cores()) as pool:
        list(pool.map(logbook.image, names, [sample.image for sample in samples]))
    records = []
    for name, sample in zip(names, samples, strict=True):
        records.append(sample.record(f"{name}.png", rewards))
    logbook.records(folder, records)


def noise_seed(seed: int, job: Job) -> int:
    """Derive the seed of an image's noise from the run's."""
    prompt, index = job
    return seed_of(seed, "evaluation", prompt.id, index)


def weighted_reward(rewards: Sequence[RewardConfig], scores: Mapping[str, float | None]) -> float | None:
    """Σ weight · score over all rewards; None without rewards, or if a score is missing."""
    # A sum without one of its scores would compare checkpoints unfairly.
    values = [scores.get(reward.key) for reward in rewards]
    if None in values or not values:
        return None
    return sum(reward.weight * value for reward, value in zip(rewards, values, strict=True) if value is not None)
