"""The domain of a judge: which images it can judge at all.

A judge that was trained in a small world answers anything that it is shown, and what it answers to a photograph means
nothing. A checkpoint may therefore hold a `domain.json` and a `domain.safetensors` beside its weights: a classifier of
a few thousand parameters that looks at small copies of the images. Whoever takes images from a person (`pacorl score`,
`PacoReward`, the studio, the built-in server) asks it first, and an image outside becomes a missing verdict with the
reason. A training reward never asks it: the noise of early training must be punished, not left out.

The classifier learns from images of the domain and from drawn images outside it (outlier exposure, arXiv 1812.04606).

Legend: B images, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL.Image import Resampling
from torch import Tensor, nn
from torch.nn import functional as F

from pacorl.io.documents import read_object, write_json
from pacorl.io.files import write_atomic
from pacorl.io.images import as_rgb
from pacorl.models.lora.formats import check_finite
from pacorl.types import Question, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image

SETTINGS_FILE, WEIGHTS_FILE = "domain.json", "domain.safetensors"
BATCH = 256
"""Images that pass the classifier together."""


class DomainNet(nn.Module):
    """Four convolutions, then the mean and the maximum of each channel: (B, 3, H, W) in −1..1 → (B,) logits.

    Above 0 the image is more likely outside.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 2 * width, 4 * width]
        self.layers = nn.ModuleList(
            nn.Conv2d(sizes[i], sizes[i + 1], kernel_size=3, stride=1 if i == 0 else 2, padding=1) for i in range(4)
        )
        self.head = nn.Linear(2 * sizes[-1], 1)

    def forward(self, pixels_B3HW: Tensor) -> Tensor:
        x = pixels_B3HW
        for layer in self.layers:
            x = F.silu(layer(x))
        # The maximum beside the mean: one foreign object in a familiar scene must count.
        return Tensor(self.head(torch.cat([x.mean((2, 3)), x.amax((2, 3))], dim=1))[:, 0])


@dataclass(frozen=True)
class Domain:
    """A classifier of images, its threshold, and what to say of images outside."""

    net: DomainNet
    name: str
    """What the judge knows, e.g. `the tiny world of drawn characters`."""
    size: int
    """Height and width of the copies that the classifier looks at."""
    threshold: float
    """The logit above which an image is outside."""

    @classmethod
    def load(cls, checkpoint: str | Path) -> Domain | None:
        """The domain of a checkpoint folder or hub name; None if it has none.

        Raises ValueError naming the file if it is damaged.
        """
        from safetensors.torch import load_file
        from transformers.utils import cached_file

        # Not every checkpoint has one, and an offline machine cannot ask the hub.
        silent = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        settings_file = cached_file(checkpoint, SETTINGS_FILE, **silent)
        if not settings_file:
            return None
        try:
            settings = read_object(Path(settings_file))
            net = DomainNet(int(settings["width"]))
            weights_file = cached_file(checkpoint, WEIGHTS_FILE, **silent)
            file = Path(weights_file or Path(settings_file).with_name(WEIGHTS_FILE))
            if not file.is_file():
                raise ValueError(f"{file} is missing")
            weights = load_file(file)
            # A logit of NaN is above no threshold, so every image would be inside.
            check_finite(file, weights)
            net.load_state_dict({name: weight.float() for name, weight in weights.items()})
            net.eval().requires_grad_(False)
            return cls(net, str(settings["name"]), int(settings["size"]), float(settings["threshold"]))
        except Exception as error:  # a bad file shows itself in many ways
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{settings_file}: not a judge's domain ({reason}); take it away or make it again"
            ) from None

    def save(self, folder: Path) -> None:
        """Writes both files, the weights in fp16."""
        from safetensors.torch import save

        width = self.net.layers[0].out_channels
        settings = {"name": self.name, "width": width, "size": self.size, "threshold": self.threshold}
        weights = {name: weight.half() for name, weight in self.net.state_dict().items()}
        # The settings last: they are what `load` looks for.
        write_atomic(folder / WEIGHTS_FILE, save(weights))
        write_json(folder / SETTINGS_FILE, settings)

    def verdicts(
        self, ask: Callable[[Sequence[Question]], Sequence[Verdict]], questions: Sequence[Question]
    ) -> list[Verdict]:
        """Asks the questions whose images are all inside; the verdicts of the others are missing, and say why."""
        # An image of several questions passes the classifier once.
        images = {id(image): image for question in questions for image in question.images}
        outside = dict(zip(images, self.outside(list(images.values())), strict=True))
        reasons = [self._reason([outside[id(image)] for image in question.images]) for question in questions]
        inside = {number: question for number, question in enumerate(questions) if not reasons[number]}
        verdicts = dict(zip(inside, ask(list(inside.values())) if inside else [], strict=True))
        return [verdicts.get(number) or Verdict(None, reason, declined=True) for number, reason in enumerate(reasons)]

    def reason(self, images: Sequence[Image]) -> str:
        """Why the judge declines a question about these images; empty if they are all inside."""
        return self._reason(self.outside(images))

    def _reason(self, outside: Sequence[bool]) -> str:
        if not any(outside):
            return ""
        numbers = [f"image {number}" for number, is_outside in enumerate(outside, 1) if is_outside]
        which = "the image" if len(outside) == 1 else " and ".join(numbers)
        verb = "shows" if len(numbers) == 1 else "show"
        return f"this judge knows {self.name} only, and {which} {verb} something else"

    def outside(self, images: Sequence[Image]) -> list[bool]:
        """Whether each image is outside. Raises ImageError for one that no judge can look at."""
        return (self.logits(images) > self.threshold).tolist()

    @torch.inference_mode()
    def logits(self, images: Sequence[Image]) -> Tensor:
        """(B,); small copies of the images are looked at, whatever their shape."""
        logits = [torch.empty(0)]
        for start in range(0, len(images), BATCH):
            copies = [np.asarray(thumbnail(image, size=self.size)) for image in images[start : start + BATCH]]
            logits.append(self.net(to_pixels(torch.from_numpy(np.stack(copies)))))
        return torch.cat(logits)


def thumbnail(image: Image, *, size: int) -> Image:
    """What the classifier sees of an image. Raises ImageError if no judge can look at it."""
    return as_rgb(image, "the image").resize((size, size), Resampling.BICUBIC)


def to_pixels(bytes_BHW3: Tensor) -> Tensor:
    """8-bit images → (B, 3, H, W) in −1..1."""
    return bytes_BHW3.permute(0, 3, 1, 2).float() / 127.5 - 1
