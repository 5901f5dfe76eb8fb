"""Python child processes: none of them searches the working directory for modules.

`python -c` and `python -m` put the working directory first on the module path, so a `yaml.py` in a downloaded folder
would be executed.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment by which a program written in Python, and every Python that it starts, behaves as `python -P`."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def start_python(*arguments: str, **pipes: Any) -> subprocess.Popen[bytes]:
    """Start `python -P ARGUMENTS` with this environment and working directory; `pipes` are Popen's."""
    return subprocess.Popen([sys.executable, "-P", *arguments], **pipes)


def end_with_parent(number: signal.Signals) -> None:
    """Let the kernel signal this process when its parent is gone, which cannot if it was killed; for `preexec_fn`."""
    with suppress(OSError, AttributeError):  # not on Linux: there a killed parent leaves its children to the user
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
