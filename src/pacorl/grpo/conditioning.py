"""Cache of encoded prompts in main memory. For FLUX.1-dev a prompt takes 4 MiB, in each process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pacorl.types import Conditioning, Prompt, Size

if TYPE_CHECKING:
    from pacorl.models.policies.pipeline import PipelinePolicy

Key = tuple[str | tuple[Path, ...] | Size | None, ...]
"""Text, sources, references and size of a prompt's image."""


def key_of(prompt: Prompt, size: Size) -> Key:
    """Return what a prompt's encoding depends on: sources and references are encoded at the size of its image."""
    has_images = prompt.sources or prompt.references
    return (prompt.text, prompt.sources, prompt.references, size if has_images else None)


class ConditioningCache:
    """Each prompt encoded once per run; a prompt with images, which are encoded with it, once per size.

    Keyed by text and images, not by id: training and evaluation prompts are numbered apart.
    """

    def __init__(self, policy: PipelinePolicy) -> None:
        self._policy = policy
        self._encoded: dict[Key, Conditioning] = {}

    def batch(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        """Collate one batch on the device, for prompts of one `size`."""
        self._encode(prompts, size)
        return self._policy.collate([self._encoded[key_of(prompt, size)] for prompt in prompts])

    def prepare(self, prompts: Sequence[Prompt], size: Size) -> None:
        """Encode prompts that are not cached yet, for a config's `size`."""
        # Edits differ in size by their sources.
        by_size: dict[Size, list[Prompt]] = {}
        for prompt in prompts:
            by_size.setdefault(self._policy.size_of(prompt, size), []).append(prompt)
        for sampled_size, group in by_size.items():
            self._encode(group, sampled_size)

    def _encode(self, prompts: Sequence[Prompt], size: Size) -> None:
        by_key = {key_of(prompt, size): prompt for prompt in prompts}
        new = {key: prompt for key, prompt in by_key.items() if key not in self._encoded}
        if new:
            self._encoded |= dict(zip(new, self._policy.encode(list(new.values()), size), strict=True))
