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
from pacorl.policies.policy import PolicySpec, TrueGuidance
from pacorl.policies.tokens import pack, unpack
from pacorl.types import Conditioning, Size

if TYPE_CHECKING:
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection, PreTrainedTokenizerBase

CLIP_TOKENS = 77
"""Both CLIP encoders read as many of every prompt; T5's tokens follow theirs."""
TIMESTEPS = 1000
"""The transformer is told the sigma as a timestep of so many."""

LORA_TARGETS = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
)  # fmt: skip
"""Flow-GRPO's targets for Stable Diffusion 3.5 (arXiv 2505.05470): joint attention, and nothing of the second one."""


class SD3Options(TrueGuidance):
    """The generator Stable Diffusion 3.5, which makes sets. It has no distilled guidance."""

    kind: Literal["sd3"] = "sd3"
    checkpoint: str = "stabilityai/stable-diffusion-3.5-medium"
    true_cfg_scale: float = Field(4.5, ge=1)
    """Scale of classifier-free guidance against `negative_prompt`, at twice the forwards; 1 is without."""
    negative_prompt: str = ""
    max_sequence_length: int = Field(256, ge=1, le=512)
    """T5 tokens per prompt."""


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
            raise ValueError(
                f"size {size} is beyond the positions of this Stable Diffusion 3; ask for at most {Size(most, most)}"
            )

    def encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        """The encoders' `tokens` (B, 77 + L, D), of both CLIPs and then of T5, and the CLIPs' `pooled` (B, D')."""
        tokens, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=texts,
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,  # the negative prompt is encoded once for all
            max_sequence_length=self.options.max_sequence_length,
        )
        return {"tokens": tokens, "pooled": pooled}

    def sigmas(self, num_steps: int, size: Size) -> Tensor:
        """(T+1,) fp32 on the CPU: the scheduler's own, which this pipeline shifts by a constant.

        Raises ValueError if a checkpoint's scheduler shifts with the size, which no published one does.
        """
        scheduler = self.pipeline.scheduler
        if scheduler.config.use_dynamic_shifting:
            return super().sigmas(num_steps, size)
        fresh = type(scheduler).from_config(scheduler.config)
        fresh.set_timesteps(num_steps)
        sigmas: Tensor = fresh.sigmas
        return sigmas.float().cpu()

    def velocity(self, x_BNC: Tensor, sigma_B: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
        """The transformer's guided velocity in fp32: (B, N, C) at one sigma per row."""
        tensors = conditioning.tensors
        codes_BCHW = unpack(x_BNC, rows=self.token_grid(size)[0]).to(tensors["tokens"].dtype)

        def predict(prefix: str) -> Tensor:
            predicted_BCHW: Tensor = self.transformer(
                hidden_states=codes_BCHW,
                timestep=sigma_B * TIMESTEPS,
                encoder_hidden_states=tensors[f"{prefix}tokens"],
                pooled_projections=tensors[f"{prefix}pooled"],
                return_dict=False,
            )[0]
            return pack(predicted_BCHW).float()

        return guided(predict, scale=self.options.true_cfg_scale)

    def text_shapes(self, size: Size) -> dict[str, tuple[int, ...]]:
        """See `PipelinePolicy`."""
        config: Any = self.pipeline.transformer.config
        tokens = (CLIP_TOKENS + self.options.max_sequence_length, config.joint_attention_dim)
        return {"tokens": tokens, "pooled": (config.pooled_projection_dim,)}

    def text_pass(self, size: Size) -> Callable[[], Any]:
        """See `PipelinePolicy`: T5's."""
        ids = torch.zeros(1, self.options.max_sequence_length, device=self.device, dtype=torch.long)
        return partial(self.pipeline.text_encoder_3, ids)


# --- the twin --------------------------------------------------------------------------------------------------


def tiny_sd3_transformer(*, heads: int = 4, blocks: int = 3) -> SD3Transformer2DModel:
    """A Stable Diffusion 3.5 medium transformer in small: its first block has the second attention."""
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=twins.LATENT_CHANNELS,
        out_channels=twins.LATENT_CHANNELS,
        num_layers=blocks,
        attention_head_dim=32,
        num_attention_heads=heads,
        joint_attention_dim=twins.TEXT_WIDTH,
        caption_projection_dim=32 * heads,
        pooled_projection_dim=twins.TEXT_WIDTH,
        pos_embed_max_size=128,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def _half_clip(tokenizer: PreTrainedTokenizerBase) -> CLIPTextModelWithProjection:
    """A tiny CLIP of half the width: the two of them side by side are as wide as T5, or they would be cut off."""
    clip = twins.tiny_clip(tokenizer, projection=True)
    half = twins.TEXT_WIDTH // 2
    config = type(clip.config)(**{**clip.config.to_dict(), "hidden_size": half, "projection_dim": half})
    model: CLIPTextModelWithProjection = type(clip)(config)
    return model


def tiny_sd3(texts: Sequence[str]) -> StableDiffusion3Pipeline:
    """A whole Stable Diffusion 3.5 pipeline in small; its tokenizers know the words of `texts`."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

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
        transformer=tiny_sd3_transformer(),
    )


SD3 = PolicySpec(
    options=SD3Options,
    policy=SD3Policy,
    pipeline="StableDiffusion3Pipeline",
    hub_name="stable-diffusion-3|sd-?3",
    architecture="sd3.json",
    twin=tiny_sd3,
    gated=True,
)
