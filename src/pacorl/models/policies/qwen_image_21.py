"""Qwen-Image 2.1 as a policy: sets, edits, and references of characters, with up to ten images per prompt.

A Qwen3-VL reads the text with the sources and references, and their VAE codes replace its image tokens in the
transformer's sequence, four for one. All are resized to the generated image's area, each in its own aspect, with sides
of multiples of 32 pixels; an edit has the last source's aspect. A token is one VAE code of 16 pixels, without patches.

Text and images do not depend on the step or the generated image (`shared_prefix`): a batch is computed prompt by
prompt, since rotary positions depend on a text's length, and steps of the ODE share one prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from pacorl.io.images import as_rgb
from pacorl.models.policies.pipeline import guided, timestep_for
from pacorl.models.policies.policy import PolicyOptions, TrueGuidance
from pacorl.models.policies.qwen_image import QwenEditPolicy
from pacorl.models.policies.spec import PolicySpec
from pacorl.types import Conditioning, Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.models.policies.shared_prefix import KeysValues, PromptTokens

SLOT = 2
"""Side in image tokens of the square behind one token of the text encoder."""
LORA_TARGETS = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "img_mlp.proj", "img_mlp.gate_layer", "img_mlp.out",
)  # fmt: skip
"""All linear layers of the blocks, which text and images share."""


class QwenImage21Options(TrueGuidance):
    """The generator Qwen-Image 2.1, which makes sets and edits. It reads a text of any length."""

    kind: Literal["qwen_image_21"] = "qwen_image_21"
    checkpoint: str = "Qwen/Qwen-Image-2.1"
    """A diffusers folder, or a name on the hub."""


@dataclass(frozen=True, slots=True)
class PrefixedConditioning(Conditioning):
    """A prompt with its prefix, valid for the weights that computed it."""

    prefixes: Mapping[str, Sequence[KeysValues]] = field(default_factory=dict)
    """"" or "negative_" → keys and values per block."""


class QwenImage21Policy(QwenEditPolicy):
    """A `QwenImage21Pipeline` behind the policy seam."""

    lora_targets = LORA_TARGETS
    idle_in_last_block = ()
    patch = 1
    slot = SLOT
    forward_per = "prompt"
    max_sources = 10
    max_references = 10
    source_optional = True
    encoders: ClassVar[Mapping[str, str]] = {"text_encoder": "Qwen3-VL text encoder"}

    def __init__(self, pipeline: Any, options: PolicyOptions) -> None:
        from pacorl.models.policies.shared_prefix import share_prefix  # imports diffusers, which options do without

        if not pipeline.transformer.config.causal_condition:
            raise ValueError("causal_condition is false, so texts depend on the step; name a checkpoint with true")
        super().__init__(pipeline, options)
        share_prefix(pipeline.transformer)

    def _source_grid(self, prompt: Prompt, size: Size, sizes: Sequence[Size], outputs: tuple[Tensor, ...]) -> Tensor:
        """Return (1, K, 3): the first slot in the text, rows and columns of each image."""
        # The slots precede the text, so the negative text has the same.
        is_slot = outputs[2][0].cpu()
        grids = [self.token_grid(shown_size) for shown_size in sizes]
        counts = [rows * cols // SLOT**2 for rows, cols in grids]
        slots = is_slot.nonzero().flatten()
        # A different count would assign each slot to a wrong token.
        if len(slots) != sum(counts):
            raise ValueError(
                f"the images of {prompt.place} at the area of {size} take {len(slots)} tokens of the text encoder, "
                f"and {sum(counts)} are needed: its processor resizes images of this area; take another size, such as "
                "1024x1024"
            )
        source_grid = []
        for (rows, cols), of_image in zip(grids, slots.split(counts), strict=True):
            source_grid.append((int(of_image[0]), rows, cols))
        return torch.tensor([source_grid])

    def encode_pixels(self, pixels_BCHW: Tensor) -> Tensor:
        # The VAE also reads opacity: images here are opaque.
        opaque = F.pad(pixels_BCHW, (0, 0, 0, 0, 0, 1), value=1.0)
        return super().encode_pixels(opaque)

    def postprocess(self, pixels_BCHW: Tensor) -> list[Image]:
        # On white, as the text encoder sees images too.
        return [as_rgb(image, "the generated image") for image in super().postprocess(pixels_BCHW)]

    def unshifted_sigmas(self, num_steps: int) -> Any:
        sigmas = self.pipeline.config.sample_sigmas or ()
        if len(sigmas) == num_steps:
            return sigmas
        return super().unshifted_sigmas(num_steps)

    def collate(self, conditionings: Sequence[Conditioning]) -> Conditioning:
        """Return the conditioning of the prompt that all rows have, at batch 1."""
        assert all(conditioning is conditionings[0] for conditioning in conditionings), "a batch has one prompt"
        return super().collate(conditionings[:1])

    def with_prefix(self, conditioning: Conditioning, size: Size) -> Conditioning:
        prefixes = {}
        for name in ("", "negative_"):
            if f"{name}tokens" in conditioning.tensors:
                prefixes[name] = self.transformer(prompt=prompt_tokens(conditioning, name))[0]
        return PrefixedConditioning(conditioning.tensors, prefixes)

    def velocity(self, x_BNC: Tensor, sigma_B: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
        prefixes = conditioning.prefixes if isinstance(conditioning, PrefixedConditioning) else {}

        def read(name: str) -> Tensor:
            prompt = prompt_tokens(conditioning, name)
            return self.predict(
                prompt=prompt,
                hidden_states=x_BNC.to(prompt.text.dtype),
                timestep=timestep_for(sigma_B, prompt.text.dtype),
                grid=self.token_grid(size),
                prefix=prefixes.get(name, ()),
            )

        return guided(read, scale=self.options.true_cfg_scale)


def prompt_tokens(conditioning: Conditioning, name: str) -> PromptTokens:
    """Return the transformer's arguments of a text: "" is the prompt, "negative_" the negative prompt."""
    from pacorl.models.policies.shared_prefix import PromptTokens

    tensors = conditioning.tensors
    text = tensors[f"{name}tokens"]
    if "source" not in tensors:
        return PromptTokens(text, None, ())
    return PromptTokens(text, tensors["source"].to(text.dtype), tensors["source_grid"][0].tolist())


QWEN_IMAGE_21 = PolicySpec(
    options=QwenImage21Options,
    policy=QwenImage21Policy,
    pipeline="QwenImage21Pipeline",
    hub_name=r"qwen-image-2\.1",
    architecture="qwen_image_21.json",
    licence=("other", "qwen-research"),
    steps=40,
    parameters=7_115_124_736,
    vae_levels="dim_mult",
)
"""Its parameters are counted in diffusers' default configuration, which the published transformer has."""
