"""Scores of an epoch's samples, computed during sampling or after it.

A reward is called once per rollout batch in both cases, or once per whole group if one compares samples, so that an
in-process judge returns the same scores bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING

import torch

from pacorl.core.metric_names import ALARM, ALIKE, NOT_FINITE
from pacorl.core.schedule import seed_of
from pacorl.grpo.rows import Row
from pacorl.judge.judge import JudgeSettings, RemoteJudge
from pacorl.rewards.consistency import Consistency, Contrast
from pacorl.rewards.reward import Explains, PanelScores, Reward, RewardFunction, named, panel_scores_of, scores_of
from pacorl.runtime.cores import available_cores
from pacorl.runtime.processes import Runtime, SharedFault
from pacorl.runtime.workers import Call, Workers
from pacorl.types import Prompt, RewardTable, Rollout

if TYPE_CHECKING:
    from PIL.Image import Image

Scores = Mapping[int, Sequence[PanelScores]]
"""Global row → one score per reward, with its parts under panel credit."""

MAX_MISSING = 0.2
"""Failure budget: the run saves and stops if a larger share of an epoch's scores is missing."""
SENDERS = 16
"""Concurrent rollout batches of a remote judge, whose `concurrency` limits the requests."""


@dataclass(slots=True)
class Batch:
    """Rollouts whose images a reward scores in one call."""

    number: int
    rollouts: Sequence[Rollout]
    rows: Sequence[int]
    """Global rows of the samples."""
    calls: Sequence[Call[list[PanelScores]]] = ()
    """One per reward, once they are started."""


@dataclass(eq=False)
class Scorer:
    """Scores rollouts in the order in which they are submitted. Use as a context manager."""

    rewards: Mapping[str, Reward]
    overlap: bool
    """Whether scoring begins at submission, or in `results`."""
    by_panel: bool = False
    """Whether to collect the parts of the scores."""
    timeout: float = math.inf
    """Seconds per batch of a reward in this process."""
    check_stop: Callable[[], None] = lambda: None
    """Polled during waiting; may raise to stop."""
    group_size: int = 1
    """Samples of which a call has a multiple: the group's if a reward compares them."""
    draw: tuple[int, int] = (0, 0)
    """Seed and epoch of the draws of such a reward."""
    _pending: list[Rollout] = field(default_factory=list)
    _batches: list[Batch] = field(default_factory=list)

    def __enter__(self) -> Scorer:
        # In-process models need not be thread-safe; remote judges take concurrent requests.
        context = torch_context()
        self._local = Workers(1, name="pacorl-reward", context=context)
        self._remote = Workers(SENDERS, name="pacorl-reward-http", context=context)
        return self

    def __exit__(self, *fault: object) -> None:
        """Abandon queued and running calls."""
        self._local.close()
        self._remote.close()

    def submit(self, rollout: Rollout) -> None:
        """Take a rollout's images, which must not change before `results`. Groups arrive one after the other."""
        self._pending.append(rollout)
        if sum(map(len, self._pending)) % self.group_size == 0:
            rows = [row for rollout in self._pending for row in rollout.row_B]
            batch = Batch(len(self._batches) + 1, self._pending, rows)
            self._pending = []
            self._batches.append(batch)
            if self.overlap:
                self._start(batch)

    def results(self) -> dict[int, Sequence[PanelScores]]:
        """Wait for the scores of all submitted rollouts.

        Returns:
            Global row → one score per reward: None if missing, NaN if not a number.

        Raises:
            CallTimeout: if a reward of this process does not return.
            Exception: raised by a reward or `check_stop`.
        """
        assert not self._pending, "`assign_rows` keeps groups whole"
        scores_of_row: dict[int, Sequence[PanelScores]] = {}
        for batch in self._batches:
            self._start(batch)
            columns = [call.result(self.check_stop) for call in batch.calls]
            scores_of_row |= {row: scores for row, *scores in zip(batch.rows, *columns, strict=True)}
        self._batches.clear()
        return scores_of_row

    def last_error(self) -> str:
        """Return the rewards' reasons for missing scores."""
        reasons = []
        for name, reward in self.rewards.items():
            if isinstance(reward, Explains) and reward.last_error:
                reasons.append(f"{name}: {reward.last_error}")
        return "; ".join(reasons)

    def _start(self, batch: Batch) -> None:
        """Queue a call of each reward, unless they are queued."""
        if batch.calls:
            return
        prompts = [prompt for rollout in batch.rollouts for prompt in rollout.prompts]
        images = [image for rollout in batch.rollouts for image in rollout.images]
        calls = []
        for name, reward in self.rewards.items():
            workers = self._remote if asks_elsewhere(reward) else self._local
            score = partial(self._score, name, prompts, images, batch.rows)
            what = f"reward {name} (batch {batch.number}: {named(prompts)})"
            calls.append(workers.submit(score, what, seconds=time_limit(reward, self.timeout * len(batch.rollouts))))
        batch.calls = calls

    def _score(
        self, name: str, prompts: Sequence[Prompt], images: Sequence[Image], rows: Sequence[int]
    ) -> list[PanelScores]:
        """Score samples by one reward."""
        reward: RewardFunction = self.rewards[name]
        if isinstance(reward, Consistency) and reward.contrast:
            reward = Contrast(reward, [seed_of(*self.draw, "contrast", row) for row in rows])
        if self.by_panel:
            return panel_scores_of(name, reward, prompts, images, masked=True)
        return [PanelScores(score, None) for score in scores_of(name, reward, prompts, images, masked=True)]


def asks_elsewhere(reward: object) -> bool:
    """Check whether a reward uses a judge in another process."""
    return isinstance(getattr(reward, "judge", None), RemoteJudge)


