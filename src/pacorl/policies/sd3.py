"""Stable Diffusion 3 and 3.5 as a policy: sets of panels generated from one prompt, under classifier-free guidance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from pacorl import twins
from pacorl.policies.pipeline import PipelinePolicy, guided
from pacorl.policies.policy import PolicyOptions, PolicySpec
from pacorl.policies.tokens import pack, unpack
from pacorl.types import Conditioning, Size

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline
    from transformers import PreTrainedTokenizerBase

LORA_TARGETS = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
)  # fmt: skip
"""Flow-GRPO's targets for Stable Diffusion 3.5 (arXiv 2505.05470): joint attention, and nothing of the second one."""


class SD3Options(PolicyOptions):
    """The generator Stable Diffusion 3.5, which makes sets."""

    kind: Literal["sd3"] = "sd3"
    checkpoint: str = "stabilityai/stable-diffusion-3.5-medium"
    guidance_scale: float = Field(4.5, ge=1)
    """Scale of classifier-free guidance against `negative_prompt`, at twice the forwards; 1 is without."""
    negative_prompt: str = ""
    max_sequence_length: int = Field(256, ge=1, le=512)
    """T5 tokens per prompt."""

    @property
    def negative_text(self) -> str | None:
        """`negative_prompt` if the scale asks for it."""
        return self.negative_prompt if self.guidance_scale > 1 else None


class SD3Policy(PipelinePolicy):
    """A `StableDiffusion3Pipeline` behind the policy seam."""

    lora_targets: tuple[str, ...] = LORA_TARGETS
    encoders: ClassVar[Mapping[str, str]] = {
        "text_encoder": "CLIP-L text encoder",
        "text_encoder_2": "CLIP-G text encoder",
        "text_encoder_3": "T5 text encoder",
    }
    long_tokenizer = "tokenizer_3"

    def check_size(self, size: Size) -> None:
        """See `Policy`: VAE and patches have to divide `size`, and the learned positions have to reach so far."""
        super().check_size(size)
        most = self.token_pixels * int(self.pipeline.transformer.config.pos_embed_max_size)
        if max(size.height, size.width) > most:
            raise ValueError(f"size {size} is beyond this checkpoint's positions; ask for at most {Size(most, most)}")

    def encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        """The `tokens` (B, 77 + L, D) of both CLIPs, side by side, and of T5, and the CLIPs' `pooled` (B, D')."""
        limit = {"max_sequence_length": self.options.max_sequence_length}
        tokens, _, pooled, _ = self.pipeline.encode_prompt(
            texts, None, None, do_classifier_free_guidance=False, **limit
        )
        return {"tokens": tokens, "pooled": pooled}

    def sigmas(self, num_steps: int, size: Size) -> Tensor:
        """(T+1,) fp32 on the CPU: the scheduler's own, which are shifted by a constant, whatever the size."""
        fresh = type(self.pipeline.scheduler).from_config(self.pipeline.scheduler.config)
        fresh.set_timesteps(num_steps)
        sigmas: Tensor = fresh.sigmas
        return sigmas.float().cpu()

    def velocity(self, x_BNC: Tensor, sigma_B: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
        """The transformer's guided velocity in fp32: (B, N, C) at one sigma per row."""
        tensors = conditioning.tensors
        timestep_B = sigma_B * self.pipeline.scheduler.config.num_train_timesteps
        codes_BCHW = unpack(x_BNC, rows=self.token_grid(size)[0]).to(tensors["tokens"].dtype)

        def predict(prefix: str) -> Tensor:
            predicted_BCHW: Tensor = self.transformer(
                hidden_states=codes_BCHW,
                timestep=timestep_B,
                encoder_hidden_states=tensors[f"{prefix}tokens"],
                pooled_projections=tensors[f"{prefix}pooled"],
                return_dict=False,
            )[0]
            return pack(predicted_BCHW).float()

        return guided(predict, scale=self.options.guidance_scale)

    def text_shapes(self, size: Size) -> dict[str, tuple[int, ...]]:
        """See `PipelinePolicy`."""
        config: Any = self.pipeline.transformer.config
        tokens = (self.pipeline.tokenizer_max_length + self.options.max_sequence_length, config.joint_attention_dim)
        return {"tokens": tokens, "pooled": (config.pooled_projection_dim,)}

    def text_pass(self, size: Size) -> Callable[[], Any]:
        """See `PipelinePolicy`: T5's."""
        ids = torch.zeros(1, self.options.max_sequence_length, device=self.device, dtype=torch.long)
        return partial(self.pipeline.text_encoder_3, ids)


# --- the twin --------------------------------------------------------------------------------------------------


def _half_clip(tokenizer: PreTrainedTokenizerBase) -> Any:
    """A tiny CLIP of half the width: the two of them side by side are as wide as T5, or they would be cut off."""
    clip = twins.tiny_clip(tokenizer, projection=True)
    half = twins.TEXT_WIDTH // 2
    clip.config.update({"hidden_size": half, "projection_dim": half})
    return type(clip)(clip.config)


def tiny_sd3(texts: Sequence[str]) -> StableDiffusion3Pipeline:
    """A whole Stable Diffusion 3.5 pipeline in small; its tokenizers know the words of `texts`."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    clip_tokenizer, t5_tokenizer = twins.clip_tokenizer_of(texts), twins.t5_tokenizer_of(texts)
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),  # as published
        vae=twins.tiny_vae(),
        text_encoder=_half_clip(clip_tokenizer),
        tokenizer=clip_tokenizer,
        text_encoder_2=_half_clip(clip_tokenizer),
        tokenizer_2=clip_tokenizer,
        text_encoder_3=twins.tiny_t5(t5_tokenizer),
        tokenizer_3=t5_tokenizer,
        transformer=SD3Transformer2DModel(
            in_channels=twins.LATENT_CHANNELS,
            out_channels=twins.LATENT_CHANNELS,
            num_layers=3,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=twins.TEXT_WIDTH,
            caption_projection_dim=128,
            pooled_projection_dim=twins.TEXT_WIDTH,
            pos_embed_max_size=128,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
    )


SD3 = PolicySpec(
    options=SD3Options,
    policy=SD3Policy,
    pipeline="StableDiffusion3Pipeline",
    hub_name="stable-diffusion-3|sd-?3",
    architecture="sd3.json",
    twin=tiny_sd3,
    licence=("other", "stabilityai-ai-community"),
    gated=True,
)
