"""Data types of pacorl, shared by all packages.

Legend for the letters that end a tensor's name, here and everywhere:
    B images   G images of one prompt (a group)   S stochastic steps   T sampling steps
    N latent tokens   C channels of a token   R rewards   P panels of a set
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor


TINY = "tiny"
"""The name of the committed checkpoints, which every command takes in place of a folder or a hub name."""
TINY_EDITS = "tiny-edits"
"""The name of the committed judge of edits; the judge `tiny` was not taught the questions about them."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Layout of a set's panels in its grid image: `rows` × `cols`, row-major."""

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

    def __iter__(self) -> Iterator[int]:
        """Yield rows and columns, for `rows, cols = grid`."""
        return iter((self.rows, self.cols))

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
        """Parse HEIGHTxWIDTH in pixels, e.g. `512x768`; raises ValueError for other forms."""
        sides = re.fullmatch(r"\s*([1-9]\d*)\s*[x×⨉]\s*([1-9]\d*)\s*", text)
        if sides is None:
            raise ValueError(f"{text!r} is not of the form HEIGHTxWIDTH, e.g. 1024x1024")
        return cls(int(sides[1]), int(sides[2]))

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


@dataclass(frozen=True, slots=True)
class Character:
    """Recurring character, in words and in reference images."""

    name: str
    """Name in scenes: `{name}`."""
    description: str
    """Looks, in the words of a panel's text."""
    images: tuple[Path, ...] = ()
    """Reference images."""
    keep: Mapping[str, str] = field(default_factory=dict)
    """Trait → looks to preserve in all images, e.g. `keep["hair"]`."""
    may_change: tuple[str, ...] = ()
    """Traits that may differ between images, such as the pose."""

    @property
    def text(self) -> str:
        """Description, with the preserved traits that it lacks."""
        missing = []
        for looks in self.keep.values():
            if looks.lower() not in self.description.lower():
                missing.append(looks)
        return ", ".join([self.description.rstrip("."), *missing])

    @property
    def criteria(self) -> dict[str, str]:
        """Name → statement about all images, one criterion per preserved trait."""
        criteria = {}
        for trait, looks in self.keep.items():
            statement = f"{self.name.capitalize()} has the same {trait} in all images: {looks}."
            criteria[f"{self.name}: {trait}"] = statement
        return criteria


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt of a set of panels, or of an edit of `sources`.

    `id` is also the group of all samples generated from it.
    """

    id: int
    """Identifier within a run; an int64, never a float or text."""
    text: str
    """Input of the generator."""
    theme: str = ""
    """Text shared by all panels, for the judge."""
    grid: Grid = Grid(1, 1)
    """1×1 for a single image, as of an edit."""
    panels: tuple[str, ...] = ()
    """One description per panel, row-major; empty if the record has none."""
    criteria: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """dimension → name → text, e.g. `criteria["Identity"]["Hat"]`."""
    sources: tuple[Path, ...] = ()
    """Images to edit."""
    characters: tuple[Character, ...] = ()
    """Characters that its panels describe. Rewards compare the panels with their images."""
    references: tuple[Path, ...] = ()
    """Images for generators that take reference images, in the generator's order."""
    size: Size | None = None
    """Size in the record, if any."""
    category: str = ""
    """Category in the record, for results by category."""
    task: str = ""
    """Task in the record, like `category`."""
    origin: str = field(default="", compare=False, repr=False)
    """File and line that it was read from, for messages; empty for others."""

    @property
    def place(self) -> str:
        """Its file and line, or its id, for messages."""
        return self.origin or f"prompt {self.id}"


@dataclass(frozen=True, slots=True)
class Question:
    """Images and a question about them, to be answered Yes or No."""

    images: tuple[Image, ...]
    """Images in the judge's order."""
    text: str
    """Text after the images."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judge's answer: a probability, or the reason why there is none. A failure is *missing*, never 0."""

    p_yes: float | None
    """P(Yes | Yes or No) of the first answer token."""
    error: str = ""
    """Why there is no probability; empty if there is one."""
    order_gap: float | None = None
    """Difference of P(Yes) between the two image orders, if `p_yes` is their mean."""

    @property
    def valid(self) -> bool:
        """Whether there is a probability."""
        return self.p_yes is not None


@dataclass(frozen=True, slots=True)
class Conditioning:
    """Encoded prompts (and sources), in the format of one policy."""

    tensors: Mapping[str, Tensor]
    """Tensors with a leading batch dimension."""

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))


@dataclass(slots=True)
class Rollout:
    """One batch of samples, for rewards and endpoint objectives."""

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
    """Nodes of one stochastic step in one forward, with everything that training needs to replay it.

    V nodes, from which E children leave, with B samples below them on this process. Tensors are fp32.
    """

    step: int
    """Index of the sampling step."""
    level: int
    """Number of earlier stochastic steps."""
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
    """Of the step to that child, under the policy that sampled; with panel credit (B, N), each token its panel's."""
    mean_VNC: Tensor | None = None
    """Of the transition, if the objective needs it."""


@dataclass(slots=True)
class Samples:
    """Samples of one process for one optimizer step."""

    rollouts: list[Rollout] = field(default_factory=list)
    """Rollouts in sampling order."""
    nodes: list[NodeBatch] = field(default_factory=list)
    """Node batches by their first samples; empty for ODE sampling."""


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
    part_RBP: Tensor | None = None
    """Parts of the scores by panel, NaN if missing; None without panel credit."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of samples over their groups, computed by `core.advantages`."""

    value_B: Tensor
    """Training makes a sample likelier if its advantage is above 0, and less likely below."""
    used_B: Tensor
    """False where the sample must not be trained on (its reward is missing, or its group is too small)."""
    stats: Mapping[str, float]
    """Metrics by name."""
    value_BP: Tensor | None = None
    """Advantage of each panel; None without panel credit."""

    @property
    def credited(self) -> Tensor:
        """(B,) advantages; with panel credit (B, P)."""
        return self.value_B if self.value_BP is None else self.value_BP


@dataclass(frozen=True, slots=True)
class Comparison:
    """Training pair of the judge: two images, their label and reasons."""

    images: tuple[Path, ...]
    """Two files."""
    question: str
    """Text after the images, or with `<image>` at their positions."""
    consistent: bool
    """The label: Yes or No."""
    reasons: str = ""
    """Reasons, taught after the label."""
    category: str = ""
    """Category for separate results."""
    group: str = ""
    """Prompt of both images; a split into training and test keeps a group whole."""
    answer: str = ""
    """Exact training answer, if given; else the label and `reasons`."""
