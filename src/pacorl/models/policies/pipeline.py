"""A generator as the loops see it, `PipelinePolicy`: a diffusers pipeline on tokens of VAE codes, 2×2 by default.

Guidance, packing, reference latents and norm rules stay inside `velocity`; loops see tokens and sigmas. A config names
one size; `size_of` derives the size of each prompt's image, the `size` of all further methods. A batch has one size.

A kind implements the encoding of texts, the transformer's arguments and, for edits, the number and sizes of sources.
The common parts are here, equal to diffusers' pipelines: seeds to noise, shifted sigmas, decoding.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from pacorl.core.batches import in_batches
from pacorl.core.devices import NONE, to_device
from pacorl.io.images import MAX_PIXELS
from pacorl.io.quiet import quiet
from pacorl.models.int8 import quantize_model
from pacorl.models.policies.policy import check_images
from pacorl.types import Conditioning, Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.models.policies.policy import PolicyOptions

JOINT_ATTENTION = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
)  # fmt: skip
"""Linear layers of a joint attention of images and texts, by diffusers' names."""
AREA_TOLERANCE = 0.1
"""Share by which the area of an edit may be below the configured one, whose memory was planned."""


def pack(codes_BCHW: Tensor, *, patch: int = 2) -> Tensor:
    """Pack VAE codes into tokens of P×P patches, row-major: (B, C, H, W) → (B, H/P·W/P, P²·C)."""
    return rearrange(codes_BCHW, "b c (h p) (w q) -> b (h w) (c p q)", p=patch, q=patch)


def unpack(x_BNC: Tensor, *, rows: int, patch: int = 2) -> Tensor:
    """Invert `pack` for an image of `rows` rows of tokens."""
    return rearrange(x_BNC, "b (h w) (c p q) -> b c (h p) (w q)", h=rows, p=patch, q=patch)


def use_channels_last(model: nn.Module) -> None:
    """Store the weights of 2D convolutions as channels_last, in place; torch refuses the layout for 3D convolutions."""
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)


