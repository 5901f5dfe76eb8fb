"""pacorl: consistent image generation, by a judge of pairs and reinforcement learning that uses it.

    from pacorl import Generator, PacoReward, PolicyConfig, PolicyTrainer

    generator = Generator.from_pretrained("tiny")
    reward = PacoReward.from_pretrained("tiny")

The names below are imported when they are first used, so `import pacorl` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pacorl.config.judge_run import JudgeConfig
    from pacorl.config.policy_run import PolicyConfig
    from pacorl.data.records import load_prompts
    from pacorl.engine.generator import Generator
    from pacorl.generate.compose import prompt_from
    from pacorl.generate.sets import generate_sets
    from pacorl.judges.http.judge import HttpJudge
    from pacorl.judges.local import LocalJudge
    from pacorl.score.reward import PacoReward
    from pacorl.train.trainer import PolicyTrainer
    from pacorl.train_judge.run import JudgeTrainer
    from pacorl.types import Grid, Prompt, Question, Size

__version__ = "0.1.0"

__all__ = [
    "Generator",
    "Grid",
    "HttpJudge",
    "JudgeConfig",
    "JudgeTrainer",
    "LocalJudge",
    "PacoReward",
    "PolicyConfig",
    "PolicyTrainer",
    "Prompt",
    "Question",
    "Size",
    "__version__",
    "generate_sets",
    "load_prompts",
    "prompt_from",
]

_HOMES = {
    "Generator": "pacorl.engine.generator",
    "Grid": "pacorl.types",
    "HttpJudge": "pacorl.judges.http.judge",
    "JudgeConfig": "pacorl.config.judge_run",
    "JudgeTrainer": "pacorl.train_judge.run",
    "LocalJudge": "pacorl.judges.local",
    "PacoReward": "pacorl.score.reward",
    "PolicyConfig": "pacorl.config.policy_run",
    "PolicyTrainer": "pacorl.train.trainer",
    "Prompt": "pacorl.types",
    "Question": "pacorl.types",
    "Size": "pacorl.types",
    "generate_sets": "pacorl.generate.sets",
    "load_prompts": "pacorl.data.records",
    "prompt_from": "pacorl.generate.compose",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'pacorl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
