"""Damage to files: bytes and structure, with values that programs trip over.

Every function takes a file in any state that earlier damage has left: cut off, gone, a folder, a pipe, a link.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STRANGE: list[Any] = [
    *[None, 0, 5, -1, 1.5, True, 10**30, 1e308, 10**400, 2**63, [], {}, [1], {"x": 1}, [[1]], [None], {"a": None}],
    *["x", "", " ", "\ud800", "\0", "../../etc/passwd", "/dev/zero", "x" * 5000, "<|im_end|>", "1" * 5000, "-0"],
    *["2026-13-45", "<script>", "%s%n{0}", "é́", "\u2028", ["x"] * 300, [[[[[[[[[[]]]]]]]]]]],
]
YAML = [b"!!python/object:os.system x", b"&a [*a]", b"*a", b"<<: *a", b"!!int ''", b"!!timestamp foo", b'"\\UFFFFFFFF"']
SNIPPETS = [
    *[b"NaN", b"Infinity", b"-1e999", b"1e999", b"null", b"true", b"0x", b".inf", b".nan", b"9" * 5000, b"[" * 3000],
    *[b'{"a":' * 3000, b"\xff\xfe", b"\xef\xbb\xbf", b"\0", b"\xed\xa0\x80", b'"\\ud800"', b"\xe2\x80\xa8"],
    *[b"\r", b"\n\n", b"\t", b"'", b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"//", b"? ", b"- ", b"| "],
    *[b"%YAML 9.9\n", b"---\n", b"...\n", *YAML],
]


def damage_bytes(path: Path, draw: random.Random) -> str:
    """Bytes changed, cut, doubled or put in."""
    content = bytearray(content_of(path))
    what = draw.choice(["flip", "flip", "cut", "drop", "double", "insert", "insert", "insert", "empty", "shuffle"])
    start = draw.randrange(len(content) + 1)
    end = min(len(content), start + draw.randrange(1, 40))
    match what:
        case "flip":
            for _ in range(draw.randrange(1, 8)):
                if content:
                    content[draw.randrange(len(content))] = draw.randrange(256)
        case "cut":
            del content[start:]
        case "drop":
            del content[start:end]
        case "double":
            content[start:start] = content[start:end] * draw.choice([1, 1, 50])
        case "insert":
            content[start:start] = draw.choice(SNIPPETS)
        case "empty":
            content[:] = draw.choice([b"", b" ", b"\n", b"\0" * 100, b"{}", b"[]", b"null", b"0"])
        case "shuffle":
            lines = content.split(b"\n")
            draw.shuffle(lines)
            content[:] = b"\n".join(lines)
    put(path, content)
    return what


def damage_file(path: Path, draw: random.Random) -> str:
    """Something else in the file's place."""
    what = draw.choice(["nothing", "folder", "pipe", "loop", "dangling", "zeros", "random"])
    remove(path)
    match what:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(path.name)
        case "dangling":
            path.symlink_to("nowhere")
        case "zeros":
            path.symlink_to("/dev/zero")
        case "random":
            path.write_bytes(draw.randbytes(draw.randrange(1, 2000)))
    return what


def damage_value(path: Path, draw: random.Random) -> str:
    """A value of a JSON file removed or replaced; damage to its bytes if it is no JSON (any more)."""
    try:
        document = json.loads(content_of(path))
        put(path, json.dumps(mutant(document, draw)).encode())
    except (ValueError, RecursionError):  # cut off, a number of too many digits, too deep
        return damage_bytes(path, draw)
    return "value"


def damage_line(path: Path, draw: random.Random) -> str:
    """A value of one line of a JSONL file; damage to its bytes if that line is no JSON (any more)."""
    lines = content_of(path).splitlines() or [b""]
    at = draw.randrange(len(lines))
    try:
        lines[at] = json.dumps(mutant(json.loads(lines[at]), draw)).encode()
    except (ValueError, RecursionError):
        return damage_bytes(path, draw)
    put(path, b"\n".join(lines) + b"\n")
    return "value"


def content_of(path: Path) -> bytes:
    """What a regular file holds; nothing of a folder, a pipe, a device, or a link to one of them."""
    return path.read_bytes() if path.is_file() else b""


def put(path: Path, content: bytes | bytearray) -> None:
    """Make `path` a regular file of this content, whatever it is."""
    if path.is_symlink() or not path.is_file():
        remove(path)
    path.write_bytes(content)


def remove(path: Path) -> None:
    """Remove a file, a link, a pipe, or a folder with all in it; nothing, if there is nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def mutant(document: Any, draw: random.Random) -> Any:
    """The document with a value removed, under another key, or of another kind."""
    document = copy.deepcopy(document)
    paths = list(paths_in(document))
    if not paths:
        return draw.choice(STRANGE)
    *path, key = draw.choice(paths)
    section = document
    for step in path:
        section = section[step]
    change = draw.choice(["remove", "rename", "replace", "replace", "replace"])
    if change == "remove":
        del section[key]
    elif change == "rename" and isinstance(section, dict):
        section[f"x{key}"] = section.pop(key)
    else:
        section[key] = draw.choice(STRANGE)
    return document


def paths_in(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value in a document."""
    pairs = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in pairs:
        yield (*path, key)
        yield from paths_in(value, (*path, key))
