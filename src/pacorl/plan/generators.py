"""Generators without weights: each kind's policy on the meta device, and what its encoders would give it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pacorl.plan.sources import Parts
from pacorl.policies.flux import FluxPolicy
from pacorl.policies.kontext import KontextPolicy
from pacorl.policies.qwen_image import CONDITION_AREA, QwenEditPolicy
from pacorl.policies.tokens import token_grid
from pacorl.types import Conditioning, Size

META = torch.device("meta")

Generator = FluxPolicy | KontextPolicy | QwenEditPolicy

INSTRUCTION_WORDS = 128
"""Tokens of an edit's text for Qwen-Image: an instruction of a few sentences, and what is left of the template."""


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with its parameters in `dtype`."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module


def flux_on_meta(parts: Parts, *, dtype: torch.dtype, **options: Any) -> FluxPolicy:
    """A FLUX policy from the configs of its parts; it has no tokenizers."""
    from diffusers import FluxPipeline

    return FluxPolicy(FluxPipeline(**_flux_modules(parts, dtype)), **options)


def kontext_on_meta(parts: Parts, *, dtype: torch.dtype, **options: Any) -> KontextPolicy:
    """A Kontext policy from the configs of its parts; it has no tokenizers."""
    from diffusers import FluxKontextPipeline

    return KontextPolicy(FluxKontextPipeline(**_flux_modules(parts, dtype)), **options)


def _flux_modules(parts: Parts, dtype: torch.dtype) -> dict[str, Any]:
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    with META:
        modules = {
            "transformer": FluxTransformer2DModel.from_config(dict(parts["transformer"])),
            "vae": AutoencoderKL.from_config(dict(parts["vae"])),
            "text_encoder": CLIPTextModel(CLIPTextConfig(**parts["text_encoder"])),
            "text_encoder_2": T5EncoderModel(T5Config(**parts["text_encoder_2"])),
        }
    for module in modules.values():
        cast(module, dtype)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return {**modules, "scheduler": scheduler, "tokenizer": None, "tokenizer_2": None}


def qwen_on_meta(parts: Parts, *, dtype: torch.dtype, plus: bool = False, **options: Any) -> QwenEditPolicy:
    """A Qwen-Image-Edit policy from the configs of its parts; its processor is for images alone."""
    import diffusers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    with META:
        modules = {
            "transformer": diffusers.QwenImageTransformer2DModel.from_config(dict(parts["transformer"])),
            "vae": diffusers.AutoencoderKLQwenImage.from_config(dict(parts["vae"])),
        }
    for module in modules.values():
        cast(module, dtype)
    pipeline = diffusers.QwenImageEditPlusPipeline if plus else diffusers.QwenImageEditPipeline
    return QwenEditPolicy(
        pipeline(
            **modules,
            text_encoder=vlm_on_meta(parts["text_encoder"], dtype=dtype),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            tokenizer=None,
            processor=Qwen2VLImageProcessorPil(**parts["processor"]),
        ),
        **options,
    )


def vlm_on_meta(options: Mapping[str, Any], *, dtype: torch.dtype) -> nn.Module:
    """A vision-language model (a judge, or Qwen-Image's text encoder) from its config.json."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    options = dict(options)
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    with META:
        model: nn.Module = AutoModelForImageTextToText.from_config(config)
    return cast(model, dtype).requires_grad_(False).eval()


def clip_count(options: Mapping[str, Any]) -> int:
    """Parameters of a CLIP model from its config.json."""
    from transformers import CLIPConfig, CLIPModel

    with META:
        model = CLIPModel(CLIPConfig(**options))
    return sum(parameter.numel() for parameter in model.parameters())


ON_META: dict[str, Callable[..., Generator]] = {
    "flux": flux_on_meta,
    "kontext": kontext_on_meta,
    "qwen_edit": qwen_on_meta,
    "qwen_edit_plus": partial(qwen_on_meta, plus=True),
}


# --- what goes in ----------------------------------------------------------------------------------------------


def text_encoders(policy: Generator) -> dict[str, nn.Module]:
    """What `free_encoders` moves off the device, by name."""
    pipeline: Any = policy.pipeline
    if isinstance(policy, QwenEditPolicy):
        return {"Qwen2.5-VL text encoder": pipeline.text_encoder}
    return {"CLIP text encoder": pipeline.text_encoder, "T5 text encoder": pipeline.text_encoder_2}


def paintable(policy: Generator, size: Size) -> Size:
    """A config's size on the policy's grid: what a square source's edit takes, and much the same in any other shape."""
    step = policy.token_pixels
    return Size(*(max(step, round(side / step) * step) for side in (size.height, size.width)))


