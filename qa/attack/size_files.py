"""Files of 1 to 64 MiB in their worst form, for every reader of the project.

A reader may take 20 seconds of a processor and 3 for each MiB, and a GiB of memory and 20 times the file's bytes. These
bounds are looser than those of a server, where a request costs its caller little and others wait: whoever reads a file
has chosen it and waits alone. A good file of that size is work too. A MiB of short JSON lines takes two seconds, and
libraries that are imported at the first weights or the first table count for the memory. The bounds exclude what grows
faster than the file.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from qa.attack import documents, images, tables, weights
from qa.attack.harness import Target
from qa.attack.shapes import IMAGES, JSON, MIB, inside, size

WHICH = ".which"
"""Names the reader of an input, in its folder."""
YAML_BYTES = 2**20 - 2000
"""Larger ones are refused unread."""


# --- documents -------------------------------------------------------------------------------------------------


def readers(suffix: str) -> list[str]:
    return [name for name in documents.READERS if name.endswith(suffix)]


def large_json(folder: Path, draw: random.Random, name: str) -> str:
    """One enormous value, in place of the document or of a value of it."""
    shape = draw.choice(list(JSON))
    value = JSON[shape](size(draw))
    whole = draw.random() < 0.4
    (folder / name).write_bytes(value if whole else inside(documents.READERS[name][0], value, draw))
    return f"{shape} as {'all' if whole else 'a value'} of {name}"


def large_jsonl(folder: Path, draw: random.Random, name: str) -> str:
    """Lines without end, or one of them that is enormous."""
    path, record, count = folder / name, documents.READERS[name][0], size(draw)
    what = draw.choice(["good", "value", "value", "lines"])
    if what != "value":
        count = min(count, 4 * MIB)  # of which each takes two seconds
    if what == "good":
        line = json.dumps(record)
        numbered = [{**record, **documents._own_ids(record, number)} for number in range(count // len(line) + 1)]
        path.write_text("".join([json.dumps(row) + "\n" for row in numbered]))
        return f"{len(numbered):,} good lines of {name}"
    if what == "lines":
        line = draw.choice(["{}\n", "0\n", "\n", " \n", "[]\n", "\r", "{", "\u2028", '""\n'])
        path.write_bytes(path.read_bytes() + (line * (count // len(line))).encode())
        return f"lines of {line!r} in {name}"
    shape = draw.choice(list(JSON))
    path.write_bytes(path.read_bytes() + inside(record, JSON[shape](count), draw) + b"\n")
    return f"{shape} in a line of {name}"


YAML: dict[str, Callable[[int], str]] = {
    "aliases": lambda n: "a: &a [x]\nb: [" + "*a, " * (n // 4) + "]\n",
    "laughs": lambda n: "a0: &a0 [x, x]\n" + "".join([f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 40)]),
    "laughing keys": lambda n: "a0: &a0 {k: x}\n" + "".join(
        [f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}, z: *a{i - 1}}}\n" for i in range(1, 40)]
    ),
    "merges": lambda n: "a: &a {x: 1}\n" + "".join([f"b{i}: {{<<: *a}}\n" for i in range(n // 16)]),
    "anchors": lambda n: "".join([f"a{i:06d}: &b{i:06d} x\n" for i in range(n // 20)]),
    "keys": lambda n: "".join([f"a{i:06d}:\n" for i in range(n // 9)]),
    "flow keys": lambda n: "a: {" + "".join([f"{i}: 0, " for i in range(n // 10)]) + "}\n",
    "one key": lambda n: "a: 0\n" * (n // 5),
    "list": lambda n: "- \n" * (n // 3),
    "zeros": lambda n: "a: [" + "0," * (n // 2) + "]\n",
    "deep lists": lambda n: "[" * (n // 2) + "]" * (n // 2),
    "deep dashes": lambda n: "- " * (n // 2) + "x",
    "deep objects": lambda n: "{a: " * (n // 5) + "0" + "}" * (n // 5),
    "question marks": lambda n: "? " * (n // 2),
    "digits": lambda n: "a: " + "9" * n,
    "sixties": lambda n: "a: 1" + ":1" * (n // 2),
    "underscores": lambda n: "a: 1" + "_" * n,
    "dots": lambda n: "a: " + "." * n,
    "text": lambda n: "a: " + "x" * n,
    "escapes": lambda n: 'a: "' + "\\x41" * (n // 4) + '"',
    "spaces": lambda n: " " * n + "a: 1",
    "tags": lambda n: "".join(["a: !!str x\n" for _ in range(n // 11)]),
    "comments": lambda n: "#\n" * (n // 2),
    "documents": lambda n: "---\n" * (n // 4),
    "folded": lambda n: "a: >\n" + "  x\n" * (n // 4),
    "quotes": lambda n: "a: '" + "''" * (n // 2) + "'",
    "words": lambda n: "a: " + "x " * (n // 2),
    "binary": lambda n: "a: !!binary " + "QUFB" * (n // 4),
}  # fmt: skip


def large_yaml(folder: Path, draw: random.Random, name: str) -> str:
    """The largest that is read, or one that is refused for its size; alone, or behind a good document."""
    shape, path = draw.choice(list(YAML)), folder / name
    alone = draw.random() < 0.5
    before = "" if alone else path.read_text(encoding="utf-8") + "\n"
    count = YAML_BYTES - len(before.encode()) if draw.random() < 0.9 else size(draw)
    path.write_text(before + YAML[shape](count), encoding="utf-8")
    return f"{shape} {'as' if alone else 'behind'} {name}"


CSV: dict[str, Callable[[int], str]] = {
    "columns": lambda n: "reference,candidates," + "x," * (n // 2) + "\na.png,b.png > c.png\n",
    "rows": lambda n: "reference,candidates\n" + "a.png,b.png > c.png\n" * (n // 20),
    "candidates": lambda n: "reference,candidates\na.png," + "b.png > " * (n // 8) + "c.png\n",
    "equals": lambda n: "reference,candidates\na.png," + "=" * n + "c.png\n",
    "signs": lambda n: "reference,candidates\na.png," + ">" * n + "c.png\n",
    "field": lambda n: 'reference,candidates\na.png,"' + "b" * n + '"\n',
    "open quote": lambda n: 'reference,candidates\na.png,"' + "b\n" * (n // 2),
    "quotes": lambda n: "reference,candidates\n" + '"' * n,
    "commas": lambda n: "reference,candidates\n" + "," * n + "\n",
    "blank rows": lambda n: "reference,candidates\n" + "\n" * n,
    "themes": lambda n: "reference,candidates,theme\n" + "a.png,b.png > c.png," + "é" * (n // 2) + "\n",
}


def large_csv(folder: Path, draw: random.Random, name: str) -> str:
    shape = draw.choice(list(CSV))
    (folder / name).write_text(CSV[shape](size(draw)), encoding="utf-8")
    return f"{shape} of {name}"


def document_target(suffix: str, enlarge: Callable[[Path, random.Random, str], str]) -> Target:
    names = readers(suffix)

    def mutate(folder: Path, draw: random.Random) -> str:
        name = draw.choice(names)
        shutil.rmtree(folder)
        folder.mkdir()
        documents.prepare(name, folder)
        (folder / WHICH).write_text(name)
        return enlarge(folder, draw, name)

    def prepare(folder: Path) -> None:
        documents.prepare(names[0], folder)
        (folder / WHICH).write_text(names[0])

    def run(folder: Path) -> None:
        documents.read_all((folder / WHICH).read_text(), folder)

    said = {Path(name).name for name in names} | {":d", "dataset_info", "d.json", "work/run"}
    return Target(
        name=f"size/{suffix.lstrip('.')}", prepare=prepare, mutate=mutate, run=run, names=tuple(said), **LIMITS
    )


# --- everything else -------------------------------------------------------------------------------------------


def large_image(folder: Path, draw: random.Random) -> str:
    shape = draw.choice(list(IMAGES))
    (folder / "x.png").write_bytes(IMAGES[shape](size(draw)))
    (folder / WHICH).write_text(draw.choice(["file", "upload", "list"]))
    return f"{shape} by {(folder / WHICH).read_text()}"


def prepare_image(folder: Path) -> None:
    images.prepare(folder)
    (folder / WHICH).write_text("upload")


def open_large_image(folder: Path) -> None:
    images.opened(folder, by=(folder / WHICH).read_text())


def large_set(folder: Path, draw: random.Random) -> str:
    """A set of the studio's history whose document, or image, is a bomb, or that has entries without end."""
    path, count = folder / "set-000001.zip", size(draw, most=512)
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    what = draw.choice(["blank document", "document", "image", "entries", "comment"])
    shape = draw.choice(list(JSON))
    if what == "blank document":
        contents["set.json"] += b" " * count
    elif what == "document":
        contents["set.json"] = inside(json.loads(contents["set.json"]), JSON[shape](min(count, 64 * MIB)), draw)
    elif what == "image":
        contents["0.png"] = bytes(count)
    elif what == "entries":
        contents |= dict.fromkeys([f"{number}.png" for number in range(min(count, 16 * MIB) // 100)], b"")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    if what == "comment":
        with path.open("ab") as file:
            file.write(b"PK\5\6" * (min(count, 64 * MIB) // 4))
    return what if what != "document" else f"{shape} in a document"


def large_table(folder: Path, draw: random.Random) -> str:
    """A table that is small on the disk: one value again and again, dictionaries, thousands of columns or groups."""
    rows, what = tables.edits(), draw.choice(["rows", "text", "columns", "groups", "image"])
    count, options = size(draw, most=64), {"compression": "zstd"}
    if what == "rows":
        rows = rows * (count // 400)
    elif what == "text":
        rows = [{**row, "instruction": "x" * (count // len(rows))} for row in rows]
    elif what == "columns":
        more = dict.fromkeys([f"c{number}" for number in range(count // 4000)], 0)
        rows = [{**row, **more} for row in rows]
    elif what == "groups":
        rows, options = rows * (count // 20_000 + 1), {"row_group_size": 1}
    else:
        rows = [{**row, "input_image": {"bytes": bytes(count), "path": "a.png"}} for row in rows]
    tables.write(folder / "t.parquet", rows, **options)
    return what


def large_weights(folder: Path, draw: random.Random) -> str:
    """A header that is enormous, or an adapter of thousands of modules."""
    path = folder / "adapter_model.safetensors"
    what, count = draw.choice(["header", "tensors", "metadata", "config", "ranks"]), size(draw)
    if what in ("header", "config"):
        shape = draw.choice(list(JSON))
        value = JSON[shape](count)
        if what == "config":
            config = json.loads((folder / "adapter_config.json").read_text())
            (folder / "adapter_config.json").write_bytes(inside(config, value, draw))
        else:
            path.write_bytes(struct.pack("<Q", len(value)) + value)
        return f"{shape} in the {what}"
    if what == "ranks":
        config = json.loads((folder / "adapter_config.json").read_text())
        config["rank_pattern"] = {f".*{number}.*": 2 for number in range(min(count // 40, 20_000))}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return what
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    many = min(count // 100, 100_000)
    header: dict[str, Any] = {"__metadata__": {f"k{n}": "v" for n in range(many)}}
    if what == "tensors":
        header = {f"a.{n}.lora_A.weight": {**entry, "data_offsets": [4 * n, 4 * n + 4]} for n in range(many)}
    content = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + bytes(4 * many))
    return what


LIMITS: dict[str, Any] = {"seconds_per_mib": 3.0, "bytes_per_byte": 20}


def targets() -> list[Target]:
    enlarge = {".jsonl": large_jsonl, ".json": large_json, ".yaml": large_yaml, ".csv": large_csv}
    forms = ("adapter_model.safetensors", "adapter_config.json", "/work")
    others: dict[str, tuple[Any, Any, Any, tuple[str, ...]]] = {
        "images": (prepare_image, large_image, open_large_image, ("x.png",)),
        "history": (tables.prepare_history, large_set, tables.read_history, ("set 000001", "/work")),
        "parquet": (partial(_prepare_table), large_table, partial(tables.read, kind="prompts"), ("t.parquet", "/work")),
        "weights": (partial(weights.prepare_lora, form="peft"), large_weights, weights.show, forms),
    }
    return [
        *(document_target(suffix, enlarge[suffix]) for suffix in enlarge),
        *(
            Target(name=f"size/{name}", prepare=prepare, mutate=mutate, run=run, names=names, **LIMITS)
            for name, (prepare, mutate, run, names) in others.items()
        ),
    ]


def _prepare_table(folder: Path) -> None:
    tables.write(folder / "t.parquet", tables.edits())
