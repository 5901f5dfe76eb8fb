"""Scores of rollouts, had while the next ones are drawn or after them all.

A reward is called once per rollout batch either way, so that a judge in this process meets the same batches and gives
the same scores bit for bit. In the background it runs under the inference mode and autocast of the thread that
submits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Literal

import torch

from pacorl.judges.judge import RemoteJudge
from pacorl.rewards.reward import Explains, Reward, scores_of
from pacorl.types import Rollout

Scores = list[float | None]
Surroundings = Callable[[], ExitStack]

SENDERS = 16
"""Rollout batches that wait for a judge behind HTTP at a time; its own limit decides how many requests fly."""


class Scorer:
    """Scores rollouts in the order in which they are submitted. Use as a context manager.

    Rewards of models in this process share one thread, since they need not bear several. Those that ask over HTTP
    have many.
    """

    def __init__(self, rewards: Mapping[str, Reward], *, overlap: bool) -> None:
        """
        Args:
            rewards: by name.
            overlap: whether scoring begins at once, or when the results are asked for.
        """
        self.rewards = rewards
        self.busy_seconds = 0.0
        """Spent in rewards, over all threads."""
        self.overlap = overlap
        self._submitted: list[tuple[Rollout, dict[str, Callable[[], Scores]]]] = []
        self._local = ThreadPoolExecutor(1, thread_name_prefix="pacorl-reward")
        self._remote = ThreadPoolExecutor(SENDERS, thread_name_prefix="pacorl-reward-http")

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *fault: object) -> None:
        """Abandons what has not begun; what is running ends by itself."""
        for pool in (self._local, self._remote):
            pool.shutdown(wait=False, cancel_futures=True)

    def submit(self, rollout: Rollout) -> None:
        """Takes a rollout's pictures; do not change them before `results`."""
        context = _surroundings()
        work = {name: self._work(name, reward, rollout, context) for name, reward in self.rewards.items()}
        self._submitted.append((rollout, {name: self._begin(name, job) for name, job in work.items()}))

    def results(self) -> dict[int, Scores]:
        """Global row → one score per reward, None where missing and NaN where it was no number, of all that was
        submitted. Raises what a reward raised."""
        found: dict[int, Scores] = {}
        for rollout, jobs in self._submitted:
            columns = [wait() for wait in jobs.values()]
            found |= {row: list(scores) for row, *scores in zip(rollout.row_B, *columns, strict=True)}
        self._submitted.clear()
        return found

    def last_error(self) -> str:
        """Why scores are missing, as far as rewards know."""
        reasons = {
            name: reward.last_error
            for name, reward in self.rewards.items()
            if isinstance(reward, Explains) and reward.last_error
        }
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())

    def _begin(self, name: str, job: Callable[[], Scores]) -> Callable[[], Scores]:
        if not self.overlap:
            return job
        asks = isinstance(getattr(self.rewards[name], "judge", None), RemoteJudge)
        future: Future[Scores] = (self._remote if asks else self._local).submit(job)
        return future.result

    def _work(self, name: str, reward: Reward, rollout: Rollout, context: Surroundings) -> Callable[[], Scores]:
        def work() -> Scores:
            started = time.perf_counter()
            with context():
                scores = scores_of(name, reward, rollout.prompts, rollout.images, masked=True)
            self.busy_seconds += time.perf_counter() - started
            return scores

        return work


def overlaps(setting: bool | Literal["auto"], *, in_process: bool, device: torch.device) -> bool:
    """Whether scoring runs while sampling does. "auto": not where both would want the same CPU cores."""
    if isinstance(setting, bool):
        return setting
    if not in_process or device.type != "cpu":
        return True
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 2 * torch.get_num_threads() <= cores


def _surroundings() -> Surroundings:
    """What torch does not hand from thread to thread: autocast and the device, as they are here."""
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    card = torch.cuda.current_device() if torch.cuda.is_available() else None

    def enter() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode())
        for kind, dtype in casts:
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        if card is not None:
            stack.enter_context(torch.cuda.device(card))
        return stack

    return enter
