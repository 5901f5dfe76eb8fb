"""What a policy derived from prompts is found again by all that it depends on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from toy_world import ToyPolicy

from pacorl.engine.conditioning import ConditioningCache
from pacorl.types import Conditioning, Prompt, Size

SMALL, LARGE = Size(16, 16), Size(32, 32)
PROMPTS = [Prompt(number, "a red hat", sources=(Path(name),)) for number, name in enumerate(("one.png", "two.png"))]


class Numbering(ToyPolicy):
    """Encodes a prompt as (its image's number, the size's height), and counts what it encodes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoded = 0

    def encode(self, prompts: Sequence[Prompt], size: Size) -> list[Conditioning]:
        self.encoded += len(prompts)
        numbers = [["one.png", "two.png"].index(prompt.sources[0].name) for prompt in prompts]
        return [Conditioning({"text": torch.tensor([[number, size.height]])}) for number in numbers]


def test_one_text_with_two_images_or_sizes_is_encoded_for_each_and_once() -> None:
    policy = Numbering()
    cache = ConditioningCache(policy)  # type: ignore[arg-type]
    cache.prepare(PROMPTS, SMALL)
    for _ in range(2):
        assert cache.batch(PROMPTS[::-1], SMALL).tensors["text"].tolist() == [[1, 16], [0, 16]]
        assert cache.batch(PROMPTS[:1], LARGE).tensors["text"].tolist() == [[0, 32]]
    assert policy.encoded == 3
