"""The denoising loop against diffusers' own, and the policy's parts."""

import pytest
import torch
from diffusers_own import diffusers_own

from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import denoise
from pacorl.models.policies.flux import FluxPolicy
from pacorl.models.policies.pipeline import check_area
from pacorl.tiny.characters import character_prompts
from pacorl.types import Size

PROMPTS = character_prompts("dev", 3)


@pytest.mark.parametrize(
    ("steps", "size"),
    [
        pytest.param(20, Size(64, 64), marks=pytest.mark.slow),
        (4, Size(64, 64)),
        (4, Size(64, 96)),
        pytest.param(8, Size(128, 128), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [1, 3])
def test_without_noise_the_loop_is_the_pipeline(flux: FluxPolicy, steps: int, size: Size, batch: int) -> None:
    prompts, seeds = PROMPTS[:batch], list(range(batch))
    expected = diffusers_own(flux.pipeline)(
        [prompt.text for prompt in prompts],
        height=size.height,
        width=size.width,
        num_inference_steps=steps,
        guidance_scale=3.5,
        max_sequence_length=48,
        latents=flux.noise(seeds, size),
        output_type="latent",
    ).images
    with torch.no_grad():
        conditioning = ConditioningCache(flux).batch(prompts, size)
        latents = denoise(flux, seeds, conditioning=conditioning, sigmas=flux.sigmas(steps, size), size=size)
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5)
    assert latents.std() > 0.1


def test_decoding_is_the_pipelines(flux: FluxPolicy) -> None:
    size, x = Size(64, 96), flux.noise([5], Size(64, 96))
    pipeline = flux.pipeline
    codes = pipeline._unpack_latents(x, size.height, size.width, pipeline.vae_scale_factor)
    with torch.no_grad():
        pixels = pipeline.vae.decode(codes / pipeline.vae.config.scaling_factor + pipeline.vae.config.shift_factor)[0]
    assert flux.decode(x, size) == pipeline.image_processor.postprocess(pixels, output_type="pil")


def test_sigmas_shift_with_size(flux: FluxPolicy) -> None:
    small, large = flux.sigmas(8, Size(64, 64)), flux.sigmas(8, Size(128, 128))
    assert small[0] == large[0] == 1
    assert small[-1] == large[-1] == 0
    assert (large[1:-1] > small[1:-1]).all()


def test_noise_depends_on_its_seed_alone(flux: FluxPolicy) -> None:
    pair, alone = flux.noise([3, 9], Size(64, 64)), flux.noise([9], Size(64, 64))
    assert torch.equal(pair[1], alone[0])
    assert not torch.equal(pair[0], pair[1])


def test_a_size_that_does_not_divide_is_refused(flux: FluxPolicy) -> None:
    with pytest.raises(ValueError, match=r"size 64x60 must be a multiple of 8 .* nearest is 64x64"):
        flux.check_size(Size(64, 60))


def test_an_image_that_could_not_be_read_again_is_refused(flux: FluxPolicy) -> None:
    flux.check_size(Size(8000, 8000))
    with pytest.raises(ValueError, match=r"size 8000x8008 has more than 64,000,000 pixels"):
        flux.check_size(Size(8000, 8008))
    with pytest.raises(ValueError, match=r"size 1000000x1000000 has more than 64,000,000 pixels"):
        check_area(Size(10**6, 10**6), step=16)


def test_the_velocity_reads_the_prompt(flux: FluxPolicy) -> None:
    size, x = Size(64, 64), flux.noise([0, 0], Size(64, 64))
    with torch.no_grad():
        conditioning = ConditioningCache(flux).batch(PROMPTS[:2], size)
        velocity = flux.velocity(x, torch.full((2,), 0.5), conditioning, size)
    assert not torch.allclose(velocity[0], velocity[1])
