"""A world so small that a whole run takes about a second: a generator of three linear layers, a judge of one formula.

Everything else is the real thing: config, loop, processes, logs, checkpoints, adapters and pages, which reach both
through the tables that reach the released models. So it tests all of training but weights and their sizes.

    with toy_world():
        train_policy(toy_config(tmp_path / "run", "epochs=3"))

In a process of its own, `install()` does what `toy_world()` does for a block.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from einops import rearrange, repeat
from PIL import Image
from torch import Tensor, nn

from pacorl.config import base as configs
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.judge.local import LocalJudge
from pacorl.models.policies import DEFAULT_KIND, POLICIES
from pacorl.models.policies.flux import FLUX
from pacorl.models.policies.pipeline import check_multiple
from pacorl.models.policies.policy import PolicyOptions
from pacorl.models.policies.spec import PolicySpec
from pacorl.types import Conditioning, Prompt, Question, Size, Verdict

TOKEN_PIXELS = 4
"""A token is one colour, on a square of so many pixels a side."""
COLOURS = 3
TEXT_WIDTH = 4
HIDDEN_WIDTH = 16
CONTRAST = 0.5
"""What a latent of 1 changes of a colour in 0..1, whose middle is a latent of 0."""
TRAINING_SHIFT = 0.6
"""Share of the sampling shift in the noise levels of training."""
STRICTNESS = 6.0
"""How fast P(Yes) falls with the distance of colours."""

SETTINGS = [
    "epochs=2",
    "prompts_per_epoch=2",
    "group_size=4",
    "save_every=1",
    "trackers=[]",
    "model.dtype=float32",
    "model.gradient_checkpointing=false",
    "adapter.rank=2",
    "adapter.alpha=4",
    "prompts.train=tiny:train:4",
    "prompts.evaluation=tiny:dev:3",
    "sampling.size=[16,16]",
    "sampling.steps=3",
    "sampling.suffix={}",
    "sampling.batch=2",
    "evaluation.size=[32,32]",
    "evaluation.steps=5",
    "evaluation.batch=2",
    "judge.checkpoint=tiny",
    "advantages.credit=set",
    "optimizer.lr=0.01",
    "optimizer.updates_per_epoch=2",
]
"""Sizes and numbers of steps differ between training and evaluation, batches are not groups, and an epoch has several
updates, so that a test sees which of them the code took."""


def toy_config(out: Path, *overrides: str) -> PolicyConfig:
    """The config of a run of the toy world, to be run within `toy_world`."""
    return configs.load(PolicyConfig, None, [*SETTINGS, *overrides, f"out={out}"])


def install() -> None:
    """From here on generators of kind flux and judges of this process are the toy world's."""
    POLICIES._homes[DEFAULT_KIND] = f"{__name__}:TOY"
    LocalJudge.from_pretrained = lambda *source, **options: ToyJudge()  # type: ignore[assignment]


@contextmanager
def toy_world() -> Iterator[None]:
    """Within the block generators of kind flux and judges of this process are the toy world's."""
    policy, load = POLICIES._homes[DEFAULT_KIND], LocalJudge.__dict__["from_pretrained"]
    install()
    try:
        yield
    finally:
        POLICIES._homes[DEFAULT_KIND] = policy
        LocalJudge.from_pretrained = load


