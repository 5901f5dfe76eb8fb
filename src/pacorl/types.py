"""Data types of pacorl, shared by all packages.

Legend for the letters that end a tensor's name, here and everywhere:
    B images   G images of one prompt (a group)   S stochastic steps   T sampling steps
    N latent tokens   C channels of a token   R rewards   P panels of a set
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
Matrix = tuple[tuple[float | None, ...], ...]
"""P(Yes) of each pair of panels, symmetric; None on the diagonal and for missing answers."""
SetCriteria = Mapping[str, Mapping[str, str]]
"""dimension → name → criterion for all panels of a set."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Layout of a set's panels in its grid image: `rows` × `cols`, at least 1 each, row-major."""

    rows: int
    cols: int

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
    width: int

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
    """Recurring character, in words and in reference images.

    Attributes:
        name: Name in scenes: `{name}`.
        description: Looks, in the words of a panel's text.
        images: Reference images.
        keep: Trait → looks to preserve in all images, e.g. `keep["hair"]`.
    """

    name: str
    description: str
    images: tuple[Path, ...] = ()
    keep: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Description, with the preserved traits that it lacks."""
        missing = [looks for looks in self.keep.values() if looks.lower() not in self.description.lower()]
        return ", ".join([self.description.rstrip("."), *missing])


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt of a set of panels, or of an edit of `sources`.

    `id` is also the group of all samples generated from it.

    Attributes:
        id: Identifier within a run; an int64, never a float or text.
        text: Input of the generator.
        theme: Text shared by all panels, for the judge.
        grid: 1×1 for a single image, as of an edit.
        panels: One description per panel, row-major; empty if the record has none.
        criteria: dimension → name → text, e.g. `criteria["Identity"]["Hat"]`.
        sources: Images to edit.
        characters: Characters that its panels describe. Rewards compare the panels with their images.
        references: Images for generators that take reference images, in the generator's order.
        size: Size in the record, if any.
        category: Category in the record, for results by category.
        origin: File and line of its source, for messages; empty without a file.
    """

    id: int
    text: str
    theme: str = ""
    grid: Grid = Grid(1, 1)
    panels: tuple[str, ...] = ()
    criteria: SetCriteria = field(default_factory=dict)
    sources: tuple[Path, ...] = ()
    characters: tuple[Character, ...] = ()
    references: tuple[Path, ...] = ()
    size: Size | None = None
    category: str = ""
    origin: str = field(default="", compare=False, repr=False)

    @property
    def place(self) -> str:
        """Its file and line, or its id, for messages."""
        return self.origin or f"prompt {self.id}"


MOST_NAMED = 10
"""Prompts or lines of a file that a message lists."""


def places(prompts: Sequence[Prompt]) -> str:
    """List where prompts stand, the first MOST_NAMED and a count."""
    more = f" and {len(prompts) - MOST_NAMED} more" if len(prompts) > MOST_NAMED else ""
    return ", ".join([prompt.place for prompt in prompts[:MOST_NAMED]]) + more


@dataclass(frozen=True, slots=True)
class Question:
    """Images and a question about them, to be answered Yes or No.

    Attributes:
        images: Images in the judge's order.
        text: Text after the images.
    """

    images: tuple[Image, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judge's answer: a probability, or the reason why there is none. A failure is *missing*, never 0.

    Attributes:
        p_yes: P(Yes | Yes or No), from 0 to 1, of the first answer token.
        error: Why there is no probability; empty if there is one.
    """

    p_yes: float | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Conditioning:
    """Encoded prompts (and sources), in the format of one policy.

    Attributes:
        tensors: Tensors of shape (B, …).
    """

    tensors: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))


@dataclass(slots=True)
class Rollout:
    """One batch of samples, for rewards and endpoint objectives.

    Attributes:
        prompts: Prompt of each of the B samples.
        row_B: Global row of each sample in its epoch: the only source of its seed.
        size: Pixels of all images.
        final_BNC: (B, N, C) endpoints, fp32, on the CPU like all that is kept for training.
        images: The B decoded endpoints.
    """

    prompts: list[Prompt]
    row_B: list[int]
    size: Size
    final_BNC: Tensor
    images: list[Image]


@dataclass(slots=True)
class NodeBatch:
    """Nodes of one stochastic step in one forward, with everything that training needs to replay it.

    V nodes, from which E children leave, with B samples below them on this process. Tensors are fp32.

    Attributes:
        step: Index of the sampling step, from 0 to T - 1.
        level: Number of earlier stochastic steps.
        prompts: Prompt of each of the V nodes.
        size: Pixels of all images.
        sigmas_T: (T+1,) noise levels, from 1 to 0.
        latents_VNC: (V, N, C) latents before the step.
        next_latents_ENC: (E, N, C) latents after the step, of each child.
        row_B: Global row of each of the B samples.
        node_B: (B,) int64, index of the node above each sample.
        child_B: (B,) int64, index of the child that each sample descends from.
        log_prob_B: (B,) log-probability of the step to that child, under the policy that sampled; with panel credit
            (B, N), each token its panel's.
        mean_VNC: (V, N, C) mean of the transition, if the objective needs it.
    """

    step: int
    level: int
    prompts: list[Prompt]
    size: Size
    sigmas_T: Tensor
    latents_VNC: Tensor
    next_latents_ENC: Tensor
    row_B: list[int]
    node_B: Tensor
    child_B: Tensor
    log_prob_B: Tensor
    mean_VNC: Tensor | None = None


@dataclass(slots=True)
class Samples:
    """Samples of one process for one optimizer step.

    Attributes:
        rollouts: Rollouts in sampling order.
        nodes: Node batches by their first samples; empty for ODE sampling.
    """

    rollouts: list[Rollout] = field(default_factory=list)
    nodes: list[NodeBatch] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RewardTable:
    """Every reward of every sample, before any aggregation.

    Attributes:
        names: R labels, in the order of the config.
        score_RB: (R, B) fp64 scores; entries where `valid_RB` is False are meaningless.
        valid_RB: (R, B) bool, whether a sample has that score.
        group_B: (B,) int64 prompt ids.
        part_RBP: (R, B, P) parts of the scores by panel, NaN if missing; None without panel credit.
    """

    names: tuple[str, ...]
    score_RB: Tensor
    valid_RB: Tensor
    group_B: Tensor
    part_RBP: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of samples over their groups, computed by `core.advantages`.

    Attributes:
        value_B: (B,) advantages. Training makes a sample likelier if its advantage is above 0, and less likely below.
        used_B: (B,) bool, False where the sample must not be trained on: its reward is missing, or its group too small.
        stats: Metrics by name.
        value_BP: (B, P) advantage of each panel; None without panel credit.
    """

    value_B: Tensor
    used_B: Tensor
    stats: Mapping[str, float]
    value_BP: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Training pair of the judge: two images, their label and reasons.

    Attributes:
        images: Two files.
        question: Text after the images, or with `<image>` at their positions.
        consistent: The label: Yes or No.
        reasons: Reasons, taught after the label.
        category: Category for separate results.
        group: Prompt of both images; a split into training and test keeps a group whole.
        answer: Exact training answer, if given; else the label and `reasons`.
    """

    images: tuple[Path, ...]
    question: str
    consistent: bool
    reasons: str = ""
    category: str = ""
    group: str = ""
    answer: str = ""