def timestep_for(sigma_B: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert noise levels to a transformer's timesteps, before its factor of 1000.

    The pipelines cast t = 1000σ to the latents' type and divide again, which in bf16 rounds otherwise than σ does.
    Wider types keep σ.
    """
    if torch.finfo(dtype).bits >= torch.finfo(sigma_B.dtype).bits:
        return sigma_B.to(dtype)
    return (1000 * sigma_B).to(dtype) / 1000


def nearest_multiple(size: Size, *, step: int) -> Size:
    """Round both sides to multiples of `step` pixels."""
    return Size(*(max(step, round(side / step) * step) for side in (size.height, size.width)))


@cache
def best_sides(area: int, source: Size, *, step: int, rule: Size) -> Size:
    """Choose the sides of an edit that stretch its source least, of all within 10 % below an area and the `rule`'s.

    Rounding each side by itself stretches a source by up to 6 % at 512², so that before and after do not lie on each
    other.
    """
    sizes = [rule]
    for rows in range(1, math.isqrt(area * source.height // source.width) // step + 2):
        exact = rows * source.width / source.height
        for cols in {max(1, math.floor(exact)), math.ceil(exact)}:
            size = Size(rows * step, cols * step)
            if 1 - AREA_TOLERANCE <= size.height * size.width / area <= 1:
                sizes.append(size)

    def fit(size: Size) -> tuple[float, float]:
        stretch = size.width * source.height / (size.height * source.width)
        return abs(math.log(stretch)), abs(size.height * size.width - area)

    return min(sizes, key=fit)


def check_multiple(size: Size, *, step: int, is_area: bool = False) -> None:
    """Raise ValueError with the nearest size if a side is no multiple of `step` pixels, or the area is out of range.

    A size that `is_area` may have any sides.
    """
    nearest = nearest_multiple(size, step=step)
    if size != nearest and not is_area:
        raise ValueError(f"size {size} must be a multiple of {step} pixels on both sides; the nearest is {nearest}")
    if not step * step <= size.height * size.width <= MAX_PIXELS:
        raise ValueError(f"size {size} must have from {step * step} to {MAX_PIXELS:,} pixels")


class PipelinePolicy:
    """A flow-matching generator with one trainable transformer; each kind is a subclass.

    Example:
        policy = FLUX.load(FLUX.options_for("tiny", dtype="float32"))
        conditioning = policy.collate(policy.encode(prompts, size))
        x_BNC = policy.noise(seeds, size)
        velocity_BNC = policy.velocity(x_BNC, sigma_B, conditioning, size)
        images = policy.decode(x_BNC, size)
    """

    lora_targets: tuple[str, ...]
    """Suffixes of the adapted modules, by default."""
    idle_in_last_block: tuple[str, ...] = ()
    """Text layers in the last of `transformer_blocks` without influence on any image."""
    max_sources = 0
    """Maximum number of sources per prompt; 0 for generators of sets only."""
    patch = 2
    """Side of a token in codes."""
    merged = 1
    """Side of a code in the VAE's own: a pipeline may merge squares of these into codes of more channels."""
    slot = 1
    """Divisor of an image's sides in tokens."""
    forward_per: Literal["batch", "layout", "prompt"] = "batch"
    """Rows that share a forward (`forward_key`): all of one size, those with images of equal sizes, or those of one
    prompt."""
    max_references = 0
    """Maximum number of images per prompt, sources and references together; 0 if references are refused."""
    stitched = False
    """Whether the images of a prompt with references are stitched into one (`stitch`)."""
    source_optional = False
    """Whether an editor also generates sets, from prompts without a source."""
    encoders: ClassVar[Mapping[str, str]]
    """The pipeline's text encoders, unused after `encode`: attribute → display name."""
    long_encoder = ""
    """Attribute of the encoder whose tokens `max_sequence_length` limits; empty without a limit."""
    encode_batch = 8
    """Prompts per pass of the text encoders; T5-XXL's activations stay small."""
    clip_tokens = 0
    """Number of CLIP tokens before T5's."""
    scheduler_spaced = False
    """Whether the scheduler chooses the spacing of the steps; otherwise the pipeline passes 1, …, 2/T, 1/T."""

    training_shift: Literal["inference", "linear"] = "inference"
    """Shift of the noise levels in the published checkpoint's own training; that of inference if none is published.
    linear: mu grows with the number of tokens between the scheduler's bounds, as FLUX.1's does, whatever mu sampling
    takes."""

    def __init__(self, pipeline: Any, options: PolicyOptions) -> None:
        self.pipeline = pipeline
        self.options: Any = options
        self.transformer: nn.Module = pipeline.transformer
        self.code_pixels: int = self.merged * pipeline.vae_scale_factor
        """Side of a code in pixels."""
        self.token_pixels: int = self.patch * self.code_pixels
        """Side of a token in pixels."""
        for component in pipeline.components.values():
            if isinstance(component, nn.Module):
                component.requires_grad_(False).eval()

    @classmethod
    def components_from(cls, source: str) -> dict[str, Any]:
        """Load the components of a checkpoint in forms unknown to diffusers."""
        return {}

    @property
    def device(self) -> torch.device:
        return next(self.transformer.parameters()).device

    @property
    def idle_layers(self) -> frozenset[str]:
        """Names of the linear layers without influence on any image."""
        last = len(getattr(self.pipeline.transformer, "transformer_blocks", [])) - 1
        return frozenset(f"transformer_blocks.{last}.{name}" for name in self.idle_in_last_block)

    @property
    def latent_channels(self) -> int:
        """Channels of the codes; a token has `patch`² times as many."""
        return self.merged**2 * int(self.pipeline.vae.config.latent_channels)

    def check_size(self, size: Size) -> None:
        """Raise ValueError with the nearest size if the config's `size` is not supported."""
        self.check_sides(size, step=self.token_pixels)

    @classmethod
    def check_sides(cls, size: Size, *, step: int) -> None:
        """Check a size without the weights.

        Raises:
            ValueError: A side is no multiple of a token's, or the image is too small or too large.
        """
        # An edit's size is an area: its sides follow from the source.
        is_area = cls.max_sources > 0 and not cls.source_optional
        check_multiple(size, step=cls.slot * step, is_area=is_area)

    def size_of(self, prompt: Prompt, size: Size) -> Size:
        """Derive the size of a prompt's image from the config's: whole tokens of `size` for a set.

        For an edit it is the area of `size` in the shape of a source.

        Raises:
            ValueError: A source is missing, is one too many or has no such shape; the message names the prompt.
        """
        if prompt.references or prompt.sources or self.max_sources:
            self.image_paths(prompt)  # raises
        if not prompt.sources:
            return self.nearest_size(size)
        return self.edit_size(prompt.sources, size.height * size.width)

    def edit_size(self, sources: Sequence[Path], area: int) -> Size:
        """Choose the size of an edit of about `area` pixels by the pipeline's rule."""
        raise NotImplementedError

    def image_sizes(self, prompt: Prompt, size: Size) -> list[Size]:
        """Choose the sizes at which the VAE reads a prompt's sources and references, for an image of `size`."""
        raise NotImplementedError

    def forward_key(self, prompt: Prompt, size: Size) -> Hashable:
        """Return what prompts must have in common, at a config's `size`, for their rows to share a forward."""
        own_size = self.size_of(prompt, size)
        if self.forward_per == "prompt":
            return own_size, prompt.text, prompt.sources, prompt.references
        return own_size, *(self.image_sizes(prompt, own_size) if self.forward_per == "layout" else ())

    def nearest_size(self, size: Size) -> Size:
        """Round a config's size to the token grid: the size of a square source's edit, nearly that of other shapes."""
        return nearest_multiple(size, step=self.slot * self.token_pixels)

    def token_grid(self, size: Size) -> tuple[int, int]:
        """Return the (rows, columns) of tokens."""
        return size.height // self.token_pixels, size.width // self.token_pixels

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt], size: Size) -> list[Conditioning]:
        """Encode prompts to one conditioning each, on the CPU.

        It contains the tensors of `encode_texts`, with a negative prompt also `negative_…`, and of `encode_sources`.
        """
        # Images first: a missing one is noticed before the texts are encoded, which takes far longer.
        for prompt in prompts:
            self.image_paths(prompt)  # raises
        texts = self.encoded_texts([prompt.text for prompt in prompts])
        encoded = []
        for text, prompt in zip(texts, prompts, strict=True):
            encoded.append(Conditioning({**text, **self.encode_sources(prompt, size)}))
        return encoded

    def encode_sources(self, prompt: Prompt, size: Size) -> dict[str, Tensor]:
        """Encode a prompt's sources and references for the transformer, on the CPU; empty for a set of text alone."""
        return {}

    def image_paths(self, prompt: Prompt) -> tuple[Path, ...]:
        """Return the sources of an edit, then the references. Raises ValueError if one is missing or one too many."""
        check_images(type(self), prompt, f"model.kind {self.options.kind}")
        return (*prompt.sources, *prompt.references)

    def encoded_texts(self, texts: Sequence[str]) -> list[dict[str, Tensor]]:
        """Apply `encode_texts` to each text, on the CPU; with a negative prompt also `negative_…`, equal for all."""
        # Warn of truncated prompts.
        if self.long_encoder:
            limit = self.options.max_sequence_length
            too_long = [length for length in self.count_tokens(texts) if length > limit]
            if too_long:
                warnings.warn(
                    f"{len(too_long)} of {len(texts)} prompts have more than "
                    f"model.max_sequence_length = {limit} tokens (up to {max(too_long)}); their ends are not read",
                    stacklevel=3,
                )

        # Quiet, since each prompt beyond CLIP's 77 tokens would be printed.
        encoded: list[dict[str, Tensor]] = []
        with quiet("diffusers", "transformers"):
            for chunk in in_batches(texts, self.encode_batch):
                batch = {name: tensor.cpu() for name, tensor in self.encode_texts(list(chunk)).items()}
                for row in range(len(chunk)):
                    encoded.append({name: tensor[row : row + 1] for name, tensor in batch.items()})

            # One tensor for all: FLUX.2's of 512 tokens takes 7.5 MiB.
            if self.options.negative_text is not None:
                batch = self.encode_texts([self.options.negative_text])
                negative = {f"negative_{name}": tensor.cpu() for name, tensor in batch.items()}
                encoded = [text | negative for text in encoded]
        return encoded

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of each text before truncation to `max_sequence_length`."""
        tokenizer = getattr(self.pipeline, self.long_encoder.replace("text_encoder", "tokenizer"))
        counts = []
        for text in texts:
            # Not verbose: it would warn of indexing errors, which truncation prevents.
            counts.append(len(tokenizer(self.in_template(text), verbose=False).input_ids))
        return counts

    def in_template(self, text: str) -> str:
        """Return a text as the long encoder reads it."""
        return text

    def encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        """Encode a batch of texts for the transformer: name → (B, …)."""
        raise NotImplementedError

    def encode_image(self, image: Image, size: Size) -> Tensor:
        """Encode an image, resized to `size` by the pipeline's rule, to scaled tokens (1, N, C) on the CPU."""
        vae = self.pipeline.vae
        pixels = self.pipeline.image_processor.preprocess(image, size.height, size.width)
        return self.encode_pixels(pixels.to(vae.device, vae.dtype)).cpu()

    def encode_pixels(self, pixels_BCHW: Tensor) -> Tensor:
        """Encode pixels in [-1, 1] to scaled tokens (B, N, C)."""
        vae = self.pipeline.vae
        # The mode, not a draw, so that a source has one code.
        codes = vae.encode(pixels_BCHW).latent_dist.mode()
        return pack((codes - vae.config.shift_factor) * vae.config.scaling_factor)

    @property
    def text_encoders(self) -> list[Any]:
        """The pipeline's text encoders."""
        return [getattr(self.pipeline, name) for name in self.encoders]

    def place_encoders(self, device: str | torch.device) -> None:
        """Move everything but the transformer to a device; `memory: lowest` streams text encoders' blocks."""
        for name, component in self.pipeline.components.items():
            if isinstance(component, nn.Module) and name not in ("transformer", "vae"):
                if name in self.encoders:
                    # Weights stay at home as pages of files, without a copy: they are read only a few times.
                    home = next(component.parameters()).device
                    quantize_model(component, NONE, device=home, stream=self.options.stream)
                component.to(device)
        self.place_vae(device)

    def place_vae(self, device: str | torch.device) -> None:
        """Move the VAE to a device, on CUDA with the layout of weights that cuDNN's convolutions read."""
        vae: nn.Module = self.pipeline.vae
        vae.to(device)
        if torch.device(device).type == "cuda":
            use_channels_last(vae)

    def place_transformer(self, device: str | torch.device) -> None:
        """Move the transformer to a device, with frozen weights packed by the run's `memory`."""
        quantize_model(self.transformer, self.options.quantize, device=device, stream=self.options.stream)
        self.transformer.to(device)

    def free_encoders(self) -> None:
        """Drop the text encoders; `encode` is unavailable from then on."""
        # Dropped, not parked: they are not used again, and seven processes would park 64 GiB of FLUX's. The VAE stays,
        # for decoding.
        for name in self.encoders:
            setattr(self.pipeline, name, None)

    def collate(self, conditionings: Sequence[Conditioning]) -> Conditioning:
        """Collate conditionings of prompts that share a forward to one batch, on the device."""
        tensors = {}
        for name in conditionings[0].tensors:
            tensors[name] = torch.cat([conditioning.tensors[name] for conditioning in conditionings])
        return self.on_device(tensors)

    def on_device(self, tensors: Mapping[str, Tensor]) -> Conditioning:
        """Move a batch to the device."""
        return Conditioning({name: to_device(tensor, self.device) for name, tensor in tensors.items()})

    def training_sigmas(self, num_steps: int, size: Size) -> Tensor:
        """Return (T+1,) sigmas in fp32 on the CPU, under the kind's `training_shift`."""
        mu = None
        if self.training_shift == "linear":
            # FLUX.1's rule, whatever the kind samples with.
            mu = PipelinePolicy.shift(self, math.prod(self.token_grid(size)), num_steps)
        return self.sigmas(num_steps, size, mu=mu)

    def sigmas(self, num_steps: int, size: Size, *, mu: float | None = None) -> Tensor:
        """Return (T+1,) sigmas in fp32 on the CPU, with the spacing and shift of the pipeline and its scheduler.

        Args:
            mu: a dynamic shift in place of the pipeline's. Shifts independent of size stay.
        """
        config = self.pipeline.scheduler.config
        # The first step starts at 1 and the last ends at `shift_terminal`, so one step is too few.
        if num_steps < 2 and config.get("shift_terminal"):
            raise ValueError(f"{num_steps} sampling step is too few for this scheduler; ask for at least 2 steps")
        options: dict[str, Any] = {"sigmas": self.unshifted_sigmas(num_steps)}
        if self.scheduler_spaced:
            options = {"num_inference_steps": num_steps}
        if config.get("use_dynamic_shifting"):
            options["mu"] = self.shift(math.prod(self.token_grid(size)), num_steps) if mu is None else mu

        # A new scheduler, because set_timesteps would change the pipeline's.
        scheduler = type(self.pipeline.scheduler).from_config(config)
        scheduler.set_timesteps(**options)
        sigmas: Tensor = scheduler.sigmas
        return sigmas.float().cpu()

    def unshifted_sigmas(self, num_steps: int) -> Any:
        """Return the pipeline's (T,) sigmas before the scheduler's shift."""
        return np.linspace(1.0, 1 / num_steps, num_steps)

    def shift(self, tokens: int, num_steps: int) -> float:
        """Compute the pipeline's shift `mu` for an image of `tokens` tokens.

        By itself FLUX.1's rule: linear in the tokens, between the bounds of the scheduler's config.
        """
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        config = self.pipeline.scheduler.config
        bounds = (config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift)
        return float(calculate_shift(tokens, *bounds))

    def noise(self, seeds: Sequence[int], size: Size) -> Tensor:
        """Draw (B, N, C) fp32 noise, one seed per row, on the CPU for equal values on every machine."""
        shape = (self.latent_channels, size.height // self.code_pixels, size.width // self.code_pixels)
        # Draw codes, then pack, like the pipelines: tokens drawn from the same seed would differ.
        codes = []
        for seed in seeds:
            codes.append(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
        return to_device(pack(torch.stack(codes), patch=self.patch), self.device)

    def with_prefix(self, conditioning: Conditioning, size: Size) -> Conditioning:
        """Add the prefix shared by a batch's forwards at every step, under the current weights."""
        return conditioning

    def velocity(self, x_BNC: Tensor, sigma_B: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
        """Predict the velocity (B, N, C) at one sigma per row, in fp32, or fp64 for an fp64 model."""
        raise NotImplementedError

    def predict(self, **inputs: Any) -> Tensor:
        """Run one forward of the transformer; the result is in fp32 or better."""
        velocity: Tensor = self.transformer(**inputs, return_dict=False)[0]
        # Steps and log-probabilities follow its type.
        return velocity.to(torch.promote_types(velocity.dtype, torch.float32))

    def decode(self, x_BNC: Tensor, size: Size) -> list[Image]:
        """Decode endpoints to RGB images."""
        return self.launch_decode(x_BNC, size)()

    @torch.no_grad()
    def launch_decode(self, x_BNC: Tensor, size: Size) -> Callable[[], list[Image]]:
        """Queue the decoding of endpoints; the returned function waits for their images."""
        codes_BCHW = unpack(x_BNC, rows=self.token_grid(size)[0], patch=self.patch)
        # An accelerator is busy with one image, and a batch would multiply the peak. No VAE tiling: its seams would
        # poison a judge.
        together = len(codes_BCHW) if codes_BCHW.device.type == "cpu" else 1
        decoded = [self.decode_codes(batch) for batch in codes_BCHW.split(together)]
        # One copy to the host for the whole batch: the host waits for each.
        pixels = torch.cat(decoded).float().to("cpu", non_blocking=x_BNC.is_cuda)
        copied: torch.cuda.Event | None = None
        if x_BNC.is_cuda:
            copied = torch.cuda.Event()
            copied.record()

        def images() -> list[Image]:
            if copied:
                copied.synchronize()
            return self.postprocess(pixels)

        return images

    def postprocess(self, pixels_BCHW: Tensor) -> list[Image]:
        """Convert decoded pixels to RGB images."""
        images: list[Image] = self.pipeline.image_processor.postprocess(pixels_BCHW, output_type="pil")
        return images

    def decode_codes(self, codes_BCHW: Tensor) -> Tensor:
        """Decode scaled VAE codes to pixels in [-1, 1]."""
        vae = self.pipeline.vae
        codes = codes_BCHW.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        pixels: Tensor = vae.decode(codes, return_dict=False)[0]
        return pixels


def stitch(images: Sequence[Image], size: Size) -> Image:
    """Arrange images on one white image of `size`, row by row, each as large as its cell."""
    from PIL import Image, ImageOps

    cols = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / cols)
    # Cells of equal size, however the images are shaped.
    width = size.width // cols
    height = size.height // rows
    stitched = Image.new("RGB", (size.width, size.height), "white")
    for number, image in enumerate(images):
        row, col = divmod(number, cols)
        cell = ImageOps.pad(image, (width, height), Image.Resampling.LANCZOS, color="white")
        stitched.paste(cell, (col * width, row * height))
    return stitched


def guided(forward: Callable[[str], Tensor], *, scale: float, keep_norm: bool = False) -> Tensor:
    """Apply classifier-free guidance: v = v⁻ + scale·(v⁺ − v⁻), in two forwards; one forward if `scale` is at most 1.

    Args:
        forward: Prefix of the conditioning's names ("" or "negative_") → the velocity (B, N, C).
        scale: 1 is without guidance.
        keep_norm: Rescale each token to the norm of v⁺, like Qwen-Image's pipelines.
    """
    positive = forward("")
    if scale <= 1:
        return positive
    # One forward of both would hold twice the activations, and Qwen-Image's two texts differ in length.
    negative = forward("negative_")
    velocity = negative + scale * (positive - negative)
    if keep_norm:
        velocity = velocity * (positive.norm(dim=-1, keepdim=True) / velocity.norm(dim=-1, keepdim=True))
    return velocity
