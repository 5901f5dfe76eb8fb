"""FLUX.1-Kontext behind the seam against diffusers' own pipeline, and what an edit's size means."""

import math
from pathlib import Path

import pytest
import torch
from diffusers_own import diffusers_own
from edit_twins import INSTRUCTIONS, edit, kontext_pipeline, loop, source_image
from PIL import Image
from tests.twins import parts as tiny
from tests.twins import tiny_flux, tiny_flux_transformer, tiny_kontext

from pacorl.models.policies.kontext import KONTEXT, KontextPolicy
from pacorl.tiny.characters import vocabulary
from pacorl.types import Prompt, Size


@pytest.fixture(scope="module")
def kontext() -> KontextPolicy:
    return KONTEXT.over(
        kontext_pipeline(), guidance_scale=2.5, max_sequence_length=48, true_cfg_scale=3.0, negative_prompt="night"
    )


@pytest.mark.slow
@pytest.mark.parametrize("true_cfg_scale", [1.0, 3.0])
@pytest.mark.parametrize("shape", [(64, 64), (60, 92)], ids=str)
def test_without_noise_the_loop_is_the_pipeline(
    kontext: KontextPolicy,
    tmp_path: Path,
    shape: tuple[int, int],
    true_cfg_scale: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kontext, "options", kontext.options.model_copy(update={"true_cfg_scale": true_cfg_scale}))
    path = source_image(tmp_path / "source.png", height=shape[0], width=shape[1])
    prompts = [edit(path, number, text) for number, text in enumerate(INSTRUCTIONS[:2])]
    size = kontext.size_of(prompts[0], Size(64, 64))
    expected = diffusers_own(kontext.pipeline)(
        # The pipeline keeps a source's size, or takes it to about 1024²; the policy's smaller one is given it done.
        Image.open(path).resize((size.width, size.height), Image.Resampling.LANCZOS),
        prompt=[prompt.text for prompt in prompts],
        negative_prompt=["night"] * 2,
        true_cfg_scale=true_cfg_scale,
        height=size.height,
        width=size.width,
        max_area=size.height * size.width,
        _auto_resize=False,
        num_inference_steps=3,
        guidance_scale=2.5,
        max_sequence_length=48,
        generator=[torch.Generator().manual_seed(seed) for seed in range(2)],
        output_type="latent",
    ).images
    latents = loop(kontext, prompts, size)
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5)
    assert latents.std() > 0.1


