"""Qwen-Image-Edit and Qwen-Image-Edit-Plus as policies: pictures edited by an instruction.

A source is seen twice: by the VAE, whose tokens lie beside the painted ones in the sequence, and by the text encoder,
a Qwen2.5-VL that reads it with the instruction. A config's size is an area: the picture is painted with the (last)
source's aspect, each side a multiple of 32 pixels, as the pipelines do at their 1024². What is resized is the source:
for the VAE to the painted size (a further source to the painted area, in its own aspect), and for the text encoder to
the same (Edit) or to 384² at most (Plus).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pacorl.io.processor import load_processor
from pacorl.io.quiet import quiet
from pacorl.policies.sources import check_area, open_source, source_size, sources_of
from pacorl.policies.tokens import checked_pipeline, noise_tokens, pack, shifted_sigmas, token_grid, unpack
from pacorl.types import Conditioning, Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image

QWEN_EDIT = "Qwen/Qwen-Image-Edit"
QWEN_EDIT_PLUS = "Qwen/Qwen-Image-Edit-2509"

SIDE = 32
"""Sides are multiples of so many pixels, by the pipelines' rule."""
CONDITION_AREA = 384 * 384
"""The area at which the text encoder of Plus sees a source; less where the painted picture is smaller."""
MOST_SOURCES = 3
"""Pictures that Qwen-Image-Edit-Plus was trained on."""

LORA_TARGETS = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2",
)  # fmt: skip
"""FLUX's targets by the names that Qwen-Image's blocks have. The released code names FLUX's feed-forward layers, which
match nothing here, and so trains attention alone. To go on from its adapter, `adapter.targets` are the first eight."""


