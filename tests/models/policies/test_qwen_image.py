"""Qwen-Image-Edit and Plus behind the seam against diffusers' own pipelines."""

from pathlib import Path
from typing import Any

import pytest
import torch
from edit_twins import INSTRUCTIONS, edit, loop, qwen_pipeline, source_image
from PIL import Image

from pacorl.models.policies.qwen_image import CONDITION_AREA, QWEN_EDIT, QWEN_EDIT_PLUS, QwenEditPolicy
from pacorl.types import Prompt, Size

EDIT = "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit"
PLUS = "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus"


@pytest.fixture(scope="module")
def qwen() -> QwenEditPolicy:
    return QWEN_EDIT.over(qwen_pipeline(), true_cfg_scale=4.0)


@pytest.fixture(scope="module")
def plus() -> QwenEditPolicy:
    return QWEN_EDIT_PLUS.over(qwen_pipeline(plus=True), true_cfg_scale=4.0)


def by_pipeline(
    pipeline: Any, images: Any, text: str, *, seed: int, true_cfg_scale: float, steps: int = 3
) -> torch.Tensor:
    latents: torch.Tensor = pipeline(
        images,
        prompt=text,
        negative_prompt=" ",
        true_cfg_scale=true_cfg_scale,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
    ).images
    return latents


