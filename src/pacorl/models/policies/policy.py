"""The interface between a generator and the loops: `Policy`.

Guidance, packing, reference latents and norm rules stay inside `velocity`; loops see tokens and sigmas. A config names
one size; `size_of` derives the size of each prompt's image, the `size` of all further methods. A batch has one size.

The rest of the package uses a kind's `PolicySpec` (`models.policies.spec`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

from pydantic import Field

from pacorl.config.base import ModelSection
from pacorl.types import Prompt, Size

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor, nn

    from pacorl.models.policies.pipeline import PipelinePolicy
    from pacorl.types import Conditioning

Parts = Mapping[str, Mapping[str, Any]]
"""Component of a checkpoint → its config.json."""
WITHOUT_WEIGHTS = frozenset({"scheduler", "processor"})
"""Components of a pipeline with a config but without weights."""
CLASS_KEYS = ("_class_name", "architectures", "model_type")
"""Keys of a config.json that determine the component's class."""


class Policy(Protocol):
    """A flow-matching generator with one trainable transformer.

    Example:
        policy = FLUX.from_pretrained("tiny", max_sequence_length=48)
        conditioning = policy.collate(policy.encode(prompts, size))
        x_BNC = policy.noise(seeds, size)
        velocity_BNC = policy.velocity(x_BNC, sigma_B, conditioning, size)
        images = policy.decode(x_BNC, size)
    """

    transformer: nn.Module
    """The trained module, with an adapter, which predicts velocities."""
    lora_targets: tuple[str, ...]
    """Suffixes of the adapted modules, by default."""

    @property
    def idle_layers(self) -> frozenset[str]:
        """Names of the transformer's linear layers without influence on any image."""

    def check_size(self, size: Size) -> None:
        """Check the config's `size`.

        Raises:
            ValueError: for an unsupported size; the message names the nearest size.
        """

    def size_of(self, prompt: Prompt, size: Size) -> Size:
        """Derive the size of a prompt's image from the config's `size`.

        Returns:
            `size` for sets; for edits, the area of `size` in the shape of the source.

        Raises:
            ValueError: A source is missing, is one too many or has no such shape; the message names the prompt.
        """

    def encode(self, prompts: Sequence[Prompt], size: Size) -> list[Conditioning]:
        """Encode prompts to one conditioning each, on the CPU; edits also encode their sources, at `size`."""

    def free_encoders(self) -> None:
        """Drop the text encoders; `encode` is unavailable from then on."""

    def place_transformer(self, device: str | torch.device) -> None:
        """Move the transformer to a device, with frozen weights packed by the run's `memory`."""

    def collate(self, conditionings: Sequence[Conditioning]) -> Conditioning:
        """Collate conditionings to one batch, on the device."""

    def sigmas(self, num_steps: int, size: Size) -> Tensor:
        """Return (T+1,) sigmas in fp32, from 1 down to 0, with the pipeline's shift."""

    def training_sigmas(self, num_steps: int, size: Size) -> Tensor:
        """Return (T+1,) sigmas in fp32 with the shift of the checkpoint's training, for noising endpoints.

        Equal to `sigmas` if a kind's training shift is that of inference, or is not published.
        """

    def token_grid(self, size: Size) -> tuple[int, int]:
        """Return the (rows, columns) of an image's tokens, which are row-major."""

    def noise(self, seeds: Sequence[int], size: Size) -> Tensor:
        """Draw (B, N, C) fp32 noise, one seed per row, on the CPU for equal values on every machine."""

    def with_prefix(self, conditioning: Conditioning, size: Size) -> Conditioning:
        """Add to a batch what its forwards have in common at every step, under the transformer's weights of now.

        The same batch for kinds whose conditioning depends on the step. The result must not outlive the weights.
        """

    def velocity(self, x_BNC: Tensor, sigma_B: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
        """Predict the velocity (B, N, C) at one sigma per row, in fp32, or fp64 for an fp64 model."""

    def decode(self, x_BNC: Tensor, size: Size) -> list[Image]:
        """Decode endpoints to RGB images."""


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
    gradient_checkpointing: bool | Literal["auto"] = True
    """Whether activations are computed again in the backward: less memory for a third more work in training. With
    `auto`, `pacorl train-policy` turns it off if the run's plan then fits the card; in Python `auto` is on."""

    compile: Literal["none", "blocks"] = "none"
    """Whether the transformer's repeated blocks are compiled by torch, for sampling and training alike; the first epoch
    takes a minute or more. In bf16 compiled graphs round otherwise with gradients than without, so the SDE steps are
    sampled with gradients too, and the ratio before the first update stays exactly 1."""

    @property
    def negative_text(self) -> str | None:
        """The negative prompt of classifier-free guidance; None without guidance."""
        is_guided = self.cfg_scale and getattr(self, self.cfg_scale) > 1
        return getattr(self, "negative_prompt") if is_guided else None  # noqa: B009 - a field of some kinds

    @property
    def unguided(self) -> Self:
        """These options without classifier-free guidance, for a loss on the model's own velocity."""
        return self.model_copy(update={self.cfg_scale: 1.0}) if self.cfg_scale else self

    @property
    def warning(self) -> str:
        """Advice about these options before sampling; empty for most."""
        return ""


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

    Args:
        policy: The class of the generator.
        prompt: The prompt.
        model: Name of the generator in messages.

    Raises:
        ValueError: An edit for a generator of sets, or the reverse, an image too many, or references to a kind without.
    """
    name = f"{prompt.place} ({prompt.text[:60]!r})"
    sources, references = len(prompt.sources), len(prompt.references)
    if references and not policy.max_references:
        raise ValueError(
            f"{model} takes no reference images of characters, and {name} has {references}; take a model that does "
            "(docs/models.md), or leave them out: the descriptions in the prompt then act alone"
        )
    if references and sources + references > policy.max_references:
        raise ValueError(
            f"{name} has {sources + references} images ({references} of them references), and {model} takes at most "
            f"{policy.max_references}; leave some out"
        )
    if sources and not policy.max_sources:
        raise ValueError(f"{model} generates sets and edits no images, and {name} has one; name an editor")
    if sources > policy.max_sources:
        raise ValueError(f"{name} has {sources} sources, and {model} takes {policy.max_sources}; leave some out")
    if not sources and not references and policy.max_sources and not policy.source_optional:
        characters = ", or characters with --character" if policy.max_references else ""
        raise ValueError(f"{model} edits images, and {name} has none; give one with --image{characters}")
