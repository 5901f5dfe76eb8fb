"""DreamSim (arXiv 2306.09344) as a reward: panels that people would call alike. Needs its own package.

pip install dreamsim        brings torchvision, timm and open_clip; its weights load on first use
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from PIL.Image import Image

from pacorl.core.grid import split
from pacorl.rewards.reward import RewardError, check_pairs
from pacorl.types import Prompt


class DreamSim:
    """1 − DreamSim distance of two panels, mean over pairs. `variant` is one of the package's `dreamsim_type`."""

    def __init__(
        self, variant: str = "ensemble", cache: str = "~/.cache/dreamsim", device: str | torch.device = "cpu"
    ) -> None:
        self.variant = variant
        self.cache = cache
        self.device = str(device)
        self._loaded: tuple[Any, Any] | None = None

    def load(self) -> tuple[Any, Any]:
        """Load (model, preprocessing). Raises RewardError if the package is not installed."""
        if self._loaded is None:
            try:
                from dreamsim import dreamsim  # type: ignore[import-not-found]
            except ImportError as error:
                raise RewardError(
                    f"reward 'dreamsim' needs the package dreamsim ({error}); install it with `pip install dreamsim`"
                ) from None
            cache = Path(self.cache).expanduser()
            cache.parent.mkdir(parents=True, exist_ok=True)  # the package makes the last folder alone
            self._loaded = dreamsim(
                pretrained=True, device=self.device, dreamsim_type=self.variant, cache_dir=str(cache)
            )
        return self._loaded

    def check(self, prompts: Sequence[Prompt]) -> None:
        check_pairs("dreamsim", prompts)

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        model, preprocess = self.load()
        scores: list[float | None] = []
        for prompt, image in zip(prompts, images, strict=True):
            panels = []
            for panel in split(image, prompt.grid):
                panels.append(preprocess(panel.convert("RGB")).to(self.device))
            scores.append(fmean(1.0 - float(model(*pair).squeeze()) for pair in combinations(panels, 2)))
        return scores
