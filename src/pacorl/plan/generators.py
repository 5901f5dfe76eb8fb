"""Generators without weights, on the meta device, and empty inputs of their forwards.

A policy's own file has no part in this: the shapes that its encoders give a prompt are listed here, kind by kind.
"""

import inspect
import math
from collections.abc import Mapping
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
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return model.requires_grad_(False).eval()


def policy_on_meta(spec: PolicySpec, options: PolicyOptions, configs: Parts | None = None) -> PipelinePolicy:
    """Build a policy without weights or tokenizers; by default from the published configs."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    configs = configs or spec.parts
    components: dict[str, Any] = {"scheduler": model_of(spec.parts["scheduler"])}
    for name, published in spec.parts.items():
        if name not in WITHOUT_WEIGHTS:
            # The published class: a checkpoint's config.json may lack it.
            classes = {key: published[key] for key in CLASS_KEYS if key in published}
            components[name] = model_on_meta({**configs[name], **classes}, dtype=getattr(torch, options.dtype))

    # Absent components are None. Qwen-Image's config has the processor of its editors.
    pipeline = spec.pipeline_type
    arguments = dict.fromkeys(inspect.signature(pipeline).parameters) | components
    if "processor" in arguments:
        is_read = issubclass(spec.policy, QwenImage21Policy)  # its template, at once
        # The image options decide the number of a source's tokens.
        arguments["processor"] = NoTokenizer() if is_read else Qwen2VLImageProcessorPil(**configs["processor"])
    policy = spec.policy(pipeline(**arguments), options)
    policy.place_encoders(META)
    policy.place_transformer(META)
    return policy


class NoTokenizer:
    """Processor of Qwen-Image 2.1, whose pipeline reads its template at once."""

    tokenizer = SimpleNamespace(encode=lambda text: [0])

    def apply_chat_template(self, *_: Any, **__: Any) -> list[list[int]]:
        return [[]]


@dataclass
class Inputs:
    """Empty inputs of a policy's forwards, for prompts with a number of images."""

    policy: PipelinePolicy
    images: int = 0
    """Sources and references of a prompt."""

    def conditioning(self, size: Size, *, batch: int) -> Conditioning:
        """Build the output of `encode` and `collate` for `batch` prompts, as empty tensors."""
        policy = self.policy
        config: Any = policy.pipeline.transformer.config
        is_shared = isinstance(policy, QwenImage21Policy)  # all rows share the conditioning of one prompt
        rows = 1 if is_shared else batch
        empty = partial(torch.empty, rows, device=policy.device, dtype=policy.pipeline.vae.dtype)

        # Texts.
        width = config.context_in_dim if is_shared else config.joint_attention_dim
        tensors = {"tokens": empty(self.text_tokens(size), width)}
        if isinstance(policy, FluxPolicy | SD3Policy):
            tensors["pooled"] = empty(config.pooled_projection_dim)
        if policy.options.negative_text is not None:
            tensors |= {f"negative_{name}": tensor for name, tensor in tensors.items()}

        # Images, and their positions.
        if self.images:
            tokens = (1 if policy.stitched else self.images) * math.prod(policy.token_grid(size))
            tensors["source"] = empty(tokens, policy.patch**2 * policy.latent_channels)
            if isinstance(policy, KleinPolicy):
                tensors["source_ids"] = empty(tokens, 4)
            if isinstance(policy, QwenEditPolicy):
                grid = policy.token_grid(size)
                grids = [(image * self._slots(size), *grid) if is_shared else grid for image in range(self.images)]
                tensors["source_grid"] = torch.tensor([grids])
        return Conditioning(tensors)

    def text_tokens(self, size: Size) -> int:
        """Count the tokens of a text; some encoders include its images' tokens."""
        policy = self.policy
        if isinstance(policy, QwenImage21Policy):
            return self.images * self._slots(size) + TEXT_TOKENS
        if isinstance(policy, QwenEditPolicy):
            # A square source: other shapes of the area have nearly as many tokens.
            side = max(1, round(min(policy.condition_area, size.height * size.width) ** 0.5))
            processor = policy.pipeline.processor
            tokens = image_tokens(Size(side, side), getattr(processor, "image_processor", processor).to_dict())
            return self.images * tokens + INSTRUCTION_TOKENS
        return int(policy.clip_tokens + policy.options.max_sequence_length)

    def _slots(self, size: Size) -> int:
        """Count the text encoder's tokens of an image in Qwen-Image 2.1."""
        rows, cols = self.policy.token_grid(size)
        return rows * cols // SLOT**2
