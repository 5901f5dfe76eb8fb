"""Options of a kind of generator, and the images that its prompts may have.

The rest of the package uses a kind's `PolicySpec` (`models.policies.spec`) and its class (`models.policies.pipeline`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from pacorl.config.base import ModelSection
from pacorl.io.terminal import excerpt
from pacorl.types import Prompt

if TYPE_CHECKING:
    from pacorl.models.policies.pipeline import PipelinePolicy

Parts = Mapping[str, Mapping[str, Any]]
"""Component of a checkpoint → its config.json."""
WITHOUT_WEIGHTS = frozenset({"scheduler", "processor"})
"""Components of a pipeline with a config but without weights."""
CLASS_KEYS = ("_class_name", "architectures", "model_type")
"""Keys of a config.json that determine the component's class."""


class PolicyOptions(ModelSection):
    """Options common to all kinds of generators; each kind adds its own."""

    cfg_scale: ClassVar[str] = ""
    """Option with the scale of classifier-free guidance; empty for kinds without it. Its kinds have an option
    `negative_prompt`."""

    kind: str
    """Name in `POLICIES`."""
    checkpoint: str
    """A diffusers folder, a hub name, or `tiny` for a committed checkpoint; by default the published one of `kind`."""
    dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    """Type of the frozen weights; latents, log-probabilities and adapters are fp32 (fp64 with float64, which is for
    comparing machines to the last digits)."""
    gradient_checkpointing: bool = True
    """Whether activations are computed again in the backward: less memory for a third more work in training."""

    compile: Literal["none", "blocks"] = "none"
    """Whether the transformer's repeated blocks are compiled by torch, for sampling and training alike, and the VAE's
    decoder in training; the first epoch takes a minute or more. In bf16 compiled graphs round otherwise with gradients
    than without, so the SDE steps are sampled with gradients too, and the ratio before the first update stays exactly
    1."""

    @property
    def negative_text(self) -> str | None:
        """The negative prompt of classifier-free guidance; None without guidance."""
        is_guided = self.cfg_scale and getattr(self, self.cfg_scale) > 1
        return getattr(self, "negative_prompt") if is_guided else None  # noqa: B009 - a field of some kinds

    @property
    def unguided(self) -> Self:
        """These options without classifier-free guidance, for a loss on the model's own velocity."""
        if self.cfg_scale:
            return self.model_copy(update={self.cfg_scale: 1.0})
        return self


class Guidance(PolicyOptions):
    """Options of kinds whose `guidance_scale` is that of classifier-free guidance."""

    cfg_scale: ClassVar[str] = "guidance_scale"
    """Option with the scale of guidance."""
    guidance_scale: float = Field(4.0, ge=1)
    """Scale of classifier-free guidance against `negative_prompt`, at twice the forwards; 1 is without."""
    negative_prompt: str = ""
    """Negative prompt of guidance."""


class TrueGuidance(PolicyOptions):
    """Options of kinds with diffusers' `true_cfg_scale`."""

    cfg_scale: ClassVar[str] = "true_cfg_scale"
    """Option with the scale of guidance."""
    true_cfg_scale: float = Field(1.0, ge=1)
    """Scale of classifier-free guidance against `negative_prompt`, at twice the forwards; 1 is without."""
    negative_prompt: str = " "
    """Negative prompt of guidance."""


def check_images(policy: type[PipelinePolicy], prompt: Prompt, model: str) -> None:
    """Check the numbers of a prompt's sources and references.

    Raises:
        ValueError: An edit for a generator of sets, or the reverse, an image too many, or references to a kind without.
    """
    sources, references = len(prompt.sources), len(prompt.references)
    fault = ""
    if references and not policy.max_references:
        fault = "takes no reference images of characters: leave them out, and their descriptions act alone"
    elif sources and not policy.max_sources:
        fault = "generates sets and edits no images; name an editor"
    elif sources > policy.max_sources or (references and sources + references > policy.max_references):
        in_all = max(policy.max_sources, policy.max_references)
        fault = f"takes {policy.max_sources} sources, and {in_all} images in all; leave some out"
    elif policy.max_sources and not (sources or references or policy.source_optional):
        fault = "edits images; give one (--image), or a character with pictures (--character)"
    if fault:
        name = f"{prompt.place} ({excerpt(prompt.text)})"
        raise ValueError(f"{name} has {sources} sources and {references} references, and {model} {fault}")
