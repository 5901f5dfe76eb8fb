"""Files of the whole package: atomic and durable writes, locks, and paths confined to a folder.

What `docs/running.md` promises of kills, power cuts and full disks rests on these functions.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import platform
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

PART = ".part"
"""Suffix of unfinished files, `.NAME.MACHINE-PROCESS-RANDOM.part`."""
PRIVATE = 0o600
"""Mode of databases, configs, histories and logs, which contain people's names and prompts."""
SHARED = 0o644
"""Mode of files for other people: pages, images, datasets, adapters. A stricter umask holds."""
OWNED = ".pacorl"
"""Mark of a folder made by a command, in which it may replace files."""
PAGE_MARK = b'<a class="brand" href="#top">pacorl</a>'
"""Mark of every page written by a command."""


def digest(path: Path) -> str:
    """SHA-256 of a file's content. Raises ValueError if it is missing, naming the file."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; run the step that makes it first, or name another file")
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def text_digest(text: str) -> str:
    """SHA-256 of a text; hexadecimal."""
    # By hashlib's own measure here: sha256 0.49 GB/s, blake2b 0.42, since processors have instructions for the former.
    return hashlib.sha256(text.encode()).hexdigest()


def kept_digest(path: Path) -> str:
    """`digest` of a file, computed once for each state (size and time of change) of it."""
    return _digest_in_state(path, *state_of(path))


def state_of(path: Path) -> tuple[int, int]:
    """Return a file's size and time of change. Raises OSError."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


@lru_cache(maxsize=4096)
def _digest_in_state(path: Path, size: int, changed: int) -> str:
    return digest(path)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, by its path within."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): digest(path) for path in files}


def check_digests(folder: Path, expected: Mapping[str, str]) -> None:
    """Raise ValueError, naming the file, if a file of a folder is missing or has another digest."""
    for name, sha256 in expected.items():
        path = inside(folder, name)
        if digest(path) != sha256:
            raise ValueError(f"{path} is damaged: its SHA-256 differs from the recorded one")


def read_bytes(path: Path, *, limit: int | None = None, fix: str = "") -> bytes:
    """Read a regular file; `fix` ends the message of a fault.

    Raises:
        ValueError: it cannot be read, is a folder, a pipe or a device, or is larger than `limit` bytes.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait for its writer
            raise OSError(errno.EINVAL, "not a regular file")
        if limit is not None and status.st_size > limit:
            raise OSError(errno.EFBIG, f"{status.st_size:,} bytes, and at most {limit:,} are read")
        return path.read_bytes()
    except OSError as error:
        ending = f"; {fix}" if fix else ""
        raise ValueError(f"{path}: cannot be read ({error.strerror or error}){ending}") from None


def check_writable(path: Path, *, folder: bool = False) -> None:
    """Check that a file, or files in a folder, can be written there, before hours of work end with it.

    Raises:
        OSError: A part of the path is no folder or may not be written, or the path is a folder and should be a file.
    """
    if not folder and path.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    # The nearest existing folder decides, since missing folders will be created in it.
    above = next(ancestor for ancestor in (path if folder else path.parent, *path.parents) if ancestor.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, "no folder that may be written; name another", str(above))


def check_start(folder: Path, *, resume: bool) -> None:
    """Raise ValueError if `resume` is no bool, or a run that does not resume would find files of a run there."""
    if not isinstance(resume, bool):
        raise ValueError(
            f"resume={resume!r}: True goes on from the newest whole checkpoint of {folder}, and False starts a run; to "
            f"go on from an earlier checkpoint, move the later ones out of {folder / 'checkpoints'}"
        )
    if resume:
        return
    names = ("metrics.jsonl", "checkpoints", "config.yaml", "report.html", "summary.json", "leaks.txt")
    fix = "go on with --resume auto (in Python resume=True) if its run was stopped, or name another folder with out=…"
    for name in names:
        check_new(folder / name, fix=fix)


def check_new(*paths: Path, fix: str) -> None:
    """Raise ValueError, naming the first, if an output file exists already; `fix` ends the message."""
    for path in paths:
        if os.path.lexists(path):
            raise ValueError(f"{path} is there already, and is not replaced; {fix}")


def check_made(path: Path, *, mark: bytes = PAGE_MARK) -> None:
    """Raise ValueError if an existing output file lacks the mark of this package's files."""
    if path.is_file() and mark not in path.read_bytes():
        raise ValueError(f"{path} was not made by pacorl, and is not replaced; name another file or folder")


