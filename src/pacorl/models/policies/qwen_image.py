"""Qwen-Image as a policy, and Qwen-Image-Edit and Qwen-Image-Edit-Plus, which edit images by an instruction.

They share the transformer, the VAE and the rule of guidance (`QwenImagePolicy`). An editor's source is seen twice: by
the VAE, whose tokens follow the generated tokens in the sequence, and by the text encoder, a Qwen2.5-VL that reads it
with the instruction. A config's size is an area for the editors: the image has the (last) source's aspect, each side a
multiple of 32 pixels, as the pipelines do at their 1024². The source is resized: for the VAE to the image's
size (a further source to the image's area, in its own aspect), and for the text encoder to the same (Edit) or to 384²
at most (Plus). Plus also takes references of characters, which it reads like further sources. Without a source the
image has the config's size.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from pacorl.io.images import open_image, upright_size
from pacorl.models.policies.pipeline import JOINT_ATTENTION, PipelinePolicy, best_sides, guided, pack, timestep_for
from pacorl.models.policies.policy import TrueGuidance
from pacorl.models.policies.spec import PolicySpec
from pacorl.types import Conditioning, Prompt, Size

SIDE = 32
"""Divisor of an image's sides in pixels, by the pipelines' rule."""
CONDITION_AREA = 384 * 384
"""Area of a source for the text encoder of Plus; less if the generated image is smaller."""
LORA_TARGETS = (
    *JOINT_ATTENTION,
    "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2",
)  # fmt: skip
"""FLUX's targets by the names of Qwen-Image's blocks. The released code names FLUX's feed-forward layers, which do not
exist here, and so trains only attention. To continue from its adapter, set `adapter.targets` to the first eight."""


class QwenImageOptions(TrueGuidance):
    """The generator Qwen-Image, which makes sets."""

    kind: Literal["qwen_image"] = "qwen_image"
    checkpoint: str = "Qwen/Qwen-Image"
    """A diffusers folder, or a name on the hub."""
    max_sequence_length: int = Field(512, ge=1, le=1024)
    """Text tokens per prompt, the end of the chat template included."""


class QwenEditOptions(TrueGuidance):
    """The generator Qwen-Image-Edit, which edits one image. It reads a text of any length."""

    kind: Literal["qwen_edit"] = "qwen_edit"
    checkpoint: str = "Qwen/Qwen-Image-Edit"
    """A diffusers folder, or a name on the hub."""


class QwenEditPlusOptions(QwenEditOptions):
    """The generator Qwen-Image-Edit-Plus, which edits one to three images."""

    kind: Literal["qwen_edit_plus"] = "qwen_edit_plus"  # type: ignore[assignment]
    checkpoint: str = "Qwen/Qwen-Image-Edit-2509"
    """A diffusers folder, or a name on the hub."""


class QwenImagePolicy(PipelinePolicy):
    """A `QwenImagePipeline` behind the policy seam, and the base of the editors."""

    training_shift = "inference"  # that of training is not published
    lora_targets: tuple[str, ...] = LORA_TARGETS
    idle_in_last_block: tuple[str, ...] = (
        "attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2",
    )  # fmt: skip
    encoders: ClassVar[Mapping[str, str]] = {"text_encoder": "Qwen2.5-VL text encoder"}
    long_encoder = "text_encoder"
    encode_batch = 1
    """One: of a batch the pipeline pads the shorter texts, and these rows would keep their padding without a mask."""

    @property
    def latent_channels(self) -> int:
        return int(self.pipeline.vae.config.z_dim)  # this VAE's name for it

    def in_template(self, text: str) -> str:
        return str(self.pipeline.prompt_template_encode.format(text))

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        # The pipeline drops the beginning of its template, and the limit counts the end.
        return [count - self.pipeline.prompt_template_encode_start_idx for count in super().count_tokens(texts)]

    def encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        """Encode one text as `tokens` (1, L, D)."""
        tokens, _ = self.pipeline.encode_prompt(texts, max_sequence_length=self.options.max_sequence_length)
        return {"tokens": tokens}

    def _code_scale(self, codes_BCFHW: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each of the VAE's channels, as (1, C, 1, 1, 1)."""
        config = self.pipeline.vae.config
        mean, std = codes_BCFHW.new_tensor(config.latents_mean), codes_BCFHW.new_tensor(config.latents_std)
        return mean[None, :, None, None, None], std[None, :, None, None, None]

    def collate(self, conditionings: Sequence[Conditioning]) -> Conditioning:
        """Collate one batch; shorter texts are padded with zeros, and a mask hides the padding."""
        batch: dict[str, Tensor] = {}
        for name in conditionings[0].tensors:
            rows = [conditioning.tensors[name] for conditioning in conditionings]
            if "tokens" in name:
                lengths = [len(row[0]) for row in rows]
                rows = [F.pad(row, (0, 0, 0, max(lengths) - row.shape[1])) for row in rows]
                if min(lengths) < max(lengths):  # the pipelines too drop a mask of ones
                    batch[f"{name}_mask"] = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
            batch[name] = torch.cat(rows)
        # Numbers that Python reads in every forward stay here: reading them off a card would wait for it.
        grids_here = {name: batch.pop(name) for name in ["source_grid"] if name in batch}
        return Conditioning({**self.on_device(batch).tensors, **grids_here})

    def velocity(self, x_BNC: Tensor, sigma_B: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
        tensors = conditioning.tensors
        dtype = tensors["tokens"].dtype
        output = (1, *self.token_grid(size))  # frames, rows, columns
        # Generated tokens first, then the tokens of each source, in one sequence.
        images = [x_BNC.to(dtype)]
        grids: list[Sequence[int]] = []
        if "source" in tensors:
            images.append(tensors["source"].to(dtype))
            grids = tensors["source_grid"][0].tolist()

        def read(prefix: str) -> Tensor:
            predicted = self.predict(
                hidden_states=torch.cat(images, 1),
                timestep=timestep_for(sigma_B, dtype),
                guidance=None,
                encoder_hidden_states=tensors[f"{prefix}tokens"],
                encoder_hidden_states_mask=tensors.get(f"{prefix}tokens_mask"),
                img_shapes=[[output, *((1, *grid) for grid in grids)]] * len(x_BNC),
            )
            return predicted[:, : x_BNC.shape[1]]

        return guided(read, scale=self.options.true_cfg_scale, keep_norm=True)

    def encode_pixels(self, pixels_BCHW: Tensor) -> Tensor:
        # This VAE reads an image as a video of one frame.
        codes = self.pipeline.vae.encode(pixels_BCHW[:, :, None]).latent_dist.mode()
        mean, std = self._code_scale(codes)
        return pack(((codes - mean) / std)[:, :, 0], patch=self.patch)

    def decode_codes(self, codes_BCHW: Tensor) -> Tensor:
        codes = codes_BCHW[:, :, None].to(self.pipeline.vae.dtype)
        mean, std = self._code_scale(codes)
        pixels: Tensor = self.pipeline.vae.decode(codes * std + mean, return_dict=False)[0][:, :, 0]
        return pixels


class QwenEditPolicy(QwenImagePolicy):
    """A `QwenImageEditPipeline` behind the policy seam."""

    max_sources = 1
    long_encoder = ""
    condition_area = math.inf
    """Largest area of a source for the text encoder; infinite if that sees it as the VAE does."""

    @classmethod
    def components_from(cls, source: str) -> dict[str, Any]:
        """Load the image processor; the checkpoint's own requires torchvision, for unused videos."""
        from pacorl.io.processor import load_processor

        return {"processor": load_processor(source, subfolder="processor")}

    def edit_size(self, sources: Sequence[Path], area: int) -> Size:
        """Return an area in the aspect of the (last) source, by 32 pixels."""
        return best_sides(area, upright_size(sources[-1]), step=SIDE, rule=sides_for(area, sources[-1]))

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt], size: Size) -> list[Conditioning]:
        """Encode prompts to one conditioning each, on the CPU.

        `tokens` (1, L, D) of the text encoder, which attends to the images; `source` (1, M, C), the images' own
        tokens; `source_grid` (1, K, 2), rows and columns of each; with true CFG `negative_tokens`.
        """
        encoded = []
        for prompt in prompts:
            # Each image as the VAE reads it, and as the text encoder does.
            codes = []
            shown = []
            sizes = self.image_sizes(prompt, size)
            for path, read, seen in zip(self.image_paths(prompt), sizes, self.shown_sizes(prompt, size), strict=True):
                picture = open_image(path)
                codes.append(self.encode_image(picture, read))
                shown.append(self.pipeline.image_processor.resize(picture, seen.height, seen.width))

            # Edit's pipeline takes one image, others a list.
            image: Any = shown or None
            if self.max_sources == 1:
                image = shown[0]
            outputs = {"tokens": self.pipeline.encode_prompt(prompt=[prompt.text], image=image)}
            # The negative prompt is read with the same images.
            negative = self.options.negative_text
            if negative is not None:
                outputs["negative_tokens"] = self.pipeline.encode_prompt(prompt=[negative], image=image)

            tensors = {name: output[0].cpu() for name, output in outputs.items()}
            if codes:
                tensors["source"] = torch.cat(codes, 1)
                tensors["source_grid"] = self._source_grid(prompt, size, sizes, outputs["tokens"])
            encoded.append(Conditioning(tensors))
        return encoded

    def image_sizes(self, prompt: Prompt, size: Size) -> list[Size]:
        area = size.height * size.width
        sizes = [sides_for(area, path) for path in self.image_paths(prompt)]
        # The generated image has the last source's aspect, so the last source has its size.
        if prompt.sources:
            sizes[len(prompt.sources) - 1] = size
        return sizes

    def shown_sizes(self, prompt: Prompt, size: Size) -> list[Size]:
        """Choose the sizes at which the text encoder reads the images: the VAE's, or at most `condition_area`."""
        if self.condition_area == math.inf:
            return self.image_sizes(prompt, size)
        area = min(int(self.condition_area), size.height * size.width)
        return [sides_for(area, path) for path in self.image_paths(prompt)]

    def _source_grid(self, prompt: Prompt, size: Size, sizes: Sequence[Size], outputs: tuple[Tensor, ...]) -> Tensor:
        """Return (1, K, …) of images of these sizes; `outputs` are the text encoder's."""
        return torch.tensor([[self.token_grid(vae_size) for vae_size in sizes]])