class QwenEditPolicy:
    """A `QwenImageEditPipeline` or `QwenImageEditPlusPipeline` behind the policy seam."""

    lora_targets: tuple[str, ...] = LORA_TARGETS

    def __init__(self, pipeline: Any, *, true_cfg_scale: float = 1.0, negative_prompt: str = " ") -> None:
        from diffusers import QwenImageEditPlusPipeline

        self.pipeline = pipeline
        self.plus = isinstance(pipeline, QwenImageEditPlusPipeline)
        self.true_cfg_scale = true_cfg_scale
        self.negative_prompt = negative_prompt
        self.transformer: nn.Module = pipeline.transformer
        self._config = pipeline.transformer.config
        self.token_pixels = 2 * pipeline.vae_scale_factor
        for part in (pipeline.vae, pipeline.text_encoder, pipeline.transformer):
            part.requires_grad_(False).eval()

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str | Path,
        *,
        plus: bool = False,
        dtype: str = "float32",
        device: str | torch.device = "cpu",
        true_cfg_scale: float = 1.0,
        negative_prompt: str = " ",
    ) -> QwenEditPolicy:
        """Loads a diffusers folder or a hub name. Raises ValueError where it is another pipeline."""
        import diffusers

        name, published = (
            ("QwenImageEditPlusPipeline", QWEN_EDIT_PLUS) if plus else ("QwenImageEditPipeline", QWEN_EDIT)
        )
        source = checked_pipeline(str(checkpoint), wanted=name, published=published)
        # The checkpoint's own processor wants torchvision, for videos that no edit has; diffusers would note its class.
        with quiet("diffusers.pipelines.pipeline_utils"):
            pipeline = getattr(diffusers, name).from_pretrained(
                source, processor=load_processor(source, subfolder="processor"), dtype=getattr(torch, dtype)
            )
        return cls(pipeline.to(device), true_cfg_scale=true_cfg_scale, negative_prompt=negative_prompt)

    def check_size(self, size: Size) -> None:
        """Raises ValueError where the area of `size` is smaller than the smallest picture."""
        check_area(size, step=SIDE)

    def size_of(self, prompt: Prompt, size: Size) -> Size:
        """The area of `size` in the aspect of the (last) source, each side a multiple of 32 pixels.

        Raises ValueError, naming prompt and source, where there is no source, one too many, or one too long for this
        area.
        """
        return sides_for(size.height * size.width, self._sources(prompt)[-1])

    def _sources(self, prompt: Prompt) -> tuple[Path, ...]:
        most, model = (MOST_SOURCES, "Qwen-Image-Edit-Plus") if self.plus else (1, "Qwen-Image-Edit")
        return sources_of(prompt, most=most, model=model)

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt], size: Size) -> list[Conditioning]:
        """One conditioning per prompt, on the CPU.

        `tokens` (1, L, D) of the text encoder, which has seen the sources; `source` (1, M, C), the sources' own tokens;
        `source_grid` (1, K, 2), rows and columns of each, where it differs from the painted picture's; with true CFG
        the `negative_tokens`, which have seen the sources too.
        """
        return [self._encode(prompt, size) for prompt in prompts]

    def _encode(self, prompt: Prompt, size: Size) -> Conditioning:
        paths = self._sources(prompt)
        pictures = [open_source(path) for path in paths]
        seen = [
            self._resized(picture, self._seen_size(path, size)) for path, picture in zip(paths, pictures, strict=True)
        ]
        sizes = [*(sides_for(size.height * size.width, path) for path in paths[:-1]), size]
        tensors = {
            "tokens": self._encode_text(prompt.text, seen),
            "source": torch.cat(
                [self._encode_picture(picture, own) for picture, own in zip(pictures, sizes, strict=True)], 1
            ),
        }
        if len(sizes) > 1:
            grids = [token_grid(own, step=self.token_pixels) for own in sizes]
            tensors["source_grid"] = torch.tensor([grids])
        if self.true_cfg_scale > 1:
            tensors["negative_tokens"] = self._encode_text(self.negative_prompt, seen)
        return Conditioning(tensors)

    def _seen_size(self, path: Path, size: Size) -> Size:
        """The size at which the text encoder is shown a source."""
        return sides_for(min(CONDITION_AREA, size.height * size.width), path) if self.plus else size

    def _resized(self, picture: Image, size: Size) -> Image:
        resized: Image = self.pipeline.image_processor.resize(picture, size.height, size.width)
        return resized

    def _encode_text(self, text: str, pictures: list[Image]) -> Tensor:
        shown = pictures if self.plus else pictures[0]
        tokens: Tensor = self.pipeline.encode_prompt(prompt=[text], image=shown)[0]
        return tokens.cpu()

    def _encode_picture(self, picture: Image, size: Size) -> Tensor:
        """A picture's scaled tokens (1, N, C) on the CPU."""
        vae = self.pipeline.vae
        pixels = self.pipeline.image_processor.preprocess(picture, size.height, size.width)
        codes = vae.encode(pixels[:, :, None].to(vae.device, vae.dtype)).latent_dist.mode()
        mean, std = self._code_scale(codes)
        return pack(((codes - mean) / std)[:, :, 0]).cpu()

    def _code_scale(self, codes_BCFHW: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each of the VAE's channels, as (1, C, 1, 1, 1)."""
        config = self.pipeline.vae.config
        mean, std = codes_BCFHW.new_tensor(config.latents_mean), codes_BCFHW.new_tensor(config.latents_std)
        return mean[None, :, None, None, None], std[None, :, None, None, None]

    def free_encoders(self) -> None:
        """Moves the text encoder off the device; the VAE stays, it decodes."""
        self.pipeline.text_encoder.to("cpu")

    def collate(self, conditionings: Sequence[Conditioning]) -> Conditioning:
        """One batch, on the device; shorter texts are padded, and a mask hides the padding.

        Raises ValueError where the sources of a batch differ in number or shape, which Qwen-Image cannot mix.
        """
        grids = {str(c.tensors.get("source_grid", torch.empty(0)).tolist()) for c in conditionings}
        if len(grids) > 1 or len({c.tensors["source"].shape for c in conditionings}) > 1:
            raise ValueError(
                "a batch holds edits whose sources differ in number or shape, and Qwen-Image paints one shape at a "
                "time; let sampling.batch and evaluation.batch divide the samples of one prompt, or set them to 1"
            )
        tensors = {
            name: torch.cat([c.tensors[name] for c in conditionings])
            for name in conditionings[0].tensors
            if "tokens" not in name
        }
        for name in conditionings[0].tensors:
            if "tokens" in name:
                tensors |= _padded(name, [c.tensors[name] for c in conditionings])
        return Conditioning(tensors).to(self.device)

    @property
    def device(self) -> torch.device:
        return next(self.transformer.parameters()).device

    def sigmas(self, num_steps: int, size: Size) -> Tensor:
        """(T+1,) fp32 on the CPU, shifted by the number of painted tokens as the pipeline shifts them."""
        rows, cols = token_grid(size, step=self.token_pixels)
        return shifted_sigmas(self.pipeline.scheduler, num_steps, tokens=rows * cols)

    def noise(self, seeds: Sequence[int], size: Size) -> Tensor:
        """(B, N, C) fp32 on the device, one seed per row, drawn on the CPU as the pipeline draws it."""
        factor = self.pipeline.vae_scale_factor
        channels = self._config.in_channels // 4
        drawn = noise_tokens(seeds, channels=channels, height=size.height // factor, width=size.width // factor)
        return drawn.to(self.device)

    def velocity(self, x_BNC: Tensor, sigma_B: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
        """The transformer's velocity in fp32: (B, N, C) at one sigma per row, the sources' tokens left off.

        With true CFG a second forward reads the negative prompt: v = v⁻ + scale·(v⁺ − v⁻), brought back to the length
        of v⁺ token by token, as the pipeline does.
        """
        if self.true_cfg_scale <= 1:
            return self._forward(x_BNC, sigma_B, conditioning, size, text="tokens")
        wanted = self._forward(x_BNC, sigma_B, conditioning, size, text="tokens")
        unwanted = self._forward(x_BNC, sigma_B, conditioning, size, text="negative_tokens")
        guided = unwanted + self.true_cfg_scale * (wanted - unwanted)
        scale: Tensor = wanted.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
        return guided * scale

    def _forward(self, x_BNC: Tensor, sigma_B: Tensor, conditioning: Conditioning, size: Size, *, text: str) -> Tensor:
        tensors = conditioning.tensors
        dtype = tensors[text].dtype
        painted = (1, *token_grid(size, step=self.token_pixels))
        grids = tensors["source_grid"][0].tolist() if "source_grid" in tensors else [painted[1:]]
        predicted: Tensor = self.transformer(
            hidden_states=torch.cat([x_BNC.to(dtype), tensors["source"].to(dtype)], 1),
            timestep=sigma_B.to(dtype),
            guidance=None,
            encoder_hidden_states=tensors[text],
            encoder_hidden_states_mask=tensors.get(f"{text}_mask"),
            img_shapes=[[painted, *((1, *grid) for grid in grids)]] * len(x_BNC),
            return_dict=False,
        )[0]
        return predicted[:, : x_BNC.shape[1]].float()

    @torch.no_grad()
    def decode(self, x_BNC: Tensor, size: Size) -> list[Image]:
        """Endpoints → RGB images. No VAE tiling: its seams would poison a judge."""
        vae = self.pipeline.vae
        codes = unpack(x_BNC, rows=size.height // self.token_pixels)[:, :, None].to(vae.dtype)
        mean, std = self._code_scale(codes)
        pixels = vae.decode(codes * std + mean, return_dict=False)[0][:, :, 0]
        images: list[Image] = self.pipeline.image_processor.postprocess(pixels.float(), output_type="pil")
        return images


def sides_for(area: int, path: Path) -> Size:
    """The size of about `area` pixels in the aspect of a source, by the pipelines' rule.

    Raises ValueError where a side would be rounded to nothing.
    """
    source = source_size(path)
    aspect = source.width / source.height
    width = math.sqrt(area * aspect)
    size = Size(*(round(side / SIDE) * SIDE for side in (width / aspect, width)))
    if not size.height or not size.width:
        raise ValueError(
            f"source {path} is {source}, too long to be painted on {area} pixels with sides of multiples of {SIDE}; "
            "crop it, or raise the size"
        )
    return size


def _padded(name: str, tokens: Sequence[Tensor]) -> dict[str, Tensor]:
    """Texts (1, L, D) padded with zeros to one length, with a mask where any of them is."""
    lengths = [text.shape[1] for text in tokens]
    longest = max(lengths)
    batch = torch.cat([F.pad(text, (0, 0, 0, longest - text.shape[1])) for text in tokens])
    if min(lengths) == longest:
        return {name: batch}
    return {name: batch, f"{name}_mask": (torch.arange(longest)[None] < torch.tensor(lengths)[:, None]).long()}
