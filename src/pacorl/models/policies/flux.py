"""FLUX.1-dev as a policy: sets of panels generated from one prompt. FLUX.1-Kontext shares its transformer and texts."""

from collections.abc import Mapping
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from pacorl.core.devices import to_device
from pacorl.models.policies.pipeline import JOINT_ATTENTION, PipelinePolicy, guided, timestep_for
from pacorl.models.policies.policy import TrueGuidance
from pacorl.models.policies.spec import PolicySpec
from pacorl.types import Conditioning, Size

LORA_TARGETS = (
    *JOINT_ATTENTION,
    "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
)  # fmt: skip
"""The released adapter's targets: 342 modules of FLUX.1-dev, and as many of FLUX.1-Kontext-dev."""


class DistilledOptions(TrueGuidance):
    """Options of FLUX's kinds."""

    guidance_scale: float = Field(3.5, ge=0)
    """FLUX's distilled guidance: one forward, with the scale as an input."""
    max_sequence_length: int = Field(512, ge=1, le=4096)
    """T5 tokens per prompt."""


class FluxOptions(DistilledOptions):
    """The generator FLUX.1-dev, which makes sets."""

    kind: Literal["flux"] = "flux"
    checkpoint: str = "black-forest-labs/FLUX.1-dev"
    """A diffusers folder, or a name on the hub."""


class FluxPolicy(PipelinePolicy):
    """A `FluxPipeline` behind the policy seam."""

    # Black Forest Labs, as quoted in github.com/Nerogar/OneTrainer/pull/1516: FLUX.1 and FLUX.2 were trained with their
    # schedulers' parameters; FLUX.2's empirical mu is for inference alone.
    training_shift = "linear"
    lora_targets = LORA_TARGETS
    encoders: ClassVar[Mapping[str, str]] = {"text_encoder": "CLIP text encoder", "text_encoder_2": "T5 text encoder"}
    long_encoder = "text_encoder_2"

    def encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        """T5's `tokens` (B, L, D) and CLIP's `pooled` (B, D'); CLIP reads 77 tokens and no more."""
        limit = self.options.max_sequence_length
        # The pipeline would walk through all modules of all components, eight times a batch, to learn the device.
        device = self.pipeline.text_encoder.device
        tokens, pooled, _ = self.pipeline.encode_prompt(texts, device=device, max_sequence_length=limit)
        return {"tokens": tokens, "pooled": pooled}

    def velocity(self, x_BNC: Tensor, sigma_B: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
        # Tokens and positions of the image, then of Kontext's source.
        tensors = conditioning.tensors
        tokens = tensors["tokens"]
        hidden_BMC = x_BNC
        if self.max_sources:
            hidden_BMC = torch.cat([x_BNC, tensors["source"].to(x_BNC.dtype)], 1)
        ids_N3 = _ids_on(self.device, *self.token_grid(size), images=1 + self.max_sources)

        embeds = self.pipeline.transformer.config.guidance_embeds
        guidance_B = torch.full_like(sigma_B, self.options.guidance_scale) if embeds else None

        def read(prefix: str) -> Tensor:
            return self.predict(
                hidden_states=hidden_BMC.to(tokens.dtype),
                timestep=timestep_for(sigma_B, tokens.dtype),
                guidance=guidance_B,
                pooled_projections=tensors[f"{prefix}pooled"],
                encoder_hidden_states=tensors[f"{prefix}tokens"],
                txt_ids=tokens.new_zeros(tokens.shape[1], 3),
                img_ids=ids_N3.to(tokens),
            )

        # The source's unused velocity is cut off at the end, after guidance.
        return guided(read, scale=self.options.true_cfg_scale)[:, : x_BNC.shape[1]]


@lru_cache(maxsize=32)
def _ids_on(device: torch.device, rows: int, cols: int, *, images: int) -> Tensor:
    """Image number (0 is the generated one), row and column of each token (N, 3); sent once per size."""
    return to_device(torch.cartesian_prod(torch.arange(images), torch.arange(rows), torch.arange(cols)), device)


DEV_LICENCE = ("other", "flux-1-dev-non-commercial-license")
"""Licence of FLUX.1's dev models."""

FLUX = PolicySpec(
    options=FluxOptions,
    policy=FluxPolicy,
    pipeline="FluxPipeline",
    hub_name="flux",
    architecture="flux.json",
    steps=28,
    distilled={"FLUX.1-schnell": "black-forest-labs/FLUX.1-dev"},
    parameters=11_901_408_320,
    licence=DEV_LICENCE,
    gated=True,
    tiny="pacorl.tiny.generators:FLUX",
)
