"""A generator by any name: a policy, its adapter, and what it is asked for by default.

Sampling is `grpo.rollout.sample_images`, the only denoising loop. An image's noise comes from its own seed, as a
diffusers pipeline draws it from `torch.Generator().manual_seed(seed)`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch

from pacorl.config.options import MEMORY, one_of
from pacorl.core.devices import available_device, best_dtype
from pacorl.core.sampler import Sampler
from pacorl.generate.compose import prompt_from
from pacorl.generate.panels import read_request
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import sample_images
from pacorl.models.lora.adapters import adapter_off, load_lora, lora_scaled
from pacorl.models.policies import DEFAULT_KIND, POLICIES, check_sources, kind_of
from pacorl.records.prompts import text_prompt
from pacorl.runtime.turns import Turns
from pacorl.types import TINY, Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.models.policies.pipeline import PipelinePolicy
    from pacorl.models.policies.policy import Policy

logger = logging.getLogger(__name__)

SIZE = Size(1024, 1024)

Prompts = Prompt | str | Sequence[Prompt | str]
"""One or several; a text is a prompt of one image, or of the panels that it has tags for or asks for."""
AnySize = Size | tuple[int, int] | None
"""A size in pixels, or its height and width; None for the default."""
Step = Callable[[int], None]
"""Called with the number of images that took one denoising step; may raise to stop."""


class Generator:
    """A policy with the names that an image's recipe needs.

    Example:
        from pacorl import Generator, prompt_from

        generator = Generator.from_pretrained("tiny")  # or a hub name, adapter="runs/sets/adapter"
        panels = ["waving, flag", "jumping, boat", "standing, tree", "waving, lamp"]
        prompt = prompt_from("tiny", theme="red round hero, crown, night", panels=panels)
        (image,) = generator.sample(prompt)
        first, second = generator.sample([prompt, prompt], seeds=[4, 7])
    """

    def __init__(self, policy: PipelinePolicy, *, model: str, kind: str = DEFAULT_KIND, adapter: str = "") -> None:
        """
        Args:
            policy: with its adapter already.
            model: the checkpoint, as the recipe names it.
            kind: of `POLICIES`.
            adapter: what the recipe names it.
        """
        self.policy, self.model, self.adapter = policy, model, adapter
        spec = POLICIES.named(kind)
        self.kind = kind
        """Of `POLICIES`."""
        self.edits, self.sets = spec.edits, spec.sets
        """Whether it edits sources, and whether it makes sets from words alone; some do both."""
        self._tiny = spec.tiny if model == TINY else None
        self.batch = self._tiny.batch if self._tiny else 1
        """Most images of one forward; 1 for a model that is not the tiny one."""
        self.default_steps = self._tiny.steps if self._tiny else spec.steps
        """Denoising steps if nobody says how many: the tiny checkpoint's, or those of the kind's published one."""
        self.note = self._tiny.note if self._tiny else ""
        """What a reader of its images has to know; empty for most."""
        self.turns: Turns | None = None
        """Of the transformer, the text encoders and a judge on the device, with little memory."""
        self._cache = ConditioningCache(policy)

    @classmethod
    def from_pretrained(
        cls,
        model: str = TINY,
        *,
        kind: str = "",
        adapter: str = "",
        dtype: str = "auto",
        device: str = "",
        memory: str = "normal",
        **options: Any,
    ) -> Generator:
        """Load a checkpoint, with an adapter if one is named.

        Args:
            model: a diffusers folder, a hub name or "tiny".
            kind: of `POLICIES`; the checkpoint's own if left out.
            adapter: PEFT or diffusers form: a folder, file or hub name.
            dtype: of the weights; "auto" is bfloat16 on a GPU and float32 elsewhere.
            device: a GPU if left out and there is one.
            memory: "low" keeps the transformer's blocks in int8, and text encoders on the device only while they work;
                "lowest" sends the blocks' weights to the device layer by layer.
            options: of the kind by name, such as guidance_scale; None is the checkpoint's default.

        Raises:
            ValueError: if the kind is unknown or takes no such option, or the adapter does not fit.
        """
        spec = POLICIES.named(kind or kind_of(model))
        spec.check_source(model, adapter=adapter)
        device = device or available_device()
        dtype = best_dtype(model, device) if dtype == "auto" else dtype
        low = memory != "normal"
        policy = spec.load(
            spec.options_for(model, dtype=dtype, **MEMORY[one_of(*MEMORY)(memory)], **options),
            device="cpu" if low else device,
            staged=low,
        )
        if low:
            policy.place_vae(device)
            policy.place_transformer(device)
        if adapter:
            load_lora(policy.transformer, adapter)
            policy.transformer.to(device)
        if policy.options.warning:
            logger.warning(policy.options.warning)
        generator = cls(policy, model=model, kind=spec.kind, adapter=adapter)
        generator.turns = Turns(policy.transformer, device=torch.device(device)) if low else None
        return generator

    def judged_by(self, judge: object) -> None:
        """Give a judge of this process, loaded within `judging`, its turns on the device, if models take turns."""
        if self.turns:
            self.turns.add([judge])

    def judging(self) -> AbstractContextManager[None]:
        """Within the block a judge of `turns` is on the device."""
        return self.turns.scoring() if self.turns else nullcontext()

    @property
    def guidance_scale(self) -> float | None:
        """None for kinds without."""
        return cast("float | None", getattr(self.policy.options, "guidance_scale", None))

    @property
    def true_cfg_scale(self) -> float | None:
        """The scale; None if it is 1, which changes nothing."""
        scale = float(getattr(self.policy.options, "true_cfg_scale", 1.0))
        return scale if scale != 1 else None

    def __repr__(self) -> str:
        adapter = f", adapter={self.adapter!r}" if self.adapter else ""
        return f"Generator({self.model!r}, kind={self.kind!r}{adapter})"

    def size_of(self, prompt: Prompt, size: AnySize = None) -> Size:
        """The size of a prompt's image: for a set what is asked for, for an edit that area in its source's shape."""
        requested = self._requested_size(prompt, size)
        self.policy.check_size(requested)
        return self.policy.size_of(prompt, requested)

    def _requested_size(self, prompt: Prompt, size: AnySize) -> Size:
        if isinstance(size, tuple):
            return Size(*size)
        if isinstance(size, int):
            raise ValueError(f"size {size} is one number; give height and width, as in size=({size}, {size})")
        return size or (self._tiny.size if self._tiny else prompt.size) or SIZE

    def prompts_of(self, prompts: Prompts) -> list[Prompt]:
        """One prompt or several, as they are or as texts, as a list.

        Raises:
            ValueError: A text's panels do not fit its layout, or the tiny generator does not know a word of it.
        """
        given = [prompts] if isinstance(prompts, Prompt | str) else prompts
        return [self._read(prompt, number) for number, prompt in enumerate(given)]

    def _read(self, prompt: Prompt | str, number: int) -> Prompt:
        if isinstance(prompt, Prompt):
            return prompt
        if read_request(prompt):
            return prompt_from(self.model, theme=prompt, number=number)
        read = text_prompt(prompt, number)
        if self._tiny:
            self._tiny.check(read)
        return read

    def check(self, prompts: Sequence[Prompt], size: AnySize = None, *, lora_scale: float = 1.0) -> None:
        """Check prompts before anything is generated.

        Raises:
            ValueError: if a size or a source does not fit, a set is asked of an editor, or the other way round, or
                there is no adapter to be scaled.
        """
        if lora_scale != 1 and not self.adapter:
            raise ValueError(f"LoRA strength {lora_scale:g} has no LoRA to act on; name one with --adapter")
        for prompt in prompts:
            check_sources(POLICIES[self.kind], prompt, self.model)
            self.size_of(prompt, size)

    def sample(
        self,
        prompts: Prompts,
        seeds: Sequence[int] | int = 0,
        *,
        size: AnySize = None,
        steps: int | None = None,
        base: bool = False,
        lora_scale: float = 1.0,
        on_step: Step = lambda images: None,
    ) -> list[Image]:
        """One image per (prompt, seed), in order.

        An image may depend in its last bits on the batch that it is sampled in: on the prompts, seeds and order of one
        call, and on `batch`. It does not depend on earlier calls.

        Args:
            prompts: sets or edits, as the kind does.
            seeds: one per prompt, or the first one's, from which the others count on.
            size: height and width of every prompt's image; else the tiny checkpoint's, the record's, or 1024 × 1024.
            steps: denoising steps.
            base: whether to leave the adapter off.
            lora_scale: what the adapter's change is multiplied by; 1 as it was trained, 0 the base.
            on_step: called after every denoising step of a batch.

        Raises:
            ValueError: Seeds or steps are too few, or as `check` and `prompts_of` say.
        """
        prompts = self.prompts_of(prompts)
        seeds = range(seeds, seeds + len(prompts)) if isinstance(seeds, int) else seeds
        if len(seeds) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(seeds)} seeds; give one seed per prompt")
        if steps is not None and steps < 1:
            raise ValueError(f"steps {steps} must be at least 1, or None for {self.default_steps}")
        self.check(prompts, size, lora_scale=lora_scale)
        policy = cast("Policy", _StepReporter(self.policy, on_step))
        sizes = [self._requested_size(prompt, size) for prompt in prompts]
        with self._encoding():
            for prompt, requested in zip(prompts, sizes, strict=True):
                # Each alone: among others, its last bits would depend on which of them earlier calls have encoded.
                self._cache.prepare([prompt], requested)
        images: dict[int, Image] = {}
        transformer = self.policy.transformer
        with adapter_off(transformer) if base and self.adapter else lora_scaled(transformer, lora_scale):
            for requested in dict.fromkeys(sizes):  # prompts of one size share batches
                rows = [row for row, row_size in enumerate(sizes) if row_size == requested]
                batch = sample_images(
                    policy,
                    [prompts[row] for row in rows],
                    sampler=Sampler(size=requested, steps=steps or self.default_steps),
                    cache=self._cache,
                    seeds=[seeds[row] for row in rows],
                    batch=self.batch,
                )
                images |= dict(zip(rows, batch, strict=True))
        return [images[row] for row in range(len(prompts))]

    def _encoding(self) -> AbstractContextManager[None]:
        """Within the block the text encoders are on the device."""
        if self.turns is None:
            return nullcontext()
        return self.turns.lent_to([getattr(self.policy.pipeline, name) for name in self.policy.encoders])


class _StepReporter:
    """A policy that reports every step that it is asked for."""

    def __init__(self, policy: PipelinePolicy, on_step: Step) -> None:
        self._policy, self._on_step = policy, on_step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def velocity(self, x_BNC: torch.Tensor, *sampled: Any) -> torch.Tensor:
        velocity = self._policy.velocity(x_BNC, *sampled)
        self._on_step(len(x_BNC))
        return velocity
