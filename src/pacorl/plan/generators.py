"""Generators without weights, on the meta device, and empty inputs of their forwards.

A policy's own file has no part in this: the shapes that its encoders give a prompt are listed here, kind by kind.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from pacorl.io.pretrained import model_of
from pacorl.io.processor import image_tokens
from pacorl.models.policies.flux import FluxPolicy
from pacorl.models.policies.klein import KleinPolicy
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.models.policies.policy import CLASS_KEYS, WITHOUT_WEIGHTS, Parts, PolicyOptions
from pacorl.models.policies.qwen_image import QwenEditPolicy
from pacorl.models.policies.qwen_image_21 import SLOT, QwenImage21Policy
from pacorl.models.policies.sd3 import SD3Policy
from pacorl.models.policies.spec import PolicySpec
from pacorl.plan.ledger import META
from pacorl.types import Conditioning, Size

INSTRUCTION_TOKENS = 128
"""Tokens of an edit's text for Qwen-Image-Edit: an instruction of a few sentences, and the template's rest."""
TEXT_TOKENS = 512
"""Tokens of a text for Qwen-Image 2.1, which reads texts of any length."""


def model_on_meta(config: Mapping[str, Any], *, dtype: torch.dtype) -> nn.Module:
    """Build a frozen model without weights, from a config as for `model_of`; `dtype` is the type of saved tensors."""
    import diffusers.models.modeling_utils  # noqa: F401 - keeps torch's functions that it finds, and restores these
    from transformers.initialization import no_init_weights

    with META, no_init_weights():  # drawing weights that hold no values would take as long as the rest
        model: nn.Module = model_of(config)
    tie_weights = getattr(model, "tie_weights", None)
    if tie_weights:  # left out together with the drawing
        tie_weights()
    # Buffers among them: the positions of Stable Diffusion 3.5 are a table of 432 MiB in bf16.
    for tensor in model.state_dict(keep_vars=True).values():
        tensor.data = tensor.data.to(dtype if tensor.is_floating_point() else tensor.dtype)
    return model.requires_grad_(False).eval()


def policy_on_meta(spec: PolicySpec, options: PolicyOptions, configs: Parts | None = None) -> PipelinePolicy:
    """Build a policy without weights or tokenizers; by default from the published configs."""
    configs = configs or spec.parts
    components: dict[str, Any] = {"scheduler": model_of(spec.parts["scheduler"])}
    for name in configs.keys() - WITHOUT_WEIGHTS:
        # The published class: a checkpoint's config.json may lack it.
        classes = {key: spec.parts[name][key] for key in CLASS_KEYS if key in spec.parts[name]}
        components[name] = model_on_meta({**configs[name], **classes}, dtype=getattr(torch, options.dtype))

    # Absent components are None. Qwen-Image's config has the processor of its editors.
    pipeline = spec.pipeline_type
    names = inspect.signature(pipeline).parameters
    if "processor" in names:
        components["processor"] = _processor(spec, configs["processor"])
    absent = [name for name in names if name not in components]
    policy = spec.policy(pipeline(**components, **dict.fromkeys(absent)), options)
    policy.place_encoders(META)
    policy.place_transformer(META)
    return policy


class NoTokenizer:
    """Processor of Qwen-Image 2.1, whose pipeline reads its template at once."""

    tokenizer = SimpleNamespace(encode=lambda text: [0])

    def apply_chat_template(self, *_: Any, **__: Any) -> list[list[int]]:
        return [[]]


def _processor(spec: PolicySpec, options: Mapping[str, Any]) -> Any:
    """Build the processor of a pipeline, whose image options decide the number of a source's tokens."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return NoTokenizer() if issubclass(spec.policy, QwenImage21Policy) else Qwen2VLImageProcessorPil(**options)


@dataclass
class Inputs:
    """Empty inputs of a policy's forwards, for prompts with a number of images."""

    policy: PipelinePolicy
    images: int | None = None
    """Sources and references of a prompt; None for an editor's single source, or prompts without images."""

    @property
    def count(self) -> int:
        """Number of images of a prompt."""
        least = 0 if self.policy.source_optional else min(1, self.policy.max_sources)
        return least if self.images is None else self.images

    def conditioning(self, size: Size, *, batch: int) -> Conditioning:
        """Build what `encode` and `collate` make of `batch` prompts, as empty tensors."""
        policy = self.policy
        config: Any = policy.pipeline.transformer.config
        is_shared = isinstance(policy, QwenImage21Policy)  # all rows share the conditioning of one prompt

        # Texts.
        width = config.context_in_dim if is_shared else config.joint_attention_dim
        shapes: dict[str, tuple[int, ...]] = {"tokens": (self._text_tokens(size), width)}
        if isinstance(policy, FluxPolicy | SD3Policy):
            shapes["pooled"] = (config.pooled_projection_dim,)
        if policy.options.negative_text is not None:
            shapes |= {f"negative_{name}": shape for name, shape in shapes.items()}

        # Images, and their positions.
        if self.count:
            count = 1 if policy.stitched else self.count
            tokens = count * math.prod(policy.token_grid(size))
            shapes["source"] = (tokens, policy.patch**2 * policy.latent_channels)
            if isinstance(policy, KleinPolicy):
                shapes["source_ids"] = (tokens, 4)

        rows, dtype = 1 if is_shared else batch, policy.pipeline.vae.dtype
        tensors = {name: torch.empty(rows, *shape, device=policy.device, dtype=dtype) for name, shape in shapes.items()}
        if is_shared and self.count:
            grids = [(image * self._slots(size), *policy.token_grid(size)) for image in range(self.count)]
            tensors["source_grid"] = torch.tensor([grids])
        return Conditioning(tensors)

    def text_pass(self, size: Size, *, prompts: int) -> Callable[[], Any]:
        """Prepare a pass of the largest text encoder over this number of prompts."""
        encoder = getattr(self.policy.pipeline, self.policy.long_encoder or "text_encoder")
        # Without a vision tower: it reads the values of its images' grids, which meta tensors do not have.
        model = getattr(getattr(encoder, "model", None), "language_model", encoder)
        shape = (prompts, self._text_tokens(size))
        embedded = torch.empty(*shape, model.config.hidden_size, device=META, dtype=encoder.dtype)
        if model.config.model_type == "t5":
            return partial(model, inputs_embeds=embedded)
        # Positions and the full mask: making them from rows would read values of meta tensors.
        mask = torch.ones(prompts, 1, shape[1], shape[1], device=META, dtype=torch.bool)
        positions = torch.zeros(*shape, device=META, dtype=torch.long)
        options = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
        return partial(model, inputs_embeds=embedded, output_hidden_states=True, **options)

    def _text_tokens(self, size: Size) -> int:
        """Count the tokens of a text, among which some encoders have those of its images."""
        policy = self.policy
        if isinstance(policy, QwenImage21Policy):
            return self.count * self._slots(size) + TEXT_TOKENS
        if isinstance(policy, QwenEditPolicy):
            # A square source: other shapes of the area have nearly as many tokens.
            side = max(1, round(min(policy.condition_area, size.height * size.width) ** 0.5))
            options = policy.pipeline.processor.to_dict()
            tokens = image_tokens(Size(side, side), options.get("image_processor", options))
            return self.count * tokens + INSTRUCTION_TOKENS
        return int(policy.clip_tokens + policy.options.max_sequence_length)

    def _slots(self, size: Size) -> int:
        """Count the text encoder's tokens of an image in Qwen-Image 2.1."""
        rows, cols = self.policy.token_grid(size)
        return rows * cols // SLOT**2
