"""Scores of rollouts, had while the next ones are drawn or after them all.

A reward is called once per rollout batch either way, so that a judge in this process meets the same batches and gives
the same scores bit for bit. In the background it runs under the inference mode and autocast of the thread that
submits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, partial
from itertools import chain
from typing import Literal

import torch

from pacorl.grpo.monitor import PanelStatistics, panel_statistics
from pacorl.grpo.rows import Row
from pacorl.judge import JUDGES
from pacorl.judge.judge import BackendOptions, RemoteJudge
from pacorl.rewards.reward import BoundsItself, Deferred, Explains, Reward, named, scores_of
from pacorl.runtime.cores import available_cores
from pacorl.runtime.workers import LOOK_SECONDS, LimitedCall, Workers
from pacorl.types import RewardTable, Rollout

Scores = list[float | None]

# Rollout batches that wait for a judge behind HTTP at a time; its own limit decides how many requests fly.
SENDERS = 16


class Scorer:
    """Scores rollouts in the order in which they are submitted. Use as a context manager."""

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        *,
        overlap: bool,
        max_missing: float = math.inf,
        scoring: Callable[[], AbstractContextManager[None]] = nullcontext,
        monitored: bool = False,
        timeout: float = math.inf,
        check_stop: Callable[[], None] = lambda: None,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            rewards: by name.
            overlap: whether scoring begins at once, or when the results are asked for.
            max_missing: if more scores than this are missing, no further ones are waited for.
            scoring: what is entered while results are waited for, such as `Turns.scoring`.
            monitored: whether the images are measured for the monitor of reward hacking too.
            timeout: seconds that a reward of this process may take for a batch.
            check_stop: called again and again while scores are waited for; may raise to stop.
            advance: called when a batch has its scores.
        """
        self.rewards, self.overlap, self.max_missing = rewards, overlap, max_missing
        self.scoring, self.monitored, self.timeout = scoring, monitored, timeout
        self.check_stop, self.advance = check_stop, advance
        self.abandoned = 0
        """Samples whose scores were not waited for."""
        self.busy_seconds = 0.0
        """Spent in rewards, over all threads."""
        self._submitted: list[tuple[Rollout, list[Callable[[], Scores]]]] = []
        self._measured: list[Callable[[], list[PanelStatistics]]] = []
        # Models of this process need not bear two threads; a judge elsewhere is asked by many.
        self._local = Workers(1, name="pacorl-reward")
        self._remote = Workers(SENDERS, name="pacorl-reward-http")
        # Apart from the judge, which would wait 40 ms for each image of 512².
        self._monitor = Workers(1, name="pacorl-monitor")

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *fault: object) -> None:
        """Abandon what has not begun, and what goes on."""
        for pool in (self._local, self._remote, self._monitor):
            pool.close()

    def submit(self, rollout: Rollout) -> None:
        """Take a rollout's images; do not change them before `results`."""
        context = torch_context()
        self._submitted.append((rollout, [self._begin(name, rollout, context) for name in self.rewards]))
        if self.monitored:
            measure = partial(_panel_statistics, rollout)
            self._measured.append(self._monitor.submit(measure).result if self.overlap else measure)

    def statistics(self) -> list[PanelStatistics]:
        """What the submitted images show, in their order; empty unless `monitored`."""
        return [image for wait in self._measured for image in wait()]

    def results(self) -> dict[int, Scores]:
        """The scores of all that was submitted, once they are there.

        Returns:
            Global row → one score per reward: None if it is missing, NaN if it was no number. All are None after more
            than `max_missing`.

        Raises:
            CallTimeout: if a reward of this process does not return.
            Exception: what a reward raised, or `check_stop`.
        """
        with self.scoring():
            return self._results()

    def _results(self) -> dict[int, Scores]:
        scores_of_row: dict[int, Scores] = {}
        missing = 0
        for rollout, waits in self._submitted:
            # A run that will stop for its failures should not first wait hours for the other samples'.
            waited_for = missing <= self.max_missing
            columns = [wait() if waited_for else [None] * len(rollout.row_B) for wait in waits]
            missing += sum(score is None for column in columns for score in column)
            self.abandoned += 0 if waited_for else len(rollout.row_B)
            scores_of_row |= {row: list(scores) for row, *scores in zip(rollout.row_B, *columns, strict=True)}
            self.advance()
        self._submitted.clear()
        return scores_of_row

    def last_error(self) -> str:
        """Why scores are missing, as far as rewards know."""
        explaining = {name: reward for name, reward in self.rewards.items() if isinstance(reward, Explains)}
        reasons = [f"{name}: {reward.last_error}" for name, reward in explaining.items() if reward.last_error]
        return "; ".join(reasons + ([f"{self.abandoned} samples were not waited for"] if self.abandoned else []))

    def _begin(self, name: str, rollout: Rollout, context: Callable[[], ExitStack]) -> Callable[[], Scores]:
        """A function that waits for a reward's scores of a rollout."""
        reward = self.rewards[name]
        if isinstance(reward, Deferred):
            return partial(self._await, name, rollout, reward.begin(rollout.prompts, rollout.images))

        def score() -> Scores:
            started = time.perf_counter()
            with context():
                scores = scores_of(name, reward, rollout.prompts, rollout.images, masked=True)
            self.busy_seconds += time.perf_counter() - started
            return scores

        call = LimitedCall(
            self._remote if asks_elsewhere(reward) else self._local,
            score,
            name=f"reward {name} (batch {len(self._submitted) + 1}: {named(rollout.prompts)})",
            seconds=time_limit(reward, self.timeout),
            check_stop=self.check_stop,
        )
        if self.overlap:
            call.start()
        return call.result

    def _await(self, name: str, rollout: Rollout, scores_now: Callable[[], Sequence[float | None] | None]) -> Scores:
        while (scores := scores_now()) is None:
            time.sleep(LOOK_SECONDS)
            self.check_stop()
        return scores_of(name, lambda *_: scores, rollout.prompts, rollout.images, masked=True)


