"""Stable Diffusion 3 behind the seam against diffusers' own pipeline, with guidance and without."""

from typing import Any

import pytest
import torch
from diffusers_own import diffusers_own
from tests.twins import tiny_sd3

from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import denoise
from pacorl.models.policies import kind_of
from pacorl.models.policies.pipeline import PipelinePolicy, pack
from pacorl.models.policies.sd3 import SD3
from pacorl.plan.generators import model_on_meta
from pacorl.tiny.characters import character_prompts, vocabulary
from pacorl.types import Size

PROMPTS = character_prompts("dev", 3)


@pytest.fixture(scope="module")
def pipeline() -> Any:
    torch.manual_seed(0)
    return tiny_sd3(vocabulary())


def over(pipeline: Any, **options: Any) -> PipelinePolicy:
    return SD3.over(pipeline, max_sequence_length=48, **options)


@pytest.mark.parametrize(("scale", "negative"), [(1.0, ""), (4.5, ""), (4.5, "a red hat")])
@pytest.mark.parametrize(
    ("steps", "size"), [(4, Size(64, 96)), pytest.param(10, Size(32, 32), marks=pytest.mark.slow)], ids=str
)
def test_without_noise_the_loop_is_the_pipeline(
    pipeline: Any, scale: float, negative: str, steps: int, size: Size
) -> None:
    policy = over(pipeline, guidance_scale=scale, negative_prompt=negative)
    expected_BCHW = diffusers_own(pipeline)(
        [prompt.text for prompt in PROMPTS],
        negative_prompt=[negative] * len(PROMPTS),
        height=size.height,
        width=size.width,
        num_inference_steps=steps,
        guidance_scale=scale,
        max_sequence_length=48,
        generator=[torch.Generator().manual_seed(seed) for seed in range(3)],
        output_type="latent",
    ).images
    with torch.no_grad():
        conditioning = ConditioningCache(policy).batch(PROMPTS, size)
        x_BNC = denoise(policy, [0, 1, 2], conditioning=conditioning, sigmas=policy.sigmas(steps, size), size=size)
    torch.testing.assert_close(x_BNC, pack(expected_BCHW), rtol=0, atol=1e-5)
    assert x_BNC.std() > 0.1


def test_the_sigmas_are_shifted_alike_for_every_size(pipeline: Any) -> None:
    policy = over(pipeline)
    small, large = policy.sigmas(28, Size(64, 64)), policy.sigmas(28, Size(1024, 1024))
    assert torch.equal(small, large)
    assert (small[0], small[-1]) == (1, 0)


def test_a_size_beyond_the_learned_positions_is_refused(pipeline: Any) -> None:
    with pytest.raises(ValueError, match=r"size 64x1032 is beyond .* at most 1024x1024"):
        over(pipeline).check_size(Size(64, 1032))


@pytest.mark.parametrize("name", ["stabilityai/stable-diffusion-3-medium-diffusers", "lab/SD3.5-large-sets"])
def test_a_hub_name_says_its_kind(name: str) -> None:
    assert kind_of(name) == SD3.kind


def test_guidance_is_away_from_the_negative_prompt(pipeline: Any) -> None:
    size, x_BNC = Size(64, 64), torch.randn(1, 64, 32)

    def velocity(scale: float) -> torch.Tensor:
        policy = over(pipeline, guidance_scale=scale, negative_prompt="a red hat")
        with torch.no_grad():
            conditioning = ConditioningCache(policy).batch(PROMPTS[:1], size)
            return policy.velocity(x_BNC, torch.full((1,), 0.5), conditioning, size)

    plain, twice, thrice = velocity(1.0), velocity(2.0), velocity(3.0)
    torch.testing.assert_close(thrice - twice, twice - plain, rtol=0, atol=1e-5)
    assert not torch.allclose(plain, twice)


def test_the_published_architecture_has_the_published_number_of_parameters() -> None:
    """Of Stable Diffusion 3.5 Medium, and without what it has new of Stable Diffusion 3 Medium (2.03 billion)."""
    new = {"dual_attention_layers", "qk_norm", "pos_embed_max_size"}
    config = SD3.parts["transformer"]
    older = {name: value for name, value in config.items() if name not in new} | {"pos_embed_max_size": 192}
    assert parameters(config) == 2_243_171_520
    assert parameters(older) == 2_028_328_000
    assert [parameters(SD3.parts[name]) for name in SD3.policy.encoders] == [123_650_304, 694_659_840, 4_762_310_656]
    assert parameters(SD3.parts["vae"]) == 83_819_683


def parameters(config: Any) -> int:
    return sum(parameter.numel() for parameter in model_on_meta(config, dtype=torch.float32).parameters())
