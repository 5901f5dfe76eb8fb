"""Users' Python code in configs: `path/to/file.py:NAME`, a path from the current folder.

It is executed with all rights of the user, once, and imports modules beside it as a script does. The environment
variable NO_USER_FILES forbids it for a process and its children, such as the studio's trainer.
"""

import ast
import hashlib
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from pacorl.io.files import digest, text_digest
from pacorl.io.terminal import did_you_mean

FAULTS = (Exception, SystemExit)
"""Errors of a user's code. `sys.exit(0)` in a user's file must not look like the end of a finished run."""
FORM = "path/to/file.py:NAME"
NAME = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)")
NO_USER_FILES = "PACORL_NO_USER_FILES"
"""Environment variable that forbids a process to execute users' files."""
FOLDERS: dict[str, Path] = {}
"""Folder of each module or package that executed files import from beside them. Python keeps one of a name."""


def is_in_file(name: str) -> bool:
    """Return whether a name has the form of an entry in a file."""
    return ".py:" in name or name.endswith(".py")


def users_value(name: str) -> Any:
    """Execute the file of a user's name, again only if it has changed, and return its value NAME.

    Raises:
        ValueError: if the name has another form, users' code is not executed here, or the file does not exist, raises
            an error, lacks NAME, or imports a module whose name another file's folder has too.
    """
    match = NAME.fullmatch(name)
    if not match or not Path(match["path"]).is_file():
        raise ValueError(f"{name!r} names no file from the current folder; name your own code as {FORM}")
    path = Path(match["path"])
    if os.environ.get(NO_USER_FILES):
        raise ValueError(
            f"{name!r} is code, which the studio does not execute; `pacorl` trains with it if you trust it"
        )
    # pydantic and dataclasses look a class's module up in sys.modules. This name is the file's own, so that it hides
    # no other module; a changed file is executed again.
    own_name = f"pacorl_user_{path.stem}_{text_digest(f'{path.resolve()} {digest(path)}')[:8]}"
    module = sys.modules.get(own_name)
    if module is None:
        module = sys.modules[own_name] = ModuleType(own_name)
        module.__file__ = str(path)
        folder = path.resolve().parent
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        try:
            for local in local_modules(path):
                beside = local.relative_to(folder).parts[0].removesuffix(".py")
                if FOLDERS.setdefault(beside, folder) != folder:
                    raise ImportError(f"{FOLDERS[beside]} has a module {beside!r} too, already imported; rename one")
            SourceFileLoader(own_name, str(path)).exec_module(module)
        except FAULTS as error:
            del sys.modules[own_name]
            fault = f"{type(error).__name__} when the file was run"
            raise ValueError(f"{path}{line_in(path, error)}: {fault}: {error}") from error
    if not hasattr(module, match["name"]):
        # Without what it imports.
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == own_name]
        guess = did_you_mean(match["name"], vars(module)) or f"it defines {', '.join(own) or 'nothing'}"
        raise ValueError(f"{path} has no {match['name']!r}; {guess}")
    return getattr(module, match["name"])


def local_modules(path: Path) -> list[Path]:
    """List the modules of a file's folder or below that it imports, also inside functions, or that those import."""
    files = [path.resolve()]
    for file in files:  # which grows
        for node in ast.walk(ast.parse(file.read_bytes(), str(file))):
            level, package = getattr(node, "level", 0), getattr(node, "module", None)
            for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                # What is imported from a package may be a module too.
                name = f"{package}.{alias.name}" if package else alias.name
                place = file.parents[level - 1] if level else files[0].parent
                for part in name.split("."):
                    place /= part
                    for found in (place.with_suffix(".py"), place / "__init__.py"):
                        if found not in files and found.is_file():
                            files.append(found)
    return files[1:]


def file_digests(document: Any) -> dict[str, str]:
    """Hash each `path/to/file.py:NAME` in a dumped config, with the modules of its folder that it imports."""
    digests = {}
    for name in re.findall(r'"([^"\\]+\.py:[A-Za-z_]\w*)"', json.dumps(document, ensure_ascii=False)):
        file = Path(name.rpartition(":")[0])
        if file.is_file():
            content = b"".join(part.read_bytes() for part in (file, *local_modules(file)))
            digests[name] = hashlib.sha256(content).hexdigest()
    return digests


def code_digest(target: Any) -> str:
    """Hash the source of a function, or of a callable object's class; empty if it has no source of its own."""
    code = target if inspect.isroutine(target) else type(target)
    # The source of a lambda is the whole statement around it, such as the call that makes the run.
    if code.__name__ == "<lambda>":
        return ""
    try:
        return text_digest(inspect.getsource(code))
    except (OSError, TypeError):  # typed at a prompt, or built in
        return ""


@contextmanager
def blamed_on_code(noun: str, name: str, when: str = "", *, fault: type[ValueError] = ValueError) -> Iterator[None]:
    """Convert an exception of a user's code to a `fault` in one line: the entry's name, and the line in its file."""
    try:
        yield
    except FAULTS as error:
        line = line_in(Path(name.rpartition(":")[0]), error)
        raise fault(f"{noun} {name!r}{line}: {type(error).__name__}{when}: {error}") from error


def line_in(path: Path, error: BaseException) -> str:
    """Return ", line N" for the line of a file where an error arose; empty if it is unknown."""
    if isinstance(error, SyntaxError) and Path(error.filename or "").name == path.name:  # not in its traceback
        return f", line {error.lineno}"
    # The last frame of the file: the error itself often comes from a called library.
    line = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename) == path:
            line = f", line {frame.lineno}"
    return line
