"""FLUX.2-klein as a policy: sets, edits of one to four images, and references of characters, by one model.

Sources and references follow the generated image in the sequence, with their own position ids. An edit's size is an
area: the image has the first source's aspect, each side cut to whole tokens (16 pixels). That source is resized to the
image's size, a further one and a reference to the same area in its own aspect, and none to more than 1024², as the
pipeline does it.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from pacorl.io.images import open_image, upright_size
from pacorl.models.policies.pipeline import JOINT_ATTENTION, PipelinePolicy, best_sides, guided, pack, timestep_for
from pacorl.models.policies.policy import Guidance, PolicyOptions
from pacorl.models.policies.spec import PolicySpec
from pacorl.types import Conditioning, Prompt, Size

SOURCE_AREA = 1024 * 1024
"""Largest area of a source in the pipeline."""
SOURCE_STRIDE = 10
"""Distance of the position ids of consecutive images, by the pipeline's rule."""

LORA_TARGETS = (
    *JOINT_ATTENTION,
    "ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out", "attn.to_qkv_mlp_proj",
)  # fmt: skip
"""FLUX's targets by the names of FLUX.2's blocks, and the fused layers of its single-stream blocks."""


class KleinOptions(Guidance):
    """The generator FLUX.2-klein, not distilled, which makes sets and edits."""

    kind: Literal["klein"] = "klein"
    checkpoint: str = "black-forest-labs/FLUX.2-klein-base-4B"
    """A diffusers folder, or a name on the hub."""
    max_sequence_length: int = Field(512, ge=1, le=4096)
    """Qwen3 tokens per prompt."""


