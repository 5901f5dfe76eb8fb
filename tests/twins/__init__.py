"""Twins: the released models in small, of the real classes with random weights.

Tokenizers are trained on texts. `python -m research.tiny` trains some of the twins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pacorl.io.pretrained import model_of
from pacorl.models.policies.klein import KLEIN
from pacorl.models.policies.qwen_image import QWEN_IMAGE
from pacorl.models.policies.qwen_image_21 import QWEN_IMAGE_21

from .parts import (
    CHAT_TEMPLATE,
    TEXT_WIDTH,
    TINY,
    clip_tokenizer_of,
    image_text_processor,
    qwen_tokenizer_of,
    t5_tokenizer_of,
    tiny_clip,
    tiny_qwen_vl,
    tiny_t5,
    tiny_vae,
)

if TYPE_CHECKING:
    from diffusers import (
        AutoencoderKL,
        Flux2KleinPipeline,
        FluxKontextPipeline,
        FluxPipeline,
        FluxTransformer2DModel,
        StableDiffusion3Pipeline,
    )


def tiny_flux_transformer(
    *, width: int = 128, heads: int = 4, double_blocks: int = 2, single_blocks: int = 4
) -> FluxTransformer2DModel:
    """A FLUX.1-dev transformer in small (guidance-distilled, as the real one)."""
    head = width // heads
    transformer: FluxTransformer2DModel = model_of(
        TINY["flux_transformer"],
        num_layers=double_blocks,
        num_single_layers=single_blocks,
        attention_head_dim=head,
        num_attention_heads=heads,
        # The real model's shares of 128: 16 for the number of the image, 56 each for row and column.
        axes_dims_rope=(head // 8, head * 7 // 16, head * 7 // 16),
    )
    for name, module in transformer.named_modules():
        # adaLN-zero (arXiv 2212.09748): every block starts as the identity, which a short training repays.
        if name == "proj_out" or (name.endswith(".linear") and ".norm" in f".{name}"):
            torch.nn.init.zeros_(module.weight)
            torch.nn.init.zeros_(module.bias)
    return transformer


def tiny_flux(texts: Sequence[str], *, vae: AutoencoderKL | None = None) -> FluxPipeline:
    """Build a small FLUX.1-dev pipeline, its tokenizers trained on `texts`."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    clip_tokenizer, t5_tokenizer = clip_tokenizer_of(texts), t5_tokenizer_of(texts)
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            shift=3.0,
            base_shift=0.5,
            max_shift=1.15,
            # 64 px and 128 px correspond to 256 px and 1024 px of the real model.
            base_image_seq_len=64,
            max_image_seq_len=256,
        ),
        vae=vae or tiny_vae(),
        text_encoder=tiny_clip(clip_tokenizer),
        tokenizer=clip_tokenizer,
        text_encoder_2=tiny_t5(t5_tokenizer),
        tokenizer_2=t5_tokenizer,
        transformer=tiny_flux_transformer(),
    )


def tiny_kontext(flux: Any) -> FluxKontextPipeline:
    """FLUX.1-Kontext-dev in small: a FLUX pipeline's components, which it then shares."""
    from diffusers import FluxKontextPipeline

    return FluxKontextPipeline(**{name: model for name, model in flux.components.items() if model is not None})


def tiny_sd3(texts: Sequence[str]) -> StableDiffusion3Pipeline:
    """Build a small Stable Diffusion 3.5 pipeline, its tokenizers trained on `texts`."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    clip_tokenizer, t5_tokenizer = clip_tokenizer_of(texts), t5_tokenizer_of(texts)
    # Half the width each: the pipeline concatenates the CLIPs and pads them to T5's width.
    half_clip = partial(tiny_clip, clip_tokenizer, width=TEXT_WIDTH // 2, architectures=["CLIPTextModelWithProjection"])
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),  # as published
        vae=tiny_vae(),
        text_encoder=half_clip(),
        tokenizer=clip_tokenizer,
        text_encoder_2=half_clip(),
        tokenizer_2=clip_tokenizer,
        text_encoder_3=tiny_t5(t5_tokenizer),
        tokenizer_3=t5_tokenizer,
        transformer=model_of(TINY["sd3_transformer"]),
    )


KLEIN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Qwen3's template, reduced to a single message without thinking."""


