"""What a policy derived from prompts, derived once per run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pacorl.types import Conditioning, Prompt, Size

if TYPE_CHECKING:
    from pacorl.policies.policy import Policy


class ConditioningCache:
    """Each (prompt, sampled size) encoded once per run, kept on the CPU.

    Keyed by text and sources, not by id: training and evaluation prompts are numbered apart.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._encoded: dict[tuple[Any, ...], Conditioning] = {}

    def batch(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        """One batch on the device, for prompts that are all sampled at `size`."""
        self._encode(prompts, size)
        return self._policy.collate([self._encoded[_key(prompt, size)] for prompt in prompts])

    def prepare(self, prompts: Sequence[Prompt], size: Size) -> None:
        """Encode what is not encoded yet, for a config's `size`."""
        by_size: dict[Size, list[Prompt]] = {}
        for prompt in prompts:
            by_size.setdefault(self._policy.size_of(prompt, size), []).append(prompt)
        for sampled_size, group in by_size.items():
            self._encode(group, sampled_size)

    def _encode(self, prompts: Sequence[Prompt], size: Size) -> None:
        keyed = {_key(prompt, size): prompt for prompt in prompts}
        new = {key: prompt for key, prompt in keyed.items() if key not in self._encoded}
        if new:
            self._encoded |= dict(zip(new, self._policy.encode(list(new.values()), size), strict=True))


def _key(prompt: Prompt, size: Size) -> tuple[Any, ...]:
    return prompt.text, prompt.sources, size
