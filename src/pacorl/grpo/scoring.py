"""Scores of an epoch's samples, computed during sampling or after it.

A reward is called in both cases with the same rollout batches: one, the whole groups of one that compares samples, or
as many as keep a judge on this GPU busy. So an in-process judge returns the same scores bit for bit.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
from PIL.Image import Image

from pacorl.core.metric_names import ALARM, ALIKE, NOT_FINITE
from pacorl.core.schedule import seed_of
from pacorl.grpo.rows import Row
from pacorl.judge.judge import JudgeSettings, RemoteJudge
from pacorl.rewards.consistency import Consistency, Contrast
from pacorl.rewards.reward import PanelScores, Reward, RewardFunction, named, panel_scores_of
from pacorl.runtime.processes import Runtime, SharedFault
from pacorl.runtime.workers import Workers, outcome_of
from pacorl.types import Prompt, RewardTable, Rollout

Outcome = TypeVar("Outcome")
Scores = Mapping[int, Sequence[PanelScores]]
"""Global row → one score per reward, with its parts."""

MAX_MISSING = 0.2
"""Failure budget: the run saves and stops if a larger share of an epoch's scores is missing."""
PER_CALL = 16
"""Least samples of a call of a judge on this GPU: with four, an H200 waits for the host in two thirds of the time."""
SENDERS = 16
"""Concurrent rollout batches of a remote judge, whose `concurrency` limits the requests."""


class Scorer:
    """Scores rollouts in the order in which they are submitted, on threads of its own."""

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        *,
        overlap: bool,
        timeout: float = math.inf,
        check_stop: Callable[[], None] = lambda: None,
        group_size: int = 1,
        per_call: int = 1,
    ) -> None:
        """
        Args:
            rewards: by name.
            overlap: whether scoring begins at submission, or in `results`.
            timeout: seconds per batch of a reward in this process. A server's requests have limits of their own.
            check_stop: polled during waiting; may raise to stop.
            group_size: samples of which a call has a multiple: the group's if a reward compares them.
            per_call: least samples of a call, but for the last.
        """
        self.rewards = rewards
        self.overlap = overlap
        self.timeout = timeout
        self.check_stop = check_stop
        self.group_size = group_size
        self.per_call = per_call
        # In-process models need not be thread-safe; remote judges take concurrent requests.
        context = torch_context()
        self._local = Workers(1, name="pacorl-reward", context=context)
        self._remote = Workers(SENDERS, name="pacorl-reward-http", context=context)
        self._group: list[Rollout] = []
        """Rollouts whose call is not full."""
        self._waiting: list[list[Rollout]] = []
        """Rollouts of calls that have not begun."""
        self._batches: list[tuple[list[int], list[Callable[[], list[PanelScores]]]]] = []
        """Global rows of samples, and per reward the functions that wait for its scores."""

    def close(self) -> None:
        """Abandon queued and running calls."""
        self._local.close()
        self._remote.close()

    def submit(self, rollout: Rollout, *, draw: tuple[int, int] = (0, 0)) -> None:
        """Take a rollout's images, which must not change before `results`. Groups arrive one after the other.

        Args:
            draw: seed and epoch of the draws of a reward that compares samples.
        """
        self._group.append(rollout)
        self._draw = draw
        count = sum(len(rollout.row_B) for rollout in self._group)
        if count >= self.per_call and count % self.group_size == 0:
            self._waiting.append(self._group)
            self._group = []
            if self.overlap:
                self._begin()

    def _begin(self) -> None:
        """Call each reward for the rollouts that wait."""
        for rollouts in self._waiting:
            prompts: list[Prompt] = []
            images: list[Image] = []
            rows: list[int] = []
            for rollout in rollouts:
                prompts += rollout.prompts
                images += rollout.images
                rows += rollout.row_B
            calls = []
            for name, reward in self.rewards.items():
                function: RewardFunction = reward
                # Comparing samples needs draws, which follow from the row so that a resumed run repeats them.
                if isinstance(reward, Consistency) and reward.contrast:
                    function = Contrast(reward, [seed_of(*self._draw, "contrast", row) for row in rows])
                act = partial(panel_scores_of, name, function, prompts, images, masked=True)
                what = f"reward {name} (batch {len(self._batches) + 1}: {named(prompts)})"
                calls.append(self.begin(reward, act, what, batches=len(rollouts)))
            self._batches.append((rows, calls))
        self._waiting.clear()

    def results(self) -> dict[int, list[PanelScores]]:
        """Wait for the scores of all submitted rollouts.

        Returns:
            Global row → one score per reward: None if missing, NaN if not a number.

        Raises:
            CallTimeout: if a reward of this process does not return.
            Exception: raised by a reward or `check_stop`.
        """
        if self._group:
            self._waiting.append(self._group)
            self._group = []
        self._begin()
        scores_of_row: dict[int, list[PanelScores]] = {}
        for rows, calls in self._batches:
            columns = [scores() for scores in calls]
            scores_of_row |= {row: scores for row, *scores in zip(rows, *columns, strict=True)}
        self._batches.clear()
        return scores_of_row

    def begin(
        self, reward: object, act: Callable[[], Outcome], what: str, *, batches: int = 1
    ) -> Callable[[], Outcome]:
        """Begin a call on a reward's thread, and return a function to wait for its outcome.

        Args:
            what: subject of the message if it does not return.
            batches: number of batches, whose time limits add up.
        """
        workers, seconds = self._local, batches * self.timeout
        if isinstance(getattr(reward, "judge", None), RemoteJudge):
            workers, seconds = self._remote, math.inf
        return partial(outcome_of, workers.submit(act), what, seconds=seconds, check_stop=self.check_stop)


