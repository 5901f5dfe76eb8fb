"""Users' Python code in configs: `path/to/file.py:NAME`, or `module:NAME` of an installed package.

It is executed with all rights of the user. `user_files(run=False)` forbids it for a block, such as a plan. The
environment variable NO_USER_FILES forbids it for a process and its children, such as the studio's trainer.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from pacorl.io.files import text_digest

FAULTS = (Exception, SystemExit)
"""Errors of a user's code. `sys.exit(0)` in a user's file must not look like the end of a finished run."""
FORM = "path/to/file.py:NAME or module:NAME"
NAME = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)")
MODULE = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)")
NO_USER_FILES = "PACORL_NO_USER_FILES"
"""Environment variable of a process that executes no user's file."""

_ALLOWED: ContextVar[bool] = ContextVar("user_files", default=True)


@contextmanager
def user_files(*, run: bool) -> Iterator[None]:
    """Allow or forbid the execution of users' files in this block."""
    token = _ALLOWED.set(run)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def is_in_file(name: str) -> bool:
    """Return whether a name has the form of an entry in a file."""
    return ".py:" in name


def file_and_name(name: str) -> tuple[Path, str]:
    """Split `path/to/file.py:NAME`, and check that the file exists.

    Raises:
        ValueError: if it has another form, or the file does not exist.
    """
    match = NAME.fullmatch(name)
    if not match:
        raise ValueError(f"{name!r} is not of the form {FORM}")
    path = Path(match["path"])
    if not path.is_file():
        raise ValueError(f"{path} is no file; name your own code as {FORM}")
    return path, match["name"]


def is_users(name: str) -> bool:
    """Return whether a name has the form of an entry in a file or in a module."""
    return is_in_file(name) or MODULE.fullmatch(name) is not None


def users_value(name: str) -> Any:
    """Execute the file or module of a user's name and return its value NAME.

    Raises:
        ValueError: if users' code is not executed here, or if this one does not exist, raises an error or lacks NAME.
    """
    match = None if is_in_file(name) else MODULE.fullmatch(name)
    path, attribute = (match["module"], match["name"]) if match else file_and_name(name)
    if not _ALLOWED.get():
        raise ValueError(
            f"{name!r} is code, which a dry run does not execute; in Python, pacorl.plan_training(CONFIG) executes it "
            "and returns the plan"
        )
    if os.environ.get(NO_USER_FILES):
        raise ValueError(
            f"{name!r} is code, which the studio does not execute; train by `pacorl` if you trust this config and file"
        )
    module = _executed(path) if isinstance(path, Path) else _imported(path)
    if not hasattr(module, attribute):
        raise ValueError(f"{path} has no {attribute!r}")
    return getattr(module, attribute)


def file_digests(document: Any) -> dict[str, str]:
    """Hash the file of every `path/to/file.py:NAME` in a dumped config: name → digest."""
    if isinstance(document, str):
        match = NAME.fullmatch(document)
        if not match or not Path(match["path"]).is_file():
            return {}
        from pacorl.io.documents import read_text  # the commands import this file before they need pydantic

        return {document: text_digest(read_text(Path(match["path"])))}
    if isinstance(document, Mapping):
        document = list(document.values())
    digests: dict[str, str] = {}
    for value in document if isinstance(document, list | tuple) else ():
        digests |= file_digests(value)
    return digests


def code_digest(target: Any) -> str:
    """Hash the source of a function, or of a callable object's class; without a source its name.

    Called functions, and values from outside its body, are not part of it.
    """
    while isinstance(target, partial):
        target = target.func
    target = inspect.unwrap(target)
    if not inspect.isroutine(target):
        target = type(target)
    # The source of a lambda is the whole statement around it, such as the call that makes the run.
    if target.__name__ != "<lambda>":
        with suppress(OSError, TypeError):  # typed at a prompt, or built in
            return text_digest(inspect.getsource(target))
    return text_digest(f"{target.__module__}.{target.__qualname__}")


def line_in(path: Path, error: BaseException) -> str:
    """Return ", line N" for the line of a file where an error arose; empty if it is unknown."""
    # The last frame of the file: the error itself often comes from a called library.
    frames = traceback.extract_tb(error.__traceback__)
    lines = []
    for frame in frames:
        if Path(frame.filename) == path:
            lines.append(frame.lineno)

    # The traceback of a syntax error does not contain the file.
    if isinstance(error, SyntaxError):
        lines.append(error.lineno)
    return f", line {lines[-1]}" if lines and lines[-1] else ""


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except FAULTS as error:
        raise ValueError(f"module {name}: {type(error).__name__} when it was imported: {error}") from error


def _executed(path: Path) -> ModuleType:
    # pydantic and dataclasses look a class's module up in sys.modules. This name is the file's own, so that it hides
    # no other module; a changed file is executed again.
    name = f"pacorl_user_{path.stem}_{text_digest(str(path.resolve()))[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None  # always, of a .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except FAULTS as error:
        del sys.modules[name]
        fault = f"{type(error).__name__} when the file was run"
        raise ValueError(f"{path}{line_in(path, error)}: {fault}: {error}") from error
    return module
