"""The domain of a judge: the images that it was trained to judge.

A judge trained in a small world also answers questions about photographs, but meaninglessly. A checkpoint may therefore
contain a `domain.json` and a `domain.safetensors`: a classifier of a few thousand parameters on small copies of the
images. Interfaces for users (`pacorl score`, `PacoReward`, the studio, the built-in server) check it first, and an
image outside becomes a missing verdict with the reason. Training rewards never use it: the noise of early training must
be punished, not left out.

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

from pacorl.core.batches import in_batches
from pacorl.io.documents import read_object, write_json
from pacorl.io.files import write_atomic
from pacorl.io.images import as_rgb
from pacorl.models.lora.formats import check_finite
from pacorl.types import Question, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image

SETTINGS_FILE = "domain.json"
WEIGHTS_FILE = "domain.safetensors"
BATCH = 256
"""Images per pass of the classifier."""


class DomainNet(nn.Module):
    """Four convolutions, then the mean and the maximum of each channel: (B, 3, H, W) in −1..1 → (B,) logits.

    Above 0 the image is more likely outside.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 2 * width, 4 * width]
        self.layers = nn.ModuleList()
        for i, stride in enumerate((1, 2, 2, 2)):
            self.layers.append(nn.Conv2d(sizes[i], sizes[i + 1], kernel_size=3, stride=stride, padding=1))
        self.head = nn.Linear(2 * sizes[-1], 1)

    def forward(self, pixels_B3HW: Tensor) -> Tensor:
        x = pixels_B3HW
        for layer in self.layers:
            x = F.silu(layer(x))
        # Mean and maximum: one foreign object in a familiar scene must count.
        return Tensor(self.head(torch.cat([x.mean((2, 3)), x.amax((2, 3))], dim=1))[:, 0])


@dataclass(frozen=True)
class Domain:
    """A classifier of images outside the domain, its threshold, and the domain's name."""

    net: DomainNet
    name: str
    """Description of the domain, e.g. `the tiny world of drawn characters`."""
    size: int
    """Height and width of the classifier's copies."""
    threshold: float
    """The logit above which an image is outside."""

    @classmethod
    def load(cls, checkpoint: str | Path) -> Domain | None:
        """Load the domain of a checkpoint folder or hub name; None if it has none.

        Raises ValueError naming the file if it is damaged.
        """
        from safetensors.torch import load_file
        from transformers.utils import cached_file

        # Silent: most checkpoints have none, and offline machines cannot reach the hub.
        silent = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        settings_file = cached_file(checkpoint, SETTINGS_FILE, **silent)
        if not settings_file:
            return None

        try:
            # The classifier's weights; a logit of NaN would be above no threshold, so every image would be inside.
            settings = read_object(Path(settings_file))
            net = DomainNet(int(settings["width"]))
            weights_file = cached_file(checkpoint, WEIGHTS_FILE, **silent)
            file = Path(weights_file or Path(settings_file).with_name(WEIGHTS_FILE))
            if not file.is_file():
                raise ValueError(f"{file} is missing")
            weights = load_file(file)
            check_finite(file, weights)
            net.load_state_dict({name: weight.float() for name, weight in weights.items()})
            net.eval().requires_grad_(False)
            return cls(net, str(settings["name"]), int(settings["size"]), float(settings["threshold"]))
        except Exception as error:  # bad files raise many types
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{settings_file}: not a judge's domain ({reason}); take it away or make it again"
            ) from None

    def save(self, folder: Path) -> None:
        """Write both files, the weights in fp16."""
        from safetensors.torch import save

        width = self.net.layers[0].out_channels
        settings = {"name": self.name, "width": width, "size": self.size, "threshold": self.threshold}
        weights = {}
        for name, weight in self.net.state_dict().items():
            weights[name] = weight.half()
        # The settings last, since `load` looks for them first.
        write_atomic(folder / WEIGHTS_FILE, save(weights))
        write_json(folder / SETTINGS_FILE, settings)

    def verdicts(
        self, ask: Callable[[Sequence[Question]], Sequence[Verdict]], questions: Sequence[Question]
    ) -> list[Verdict]:
        """Ask the questions whose images are all inside; further verdicts are missing, with the reason."""
        # Classify each image once, even if several questions share it.
        images: dict[int, Image] = {}
        for question in questions:
            for image in question.images:
                images[id(image)] = image
        outside = dict(zip(images, self.outside(list(images.values())), strict=True))

        reasons = []
        inside = []
        for question in questions:
            reason = self.reason([outside[id(image)] for image in question.images])
            reasons.append(reason)
            if not reason:
                inside.append(question)

        # The answers are of the inside questions alone, in their order.
        answers = iter(ask(inside) if inside else [])
        verdicts = []
        for reason in reasons:
            if reason:
                verdicts.append(Verdict(None, reason, declined=True))
            else:
                verdicts.append(next(answers))
        return verdicts

    def reason(self, outside: Sequence[bool]) -> str:
        """Explain why the judge declines a question, by `outside` of its images; empty if all are inside."""
        numbers = []
        for number, is_outside in enumerate(outside, 1):
            if is_outside:
                numbers.append(f"image {number}")
        if not numbers:
            return ""

        which = "the image" if len(outside) == 1 else " and ".join(numbers)
        verb = "shows" if len(numbers) == 1 else "show"
        return f"this judge knows {self.name} only, and {which} {verb} something else"

    def outside(self, images: Sequence[Image]) -> list[bool]:
        """Return whether each image is outside. Raises ImageError for an invalid image."""
        return (self.logits(images) > self.threshold).tolist()

    @torch.inference_mode()
    def logits(self, images: Sequence[Image]) -> Tensor:
        """Compute the (B,) logits from small copies of the images, of any shape."""
        logits = [torch.empty(0)]
        for batch in in_batches(images, BATCH):
            copies = [np.asarray(thumbnail(image, size=self.size)) for image in batch]
            logits.append(self.net(to_pixels(torch.from_numpy(np.stack(copies)))))
        return torch.cat(logits)


def thumbnail(image: Image, *, size: int) -> Image:
    """Resize an image for the classifier. Raises ImageError for an invalid image."""
    return as_rgb(image, "the image").resize((size, size), Resampling.BICUBIC)


def to_pixels(bytes_BHW3: Tensor) -> Tensor:
    """Convert 8-bit images to (B, 3, H, W) in −1..1."""
    return bytes_BHW3.permute(0, 3, 1, 2).float() / 127.5 - 1
