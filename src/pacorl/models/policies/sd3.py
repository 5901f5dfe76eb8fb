"""Stable Diffusion 3 and 3.5 as a policy: sets of panels generated from one prompt, under classifier-free guidance."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from pacorl.models.policies.pipeline import JOINT_ATTENTION, PipelinePolicy, guided, pack, unpack
from pacorl.models.policies.policy import Guidance
from pacorl.models.policies.spec import PolicySpec
from pacorl.types import Conditioning, Size

LORA_TARGETS = JOINT_ATTENTION
"""Flow-GRPO's targets for Stable Diffusion 3.5 (arXiv 2505.05470): joint attention, without the second attention."""


class SD3Options(Guidance):
    """The generator Stable Diffusion 3.5, which makes sets."""

    kind: Literal["sd3"] = "sd3"
    checkpoint: str = "stabilityai/stable-diffusion-3.5-medium"
    """A diffusers folder, or a name on the hub."""
    guidance_scale: float = Field(4.5, ge=1)
    """Scale of classifier-free guidance against `negative_prompt`, at twice the forwards; 1 is without."""
    max_sequence_length: int = Field(256, ge=1, le=512)
    """T5 tokens per prompt."""


class SD3Policy(PipelinePolicy):
    """A `StableDiffusion3Pipeline` behind the policy seam."""

    # arXiv 2403.03206, section 5.3.2: a shift of 3 in training and in sampling at 1024².
    training_shift = "inference"
    lora_targets = LORA_TARGETS
    idle_in_last_block = ("attn.add_q_proj",)
    encoders: ClassVar[Mapping[str, str]] = {
        "text_encoder": "CLIP-L text encoder",
        "text_encoder_2": "CLIP-G text encoder",
        "text_encoder_3": "T5 text encoder",
    }
    long_encoder = "text_encoder_3"
    clip_tokens = 77
    scheduler_spaced = True

    def encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        """Encode texts as `tokens` (B, 77 + L, D), the joined CLIPs' before T5's, and the CLIPs' `pooled` (B, D')."""
        # Guidance is `velocity`'s own; the pipeline would encode an empty negative prompt with every batch.
        tokens, _, pooled, _ = self.pipeline.encode_prompt(
            texts, None, None, do_classifier_free_guidance=False, max_sequence_length=self.options.max_sequence_length
        )
        return {"tokens": tokens, "pooled": pooled}

    def velocity(self, x_BNC: Tensor, sigma_B: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
        tensors = conditioning.tensors
        # Unlike FLUX's and Qwen-Image's, this transformer takes timesteps of 0..1000; fp32, as its pipeline does.
        timestep_B = sigma_B * self.pipeline.scheduler.config.num_train_timesteps
        codes_BCHW = unpack(x_BNC, rows=self.token_grid(size)[0]).to(tensors["tokens"].dtype)

        def read(prefix: str) -> Tensor:
            predicted_BCHW = self.predict(
                hidden_states=codes_BCHW,
                timestep=timestep_B,
                encoder_hidden_states=tensors[f"{prefix}tokens"],
                pooled_projections=tensors[f"{prefix}pooled"],
            )
            return pack(predicted_BCHW)

        return guided(read, scale=self.options.guidance_scale)


SD3 = PolicySpec(
    options=SD3Options,
    policy=SD3Policy,
    pipeline="StableDiffusion3Pipeline",
    hub_name="stable-diffusion-3|sd-?3",
    architecture="sd3.json",
    steps=28,
    distilled={"stable-diffusion-3.5-large-turbo": "stabilityai/stable-diffusion-3.5-large"},
    parameters=2_243_171_520,
    licence=("other", "stabilityai-ai-community"),
    gated=True,
)
