"""What flows through pacorl, named once; every other module says verbs about these nouns.

Legend for the letters that end a tensor's name, here and everywhere:
    B images   G images of one prompt (a group)   S stochastic steps   T sampling steps
    N latent tokens   C channels of a token   R rewards
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor


TINY = "tiny"
"""The name of the committed checkpoints, which every command takes in place of a folder or a hub name."""


@dataclass(frozen=True, slots=True)
class Grid:
    """How the panels of a set lie in its grid image: `rows` × `cols`, row-major."""

    rows: int
    """At least 1."""
    cols: int
    """At least 1."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cols < 1:
            raise ValueError(f"a grid needs at least one row and one column, got {self}")

    @property
    def count(self) -> int:
        """Number of panels."""
        return self.rows * self.cols

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}"


@dataclass(frozen=True, slots=True)
class Size:
    """Height and width of an image, in pixels."""

    height: int
    """Pixels."""
    width: int
    """Pixels."""

    @classmethod
    def parse(cls, text: str) -> Size:
        """`512x768` is 512 pixels high and 768 wide; any other form is a ValueError."""
        sides = re.fullmatch(r"\s*([1-9]\d*)\s*[x×⨉]\s*([1-9]\d*)\s*", text)
        if sides is None:
            raise ValueError(f"{text!r} is not of the form HEIGHTxWIDTH, e.g. 1024x1024")
        return cls(int(sides[1]), int(sides[2]))

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


@dataclass(frozen=True, slots=True)
class Character:
    """A figure that recurs over images, in words and in reference images."""

    name: str
    """How scenes mention it: `{name}`."""
    description: str
    """Its looks, as a panel's text describes it."""
    images: tuple[Path, ...] = ()
    """Reference images."""
    keep: Mapping[str, str] = field(default_factory=dict)
    """Trait → looks that stay the same in all images, e.g. `keep["hair"]`."""
    may_change: tuple[str, ...] = ()
    """Traits that may differ between images, such as the pose."""

    @property
    def text(self) -> str:
        """The description with the kept traits that it does not mention."""
        missing = [looks for looks in self.keep.values() if looks.lower() not in self.description.lower()]
        return ", ".join([self.description.rstrip("."), *missing])

    @property
    def criteria(self) -> dict[str, str]:
        """Name → what must hold over all images, one criterion per kept trait."""
        return {
            f"{self.name}: {trait}": f"{self.name.capitalize()} has the same {trait} in all images: {looks}."
            for trait, looks in self.keep.items()
        }


@dataclass(frozen=True, slots=True)
class Prompt:
    """One thing to generate: a set of panels, or an edit of `sources`.

    Parsed once, when the record is read; `id` is the group of every sample generated from it, for life.
    """

    id: int
    """Unique within a run; travels as int64, never as a float or a text."""
    text: str
    """What the generator reads."""
    theme: str = ""
    """What all panels share; the judge reads it."""
    grid: Grid = Grid(1, 1)
    """1×1 for a single image, as of an edit."""
    panels: tuple[str, ...] = ()
    """One description per panel, row-major; empty if the record has none."""
    criteria: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """dimension → name → text, e.g. `criteria["Identity"]["Hat"]`."""
    sources: tuple[Path, ...] = ()
    """Images to edit."""
    characters: tuple[str, ...] = ()
    """Names of the characters that its panels describe."""
    references: tuple[Path, ...] = ()
    """Images of its characters, for generators that take reference images."""
    size: Size | None = None
    """The size that the record asks for, if it does."""
    category: str = ""
    """The record's own, for figures by category."""
    task: str = ""
    """The record's own, as `category`."""


@dataclass(frozen=True, slots=True)
class Question:
    """Images and a question about them, to be answered Yes or No."""

    images: tuple[Image, ...]
    """In the order in which the judge sees them."""
    text: str
    """Follows the images."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judge's answer: a probability, or the reason why there is none. A failure is *missing*, never 0."""

    p_yes: float | None
    """P(Yes | Yes or No) of the first answer token."""
    error: str = ""
    """Why there is no probability; empty if there is one."""
    order_gap: float | None = None
    """How far P(Yes) of the two orders of the images lies apart, if both were asked and `p_yes` is their mean."""
    declined: bool = False
    """Whether it is missing because an image is outside of what the judge knows (`judge.domain`)."""

    @property
    def valid(self) -> bool:
        """Whether there is a probability."""
        return self.p_yes is not None


