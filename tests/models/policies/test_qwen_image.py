"""Qwen-Image-Edit and Plus behind the seam against diffusers' own pipelines."""

from pathlib import Path
from typing import Any

import pytest
import torch
from edit_twins import INSTRUCTIONS, edit, loop, qwen_pipeline, source_image
from PIL import Image

from pacorl.models.policies.qwen_image import CONDITION_AREA, QWEN_EDIT, QWEN_EDIT_PLUS, QwenEditPolicy
from pacorl.types import Prompt, Size

PLUS = "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus"


@pytest.fixture(scope="module")
def qwen() -> QwenEditPolicy:
    return QWEN_EDIT.over(qwen_pipeline(), true_cfg_scale=4.0)


@pytest.fixture(scope="module")
def plus() -> QwenEditPolicy:
    return QWEN_EDIT_PLUS.over(qwen_pipeline(plus=True), true_cfg_scale=4.0)


def by_pipeline(pipeline: Any, images: Any, text: str, *, seed: int) -> torch.Tensor:
    latents: torch.Tensor = pipeline(
        images,
        prompt=text,
        negative_prompt=" ",
        true_cfg_scale=4.0,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
    ).images
    return latents


def test_without_noise_the_loop_is_the_pipeline(
    qwen: QwenEditPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of two against the pipeline one by one, whose texts differ in length."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as module

    calculate = module.calculate_dimensions
    monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: calculate(96 * 96, ratio))
    path = source_image(tmp_path / "source.png", height=90, width=140)
    prompts = [edit(path, number, text) for number, text in enumerate(INSTRUCTIONS[1:])]
    size = qwen.size_of(prompts[0], Size(96, 96))
    expected = [
        by_pipeline(qwen.pipeline, Image.open(path), prompt.text, seed=seed) for seed, prompt in enumerate(prompts)
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
    expected = by_pipeline(plus.pipeline, [Image.open(path) for path in paths], prompt.text, seed=0)
    torch.testing.assert_close(loop(plus, [prompt], size), expected, rtol=0, atol=1e-5)


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