def time_limit(reward: object, seconds: float) -> float:
    """Return the time limit of a reward's call: none if it asks a server, whose requests have limits."""
    return math.inf if asks_elsewhere(reward) else seconds


def overlaps(judge: JudgeSettings | None, *, device: torch.device) -> bool:
    """Decide whether scoring overlaps with sampling: not if both would share CPU cores, as without a judge too."""
    in_process = judge is None or not judge.remote
    if not in_process or device.type != "cpu":
        return True
    return 2 * torch.get_num_threads() <= available_cores()


def torch_context() -> Callable[[], ExitStack]:
    """Capture the device, which torch does not propagate to threads, for a context without gradients."""
    card: int | None = None
    if torch.cuda.is_available():
        card = torch.cuda.current_device()
        # On the default stream the judge's kernels and sampling's would wait for each other.
        stream = _reward_stream()

    def enter() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode())
        if card is not None:
            stack.enter_context(torch.cuda.device(card))
            stack.enter_context(torch.cuda.stream(stream))
        return stack

    return enter


@cache
def _reward_stream() -> torch.cuda.Stream:
    """Create the stream of all rewards, after the default stream has copied their weights."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.default_stream())
    return stream


# --- the scores of all ranks -----------------------------------------------------------------------------------


def collect_scores(scorer: Scorer, runtime: Runtime) -> tuple[Scores, list[str]]:
    """Wait for the scores of all ranks, and the reasons for missing ones.

    Raises:
        SharedFault: wraps a reward's exception on any rank.
    """
    scores = runtime.gather_rows(scorer.results)
    return scores, sorted(set(runtime.gather(scorer.last_error())) - {""})


def columns_of(scores: Scores, rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[float | None]]:
    """Tabulate an epoch's scores by reward, in the order of its rows."""
    return {name: [scores[row.number][place].score for row in rows] for place, name in enumerate(names)}


def reward_table(scores: Scores, rows: Sequence[Row], *, names: tuple[str, ...], by_panel: bool = False) -> RewardTable:
    """Tabulate the scores of an epoch in the order of its rows; a missing score is invalid, not 0.

    Args:
        by_panel: whether to tabulate the parts of the scores, for panel credit. A score without parts counts for every
            panel.
    """
    # fp64, since P(Yes) near 1 differs by less than fp32 resolves.
    columns = columns_of(scores, rows, names).values()
    score_RB = torch.tensor([[math.nan if s is None else s for s in column] for column in columns], dtype=torch.float64)
    part_RBP = None
    if by_panel:
        # Sets with fewer panels leave the rest NaN.
        panels = max(row.prompt.grid.count for row in rows)
        part_RBP = torch.full((*score_RB.shape, panels), math.nan, dtype=torch.float64)
        for index, row in enumerate(rows):
            count = row.prompt.grid.count
            for reward, result in enumerate(scores[row.number]):
                part_P = [result.score] * count if result.part_P is None else result.part_P
                known_P = [math.nan if part is None else part for part in part_P]
                part_RBP[reward, index, :count] = torch.tensor(known_P, dtype=torch.float64)
    return RewardTable(
        names=names,
        score_RB=score_RB,
        valid_RB=score_RB.isfinite(),
        group_B=torch.tensor([row.prompt.id for row in rows], dtype=torch.int64),
        part_RBP=part_RBP,
    )


def check_scores(
    columns: Mapping[str, Sequence[float | None]],
    prompts: Sequence[Prompt],
    *,
    when: str,
    stats: Mapping[str, float] | None = None,
    reasons: Sequence[str] = (),
) -> tuple[dict[str, float], str]:
    """Check scores: missing, not finite, and alike within every group.

    Args:
        columns: reward → one score per image; None if missing.
        when: epoch or evaluation of the images, for the message.
        stats: metrics of `core.advantages`, for scores that training compares.

    Returns:
        Metrics with an alarm per fault, and one warning; empty if there is no fault.

    Raises:
        SharedFault: if more than `MAX_MISSING` of the scores are missing; the same on all ranks.
    """
    # 1. Numbers that are not finite count as missing.
    metrics: dict[str, float] = {}
    warnings = []
    for name, column in columns.items():
        faulty = [p for value, p in zip(column, prompts, strict=True) if value is not None and not math.isfinite(value)]
        if faulty:
            metrics[f"{ALARM}{NOT_FINITE}{name}"] = float(len(faulty))
            warnings.append(
                f"reward {name!r} returned NaN or an infinity for {len(faulty)} of the images, first for "
                f"{named(faulty[:1])}; these scores count as missing"
            )

    if stats is not None:
        # 2. Too many of them, or of missing ones: the run cannot go on.
        metrics["samples/not_finite"] = sum(metrics.values()) / (len(columns) * len(prompts))
        missing = stats["samples/missing"]
        if missing > MAX_MISSING:
            causes = "; ".join([*reasons, *warnings]) or "The rewards gave no reason"
            lost = f"{missing:.0%} of the scores of {when} are missing, more than {MAX_MISSING:.0%}"
            raise SharedFault(ValueError(f"{lost}; the state is saved. {causes}"))

        # 3. Rewards that tell no group's images apart.
        if all(stats.get(f"reward/{name}/zero_std_groups", 0.0) >= 1 for name in columns):
            metrics[f"{ALARM}{ALIKE}"] = 1.0
            constants = " and ".join(map(repr, columns))
            warnings.append(f"nothing to learn from: reward {constants} gave all images of each prompt one score")
    return metrics, f"{when}: {'; '.join(warnings)}" if warnings else ""
