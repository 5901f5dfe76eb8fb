"""Scores beside sampling: the same as after it, under the same modes, and faults that come through."""

import math
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_runs import metrics, tiny_run, train_policy
from toy_world import ToyJudge

from pacorl.grpo import checkpoint, scoring
from pacorl.grpo.rows import Row
from pacorl.grpo.scoring import Scorer, reward_table
from pacorl.judge.judge import Judge
from pacorl.rewards.reward import PanelScores, RewardError
from pacorl.runtime.workers import CallTimeout
from pacorl.types import Prompt, Rollout, Size


def results(scorer: Scorer) -> dict[int, list[float | None]]:
    return {row: [result.score for result in results] for row, results in scorer.results().items()}


PROMPTS = [Prompt(number, f"prompt {number}") for number in range(4)]


def rollout(rows: Sequence[int]) -> Rollout:
    return Rollout(
        prompts=[PROMPTS[row % 4] for row in rows],
        row_B=list(rows),
        size=Size(4, 4),
        final_BNC=torch.empty(len(rows), 1, 1),
        images=[Image.new("RGB", (4, 4), (row, 0, 0)) for row in rows],
    )


class Redness:
    """Remembers under what it was called."""

    def __init__(self, scores: Any = None) -> None:
        self.calls: list[list[int]] = []
        self.modes: list[tuple[bool, str]] = []
        self.last_error = ""
        self.begun = threading.Event()
        self._scores = scores

    def check(self, prompts: Sequence[Prompt]) -> None: ...

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> list[float | None]:
        red = [image.getpixel((0, 0))[0] for image in images]  # type: ignore[index]
        self.calls.append(red)
        self.modes.append((torch.is_inference_mode_enabled(), threading.current_thread().name))
        self.begun.set()
        return self._scores(red) if self._scores else [float(value) for value in red]


@pytest.mark.parametrize("side", [True, False])
def test_each_batch_is_one_call_and_rows_keep_their_scores(side: bool) -> None:
    red, double = Redness(), Redness(lambda values: [2.0 * value for value in values])
    with closing(Scorer({"red": red, "double": double}, overlap=side)) as scorer:
        scorer.submit(rollout([4, 5]))
        scorer.submit(rollout([0, 1, 2]))
        assert results(scorer) == {row: [float(row), 2.0 * row] for row in (4, 5, 0, 1, 2)}
        assert results(scorer) == {}
    assert red.calls == double.calls == [[4, 5], [0, 1, 2]]


@pytest.mark.parametrize("side", [True, False])
def test_a_call_of_a_judge_on_a_gpu_has_several_batches_of_whole_groups_and_the_last_what_is_left(side: bool) -> None:
    red = Redness()
    with closing(Scorer({"red": red}, overlap=side, per_call=5, group_size=4)) as scorer:
        for rows in ([0, 1], [2, 3], [4, 5], [6, 7], [8, 9]):
            scorer.submit(rollout(rows))
        assert results(scorer) == {row: [float(row)] for row in range(10)}
    assert red.calls == [[*range(8)], [8, 9]]


def test_scoring_begins_before_results_are_asked_for() -> None:
    red = Redness()
    with closing(Scorer({"red": red}, overlap=True)) as scorer:
        scorer.submit(rollout([1]))
        assert red.begun.wait(60)
        assert red.modes[0][1].startswith("pacorl-reward")
    late = Redness()
    with closing(Scorer({"red": late}, overlap=False)) as scorer:
        scorer.submit(rollout([1]))
        assert not late.calls
        scorer.results()
    assert late.modes[0][1].startswith("pacorl-reward"), "a call that hangs must not hang the main thread"


@pytest.mark.parametrize("side", [True, False])
def test_rewards_are_called_without_gradients(side: bool) -> None:
    red = Redness()
    with closing(Scorer({"red": red}, overlap=side)) as scorer:
        scorer.submit(rollout([1]))
        scorer.results()
    assert red.modes[0][0]


@pytest.mark.parametrize("side", [True, False])
def test_a_fault_of_a_reward_comes_through(side: bool) -> None:
    with closing(Scorer({"red": Redness(lambda values: [1.0])}, overlap=side)) as scorer:
        scorer.submit(rollout([0, 1]))
        with pytest.raises(RewardError, match="'red' returned 1 scores for 2 images"):
            scorer.results()


def test_rewards_of_this_process_are_asked_one_at_a_time() -> None:
    together, most = [], []

    def slow(values: list[float]) -> list[float]:
        together.append(values)
        most.append(len(together))
        time.sleep(0.01)
        together.remove(values)
        return values

    with closing(Scorer({"one": Redness(slow), "other": Redness(slow)}, overlap=True)) as scorer:
        for row in range(4):
            scorer.submit(rollout([row]))
        scorer.results()
    assert most == [1] * 8


def test_a_missing_score_is_invalid_and_a_row_is_of_its_prompts_group() -> None:
    rows = [Row(PROMPTS[2], 4), Row(PROMPTS[1], 7), Row(PROMPTS[2], 5)]
    values = {4: [None, 1.0], 5: [0.25, 2.0], 7: [0.5, math.nan]}
    scores = {row: [PanelScores(value, None) for value in of_row] for row, of_row in values.items()}
    table = reward_table(scores, rows, names=("red", "double"))
    assert table.valid_RB.tolist() == [[False, True, True], [True, False, True]]
    assert table.score_RB[:, 2].tolist() == [0.25, 2.0]
    assert table.group_B.tolist() == [2, 1, 2]


def test_services_keep_their_own_time_limits() -> None:
    class Asking(Redness):
        judge: Judge

    asking = Asking()
    asking.judge = ToyJudge()
    with closing(Scorer({}, overlap=False, timeout=0.2)) as scorer:
        with pytest.raises(CallTimeout):  # a judge of this process may hang as well
            scorer.begin(asking, partial(time.sleep, 0.6), "the judge")()
        asking.judge = ToyService()
        scorer.begin(asking, partial(time.sleep, 0.6), "the judge")()


class ToyService(ToyJudge):
    """A judge elsewhere."""

    def wait_for_outages(self, seconds: float = 0.0) -> None: ...

    def close(self) -> None: ...


REWARD = """
def spotty(prompts, images):
    if len(images) == 2 and prompts[0] == prompts[1]:
        return [1.0] * len(images)  # the trial before the run
    return {values}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ("[None if i % 2 else float(i) for i in range(len(images))]", "gave no score to"),
        (
            "[float('nan') if i % 2 else float(i) for i in range(len(images))]",
            r"gave no score to \d+ images \([1-9]\d* are NaN or infinite\)",
        ),
    ],
)
@pytest.mark.usefixtures("toy")
def test_a_spent_failure_budget_saves_and_stops(
    small: list[str], tmp_path: Path, values: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(REWARD.replace("{values}", values))
    rewards = f"rewards=[{{name: '{file}:spotty'}}]"
    config = tiny_run([*small, rewards])
    monkeypatch.setattr(scoring, "MAX_MISSING", 0.4)
    with pytest.raises(ValueError, match=rf"50% of the scores of epoch 1 are missing.*the state is saved.*{cause}"):
        train_policy(config)
    assert checkpoint.checkpoints(config.out / "checkpoints")
    monkeypatch.setattr(scoring, "MAX_MISSING", 0.5)
    out = train_policy(config, resume=True)
    (epoch,) = metrics(out, "epoch")
    assert epoch["samples/missing"] == epoch["samples/used"] == 0.5
