"""FLUX.1-dev as a policy: sets of panels painted from one prompt.

What FLUX.1-Kontext shares with it stands below as functions.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pacorl.io.quiet import quiet
from pacorl.policies.last_block import prune_last_block_text
from pacorl.policies.tokens import (
    check_multiple,
    checked_pipeline,
    join,
    noise_tokens,
    pack,
    shifted_sigmas,
    token_grid,
    unpack,
)
from pacorl.types import Conditioning, Prompt, Size

if TYPE_CHECKING:
    from diffusers import FluxPipeline
    from PIL.Image import Image

TINY_FLUX = Path(__file__).parents[1] / "checkpoints" / "flux"
TINY_SEQUENCE_LENGTH = 48
"""T5 tokens that the committed checkpoint was trained with; padding is attended to, so another number spoils it."""
FLUX_DEV = "black-forest-labs/FLUX.1-dev"

ENCODE_BATCH = 8
"""Prompts per pass of the text encoders; T5-XXL's activations stay small."""

CHATTERERS = (
    "diffusers.pipelines.flux.pipeline_flux",
    "diffusers.pipelines.flux.pipeline_flux_kontext",
    "transformers",
)

LORA_TARGETS = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
)  # fmt: skip
"""The released adapter's targets: 342 modules of FLUX.1-dev, and as many of FLUX.1-Kontext-dev."""


