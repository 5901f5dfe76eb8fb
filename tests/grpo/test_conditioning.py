"""Encoded prompts: each text once, and each edit once per size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
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


@pytest.mark.parametrize("images", [{"sources": (Path("a.png"),)}, {"references": (Path("a.png"),)}])
def test_one_text_with_two_images_or_sizes_is_encoded_for_each_and_once(images: dict[str, tuple[Path, ...]]) -> None:
    policy = CountingPolicy()
    cache = ConditioningCache(policy)
    first = replace(FOX, **images)
    second = replace(FOX, **dict.fromkeys(images, (Path("b.png"),)))
    for size in (SMALL, LARGE, SMALL):
        cache.prepare([first, second], size)
    assert policy.encoded == ["a fox 16"] * 2 + ["a fox 32"] * 2
