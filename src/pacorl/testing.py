"""Contracts of rewards, objectives and policies, as checks for entries from outside the package.

    from pacorl.testing import check_objective

    def test_my_objective():
        check_objective(MINE)

Each check raises AssertionError with the fault. They need no test framework, no weights and no network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pacorl.core.objectives import Endpoint, ObjectiveOptions, ObjectiveSpec, Step
from pacorl.core.objectives.grpo_clip import ClippedOptions
from pacorl.core.sde import Transition, log_prob
from pacorl.grpo.rollout import denoise
from pacorl.io.images import as_rgb
from pacorl.rewards.reward import Reward, RewardFunction, scores_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.models.policies.pipeline import PipelinePolicy
    from pacorl.types import Prompt, Size

STD, SIGMA = 0.3, 0.6
"""Standard deviation of the stochastic step; noise level of endpoints."""
BETTER, WORSE, NEUTRAL = range(3)
"""Rows of an objective's batch, whose advantages are 1, −1 and 0."""
STEPS = 3
"""Denoising steps of a policy."""


def check_reward(reward: Reward | RewardFunction, prompts: Sequence[Prompt], images: Sequence[Image]) -> None:
    """Check that scores differ, and are the same for every image alone: a score depends on no neighbour in its batch.

    Args:
        prompts: one per image.
        images: two or more, which the reward should score differently.

    Raises:
        AssertionError: with the fault, if the reward breaks the contract.
        RewardError: if the reward does not return one number per image.
    """
    scores = scores_of("tested", reward, prompts, images)
    assert len(set(scores)) > 1, f"all images have the score {scores[0]}; give images that should differ, or mend it"
    for number, score in enumerate(scores):
        (alone,) = scores_of("tested", reward, [prompts[number]], [images[number]])
        same = alone is score
        if alone is not None and score is not None:
            same = math.isclose(alone, score, rel_tol=1e-4, abs_tol=1e-5)
        assert same, f"image {number} has the score {score}, and {alone} in a batch of one"


def check_objective(spec: ObjectiveSpec, options: ObjectiveOptions | None = None) -> None:
    """Check an objective's direction, clipping, selection and precision, on a batch of three samples.

    Options whose names begin with `clip` are ranges of the ratio. Without one, the spec must state that the loss is
    unclipped. `options` are the objective's settings; by default the defaults.

    Raises:
        AssertionError: with the fault, if the objective breaks the contract.
    """
    options = options or spec.options.model_validate({})
    if isinstance(options, ClippedOptions):
        options = options.model_copy(update={"clip_range": options.epsilon})
    start = _noise(3)
    # The prediction under which all three samples are likeliest.
    target = (_noise(2) - _noise(1)) / SIGMA if spec.needs == "endpoint" else _noise(3) + STD * _noise(4)

    for dtype in (torch.float32, torch.float64):
        loss, _ = spec.loss(_batch(spec, start.to(dtype)), options)
        assert loss.shape == (), f"the loss has the shape {tuple(loss.shape)}, not ()"
        assert loss.isfinite(), "the loss is not finite"
        assert loss.dtype == dtype, f"inputs of {dtype} give a loss of {loss.dtype}"

    # A small step against the gradient makes the better sample likelier, and the worse one less likely.
    gradient = _gradient(spec, options, start)
    assert not gradient[NEUTRAL].any(), "an unused sample has a gradient"
    moved = start - 1e-3 / gradient.abs().max().clamp(min=1e-12) * gradient
    gain_B = -((moved - target) ** 2 - (start - target) ** 2).flatten(1).mean(1)
    assert gain_B[BETTER] > 0, "a step against the gradient makes a sample of advantage 1 less likely"
    assert gain_B[WORSE] < 0, "a step against the gradient makes a sample of advantage −1 likelier"

    # Clipping stops samples beyond the range, but none that moved in the wrong direction.
    ranges = {name: value for name, value in options.model_dump(exclude_none=True).items() if name.startswith("clip")}
    assert ranges or spec.unclipped, "no option clip_… bounds the ratio; rename it, or give unclipped=True"
    # A range of 1 has no lower bound, since a ratio is never below 0.
    bounded = options.model_copy(update={name: min(float(value), 0.2) for name, value in ranges.items()})
    for share, stopped, back in ((0.5, BETTER, WORSE), (-0.5, WORSE, BETTER)) if ranges else ():
        gradient = _gradient(spec, bounded, torch.lerp(start, target, share))
        assert not gradient[stopped].any(), "a sample beyond the clip range is still moved on"
        assert gradient[back].any(), "a sample that moved in the wrong direction is not pushed back"


