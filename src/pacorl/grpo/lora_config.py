"""Settings that every training of a LoRA has: the adapter, its optimizer, and the run's folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from pydantic import Field, model_validator

from pacorl.config.base import Positive, Rank, Section, Share, TrackerName
from pacorl.config.options import Memory
from pacorl.models.policies import POLICIES
from pacorl.models.policies.spec import PolicySpec
from pacorl.types import TINY

if TYPE_CHECKING:
    from pathlib import Path

    from pacorl.models.policies.policy import PolicyOptions

Decay = Annotated[float, Field(ge=0, lt=1)]


class AdapterConfig(Section):
    """The LoRA that is trained."""

    rank: Rank = 64
    """r of the added product BA."""
    alpha: Positive = 128
    """α of its scale α/r."""
    targets: tuple[str, ...] = ()
    """Module name suffixes; empty for the policy's default, as released."""
    start: str = ""
    """An adapter to go on from, in PEFT or diffusers form."""


class AdamWConfig(Section):
    """AdamW and the adapter's moving average."""

    lr: float = Field(3e-4, gt=0, le=1)
    """AdamW's learning rate, the same at every step."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's decay of its first and second moments."""
    weight_decay: float = Field(1e-4, ge=0)
    """AdamW's decoupled decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """The norm that a larger gradient is scaled down to."""
    ema_decay: Share = 0.85
    """Decay of the evaluated and exported moving average, after its warm-up min((1+s)/(10+s), ema_decay) over its
    updates s. The adapter of 20 steps ago, an evaluation earlier, has a weight of 0.04 at most."""


class LoraConfig(Section):
    """A run's config with the keys that adapters, optimizers and checkpoints need, whatever the objective."""

    exports_best: ClassVar[bool] = False
    """Whether `adapter/` is the checkpoint with the highest score, and not the newest."""

    if TYPE_CHECKING:  # each run declares them in its own order, with its own text and default
        out: Path
        seed: int
        keep_checkpoints: int
        trackers: tuple[TrackerName, ...]
        memory: Memory
        model: PolicyOptions
        adapter: AdapterConfig
        optimizer: AdamWConfig

    @model_validator(mode="after")
    def _model_is_usable(self) -> Self:
        if self.memory == "lowest" and self.model.compile != "none":
            raise ValueError(
                f"memory lowest and model.compile {self.model.compile}: compiled code cannot decide what is sent next; "
                "set model.compile: none with memory: lowest"
            )
        if self.model.checkpoint == TINY:
            _ = self.generator.committed  # refuses a kind without one
        self.__dict__["model"] = self.model.in_memory(self.memory)  # a frozen model's own field
        return self

    @property
    def generator(self) -> PolicySpec:
        """Spec of the kind of generator."""
        return POLICIES[self.model.kind]
