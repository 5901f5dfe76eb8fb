"""The generator for inference: a policy, its adapter and its defaults.

Sampling is `grpo.rollout.sample_images`, the only denoising loop. An image's noise comes from its own seed, like the
noise of a diffusers pipeline with `torch.Generator().manual_seed(seed)`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from pacorl import __version__
from pacorl.core.batches import grouped
from pacorl.core.devices import NONE, available_device, best_dtype
from pacorl.core.sampler import Sampler
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import sample_images
from pacorl.models.adapters import adapter_names, load_lora
from pacorl.models.policies import DEFAULT_KIND, POLICIES, kind_of
from pacorl.models.policies.policy import check_images
from pacorl.models.policies.spec import NO_ADAPTER
from pacorl.records.compose import in_tiny_words, prompt_from
from pacorl.runtime.turns import Turns
from pacorl.types import TINY, Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.models.policies.pipeline import PipelinePolicy

logger = logging.getLogger(__name__)

SIZE = Size(1024, 1024)

Prompts = Prompt | str | Sequence[Prompt | str]
"""One or several prompts; a string is a prompt for one image, or for the panels of its tags or its request."""
AnySize = Size | tuple[int, int] | None
"""A size in pixels, or its height and width; None for the default."""
Step = Callable[[int], None]
"""Callback with the number of images per denoising step; may raise to stop."""


class Generator:
    """A policy with the names for an image's recipe.

    Example:
        from pacorl import Generator, prompt_from

        generator = Generator.from_pretrained("tiny")  # or a hub name, adapter="runs/sets/adapter"
        panels = ["waving, flag", "jumping, boat", "standing, tree", "waving, lamp"]
        prompt = prompt_from("tiny", theme="a red hero with a crown in town", panels=panels)
        (image,) = generator.sample(prompt)
        first, second = generator.sample([prompt, prompt], seeds=[4, 7])
    """

    def __init__(self, policy: PipelinePolicy, *, model: str, kind: str = DEFAULT_KIND, adapter: str = "") -> None:
        """
        Args:
            policy: The policy, with its adapter.
            model: The checkpoint's name in recipes.
            kind: Name in `POLICIES`.
            adapter: The adapter's name in recipes.
        """
        # The policy and its names in recipes.
        self.policy = policy
        self.model = model
        self.adapter = adapter
        self.kind = kind
        """Name in `POLICIES`."""
        spec = POLICIES.named(kind)
        # Defaults, which the tiny checkpoint has of its own.
        self._tiny = spec.committed if spec.tiny and model == TINY else None
        self.batch = 1
        """Maximum number of images per forward."""
        self.default_steps = spec.steps
        """Denoising steps by default: the tiny checkpoint's, or the published checkpoint's."""
        self.note = ""
        """Caveat for readers of the images; empty for most models."""
        self.loras: list[str] = []
        """A line about each loaded LoRA: its form, modules, rank, α and base."""
        if self._tiny:
            self.batch = self._tiny.batch
            self.default_steps = self._tiny.steps
            self.note = self._tiny.note
        # State of the calls to `sample`.
        self.turns = Turns(policy.transformer, device=policy.device, enabled=False)
        """Turns of the transformer, the text encoders and a judge on the device, with little memory."""
        self._cache = ConditioningCache(policy)

    @classmethod
    def from_pretrained(
        cls,
        model: str = TINY,
        *,
        kind: str = "",
        adapter: str | Mapping[str, float] = "",
        dtype: str = "auto",
        device: str = "",
        memory: str = "normal",
        **options: Any,
    ) -> Generator:
        """Load a checkpoint, with an optional adapter.

        Args:
            model: a diffusers folder, a hub name or "tiny".
            kind: name in `POLICIES`; the checkpoint's own by default.
            adapter: PEFT or diffusers form: a folder, file or hub name; or several with their strengths. "none" is the
                base of the tiny generator, which has an adapter of its own.
            dtype: type of the weights; "auto" is bfloat16 on a GPU and float32 elsewhere.
            device: a GPU by default, if there is one.
            memory: "low" keeps the transformer's blocks in int8, and text encoders on the device only while they work;
                "lowest" sends the blocks' weights to the device layer by layer.
            options: the kind's options, such as guidance_scale; None is the checkpoint's default.

        Raises:
            ValueError: if the kind is unknown or has no such option, or the adapter does not fit.
        """
        # Checks, and the options of the policy.
        spec = POLICIES.named(kind or kind_of(model))
        requested = adapter if isinstance(adapter, Mapping) else dict.fromkeys([adapter] if adapter else [], 1.0)
        strengths = spec.adapters_of(model, requested)
        spec.check_source(model, adapters=strengths)
        sources = {spec.adapter_source(model, name): strength for name, strength in strengths.items()}

        # Fill in the defaults that depend on the machine.
        device = device or available_device()
        if dtype == "auto":
            dtype = best_dtype(model, device)
        policy_options = spec.options_for(model, dtype=dtype, memory=memory, **options)

        # With little memory the text encoders stay on the CPU until their turn.
        low = memory != "normal"
        policy = spec.load(policy_options, device="cpu" if low else device, staged=low)
        if low:
            policy.place_vae(device)
            policy.place_transformer(device)
        # After the weights are in place: the adapter's layers wrap the placed layers.
        loras = []
        if sources:
            loras = load_lora(policy.transformer, sources)
            policy.transformer.to(device)

        # A recipe says so where the base was chosen over an adapter that it would be made with.
        adapter_text = adapter_names(strengths) or (NO_ADAPTER if spec.adapters_of(model, {}) else "")
        generator = cls(policy, model=model, kind=spec.kind, adapter=adapter_text)
        generator.loras = loras
        generator.turns = Turns(policy.transformer, device=torch.device(device), enabled=low)
        return generator

    def judged_by(self, judge: object) -> None:
        """Let a local judge, loaded within `judging`, take turns with the generator on the device, if memory is low."""
        self.turns.add([judge])

    def judging(self) -> AbstractContextManager[None]:
        """Move the judge to the device during the block, and the generator to host memory, if memory is low."""
        return self.turns.scoring()

    def size_of(self, prompt: Prompt, size: AnySize = None) -> Size:
        """Return the size of a prompt's image: the requested size, or for an edit its area in the source's shape."""
        requested = self._requested_size(prompt, size)
        self.policy.check_size(requested)
        return self.policy.size_of(prompt, requested)

    def _requested_size(self, prompt: Prompt, size: AnySize) -> Size:
        if isinstance(size, tuple):
            return Size(*size)
        if size:
            return size
        if self._tiny:
            return self._tiny.size
        return prompt.size or SIZE

    def recipe(self, prompt: Prompt, *, size: AnySize = None, steps: int | None = None) -> dict[str, Any]:
        """Return the settings that, with the prompt and a seed, reproduce an image; None if the model ignores one.

        These are the checkpoint, the adapters as `--adapter` takes them (empty without one), the size and the steps,
        the options by the names of the model's pipeline, the version of pacorl and the blocks' quantization.
        """
        settings = self.policy.options
        true_cfg_scale = float(getattr(settings, "true_cfg_scale", 1.0))
        return {
            "model": self.model,
            "adapter": self.adapter,
            "size": str(self.size_of(prompt, size)),
            "steps": steps or self.default_steps,
            "guidance_scale": getattr(settings, "guidance_scale", None),
            # A scale of 1 changes nothing.
            "true_cfg_scale": None if true_cfg_scale == 1 else true_cfg_scale,
            # None without guidance, where the option has no effect.
            "negative_prompt": settings.negative_text,
            # Attention reads the padding, so the length affects short prompts too: from 64 to 128 tokens the tiny
            # generator's pixels change by 8 of 255.
            "max_sequence_length": getattr(settings, "max_sequence_length", None),
            "version": __version__,
            "quantize": None if settings.quantize == NONE else settings.quantize,
        }

    def prompts_of(self, prompts: Prompts) -> list[Prompt]:
        """Convert one or several prompts or strings to a list of prompts, for the tiny generator in its own words.

        Raises:
            ValueError: A text's panels do not fit its layout, or contain a word unknown to the tiny generator.
        """
        if isinstance(prompts, Prompt | str):
            prompts = [prompts]

        # Ids count up, so that each text is a group of its own.
        converted = []
        for number, prompt in enumerate(prompts):
            if isinstance(prompt, Prompt):
                converted.append(in_tiny_words(prompt) if self._tiny else prompt)
            else:
                converted.append(replace(prompt_from(self.model, theme=prompt), id=number))
        return converted

    def check(self, prompts: Sequence[Prompt], size: AnySize = None) -> None:
        """Check prompts before anything is generated.

        Raises:
            ValueError: if a size or a source does not fit, an editor gets a set, or a set generator gets an edit.
        """
        for prompt in prompts:
            check_images(POLICIES[self.kind].policy, prompt, self.model)
            self.size_of(prompt, size)

    def sample(
        self,
        prompts: Prompts,
        seeds: Sequence[int] | int = 0,
        *,
        size: AnySize = None,
        steps: int | None = None,
        on_step: Step = lambda images: None,
    ) -> list[Image]:
        """Generate one image per (prompt, seed), in order.

        An image's last bits may depend on its batch: on the prompts, seeds and order of one call, and on `batch`. They
        do not depend on earlier calls.

        Args:
            prompts: sets or edits, depending on the kind.
            seeds: one per prompt, or the first prompt's seed, counting up from there.
            size: height and width of every image; by default the tiny checkpoint's, the record's, or 1024 × 1024.
            steps: denoising steps.
            on_step: callback after every denoising step of a batch.

        Raises:
            ValueError: for too few seeds or steps, and the errors of `check` and `prompts_of`.
        """
        # Inputs: prompts, seeds, sizes.
        prompts = self.prompts_of(prompts)
        if isinstance(seeds, int):
            seeds = range(seeds, seeds + len(prompts))
        if len(seeds) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(seeds)} seeds; give one seed per prompt")
        if steps is not None and steps < 1:
            raise ValueError(f"steps {steps} must be at least 1, or None for {self.default_steps}")
        self.check(prompts, size)
        sizes = [self._requested_size(prompt, size) for prompt in prompts]

        # Encode each prompt alone: in a batch, its last bits would depend on the prompts that are cached already.
        with self.turns.lent_to(self.policy.text_encoders):
            for prompt, requested in zip(prompts, sizes, strict=True):
                self._cache.prepare([prompt], requested)

        # Sample; prompts of one size share batches.
        policy = cast("PipelinePolicy", _StepReporter(self.policy, on_step))
        images: dict[int, Image] = {}
        for requested, rows in grouped((size, row) for row, size in enumerate(sizes)).items():
            batch = sample_images(
                policy,
                [prompts[row] for row in rows],
                sampler=Sampler(size=requested, steps=steps or self.default_steps),
                cache=self._cache,
                seeds=[seeds[row] for row in rows],
                batch=self.batch,
            )
            images |= dict(zip(rows, batch, strict=True))
        # In the order of the prompts: the groups by size have another order.
        return [images[row] for row in range(len(prompts))]


class _StepReporter:
    """A policy with a callback after every step."""

    def __init__(self, policy: PipelinePolicy, on_step: Step) -> None:
        self._policy, self._on_step = policy, on_step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def velocity(self, x_BNC: torch.Tensor, *sampled: Any) -> torch.Tensor:
        velocity = self._policy.velocity(x_BNC, *sampled)
        self._on_step(len(x_BNC))
        return velocity
