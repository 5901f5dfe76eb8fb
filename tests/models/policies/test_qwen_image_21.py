"""Qwen-Image 2.1: what diffusers' own forward computes for each image, computed once per prompt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from edit_twins import loop, qwen_image_21_pipeline, source_image
from PIL import Image
from pipelines import check_against_pipeline, diffusers_own
from torch import Tensor, nn

from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.models.policies.qwen_image_21 import QWEN_IMAGE_21
from pacorl.tiny.world import set_prompts
from pacorl.types import Conditioning, Prompt, Size

SIZE = Size(96, 96)
SHAPES = [(96, 96), (64, 144), (144, 64), (96, 96)]
"""Heights and widths of one area that 32 pixels do not all divide."""
ROWS = 3


@cache
def policy() -> PipelinePolicy:
    return QWEN_IMAGE_21.over(qwen_image_21_pipeline(), dtype="float32", true_cfg_scale=3.0)


@pytest.fixture
def images(tmp_path: Path) -> tuple[Path, ...]:
    return tuple(
        source_image(tmp_path / f"{number}.png", height=height, width=width, seed=number)
        for number, (height, width) in enumerate(SHAPES)
    )


def with_images(name: str, images: tuple[Path, ...]) -> Prompt:
    prompt = Prompt(0, "a fox runs")
    return {
        "set": set_prompts("dev", 1)[0],
        "reference": replace(prompt, references=images[:1]),
        "references": replace(prompt, references=images[:3]),
    }[name]


# --- one prefix for all images --------------------------------------------------------------------------------------


def rows_of(transformer: nn.Module, prompt: Prompt) -> tuple[PipelinePolicy, Conditioning]:
    """The unguided policy with this transformer, and a batch of one prompt."""
    ours = copy.copy(policy())
    ours.options = ours.options.unguided
    ours.transformer = transformer
    (encoded,) = ours.encode([prompt], SIZE)
    return ours, ours.collate([encoded] * ROWS)


def diffusers_velocity(transformer: Any, conditioning: Conditioning, x_BNC: Tensor, sigma_B: Tensor) -> Tensor:
    """diffusers' own forward without a cache: each row with its copy of the text and the references."""
    tokens, source = conditioning.tensors["tokens"], conditioning.tensors["source"]
    grids = conditioning.tensors["source_grid"][0].tolist()
    mask = torch.zeros(1, tokens.shape[1] + x_BNC.shape[1] // 4, dtype=torch.bool)
    mask[:, tokens.shape[1] :] = True
    for first, rows, cols in grids:
        mask[:, first : first + rows * cols // 4] = True
    output: Tensor = transformer(
        hidden_states=torch.cat([source.expand(len(x_BNC), -1, -1), x_BNC], 1),
        encoder_hidden_states=tokens.expand(len(x_BNC), -1, -1),
        timestep=sigma_B,
        img_shapes=[[*((1, rows, cols) for _, rows, cols in grids), (1, SIZE.height // 16, SIZE.width // 16)]],
        img_mask=mask.expand(len(x_BNC), -1),
        return_dict=False,
    )[0]
    return output[:, -x_BNC.shape[1] :]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_velocity_and_gradients_are_those_of_a_prefix_per_row(images: tuple[Path, ...], checkpointing: bool) -> None:
    prompt = with_images("references", images)
    plain = diffusers_own(policy().pipeline).transformer
    ours, conditioning = rows_of(copy.deepcopy(policy().transformer), prompt)
    forwards: list[tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = [
        (plain, partial(diffusers_velocity, plain, conditioning)),
        (ours.transformer, lambda x_BNC, sigma_B: ours.velocity(x_BNC, sigma_B, conditioning, SIZE)),
    ]
    x_BNC, sigma_B = ours.noise(range(ROWS), SIZE), torch.tensor([0.9, 0.6, 0.3])
    outputs, gradients = [], []
    for transformer, velocity in forwards:
        transformer.train().requires_grad_(True)
        if checkpointing:
            transformer.enable_gradient_checkpointing()
        outputs.append(velocity(x_BNC, sigma_B))
        outputs[-1].square().sum().backward()
        gradients.append({name: weight.grad for name, weight in transformer.named_parameters()})
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    for name, expected in gradients[0].items():
        assert (gradients[1][name] - expected).norm() <= 1e-5 * expected.norm() > 0, name


def test_an_image_s_steps_share_a_prefix_and_the_next_image_s_do_not(images: tuple[Path, ...]) -> None:
    ours = copy.copy(policy())
    ours.transformer = copy.deepcopy(ours.transformer)
    calls: list[int] = []
    ours.transformer.txt_in.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr]
    prompt = with_images("reference", images)
    before = loop(ours, [prompt], SIZE, steps=4)
    assert len(calls) == 2, "the prompt and the negative prompt"
    with torch.no_grad():
        ours.transformer.txt_in.out_layer.weight.neg_()  # type: ignore[union-attr, operator]
    after = loop(ours, [prompt], SIZE, steps=4)
    assert len(calls) == 4
    assert (after - before).abs().max() > 1e-3


# --- sizes, images, steps -------------------------------------------------------------------------------------------


def test_an_edit_has_the_aspect_of_its_last_source(images: tuple[Path, ...]) -> None:
    prompt = Prompt(0, "a fox", sources=images[:2], references=images[2:3])
    assert policy().size_of(prompt, SIZE) == Size(64, 128)
    assert policy().size_of(Prompt(0, "a fox", references=images[1:2]), SIZE) == SIZE


def test_transparent_images_are_laid_on_white(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = torch.zeros(1, 4, 64, 64)
    pixels[:, 3, :32] = -1.0
    monkeypatch.setattr(policy(), "decode_codes", lambda codes: pixels)
    (image,) = policy().decode(policy().noise([0], Size(64, 64)), Size(64, 64))
    assert image.mode == "RGB"
    assert image.getpixel((0, 0)) == (255, 255, 255), "nothing is there"
    expected = Image.alpha_composite(
        Image.new("RGBA", (1, 1), "white"), Image.new("RGBA", (1, 1), (128, 128, 128, 128))
    )
    assert image.getpixel((0, 63)) == expected.convert("RGB").getpixel((0, 0))


def test_the_author_s_sigmas_are_taken_for_their_number_of_steps() -> None:
    ours = copy.copy(policy())
    ours.pipeline = diffusers_own(ours.pipeline)
    ours.pipeline.register_to_config(sample_sigmas=[1.0, 0.7, 0.2])
    assert not torch.equal(ours.sigmas(3, SIZE), policy().sigmas(3, SIZE))
    assert torch.equal(ours.sigmas(4, SIZE), policy().sigmas(4, SIZE))
    check_against_pipeline(ours, [Prompt(0, "a fox")], SIZE)