@pytest.mark.campaign
def test_at_its_own_size_the_pipeline_needs_no_help(tmp_path: Path) -> None:
    """1024², nothing patched: the policy chooses the shape and resizes the source as the pipeline does."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler

    torch.manual_seed(0)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(4, 4, 4, 4),
        norm_num_groups=2,
        layers_per_block=1,
        latent_channels=tiny.TINY["vae"]["latent_channels"],
        mid_block_add_attention=False,
        shift_factor=0.1,
    )
    flux = tiny_flux(vocabulary(), vae=vae)
    # As published: the tiny one's shift is for images of 64 px, and at 1024 leaves no sigma apart from 1 in fp32.
    flux.scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0)
    flux.transformer = tiny_flux_transformer(width=32, heads=1, double_blocks=1, single_blocks=1)
    for parameter in flux.transformer.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    policy = KONTEXT.over(tiny_kontext(flux), guidance_scale=2.5, max_sequence_length=32)
    path = source_image(tmp_path / "source.png", height=208, width=320)
    size = policy.size_of(edit(path), Size(1024, 1024))
    assert size == Size(832, 1248)
    expected = diffusers_own(policy.pipeline)(
        Image.open(path),
        prompt=INSTRUCTIONS[0],
        height=size.height,
        width=size.width,
        num_inference_steps=2,
        guidance_scale=2.5,
        max_sequence_length=32,
        generator=[torch.Generator().manual_seed(0)],
        output_type="latent",
    ).images
    torch.testing.assert_close(loop(policy, [edit(path)], size, steps=2), expected, rtol=0, atol=1e-5)


def test_the_source_decides_the_velocity(kontext: KontextPolicy, tmp_path: Path) -> None:
    first = source_image(tmp_path / "first.png", height=64, width=64)
    second = source_image(tmp_path / "second.png", height=64, width=64, seed=1)
    size = Size(64, 64)
    conditioning = kontext.collate(kontext.encode([edit(first), edit(second)], size))
    with torch.no_grad():
        velocity = kontext.velocity(kontext.noise([0, 0], size), torch.full((2,), 0.5), conditioning, size)
    assert velocity.shape == (2, 64, 32)
    assert (velocity[0] - velocity[1]).abs().max() > 1e-2


def test_decoding_is_the_pipelines(kontext: KontextPolicy) -> None:
    size, pipeline = Size(48, 80), kontext.pipeline
    x = kontext.noise([5], size)
    codes = pipeline._unpack_latents(x, size.height, size.width, pipeline.vae_scale_factor)
    with torch.no_grad():
        pixels = pipeline.vae.decode(codes / pipeline.vae.config.scaling_factor + pipeline.vae.config.shift_factor)[0]
    assert kontext.decode(x, size) == pipeline.image_processor.postprocess(pixels, output_type="pil")


@pytest.mark.parametrize(("height", "width"), [(64, 64), (480, 640), (640, 480), (300, 700), (1080, 1920)])
def test_a_size_is_an_area_in_the_source_s_shape(
    kontext: KontextPolicy, tmp_path: Path, height: int, width: int
) -> None:
    path = source_image(tmp_path / "source.png", height=height, width=width)
    size = kontext.size_of(edit(path), Size(512, 512))
    assert size.height % kontext.token_pixels == size.width % kontext.token_pixels == 0
    assert math.isclose(size.height * size.width, 512 * 512, rel_tol=0.05)
    assert math.isclose(size.width / size.height, width / height, rel_tol=0.12)


def test_a_photo_s_orientation_counts(kontext: KontextPolicy, tmp_path: Path) -> None:
    path = tmp_path / "phone.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    Image.new("RGB", (150, 100), "red").save(path, exif=exif)
    size = kontext.size_of(edit(path), Size(512, 512))
    assert size.height > size.width


def test_what_cannot_be_generated_is_refused(kontext: KontextPolicy, tmp_path: Path) -> None:
    strip = source_image(tmp_path / "strip.png", height=40, width=200)
    with pytest.raises(ValueError, match=r"strip\.png is 40x200, and the nearest shape .* is 672x1568"):
        kontext.size_of(edit(strip), Size(512, 512))
    with pytest.raises(ValueError, match=r"prompt 7 \('a cat'\) has no source"):
        kontext.size_of(Prompt(7, "a cat"), Size(512, 512))
    with pytest.raises(ValueError, match=r"has 2 sources, and FLUX\.1-Kontext takes 1"):
        kontext.size_of(Prompt(7, "a cat", sources=(strip, strip)), Size(512, 512))
    with pytest.raises(ValueError, match="smaller than one token; give at least 8x8"):
        kontext.check_size(Size(4, 4))


def test_flux_weights_are_no_kontext(kontext: KontextPolicy, tmp_path: Path) -> None:
    """The released recipe loads FLUX.1-dev here: one architecture, so nothing else would notice."""
    tiny_flux(vocabulary()).save_pretrained(tmp_path / "flux")
    with pytest.raises(ValueError, match=r"is a FluxPipeline, and this model\.kind needs a FluxKontextPipeline"):
        KONTEXT.from_pretrained(tmp_path / "flux")
    kontext.pipeline.save_pretrained(tmp_path / "kontext")
    loaded = KONTEXT.from_pretrained(tmp_path / "kontext", max_sequence_length=48)
    saved = kontext.transformer.state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in loaded.transformer.state_dict().items())
