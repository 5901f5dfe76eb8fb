"""A generator's images are those of their prompts, seeds and sizes, with the adapter or without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from drawn_adapters import draw_adapter
from PIL.Image import Image
from toy_world import ToyPolicy

from pacorl.generate.generator import Generator
from pacorl.models.adapters import add_lora
from pacorl.tiny.world import set_prompts
from pacorl.types import Conditioning, Prompt, Size

SMALL, LARGE = Size(16, 16), Size(32, 32)
PROMPTS = [
    replace(prompt, size=size) for prompt, size in zip(set_prompts("train", 3), (SMALL, LARGE, SMALL), strict=True)
]


@pytest.fixture
def generator() -> Generator:
    """With an adapter that does something."""
    torch.manual_seed(0)
    policy = ToyPolicy()
    add_lora(policy.transformer, rank=2, alpha=4, targets=policy.lora_targets)
    draw_adapter(policy.transformer, std=0.2)
    return Generator(policy, model="toy", adapter="its own")  # type: ignore[arg-type]


def pixels(images: list[Image]) -> list[np.ndarray]:
    return [np.asarray(image, dtype=float) for image in images]


def test_images_of_several_sizes_keep_their_places_and_seeds(generator: Generator) -> None:
    together = pixels(generator.sample(PROMPTS, [5, 6, 7], steps=2))
    for prompt, seed, image in zip(PROMPTS, (5, 6, 7), together, strict=True):
        (alone,) = pixels(generator.sample([prompt], [seed], steps=2))
        (other,) = pixels(generator.sample([prompt], [seed - 1], steps=2))
        assert np.abs(image - alone).max() <= 1, "1: the rounding to 8 bits"
        assert np.abs(image - other).max() > 10


class CompanionPolicy(ToyPolicy):
    """Encodes a prompt otherwise in company, as a batch changes the last bits of text encoders."""

    def encode(self, prompts: Sequence[Prompt], size: Size) -> list[Conditioning]:
        shift = 0.1 * (len(prompts) - 1)
        return [Conditioning({"text": each.tensors["text"] + shift}) for each in super().encode(prompts, size)]


def test_images_do_not_depend_on_earlier_calls() -> None:
    def sampled(*calls: Sequence[Prompt]) -> list[bytes]:
        generator = Generator(CompanionPolicy(), model="toy")  # type: ignore[arg-type]
        generator.batch = len(PROMPTS)
        for prompts in calls:
            images = generator.sample(prompts, steps=2, size=SMALL)
        return [image.tobytes() for image in images]

    assert sampled(PROMPTS[:1], PROMPTS) == sampled(PROMPTS[1:], PROMPTS) == sampled(PROMPTS)


def test_prompts_may_be_one_or_texts_and_seeds_count_on(generator: Generator) -> None:
    def bytes_of(prompts: Any, seeds: Any = 0) -> list[bytes]:
        return [image.tobytes() for image in generator.sample(prompts, seeds, steps=1, size=(16, 16))]

    assert bytes_of(PROMPTS[0]) == bytes_of(PROMPTS[0].text) == bytes_of(PROMPTS[:1], [0])
    assert bytes_of(PROMPTS, 3) == bytes_of(PROMPTS, [3, 4, 5])
