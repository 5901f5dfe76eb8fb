"""Config of a character's training: `pacorl train-character FOLDER --config RECIPE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from pacorl.config.base import Positive, Rank, Section, Seed, TrackerName
from pacorl.config.options import Memory
from pacorl.core.sampler import Steps
from pacorl.grpo.lora_config import AdamWConfig, AdapterConfig, LoraConfig
from pacorl.models.policies import POLICIES
from pacorl.models.policies.policy import PolicyOptions


class CharacterAdapterConfig(AdapterConfig):
    """The LoRA of the character."""

    rank: Rank = 16
    """r of the added product BA."""
    alpha: Positive = 16
    """α of its scale α/r."""


class CharacterOptimizerConfig(AdamWConfig):
    """AdamW, the adapter's moving average, and the images of a step."""

    lr: float = Field(1e-4, gt=0, le=1)
    """AdamW's learning rate, the same at every step."""
    batch: Positive = 1
    """Images per optimizer step."""
    micro_batch: Positive = 1
    """Images per forward."""


class GalleryConfig(Section):
    """Images of the page, by the base before training and with the best LoRA after it."""

    prompts: tuple[str, ...] = (
        "{character}",
        "{character}, full body, walking in a park",
        "{character}, close-up portrait",
        "{character}, sitting at a desk, seen from the side",
    )
    """Prompts; `{character}` is replaced by the trigger word and the card's description."""
    seeds: Positive = 2
    """Images per prompt, each from its own noise."""
    steps: Steps = 20
    """Denoising steps."""
    each: bool = False
    """Whether every evaluation draws the images."""


class CharacterConfig(LoraConfig):
    """Training of a LoRA of one character.

    Example:
        from pacorl import CharacterConfig

        config = CharacterConfig(character="characters/hero", model={"checkpoint": "tiny"}, steps=100)
    """

    exports_best: ClassVar[bool] = True

    character: str = ""
    """Folder with the character's images and its card.yaml, or its name in `characters/`."""
    out: Path = Path("runs/character")
    """The run's folder: log, page, checkpoints and adapter."""
    seed: Seed = 42
    """Seed of every random draw."""
    steps: Positive = 1000
    """Optimizer steps at most; training ends before if the held-out loss falls no more."""
    evaluate_every: Positive = 50
    """Optimizer steps between evaluations on the held-out images, each with a checkpoint and a line of the log."""
    keep_checkpoints: Positive = 3
    """Number of newest checkpoints to keep, besides the best."""
    trackers: tuple[TrackerName, ...] = ()
    """Trackers of curves, in addition to report.html; the services need the extra `trackers`."""

    memory: Memory = "normal"
    """low: the frozen weights of the generator's blocks are kept in int8. lowest: they also stay in main memory, and
    each is sent to the card when its layer computes."""

    size: tuple[Positive, Positive] = (512, 512)
    """Height and width of the training images; an image of another shape loses its edges."""

    model: Annotated[PolicyOptions, POLICIES] = Field(default_factory=POLICIES.default_options)
    adapter: CharacterAdapterConfig = CharacterAdapterConfig()
    optimizer: CharacterOptimizerConfig = CharacterOptimizerConfig()
    gallery: GalleryConfig = GalleryConfig()

    @model_validator(mode="after")
    def _makes_sense(self) -> CharacterConfig:
        if not self.generator.sets:
            raise ValueError(
                f"model.kind {self.model.kind} edits images, and a character is trained on images and captions; take "
                "a kind that generates from text"
            )
        return self
