"""References of characters: as diffusers' own pipelines read them, in batches, and refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from edit_twins import (
    edit,
    flux_policy,
    klein_pipeline,
    kontext_pipeline,
    qwen_image_21_pipeline,
    qwen_pipeline,
    source_image,
)
from PIL import Image
from pipelines import check_against_pipeline

from pacorl.grpo.conditioning import ConditioningCache
from pacorl.models.policies import POLICIES
from pacorl.models.policies.klein import KLEIN
from pacorl.models.policies.kontext import KONTEXT
from pacorl.models.policies.pipeline import PipelinePolicy, stitch
from pacorl.models.policies.qwen_image import QWEN_EDIT_PLUS
from pacorl.models.policies.qwen_image_21 import QWEN_IMAGE_21
from pacorl.types import Prompt, Size

SIZE = Size(96, 96)
TAKERS = [kind for kind, spec in POLICIES.items() if spec.policy.max_references]


@cache
def policy_of(kind: str) -> PipelinePolicy:
    built: dict[str, Callable[[], PipelinePolicy]] = {
        "flux": flux_policy,
        "kontext": lambda: KONTEXT.over(kontext_pipeline(), max_sequence_length=48, true_cfg_scale=3.0),
        "qwen_edit_plus": lambda: QWEN_EDIT_PLUS.over(qwen_pipeline(plus=True), true_cfg_scale=3.0),
        "klein": lambda: KLEIN.over(klein_pipeline(), max_sequence_length=144),
        "qwen_image_21": lambda: QWEN_IMAGE_21.over(qwen_image_21_pipeline(), true_cfg_scale=3.0),
    }
    return built[kind]()


@pytest.fixture
def images(tmp_path: Path) -> tuple[Path, ...]:
    """Three images of one area, in three shapes that FLUX.2-klein's tokens divide."""
    shapes = [(96, 96), (64, 144), (144, 64)]
    return tuple(
        source_image(tmp_path / f"{number}.png", height=height, width=width, seed=number)
        for number, (height, width) in enumerate(shapes)
    )


@pytest.mark.slow
@pytest.mark.parametrize("sources", [0, 1])
@pytest.mark.parametrize("kind", TAKERS)
def test_references_of_several_shapes_are_the_pipeline_s(kind: str, sources: int, images: tuple[Path, ...]) -> None:
    """The pipeline is given the files as they are; Kontext's its one stitched image. An edit keeps its source's size,
    and a set its own."""
    policy = policy_of(kind)
    prompt = replace(edit(images[0]), sources=images[:sources], references=images[sources:])
    assert policy.size_of(prompt, SIZE) == (policy.size_of(edit(images[0]), SIZE) if sources else SIZE)
    check_against_pipeline(policy, [prompt], SIZE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen_edit_plus", "klein", "qwen_image_21"])
def test_gradients_of_a_batch_with_images_are_those_of_its_rows(kind: str, images: tuple[Path, ...]) -> None:
    """Of two prompts of one key, and one more whose text is another, unless a forward takes one prompt."""
    policy = policy_of(kind)
    texts = ["a fox", "a fox", "a fox" if policy.forward_per == "prompt" else "two foxes"]
    prompts = [Prompt(number, text, references=images[:2]) for number, text in enumerate(texts)]
    assert len({policy.forward_key(prompt, SIZE) for prompt in prompts}) == 1
    x_BNC = policy.noise(range(3), SIZE)
    sigma_B = torch.full((3,), 0.6)
    weight = next(policy.transformer.parameters()).requires_grad_(True)
    gradients = []
    cache = ConditioningCache(policy)
    for batches in ([[0, 1, 2]], [[0], [1], [2]]):
        weight.grad = None
        for rows in batches:
            conditioning = cache.batch([prompts[row] for row in rows], SIZE)
            policy.velocity(x_BNC[rows], sigma_B[rows], conditioning, SIZE).square().sum().backward()
        assert weight.grad is not None
        gradients.append(weight.grad.clone())
    weight.requires_grad_(False)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "keys"), [("kontext", 1), ("qwen_edit_plus", 3), ("klein", 3), ("qwen_image_21", 4)])
def test_prompts_share_a_forward_if_their_images_have_equal_sizes(
    kind: str, keys: int, images: tuple[Path, ...]
) -> None:
    """And of a generator that takes one prompt per forward, none do. Kontext stitches all images into one."""
    policy = policy_of(kind)
    references = [images[:1], images[:1], images[1:2], images[:2]]
    prompts = [Prompt(number, f"fox {number}", references=paths) for number, paths in enumerate(references)]
    assert len({policy.forward_key(prompt, SIZE) for prompt in prompts}) == keys
    alike = [replace(prompt, text="fox") for prompt in prompts]
    assert len({policy.forward_key(prompt, SIZE) for prompt in alike}) == min(keys, 3)


@pytest.mark.parametrize("kind", ["qwen_edit_plus", "klein"])
def test_a_reference_beside_a_source_keeps_its_own_shape(kind: str, images: tuple[Path, ...]) -> None:
    sizes = policy_of(kind).image_sizes(replace(edit(images[0]), references=images[1:]), SIZE)
    assert [(size.height > size.width) - (size.height < size.width) for size in sizes] == [0, -1, 1]


def test_images_are_stitched_row_by_row_and_whole() -> None:
    colours = ["red", "lime", "blue"]
    stitched = stitch([Image.new("RGB", (20, 10), colour) for colour in colours], Size(80, 80))
    assert stitched.size == (80, 80)
    centres = [stitched.getpixel(point) for point in ((20, 20), (60, 20), (20, 60), (60, 60))]
    assert centres == [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)]
    assert stitched.getpixel((20, 5)) == (255, 255, 255), "an image is stretched or cut"
    pair = stitch([Image.new("RGB", (20, 40), colour) for colour in colours[:2]], Size(80, 80))
    assert [pair.getpixel(point) for point in ((20, 40), (60, 40))] == centres[:2], "two stand side by side"
