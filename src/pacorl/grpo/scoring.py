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
from pacorl.io.outage import WaitsForOutages
from pacorl.judge.judge import JudgeSettings, RemoteJudge
from pacorl.rewards.consistency import Consistency, Contrast
from pacorl.rewards.reward import Explains, Reward, RewardFunction, named, panel_scores_of, scores_of
from pacorl.runtime.cores import available_cores
from pacorl.runtime.processes import Runtime, SharedFault
from pacorl.runtime.workers import LimitedCall, Workers
from pacorl.types import Prompt, RewardTable, Rollout

if TYPE_CHECKING:
    from PIL.Image import Image

Scores = list[float | None]
Parts = Mapping[str, Sequence[float | None]]
"""Reward with parts → part of its score per panel."""

MAX_MISSING = 0.2
"""Failure budget: the run saves and stops if a larger share of an epoch's scores is missing."""
SENDERS = 16
"""Concurrent rollout batches of a remote judge, whose `concurrency` limits the requests."""


@dataclass(eq=False)
class Scorer:
    """Scores rollouts in the order in which they are submitted. Use as a context manager."""

    rewards: Mapping[str, Reward]
    overlap: bool
    """Whether scoring begins at submission, or in `results`."""
    max_missing: float = math.inf
    """Missing scores above which waiting stops."""
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
    _submitted: list[tuple[Sequence[int], Sequence[LimitedCall[Scores]]]] = field(default_factory=list)
    _parts: dict[int, dict[str, Sequence[float | None]]] = field(default_factory=dict)
    _abandoned: int = 0

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
        if sum(map(len, self._pending)) % self.group_size:
            return
        rollouts, self._pending = self._pending, []
        prompts = [prompt for rollout in rollouts for prompt in rollout.prompts]
        images = [image for rollout in rollouts for image in rollout.images]
        rows = [row for rollout in rollouts for row in rollout.row_B]

        calls = []
        for name, reward in self.rewards.items():
            call = LimitedCall(
                self._remote if asks_elsewhere(reward) else self._local,
                partial(self._score, name, prompts, images, rows),
                name=f"reward {name} (batch {len(self._submitted) + 1}: {named(prompts)})",
                seconds=time_limit(reward, self.timeout * len(rollouts)),
                check_stop=self.check_stop,
            )
            if self.overlap:
                call.start()
            calls.append(call)
        self._submitted.append((rows, calls))

    def results(self) -> dict[int, Scores]:
        """Wait for the scores of all submitted rollouts.

        Returns:
            Global row → one score per reward: None if missing, NaN if not a number. After more than `max_missing`
            missing scores the rest are None.

        Raises:
            CallTimeout: if a reward of this process does not return.
            Exception: raised by a reward or `check_stop`.
        """
        assert not self._pending, "`assign_rows` keeps groups whole"
        scores_of_row: dict[int, Scores] = {}
        missing = 0
        for rows, calls in self._submitted:
            # Beyond the failure budget the run stops, so waiting for the rest is useless.
            if missing <= self.max_missing:
                columns = [call.result() for call in calls]
            else:
                columns = [[None] * len(rows) for _ in calls]
                self._abandoned += len(rows)
            missing += sum(column.count(None) for column in columns)
            scores_of_row |= {row: list(scores) for row, *scores in zip(rows, *columns, strict=True)}
        self._submitted.clear()
        return scores_of_row

    @property
    def parts(self) -> dict[int, Parts]:
        """Global row → parts of its scores; empty unless `by_panel`, and complete after `results`."""
        # Copies: calls that are not waited for may still add parts.
        return {row: dict(parts) for row, parts in dict(self._parts).items()}

    def last_error(self) -> str:
        """Return the rewards' reasons for missing scores."""
        reasons = []
        for name, reward in self.rewards.items():
            if isinstance(reward, Explains) and reward.last_error:
                reasons.append(f"{name}: {reward.last_error}")
        if self._abandoned:
            reasons.append(f"{self._abandoned} samples were not waited for")
        return "; ".join(reasons)

    def _score(self, name: str, prompts: Sequence[Prompt], images: Sequence[Image], rows: Sequence[int]) -> Scores:
        """Score samples by one reward, and collect the parts of the scores."""
        reward: RewardFunction = self.rewards[name]
        if isinstance(reward, Consistency) and reward.contrast:
            reward = Contrast(reward, [seed_of(*self.draw, "contrast", row) for row in rows])
        if not self.by_panel:
            return scores_of(name, reward, prompts, images, masked=True)

        results = panel_scores_of(name, reward, prompts, images, masked=True)
        for row, result in zip(rows, results, strict=True):
            if result.part_P is not None:
                self._parts.setdefault(row, {})[name] = result.part_P
        return [result.score for result in results]


