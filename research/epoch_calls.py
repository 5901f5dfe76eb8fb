"""The project's functions that an epoch, a judge's question and a velocity call, by file.

    python -m research.epoch_calls            # the counts
    python -m research.epoch_calls --names    # and the functions of each file

A measure of how much a reader must hold in mind to follow an epoch from its prompts to its optimizer steps; the goal is
200 functions in 40 files. The config is fixed: the recipe `quickstart` with two prompts of four samples. Functions of
worker threads count, comprehensions and lambdas do not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from PIL import Image

import pacorl
from pacorl.config.base import load
from pacorl.config.recipes import recipe
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.types import Question, Size

PACKAGE = str(Path(pacorl.__file__).parent)
SETTINGS = [
    "prompts_per_epoch=2",
    "group_size=4",
    "sampling.batch=4",
    "prompts.train=tiny:train:4",
    "prompts.evaluation=tiny:test:1",
    "trackers=[]",
]
Calls = dict[str, set[str]]
"""File → names of its functions."""


def calls_of(act: Callable[[], object]) -> Calls:
    """Call a function, and return the project's functions that were called, by file."""
    called: Calls = defaultdict(set)

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            called[code.co_filename.removeprefix(PACKAGE + "/")].add(code.co_qualname)

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return dict(called)


def counted(folder: Path) -> dict[str, Calls]:
    """Count an epoch, a question and a velocity, each without what loading and the first call do."""
    trainer = PolicyTrainer(load(PolicyConfig, recipe("quickstart"), [*SETTINGS, f"out={folder}/run"]))
    size = Size(*trainer.config.sampling.size)
    x_BNC = trainer.policy.noise([0], size)
    conditioning = trainer.cache.batch(trainer.train_prompts[:1], size)
    question = Question((Image.new("RGB", (64, 64)), Image.new("RGB", (64, 64), "red")), "Are these images alike?")
    assert trainer.consistency is not None
    judge = trainer.consistency.judge
    acts = {
        "epoch": trainer.run_epoch,
        "question": lambda: judge.verdicts([question]),
        "velocity": lambda: trainer.policy.velocity(x_BNC, torch.full((1,), 0.5), conditioning, size),
    }
    counts = {name: calls_of(act) for name, act in acts.items()}
    trainer.close()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="print the functions of each file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = counted(Path(folder))
    for name, called in counts.items():
        if options.names:
            for file in sorted(called):
                print(f"    {file}: {', '.join(sorted(called[file]))}")
        print(f"{name}: {sum(map(len, called.values()))} functions in {len(called)} files")


if __name__ == "__main__":
    main()