def _noise(seed: int) -> Tensor:
    """Draw (3, N, C)."""
    return torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _gradient(spec: ObjectiveSpec, options: ObjectiveOptions, prediction: Tensor) -> Tensor:
    prediction = prediction.detach().clone().requires_grad_()
    loss, _ = spec.loss(_batch(spec, prediction), options)
    (gradient,) = torch.autograd.grad(loss, prediction)
    assert gradient.isfinite().all(), "the gradient is not finite"
    return gradient


def _batch(spec: ObjectiveSpec, prediction: Tensor) -> Step | Endpoint:
    """Build the batch of the loss, for a trained policy with this mean of a step, or velocity of noised endpoints."""
    dtype = prediction.dtype
    clean, noisy, old, noise = (_noise(seed).to(dtype) for seed in (1, 2, 3, 4))
    advantage_B = torch.tensor([1.0, -1.0, 0.0], dtype=dtype)
    if spec.needs == "endpoint":
        return Endpoint(
            clean,
            noisy,
            sigma=SIGMA,
            velocity_BNC=prediction,
            old_velocity_BNC=old,
            advantage_B=advantage_B,
            advantage_clip=5.0,
            used_B=torch.tensor([True, True, False]),
        )
    transition = Transition(prediction, STD)
    sampled = old + STD * noise
    return Step(
        transition,
        log_prob_B=log_prob(sampled, transition),
        old_log_prob_B=log_prob(sampled, Transition(old, STD)),
        old_mean_BNC=old if spec.keeps_means else None,
        dt=-0.1,
        advantage_B=advantage_B,
    )


Pipeline = Callable[..., tuple[Any, Tensor]]
"""A diffusers pipeline with the policy's weights, called with a prompt, `output_type` and `seed`, which does `STEPS`
denoising steps: (packed latents (1, N, C) for `latent`, or images for `pil`; sigmas (S + 1,))."""


def check_policy(policy: PipelinePolicy, prompts: Sequence[Prompt], size: Size, *, pipeline: Pipeline) -> None:
    """Check a generator against its diffusers pipeline: latents and images of prompts alone and in one batch.

    Args:
        policy: in float32, usually with random weights that depend on every input.
        prompts: prompts of one image size, with texts of different lengths.
        size: size of the images, or the area of edits.
        pipeline: the pipeline of the same weights, without the policy's changes.

    Raises:
        AssertionError: with the fault, if the generator breaks the contract.
    """
    image_size = policy.size_of(prompts[0], size)
    together = endpoints(policy, prompts, size)
    assert together.std() > 0.1, "the latents are nearly constant, so that the comparison is void"
    for number, prompt in enumerate(prompts):
        expected, sigmas = pipeline(prompt, output_type="latent", seed=number)
        assert torch.equal(policy.sigmas(STEPS, image_size), sigmas), "the scheduler has other sigmas"
        alone = endpoints(policy, [prompt], size, seed=number)
        for ours in (alone, together[number : number + 1]):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)

    (picture,), _ = pipeline(prompts[0], output_type="pil", seed=0)
    (ours_image,) = policy.decode(together[:1], image_size)
    # A transparent image is shown on white.
    difference = np.asarray(ours_image, dtype=int) - np.asarray(as_rgb(picture, "the pipeline's"), dtype=int)
    assert np.abs(difference).max() <= 1, f"the image differs from the pipeline's by {np.abs(difference).max()} of 255"


@torch.no_grad()
def endpoints(policy: PipelinePolicy, prompts: Sequence[Prompt], size: Size, *, seed: int = 0) -> Tensor:
    """(B, N, C) endpoints of the engine's loop without noise; the seeds of the prompts count up from `seed`."""
    image_size = policy.size_of(prompts[0], size)
    return denoise(
        policy,
        list(range(seed, seed + len(prompts))),
        conditioning=policy.collate(policy.encode(prompts, image_size)),
        sigmas=policy.sigmas(STEPS, image_size),
        size=image_size,
    )
