"""Python child processes: none of them searches the working directory for modules.

`python -c` and `python -m` put the working directory first on the module path, so a `yaml.py` in a downloaded folder
would be executed. A trusted child inherits everything but that. A confined child reads untrusted input. It inherits
only INHERITED, and gives up its privileges and the network where the system allows it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment by which a program written in Python, and every Python that it starts, behaves as `python -P`."""
INHERITED = ("PATH", "LANG", "SYSTEMROOT" if sys.platform == "win32" else "LD_LIBRARY_PATH")
"""Environment variables of a confined child; some Python installations do not start without the last one."""
NEEDED = ("pacorl", "PIL")
"""Packages that a confined child imports, perhaps from outside of the interpreter's own folders (PYTHONPATH)."""
CONFINED = (
    "import sys; sys.path[:0] = [folder for folder in sys.argv[2:] if folder not in sys.path]; "
    "from pacorl.io.children import run_confined; run_confined()"
)

# linux/prctl.h, linux/sched.h and linux/capability.h
PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
CAPABILITY_VERSION_3 = 0x20080522
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000


def start_python(*arguments: str, **pipes: Any) -> subprocess.Popen[bytes]:
    """Start `python -P ARGUMENTS` with this environment and working directory; `pipes` are Popen's."""
    return subprocess.Popen([sys.executable, "-P", *arguments], **pipes)


def end_with_parent(number: signal.Signals) -> None:
    """Let the kernel signal this process when its parent is gone, which cannot if it was killed; for `preexec_fn`."""
    with suppress(OSError, AttributeError):  # not on Linux: there a killed parent leaves its children to the user
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def start_confined(entry: str) -> subprocess.Popen[bytes]:
    """Start a confined process, which calls a function, `module:name`.

    It is isolated (`python -I`), works in the root folder, has the INHERITED variables, and is connected to this
    process by its stdin and stdout.
    """
    # The folders from which this process imports the NEEDED packages.
    folders = []
    for name in NEEDED:
        spec = find_spec(name)
        if spec and spec.origin:
            folders.append(str(Path(spec.origin).parents[1].resolve()))

    return subprocess.Popen(
        [sys.executable, "-I", "-c", CONFINED, entry, *dict.fromkeys(folders)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # Ctrl-C reaches it too, and its traceback would be noise
        env={name: os.environ[name] for name in INHERITED if name in os.environ},
        cwd=Path(sys.executable).anchor,
    )


def run_confined() -> None:
    """Confine this process, then call the function that its command line names."""
    confine()
    module, _, name = sys.argv[1].partition(":")
    getattr(import_module(module), name)()


def confine() -> bool:
    """Give up the network, new privileges, and the right to write files and start processes.

    Each as far as the system allows it: containers often forbid namespaces, and only Linux has them.

    Returns:
        Whether the network is gone.
    """
    limit("RLIMIT_FSIZE", 0)
    limit("RLIMIT_NPROC", 0)
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    # An unprivileged process may have an empty network namespace only within a new user namespace.
    is_offline = bool(libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # The new namespace has granted all capabilities within it, which reach much of the kernel.
    libc.capset((ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())
    return is_offline


def limit(resource_name: str, most: int) -> None:
    """Lower a resource limit of this process. Windows has none."""
    try:
        import resource
    except ImportError:
        return
    # The hard limit stays: another call may still choose a lower soft limit.
    kind = getattr(resource, resource_name)
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
