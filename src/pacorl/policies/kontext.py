"""FLUX.1-Kontext-dev as a policy: one picture edited by an instruction.

The source lies beside the painted picture in the sequence, at the same size, marked by its position ids. A config's
size is an area: the picture is painted in the one of Kontext's training shapes that is nearest to the source's, scaled
to that area. Source and painted picture have that size, so all that is resized is the source, to the shape that the
pipeline too would choose for it; a source that no shape fits is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pacorl.policies import flux
from pacorl.policies.last_block import prune_last_block_text
from pacorl.policies.sources import check_area, open_source, source_size, sources_of
from pacorl.policies.tokens import checked_pipeline, join, noise_tokens, shifted_sigmas, token_grid, unpack
from pacorl.types import Conditioning, Prompt, Size

if TYPE_CHECKING:
    from diffusers import FluxKontextPipeline
    from PIL.Image import Image

TINY_KONTEXT = Path(__file__).parents[1] / "checkpoints" / "kontext"
KONTEXT_DEV = "black-forest-labs/FLUX.1-Kontext-dev"

PREFERRED_AREA = 1024 * 1024
"""What the pipeline's preferred shapes are written for."""
MAX_STRETCH = 1.1
"""How much a source's aspect may change on its way to a training shape. Between two neighbouring shapes it changes by
at most 1.085; more means that the source is longer than any of them."""