def asks_elsewhere(reward: object) -> bool:
    """Check whether a reward uses a judge in another process."""
    return isinstance(getattr(reward, "judge", None), RemoteJudge)


def time_limit(reward: object, seconds: float) -> float:
    """Return the time limit of a reward's call: none if its requests to a service have limits."""
    return math.inf if asks_elsewhere(reward) or isinstance(reward, WaitsForOutages) else seconds


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


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of an epoch's samples, of all ranks."""

    scores: Mapping[int, Scores]
    """Global row → one score per reward; None if missing."""
    parts: Mapping[int, Parts] | None
    """Global row → parts of its scores; None without panel credit."""
    reasons: Sequence[str]
    """Reasons for missing scores."""


def collect_scores(scorer: Scorer, runtime: Runtime) -> Scored:
    """Wait for the scores of all ranks.

    Raises:
        SharedFault: wraps a reward's exception on any rank.
    """
    scores = runtime.gather_rows(scorer.results)
    parts = runtime.gather_rows(lambda: scorer.parts) if scorer.by_panel else None
    reasons = set(runtime.gather(scorer.last_error())) - {""}
    return Scored(scores, parts, sorted(reasons))


def columns_of(scores: Mapping[int, Scores], rows: Sequence[Row], names: Sequence[str]) -> dict[str, Scores]:
    """Tabulate an epoch's scores by reward, in the order of its rows."""
    return {name: [scores[row.number][place] for row in rows] for place, name in enumerate(names)}


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
                f"{named(faulty[:1])}; these scores count as missing: mend the reward, or return None where it has no "
                "score"
            )

    if stats is None:
        return metrics, f"{when}: {'; '.join(warnings)}" if warnings else ""

    # 2. Too many of them, or of missing ones: the run cannot go on.
    metrics["samples/not_finite"] = sum(metrics.values()) / (len(columns) * len(prompts))
    missing = stats["samples/missing"]
    if missing > MAX_MISSING:
        causes = "; ".join([*reasons, *warnings]) or "The rewards gave no reason"
        raise SharedFault(
            ValueError(
                f"{missing:.0%} of the scores of {when} are missing, more than {MAX_MISSING:.0%}; "
                f"the state is saved. {causes}"
            )
        )

    # 3. Rewards that tell no group's images apart.
    if all(stats.get(f"reward/{name}/zero_std_groups", 0.0) >= 1 for name in columns):
        metrics[f"{ALARM}{ALIKE}"] = 1.0
        constants = " and ".join(map(repr, columns))
        warnings.append(
            f"there is nothing to learn from: reward {constants} gave all images of each prompt one score; print what "
            "it returns for images that differ"
        )
    return metrics, f"{when}: {'; '.join(warnings)}" if warnings else ""


def reward_table(
    scores: Mapping[int, Scores],
    rows: Sequence[Row],
    *,
    names: tuple[str, ...],
    parts: Mapping[int, Parts] | None = None,
) -> RewardTable:
    """Tabulate the scores of an epoch in the order of its rows; a missing score is invalid, not 0.

    Args:
        parts: global row → parts of its scores, for panel credit. A score without parts counts for every panel.
    """
    columns = columns_of(scores, rows, names)
    # fp64, since P(Yes) near 1 differs by less than fp32 resolves.
    score_RB = torch.tensor(
        [[math.nan if value is None else value for value in column] for column in columns.values()],
        dtype=torch.float64,
    )
    return RewardTable(
        names=names,
        score_RB=score_RB,
        valid_RB=score_RB.isfinite(),
        group_B=torch.tensor([row.prompt.id for row in rows], dtype=torch.int64),
        part_RBP=None if parts is None else _part_table(score_RB, rows, names=names, parts=parts),
    )


def _part_table(
    score_RB: torch.Tensor, rows: Sequence[Row], *, names: Sequence[str], parts: Mapping[int, Parts]
) -> torch.Tensor:
    """Tabulate the parts of an epoch's scores: (R, B, P), NaN if missing and beyond a set's panels."""
    # Sets with fewer panels leave the rest NaN.
    panels = max(row.prompt.grid.count for row in rows)
    part_RBP = torch.full((*score_RB.shape, panels), math.nan, dtype=torch.float64)
    for reward, name in enumerate(names):
        for index, row in enumerate(rows):
            count = row.prompt.grid.count
            part_P = parts.get(row.number, {}).get(name, [float(score_RB[reward, index])] * count)
            known_P = [math.nan if part is None else part for part in part_P]
            part_RBP[reward, index, :count] = torch.tensor(known_P, dtype=torch.float64)
    return part_RBP
