"""Python child processes: none of them searches the working directory for modules.

`python -c` and `python -m` put the working directory first on the module path, so a `yaml.py` in a downloaded folder
would be executed.
"""

import subprocess
import sys
from typing import Any

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment by which a program written in Python, and every Python that it starts, behaves as `python -P`."""


def start_python(*arguments: str, **pipes: Any) -> subprocess.Popen[bytes]:
    """Start `python -P ARGUMENTS` with this environment and working directory; `pipes` are Popen's."""
    return subprocess.Popen([sys.executable, "-P", *arguments], **pipes)
