"""A generator by any name: a policy, the adapter that it wears, and what it is asked for by default.

Painting is `engine.rollout.sample_images`, the only denoising loop. A picture's noise comes from its own seed, as a
diffusers pipeline draws it from `torch.Generator().manual_seed(seed)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from pacorl.core.sampling import Sampler
from pacorl.engine.rollout import ConditioningCache, sample_images
from pacorl.io.documents import read_object
from pacorl.lora.adapters import adapter_off, load_lora
from pacorl.policies.flux import TINY_SEQUENCE_LENGTH
from pacorl.policies.table import POLICIES, distilled_options
from pacorl.types import TINY, Conditioning, Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.policies.policy import Policy

KIND_OF_PIPELINE = {
    "FluxPipeline": "flux",
    "FluxKontextPipeline": "kontext",
    "QwenImageEditPipeline": "qwen_edit",
    "QwenImageEditPlusPipeline": "qwen_edit_plus",
}
"""A diffusers folder's class → the policy that runs it."""

SETS = "flux"
"""The kind that paints from words alone; every other kind edits a source."""

TINY_SIZE, SIZE = Size(128, 128), Size(1024, 1024)
TINY_STEPS, STEPS = 10, 20
TINY_EDIT_SIZE = Size(32, 32)
TINY_GUIDANCE = 3.5
"""What the tiny generators were trained with (configs/tiny.yaml, configs/tiny_edit.yaml)."""

Step = Callable[[int], None]
"""Hears how many pictures took one denoising step; may raise to stop."""


class Generator:
    """A policy with the names that a picture's recipe needs."""

    def __init__(self, policy: Policy, *, model: str, kind: str = SETS, adapter: str = "") -> None:
        self.policy, self.model, self.kind, self.adapter = policy, model, kind, adapter
        self.batch = 4 if model == TINY else 1
        self._cache = ConditioningCache(policy)

    @classmethod
    def load(
        cls,
        model: str = TINY,
        *,
        kind: str = "",
        adapter: str = "",
        guidance: float | None = None,
        true_cfg_scale: float | None = None,
        negative_prompt: str | None = None,
        dtype: str = "auto",
        device: str = "",
        max_sequence_length: int | None = None,
    ) -> Generator:
        """A diffusers folder, a hub name or "tiny", with an adapter (PEFT or diffusers form, folder, file or hub name).

        kind: of POLICIES; found out where it is empty. None and "auto" are the policy's own defaults: bfloat16 on a
        GPU, float32 elsewhere. Raises ValueError for unknown kinds and for adapters that do not fit.
        """
        kind = kind or kind_of(model)
        given = distilled_options(kind, guidance=guidance, max_sequence_length=max_sequence_length)
        _check_tiny(model, kind)
        if model == TINY:
            given = {"max_sequence_length": TINY_SEQUENCE_LENGTH, "guidance": TINY_GUIDANCE} | given
        on_gpu = torch.cuda.is_available()
        device = device or ("cuda" if on_gpu else "cpu")
        best = "bfloat16" if on_gpu and model != TINY else "float32"
        true = {"true_cfg_scale": true_cfg_scale, "negative_prompt": negative_prompt}
        given |= {name: value for name, value in true.items() if value is not None}
        policy = POLICIES[kind](model, dtype=best if dtype == "auto" else dtype, device=device, **given)
        if adapter:
            load_lora(policy.transformer, adapter)
            policy.transformer.to(device)
        return cls(policy, model=model, kind=kind, adapter=adapter)

    @property
    def edits(self) -> bool:
        """Whether it edits sources, rather than paint sets."""
        return self.kind != SETS

    @property
    def guidance(self) -> float | None:
        value = getattr(self.policy, "guidance", None)
        return None if value is None else float(value)

    @property
    def true_cfg_scale(self) -> float | None:
        """The true guidance scale where it does something."""
        value = float(getattr(self.policy, "true_cfg_scale", 1.0))
        return value if value != 1 else None

    @property
    def note(self) -> str:
        """What one who sees its pictures must know of it; empty for most."""
        return TINY_NOTE if self.model == TINY else ""

    def size_of(self, prompt: Prompt, size: Size | None = None) -> Size:
        """The size at which a prompt is painted: for a set what is asked for, for an edit that area in the shape of
        its source."""
        asked = self._asked(prompt, size)
        self.policy.check_size(asked)
        return self.policy.size_of(prompt, asked)

    def _asked(self, prompt: Prompt, size: Size | None) -> Size:
        """What is asked for, the tiny world's, the record's, or 1024 × 1024."""
        if self.model == TINY:
            return size or (TINY_EDIT_SIZE if self.edits else TINY_SIZE)
        return size or prompt.size or SIZE

    @property
    def default_steps(self) -> int:
        return TINY_STEPS if self.model == TINY else STEPS

    def check(self, prompts: Sequence[Prompt], size: Size | None = None) -> None:
        """Raises ValueError for a size that it cannot paint, a source that it cannot edit, an edit without a source."""
        for prompt in prompts:
            if bool(prompt.sources) != self.edits:
                raise ValueError(
                    f"{self.model} edits pictures, and there is none; give one with --image"
                    if self.edits
                    else f"{self.model} paints sets and edits no pictures; {EDITOR}"
                )
            self.size_of(prompt, size)

    def paint(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        *,
        size: Size | None = None,
        steps: int | None = None,
        base: bool = False,
        on_step: Step = lambda pictures: None,
    ) -> list[Image]:
        """One picture per (prompt, seed), in order; `base` leaves the adapter off.

        Two batches of other sizes may differ in a pixel's last bit, as floating point does.
        """
        self.check(prompts, size)
        sizes = [self._asked(prompt, size) for prompt in prompts]
        watched = cast("Policy", _Watched(self.policy, on_step))
        painted: dict[int, Image] = {}
        with adapter_off(self.policy.transformer) if base and self.adapter else nullcontext():
            for one in dict.fromkeys(sizes):
                rows = [row for row, own in enumerate(sizes) if own == one]
                images = sample_images(
                    watched,
                    [prompts[row] for row in rows],
                    sampler=Sampler(size=one, steps=steps or self.default_steps),
                    cache=self._cache,
                    seeds=[seeds[row] for row in rows],
                    batch=self.batch,
                )
                painted |= dict(zip(rows, images, strict=True))
        return [painted[row] for row in range(len(prompts))]


