"""Whole commands on files that somebody else wrote, in process, and a few of each as a user types them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from qa.attack import documents
from qa.attack.harness import Target

SMALL = ("model.checkpoint=tiny", "judge.checkpoint=tiny", "prompts.train=tiny:train", "prompts.evaluation=tiny:dev")
"""What an empty config would otherwise plan takes minutes to look through."""
COMMANDS: dict[str, tuple[str, Sequence[str]]] = {
    "check": ("p.jsonl", ("prompts", "check", "{}", "--against", "tiny:dev:2")),
    "import": ("rankings.csv", ("dataset", "import", "out", "{}", "--kind", "rankings")),
    "report": ("run/metrics.jsonl", ("report", "{}/..")),
    "publish": ("run/config.yaml", ("publish", "{}/..", "--licence", "mit", "--benchmark", "bench")),
    "plan": ("tiny.yaml", ("train-policy", "{}", *SMALL, "--dry-run")),
}
TYPED = 20
"""One input in so many runs as a process of its own, which takes seconds."""


def run(folder: Path, *, command: Sequence[str], file: str) -> Any:
    """Runs the command in the folder, as a process of its own if the input says so."""
    path = str(folder / file)
    words = [str(Path(path).parent) if word == "{}/.." else word.replace("{}", path) for word in command]
    os.chdir(folder)
    if (folder / ".typed").exists():
        ended = subprocess.run([sys.executable, "-m", "pacorl", *words], capture_output=True, text=True, check=False)
        print(ended.stderr, file=sys.stderr)
        return ended.returncode
    from pacorl.cli import app

    return app(words, standalone_mode=False)


def mutate(folder: Path, draw: random.Random, *, file: str) -> str:
    if draw.randrange(TYPED) == 0:
        (folder / ".typed").touch()
    # What a document alone must refuse a command may never look at: a key twice behind the part that it reads.
    return documents.mutate(file, folder, draw).removeprefix("must ")


def targets() -> list[Target]:
    return [
        Target(
            name=f"commands/{name}",
            prepare=partial(documents.prepare, file),
            mutate=partial(mutate, file=file),
            run=partial(run, command=command, file=file),
            names=(Path(file).name, "work/run", "/work"),
            codes=(1, 2) if name == "plan" else (1,),  # 2: something is absent
        )
        for name, (file, command) in COMMANDS.items()
    ]
