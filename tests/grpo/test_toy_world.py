"""The toy world is a world: runs in it are quick, alike for one seed, and learn what its judge rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import train_policy
from toy_world import toy_config, toy_world

LEARNING = [
    "epochs=8",
    "save_every=8",
    "group_size=16",
    "sampling.batch=16",
    "sampling.sde_steps=[0,1]",
    "sampling.tree.seeds=1",
    "evaluation.every=0",
    "optimizer.lr=0.05",
    "rewards=[{name: consistency}]",
]


def evaluations(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "evaluation"]


@pytest.mark.slow
def test_a_policy_learns_what_the_judge_rewards(tmp_path: Path) -> None:
    with toy_world():
        before, after = evaluations(train_policy(toy_config(tmp_path / "run", *LEARNING)))
    assert after["consistency"] > 1.1 * before["consistency"]
