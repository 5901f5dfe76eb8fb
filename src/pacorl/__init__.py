"""pacorl: consistent image generation, by a judge of pairs and reinforcement learning that uses it.

    from pacorl import Generator, PacoReward, PolicyRun, PolicyTrainer

    generator = Generator.load("tiny")
    reward = PacoReward.from_pretrained("tiny")

The names below are imported when they are first used, so `import pacorl` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pacorl.config.judge_run import RewardRun
    from pacorl.config.policy_run import PolicyRun
    from pacorl.data.records import load_prompts
    from pacorl.engine.generator import Generator
    from pacorl.judges.http.judge import HttpJudge
    from pacorl.judges.local import LocalJudge
    from pacorl.score.reward import PacoReward
    from pacorl.train.trainer import PolicyTrainer
    from pacorl.train_judge.run import JudgeTrainer

__version__ = "0.1.0"

__all__ = [
    "Generator",
    "HttpJudge",
    "JudgeTrainer",
    "LocalJudge",
    "PacoReward",
    "PolicyRun",
    "PolicyTrainer",
    "RewardRun",
    "__version__",
    "load_prompts",
]

_HOMES = {
    "Generator": "pacorl.engine.generator",
    "HttpJudge": "pacorl.judges.http.judge",
    "JudgeTrainer": "pacorl.train_judge.run",
    "LocalJudge": "pacorl.judges.local",
    "PacoReward": "pacorl.score.reward",
    "PolicyRun": "pacorl.config.policy_run",
    "PolicyTrainer": "pacorl.train.trainer",
    "RewardRun": "pacorl.config.judge_run",
    "load_prompts": "pacorl.data.records",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'pacorl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
