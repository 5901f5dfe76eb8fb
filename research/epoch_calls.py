"""The project's functions that one toy epoch calls, by file: `python -m research.epoch_calls`.

A measure of how much a reader must hold in mind to follow an epoch from its prompts to its optimizer steps. Functions
of worker threads count, comprehensions and lambdas do not.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import toy_world

import pacorl
from pacorl.grpo.trainer import PolicyTrainer

PACKAGE = str(Path(pacorl.__file__).parent)


def functions_of_an_epoch(folder: Path) -> dict[str, set[str]]:
    """Run an epoch of the toy world, without evaluation and saving; returns the functions called, by file."""
    called: dict[str, set[str]] = defaultdict(set)

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            called[code.co_filename.removeprefix(PACKAGE + "/")].add(code.co_qualname)

    with toy_world.toy_world():
        trainer = PolicyTrainer(toy_world.toy_config(folder / "run"))
        before = sys.getprofile()
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            trainer.run_epoch()
        finally:
            sys.setprofile(before)
            threading.setprofile(None)
            trainer.close()
    return dict(called)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        called = functions_of_an_epoch(Path(folder))
    for file in sorted(called):
        print(f"{file}: {', '.join(sorted(called[file]))}")
    print(f"{sum(len(names) for names in called.values())} functions in {len(called)} files")


if __name__ == "__main__":
    main()