def tiny_klein(texts: Sequence[str]) -> Flux2KleinPipeline:
    """Build a small FLUX.2-klein pipeline, its tokenizer trained on `texts`."""
    from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline

    tokenizer = qwen_tokenizer_of(texts)
    tokenizer.chat_template = KLEIN_TEMPLATE
    vae = model_of(TINY["flux2_vae"])
    # Like trained statistics, a twin's must differ from zero, one and each other.
    torch.nn.init.normal_(vae.bn.running_mean, std=0.2)
    torch.nn.init.uniform_(vae.bn.running_var, 0.5, 2.0)
    return Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_config(KLEIN.parts["scheduler"]),
        vae=vae,
        text_encoder=model_of(
            TINY["qwen3"],
            vocab_size=len(tokenizer),
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
        tokenizer=tokenizer,
        transformer=model_of(TINY["flux2_transformer"]),
    )


# The pipelines cut off the first tokens of their template, 34 of Qwen-Image's and 64 of the editors', counted with
# Qwen's own tokenizer, in which each of these words is one token. They stand here often enough to become one in a tiny
# tokenizer too.
TEMPLATE_WORDS = 8 * (
    "user\nassistant",
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of "
    "the objects and background:",
)
EDIT_TEMPLATE_WORDS = 8 * (
    "user\nPicture",
    "system\nDescribe the key features of the input image (color, shape, size, texture, objects, background), then "
    "explain how the user's text instruction should alter or modify the image. Generate a new image that meets the "
    "user's requirements while maintaining consistency with the original input where appropriate.",
)


def tiny_qwen_image(texts: Sequence[str]) -> Any:
    """A whole Qwen-Image pipeline in small; the tokenizer knows the words of `texts`."""
    import diffusers

    tokenizer = qwen_tokenizer_of([*texts, *TEMPLATE_WORDS])
    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_config(QWEN_IMAGE.parts["scheduler"]),
        vae=model_of(TINY["qwen_image_vae"]),
        text_encoder=tiny_qwen_vl(tokenizer),
        tokenizer=tokenizer,
        transformer=model_of(TINY["qwen_image_transformer"]),
    )


def processor_of(texts: Sequence[str], image_options: Mapping[str, Any]) -> Any:
    """Build a processor whose tokenizer is trained on `texts`."""
    return image_text_processor(
        tokenizer=qwen_tokenizer_of(texts), image_options=image_options, chat_template=CHAT_TEMPLATE
    )


def tiny_qwen_edit(texts: Sequence[str], *, plus: bool = False) -> Any:
    """Build a small Qwen-Image-Edit pipeline, or its Plus variant, its tokenizer trained on `texts`."""
    import diffusers

    image_options = {"patch_size": 8, "merge_size": 2, "min_pixels": 32 * 32, "max_pixels": 128 * 128}
    processor = processor_of([*texts, *EDIT_TEMPLATE_WORDS], image_options)
    pipeline = diffusers.QwenImageEditPlusPipeline if plus else diffusers.QwenImageEditPipeline
    return pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_config(QWEN_IMAGE.parts["scheduler"]),
        vae=model_of(TINY["qwen_image_vae"]),
        text_encoder=tiny_qwen_vl(processor.tokenizer),
        tokenizer=processor.tokenizer,
        processor=processor,
        transformer=model_of(TINY["qwen_image_transformer"]),
    )


def tiny_qwen_image_21(texts: Sequence[str]) -> Any:
    """Build a small Qwen-Image 2.1 pipeline, its tokenizer trained on `texts`."""
    import diffusers

    options = {"patch_size": 16, "merge_size": 2, "min_pixels": 32 * 32, "max_pixels": 256 * 256}
    processor = processor_of(texts, options)
    return diffusers.QwenImage21Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_config(QWEN_IMAGE_21.parts["scheduler"]),
        vae=model_of(TINY["qwen_image_21_vae"]),
        text_encoder=tiny_qwen_vl(processor.tokenizer, "qwen3_vl"),
        processor=processor,
        transformer=model_of(TINY["qwen_image_21_transformer"]),
    )


TWINS: Mapping[str, Callable[[Sequence[str]], Any]] = {
    "flux": tiny_flux,
    "kontext": lambda texts: tiny_kontext(tiny_flux(texts)),
    "qwen_edit": tiny_qwen_edit,
    "qwen_edit_plus": partial(tiny_qwen_edit, plus=True),
    "qwen_image": tiny_qwen_image,
    "sd3": tiny_sd3,
    "klein": tiny_klein,
    "qwen_image_21": tiny_qwen_image_21,
}
"""`model.kind` → texts → a small pipeline, whose tokenizers are trained on the texts."""
