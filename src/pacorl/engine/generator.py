"""A generator by any name: a policy, its adapter, and what it is asked for by default.

    generator = Generator.load("black-forest-labs/FLUX.1-dev", adapter="runs/sets/adapter")
    images = generator.sample([prompt], seeds=[0])

Sampling is `engine.rollout.sample_images`, the only denoising loop. An image's noise comes from its own seed, as a
diffusers pipeline draws it from `torch.Generator().manual_seed(seed)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch

from pacorl.core.sampling import Sampler
from pacorl.engine.rollout import ConditioningCache, sample_images
from pacorl.lora.adapters import adapter_off, load_lora
from pacorl.policies import DEFAULT_KIND, POLICIES, kind_of
from pacorl.types import TINY, Conditioning, Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.policies.pipeline import PipelinePolicy
    from pacorl.policies.policy import Policy

SIZE = Size(1024, 1024)

Step = Callable[[int], None]
"""Called with the number of images that took one denoising step; may raise to stop."""


class Generator:
    """A policy with the names that an image's recipe needs."""

    def __init__(self, policy: PipelinePolicy, *, model: str, kind: str = DEFAULT_KIND, adapter: str = "") -> None:
        """
        Args:
            policy: Wears its adapter already.
            model: The checkpoint, as the recipe names it.
            kind: Of `POLICIES`.
            adapter: What the recipe names it.
        """
        self.policy, self.model, self.kind, self.adapter = policy, model, kind, adapter
        self.spec = POLICIES.named(kind)
        self._tiny = self.spec.tiny if model == TINY else None
        self.batch = self._tiny.batch if self._tiny else 1
        self._cache = ConditioningCache(policy)

    @classmethod
    def load(
        cls,
        model: str = TINY,
        *,
        kind: str = "",
        adapter: str = "",
        dtype: str = "auto",
        device: str = "",
        **options: Any,
    ) -> Generator:
        """Load a checkpoint, with an adapter if one is named.

        Args:
            model: A diffusers folder, a hub name or "tiny".
            kind: Of `POLICIES`; the checkpoint's own if left out.
            adapter: PEFT or diffusers form: a folder, file or hub name.
            dtype: Of the weights; "auto" is bfloat16 on a GPU and float32 elsewhere.
            device: A GPU if left out and there is one.
            options: Of the kind by name, such as guidance_scale; None is the checkpoint's default.

        Raises:
            ValueError: The kind is unknown, takes no such option, or the adapter does not fit.
        """
        spec = POLICIES.named(kind or kind_of(model))
        on_gpu = torch.cuda.is_available()
        device = device or ("cuda" if on_gpu else "cpu")
        best = "bfloat16" if on_gpu and model != TINY else "float32"
        chosen = spec.options_for(model, dtype=best if dtype == "auto" else dtype, **options)
        policy = spec.load(chosen, device=device)
        if adapter:
            load_lora(policy.transformer, adapter)
            policy.transformer.to(device)
        return cls(policy, model=model, kind=spec.kind, adapter=adapter)

    @property
    def edits(self) -> bool:
        """Whether it edits sources, rather than make sets."""
        return self.spec.edits

    @property
    def guidance_scale(self) -> float | None:
        """None for kinds without."""
        return cast("float | None", getattr(self.policy.options, "guidance_scale", None))

    @property
    def true_cfg_scale(self) -> float | None:
        """The scale if it does something."""
        scale = float(getattr(self.policy.options, "true_cfg_scale", 1.0))
        return scale if scale != 1 else None

    @property
    def note(self) -> str:
        """What a reader of its images has to know; empty for most."""
        return self._tiny.note if self._tiny else ""

    @property
    def default_steps(self) -> int:
        """Denoising steps if nobody says how many: the tiny checkpoint's, or those of the kind's published one."""
        return self._tiny.steps if self._tiny else self.spec.steps

    def size_of(self, prompt: Prompt, size: Size | None = None) -> Size:
        """The size of a prompt's image: for a set what is asked for, for an edit that area in its source's shape."""
        requested = self._requested_size(prompt, size)
        self.policy.check_size(requested)
        return self.policy.size_of(prompt, requested)

    def _requested_size(self, prompt: Prompt, size: Size | None) -> Size:
        """What is asked for, the tiny checkpoint's, the record's, or 1024 × 1024."""
        return size or (self._tiny.size if self._tiny else prompt.size) or SIZE

    def check(self, prompts: Sequence[Prompt], size: Size | None = None) -> None:
        """Check prompts before anything is generated.

        Raises:
            ValueError: A size or a source does not fit, or a set is asked of an editor, or the other way round.
        """
        for prompt in prompts:
            if bool(prompt.sources) != self.edits:
                raise ValueError(
                    f"{self.model} edits pictures, and there is none; give one with --image"
                    if self.edits
                    else f"{self.model} paints sets and edits no pictures; {_an_editor()}"
                )
            self.size_of(prompt, size)

    def sample(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        *,
        size: Size | None = None,
        steps: int | None = None,
        base: bool = False,
        on_step: Step = lambda images: None,
    ) -> list[Image]:
        """One image per (prompt, seed), in order.

        Two batches of other sizes may differ in a pixel's last bit, as floating point does.

        Args:
            prompts: Sets or edits, as the kind does.
            seeds: One per prompt.
            size: Of every prompt; else the tiny checkpoint's, the record's, or 1024 × 1024.
            steps: Denoising steps.
            base: Leave the adapter off.
            on_step: Called after every denoising step of a batch.
        """
        self.check(prompts, size)
        sizes = [self._requested_size(prompt, size) for prompt in prompts]
        return self.sample_at(sizes, prompts, seeds, steps=steps, base=base, on_step=on_step)

    def sample_at(
        self,
        sizes: Sequence[Size],
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        *,
        steps: int | None = None,
        base: bool = False,
        on_step: Step = lambda images: None,
    ) -> list[Image]:
        """As `sample`, each prompt at a size of its own; prompts of one size share batches."""
        policy = cast("Policy", _StepReporter(self.policy, on_step))
        images: dict[int, Image] = {}
        with adapter_off(self.policy.transformer) if base and self.adapter else nullcontext():
            for size in dict.fromkeys(sizes):
                self.policy.check_size(size)
                rows = [row for row, own in enumerate(sizes) if own == size]
                batch = sample_images(
                    policy,
                    [prompts[row] for row in rows],
                    sampler=Sampler(size=size, steps=steps or self.default_steps),
                    cache=self._cache,
                    seeds=[seeds[row] for row in rows],
                    batch=self.batch,
                )
                images |= dict(zip(rows, batch, strict=True))
        return [images[row] for row in range(len(prompts))]


def _an_editor() -> str:
    editor = next(spec for spec in POLICIES.values() if spec.edits)
    return f"name an editor with --model, e.g. {editor.published}"


class _StepReporter:
    """A policy that reports every step that it is asked for."""

    def __init__(self, policy: PipelinePolicy, on_step: Step) -> None:
        self._policy, self._on_step = policy, on_step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def velocity(
        self, x_BNC: torch.Tensor, sigma_B: torch.Tensor, conditioning: Conditioning, size: Size
    ) -> torch.Tensor:
        velocity = self._policy.velocity(x_BNC, sigma_B, conditioning, size)
        self._on_step(len(x_BNC))
        return velocity