def claim_folder(folder: Path) -> None:
    """Make a command's output folder, or accept an empty folder or one with the file OWNED.

    Raises:
        ValueError: It contains foreign files.
    """
    if (folder / OWNED).is_file():
        return
    # A killed command leaves unfinished files, which are not foreign.
    if folder.is_dir() and any(not path.name.endswith(PART) for path in folder.iterdir()):
        raise ValueError(f"{folder} holds files that this command did not make; name an empty or a new folder")
    write_atomic(folder / OWNED, "A pacorl command made this folder, and replaces the files that it made here.\n")


def open_regular(path: Path, flags: int, *, mode: int = PRIVATE) -> int:
    """Open a file for writing, and return its descriptor; a missing file is made with `mode`.

    Raises:
        OSError: it cannot be opened, or the name is a link, which could lead to any file of the user.
    """
    # Opening a pipe would otherwise wait for its reader.
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, mode)


def write_atomic(path: Path, content: str | bytes, *, mode: int = SHARED, flush: bool = True) -> None:
    """Write a file whole: readers see the old one or the new one, and so does the machine after a power cut.

    Args:
        path: the file; its folder is made.
        content: text is written as UTF-8.
        mode: mode of a new file.
        flush: wait for the disk; without it, a power cut may leave a torn file until `flush_all`.
    """
    with replacing(path, mode=mode, flush=flush) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, *, mode: int = SHARED, flush: bool = True) -> Iterator[Path]:
    """Replace a file by the temporary file that the block writes, with `mode`; if the block raises, the old file stays.

    Example:
        with replacing(out / "adapter.safetensors") as temporary:
            save_file(state, temporary)
    """
    if path.exists() and not path.is_file():  # a rename would replace a device too
        raise OSError(errno.EINVAL, "not a regular file; name another", str(path))
    part_name = f".{path.name}.{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}{PART}"
    temporary = path.with_name(part_name)
    with disk_errors(path, temporary):
        make_folder(path.parent, flush=flush)
        os.close(open_regular(temporary, os.O_WRONLY | os.O_EXCL, mode=mode))
        try:
            mode = stat.S_IMODE(temporary.stat().st_mode)  # after the user's mask
            yield temporary
            temporary.chmod(mode)  # the block may have replaced the temporary file
            # The content must be on the disk before the name is: else a power cut leaves an empty file of that name.
            if flush:
                flush_to_disk(temporary)
            temporary.replace(path)
            if flush:
                flush_to_disk(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def make_folder(folder: Path, *, flush: bool = True) -> None:
    """Make a folder and its missing parents; with `flush` their names are on the disk afterwards."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    if flush:
        for path in missing:
            flush_to_disk(path.parent)


def aside_of(target: Path) -> Path:
    """Return the temporary folder of `target`."""
    return target.with_name(f".{target.name}.partial")


def open_aside(target: Path) -> Path:
    """Create the empty temporary folder of `target`."""
    aside = aside_of(target)
    shutil.rmtree(aside, ignore_errors=True)
    make_folder(aside.parent)
    aside.mkdir()  # raises if a link has its name
    return aside


def check_no_link(*folders: Path) -> None:
    """Raise OSError if an output folder of a command is a link."""
    for folder in folders:
        if folder.is_symlink():
            raise OSError(errno.ELOOP, "a link, through which nothing is written; remove it", str(folder))


@contextmanager
def disk_errors(path: Path, alias: Path | str = "") -> Iterator[None]:
    """Add `path` to an OSError without a file name, or with `alias` as its name."""
    try:
        yield
    except OSError as error:
        # Writes to a full disk raise without a name.
        if error.errno and error.filename in (None, str(alias)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def sweep(folder: Path) -> None:
    """Remove the unfinished files below a folder whose processes, of this machine, are gone."""
    written_here = re.compile(rf"\..+\.{re.escape(platform.node())}-(\d+)-[0-9a-f]{{8}}{re.escape(PART)}")
    for path in folder.rglob(f".*{PART}"):
        match = written_here.fullmatch(path.name)
        if match is None or not stat.S_ISREG(path.lstat().st_mode):
            continue
        try:
            os.kill(int(match[1]), 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except PermissionError:  # another user's process, which runs
            pass


def flush_tree(folder: Path) -> None:
    """Wait until everything below a folder is on the disk, except for the folder's own name."""
    for path in [*folder.rglob("*"), folder]:
        flush_to_disk(path)


def flush_all() -> None:
    """Wait until everything is on the disk: one wait for many files."""
    os.sync()


def append_flushed(path: Path, data: bytes) -> None:
    """Append to a private file, and wait until it is on the disk.

    Raises:
        OSError: it cannot be written, or is a link or no regular file; then nothing is appended.
    """
    is_new = not path.exists()
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND, mode=PRIVATE)
    with open(descriptor, "ab", buffering=0) as file, disk_errors(path):
        end = file.seek(0, os.SEEK_END)
        try:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(end)
            raise
    # The name too: after a power cut, rows of a file without a name would be lost.
    if is_new:
        flush_to_disk(path.parent)


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        # Network file systems may refuse it for folders.
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def sole_holder(
    path: Path, *, note: str = "", fix: str = "wait for its end or stop it, or name another folder with out=…"
) -> Iterator[None]:
    """Hold a lock file, which stays, within the block; the lock ends with its process, however that ends.

    Raises:
        ValueError: another process holds it; with its `note`, by default its number and machine, and `fix`.
        OSError: The lock cannot be written, or is a link.
    """
    make_folder(path.parent)
    with open(open_regular(path, os.O_RDWR), "r+", encoding="utf-8", errors="replace") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = handle.read(255).strip() or "another process"
            raise ValueError(f"{path.parent} is being written by {holder}; {fix}") from None
        handle.truncate()  # an earlier holder's note
        note = note or f"process {os.getpid()} on {platform.node()}"
        with disk_errors(path):
            os.write(handle.fileno(), note.encode())  # unbuffered: closing would try a refused write again
        yield


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Lock a run's folder for this process, and remove unfinished files of killed processes.

    Raises:
        ValueError: another process does; it is named.
    """
    with sole_holder(folder / ".lock"):
        # Under the lock: unfinished files of another process may be about to get their names.
        sweep(folder)
        yield


@contextmanager
def safetensors_errors(name: object) -> Iterator[None]:
    """Replace safetensors' error about a damaged file of weights by a ValueError with its name."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:  # names no file, and is no ValueError
        raise ValueError(f"{name}: its weights are damaged or cut off ({error}); fetch or copy them again") from None