@pytest.mark.parametrize(
    ("shape", "true_cfg_scale"),
    [
        ((64, 64), 1.0),  # the one fast test of texts of unequal length in one batch
        pytest.param((64, 64), 4.0, marks=pytest.mark.slow),
        pytest.param((90, 140), 1.0, marks=pytest.mark.slow),
        pytest.param((90, 140), 4.0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_without_noise_the_loop_is_the_pipeline(
    qwen: QwenEditPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], true_cfg_scale: float
) -> None:
    """A batch of two against the pipeline one by one, whose texts differ in length."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as module

    calculate = module.calculate_dimensions
    monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: calculate(96 * 96, ratio))
    monkeypatch.setattr(qwen, "options", qwen.options.model_copy(update={"true_cfg_scale": true_cfg_scale}))
    path = source_image(tmp_path / "source.png", height=shape[0], width=shape[1])
    prompts = [edit(path, number, text) for number, text in enumerate(INSTRUCTIONS[1:])]
    size = qwen.size_of(prompts[0], Size(96, 96))
    expected = [
        by_pipeline(qwen.pipeline, Image.open(path), prompt.text, seed=seed, true_cfg_scale=true_cfg_scale)
        for seed, prompt in enumerate(prompts)
    ]
    latents = loop(qwen, prompts, size)
    torch.testing.assert_close(latents, torch.cat(expected), rtol=0, atol=1e-5)
    assert latents.std() > 0.1


@pytest.mark.parametrize("count", [1, 2])
def test_plus_is_its_pipeline_with_one_source_or_more(
    plus: QwenEditPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Sources of different shapes; the generated image has the last one's."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as module

    shapes = [(120, 60), (96, 96)][-count:]
    paths = [source_image(tmp_path / f"{h}.png", height=h, width=w, seed=h) for h, w in shapes]
    prompt = Prompt(0, INSTRUCTIONS[0], sources=tuple(paths))
    size = plus.size_of(prompt, Size(96, 96))
    calculate = module.calculate_dimensions
    monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: calculate(min(area, 96 * 96), ratio))
    expected = by_pipeline(plus.pipeline, [Image.open(path) for path in paths], prompt.text, seed=0, true_cfg_scale=4.0)
    torch.testing.assert_close(loop(plus, [prompt], size), expected, rtol=0, atol=1e-5)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["qwen", "plus"])
def test_at_its_own_size_the_pipeline_needs_no_help(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1024², nothing of the pipeline patched."""
    policy: QwenEditPolicy = request.getfixturevalue(kind)
    monkeypatch.setattr(policy, "options", policy.options.model_copy(update={"true_cfg_scale": 1.0}))
    path = source_image(tmp_path / "source.png", height=200, width=300)
    size = policy.size_of(edit(path), Size(1024, 1024))
    assert size == Size(832, 1248)
    images = [Image.open(path)] if kind == "plus" else Image.open(path)
    expected = by_pipeline(policy.pipeline, images, INSTRUCTIONS[0], seed=0, true_cfg_scale=1.0, steps=2)
    torch.testing.assert_close(loop(policy, [edit(path)], size, steps=2), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen", "plus"])
def test_the_text_encoder_sees_the_source(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    policy: QwenEditPolicy = request.getfixturevalue(kind)
    first = source_image(tmp_path / "first.png", height=64, width=64)
    second = source_image(tmp_path / "second.png", height=64, width=64, seed=1)
    first_encoded, second_encoded = policy.encode([edit(first), edit(second)], Size(64, 64))
    for name in ("tokens", "negative_tokens", "source"):
        assert (first_encoded.tensors[name] - second_encoded.tensors[name]).abs().max() > 1e-2, name


def test_plus_shows_its_text_encoder_no_more_than_384_squared(
    plus: QwenEditPolicy, qwen: QwenEditPolicy, tmp_path: Path
) -> None:
    path = source_image(tmp_path / "source.png", height=512, width=512)
    assert plus._shown_size(path, Size(512, 512)) == Size(384, 384)
    assert plus._shown_size(path, Size(96, 96)) == Size(96, 96)
    assert qwen._shown_size(path, Size(512, 512)) is None, "as the VAE reads it"
    assert CONDITION_AREA == __import__(PLUS, fromlist=["x"]).CONDITION_IMAGE_SIZE


def test_the_template_is_cut_where_the_pipelines_cut_it(qwen: QwenEditPolicy) -> None:
    template = qwen.pipeline.prompt_template_encode.split("<|vision_start|>")[0]
    assert len(qwen.pipeline.tokenizer(template).input_ids) == qwen.pipeline.prompt_template_encode_start_idx


def test_decoding_is_the_pipelines(qwen: QwenEditPolicy) -> None:
    size, pipeline = Size(64, 96), qwen.pipeline
    x = qwen.noise([5], size)
    config = pipeline.vae.config
    codes = pipeline._unpack_latents(x, size.height, size.width, pipeline.vae_scale_factor)
    std, mean = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (config.latents_std, config.latents_mean))
    with torch.no_grad():
        pixels = pipeline.vae.decode(codes * std + mean, return_dict=False)[0][:, :, 0]
    assert qwen.decode(x, size) == pipeline.image_processor.postprocess(pixels, output_type="pil")
    assert qwen.decode(x, size)[0].size == (96, 64)


def test_a_batch_of_mixed_sources_is_each_alone(plus: QwenEditPolicy, tmp_path: Path) -> None:
    square = source_image(tmp_path / "square.png", height=64, width=64)
    wide = source_image(tmp_path / "wide.png", height=60, width=120)
    size = Size(96, 96)
    single, pair = plus.encode([edit(square), Prompt(1, "Mix.", sources=(wide, square))], size)
    assert len(plus.collate([pair, pair])) == 2
    x_BNC, sigma_B = plus.noise(range(3), size), torch.tensor([0.3, 0.5, 0.7])
    rows = [pair, single, pair]
    with torch.no_grad():
        together = plus.velocity(x_BNC, sigma_B, plus.collate(rows), size)
        alone = [
            plus.velocity(x_BNC[row : row + 1], sigma_B[row : row + 1], plus.collate([encoded]), size)
            for row, encoded in enumerate(rows)
        ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)


def test_what_cannot_be_generated_is_refused(qwen: QwenEditPolicy, plus: QwenEditPolicy, tmp_path: Path) -> None:
    strip = source_image(tmp_path / "strip.png", height=8, width=600)
    with pytest.raises(ValueError, match=r"strip\.png is 8x600, too long"):
        qwen.size_of(edit(strip), Size(96, 96))
    with pytest.raises(ValueError, match="has 2 sources, and Qwen-Image-Edit takes 1"):
        qwen.size_of(Prompt(0, "a", sources=(strip, strip)), Size(96, 96))
    with pytest.raises(ValueError, match="has 4 sources, and Qwen-Image-Edit-Plus takes 3"):
        plus.size_of(Prompt(0, "a", sources=(strip,) * 4), Size(96, 96))


@pytest.mark.slow
def test_saved_and_loaded_it_is_the_same(qwen: QwenEditPolicy, tmp_path: Path) -> None:
    qwen.pipeline.save_pretrained(tmp_path / "qwen")
    loaded = QWEN_EDIT.from_pretrained(tmp_path / "qwen", true_cfg_scale=4.0)
    path = source_image(tmp_path / "source.png", height=64, width=64)
    size = Size(64, 64)
    assert torch.equal(loop(loaded, [edit(path)], size, steps=2), loop(qwen, [edit(path)], size, steps=2))
    with pytest.raises(ValueError, match=r"is a QwenImageEditPipeline, .* needs a QwenImageEditPlusPipeline"):
        QWEN_EDIT_PLUS.from_pretrained(tmp_path / "qwen")
