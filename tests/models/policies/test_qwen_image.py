"""Qwen-Image-Edit and Plus behind the seam, beyond what every policy promises."""

from pathlib import Path

import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus_module
from edit_twins import INSTRUCTIONS, edit, loop, qwen_pipeline, source_image
from PIL import Image

from pacorl.models.policies.qwen_image import CONDITION_AREA, QWEN_EDIT, QWEN_EDIT_PLUS, QwenEditPolicy
from pacorl.types import Prompt, Size


@pytest.fixture(scope="module")
def qwen() -> QwenEditPolicy:
    return QWEN_EDIT.over(qwen_pipeline(), true_cfg_scale=4.0)


@pytest.fixture(scope="module")
def plus() -> QwenEditPolicy:
    return QWEN_EDIT_PLUS.over(qwen_pipeline(plus=True), true_cfg_scale=4.0)


def test_plus_is_its_pipeline_with_sources_of_two_shapes(
    plus: QwenEditPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generated image has the last one's."""
    shapes = [(120, 60), (96, 96)]
    paths = [source_image(tmp_path / f"{h}.png", height=h, width=w, seed=h) for h, w in shapes]
    prompt = Prompt(0, INSTRUCTIONS[0], sources=tuple(paths))
    size = plus.size_of(prompt, Size(96, 96))
    calculate = plus_module.calculate_dimensions
    monkeypatch.setattr(plus_module, "calculate_dimensions", lambda area, ratio: calculate(min(area, 96 * 96), ratio))
    expected = plus.pipeline(
        [Image.open(path) for path in paths],
        prompt=prompt.text,
        negative_prompt=" ",
        true_cfg_scale=4.0,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    ).images
    latents = loop(plus, [prompt], size)
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5)
    assert latents.std() > 0.1


def test_a_shorter_text_is_read_as_alone(qwen: QwenEditPolicy, tmp_path: Path) -> None:
    """In a batch it is padded."""
    path = source_image(tmp_path / "source.png", height=90, width=140)
    short, long = edit(path, 0, "Red."), edit(path, 1, INSTRUCTIONS[1])
    size = qwen.size_of(short, Size(96, 96))
    torch.testing.assert_close(loop(qwen, [short, long], size)[:1], loop(qwen, [short], size), rtol=0, atol=1e-5)


def test_plus_shows_its_text_encoder_no_more_than_384_squared(
    plus: QwenEditPolicy, qwen: QwenEditPolicy, tmp_path: Path
) -> None:
    assert CONDITION_AREA == plus_module.CONDITION_IMAGE_SIZE
    prompt = edit(source_image(tmp_path / "source.png", height=512, width=512))
    for policy, side, shown in ((plus, 512, 384), (plus, 96, 96), (qwen, 512, 512)):
        assert policy.shown_sizes(prompt, Size(side, side)) == [Size(shown, shown)]


def test_the_template_is_cut_where_the_pipelines_cut_it(qwen: QwenEditPolicy) -> None:
    template = qwen.pipeline.prompt_template_encode.split("<|vision_start|>")[0]
    assert len(qwen.pipeline.tokenizer(template).input_ids) == qwen.pipeline.prompt_template_encode_start_idx
