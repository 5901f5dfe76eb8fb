"""pacorl: consistent image generation, by a judge of pairs and reinforcement learning that uses it.

    from pacorl import Generator, PacoReward, PolicyTrainer

    generator = Generator.from_pretrained("tiny")
    reward = PacoReward.from_pretrained("tiny")

The names below are imported when they are first used, so `import pacorl` costs nothing.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pacorl.character_training.character_config import CharacterConfig
    from pacorl.character_training.character_trainer import CharacterTrainer
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.generate.generator import Generator
    from pacorl.generate.sets import generate_sets
    from pacorl.grpo.policy_config import PolicyConfig
    from pacorl.grpo.trainer import PolicyTrainer
    from pacorl.judge.http import HttpJudge
    from pacorl.judge.local import LocalJudge
    from pacorl.judge_training.judge_config import JudgeConfig
    from pacorl.judge_training.judge_trainer import JudgeTrainer
    from pacorl.plan.plan import plan_training
    from pacorl.records.compose import prompt_from
    from pacorl.records.prompts import load_prompts
    from pacorl.report.page import keep_page, write_report
    from pacorl.types import Grid, Prompt, Question, Size

__version__ = "0.1.0"

__all__ = [
    "CharacterConfig",
    "CharacterTrainer",
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
    "keep_page",
    "load_prompts",
    "plan_training",
    "prompt_from",
    "write_report",
]

_HOMES = {
    "CharacterConfig": "pacorl.character_training.character_config",
    "CharacterTrainer": "pacorl.character_training.character_trainer",
    "Generator": "pacorl.generate.generator",
    "Grid": "pacorl.types",
    "HttpJudge": "pacorl.judge.http",
    "JudgeConfig": "pacorl.judge_training.judge_config",
    "JudgeTrainer": "pacorl.judge_training.judge_trainer",
    "LocalJudge": "pacorl.judge.local",
    "PacoReward": "pacorl.gate.paco_reward",
    "PolicyConfig": "pacorl.grpo.policy_config",
    "PolicyTrainer": "pacorl.grpo.trainer",
    "Prompt": "pacorl.types",
    "Question": "pacorl.types",
    "Size": "pacorl.types",
    "generate_sets": "pacorl.generate.sets",
    "keep_page": "pacorl.report.page",
    "load_prompts": "pacorl.records.prompts",
    "plan_training": "pacorl.plan.plan",
    "prompt_from": "pacorl.records.compose",
    "write_report": "pacorl.report.page",
}

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings of torch's allocator, which reads them once: today's name, and the older one."""
EXPANDABLE = "expandable_segments:True"
"""The setting that this package makes."""


def _use_expandable_segments() -> None:
    """Let torch's CUDA allocator grow its segments, unless the environment configures the allocator.

    Fixed segments keep gigabytes that fit no later tensor: the memory of weights before they are replaced. The setting
    must precede torch's import, and has no effect without a card.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = EXPANDABLE


_use_expandable_segments()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'pacorl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
