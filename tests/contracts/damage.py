"""Damage to the files of a reader, drawn by a seed: bytes, values, weights, and what stands in a file's place.

Each function returns a word for what it did; one that begins with `must` is damage that no reader may accept.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

STRANGE: list[Any] = [
    *[None, 0, 5, -1, 1.5, True, 10**30, 1e308, 10**400, 2**63, [], {}, [1], {"x": 1}, [[1]], [None], {"a": None}],
    *["x", "", " ", "\ud800", "\0", "../../etc/passwd", "/dev/zero", "x" * 5000, "<|im_end|>", "1" * 5000, "-0"],
    *["2026-13-45", "<script>", "%s%n{0}", "\u2028", ["x"] * 300, [[[[[[[[[[]]]]]]]]]]],
]
SNIPPETS = [
    *[b"NaN", b"Infinity", b"-1e999", b"null", b"true", b"0x", b".inf", b"9" * 5000, b"[" * 3000, b'{"a":' * 3000],
    *[
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\0",
        b'"\\ud800"',
        b"\xe2\x80\xa8",
        b"\r",
        b"\n\n",
        b"\t",
        b"'",
        b'"',
        b"{",
        b"}",
    ],
    *[b"]", b",", b":", b"\\", b"? ", b"- ", b"| ", b"%YAML 9.9\n", b"---\n", b"...\n", b"&a [*a]", b"<<: *a"],
    *[b"!!python/object:os.system x", b"!!int ''", b"!!timestamp foo", b'"\\UFFFFFFFF"'],
]


def damage(path: Path, draw: random.Random) -> str:
    """Damage a good file in one of the ways that its kind allows."""
    what = draw.choices(["bytes", "value", "place", "twice", "latin"], [45, 45, 4, 4, 2])[0]
    if what == "place":
        return put_in_place(path, draw.choice(["nothing", "folder", "pipe", "loop", "dangling", "zeros", "random"]))
    if what == "value" and path.suffix == ".safetensors":
        return change_tensors(path, draw.choice(["nan", "inf", "shape", "dtype", "drop", "rename", "extra"]), draw)
    if what == "value" and path.suffix in (".json", ".jsonl", ".yaml"):
        return _damage_value(path, draw)
    content = path.read_bytes()
    if what == "twice" and path.suffix == ".yaml":
        key = draw.choice([line for line in content.split(b"\n") if line[:1].isalpha()]).partition(b":")[0]
        path.write_bytes(content + b"\n" + key + b": 12345\n")
        return "must refuse a key twice"
    if what == "latin" and path.suffix in (".json", ".jsonl", ".yaml", ".csv"):
        at = draw.randrange(len(content))  # not behind the end: a journal passes over a torn line
        path.write_bytes(content[:at] + b"\xe9 " + content[at:])
        return "must refuse Latin-1"
    return _damage_bytes(path, draw)


def put_in_place(path: Path, what: str) -> str:
    """Put a folder, a pipe, a link, random bytes or nothing in the place of a file."""
    path.unlink()
    match what:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "random":
            path.write_bytes(random.Random(0).randbytes(500))
        case "loop" | "dangling" | "zeros":
            path.symlink_to({"loop": path.name, "dangling": "nowhere", "zeros": "/dev/zero"}[what])
    return "must refuse random bytes" if what == "random" else what  # else optional files count as absent


def _damage_bytes(path: Path, draw: random.Random) -> str:
    content = bytearray(path.read_bytes())
    start = draw.randrange(len(content) + 1)
    end = start + draw.randrange(1, 40)
    what = draw.choice(["flip", "flip", "cut", "drop", "double", "insert", "insert", "insert", "empty", "shuffle"])
    match what:
        case "flip":
            for _ in range(draw.randrange(1, 8)):
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
            content[:] = b"\n".join(draw.sample(lines := content.split(b"\n"), len(lines)))
    path.write_bytes(content)
    return what


def _damage_value(path: Path, draw: random.Random) -> str:
    """Remove, rename or replace one value of a document, or of one line of JSONL."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        changed = yaml.safe_dump(_changed(yaml.safe_load(text), draw), allow_unicode=True)
        path.write_bytes(changed.encode(errors="surrogatepass"))
    elif path.suffix == ".json":
        path.write_text(json.dumps(_changed(json.loads(text), draw)))
    else:
        lines = text.splitlines()
        at = draw.randrange(len(lines))
        lines[at] = json.dumps(_changed(json.loads(lines[at]), draw))
        path.write_text("\n".join(lines) + "\n")
    return "value"


def _changed(document: Any, draw: random.Random) -> Any:
    document = copy.deepcopy(document)
    *path, key = draw.choice(list(_paths(document)))
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


def _paths(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document."""
    pairs = (
        document.items() if isinstance(document, dict) else enumerate(document if isinstance(document, list) else ())
    )
    for key, value in pairs:
        yield (*path, key)
        yield from _paths(value, (*path, key))


def change_tensors(path: Path, what: str, draw: random.Random) -> str:
    """Rewrite a file of weights with numbers, shapes, types and names that safetensors itself accepts."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(path)
    name = draw.choice(sorted(tensors))
    value = tensors[name]
    match what:
        case "nan" | "inf":
            value.view(-1)[draw.randrange(value.numel())] = float(what)
        case "shape":
            shapes = [value[:1], value.T, value.unsqueeze(0), value.reshape(-1), value[:0]]
            tensors[name] = draw.choice(shapes).contiguous()
        case "dtype":
            tensors[name] = value.to(draw.choice([torch.int8, torch.bool, torch.float64, torch.float8_e4m3fn]))
        case "drop":
            del tensors[name]
        case "rename":
            tensors[f"x.{name}"] = tensors.pop(name)
        case "extra":
            tensors[draw.choice(["x", f"{name}.alpha", "transformer.x.dora_scale"])] = torch.ones(2)
    save_file(tensors, path, metadata=metadata)
    return f"must refuse {what}" if what in ("nan", "inf") else what
