"""A generator of one's own: a transformer that is in no diffusers pipeline; docs/python.md explains it."""

import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, Literal

import torch
from diffusers import AutoencoderKL, ConfigMixin, FlowMatchEulerDiscreteScheduler, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.image_processor import VaeImageProcessor
from torch import nn
from torch.nn import functional as F

from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.models.policies.policy import PolicyOptions
from pacorl.models.policies.spec import PolicySpec

WORDS = 256
PADDING = 0
"""Of shorter texts in a batch; no word has this number."""


class Block(nn.Module):
    """Attention over all tokens, and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return x + self.mlp(x)


class Painter(ModelMixin, ConfigMixin):
    """Velocity of image tokens that attend to the words of a text."""

    @register_to_config
    def __init__(self, channels: int = 32, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.into = nn.Linear(channels + 3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.out = nn.Linear(width, channels)

    def forward(self, x_BNC: torch.Tensor, where_BN3: torch.Tensor, words_BL: torch.Tensor) -> torch.Tensor:
        """`where_BN3`: the noise level, row and column of each token."""
        words = self.words(words_BL)
        hidden = torch.cat([words, self.into(torch.cat([x_BNC, where_BN3], -1))], 1)
        # Without the mask, an image would depend on the longest text of its batch.
        seen = F.pad(words_BL != PADDING, (0, x_BNC.shape[1]), value=True)[:, None]
        for block in self.blocks:
            hidden = block(hidden, seen)
        return self.out(hidden[:, words.shape[1] :])


class PainterOptions(PolicyOptions):
    """The generator of this file."""

    kind: Literal["painter"] = "painter"
    checkpoint: str = ""


class PainterPolicy(PipelinePolicy):
    """`Painter` on the codes of an autoencoder. It reads texts itself, without an encoder."""

    lora_targets = ("qkv", "mlp.1", "mlp.3")
    encoders: ClassVar[dict[str, str]] = {}
    encode_batch = 1
    """One: a row of a longer batch would keep its padding."""

    def encode_texts(self, texts: list[str]) -> dict[str, torch.Tensor]:
        (text,) = texts
        return {"words": torch.tensor([[1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in text.split()]])}

    def collate(self, conditionings):
        longest = max(conditioning.tensors["words"].shape[1] for conditioning in conditionings)
        rows = [conditioning.tensors["words"] for conditioning in conditionings]
        padded = [F.pad(row, (0, longest - row.shape[1]), value=PADDING) for row in rows]
        return self.on_device({"words": torch.cat(padded)})

    def velocity(self, x_BNC, sigma_B, conditioning, size):
        rows, cols = self.token_grid(size)
        row_col = torch.cartesian_prod(torch.linspace(0, 1, rows), torch.linspace(0, 1, cols)).to(x_BNC)
        where = torch.cat([sigma_B[:, None, None].expand(-1, rows * cols, 1), row_col.expand(len(x_BNC), -1, -1)], -1)
        dtype = self.transformer.dtype
        return self.transformer(x_BNC.to(dtype), where.to(dtype), conditioning.tensors["words"]).float()


def load(checkpoint: str, *, dtype: torch.dtype) -> SimpleNamespace:
    """Load the parts of a pipeline that a policy uses."""
    folder = Path(checkpoint)
    vae = AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=dtype)
    components = {
        "transformer": Painter.from_pretrained(folder / "transformer", torch_dtype=dtype),
        "vae": vae,
        "scheduler": FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
    }
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    images = VaeImageProcessor(vae_scale_factor=2 * factor)
    return SimpleNamespace(**components, components=components, vae_scale_factor=factor, image_processor=images)


PAINTER = PolicySpec(options=PainterOptions, policy=PainterPolicy, pipeline=load, steps=10)
