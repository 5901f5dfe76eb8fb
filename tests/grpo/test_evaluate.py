"""What an evaluation samples, and when the correlation between sizes is warned of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from toy_world import toy_config, toy_world

from pacorl.config.reward_section import RewardConfig
from pacorl.grpo import evaluate
from pacorl.grpo.evaluate import weighted_reward
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.models.adapters import adapter_state
from pacorl.types import Size


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicyTrainer]:
    """A toy run after an epoch, whose average lies behind what was trained."""
    settings = ("evaluation.samples_per_prompt=2", "optimizer.ema_decay=0.9", "optimizer.lr=0.1")
    with toy_world():
        made = PolicyTrainer(toy_config(tmp_path_factory.mktemp("evaluate") / "run", *settings))
    made.run_epoch()
    yield made
    made.close()


class Seen:
    """What loops ask of a policy: the seeds of the noise that they start from, and the sigmas of its velocities."""

    def __init__(self, training: PolicyTrainer, patch: pytest.MonkeyPatch) -> None:
        self.seeds: list[int] = []
        self.sigmas: set[float] = set()
        policy = training.policy
        noise, velocity = policy.noise, policy.velocity

        def drawn(seeds: Sequence[int], size: Size) -> torch.Tensor:
            self.seeds += seeds
            return noise(seeds, size)

        def predicted(x_BNC: torch.Tensor, sigma_B: torch.Tensor, *rest: object) -> torch.Tensor:
            self.sigmas |= set(sigma_B.tolist())
            return velocity(x_BNC, sigma_B, *rest)  # type: ignore[arg-type]

        patch.setattr(policy, "noise", drawn)
        patch.setattr(policy, "velocity", predicted)


def sampled(training: PolicyTrainer, seeds: Sequence[int]) -> np.ndarray:
    """The evaluation's images by the weights as they are: its prompts twice each, Euler's steps at full size."""
    config, policy = training.config.evaluation, training.policy
    size, prompts = Size(*config.size), [prompt for prompt in training.evaluation_prompts for _ in range(2)]
    x_BNC, sigmas = policy.noise(seeds, size), policy.sigmas(config.steps, size)
    conditioning = policy.collate(policy.encode(prompts, size))
    with torch.no_grad():
        for sigma, following in pairwise(sigmas):
            x_BNC = x_BNC + policy.velocity(x_BNC, sigma.expand(len(prompts)), conditioning, size) * (following - sigma)
    return np.stack([np.asarray(image, dtype=float) for image in policy.decode(x_BNC, size)])


def kept(folder: Path) -> np.ndarray:
    return np.stack([np.asarray(Image.open(path), dtype=float) for path in sorted(folder.glob("*.png"))])


def test_an_evaluation_samples_with_the_average_its_own_steps_and_a_noise_for_each_image(
    training: PolicyTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = {name: value.clone() for name, value in adapter_state(training.lora.transformer).items()}
    with monkeypatch.context() as patch:
        seen = Seen(training, patch)
        training.evaluate()
    seeds = list(dict.fromkeys(seen.seeds))
    assert len(seeds) == 2 * len(training.evaluation_prompts), "prompts or their images share a noise"

    evaluation = training.config.evaluation
    sigmas = training.policy.sigmas(evaluation.steps, Size(*evaluation.size))
    assert seen.sigmas == set(sigmas[:-1].tolist())

    images = kept(training.config.out / "samples" / f"evaluation-{training.epoch:06d}")
    with training.lora.average.swapped_in():
        by_the_average = sampled(training, seeds)
    assert np.abs(images - by_the_average).max() <= 1, "not the average's images (1: the rounding to 8 bits)"
    assert np.abs(sampled(training, seeds) - by_the_average).max() > 5, "the average is the trained adapter here"
    assert all(torch.equal(trained[name], value) for name, value in adapter_state(training.lora.transformer).items())


def test_every_evaluation_starts_from_the_same_noise(training: PolicyTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = []
    for epoch in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(training, "epoch", epoch)
            seen = Seen(training, patch)
            training.evaluate()
        starts.append(seen.seeds)
    assert starts[0] == starts[1]


def test_a_rank_s_padding_is_sampled_by_itself_and_not_scored(
    training: PolicyTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [(prompt, index) for prompt in training.evaluation_prompts for index in range(2)][:5]
    scored: list[evaluate.Job] = []
    batches: list[list[int]] = []
    noise, score = training.policy.noise, evaluate.score_images

    def drawn(seeds: Sequence[int], size: Size) -> torch.Tensor:
        batches.append([*seeds])
        return noise(seeds, size)

    def judged(
        trainer: PolicyTrainer, jobs: Sequence[evaluate.Job], images: Sequence[Image.Image]
    ) -> list[evaluate.EvaluatedSample]:
        scored.extend(jobs)
        return score(trainer, jobs, images)

    monkeypatch.setattr(training.policy, "noise", drawn)
    monkeypatch.setattr(evaluate, "score_images", judged)
    # The second of two ranks has the last batch, of one image, and then nothing while the first has another.
    monkeypatch.setattr(training.runtime, "shard", lambda batches: [(2, batches[2]), (-1, batches[0])])
    samples = evaluate.sample_and_score(training, jobs, lambda done: None)
    assert [(sample.prompt, sample.index) for sample in samples] == scored == jobs[4:]
    assert batches == [
        [evaluate.noise_seed(training.config.seed, job) for job in batch] for batch in (jobs[4:], jobs[:2])
    ]

    # A rank without any batch calls no reward.
    monkeypatch.setattr(training.runtime, "shard", lambda batches: [(-1, batches[0])])
    assert not evaluate.sample_and_score(training, jobs, lambda done: None)
    assert len(scored) == 1


def test_a_weighted_reward_that_lacks_a_score_is_missing() -> None:
    rewards = [RewardConfig(name="consistency", weight=2.0), RewardConfig(name="panel_match")]
    assert weighted_reward(rewards, {"consistency": 0.5, "panel_match": 0.25}) == 1.25
    assert weighted_reward(rewards, {"consistency": 0.5, "panel_match": None}) is None
