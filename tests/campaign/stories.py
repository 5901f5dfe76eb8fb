"""What is killed: short runs, each of which does the same however often it is begun again in its folder."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import toy_world
import torch

from pacorl.config import base as configs
from pacorl.config.judge_run import RewardRun
from pacorl.train.trainer import train_policy
from pacorl.train_judge.run import JudgeTrainer

POLICY = ["epochs=2", "keep_checkpoints=1", "evaluation.every=1", "prompts.evaluation=tiny:dev:1", "seed=3"]
JUDGE = [
    *("out=run", "data.train=[tiny:train:4]", "data.evaluation=[tiny:dev:2]", "optimizer.batch=2", "max_steps=2"),
    "tuning.targets=[q_proj]",
    *("log_every=1", "evaluate_every=1", "save_every=1", "keep_checkpoints=1", "trackers=[]"),
]
RECIPES = Path(__file__).parents[2] / "configs"


def policy() -> None:
    """Two epochs of the toy world, each with an evaluation, a page and a checkpoint, of which the better one stays."""
    train_policy(toy_world.toy_config(Path("run"), *POLICY), resume="auto")


def judge() -> None:
    """Two steps of the tiny judge on pairs that it draws, each with a checkpoint, of which one is kept."""
    JudgeTrainer(configs.load(RewardRun, RECIPES / "reward" / "tiny.yaml", JUDGE), resume=True).run()


def warm() -> None:
    """Do once what every fork has then behind it: imports, compiled templates."""
    toy_world.install()
    torch.set_num_threads(1)
    for story in (policy, judge):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            story()
