"""Qwen-Image-Edit and Qwen-Image-Edit-Plus as policies: images edited by an instruction.

A source is encoded twice: by the VAE, whose tokens follow the generated tokens in the sequence, and by the text
encoder, a Qwen2.5-VL that reads it with the instruction. A config's size is an area: the image has the (last) source's
aspect, each side a multiple of 32 pixels, like the pipelines at their 1024². The source is resized: for the VAE to the
image's size (further sources to the image's area, in their own aspects), and for the text encoder to the same (Edit) or
to at most 384² (Plus).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from pacorl.io.images import open_image, upright_size
from pacorl.models import twins
from pacorl.models.policies.pipeline import JOINT_ATTENTION, PipelinePolicy, check_alike, check_area, guided, pack
from pacorl.models.policies.policy import Parts, TrainingShift, TrueGuidance
from pacorl.models.policies.spec import PolicySpec
from pacorl.types import Conditioning, Prompt, Size

SIDE = 32
"""Divisor of an image's sides in pixels, by the pipelines' rule."""
CONDITION_AREA = 384 * 384
"""Area of a source for the text encoder of Plus; less if the generated image is smaller."""
INSTRUCTION_TOKENS = 128
"""Tokens of an edit's text in the memory plan: an instruction of a few sentences, and the template's rest."""

LORA_TARGETS = (
    *JOINT_ATTENTION,
    "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2",
)  # fmt: skip
"""FLUX's targets by the names of Qwen-Image's blocks. The released code names FLUX's feed-forward layers, which do not
exist here, and so trains only attention. To continue from its adapter, set `adapter.targets` to the first eight."""


class QwenEditOptions(TrueGuidance):
    """The generator Qwen-Image-Edit, which edits one image. It has no distilled guidance and reads any length."""

    kind: Literal["qwen_edit"] = "qwen_edit"
    checkpoint: str = "Qwen/Qwen-Image-Edit"

    @property
    def warning(self) -> str:
        """Advice to enable guidance, which this kind lacks without a negative prompt."""
        if self.negative_text is not None:
            return ""
        return (
            f"{self.checkpoint} is sampled without guidance, because true_cfg_scale is {self.true_cfg_scale:g} and no "
            "negative prompt is read; its pipeline's default is 4, at twice the forwards: set true_cfg_scale to 4"
        )


class QwenEditPlusOptions(QwenEditOptions):
    """The generator Qwen-Image-Edit-Plus, which edits one to three images."""

    kind: Literal["qwen_edit_plus"] = "qwen_edit_plus"  # type: ignore[assignment]
    checkpoint: str = "Qwen/Qwen-Image-Edit-2509"


class QwenEditPolicy(PipelinePolicy):
    """A `QwenImageEditPipeline` behind the policy seam."""

    training_shift = TrainingShift(rule="inference", source="not published; the shift of inference is taken")
    lora_targets: tuple[str, ...] = LORA_TARGETS
    idle_in_last_block: ClassVar[tuple[str, ...]] = (
        "attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2",
    )  # fmt: skip
    references: ClassVar[int] = 1
    model_name: ClassVar[str] = "Qwen-Image-Edit"
    encoders: ClassVar[Mapping[str, str]] = {"text_encoder": "Qwen2.5-VL text encoder"}
    encode_batch: ClassVar[int] = 1  # a source is of its own size
    condition_area: ClassVar[float] = math.inf
    """Largest area of a source for the text encoder, if below the generated image's."""

    @classmethod
    def components_from(cls, source: str) -> dict[str, Any]:
        """Load the image processor; the checkpoint's own requires torchvision, for unused videos."""
        from pacorl.io.processor import load_processor

        return {"processor": load_processor(source, subfolder="processor")}

    @classmethod
    def components_on_meta(cls, configs: Parts) -> dict[str, Any]:
        """Build the image processor, which determines the number of tokens of a source."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return {"processor": Qwen2VLImageProcessorPil(**configs["processor"])}

    @property
    def latent_channels(self) -> int:
        return int(self.pipeline.vae.config.z_dim)  # this VAE's name for it

    @classmethod
    def check_sides(cls, size: Size, *, step: int) -> None:
        check_area(size, step=max(step, SIDE))

    def size_of(self, prompt: Prompt, size: Size) -> Size:
        """Return the area of `size` in the aspect of the (last) source, each side a multiple of 32 pixels."""
        return sides_for(size.height * size.width, self.source_paths(prompt)[-1])

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt], size: Size) -> list[Conditioning]:
        """Encode prompts to one conditioning each, on the CPU.

        `tokens` (1, L, D) of the text encoder, which attends to the sources; `source` (1, M, C), the sources' own
        tokens; `source_grid` (1, K, 2), rows and columns of each of several sources; with true CFG `negative_tokens`.
        """
        return [self._encode(prompt, size) for prompt in prompts]

    def _encode(self, prompt: Prompt, size: Size) -> Conditioning:
        # The VAE's tokens. The image has the last source's aspect, so only the last source has the image's size.
        paths = self.source_paths(prompt)
        images = [open_image(path) for path in paths]
        sizes = [*(sides_for(size.height * size.width, path) for path in paths[:-1]), size]
        codes = [self.encode_image(image, vae_size) for image, vae_size in zip(images, sizes, strict=True)]

        # The text encoder's images.
        shown = []
        for path, image in zip(paths, images, strict=True):
            shown_size = self._shown_size(path, size)
            shown.append(self.pipeline.image_processor.resize(image, shown_size.height, shown_size.width))

        def read_text(text: str) -> Tensor:
            # Edit's pipeline takes one image, Plus's a list.
            image = shown if self.references > 1 else shown[0]
            tokens: Tensor = self.pipeline.encode_prompt(prompt=[text], image=image)[0]
            return tokens.cpu()

        tensors = {"tokens": read_text(prompt.text), "source": torch.cat(codes, 1)}
        if len(sizes) > 1:
            tensors["source_grid"] = torch.tensor([[self.token_grid(vae_size) for vae_size in sizes]])
        if self.options.negative_text is not None:
            tensors["negative_tokens"] = read_text(self.options.negative_text)
        return Conditioning(tensors)

    def _shown_size(self, path: Path, size: Size) -> Size:
        """Return the size of a source for the text encoder."""
        return size

    def encode_pixels(self, pixels_BCHW: Tensor) -> Tensor:
        # This VAE reads an image as a video of one frame.
        codes = self.pipeline.vae.encode(pixels_BCHW[:, :, None]).latent_dist.mode()
        mean, std = self._code_scale(codes)
        tokens: Tensor = pack(((codes - mean) / std)[:, :, 0])
        return tokens

    def _code_scale(self, codes_BCFHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of each of the VAE's channels, as (1, C, 1, 1, 1)."""
        config = self.pipeline.vae.config
        mean = codes_BCFHW.new_tensor(config.latents_mean)
        std = codes_BCFHW.new_tensor(config.latents_std)
        return mean[None, :, None, None, None], std[None, :, None, None, None]

    def collate(self, conditionings: Sequence[Conditioning]) -> Conditioning:
        """Collate one batch, on the device; shorter texts are padded with zeros, and a mask hides the padding."""
        check_alike(conditionings, positions="source_grid")
        batch: dict[str, Tensor] = {}
        for name in conditionings[0].tensors:
            rows = [conditioning.tensors[name] for conditioning in conditionings]
            if "tokens" in name:
                lengths = [len(row[0]) for row in rows]
                rows = [F.pad(row, (0, 0, 0, max(lengths) - row.shape[1])) for row in rows]
                if min(lengths) < max(lengths):  # the pipelines too drop an all-true mask
                    batch[f"{name}_mask"] = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
            batch[name] = torch.cat(rows)

        # The grid stays on the CPU: Python reads it in every forward, and reading from a GPU would synchronize.
        grid = batch.pop("source_grid", None)
        tensors = dict(self.on_device(batch).tensors)
        if grid is not None:
            tensors["source_grid"] = grid
        return Conditioning(tensors)

    def velocity(self, x_BNC: Tensor, sigma_B: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
        tensors = conditioning.tensors
        dtype = tensors["tokens"].dtype
        output = (1, *self.token_grid(size))  # frames, rows, columns
        grids = tensors["source_grid"][0].tolist() if "source_grid" in tensors else [output[1:]]

        def read(prefix: str) -> Tensor:
            predicted = self.predict(
                hidden_states=torch.cat([x_BNC.to(dtype), tensors["source"].to(dtype)], 1),
                timestep=sigma_B.to(dtype),
                guidance=None,
                encoder_hidden_states=tensors[f"{prefix}tokens"],
                encoder_hidden_states_mask=tensors.get(f"{prefix}tokens_mask"),
                img_shapes=[[output, *((1, *grid) for grid in grids)]] * len(x_BNC),
            )
            return predicted[:, : x_BNC.shape[1]]

        return guided(read, scale=self.options.true_cfg_scale, keep_norm=True)

    def decode_codes(self, codes_BCHW: Tensor) -> Tensor:
        codes = codes_BCHW[:, :, None].to(self.pipeline.vae.dtype)
        mean, std = self._code_scale(codes)
        pixels: Tensor = self.pipeline.vae.decode(codes * std + mean, return_dict=False)[0][:, :, 0]
        return pixels

    def text_shapes(self, size: Size) -> dict[str, tuple[int, ...]]:
        # The source's tokens are among the text's.
        return {"tokens": (self._text_length(size), self.pipeline.transformer.config.joint_attention_dim)}

    def _text_length(self, size: Size) -> int:
        from pacorl.io.processor import image_tokens

        side = max(1, round(min(self.condition_area, size.height * size.width) ** 0.5))
        options = self.pipeline.processor.to_dict()
        return image_tokens(Size(side, side), options.get("image_processor", options)) + INSTRUCTION_TOKENS

    def text_pass(self, size: Size, *, prompts: int) -> Callable[[], Any]:
        encoder = self.pipeline.text_encoder
        # Without the vision tower: it reads the values of its images' grids, which meta tensors lack.
        language = encoder.model.language_model
        tokens = self._text_length(size)
        embedded = torch.empty(prompts, tokens, language.config.hidden_size, device=self.device, dtype=encoder.dtype)
        positions = torch.zeros(3, prompts, tokens, device=self.device, dtype=torch.long)  # of time, row and column
        return partial(
            language, inputs_embeds=embedded, position_ids=positions, use_cache=False, output_hidden_states=True
        )


class QwenEditPlusPolicy(QwenEditPolicy):
    """A `QwenImageEditPlusPipeline` behind the policy seam."""

    references: ClassVar[int] = 3  # the number in its training
    model_name: ClassVar[str] = "Qwen-Image-Edit-Plus"
    condition_area: ClassVar[float] = CONDITION_AREA

    def _shown_size(self, path: Path, size: Size) -> Size:
        return sides_for(min(CONDITION_AREA, size.height * size.width), path)


def sides_for(area: int, path: Path) -> Size:
    """Compute the size of about `area` pixels in the aspect of a source, by the pipelines' rule."""
    source = upright_size(path)
    # In the pipelines' order of operations: another would round a side of exactly half a step differently.
    aspect = source.width / source.height
    width = math.sqrt(area * aspect)
    size = Size(*(round(side / SIDE) * SIDE for side in (width / aspect, width)))
    if not size.height or not size.width:
        raise ValueError(
            f"source {path} is {source}, too long to be drawn on {area} pixels with sides of multiples of {SIDE}; "
            "crop it, or raise the size"
        )
    return size


# The pipelines cut off the first 64 tokens of their template, counted with Qwen's own tokenizer, where each of these
# words is one token. They are repeated often enough to become single tokens of a tiny tokenizer too.
EDIT_TEMPLATE_WORDS = 8 * (
    "user\nPicture",
    "system\nDescribe the key features of the input image (color, shape, size, texture, objects, background), then "
    "explain how the user's text instruction should alter or modify the image. Generate a new image that meets the "
    "user's requirements while maintaining consistency with the original input where appropriate.",
)


def tiny_qwen_edit(texts: Sequence[str], *, plus: bool = False) -> Any:
    """Build a small Qwen-Image-Edit pipeline, or its Plus variant, its tokenizer trained on `texts`."""
    import diffusers

    from pacorl.io.processor import image_text_processor  # which imports transformers, for seconds

    processor = image_text_processor(
        tokenizer=twins.qwen_tokenizer_of([*texts, *EDIT_TEMPLATE_WORDS]),
        image_options={"patch_size": 8, "merge_size": 2, "min_pixels": 32 * 32, "max_pixels": 128 * 128},
        chat_template=twins.CHAT_TEMPLATE,
    )
    pipeline = diffusers.QwenImageEditPlusPipeline if plus else diffusers.QwenImageEditPipeline
    return pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_config(QWEN_EDIT.parts["scheduler"]),
        vae=twins.model_of(twins.TINY["qwen_image_vae"]),
        text_encoder=twins.tiny_qwen_vl(processor.tokenizer),
        tokenizer=processor.tokenizer,
        processor=processor,
        transformer=twins.model_of(twins.TINY["qwen_image_transformer"]),
    )


QWEN_EDIT = PolicySpec(
    options=QwenEditOptions,
    policy=QwenEditPolicy,
    pipeline="QwenImageEditPipeline",
    hub_name="qwen-image-edit",
    architecture="qwen_image.json",
    licence=("apache-2.0", ""),
    twin=tiny_qwen_edit,
    steps=50,
    parameters=20_430_401_088,
    vae_levels="dim_mult",
)
QWEN_EDIT_PLUS = replace(
    QWEN_EDIT,
    options=QwenEditPlusOptions,
    policy=QwenEditPlusPolicy,
    pipeline="QwenImageEditPlusPipeline",
    hub_name="qwen-image-edit.*(plus|2509|2511)",
    twin=partial(tiny_qwen_edit, plus=True),
    steps=40,
    steps_source="the example on the model card of Qwen-Image-Edit-2509",
)
