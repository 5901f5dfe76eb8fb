"""The one door for files: written whole and on the disk, locked by the system, and inside their folder.

What `docs/survives.md` promises of kills, power cuts and full disks rests on these functions.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import re
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

LONGEST_NAME, LONGEST_PATH = 255, 2000
"""Bytes of a file's name, and characters of a path below a folder."""
PART = ".part"
"""Ends the name of a file that is being written, `.NAME.MACHINE-PROCESS-RANDOM.part`."""
PRIVATE = 0o600
"""Mode of databases, configs, histories and logs: people's names and prompts stand in them."""
SHARED = 0o644
"""Mode of what is made to be shown or handed on: pages, images, datasets, adapters. A stricter umask holds."""
OWNED = ".pacorl"
"""Marks a folder that a command made: it replaces files there."""
PAGE_MARK = b'<a class="brand" href="#top">pacorl</a>'
"""In every page that a command writes."""
NOTE = "process "
"""Begins the content of a run's lock file; other locks are empty."""


def digest(path: Path) -> str:
    """SHA-256 of a file's content. Raises ValueError if it is missing, naming the file."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; run the step that makes it first, or name another file")
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, by its path within."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): digest(path) for path in files}


def check_digests(folder: Path, expected: Mapping[str, str]) -> None:
    """Raise ValueError, naming the file, if a file of a folder is missing or not what `digests` saw."""
    for name, sha256 in expected.items():
        path = inside(folder, name)
        if digest(path) != sha256:
            raise ValueError(f"{path} is damaged: it is not what was written")


def read_bytes(path: Path, *, limit: int | None = None) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it cannot be read, is a folder, a pipe or a device, or is larger than `limit` bytes.
    """
    # O_NONBLOCK: opening a pipe would otherwise wait for somebody to write into it. Windows has neither.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)  # before `open`, which calls a folder by the number of its descriptor
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with open(descriptor, "rb") as handle:
        if limit is not None and status.st_size > limit:
            raise OSError(errno.EFBIG, f"{status.st_size:,} bytes, and at most {limit:,} are read", str(path))
        return handle.read()


def check_writable(path: Path, *, folder: bool = False) -> None:
    """Check that a file, or files in a folder, can be written there, before hours of work end with it.

    Raises:
        OSError: A part of the path is no folder or may not be written, or the path is a folder and should be a file.
    """
    if not folder and path.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    above = next(part for part in (path if folder else path.parent, *path.parents) if part.exists())
    if not above.is_dir():
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(above))
    if not os.access(above, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(above))


def check_no_run(folder: Path) -> None:
    """Raise ValueError if a training has run in a folder, of a generator or of a judge, or files have a run's names."""
    if (folder / "metrics.jsonl").exists() or any((folder / "checkpoints").glob("[!.]*")):
        raise ValueError(f"{folder} holds a run already; go on with --resume auto, or name another folder with out=…")
    names = ("config.yaml", "report.html", "summary.json", "ledger.jsonl", "starts.jsonl")
    check_new(
        *(folder / name for name in names),
        fix="go on with --resume auto if it is of a run that was stopped, or name another folder with out=…",
    )


def check_new(*paths: Path, fix: str) -> None:
    """Raise ValueError, naming the first, if a file that is to be made is there already; `fix` ends the message."""
    for path in paths:
        if os.path.lexists(path):
            raise ValueError(f"{path} is there already, and is not replaced; {fix}")


def check_made(path: Path, *, mark: bytes = PAGE_MARK, limit: int = -1) -> None:
    """Raise ValueError if a file that is to be replaced was not made by this package.

    Args:
        path: nothing is wrong if it is missing.
        mark: what its own files contain.
        limit: bytes of the beginning in which the mark is looked for; -1 for all.
    """
    if path.is_file():
        with path.open("rb") as handle:
            if mark not in handle.read(limit):
                raise ValueError(f"{path} was not made by pacorl, and is not replaced; name another file or folder")


def claim_folder(folder: Path, *marks: str) -> None:
    """Make a folder that a command fills, or go on in one that it made.

    Args:
        folder: it is empty, or contains OWNED or one of `marks`.
        marks: names that do as well.

    Raises:
        ValueError: It contains files of others.
    """
    if any((folder / mark).is_file() for mark in (OWNED, *marks)):
        return
    if folder.is_dir() and any(not path.name.endswith(PART) for path in folder.iterdir()):
        raise ValueError(f"{folder} holds files that this command did not make; name an empty or a new folder")
    write_atomic(folder / OWNED, "A pacorl command made this folder, and replaces the files that it made here.\n")