class FluxPolicy:
    """A `FluxPipeline` behind the policy seam."""

    lora_targets: tuple[str, ...] = LORA_TARGETS

    def __init__(
        self,
        pipeline: FluxPipeline,
        *,
        guidance: float = 3.5,
        max_sequence_length: int = 512,
        true_cfg_scale: float = 1.0,
        negative_prompt: str = "",
        record_sizes: bool = False,
    ) -> None:
        self.pipeline = pipeline
        self.guidance = guidance
        self.max_sequence_length = max_sequence_length
        self.true_cfg_scale = true_cfg_scale
        self.negative_prompt = negative_prompt
        self.record_sizes = record_sizes
        self.transformer: nn.Module = pipeline.transformer
        self._config = pipeline.transformer.config
        # A latent token is a 2×2 patch of VAE codes.
        self.token_pixels = 2 * pipeline.vae_scale_factor
        freeze(pipeline)
        prune_last_block_text(pipeline.transformer)

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str | Path = "tiny",
        *,
        dtype: str = "float32",
        device: str | torch.device = "cpu",
        guidance: float = 3.5,
        max_sequence_length: int = 512,
        true_cfg_scale: float = 1.0,
        negative_prompt: str = "",
        record_sizes: bool = False,
    ) -> FluxPolicy:
        """Loads a diffusers folder, a hub name, or the committed tiny checkpoint ("tiny").

        Raises ValueError where the checkpoint is another pipeline.
        """
        from diffusers import FluxPipeline

        source = str(TINY_FLUX if str(checkpoint) == "tiny" else checkpoint)
        checked_pipeline(source, wanted="FluxPipeline", published=FLUX_DEV)
        pipeline = FluxPipeline.from_pretrained(source, dtype=getattr(torch, dtype))
        return cls(
            pipeline.to(device),
            guidance=guidance,
            max_sequence_length=max_sequence_length,
            true_cfg_scale=true_cfg_scale,
            negative_prompt=negative_prompt,
            record_sizes=record_sizes,
        )

    def check_size(self, size: Size) -> None:
        """Raises ValueError, naming the nearest size, where VAE and patches do not divide `size`."""
        check_multiple(size, step=self.token_pixels)

    def size_of(self, prompt: Prompt, size: Size) -> Size:
        """`size`, as the config says it; with `record_sizes` the record's own, where it has one.

        Raises ValueError, naming prompt and nearest size, where that cannot be painted.
        """
        if not self.record_sizes or prompt.size is None:
            return size
        try:
            self.check_size(prompt.size)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.id}, its own {error}; or leave prompts.record_sizes out") from None
        return prompt.size

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt], size: Size) -> list[Conditioning]:
        """One conditioning per prompt, on the CPU: T5's tokens (1, L, D) and CLIP's pooled vector (1, D').

        CLIP reads 77 tokens and no more, as ever; a prompt that T5 cannot read whole is warned of.
        """
        encoded = encode_texts(
            self.pipeline,
            [prompt.text for prompt in prompts],
            max_sequence_length=self.max_sequence_length,
            negative_prompt=self.negative_prompt if self.true_cfg_scale > 1 else None,
        )
        return [Conditioning(tensors) for tensors in encoded]

    def free_encoders(self) -> None:
        """Moves the text encoders off the device."""
        self.pipeline.text_encoder.to("cpu")
        self.pipeline.text_encoder_2.to("cpu")

    def collate(self, conditionings: Sequence[Conditioning]) -> Conditioning:
        """One batch, on the device."""
        return join(conditionings).to(self.device)

    @property
    def device(self) -> torch.device:
        return next(self.transformer.parameters()).device

    def sigmas(self, num_steps: int, size: Size) -> Tensor:
        """(T+1,) fp32 on the CPU, shifted by the number of tokens as the pipeline shifts them."""
        rows, cols = token_grid(size, step=self.token_pixels)
        return shifted_sigmas(self.pipeline.scheduler, num_steps, tokens=rows * cols)

    def noise(self, seeds: Sequence[int], size: Size) -> Tensor:
        """(B, N, C) fp32 on the device, one seed per row, drawn on the CPU as the pipeline draws it."""
        factor = self.pipeline.vae_scale_factor
        channels = self._config.in_channels // 4
        drawn = noise_tokens(seeds, channels=channels, height=size.height // factor, width=size.width // factor)
        return drawn.to(self.device)

    def velocity(self, x_BNC: Tensor, sigma_B: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
        """The transformer's velocity in fp32: (B, N, C) at one sigma per row."""
        return flux_velocity(
            self.transformer,
            x_BNC,
            sigma_B,
            conditioning,
            ids_N3=image_ids(*token_grid(size, step=self.token_pixels)),
            guidance=self.guidance if self._config.guidance_embeds else None,
            true_cfg_scale=self.true_cfg_scale,
        )

    @torch.no_grad()
    def decode(self, x_BNC: Tensor, size: Size) -> list[Image]:
        """Endpoints → RGB images. No VAE tiling: its seams would poison a judge."""
        return decode(self.pipeline, unpack(x_BNC, rows=size.height // self.token_pixels))


# --- shared with Kontext ---------------------------------------------------------------------------------------


def freeze(pipeline: Any) -> None:
    """No weight of a FLUX pipeline is trained; an adapter's are, once it is added."""
    for part in (pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2, pipeline.transformer):
        part.requires_grad_(False).eval()


def encode_texts(
    pipeline: Any, texts: Sequence[str], *, max_sequence_length: int, negative_prompt: str | None
) -> list[dict[str, Tensor]]:
    """Per text T5's `tokens` (1, L, D) and CLIP's `pooled` (1, D'), on the CPU.

    With a negative prompt also its `negative_tokens` and `negative_pooled`, the same tensors for all.
    """
    _warn_of_long(pipeline.tokenizer_2, texts, max_sequence_length=max_sequence_length)
    encoded: list[dict[str, Tensor]] = []
    # Each prompt that CLIP truncates would be printed.
    with quiet(*CHATTERERS):
        for start in range(0, len(texts), ENCODE_BATCH):
            tokens, pooled = _encode(pipeline, list(texts[start : start + ENCODE_BATCH]), max_sequence_length)
            rows = zip(tokens.split(1), pooled.split(1), strict=True)
            encoded += [{"tokens": token, "pooled": pool} for token, pool in rows]
        if negative_prompt is not None:
            tokens, pooled = _encode(pipeline, [negative_prompt], max_sequence_length)
            encoded = [one | {"negative_tokens": tokens, "negative_pooled": pooled} for one in encoded]
    return encoded


def _encode(pipeline: Any, texts: list[str], max_sequence_length: int) -> tuple[Tensor, Tensor]:
    tokens, pooled, _ = pipeline.encode_prompt(prompt=texts, prompt_2=None, max_sequence_length=max_sequence_length)
    return tokens.cpu(), pooled.cpu()


def _warn_of_long(tokenizer: Any, texts: Sequence[str], *, max_sequence_length: int) -> None:
    lengths = [len(tokenizer(text, truncation=False).input_ids) for text in texts]
    longest = max(lengths, default=0)
    if longest > max_sequence_length:
        cut = sum(length > max_sequence_length for length in lengths)
        warnings.warn(
            f"{cut} of {len(texts)} prompts have more than model.max_sequence_length = {max_sequence_length} tokens "
            f"(up to {longest}); their ends are not read",
            stacklevel=4,
        )


def flux_velocity(
    transformer: nn.Module,
    hidden_BMC: Tensor,
    sigma_B: Tensor,
    conditioning: Conditioning,
    *,
    ids_N3: Tensor,
    guidance: float | None,
    true_cfg_scale: float,
) -> Tensor:
    """The transformer's output in fp32 for tokens at places `ids_N3`.

    With true CFG a second forward reads the negative prompt: v = v⁻ + scale·(v⁺ − v⁻).
    """
    tensors = conditioning.tensors
    tokens = tensors["tokens"]
    guidance_B = torch.full_like(sigma_B, guidance) if guidance is not None else None

    def forward(prefix: str) -> Tensor:
        predicted: Tensor = transformer(
            hidden_states=hidden_BMC.to(tokens.dtype),
            timestep=sigma_B.to(tokens.dtype),
            guidance=guidance_B,
            pooled_projections=tensors[f"{prefix}pooled"],
            encoder_hidden_states=tensors[f"{prefix}tokens"],
            txt_ids=tokens.new_zeros(tokens.shape[1], 3),
            img_ids=ids_N3.to(tokens),
            return_dict=False,
        )[0]
        return predicted.float()

    if true_cfg_scale <= 1:
        return forward("")
    wanted, unwanted = forward(""), forward("negative_")
    return unwanted + true_cfg_scale * (wanted - unwanted)


def image_ids(rows: int, cols: int, *, picture: int = 0) -> Tensor:
    """(N, 3): the number of the picture (0 is the painted one), row and column of each token."""
    row, col = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
    return torch.stack([torch.full_like(row, picture), row, col], -1).reshape(-1, 3)


def decode(pipeline: Any, codes_BCHW: Tensor) -> list[Image]:
    """Scaled VAE codes → RGB images."""
    vae = pipeline.vae
    codes = codes_BCHW.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
    pixels = vae.decode(codes, return_dict=False)[0]
    images: list[Image] = pipeline.image_processor.postprocess(pixels.float(), output_type="pil")
    return images


def encode_picture(pipeline: Any, image: Image, size: Size) -> Tensor:
    """A picture, resized to `size` as the pipeline resizes it, as scaled tokens (1, N, C) on the CPU."""
    vae = pipeline.vae
    pixels = pipeline.image_processor.preprocess(image, size.height, size.width).to(vae.device, vae.dtype)
    codes = vae.encode(pixels).latent_dist.mode()
    return pack((codes - vae.config.shift_factor) * vae.config.scaling_factor).cpu()