class KontextPolicy:
    """A `FluxKontextPipeline` behind the policy seam."""

    lora_targets: tuple[str, ...] = flux.LORA_TARGETS

    def __init__(
        self,
        pipeline: FluxKontextPipeline,
        *,
        guidance: float = 2.5,
        max_sequence_length: int = 512,
        true_cfg_scale: float = 1.0,
        negative_prompt: str = "",
    ) -> None:
        self.pipeline = pipeline
        self.guidance = guidance
        self.max_sequence_length = max_sequence_length
        self.true_cfg_scale = true_cfg_scale
        self.negative_prompt = negative_prompt
        self.transformer: nn.Module = pipeline.transformer
        self._config = pipeline.transformer.config
        self.token_pixels = 2 * pipeline.vae_scale_factor
        flux.freeze(pipeline)
        prune_last_block_text(pipeline.transformer)

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str | Path = "tiny",
        *,
        dtype: str = "float32",
        device: str | torch.device = "cpu",
        guidance: float = 2.5,
        max_sequence_length: int = 512,
        true_cfg_scale: float = 1.0,
        negative_prompt: str = "",
    ) -> KontextPolicy:
        """Loads a diffusers folder, a hub name, or the committed tiny checkpoint ("tiny").

        Raises ValueError where the checkpoint is another pipeline, FLUX.1-dev above all.
        """
        from diffusers import FluxKontextPipeline

        source = str(TINY_KONTEXT if str(checkpoint) == "tiny" else checkpoint)
        checked_pipeline(source, wanted="FluxKontextPipeline", published=KONTEXT_DEV)
        pipeline = FluxKontextPipeline.from_pretrained(source, dtype=getattr(torch, dtype))
        return cls(
            pipeline.to(device),
            guidance=guidance,
            max_sequence_length=max_sequence_length,
            true_cfg_scale=true_cfg_scale,
            negative_prompt=negative_prompt,
        )

    def check_size(self, size: Size) -> None:
        """Raises ValueError where the area of `size` is smaller than one token."""
        check_area(size, step=self.token_pixels)

    def size_of(self, prompt: Prompt, size: Size) -> Size:
        """The area of `size` in the training shape that is nearest to the source's.

        Raises ValueError, naming prompt and source, where there is not one source or no shape fits it.
        """
        (path,) = sources_of(prompt, most=1, model="FLUX.1-Kontext")
        return self._sides(_preferred_shape(source_size(path), path, step=self.token_pixels), size)

    def _sides(self, shape: Size, size: Size) -> Size:
        scale = math.sqrt(size.height * size.width / PREFERRED_AREA)
        height, width = (
            max(1, round(side * scale / self.token_pixels)) * self.token_pixels for side in (shape.height, shape.width)
        )
        return Size(height, width)

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt], size: Size) -> list[Conditioning]:
        """One conditioning per prompt, on the CPU: FLUX's `tokens` and `pooled`, and the `source` (1, N, C)."""
        texts = flux.encode_texts(
            self.pipeline,
            [prompt.text for prompt in prompts],
            max_sequence_length=self.max_sequence_length,
            negative_prompt=self.negative_prompt if self.true_cfg_scale > 1 else None,
        )
        return [
            Conditioning({**text, "source": flux.encode_picture(self.pipeline, self._source(prompt), size)})
            for text, prompt in zip(texts, prompts, strict=True)
        ]

    def _source(self, prompt: Prompt) -> Image:
        (path,) = sources_of(prompt, most=1, model="FLUX.1-Kontext")
        return open_source(path)

    def free_encoders(self) -> None:
        """Moves the text encoders off the device; the VAE stays, it decodes."""
        self.pipeline.text_encoder.to("cpu")
        self.pipeline.text_encoder_2.to("cpu")

    def collate(self, conditionings: Sequence[Conditioning]) -> Conditioning:
        """One batch, on the device."""
        return join(conditionings).to(self.device)

    @property
    def device(self) -> torch.device:
        return next(self.transformer.parameters()).device

    def sigmas(self, num_steps: int, size: Size) -> Tensor:
        """(T+1,) fp32 on the CPU, shifted by the number of painted tokens as the pipeline shifts them."""
        rows, cols = token_grid(size, step=self.token_pixels)
        return shifted_sigmas(self.pipeline.scheduler, num_steps, tokens=rows * cols)

    def noise(self, seeds: Sequence[int], size: Size) -> Tensor:
        """(B, N, C) fp32 on the device, one seed per row, drawn on the CPU as the pipeline draws it."""
        factor = self.pipeline.vae_scale_factor
        channels = self._config.in_channels // 4
        drawn = noise_tokens(seeds, channels=channels, height=size.height // factor, width=size.width // factor)
        return drawn.to(self.device)

    def velocity(self, x_BNC: Tensor, sigma_B: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
        """The transformer's velocity in fp32: (B, N, C) at one sigma per row, the source's tokens left off."""
        places = token_grid(size, step=self.token_pixels)
        predicted = flux.flux_velocity(
            self.transformer,
            torch.cat([x_BNC, conditioning.tensors["source"].to(x_BNC.dtype)], 1),
            sigma_B,
            conditioning,
            ids_N3=torch.cat([flux.image_ids(*places), flux.image_ids(*places, picture=1)]),
            guidance=self.guidance if self._config.guidance_embeds else None,
            true_cfg_scale=self.true_cfg_scale,
        )
        return predicted[:, : x_BNC.shape[1]]

    @torch.no_grad()
    def decode(self, x_BNC: Tensor, size: Size) -> list[Image]:
        """Endpoints → RGB images. No VAE tiling: its seams would poison a judge."""
        return flux.decode(self.pipeline, unpack(x_BNC, rows=size.height // self.token_pixels))


def _preferred_shape(source: Size, path: Path, *, step: int) -> Size:
    """The pipeline's choice among the shapes that Kontext was trained on, by the source's size in whole tokens."""
    from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

    rows, cols = (max(1, side // step) for side in (source.height, source.width))
    _, width, height = min((abs(cols / rows - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)
    stretch = source.width / source.height * height / width
    if max(stretch, 1 / stretch) > MAX_STRETCH:
        raise ValueError(
            f"source {path} is {source}, and the nearest shape that FLUX.1-Kontext knows is {Size(height, width)}: "
            "it would be distorted; crop or pad it"
        )
    return Size(height, width)
