"""FLUX.1-dev as a policy: sets of panels painted from one prompt."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from pacorl.types import Conditioning, Prompt, Size

if TYPE_CHECKING:
    from diffusers import FluxPipeline
    from PIL.Image import Image

TINY_FLUX = Path(__file__).parents[1] / "checkpoints" / "flux"

ENCODE_BATCH = 8
"""Prompts per pass of the text encoders; T5-XXL's activations stay small."""

LORA_TARGETS = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
)  # fmt: skip
"""The released adapter's targets: 342 modules of FLUX.1-dev."""


class FluxPolicy:
    """A `FluxPipeline` behind the policy seam."""

    lora_targets: tuple[str, ...] = LORA_TARGETS

    def __init__(self, pipeline: FluxPipeline, *, guidance: float = 3.5, text_tokens: int = 512) -> None:
        self.pipeline = pipeline
        self.guidance = guidance
        self.text_tokens = text_tokens
        self.transformer: nn.Module = pipeline.transformer
        self._config = pipeline.transformer.config
        # A latent token is a 2×2 patch of VAE codes.
        self.token_pixels = 2 * pipeline.vae_scale_factor
        for part in (pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2, pipeline.transformer):
            part.requires_grad_(False).eval()

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str | Path = "tiny",
        *,
        dtype: str = "float32",
        device: str | torch.device = "cpu",
        guidance: float = 3.5,
        text_tokens: int = 512,
    ) -> FluxPolicy:
        """Loads a diffusers folder, a hub name, or the committed tiny checkpoint ("tiny")."""
        from diffusers import FluxPipeline

        source = TINY_FLUX if str(checkpoint) == "tiny" else checkpoint
        pipeline = FluxPipeline.from_pretrained(source, dtype=getattr(torch, dtype))
        return cls(pipeline.to(device), guidance=guidance, text_tokens=text_tokens)

    def check_size(self, size: Size) -> None:
        """Raises ValueError, naming the nearest sizes, where VAE and patches do not divide `size`."""
        step = self.token_pixels
        if size.height % step or size.width % step:
            near = Size(*(max(step, round(side / step) * step) for side in (size.height, size.width)))
            raise ValueError(f"size {size} must be a multiple of {step} pixels on both sides; the nearest is {near}")

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt], size: Size) -> list[Conditioning]:
        """One conditioning per prompt, on the CPU: T5's tokens (1, L, D) and CLIP's pooled vector (1, D').

        CLIP reads 77 tokens and no more, as ever; a prompt that T5 cannot read whole is warned of.
        """
        self._warn_of_long(prompts)
        encoded: list[Conditioning] = []
        with _quiet():
            for start in range(0, len(prompts), ENCODE_BATCH):
                tokens, pooled, _ = self.pipeline.encode_prompt(
                    prompt=[prompt.text for prompt in prompts[start : start + ENCODE_BATCH]],
                    prompt_2=None,
                    max_sequence_length=self.text_tokens,
                )
                rows = zip(tokens.cpu().split(1), pooled.cpu().split(1), strict=True)
                encoded += [Conditioning({"tokens": token, "pooled": pool}) for token, pool in rows]
        return encoded

    def _warn_of_long(self, prompts: Sequence[Prompt]) -> None:
        lengths = [len(self.pipeline.tokenizer_2(prompt.text, truncation=False).input_ids) for prompt in prompts]
        longest = max(lengths, default=0)
        if longest > self.text_tokens:
            cut = sum(length > self.text_tokens for length in lengths)
            warnings.warn(
                f"{cut} of {len(prompts)} prompts have more than model.text_tokens = {self.text_tokens} tokens "
                f"(up to {longest}); their ends are not read",
                stacklevel=3,
            )

    def free_encoders(self) -> None:
        """Moves the text encoders off the device."""
        self.pipeline.text_encoder.to("cpu")
        self.pipeline.text_encoder_2.to("cpu")

    def collate(self, conditionings: Sequence[Conditioning]) -> Conditioning:
        """One batch, on the device."""
        names = conditionings[0].tensors
        return Conditioning({name: torch.cat([c.tensors[name] for c in conditionings]) for name in names}).to(
            self.device
        )

    @property
    def device(self) -> torch.device:
        return next(self.transformer.parameters()).device

    def sigmas(self, num_steps: int, size: Size) -> Tensor:
        """(T+1,) fp32 on the CPU, shifted by the number of tokens as the pipeline shifts them."""
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        config = self.pipeline.scheduler.config
        tokens = (size.height // self.token_pixels) * (size.width // self.token_pixels)
        shift = calculate_shift(
            tokens,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        scheduler = type(self.pipeline.scheduler).from_config(config)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=shift)
        sigmas: Tensor = scheduler.sigmas
        return sigmas.float().cpu()

    def noise(self, seeds: Sequence[int], size: Size) -> Tensor:
        """(B, N, C) fp32 on the device, one seed per row, drawn on the CPU as the pipeline draws it."""
        height, width = (side // self.pipeline.vae_scale_factor for side in (size.height, size.width))
        shape = (self._config.in_channels // 4, height, width)
        drawn = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return pack(torch.stack(drawn)).to(self.device)

    def velocity(self, x_BNC: Tensor, sigma_B: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
        """The transformer's velocity in fp32: (B, N, C) at one sigma per row."""
        tokens = conditioning.tensors["tokens"]
        guidance_B = torch.full_like(sigma_B, self.guidance) if self._config.guidance_embeds else None
        predicted: Tensor = self.transformer(
            hidden_states=x_BNC.to(tokens.dtype),
            timestep=sigma_B.to(tokens.dtype),
            guidance=guidance_B,
            pooled_projections=conditioning.tensors["pooled"],
            encoder_hidden_states=tokens,
            txt_ids=tokens.new_zeros(tokens.shape[1], 3),
            img_ids=self._image_ids(size).to(tokens),
            return_dict=False,
        )[0]
        return predicted.float()

    def _image_ids(self, size: Size) -> Tensor:
        """(N, 3): 0, row and column of each token."""
        rows, cols = size.height // self.token_pixels, size.width // self.token_pixels
        row, col = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
        return torch.stack([torch.zeros_like(row), row, col], -1).reshape(-1, 3)

    @torch.no_grad()
    def decode(self, x_BNC: Tensor, size: Size) -> list[Image]:
        """Endpoints → RGB images. No VAE tiling: its seams would poison a judge."""
        vae: Any = self.pipeline.vae
        rows = size.height // self.token_pixels
        codes = rearrange(x_BNC, "b (h w) (c p q) -> b c (h p) (w q)", h=rows, p=2, q=2).to(vae.dtype)
        pixels = vae.decode(codes / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
        images: list[Image] = self.pipeline.image_processor.postprocess(pixels.float(), output_type="pil")
        return images


def pack(codes_BCHW: Tensor) -> Tensor:
    """VAE codes → tokens of 2×2 patches, row-major: (B, C, H, W) → (B, H/2·W/2, 4C)."""
    return rearrange(codes_BCHW, "b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps diffusers and transformers from printing each prompt that CLIP truncates."""
    loggers = [logging.getLogger(name) for name in ("diffusers.pipelines.flux.pipeline_flux", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
