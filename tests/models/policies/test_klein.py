"""FLUX.2-klein behind the seam against diffusers' own pipeline: sets, edits of one source and of several."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers_own import diffusers_own
from edit_twins import drawn, edit, klein_pipeline, loop, source_image
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.twins import tiny_klein

from pacorl.grpo.rollout import denoise
from pacorl.models.adapters import adapter_state, add_lora
from pacorl.models.int8 import parameter_count
from pacorl.models.policies import kind_of
from pacorl.models.policies.klein import KLEIN, KleinPolicy
from pacorl.models.policies.pipeline import pack
from pacorl.plan.generators import META, model_on_meta, policy_on_meta
from pacorl.tiny.characters import character_prompts, vocabulary
from pacorl.types import Prompt, Size

SETS = character_prompts("dev", 2)
TOKENS = 144


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return klein_pipeline()


@pytest.fixture(scope="module")
def klein(pipeline: Any) -> KleinPolicy:
    return over(pipeline)


def over(pipeline: Any, **options: Any) -> KleinPolicy:
    policy = KLEIN.over(pipeline, max_sequence_length=TOKENS, **options)
    assert isinstance(policy, KleinPolicy)
    return policy


def diffusers_latents(policy: KleinPolicy, prompts: list[Prompt], size: Size, *, steps: int = 3, **more: Any) -> Any:
    """The endpoints of diffusers' pipeline, which hands out codes, as the policy's tokens."""
    negative, _ = policy.pipeline.encode_prompt([policy.options.negative_prompt], max_sequence_length=TOKENS)
    codes = diffusers_own(policy.pipeline)(
        prompt=[prompt.text for prompt in prompts],
        negative_prompt_embeds=negative.repeat(len(prompts), 1, 1),
        height=size.height,
        width=size.width,
        num_inference_steps=steps,
        guidance_scale=policy.options.guidance_scale,
        max_sequence_length=TOKENS,
        generator=[torch.Generator().manual_seed(seed) for seed in range(len(prompts))],
        output_type="latent",
        **more,
    ).images
    vae = policy.pipeline.vae
    return (pack(codes) - vae.bn.running_mean) / (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()


@pytest.mark.parametrize(
    ("scale", "negative", "steps", "size"),
    [
        (1.0, "", 4, Size(64, 96)),
        pytest.param(4.0, "", 4, Size(64, 96), marks=pytest.mark.slow),
        pytest.param(4.0, "a red hat", 4, Size(64, 96), marks=pytest.mark.slow),
        pytest.param(1.0, "", 10, Size(32, 32), marks=pytest.mark.slow),
        pytest.param(4.0, "", 10, Size(32, 32), marks=pytest.mark.slow),
        (4.0, "a red hat", 10, Size(32, 32)),
    ],
    ids=str,
)
def test_sets_without_noise_are_the_pipeline_s(
    pipeline: Any, scale: float, negative: str, steps: int, size: Size
) -> None:
    policy = over(pipeline, guidance_scale=scale, negative_prompt=negative)
    expected = diffusers_latents(policy, SETS, size, steps=steps)
    x_BNC = loop(policy, SETS, size, steps=steps)
    torch.testing.assert_close(x_BNC, expected, rtol=0, atol=1e-5)
    assert x_BNC.std() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [[(64, 64)], [(72, 104)], [(80, 160), (128, 64), (64, 96)]], ids=str)
def test_edits_without_noise_are_the_pipeline_s(
    klein: KleinPolicy, tmp_path: Path, shapes: list[tuple[int, int]]
) -> None:
    """Of one source and of three; the pipeline, which resizes nothing below 1024², is given them resized."""
    paths = tuple(
        source_image(tmp_path / f"{number}.png", height=height, width=width, seed=number)
        for number, (height, width) in enumerate(shapes)
    )
    prompts = [Prompt(number, text, sources=paths) for number, text in enumerate(("Add a crown.", "Make it night."))]
    size = klein.size_of(prompts[0], Size(96, 96))
    assert size.height * size.width <= 96 * 96
    sizes = [size, *(klein.size_of(edit(path), size) for path in paths[1:])]
    images = [
        Image.open(path).resize((side.width, side.height), Image.Resampling.LANCZOS)
        for path, side in zip(paths, sizes, strict=True)
    ]
    expected = diffusers_latents(klein, prompts, size, image=images)
    x_BNC = loop(klein, prompts, size)
    torch.testing.assert_close(x_BNC, expected, rtol=0, atol=1e-5)
    assert x_BNC.std() > 0.1


@pytest.mark.campaign
def test_at_its_own_size_the_pipeline_needs_no_help(tmp_path: Path) -> None:
    """Nothing is resized beforehand; beyond 1024² the image grows and the source does not, as in the pipeline."""
    torch.manual_seed(0)
    pipeline = tiny_klein(vocabulary())
    # As deep as the published VAE, so that a token has its 16 pixels.
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    config = {**pipeline.vae.config, **blocks, "block_out_channels": [4] * 4, "norm_num_groups": 2}
    vae = type(pipeline.vae).from_config(config)
    policy = over(drawn(type(pipeline)(**{**pipeline.components, "vae": vae})), guidance_scale=1.0)
    path = source_image(tmp_path / "source.png", height=832, width=1248)
    assert policy.size_of(edit(path), Size(1024, 1024)) == Size(832, 1248)
    size = policy.size_of(edit(path), Size(1200, 1200))
    assert size == Size(976, 1456)
    expected = diffusers_latents(policy, [edit(path)], size, steps=1, image=Image.open(path))
    torch.testing.assert_close(loop(policy, [edit(path)], size, steps=1), expected, rtol=0, atol=1e-5)


def test_decoding_is_the_pipeline_s(klein: KleinPolicy) -> None:
    size, vae = Size(48, 80), klein.pipeline.vae
    x = klein.noise([5], size)
    patches = x.transpose(1, 2).reshape(1, -1, *klein.token_grid(size))
    mean, variance = (value[None, :, None, None] for value in (vae.bn.running_mean, vae.bn.running_var))
    codes = klein.pipeline._unpatchify_latents(patches * (variance + vae.config.batch_norm_eps).sqrt() + mean)
    with torch.no_grad():
        pixels = vae.decode(codes)[0]
    assert klein.decode(x, size) == klein.pipeline.image_processor.postprocess(pixels, output_type="pil")


def test_every_source_decides_the_velocity(klein: KleinPolicy, tmp_path: Path) -> None:
    paths = [source_image(tmp_path / f"{seed}.png", height=64, width=64, seed=seed) for seed in range(3)]
    size = Size(64, 64)

    def velocity(*sources: Path) -> torch.Tensor:
        conditioning = klein.collate(klein.encode([Prompt(0, "Join them.", sources=sources)], size))
        with torch.no_grad():
            return klein.velocity(klein.noise([0], size), torch.full((1,), 0.5), conditioning, size)

    first, *others = [velocity(*sources) for sources in ((), paths[:1], paths[:2], (paths[0], paths[2]), paths[1::-1])]
    assert first.shape == (1, 64, 24)
    for number, other in enumerate(others):
        assert all((other - each).abs().max() > 1e-4 for each in (first, *others[:number]))


@pytest.mark.slow
def test_a_set_and_edits_are_one_batch(klein: KleinPolicy, tmp_path: Path) -> None:
    """Each is what it is alone, in the order of the batch."""
    wide, tall = (source_image(tmp_path / f"{height}.png", height=height, width=192 - height) for height in (64, 128))
    size, two = Size(96, 96), Prompt(3, "Join them.", sources=(wide, tall))
    prompts = [edit(wide), SETS[0], edit(tall), two, edit(wide)]
    together = loop(klein, prompts, size)
    for row, prompt in enumerate(prompts):
        conditioning = klein.collate(klein.encode([prompt], size))
        with torch.no_grad():
            alone = denoise(klein, [row], conditioning=conditioning, sigmas=klein.sigmas(3, size), size=size)
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-5)


def test_a_set_is_generated_at_its_record_s_own_size(pipeline: Any, tmp_path: Path) -> None:
    policy = KLEIN.over(pipeline, max_sequence_length=TOKENS, record_sizes=True)
    assert policy.size_of(Prompt(0, "a cat", size=Size(32, 48)), Size(64, 64)) == Size(32, 48)
    assert policy.size_of(SETS[0], Size(64, 64)) == Size(64, 64)
    assert policy.size_of(edit(source_image(tmp_path / "a.png", height=80, width=40)), Size(64, 64)) == Size(88, 40)


@pytest.mark.parametrize("side", [64, 65, 77, 100])
def test_a_square_source_is_cut_nowhere(klein: KleinPolicy, tmp_path: Path, side: int) -> None:
    path = source_image(tmp_path / "a.png", height=side, width=side)
    assert [klein.size_of(edit(path), Size(area, area)) for area in (384, 512, 1024)] == [
        Size(area, area) for area in (384, 512, 1024)
    ]


def test_what_cannot_be_generated_is_refused(klein: KleinPolicy, tmp_path: Path) -> None:
    strip = source_image(tmp_path / "strip.png", height=20, width=200)
    with pytest.raises(ValueError, match=r"strip\.png is 20x200, and FLUX\.2 takes sides of at most 8:1; crop it"):
        klein.size_of(edit(strip), Size(512, 512))
    with pytest.raises(ValueError, match=r"has 5 sources, and FLUX\.2-klein takes 4"):
        klein.size_of(Prompt(7, "a cat", sources=(strip,) * 5), Size(512, 512))
    with pytest.raises(ValueError, match="must be a multiple of 8 pixels"):
        klein.check_size(Size(60, 64))


def test_a_distilled_checkpoint_is_not_guided(pipeline: Any) -> None:
    distilled = type(pipeline)(**pipeline.components, is_distilled=True)
    assert over(distilled, guidance_scale=1.0).options.negative_text is None
    with pytest.raises(ValueError, match=r"guidance_scale 4 with a distilled FLUX\.2-klein, .* set it to 1"):
        over(distilled)


def test_a_prompt_that_is_cut_is_said(pipeline: Any) -> None:
    """Its length counts the chat template, which stands in the same tokens."""
    policy = over(pipeline)
    lengths = policy.count_tokens([prompt.text for prompt in SETS])
    tokens = pipeline.tokenizer(SETS[0].text).input_ids
    assert lengths[0] > len(tokens)
    options = policy.options.model_copy(update={"max_sequence_length": max(lengths) - 1})
    with pytest.warns(UserWarning, match=rf"more than model.max_sequence_length = {max(lengths) - 1} tokens"):
        KleinPolicy(pipeline, options).encode([max(SETS, key=lambda prompt: len(prompt.text))], Size(32, 32))


@pytest.mark.parametrize("name", ["black-forest-labs/FLUX.2-klein-base-4B", "lab/flux2-klein-sets"])
def test_a_hub_name_says_its_kind(name: str) -> None:
    assert kind_of(name) == KLEIN.kind


@pytest.mark.slow
def test_the_published_architecture_has_the_published_number_of_parameters() -> None:
    """4 B of FLUX.2-klein, 4.0 B of Qwen3-4B, and the adapter's layers: 12 of a double-stream block, 2 of a single."""
    models = {
        name: model_on_meta(KLEIN.parts[name], dtype=torch.float32) for name in ("transformer", "vae", "text_encoder")
    }
    assert {name: parameter_count(model) for name, model in models.items()} == {
        "transformer": 3_875_544_576,
        "vae": 84_046_115,
        "text_encoder": 4_022_468_096,
    }
    policy = policy_on_meta(KLEIN, KLEIN.options())
    with META:
        add_lora(policy.transformer, rank=4, alpha=8, targets=policy.lora_targets)
    assert len(adapter_state(policy.transformer)) == 2 * (5 * 12 + 20 * 2)