def asks_elsewhere(reward: object) -> bool:
    """Whether a reward asks a judge outside of this process."""
    return isinstance(getattr(reward, "judge", None), RemoteJudge)


def time_limit(reward: object, seconds: float) -> float:
    """Time limit of a reward's call: none if requests to others have limits of their own."""
    return math.inf if asks_elsewhere(reward) or isinstance(reward, BoundsItself) else seconds


def _panel_statistics(rollout: Rollout) -> list[PanelStatistics]:
    return [panel_statistics(prompt, image) for prompt, image in zip(rollout.prompts, rollout.images, strict=True)]


def overlaps(setting: bool | Literal["auto"], *, in_process: bool, device: torch.device) -> bool:
    """Whether scoring runs while sampling does. "auto": not if both would want the same CPU cores."""
    if isinstance(setting, bool):
        return setting
    if not in_process or device.type != "cpu":
        return True
    return 2 * torch.get_num_threads() <= available_cores()


def scoring_overlaps(judge: BackendOptions | None, *, device: torch.device) -> bool:
    """Check whether a config's rewards score while samples are drawn; without a judge they run in this process."""
    if judge is None:
        return overlaps("auto", in_process=True, device=device)
    return overlaps(judge.overlap, in_process=JUDGES[judge.backend].in_process, device=device)


def torch_context() -> Callable[[], ExitStack]:
    """Autocast and the device as they are here: torch does not hand them from thread to thread."""
    # On the default stream the judge's kernels and sampling's would wait for each other.
    stream = _reward_stream() if torch.cuda.is_available() else None
    casts = [
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda", "mps") if torch.is_autocast_enabled(kind)
    ]
    card = torch.cuda.current_device() if torch.cuda.is_available() else None

    def enter() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode())
        for kind, dtype in casts:
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        if card is not None:
            stack.enter_context(torch.cuda.device(card))
            stack.enter_context(torch.cuda.stream(stream))
        return stack

    return enter


@cache
def _reward_stream() -> torch.cuda.Stream:
    """One for all rewards of the process, whose weights were put on the card by the default stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.default_stream())
    return stream


def reward_table(scores: Mapping[int, Scores], rows: Sequence[Row], *, names: tuple[str, ...]) -> RewardTable:
    """The scores of an epoch in the order of its rows; a missing one is invalid, and never 0."""
    columns = [[math.nan if value is None else value for value in scores[row.number]] for row in rows]
    score_RB = torch.tensor(columns, dtype=torch.float64).T
    return RewardTable(
        names=names,
        score_RB=score_RB,
        valid_RB=score_RB.isfinite(),
        group_B=torch.tensor([row.prompt.id for row in rows], dtype=torch.int64),
    )


def share_not_finite(scores: Mapping[int, Scores]) -> float:
    """Share of the scores that are NaN or infinite; a missing score is neither."""
    values = list(chain(*scores.values()))
    return sum(value is not None and not math.isfinite(value) for value in values) / len(values)
