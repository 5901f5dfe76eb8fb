"""Cache of encoded prompts in main memory. For FLUX.1-dev a prompt takes 4 MiB, in each process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pacorl.core.batches import grouped
from pacorl.types import Conditioning, Prompt, Size

if TYPE_CHECKING:
    from pacorl.models.policies.pipeline import PipelinePolicy


class ConditioningCache:
    """Each prompt encoded once per run; a prompt with images, which are encoded with it, once per size.

    Keyed by text and images, not by id: training and evaluation prompts are numbered apart.
    """

    def __init__(self, policy: PipelinePolicy) -> None:
        self._policy = policy
        self._encoded: dict[tuple[object, ...], Conditioning] = {}

    def batch(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        """Collate one batch on the device, for prompts of one `size`."""
        return self._policy.collate(self._encoded_prompts(prompts, size))

    def prepare(self, prompts: Sequence[Prompt], size: Size) -> None:
        """Encode prompts that are not cached yet, for a config's `size`."""
        # Edits differ in size by their sources.
        by_size = grouped((self._policy.size_of(prompt, size), prompt) for prompt in prompts)
        for sampled_size, group in by_size.items():
            self._encoded_prompts(group, sampled_size)

    def _encoded_prompts(self, prompts: Sequence[Prompt], size: Size) -> list[Conditioning]:
        # Sources and references are encoded at the size of the prompt's image.
        keys = []
        for prompt in prompts:
            has_images = prompt.sources or prompt.references
            keys.append((prompt.text, prompt.sources, prompt.references, size if has_images else None))
        new = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in self._encoded}
        if new:
            self._encoded |= dict(zip(new, self._policy.encode(list(new.values()), size), strict=True))
        return [self._encoded[key] for key in keys]