EDITOR = "name an editor with --model, e.g. black-forest-labs/FLUX.1-Kontext-dev"

TINY_NOTE = (
    "Painted by the embedded tiny generator, which knows the tiny world of drawn characters only. Name a real one with "
    "--model, e.g. black-forest-labs/FLUX.1-dev."
)


def kind_of(model: str, *, edit: bool = False) -> str:
    """The kind of a checkpoint, by its folder's index or by its name; the tiny one is whichever the task needs."""
    if model == TINY:
        return "kontext" if edit else SETS
    index = Path(model) / "model_index.json"
    if index.is_file():
        found = str(read_object(index).get("_class_name", ""))
        if found not in KIND_OF_PIPELINE:
            raise ValueError(
                f"{model} is a {found or 'pipeline without a name'}; there are {', '.join(KIND_OF_PIPELINE)}"
            )
        return KIND_OF_PIPELINE[found]
    name = model.lower()
    if "kontext" in name:
        return "kontext"
    if "qwen-image-edit" in name:
        return "qwen_edit_plus" if "plus" in name or "2509" in name or "2511" in name else "qwen_edit"
    return SETS


def _check_tiny(model: str, kind: str) -> None:
    if model == TINY and kind not in (SETS, "kontext"):
        raise ValueError(f"the embedded tiny generators are a flux and a kontext, not a {kind}; {EDITOR}")


class _Watched:
    """A policy that tells of every step that it is asked for."""

    def __init__(self, policy: Policy, on_step: Step) -> None:
        self._policy, self._on_step = policy, on_step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def velocity(
        self, x_BNC: torch.Tensor, sigma_B: torch.Tensor, conditioning: Conditioning, size: Size
    ) -> torch.Tensor:
        velocity = self._policy.velocity(x_BNC, sigma_B, conditioning, size)
        self._on_step(len(x_BNC))
        return velocity
