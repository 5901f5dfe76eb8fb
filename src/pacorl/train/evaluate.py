"""What a policy has learned: its evaluation prompts at full size, without noise, judged and kept."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import StatisticsError, correlation, fmean
from typing import TYPE_CHECKING, Any

import torch

from pacorl.core.sampling import Sampler
from pacorl.engine.rollout import one_size_batches, sample_images, seed_of
from pacorl.engine.runtime import SharedFault
from pacorl.judges.pairwise import matrix_of
from pacorl.lora.fuse import FusedLora, merge
from pacorl.rewards.consistency import Consistency
from pacorl.rewards.reward import Reward, scores_of
from pacorl.train.alarms import panel_statistics_of, watched
from pacorl.train.checkpointing import save
from pacorl.train.training import Grade, Training
from pacorl.types import Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.config.policy_run import RewardConfig


Job = tuple[Prompt, int]
"""A prompt to be painted, and which of its pictures this is."""

Judging = Callable[[Training, Sequence[Job], "Sequence[Image]"], list[dict[str, Any]]]
"""What makes a record of each picture."""

LEAST_FOR_WARNING = 10
"""Pictures below which a correlation says too little to warn of."""
NORMAL_95 = 1.96
TRAINED_STRIDE = 4
"""The trained adapter is compared on every fourth image where the average was sampled at full size alone, so that a
comparison never costs as much as the evaluation."""


@torch.no_grad()
def evaluate(training: Training, grade: Grade | None = None) -> dict[str, float]:
    """Paints the evaluation prompts at full size without noise, judges and logs them.

    Saves, and raises on every rank, what a reward raised.
    """
    repeats = training.config.evaluation.samples_per_prompt
    jobs = [(prompt, turn) for prompt in training.evaluation_prompts for turn in range(repeats)]
    small = training.config.sampling.size_at(max(0, training.epoch - 1))
    spent = training.seconds["evaluation"]
    try:
        lines, sketches = _painted_at_both_sizes(training, jobs, small)
        trained = _sampled_with_trained(training, jobs, small if sketches else None)
    except SharedFault as error:
        save(training)  # here the adapter is the trained one again, not its average
        raise error.fault from None
    values = _keep_evaluation(training, lines)
    if sketches:
        values |= _correlations(training, lines, sketches, small)
    if trained:
        values |= _trained_beside_average(training, trained, sketches or lines[::TRAINED_STRIDE])
    if grade:
        values |= grade([prompt for prompt, _ in jobs], [line["picture"] for line in lines])
    values |= watched(training, "evaluation", [line["look"] for line in lines], values)
    values["seconds/evaluation"] = training.seconds["evaluation"] - spent
    training.logbook.write("evaluation", epoch=training.epoch, step=training.step, values=values)
    training.evaluated, training.score = training.epoch, _score_of(training, values)
    return values


def _painted_at_both_sizes(
    training: Training, jobs: Sequence[Job], small: Size
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The averaged adapter's records at full size, and at the training size where the two are compared."""
    full = training.evaluation_sampler
    compared = training.config.evaluation.compare_sizes and any(
        training.policy.size_of(prompt, small) != training.policy.size_of(prompt, full.size)
        for prompt in training.evaluation_prompts
    )
    with (
        training.timed("evaluation"),
        training.average.swapped_in(),
        training.bars.phase("evaluating", total=(1 + compared) * len(jobs) // training.runtime.world) as advance,
    ):
        merged = merge(training.bare, wanted=training.config.sampling.fuse_lora)
        lines = _painted(training, jobs, full, merged, advance, judged=_judged)
        if not compared:
            return lines, []
        return lines, _painted(training, jobs, full.model_copy(update={"size": small}), merged, advance, judged=_scored)


def _sampled_with_trained(training: Training, jobs: Sequence[Job], small: Size | None) -> list[dict[str, Any]]:
    """The trained adapter's records: of all jobs at the training size, or of every fourth at full size.

    None before the first optimizer step, when the average is the trained adapter.
    """
    if not training.config.evaluation.compare_trained or training.step == 0:
        return []
    full = training.evaluation_sampler
    sampler, jobs = (full.model_copy(update={"size": small}), jobs) if small else (full, jobs[::TRAINED_STRIDE])
    with (
        training.timed("evaluation"),
        training.bars.phase("evaluating the trained", total=len(jobs) // training.runtime.world) as advance,
    ):
        merged = merge(training.bare, wanted=training.config.sampling.fuse_lora)
        return _painted(training, jobs, sampler, merged, advance, judged=_scored)


def _painted(
    training: Training,
    jobs: Sequence[Job],
    sampler: Sampler,
    merged: FusedLora | None,
    advance: Callable[[int], None],
    *,
    judged: Judging,
) -> list[dict[str, Any]]:
    """The record of each of `jobs`, from every rank."""
    config, runtime = training.config, training.runtime
    # Batches are cut before they are dealt, so that what is in one does not depend on the number of processes.
    prompts = [prompt for prompt, _ in jobs]
    cut = one_size_batches(training.policy, prompts, size=sampler.size, batch=config.evaluation.batch)
    batches = [[(position, jobs[position]) for position in part] for part in cut]
    dealt = runtime.deal(batches)
    own = [job for _, batch in dealt for _, job in batch]
    rows = [row if number >= 0 else -1 for number, batch in dealt for row, _ in batch]

    def painted(count: int) -> None:
        advance(count)
        runtime.check_stop()

    images = sample_images(
        training.policy,
        [prompt for prompt, _ in own],
        sampler=sampler,
        cache=training.cache,
        seeds=[seed_of(config.seed, "evaluation", prompt.id, turn) for prompt, turn in own],
        batch=config.evaluation.batch,
        merged=merged,
        progress=painted,
    )
    for _ in range(runtime.rounds(len(batches)) - len(dealt)):
        runtime.check_stop()  # as often as the ranks that were dealt a batch more

    def records() -> dict[int, dict[str, Any]]:
        lines = zip(rows, judged(training, own, images), own, images, strict=True)
        return {row: line | {"seed": turn, "picture": image} for row, line, (_, turn), image in lines if row >= 0}

    return list(runtime.gather_rows(records).values())


def _scored(training: Training, jobs: Sequence[Job], images: Sequence[Image]) -> list[dict[str, Any]]:
    """The scores of each picture, and P(Yes) of its pairs where a reward asks of them anyway."""
    prompts = [prompt for prompt, _ in jobs]
    consistency = next((r for r in training.rewards.values() if isinstance(r, Consistency)), None)
    pairs = consistency.pairs(prompts, images) if consistency else [{} for _ in images]
    columns = {
        name: consistency.reduce(pairs) if reward is consistency else _known(name, reward, prompts, images)
        for name, reward in training.rewards.items()
    }
    return [
        {
            "scores": {name: column[row] for name, column in columns.items()},
            "p_yes": [[verdict.p_yes for verdict in pairs[row].values()]],
        }
        for row in range(len(images))
    ]


def _known(name: str, reward: Reward, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
    """A reward's scores; what is no finite number is missing too."""
    scores = scores_of(name, reward, prompts, images, masked=True)
    return [value if value is not None and math.isfinite(value) else None for value in scores]


def _correlations(
    training: Training, lines: Sequence[dict[str, Any]], sketches: Sequence[dict[str, Any]], small: Size
) -> dict[str, float]:
    """How each reward at the training size goes with itself at full size, over the same prompts and seeds (Pearson).

    Warns where a reward's is low: then what is learned at the one may be lost at the other.
    """
    found = {}
    for name in training.rewards:
        pairs = [(large["scores"][name], little["scores"][name]) for large, little in zip(lines, sketches, strict=True)]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        with suppress(StatisticsError):  # all alike
            if len(known) > 1:
                found[f"correlation/{name}"] = correlation(*zip(*known, strict=True))
        least = training.config.evaluation.min_correlation
        if _surely_below(least, found.get(f"correlation/{name}", 1.0), count=len(known)):
            warnings.warn(
                f"after epoch {training.epoch} reward {name} at {small} and at {training.evaluation_sampler.size} "
                f"correlate by {found[f'correlation/{name}']:.2f}, surely less than evaluation.min_correlation "
                f"{least}: what is learned at the training size may not carry over; train at a larger sampling.size",
                stacklevel=2,
            )
    return found


def _surely_below(least: float, found: float, *, count: int) -> bool:
    """Whether the whole 95 % interval of a correlation over `count` pairs lies below `least` (Fisher's z)."""
    if count < LEAST_FOR_WARNING:
        return False
    z = math.atanh(max(-0.999999, min(0.999999, found)))
    return math.tanh(z + NORMAL_95 / math.sqrt(count - 3)) < least


def _score_of(training: Training, values: Mapping[str, float]) -> float | None:
    """By what the best checkpoint is kept; None where a judge failed.

    Raises ValueError where `best_by` names no measure of the evaluation.
    """
    config = training.config
    if config.best_by == "reward":
        return weighted_reward(config.rewards, values)
    if config.best_by and config.best_by not in values:
        measures = ", ".join(name for name in values if "/" not in name)
        raise ValueError(f"best_by {config.best_by!r} is no measure of the evaluation; it has reward, {measures}")
    return values.get(config.best_by)


def weighted_reward(rewards: Sequence[RewardConfig], scores: Mapping[str, float | None]) -> float | None:
    """Σ weight · score over all rewards; None if a score is missing."""
    weighted = [reward.weight * value for reward in rewards if (value := scores.get(reward.key)) is not None]
    return sum(weighted) if len(weighted) == len(rewards) else None


def _judged(training: Training, jobs: Sequence[tuple[Prompt, int]], images: Sequence[Image]) -> list[dict[str, Any]]:
    """A record per image: its prompt, pair matrix (empty without a judge) and scores. Every question is asked once."""
    prompts = [prompt for prompt, _ in jobs]
    consistency = next((r for r in training.rewards.values() if isinstance(r, Consistency)), None)
    asking = consistency or (Consistency(training.judge) if training.judge else None)
    pairs = asking.pairs(prompts, images) if asking else []
    scores = {
        name: consistency.reduce(pairs) if reward is consistency else _known(name, reward, prompts, images)
        for name, reward in training.rewards.items()
    }
    by_image = [{name: column[row] for name, column in scores.items()} for row in range(len(images))]
    held_out = {name: _known(name, reward, prompts, images) for name, reward in training.held_out.items()}
    looks = panel_statistics_of(prompts, images)
    return [
        {
            "prompt_id": prompt.id,
            "text": prompt.text,
            "theme": prompt.theme,
            "grid": str(prompt.grid),
            "panels": list(prompt.panels),
            "p_yes": [list(cells) for cells in matrix_of(pairs[row], prompt.grid.count)] if pairs else [],
            "scores": by_image[row],
            "reward": weighted_reward(training.config.rewards, by_image[row]),
            "held_out": {name: column[row] for name, column in held_out.items()},
            "look": looks[row],
        }
        for row, prompt in enumerate(prompts)
    ]


def _keep_evaluation(training: Training, lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Writes pictures and records; returns the mean of each score."""
    name = f"evaluation-{training.epoch:06d}"
    for number, line in enumerate(lines):
        training.logbook.picture(f"{name}/{number:04d}", line["picture"])
    kept = [
        {key: value for key, value in line.items() if key not in ("picture", "look")}
        | {"image": f"{name}/{number:04d}.png"}
        for number, line in enumerate(lines)
    ]
    training.logbook.records(name, kept)
    held_out = {f"held_out/{name}": [line["held_out"][name] for line in lines] for name in training.held_out}
    return _means(training, lines) | _mean_of_each(held_out)


def _trained_beside_average(
    training: Training, trained: Sequence[dict[str, Any]], average: Sequence[dict[str, Any]]
) -> dict[str, float]:
    """The mean of each measure that both have, over the same prompts, seeds and size."""
    of_trained, of_average = _means(training, trained), _means(training, average)
    shared = [name for name in of_trained if name in of_average]
    return {f"trained/{name}": of_trained[name] for name in shared} | {
        f"average/{name}": of_average[name] for name in shared
    }


def _means(training: Training, lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The mean of each reward, and of P(Yes) over the pairs; left out if none has a value."""
    columns = {reward: [line["scores"][reward] for line in lines] for reward in training.rewards}
    columns["p_yes"] = [value for line in lines for row in line["p_yes"] for value in row]
    return _mean_of_each(columns)


def _mean_of_each(columns: Mapping[str, Sequence[float | None]]) -> dict[str, float]:
    return {name: fmean(known) for name, column in columns.items() if (known := [v for v in column if v is not None])}