class ToyTransformer(nn.Module):
    """A token, its row and column, the text and σ in; the token's velocity out."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(COLOURS + 2 + TEXT_WIDTH + 1, HIDDEN_WIDTH)
        self.hidden = nn.Linear(HIDDEN_WIDTH, HIDDEN_WIDTH)
        self.out = nn.Linear(HIDDEN_WIDTH, COLOURS)

    def forward(self, x_BNC: Tensor, sigma_B: Tensor, text_BW: Tensor, place_N2: Tensor) -> Tensor:
        images, tokens, _ = x_BNC.shape
        facts = [
            x_BNC,
            repeat(place_N2, "n p -> b n p", b=images),
            repeat(text_BW, "b w -> b n w", n=tokens),
            repeat(sigma_B, "b -> b n 1", n=tokens),
        ]
        hidden = torch.tanh(self.hidden(torch.tanh(self.into(torch.cat(facts, -1)))))
        predicted: Tensor = x_BNC + self.out(hidden)  # x alone leads noise to a calm grey
        return predicted


class ToyPolicy:
    """Sets of images as coarse mosaics, with the methods of `PipelinePolicy`."""

    lora_targets: tuple[str, ...] = ("into", "hidden", "out")
    idle_layers: frozenset[str] = frozenset()
    text_encoders: tuple[nn.Module, ...] = ()

    def __init__(self, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.transformer: nn.Module = ToyTransformer().to(device, dtype).requires_grad_(False)

    def check_size(self, size: Size) -> None:
        check_multiple(size, step=2 * TOKEN_PIXELS)  # the panels of a 2x2 grid are whole tokens too

    def size_of(self, prompt: Prompt, size: Size) -> Size:
        return size

    def forward_key(self, prompt: Prompt, size: Size) -> Size:
        return self.size_of(prompt, size)

    def encode(self, prompts: Sequence[Prompt], size: Size) -> list[Conditioning]:
        """A vector per text, (1, TEXT_WIDTH), drawn by the text."""
        return [Conditioning({"text": torch.randn(1, TEXT_WIDTH, generator=_generator(p.text))}) for p in prompts]

    def free_encoders(self) -> None:
        """There are none."""

    def place_transformer(self, device: str | torch.device) -> None:
        self.transformer.to(device)

    def collate(self, conditionings: Sequence[Conditioning]) -> Conditioning:
        texts = torch.cat([conditioning.tensors["text"] for conditioning in conditionings])
        return Conditioning({"text": texts.to(next(self.transformer.parameters()).device)})

    def sigmas(self, num_steps: int, size: Size) -> Tensor:
        """(T+1,) from 1 to 0, shifted towards noise for larger images, as the real schedules are."""
        return _shifted(num_steps, size, factor=1.0)

    def training_sigmas(self, num_steps: int, size: Size) -> Tensor:
        """Shifted less than for sampling, as klein's are."""
        return _shifted(num_steps, size, factor=TRAINING_SHIFT)

    def token_grid(self, size: Size) -> tuple[int, int]:
        return _token_grid(size)

    def noise(self, seeds: Sequence[int], size: Size) -> Tensor:
        rows, cols = _token_grid(size)
        drawn = [torch.randn(rows * cols, COLOURS, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        weight = next(self.transformer.parameters())
        return torch.stack(drawn).to(weight.device, torch.promote_types(weight.dtype, torch.float32))

    def with_prefix(self, conditioning: Conditioning, size: Size) -> Conditioning:
        return conditioning

    def velocity(self, x_BNC: Tensor, sigma_B: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
        rows, cols = _token_grid(size)
        place_N2 = torch.cartesian_prod(torch.linspace(-1, 1, rows), torch.linspace(-1, 1, cols))
        weight = next(self.transformer.parameters())
        inputs = (x_BNC, sigma_B, conditioning.tensors["text"], place_N2)
        predicted: Tensor = self.transformer(*(tensor.to(weight.device, weight.dtype) for tensor in inputs))
        return predicted.to(torch.promote_types(predicted.dtype, torch.float32))

    def launch_decode(self, x_BNC: Tensor, size: Size) -> Callable[[], list[Image.Image]]:
        return lambda: self.decode(x_BNC, size)

    def decode(self, x_BNC: Tensor, size: Size) -> list[Image.Image]:
        rows, _ = _token_grid(size)
        colour_BNC = (0.5 + CONTRAST * x_BNC.detach().cpu()).clamp(0, 1)
        pixels_BHWC = repeat(
            rearrange(colour_BNC, "b (h w) c -> b h w c", h=rows),
            "b h w c -> b (h p) (w q) c",
            p=TOKEN_PIXELS,
            q=TOKEN_PIXELS,
        )
        return [Image.fromarray(pixels) for pixels in (255 * pixels_BHWC).round().byte().numpy()]


def _shifted(num_steps: int, size: Size, *, factor: float) -> Tensor:
    rows, cols = _token_grid(size)
    shift, even = factor * math.sqrt(rows * cols) / 4, torch.linspace(1, 0, num_steps + 1)
    return shift * even / (1 + (shift - 1) * even)


def _token_grid(size: Size) -> tuple[int, int]:
    return size.height // TOKEN_PIXELS, size.width // TOKEN_PIXELS


class ToyJudge:
    """P(Yes) = exp(−STRICTNESS·distance): of several images from each other, of one from the colour that its text
    stands for.

    Behind the seam of `judge.judge.Judge`.
    """

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        return [Verdict(math.exp(-STRICTNESS * _distance(question))) for question in questions]

    def explain(self, question: Question) -> str:
        return f"The colours lie {_distance(question):.3f} apart."


def _distance(question: Question) -> float:
    """The root mean squared distance of colours, in 0..1."""
    colours = [np.asarray(image.convert("RGB"), dtype=np.float64) / 255 for image in question.images]
    if len(colours) == 1:
        colours.append(torch.rand(COLOURS, generator=_generator(question.text)).double().numpy())
    return fmean(float(np.sqrt(((a - b) ** 2).mean())) for a, b in combinations(colours, 2))


def _generator(text: str) -> torch.Generator:
    """The same for the same text, on every machine."""
    return torch.Generator().manual_seed(zlib.crc32(text.encode()))


@dataclass(frozen=True, kw_only=True)
class ToySpec(PolicySpec):
    """FLUX's options over the toy generator."""

    def load(self, options: PolicyOptions, *, device: str | torch.device = "cpu", **flags: Any) -> Any:
        """The one toy generator; neither a checkpoint's name nor guidance, which configs give, changes it."""
        return ToyPolicy(dtype=getattr(torch, options.dtype), device=device)


TOY = ToySpec(**{field.name: getattr(FLUX, field.name) for field in fields(FLUX)})