def test_a_distilled_klein_generates_and_is_not_trained(tmp_path: Path) -> None:
    index = {"_class_name": "Flux2KleinPipeline", "is_distilled": True}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert KLEIN.check_source(str(tmp_path)) == str(tmp_path)
    with pytest.raises(ValueError, match=r"is distilled to few steps .* train black-forest-labs/FLUX\.2-klein-base-4B"):
        KLEIN.check_trainable(str(tmp_path))
    for name in ("black-forest-labs/FLUX.2-klein-9B", "black-forest-labs/flux.2-klein-9b"):
        with pytest.raises(ValueError, match=r"train black-forest-labs/FLUX\.2-klein-base-9B"):
            KLEIN.check_trainable(name)
    KLEIN.check_trainable(KLEIN.published)
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"is_distilled": False}))
    KLEIN.check_trainable(str(tmp_path))


def test_training_takes_the_lower_shift_that_klein_was_trained_with(klein: KleinPolicy) -> None:
    """Its empirical shift is for sampling."""
    size = Size(64, 96)
    assert (klein.training_sigmas(4, size)[1:-1] < klein.sigmas(4, size)[1:-1]).all()


SIDE = st.integers(64, 1500)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.tuples(SIDE, SIDE).filter(lambda sides: max(sides) <= 8 * min(sides)), min_size=1, max_size=4),
    size=st.builds(
        Size, st.integers(4, 96).map(lambda rows: 16 * rows), st.integers(4, 96).map(lambda cols: 16 * cols)
    ),
    edits=st.booleans(),
)
def test_sizes_of_sources_and_references_are_the_pipeline_s(
    klein: KleinPolicy, tmp_path: Path, shapes: list[tuple[int, int]], size: Size, edits: bool
) -> None:
    """The pipeline's rule for a source beyond 1024², at the area of the image; its root in floats may lose a pixel."""
    paths = []
    for number, (height, width) in enumerate(shapes):
        paths.append(tmp_path / f"{height}x{width}-{number}.png")
        Image.new("RGB", (width, height)).save(paths[-1], compress_level=0)
    prompt = Prompt(0, "A crown.", **{"sources" if edits else "references": tuple(paths)})
    size = klein.size_of(prompt, size)
    area = min(size.height * size.width, 1024 * 1024)
    expected = []
    for path in paths:
        image = Image.open(path)
        resized = klein.pipeline.image_processor._resize_to_target_area(image, area)
        exact = math.isqrt(area * image.width // image.height), math.isqrt(area * image.height // image.width)
        assert all(side - pixels in (0, 1) for side, pixels in zip(exact, resized.size, strict=True))
        token = klein.pipeline.vae_scale_factor * 2
        expected.append(Size(max(exact[1] // token, 1) * token, max(exact[0] // token, 1) * token))
    if edits and size.height * size.width <= 1024 * 1024:
        expected[0] = size

    shown = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(klein, "encode_image", lambda image, side: shown.append(side) or torch.zeros(1, 1, 1))
        ids = klein.encode_sources(prompt, size)["source_ids"][0]
    assert shown == expected
    grids = [klein.token_grid(side) for side in shown]
    assert len(ids) == sum(rows * cols for rows, cols in grids)
    for number, (rows, cols) in enumerate(grids, 1):
        of_image = ids[ids[:, 0] == 10 * number]
        assert (of_image[:, 1].max() + 1, of_image[:, 2].max() + 1, len(of_image)) == (rows, cols, rows * cols)