def overlaps(judge: JudgeSettings | None, *, device: torch.device) -> bool:
    """Decide whether scoring overlaps with sampling: not if both would share CPU cores, as without a judge too."""
    return device.type != "cpu" or (judge is not None and judge.remote)


def torch_context() -> Callable[[], ExitStack]:
    """Capture the device, which torch does not propagate to threads, for a context without gradients."""
    card: int | None = None
    if torch.cuda.is_available():
        card = torch.cuda.current_device()
        # On the default stream the judge's kernels and sampling's would wait for each other. The default stream has
        # copied the rewards' weights.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())

    def enter() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode())
        if card is not None:
            stack.enter_context(torch.cuda.device(card))
            stack.enter_context(torch.cuda.stream(stream))
        return stack

    return enter


def collect_scores(scorer: Scorer, runtime: Runtime) -> tuple[Scores, list[str]]:
    """Wait for the scores of all ranks, and the reasons for missing ones.

    Raises:
        SharedFault: wraps a reward's exception on any rank.
    """
    scores = runtime.gather_rows(scorer.results)
    reasons = []
    for name, reward in scorer.rewards.items():
        error = getattr(reward, "last_error", "")
        if error:
            reasons.append(f"{name}: {error}")
    return scores, sorted(set(chain.from_iterable(runtime.gather(reasons))))


def columns_of(scores: Scores, rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[float | None]]:
    """Tabulate an epoch's scores by reward, in the order of its rows."""
    columns = {}
    for index, name in enumerate(names):
        columns[name] = [scores[row.number][index].score for row in rows]
    return columns


def reward_table(scores: Scores, rows: Sequence[Row], *, names: tuple[str, ...], by_panel: bool = False) -> RewardTable:
    """Tabulate the scores of an epoch in the order of its rows; a missing score is invalid, not 0.

    Args:
        by_panel: whether to tabulate the parts of the scores, for panel credit. A score without parts counts for every
            panel.
    """
    # fp64, since P(Yes) near 1 differs by less than fp32 resolves. NumPy reads None as NaN.
    columns = [*columns_of(scores, rows, names).values()]
    score_RB = torch.from_numpy(np.array(columns, dtype=np.float64))
    part_RBP = None
    if by_panel:
        # Sets with fewer panels leave the rest NaN.
        panels = max(row.prompt.grid.count for row in rows)
        part_RBP = torch.full((*score_RB.shape, panels), math.nan, dtype=torch.float64)
        for index, row in enumerate(rows):
            count = row.prompt.grid.count
            for reward, result in enumerate(scores[row.number]):
                part_P = [result.score] * count if result.part_P is None else result.part_P
                part_RBP[reward, index, :count] = torch.from_numpy(np.array(part_P, dtype=np.float64))
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
    # 1. Scores that are missing; numbers that are not finite count as missing. A server may lose single answers.
    metrics: dict[str, float] = {}
    warnings = []
    for name, column in columns.items():
        absent = []
        not_finite = 0
        for value, prompt in zip(column, prompts, strict=True):
            if value is None or not math.isfinite(value):
                absent.append(prompt)
                not_finite += value is not None
        if absent:
            warnings.append(
                f"reward {name!r} gave no score to {len(absent)} images ({not_finite} are NaN or infinite), first for "
                f"{named(absent[:1])}; a missing score is left out, and is not 0"
            )
        if not_finite:
            metrics[f"{ALARM}{NOT_FINITE}{name}"] = float(not_finite)

    if stats is not None:
        # 2. With too many of them the run cannot go on.
        missing = stats["samples/missing"]
        if missing > MAX_MISSING:
            lost = f"{missing:.0%} of the scores of {when} are missing, more than {MAX_MISSING:.0%}"
            causes = "; ".join([*reasons, *warnings])
            fix = "mend the reward, or leave out prompts that it cannot score"
            raise SharedFault(ValueError(f"{lost}; the state is saved. {causes}; {fix}"))

        # 3. Rewards that tell no group's images apart.
        if all(stats.get(f"reward/{name}/zero_std_groups", 0.0) >= 1 for name in columns):
            metrics[f"{ALARM}{ALIKE}"] = 1.0
            constants = " and ".join(map(repr, columns))
            warnings.append(f"nothing to learn from: reward {constants} gave all images of each prompt one score")
    return metrics, f"{when}: {'; '.join(warnings)}" if warnings else ""