class QwenEditPlusPolicy(QwenEditPolicy):
    """A `QwenImageEditPlusPipeline` behind the policy seam."""

    forward_per = "layout"
    max_sources = 3  # the number in its training
    max_references = 3
    condition_area = CONDITION_AREA


def sides_for(area: int, path: Path) -> Size:
    """Compute the size of about `area` pixels in the aspect of a source, by the pipelines' rule."""
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

    source = upright_size(path)
    width, height, _ = calculate_dimensions(area, source.width / source.height)
    return Size(max(SIDE, height), max(SIDE, width))


QWEN_IMAGE = PolicySpec(
    options=QwenImageOptions,
    policy=QwenImagePolicy,
    pipeline="QwenImagePipeline",
    hub_name="qwen-image",
    architecture="qwen_image.json",
    licence=("apache-2.0", ""),
    steps=50,
    parameters=20_430_401_088,
    vae_levels="dim_mult",
)
QWEN_EDIT = replace(
    QWEN_IMAGE,
    options=QwenEditOptions,
    policy=QwenEditPolicy,
    pipeline="QwenImageEditPipeline",
    hub_name="qwen-image-edit",
)
QWEN_EDIT_PLUS = replace(
    QWEN_EDIT,
    options=QwenEditPlusOptions,
    policy=QwenEditPlusPolicy,
    pipeline="QwenImageEditPlusPipeline",
    hub_name="qwen-image-edit.*(plus|2509|2511)",
    steps=40,  # the example on the model card of Qwen-Image-Edit-2509
)