@contextmanager
def weight_write_errors(path: Path) -> Iterator[None]:
    """Replace an error of safetensors or torch.save about a full disk by an OSError with the file's name."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        # torch.save's RuntimeError gives positions in the file and no cause.
        reason = f"it could not be written ({error}); make room if the disk is full"
        raise OSError(errno.EIO, reason, str(path)) from error


def safe_name(name: str) -> str:
    """Return the name. Raises ValueError if it is not valid on every system, in paths and in links."""
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,119}", name):
        allowed = "at most 120 letters from a to z, digits, '-', '_' and '.'"
        raise ValueError(f"{name[:140]!r} is no name for files and links; use {allowed}")
    return name


def inside(folder: Path, relative: str) -> Path:
    """Resolve `folder/relative` and its links. Raises ValueError if it is outside of `folder`.

    In a snapshot of the hub's cache, whose files are links into its `blobs`, the path is not resolved.
    """
    root = folder.resolve()
    try:
        path = (root / relative).resolve()
        path.exists()
    except (OSError, ValueError):  # too long, or with a NUL
        raise ValueError(f"{relative[:60]!r} is not a path of a file") from None
    if path.is_relative_to(root):
        return path
    # REPOSITORY/snapshots/COMMIT, whose contents are in REPOSITORY/blobs.
    unresolved = Path(os.path.normpath(root / relative))
    for snapshots in root.parents:
        is_blob = snapshots.name == "snapshots" and path.is_relative_to(snapshots.parent / "blobs")
        if is_blob and unresolved.is_relative_to(root):
            return unresolved
    raise ValueError(f"{relative!r} leads out of {folder}; paths must stay inside the folder")


def existing(folder: Path, relative: str, *, fix: str = "") -> Path:
    """Return `folder/relative`. Raises ValueError if it is outside of `folder` or, ending in `fix`, missing."""
    inside(folder, relative)
    path = folder / relative
    if not path.exists():
        raise ValueError(f"{path} does not exist{fix}")
    return path