class KleinPolicy(PipelinePolicy):
    """A `Flux2KleinPipeline` behind the policy seam."""

    training_shift = "linear"  # as FLUX.1's
    patch = 1
    merged = 2
    forward_per = "layout"
    max_sources = 4  # docs.bfl.ai/guides/prompting_editing_overview
    max_references = 4
    source_optional = True
    encoders: ClassVar[Mapping[str, str]] = {"text_encoder": "Qwen3 text encoder"}
    long_encoder = "text_encoder"

    def __init__(self, pipeline: Any, options: PolicyOptions) -> None:
        super().__init__(pipeline, options)
        if pipeline.config.is_distilled and self.options.guidance_scale > 1:
            raise ValueError(
                f"model.guidance_scale {self.options.guidance_scale:g} with a distilled FLUX.2-klein, which is not "
                "guided; set it to 1, or name a base checkpoint"
            )
        # By their full names: in a double-stream block `attn.to_out` is a list, to which PEFT adds no adapter.
        blocks = range(len(pipeline.transformer.single_transformer_blocks))
        self.lora_targets = (*LORA_TARGETS, *(f"single_transformer_blocks.{block}.attn.to_out" for block in blocks))

    def edit_size(self, sources: Sequence[Path], area: int) -> Size:
        """Return an area in the first source's aspect, in whole tokens."""
        rule = self._fit(sources[0], area)
        return best_sides(area, upright_size(sources[0]), step=self.token_pixels, rule=rule)

    def _fit(self, path: Path, area: int) -> Size:
        """Compute the size of at most `area` pixels in the aspect of a source."""
        source = upright_size(path)
        step = self.token_pixels
        # Integer arithmetic: a rounded root would cut a token off one square source of eight.
        rows = math.isqrt(area * source.height // (source.width * step**2))
        cols = math.isqrt(area * source.width // (source.height * step**2))
        return Size(max(1, rows) * step, max(1, cols) * step)

    def encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        """Encode texts as `tokens` (B, L, 3D): three hidden layers of Qwen3, side by side."""
        tokens, _ = self.pipeline.encode_prompt(texts, max_sequence_length=self.options.max_sequence_length)
        return {"tokens": tokens}

    def in_template(self, text: str) -> str:
        chat = [{"role": "user", "content": text}]
        options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
        return str(self.pipeline.tokenizer.apply_chat_template(chat, **options))

    def image_sizes(self, prompt: Prompt, size: Size) -> list[Size]:
        # The pipeline shrinks larger sources to this area.
        area = min(size.height * size.width, SOURCE_AREA)
        sizes = [self._fit(path, area) for path in self.image_paths(prompt)]
        # The first source has the image's size: cutting to whole tokens twice could make it smaller.
        if prompt.sources and size.height * size.width <= SOURCE_AREA:
            sizes[0] = size
        return sizes

    def encode_sources(self, prompt: Prompt, size: Size) -> dict[str, Tensor]:
        """Encode the images' concatenated tokens `source` (1, M, C) and their `source_ids` (1, M, 4)."""
        paths = self.image_paths(prompt)
        if not paths:
            return {}
        tokens = []
        ids = []
        for number, (path, shown) in enumerate(zip(paths, self.image_sizes(prompt, size), strict=True), 1):
            tokens.append(self.encode_image(open_image(path), shown))
            ids.append(position_ids(*self.token_grid(shown), image=SOURCE_STRIDE * number))
        return {"source": torch.cat(tokens, 1), "source_ids": torch.cat(ids)[None]}

    def encode_pixels(self, pixels_BCHW: Tensor) -> Tensor:
        return pack(self.pipeline._encode_vae_image(pixels_BCHW, generator=None), patch=self.patch)

    def decode_codes(self, codes_BCHW: Tensor) -> Tensor:
        vae = self.pipeline.vae
        codes = codes_BCHW.to(vae.dtype)
        mean_C, variance_C = vae.bn.running_mean, vae.bn.running_var
        std_C = (variance_C + vae.config.batch_norm_eps).sqrt()
        codes = codes * std_C.to(codes)[:, None, None] + mean_C.to(codes)[:, None, None]
        pixels: Tensor = vae.decode(self.pipeline._unpatchify_latents(codes), return_dict=False)[0]
        return pixels

    def shift(self, tokens: int, num_steps: int) -> float:
        from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

        return float(compute_empirical_mu(tokens, num_steps))

    def velocity(self, x_BNC: Tensor, sigma_B: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
        # Tokens and positions of the image, then of the sources.
        tensors = conditioning.tensors
        hidden_BMC = x_BNC
        ids_M4 = position_ids(*self.token_grid(size), device=x_BNC.device)
        if "source" in tensors:
            # Sources follow the generated tokens, marked by their position ids.
            hidden_BMC = torch.cat([x_BNC, tensors["source"].to(x_BNC.dtype)], 1)
            ids_M4 = torch.cat([ids_M4, tensors["source_ids"][0].to(ids_M4)])

        def read(prefix: str) -> Tensor:
            tokens = tensors[f"{prefix}tokens"]
            predicted = self.predict(
                hidden_states=hidden_BMC.to(tokens.dtype),
                timestep=timestep_for(sigma_B, tokens.dtype),
                encoder_hidden_states=tokens,
                txt_ids=position_ids(1, 1, tokens=tokens.shape[1], device=x_BNC.device),
                img_ids=ids_M4,
            )
            # The velocity of the sources is not used.
            return predicted[:, : x_BNC.shape[1]]

        return guided(read, scale=self.options.guidance_scale)


def position_ids(
    rows: int, cols: int, *, image: int = 0, tokens: int = 1, device: torch.device | str = "cpu"
) -> Tensor:
    """Build (N, 4): image, row, column and text position of each token."""
    axes = (torch.arange(count, device=device) for count in (1, rows, cols, tokens))
    ids = torch.cartesian_prod(*axes)
    if image:
        return ids + ids.new_tensor([image, 0, 0, 0])
    return ids


KLEIN = PolicySpec(
    options=KleinOptions,
    policy=KleinPolicy,
    pipeline="Flux2KleinPipeline",
    hub_name="flux.?2.*klein",
    architecture="flux2_klein.json",
    steps=50,
    parameters=3_875_544_576,
    licence=("apache-2.0", ""),
    distilled={
        "FLUX.2-klein-4B": "black-forest-labs/FLUX.2-klein-base-4B",
        "FLUX.2-klein-9B": "black-forest-labs/FLUX.2-klein-base-9B",
        "FLUX.2-klein-9B-KV": "black-forest-labs/FLUX.2-klein-base-9B",
    },
)