@dataclass(frozen=True, slots=True)
class Conditioning:
    """What a policy derived from prompts (and sources): opaque to everyone but the policy that made it."""

    tensors: Mapping[str, Tensor]
    """Each with a leading batch dimension."""

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))


@dataclass(slots=True)
class Rollout:
    """One batch of samples, as rewards and objectives of the endpoint see them."""

    prompts: list[Prompt]
    """Of each sample."""
    row_B: list[int]
    """Global row of each sample in its epoch: the only source of its seed."""
    size: Size
    """Of all of its images."""
    sigmas_T: Tensor
    """(T+1,)"""
    final_BNC: Tensor
    """Endpoints, fp32, on the CPU like all that is kept for training."""
    images: list[Image]
    """Decoded endpoints."""

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(slots=True)
class NodeBatch:
    """Nodes of one stochastic step that one forward served, with all that training needs to replay it.

    V nodes, from which E children leave, with B samples below them on this process. Tensors are fp32.
    """

    step: int
    """Index of the sampling step."""
    level: int
    """How many stochastic steps come before it."""
    prompts: list[Prompt]
    """Of each node."""
    size: Size
    """Of all of its images."""
    sigmas_T: Tensor
    """(T+1,)"""
    latents_VNC: Tensor
    """Before the step."""
    next_latents_ENC: Tensor
    """After it, of each child."""
    row_B: list[int]
    """Global row of each sample."""
    node_B: Tensor
    """int64, the node above each sample."""
    child_B: Tensor
    """int64, the child that each sample descends from."""
    log_prob_B: Tensor
    """Of the step to that child, under the policy that sampled."""
    mean_VNC: Tensor | None = None
    """Of the transition, if the objective needs it."""


@dataclass(slots=True)
class Samples:
    """What one process sampled for one optimizer step."""

    rollouts: list[Rollout] = field(default_factory=list)
    """In the order in which they were sampled."""
    nodes: list[NodeBatch] = field(default_factory=list)
    """In the order in which their first samples were dealt; empty if sampling was without noise."""


@dataclass(frozen=True, slots=True)
class RewardTable:
    """Every reward of every sample, before any aggregation."""

    names: tuple[str, ...]
    """R labels, in the order of the config."""
    score_RB: Tensor
    """fp64; entries where `valid_RB` is False are meaningless."""
    valid_RB: Tensor
    """Whether a sample has that score."""
    group_B: Tensor
    """int64 prompt ids."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """How much better than its group each sample was. Only `core.advantages` makes one."""

    value_B: Tensor
    """Training makes a sample likelier if its advantage is above 0, and less likely below."""
    used_B: Tensor
    """False where the sample must not be trained on (its reward is missing, or its group is too small)."""
    stats: Mapping[str, float]
    """What the log says of them, by name."""
    value_LB: Tensor | None = None
    """At each level of a tree, the advantage of the child that a sample descends from among its siblings; None if a
    sample's own advantage acts on all of its path."""
    kept_B: Tensor | None = None
    """False for samples that take no part in an update, which then is the mean over the others; None if all do."""

    def at(self, level: int) -> Tensor:
        """(B,) what acts on the steps of a level."""
        return self.value_B if self.value_LB is None else self.value_LB[level]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two images, whether they are consistent, and why: one training pair of the judge."""

    images: tuple[Path, ...]
    """Two files."""
    question: str
    """Follows the images, unless it says by `<image>` where each of them stands."""
    consistent: bool
    """The label: Yes or No."""
    reasons: str = ""
    """What is taught beside the label."""
    category: str = ""
    """Under which its figures are given separately."""
    group: str = ""
    """The prompt that both come from: what a split into training and test must not cut through."""
    answer: str = ""
    """What the judge is taught to say, word for word, if the data gives it; else the label and `reasons`."""
