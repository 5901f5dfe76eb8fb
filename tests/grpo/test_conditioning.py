"""Encoded prompts: each text once, and each edit once per size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toy_world import ToyPolicy

from pacorl.grpo.conditioning import ConditioningCache
from pacorl.types import Conditioning, Prompt, Size

FOX, BEAR = Prompt(0, "a fox"), Prompt(1, "a bear")
SMALL, LARGE = Size(16, 16), Size(32, 32)


class CountingPolicy(ToyPolicy):
    """Counts what it encodes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoded: list[str] = []

    def encode(self, prompts: Sequence[Prompt], size: Size) -> list[Conditioning]:
        self.encoded += [f"{prompt.text} {size.height}" for prompt in prompts]
        return super().encode(prompts, size)


def test_each_text_is_encoded_once_and_handed_to_every_row() -> None:
    policy = CountingPolicy()
    cache = ConditioningCache(policy)
    for size in (SMALL, LARGE):
        cache.prepare([FOX, BEAR, replace(FOX, id=7)], size)
    rows = cache.batch([BEAR, FOX, BEAR], LARGE).tensors["text"]
    assert policy.encoded == ["a fox 16", "a bear 16"]
    assert torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0], rows[1])


@pytest.mark.parametrize("images", [{"sources": (Path("a.png"),)}, {"references": (Path("a.png"),)}])
def test_one_text_with_two_images_or_sizes_is_encoded_for_each_and_once(images: dict[str, tuple[Path, ...]]) -> None:
    policy = CountingPolicy()
    cache = ConditioningCache(policy)
    first = replace(FOX, **images)
    second = replace(FOX, **dict.fromkeys(images, (Path("b.png"),)))
    for size in (SMALL, LARGE, SMALL):
        cache.prepare([first, second], size)
    assert policy.encoded == ["a fox 16"] * 2 + ["a fox 32"] * 2
