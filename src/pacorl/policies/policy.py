"""The seam of a generator: everything a loop may ask of one, whatever its name.

Guidance, packing, reference latents and norm rules stay inside `velocity`; loops see tokens and sigmas. A config
names one size; `size_of` says at which size each prompt is painted then, and that painted size is the `size` of every
other method. A batch has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

    from pacorl.types import Conditioning, Prompt, Size


class Policy(Protocol):
    """A flow-matching generator with one trainable part."""

    transformer: nn.Module
    lora_targets: tuple[str, ...]
    """Suffixes of the modules that an adapter is added to by default."""

    def check_size(self, size: Size) -> None:
        """Raises ValueError, naming the nearest size, where the config's `size` cannot be painted."""

    def size_of(self, prompt: Prompt, size: Size) -> Size:
        """The size at which `prompt` is painted where the config says `size`: for sets `size` itself, for edits the
        area of `size` in the shape of the source.

        Raises ValueError that names the prompt where a source is missing, is one too many or has no such shape.
        """

    def encode(self, prompts: Sequence[Prompt], size: Size) -> list[Conditioning]:
        """One conditioning per prompt, on the CPU; edits encode their sources here."""

    def free_encoders(self) -> None:
        """Moves what only `encode` needs off the device."""

    def collate(self, conditionings: Sequence[Conditioning]) -> Conditioning:
        """One batch, on the device."""

    def sigmas(self, num_steps: int, size: Size) -> Tensor:
        """(T+1,) fp32, from 1 down to 0, shifted as the pipeline shifts them."""

    def noise(self, seeds: Sequence[int], size: Size) -> Tensor:
        """(B, N, C) fp32, one seed per row, drawn on the CPU so that every machine starts alike."""

    def velocity(self, x_BNC: Tensor, sigma_B: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
        """The model's velocity in fp32: (B, N, C) at one sigma per row."""

    def decode(self, x_BNC: Tensor, size: Size) -> list[Image]:
        """Endpoints → RGB images."""