def text_length(policy: Generator, size: Size) -> int:
    """Tokens of text that the transformer reads; for Qwen-Image the source's are among them."""
    if not isinstance(policy, QwenEditPolicy):
        return policy.max_sequence_length
    area = min(CONDITION_AREA, size.height * size.width) if policy.plus else size.height * size.width
    side = max(1, round(area**0.5))
    options = policy.pipeline.processor.to_dict()
    return question_tokens(Size(side, side), options, images=1, max_sequence_length=INSTRUCTION_WORDS)


def conditioning_on_meta(policy: Generator, *, size: Size, batch: int) -> Conditioning:
    """What `encode` and `collate` would give for `batch` prompts."""
    config: Any = policy.transformer.config
    dtype = policy.pipeline.text_encoder.dtype
    shapes: dict[str, tuple[int, ...]] = {"tokens": (text_length(policy, size), config.joint_attention_dim)}
    if not isinstance(policy, QwenEditPolicy):
        shapes["pooled"] = (config.pooled_projection_dim,)
    if policy.true_cfg_scale > 1:
        shapes |= {f"negative_{name}": shape for name, shape in shapes.items()}
    if not isinstance(policy, FluxPolicy):
        rows, cols = token_grid(size, step=policy.token_pixels)
        shapes["source"] = (rows * cols, config.in_channels)
    return Conditioning({name: torch.empty(batch, *shape, device=META, dtype=dtype) for name, shape in shapes.items()})


def encodings(policy: Generator, size: Size) -> list[Callable[[], Any]]:
    """The passes that encode one prompt: the largest text encoder's, and the VAE's over a source."""
    pipeline: Any = policy.pipeline
    runs: list[Callable[[], Any]] = []
    if isinstance(policy, QwenEditPolicy):
        runs.append(_vlm_pass(pipeline.text_encoder, tokens=text_length(policy, size)))
    else:
        ids = torch.zeros(1, policy.max_sequence_length, device=META, dtype=torch.long)
        runs.append(partial(pipeline.text_encoder_2, ids))
    if not isinstance(policy, FluxPolicy):
        frames = (1,) if isinstance(policy, QwenEditPolicy) else ()
        pixels = torch.empty(1, 3, *frames, size.height, size.width, device=META, dtype=pipeline.vae.dtype)
        runs.append(partial(pipeline.vae.encode, pixels))
    return runs


def _vlm_pass(model: Any, *, tokens: int) -> Callable[[], Any]:
    language = model.model.language_model
    embedded = torch.empty(1, tokens, language.config.hidden_size, device=META, dtype=model.dtype)
    positions = torch.zeros(3, 1, tokens, device=META, dtype=torch.long)
    return partial(language, inputs_embeds=embedded, position_ids=positions, use_cache=False, output_hidden_states=True)


def codes_on_meta(policy: Generator, *, size: Size, batch: int) -> Tensor:
    """VAE codes of `batch` pictures, as the decoder takes them."""
    pipeline: Any = policy.pipeline
    height, width = size.height // pipeline.vae_scale_factor, size.width // pipeline.vae_scale_factor
    qwen = isinstance(policy, QwenEditPolicy)
    shape = (pipeline.vae.config.z_dim, 1) if qwen else (pipeline.vae.config.latent_channels,)
    return torch.empty(batch, *shape, height, width, device=META, dtype=pipeline.vae.dtype)


def question_tokens(image: Size, options: Mapping[str, Any], *, images: int, max_sequence_length: int) -> int:
    """Tokens of a text about `images` images, as Qwen2-VL's image processor (its options) resizes them."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    side, bounds = options["patch_size"] * options["merge_size"], options.get("size", {})
    height, width = smart_resize(
        image.height,
        image.width,
        factor=side,
        min_pixels=options.get("min_pixels") or bounds["shortest_edge"],
        max_pixels=options.get("max_pixels") or bounds["longest_edge"],
    )
    return images * int(height // side) * int(width // side) + max_sequence_length
