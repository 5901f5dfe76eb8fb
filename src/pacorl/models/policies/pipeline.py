"""What the kinds share: a diffusers pipeline behind the policy seam, on tokens of 2×2 VAE codes.

A kind of its own says how its texts are encoded, what its transformer is called with, and, if it edits, which sources
it takes at which size. The rest is here, as diffusers' pipelines do it: seeds to noise, shifted sigmas, decoding.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from pacorl.core.transfer import to_device
from pacorl.io.images import MAX_PIXELS
from pacorl.io.quiet import quiet
from pacorl.models.quantize import NONE
from pacorl.models.quantize.linear import quantize_model
from pacorl.types import Conditioning, Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.models.policies.policy import Parts, PolicyOptions, TrainingShift

JOINT_ATTENTION = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
)  # fmt: skip
"""The linear layers of a joint attention of images and texts, as diffusers names them."""


def pack(codes_BCHW: Tensor) -> Tensor:
    """VAE codes → tokens of 2×2 patches, row-major: (B, C, H, W) → (B, H/2·W/2, 4C)."""
    return rearrange(codes_BCHW, "b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2)


def unpack(x_BNC: Tensor, *, rows: int) -> Tensor:
    """The inverse of `pack` for an image of `rows` rows of tokens."""
    return rearrange(x_BNC, "b (h w) (c p q) -> b c (h p) (w q)", h=rows, p=2, q=2)


def use_channels_last(model: nn.Module) -> None:
    """Store the weights of 2D convolutions as channels_last, in place; torch refuses the layout for 3D ones."""
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)


def at_least_fp32(velocity: Tensor) -> Tensor:
    """The velocity in fp32, or in fp64 if the model computes in it: steps and log-probabilities follow its type."""
    return velocity.to(torch.promote_types(velocity.dtype, torch.float32))


def nearest_multiple(size: Size, *, step: int) -> Size:
    """The nearest size whose sides are multiples of `step` pixels."""
    return Size(*(max(step, round(side / step) * step) for side in (size.height, size.width)))


def check_multiple(size: Size, *, step: int) -> None:
    """Raise ValueError, naming the nearest size, if a side is no multiple of `step` pixels, or the image too large."""
    check_area(size, step=1)
    if size.height % step or size.width % step:
        nearest = nearest_multiple(size, step=step)
        raise ValueError(f"size {size} must be a multiple of {step} pixels on both sides; the nearest is {nearest}")


def check_area(size: Size, *, step: int) -> None:
    """Raise ValueError if an area is smaller than one token of `step` pixels, or too large to be read as an image."""
    if size.height * size.width > MAX_PIXELS:
        raise ValueError(
            f"size {size} has more than {MAX_PIXELS:,} pixels, and no larger image is read; give a smaller one"
        )
    if size.height * size.width < step * step:
        raise ValueError(f"size {size} is smaller than one token; give at least {Size(step, step)}")


class PipelinePolicy:
    """A diffusers pipeline as a `Policy`; every kind is a subclass that fills in `encode_texts` and `velocity`."""

    lora_targets: tuple[str, ...]
    idle_in_last_block: ClassVar[tuple[str, ...]] = ()
    """Linear layers of the last of `transformer_blocks` that make of the text what no image depends on."""
    references: ClassVar[int] = 0
    """Sources that a prompt may have at most; 0 if it makes sets alone."""
    source_optional: ClassVar[bool] = False
    """Of an editor, whether it makes sets too: of the prompts without a source."""
    model_name: ClassVar[str] = ""
    """Of an editor, for messages about its sources."""
    encoders: ClassVar[Mapping[str, str]]
    """The pipeline's text encoders, which are not needed after `encode`: attribute → name for people."""
    long_encoder: ClassVar[str] = ""
    """Attribute of the one among them whose tokens `max_sequence_length` counts; empty if any length is read."""
    encode_batch: ClassVar[int] = 8
    """Prompts per pass of the text encoders; T5-XXL's activations stay small."""
    clip_tokens: ClassVar[int] = 0
    """How many tokens of CLIP stand before T5's."""
    scheduler_spaced: ClassVar[bool] = False
    """Whether the pipeline leaves the spacing of the steps to its scheduler; others hand it 1, …, 2/T, 1/T."""

    training_shift: ClassVar[TrainingShift]
    """Shift of the noise levels in the published checkpoint's own training."""

    def __init__(self, pipeline: Any, options: PolicyOptions, *, record_sizes: bool = False) -> None:
        self.pipeline = pipeline
        self.options: Any = options
        self.record_sizes = record_sizes
        self.transformer: nn.Module = pipeline.transformer
        self.token_pixels: int = 2 * pipeline.vae_scale_factor
        self.planned_sources = 0 if self.source_optional else min(1, self.references)
        """Sources of a prompt for which memory is planned."""
        for component in pipeline.components.values():
            if isinstance(component, nn.Module):
                component.requires_grad_(False).eval()

    @classmethod
    def components_from(cls, source: str) -> dict[str, Any]:
        """Components that diffusers would load in another form than is needed, loaded from a checkpoint."""
        return {}

    @classmethod
    def components_on_meta(cls, configs: Parts) -> dict[str, Any]:
        """Components without weights that the policy needs on the meta device too."""
        return {}

    @property
    def device(self) -> torch.device:
        return next(self.transformer.parameters()).device

    @property
    def idle_layers(self) -> frozenset[str]:
        """Names of the linear layers that no image depends on, whatever their weights."""
        last = len(getattr(self.pipeline.transformer, "transformer_blocks", [])) - 1
        return frozenset(f"transformer_blocks.{last}.{name}" for name in self.idle_in_last_block)

    @property
    def latent_channels(self) -> int:
        """Channels of the VAE's codes; a token has four times as many."""
        return int(self.pipeline.vae.config.latent_channels)

    def check_size(self, size: Size) -> None:
        self.check_sides(size, step=self.token_pixels)

    @classmethod
    def check_sides(cls, size: Size, *, step: int) -> None:
        """Check a size without the weights.

        Args:
            size: of an image, or an edit's area.
            step: side of a token in pixels.

        Raises:
            ValueError: A side is no multiple of a token's, or the image is too small or too large.
        """
        if cls.references and not cls.source_optional:  # an edit's size is an area: its sides follow from the source
            check_area(size, step=step)
        else:
            check_multiple(size, step=step)

    def size_of(self, prompt: Prompt, size: Size) -> Size:
        """`size`, or with `record_sizes` the record's own, if it has one."""
        if not self.record_sizes or prompt.size is None:
            return size
        try:
            self.check_size(prompt.size)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.id}, its own {error}; or leave prompts.record_sizes out") from None
        return prompt.size

    def nearest_size(self, size: Size) -> Size:
        """A config's size on the token grid: what a square source's edit takes, and much the same in other shapes."""
        return nearest_multiple(size, step=self.token_pixels)

    def token_grid(self, size: Size) -> tuple[int, int]:
        """(rows, columns) of tokens."""
        return size.height // self.token_pixels, size.width // self.token_pixels

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt], size: Size) -> list[Conditioning]:
        """One conditioning per prompt, on the CPU.

        Its tensors are those of `encode_texts`, with a negative prompt also `negative_…`, and of `encode_sources`.
        """
        texts = self.encoded_texts([prompt.text for prompt in prompts])
        return [
            Conditioning({**text, **self.encode_sources(prompt, size)})
            for text, prompt in zip(texts, prompts, strict=True)
        ]

    def encode_sources(self, prompt: Prompt, size: Size) -> dict[str, Tensor]:
        """What the transformer reads of a prompt's sources, on the CPU; nothing of a set."""
        return {}

    def source_paths(self, prompt: Prompt) -> tuple[Path, ...]:
        """The sources of an edit, or a ValueError if there is none or one too many."""
        count, name = len(prompt.sources), f"prompt {prompt.id} ({prompt.text[:60]!r})"
        if not count and not self.source_optional:
            raise ValueError(
                f"{name} has no source, and {self.model_name} edits images; give records of {{image, instruction}}"
            )
        if count > self.references:
            raise ValueError(f"{name} has {count} sources, and {self.model_name} takes {self.references}")
        return prompt.sources

    def encoded_texts(self, texts: Sequence[str]) -> list[dict[str, Tensor]]:
        """Per text what `encode_texts` gives, on the CPU; with a negative prompt also `negative_…`, equal for all."""
        if self.long_encoder:
            limit, lengths = self.options.max_sequence_length, self.count_tokens(texts)
            if max(lengths, default=0) > limit:
                warnings.warn(
                    f"{sum(length > limit for length in lengths)} of {len(texts)} prompts have more than "
                    f"model.max_sequence_length = {limit} tokens (up to {max(lengths)}); their ends are not read",
                    stacklevel=3,
                )
        encoded: list[dict[str, Tensor]] = []
        # Each prompt that CLIP truncates to its 77 tokens would be printed.
        with quiet("diffusers", "transformers"):
            for start in range(0, len(texts), self.encode_batch):
                batch = self.encode_texts(list(texts[start : start + self.encode_batch]))
                rows = zip(*(tensor.cpu().split(1) for tensor in batch.values()), strict=True)
                encoded += [dict(zip(batch, row, strict=True)) for row in rows]
            if self.options.negative_text is not None:
                # One tensor for all: FLUX.2's of 512 tokens takes 7.5 MiB.
                negative = {
                    f"negative_{n}": t.cpu() for n, t in self.encode_texts([self.options.negative_text]).items()
                }
                encoded = [text | negative for text in encoded]
        return encoded

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text before it is cut at `max_sequence_length`."""
        tokenizer = getattr(self.pipeline, self.long_encoder.replace("text_encoder", "tokenizer"))
        return [len(ids) for ids in tokenizer(list(texts), truncation=False).input_ids] if texts else []

    def encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        """What the transformer reads of a batch of texts: name → (B, …)."""
        raise NotImplementedError

    def encode_image(self, image: Image, size: Size) -> Tensor:
        """An image, resized to `size` as the pipeline resizes it, as scaled tokens (1, N, C) on the CPU."""
        vae = self.pipeline.vae
        pixels = self.pipeline.image_processor.preprocess(image, size.height, size.width)
        return self.encode_pixels(pixels.to(vae.device, vae.dtype)).cpu()

    def encode_pixels(self, pixels_BCHW: Tensor) -> Tensor:
        """Pixels in [-1, 1] → scaled tokens (B, N, C)."""
        vae = self.pipeline.vae
        # The mode, not a draw: one source has one code, whoever encodes it.
        codes = vae.encode(pixels_BCHW).latent_dist.mode()
        return pack((codes - vae.config.shift_factor) * vae.config.scaling_factor)

    def place_encoders(self, device: str | torch.device) -> None:
        """Move everything but the transformer to a device; with `model.stream` text encoders' blocks are to follow."""
        for name, component in self.pipeline.components.items():
            if isinstance(component, nn.Module) and name not in ("transformer", "vae"):
                if name in self.encoders:
                    # Not by the device, into memory of their own: they are read a few times, and stay pages of files.
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
        quantize_model(self.transformer, self.options.quantize, device=device, stream=self.options.stream)
        self.transformer.to(device)

    def free_encoders(self) -> None:
        # Dropped and not parked: nothing reads them again, and seven processes would park 64 GiB of FLUX's. The VAE
        # stays: it decodes.
        for name in self.encoders:
            setattr(self.pipeline, name, None)

    def collate(self, conditionings: Sequence[Conditioning]) -> Conditioning:
        names = conditionings[0].tensors
        return self.on_device({name: torch.cat([c.tensors[name] for c in conditionings]) for name in names})

    def on_device(self, tensors: Mapping[str, Tensor]) -> Conditioning:
        """A batch that was put together on the CPU."""
        return Conditioning({name: to_device(tensor, self.device) for name, tensor in tensors.items()})

    def sigmas(self, num_steps: int, size: Size) -> Tensor:
        """(T+1,) fp32 on the CPU: spaced and shifted as the pipeline and its scheduler's config do it."""
        return self._sigmas(num_steps, mu=self.shift(math.prod(self.token_grid(size)), num_steps))

    def training_sigmas(self, num_steps: int, size: Size) -> Tensor:
        """(T+1,) fp32 on the CPU: as `sigmas`, under the kind's `training_shift`."""
        if self.training_shift.rule == "inference":
            return self.sigmas(num_steps, size)
        return self._sigmas(num_steps, mu=self.linear_shift(math.prod(self.token_grid(size))))

    def _sigmas(self, num_steps: int, *, mu: float) -> Tensor:
        """The sigmas under a dynamic shift by `mu`, or the config's own shift if it holds for every size."""
        config = self.pipeline.scheduler.config
        # The first step must start at 1 and the last one end at `shift_terminal`, which one step cannot.
        if num_steps < 2 and config.get("shift_terminal"):
            raise ValueError(f"{num_steps} sampling step is too few for this scheduler; ask for at least 2 steps")
        options: dict[str, Any] = {"sigmas": np.linspace(1.0, 1 / num_steps, num_steps)}
        if self.scheduler_spaced:
            options = {"num_inference_steps": num_steps}
        if config.get("use_dynamic_shifting"):
            options["mu"] = mu
        # A scheduler of its own, because set_timesteps would change the pipeline's.
        scheduler = type(self.pipeline.scheduler).from_config(config)
        scheduler.set_timesteps(**options)
        sigmas: Tensor = scheduler.sigmas
        return sigmas.float().cpu()

    def shift(self, tokens: int, num_steps: int) -> float:
        """Where the scheduler shifts the sigmas of an image of `tokens` tokens to, as the pipeline tells it."""
        return self.linear_shift(tokens)

    def linear_shift(self, tokens: int) -> float:
        """The shift of FLUX.1's rule: linear in the tokens, between the bounds of the scheduler's config."""
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        config = self.pipeline.scheduler.config
        bounds = (config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift)
        return float(calculate_shift(tokens, *bounds))

    def noise(self, seeds: Sequence[int], size: Size) -> Tensor:
        factor = self.pipeline.vae_scale_factor
        shape = (self.latent_channels, size.height // factor, size.width // factor)
        # Codes are drawn and then packed, as the pipelines do: tokens of the same seed would be other noise.
        codes = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return to_device(pack(torch.stack(codes)), self.device)

    def velocity(self, x_BNC: Tensor, sigma_B: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
        raise NotImplementedError

    def predict(self, **inputs: Any) -> Tensor:
        """Run one forward of the transformer; the result is in fp32 or better."""
        return at_least_fp32(self.transformer(**inputs, return_dict=False)[0])

    @torch.no_grad()
    def decode(self, x_BNC: Tensor, size: Size) -> list[Image]:
        codes_BCHW = unpack(x_BNC, rows=self.token_grid(size)[0])
        # An accelerator is busy with one image, and a batch would multiply the peak. No VAE tiling: its seams would
        # poison a judge.
        together = len(codes_BCHW) if codes_BCHW.device.type == "cpu" else 1
        images: list[Image] = []
        for batch in codes_BCHW.split(together):
            pixels = self.decode_codes(batch)
            images += self.pipeline.image_processor.postprocess(pixels.float(), output_type="pil")
        return images

    def decode_codes(self, codes_BCHW: Tensor) -> Tensor:
        """Scaled VAE codes → pixels in [-1, 1]."""
        vae = self.pipeline.vae
        codes = codes_BCHW.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        pixels: Tensor = vae.decode(codes, return_dict=False)[0]
        return pixels

    def text_shapes(self, size: Size) -> dict[str, tuple[int, ...]]:
        """Shapes of what `encode_texts` gives for one text; `size` matters if the text encoder sees the source."""
        config: Any = self.pipeline.transformer.config
        length = self.clip_tokens + self.options.max_sequence_length
        return {"tokens": (length, config.joint_attention_dim), "pooled": (config.pooled_projection_dim,)}

    def source_shapes(self, size: Size) -> dict[str, tuple[int, ...]]:
        """Shapes of what `encode_sources` gives for one source."""
        return {"source": (math.prod(self.token_grid(size)), 4 * self.latent_channels)}

    def text_pass(self, size: Size, *, prompts: int) -> Callable[[], Any]:
        """The pass of the largest text encoder over so many prompts."""
        ids = torch.zeros(prompts, self.options.max_sequence_length, device=self.device, dtype=torch.long)
        return partial(getattr(self.pipeline, self.long_encoder), ids)

    def conditioning_on_meta(self, size: Size, *, batch: int) -> Conditioning:
        """What `encode` and `collate` would give for `batch` prompts, as empty tensors."""
        shapes = self.text_shapes(size)
        if self.options.negative_text is not None:
            shapes |= {f"negative_{name}": shape for name, shape in shapes.items()}
        if self.planned_sources:
            shapes |= self.source_shapes(size)
        dtype = self.pipeline.vae.dtype
        return Conditioning(
            {name: torch.empty(batch, *shape, device=self.device, dtype=dtype) for name, shape in shapes.items()}
        )


def check_alike(conditionings: Sequence[Conditioning], *, positions: str) -> None:
    """Raise ValueError if sources differ in number or shape: the rows of a batch are of one length, laid out alike.

    `positions` names the tensor that says how they are laid out, if a conditioning has it.
    """
    first = conditionings[0].tensors
    for tensors in (conditioning.tensors for conditioning in conditionings[1:]):
        if (
            first.keys() != tensors.keys()
            or ("source" in first and first["source"].shape != tensors["source"].shape)
            or (positions in first and not torch.equal(first[positions], tensors[positions]))
        ):
            raise ValueError(
                "a batch holds prompts whose sources differ in number or shape, and a batch has one shape; let "
                "sampling.batch and evaluation.batch divide the samples of one prompt, or set them to 1"
            )


def guided(forward: Callable[[str], Tensor], *, scale: float, keep_norm: bool = False) -> Tensor:
    """Classifier-free guidance: v = v⁻ + scale·(v⁺ − v⁻), in two forwards; one forward if `scale` is at most 1.

    Args:
        forward: Prefix of the conditioning's names ("" or "negative_") → the velocity (B, N, C) that reads them.
        scale: 1 is without guidance.
        keep_norm: Whether each token is brought back to the length of v⁺, as Qwen-Image's pipelines do.
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