def open_regular(path: Path, flags: int, *, mode: int = PRIVATE) -> int:
    """Open a regular file for writing, made with `mode` if it is missing.

    Returns:
        The descriptor.

    Raises:
        OSError: The name is a link, which could lead to any file of the user, or a folder, a pipe or a device.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, "a link, and nothing is written through links here; delete it", str(path))
    # O_NOFOLLOW: it may have become one since. Windows has neither.
    safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags | os.O_CREAT | safe, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file; move it away", str(path))
    return descriptor


def write_atomic(path: Path, content: str | bytes, *, mode: int = SHARED, flush: bool = True) -> None:
    """Write a file whole: readers see the old one or the new one, and so does the machine after a power cut.

    Args:
        path: the file; its folder is made.
        content: text is written as UTF-8.
        mode: of a file that is new.
        flush: wait for the disk; without it, a power cut may leave a torn file until `flush_all`.
    """
    try:
        content = content.encode() if isinstance(content, str) else content
    except UnicodeEncodeError:  # JSON's escapes can hold it, and UTF-8 cannot
        raise ValueError(f"{path} cannot be written: its text would hold half of a surrogate pair") from None
    with replacing(path, mode=mode, flush=flush) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replacing(path: Path, *, mode: int = SHARED, flush: bool = True) -> Iterator[Path]:
    """Replace a file by one that the block writes: the block's own name for it takes the real one at its end.

    If the block raises, what was there stays. A file that is replaced keeps its mode, a new one has `mode`.

    Example:
        with replacing(out / "rows.parquet") as temporary:
            parquet.write_table(table, temporary)
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "not a regular file; name another", str(path))
    part = f".{path.name}.{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}{PART}"
    temporary = path.with_name(part)
    with disk_errors(path, temporary):
        make_folder(path.parent, flush=flush)
        os.close(open_regular(temporary, os.O_WRONLY | os.O_EXCL, mode=mode))
        try:
            mode = stat.S_IMODE((path if path.is_file() else temporary).stat().st_mode) & 0o777
            yield temporary
            # The block may have put a file of its own there.
            if stat.S_IMODE(temporary.stat().st_mode) != mode:
                temporary.chmod(mode)
            # The content must be on the disk before the name is: else a power cut leaves an empty file of that name.
            if flush:
                flush_to_disk(temporary)
            temporary.replace(path)
            if flush:
                flush_to_disk(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def make_folder(folder: Path, *, flush: bool = True) -> None:
    """Make a folder whose name is on the disk with `flush`, and the names of those above it that were missing."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o755, exist_ok=True)  # whoever may write in a folder may replace its files
    folder.mkdir(exist_ok=True)  # raises if it is a file
    for path in missing if flush else []:
        flush_to_disk(path.parent)


def remove_made(folder: Path, made: Sequence[str], *, others: Path | None = None) -> list[str]:
    """Delete those files of a folder that were made there, and the folders that this leaves empty.

    Args:
        folder: nothing happens if it is missing or a link.
        made: patterns of the files' paths within.
        others: where every other file goes, at its path within; they stay if it is None.

    Returns:
        The paths within of the other files.
    """
    if folder.is_symlink() or not folder.is_dir():
        return []
    root = folder.resolve()
    for pattern in made:
        for path in [*folder.glob(pattern)]:
            is_within = path.parent.resolve().is_relative_to(root)  # a pattern follows links to folders, and ".."
            if is_within and (path.is_symlink() or not path.is_dir()):
                path.unlink()
    # The deepest first, so that a folder is empty when its turn comes.
    left = sorted(folder.rglob("*"), reverse=True)
    foreign = [path.relative_to(folder) for path in left if path.is_symlink() or not path.is_dir()]
    for name in foreign if others else []:
        assert others
        make_folder((others / name).parent)
        (folder / name).rename(free_name(others / name))
    for path in [*left, folder]:
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()
    return sorted(map(str, foreign))


def free_name(path: Path) -> Path:
    """The path itself, or the first of PATH-2, PATH-3 … that is free."""
    return next(name for name in numbered(path) if not os.path.lexists(name))


def numbered(path: Path) -> Iterator[Path]:
    """PATH, PATH-2, PATH-3 …"""
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in count(2))


@contextmanager
def disk_errors(path: Path, *others: Path) -> Iterator[None]:
    """Within the block, an error of the disk that names no file, or one of the `others`, names `path`."""
    try:
        yield
    except OSError as error:
        # A full disk says so while bytes are written, and Python knows no name then.
        if error.errno and error.filename in (None, *map(str, others)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def sweep(folder: Path) -> None:
    """Remove the half-written files below a folder whose processes, of this machine, are gone."""
    written_here = re.compile(rf"\..+\.{re.escape(platform.node())}-(\d+)-[0-9a-f]{{8}}{re.escape(PART)}")
    for path in folder.rglob(f".*{PART}"):
        match = written_here.fullmatch(path.name)
        if match and not is_running(int(match[1])) and stat.S_ISREG(path.lstat().st_mode):
            path.unlink(missing_ok=True)


def is_running(process: int) -> bool:
    """Whether a process of this machine runs; always True on Windows."""
    if os.name == "nt":  # where signal 0 would end it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    with contextlib.suppress(OSError):  # only Linux has it
        # One that has ended keeps its number until its parent has asked how.
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    return True


def flush_tree(folder: Path) -> None:
    """Wait until everything below a folder is on the disk, the folder's own name aside."""
    for path in [*folder.rglob("*"), folder]:
        if stat.S_IFMT(path.lstat().st_mode) in (stat.S_IFREG, stat.S_IFDIR):  # a pipe of the user would be waited for
            flush_to_disk(path)


def flush_all(folder: Path) -> None:
    """Wait until everything below a folder is on the disk, by one wait where the system has it, however many files."""
    if hasattr(os, "sync"):
        os.sync()
    elif folder.is_dir():
        flush_tree(folder)


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders, and writes their names by itself
        return
    try:
        # Network file systems may refuse for folders what they do for files.
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(handle)
    finally:
        os.close(handle)


class LockedError(ValueError):
    """Another process holds a lock; `holder` is what it wrote about itself."""

    def __init__(self, message: str, *, holder: str) -> None:
        super().__init__(message)
        self.holder = holder


@contextmanager
def sole_holder(path: Path, *, note: str = "") -> Iterator[None]:
    """Hold a lock file, which stays, within the block; the lock ends with its process, however that ends.

    A process that comes second gets a LockedError with the `note` of the first, which begins with NOTE or is empty.

    Raises:
        ValueError: The file is no lock.
        OSError: It is a link, or no regular file.
    """
    try:
        import fcntl
    except ImportError:  # Windows: nothing is locked there
        yield
        return
    make_folder(path.parent)
    with open(open_regular(path, os.O_RDWR), "r+", encoding="utf-8", errors="replace") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = handle.read(LONGEST_NAME).strip()
            raise LockedError(f"{path} is held by another process", holder=holder) from None
        # A full disk may have cut the note of an earlier holder short, and a power cut may have left zeros.
        if not NOTE.startswith(handle.read(len(NOTE)).strip("\0")):
            raise ValueError(f"{path} is no lock of pacorl's; move it away, or name another folder")
        handle.seek(0)
        handle.truncate()  # the note of a holder that is gone
        with disk_errors(path):
            os.write(handle.fileno(), note.encode())  # unbuffered: closing would try a refused write again
        yield


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Be the only process that writes a run's folder within the block; sweeps what killed ones left half-written.

    Raises:
        ValueError: another process does; it is named.
    """
    note = f"{NOTE}{os.getpid()} on {platform.node()}"
    with ExitStack() as held:
        try:
            held.enter_context(sole_holder(folder / ".lock", note=note))
        except LockedError as error:
            raise ValueError(
                f"{folder} is being written by {error.holder or 'another process'}; wait for its end or stop it, "
                "or name another folder with out=…"
            ) from None
        sweep(folder)
        yield


@contextmanager
def safetensors_errors(name: object) -> Iterator[None]:
    """Within the block, a damaged file of weights is a ValueError that names what was read."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:  # names no file, and is no ValueError
        raise ValueError(f"{name}: its weights are damaged or cut off ({error}); fetch or copy them again") from None


@contextmanager
def weight_write_errors(path: Path) -> Iterator[None]:
    """Within the block, a full disk that safetensors or torch.save met is an OSError that names the file."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        # torch.save's RuntimeError gives positions in the file and no cause.
        reason = f"it could not be written ({error}); make room if the disk is full"
        raise OSError(errno.EIO, reason, str(path)) from error


def safe_name(name: str) -> str:
    """The name itself. Raises ValueError if some system could not have it as a folder's name."""
    allowed = name.replace("-", "").replace("_", "").replace(".", "")
    if not (allowed.isascii() and allowed.isalnum()) or name.startswith(".") or len(name) > 120:
        raise ValueError(f"{name[:140]!r} cannot name a folder; use at most 120 letters, digits, '-', '_' and '.'")
    return name


def inside(folder: Path, relative: str) -> Path:
    """`folder/relative`, links resolved. Raises ValueError if that lies outside of `folder`."""
    root = folder.resolve()
    # Of a longer name Linux says so whenever it is looked for, and nobody knows by then where the name stood.
    longest = max((len(part.encode(errors="replace")) for part in Path(relative).parts), default=0)
    if "\0" in relative or longest > LONGEST_NAME or len(relative) > LONGEST_PATH:
        raise ValueError(f"{relative[:60]!r} is not a path of a file")
    path = (root / relative).resolve()
    if not path.is_relative_to(root) or Path(relative).is_absolute():
        raise ValueError(f"{relative!r} leads out of {folder}; paths must stay inside the folder")
    return path
