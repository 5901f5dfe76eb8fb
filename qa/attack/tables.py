"""Files of several parts that somebody else wrote: parquet of edits and of two benchmarks, and the studio's sets."""

from __future__ import annotations

import contextlib
import io
import json
import random
import sqlite3
import zipfile
import zlib
from functools import partial
from pathlib import Path
from typing import Any

from qa.attack.damage import STRANGE, content_of, damage_bytes, damage_file, damage_line, damage_value, mutant, remove
from qa.attack.harness import Target, WrongError

ROWS = 6


def edits() -> list[dict[str, Any]]:
    from qa.attack.images import png

    image = {"bytes": png(16, 16), "path": "a.png"}
    more = {"task_type": "color_alter", "Intersection_exist": True, "instruction_language": "en"}
    return [{"key": f"k{n}", "instruction": f"edit {n}", "input_image": image, **more} for n in range(ROWS)]


def choices() -> list[dict[str, Any]]:
    texts = {"instruction": "edit", "task_type": "color_alter", "dimension": "prompt_following"}
    return [{"key": [f"a{n}", f"b{n}"], **texts} for n in range(ROWS)]


def write(path: Path, rows: list[dict[str, Any]], **options: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path, **options)


def mutate(folder: Path, draw: random.Random) -> str:
    """Damages the file's bytes, or writes another table that is whole."""
    import pyarrow.parquet as pq

    path = folder / "t.parquet"
    what = draw.choices(["bytes", "file", "cell", "column", "groups"], [60, 5, 20, 10, 5])[0]
    if what == "bytes":
        return damage_bytes(path, draw)
    if what == "file":
        return damage_file(path, draw)
    try:
        rows = pq.read_table(path).to_pylist() if path.is_file() else []
    except (OSError, ValueError):  # Arrow's errors, of a table that was damaged before
        rows = []
    if not rows:
        return damage_bytes(path, draw)
    if what == "cell":
        name = draw.choice(list(rows[0]))
        value = draw.choice(STRANGE)
        rows = [{**row, name: value} for row in rows] if draw.random() < 0.7 else [*rows, {**rows[0], name: None}]
    elif what == "column":
        name = draw.choice(list(rows[0]))
        rows = [
            {(draw.choice(["x", "image"]) if key == name else key): value for key, value in row.items()} for row in rows
        ]
    new = path.with_suffix(".new")
    try:
        write(new, rows, row_group_size=2, compression=draw.choice(["snappy", "gzip", "none", "zstd"]))
    except Exception:  # Arrow has no such table
        return "nothing"
    remove(path)
    new.rename(path)
    return what


def read(folder: Path, *, kind: str) -> None:
    """Reads the table. Raises WrongError if rows are missing that it has."""
    import pyarrow.parquet as pq

    from pacorl.bench.edit_reward_bench import read_edit_data
    from pacorl.bench.gedit import read_edits
    from pacorl.records.edits import load_gedit

    path = folder / "t.parquet"
    match kind:
        case "prompts":
            count = len(load_gedit(path))
        case "gedit":
            data = read_edits(folder)
            count = len(data.items)
            data.source.row(0)
        case "edit-reward":
            count = len(read_edit_data(path).items)
    if count != pq.read_metadata(path).num_rows:
        raise WrongError("silent", f"{count} of {pq.read_metadata(path).num_rows} rows")


def prepare_set(history: Any) -> None:
    """Adds a set to a history of the studio."""
    from qa.attack.images import png

    base = {"image": "base-0", "layout": "1x2", "base": None, "rank": 1, "score": 0.4, "matrix": [[None, 0.4]]}
    base |= {"recipe": {"seed": "0"}, "error": ""}
    candidate = {**base, "image": "0", "base": base}
    document = {"kind": "set", "theme": "t", "candidates": [candidate], "sources": ["source-1"], "asked": {"seed": 0}}
    history.add(document, dict.fromkeys(("0", "base-0", "source-1"), png(16, 8)))


def prepare_history(folder: Path) -> None:
    from pacorl.studio.history import History

    history = History(folder)
    prepare_set(history)
    history.close()


def mutate_set(folder: Path, draw: random.Random) -> str:
    """Damages the archive's bytes, or its document."""
    path = folder / "set-000001.zip"
    what = draw.choices(["bytes", "file", "value"], [40, 5, 55])[0]
    if what == "bytes":
        return damage_bytes(path, draw)
    if what == "file":
        return damage_file(path, draw)
    try:
        with zipfile.ZipFile(io.BytesIO(content_of(path))) as archive:
            contents = {name: archive.read(name) for name in archive.namelist()}
        contents["set.json"] = json.dumps(mutant(json.loads(contents["set.json"]), draw)).encode()
    except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, RecursionError, NotImplementedError):
        return damage_bytes(path, draw)  # no archive any more
    with zipfile.ZipFile(path, "w", draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return what


def read_history(folder: Path) -> None:
    """What the page asks of a history; a set that is damaged is left out, or refused when it is asked for."""
    from pacorl.studio.history import History

    history = History(folder)
    try:
        for summary in history.summaries():
            json.dumps([summary, history.read(summary["id"])], ensure_ascii=False).encode()  # as an answer is sent
            history.image(summary["id"], str(summary["image"]))
            history.export(summary["id"], 0)
    finally:
        history.close()


def prepare_annotations(folder: Path) -> None:
    """A database of rankings, some undone and skipped."""
    from qa.attack.images import png

    from pacorl.dataset.folder import Instance, write_records
    from pacorl.studio.annotate.links import Sharing
    from pacorl.studio.annotate.routes import prepare
    from pacorl.studio.annotate.store import Store

    names = [f"{number}.png" for number in range(5)]
    for name in names:
        (folder / name).write_bytes(png(8, 8))
    rows = [Instance(f"i{number}", "g", names[0], tuple(names[1:])) for number in range(20)]
    write_records(folder / "instances.jsonl", rows)
    with Store(folder / "annotations.db") as store:
        token = prepare(store, folder, ["ann"], sharing=Sharing(controls=0))["ann"].rpartition("#")[2]
        person = store.person_of(token)
        for number in range(12):
            key = public_key_of(store.next_tasks("ann")[0])
            if number % 4 == 3:
                store.skip(person, key, "unclear", request=f"request-{number}")
            else:
                store.rank(person, key, [2, 0, 1, 3], request=f"request-{number}")
        store.undo(person, request="request-undo")


def public_key_of(task: Any) -> str:
    from pacorl.studio.annotate.store import public_key

    return public_key(task.instance.id)


def mutate_annotations(folder: Path, draw: random.Random) -> str:
    """Damages the database's bytes, or a value in it."""
    path = folder / "annotations.db"
    what = draw.choices(["bytes", "file", "value"], [60, 5, 35])[0]
    if what == "bytes":
        return damage_bytes(path, draw)
    if what == "file":
        return damage_file(path, draw)
    table, column = draw.choice(
        [("answers", "ranking"), ("instances", "content"), ("events", "content"), ("meta", "value")]
    )
    value = draw.choice(
        [None, "", "{}", "[9, 9]", "[0]", "null", "[[]]", "\ud83d", 7, b"\xff", 1e999, '{"id": 3}', "[NaN]"]
    )
    if not path.is_file():
        return damage_bytes(path, draw)
    with contextlib.suppress(sqlite3.Error, UnicodeError), contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = (SELECT MAX(rowid) FROM {table})", (value,))
    return f"{column} of {table}"


def read_annotations(folder: Path) -> None:
    """What `dataset annotate --dry-run`, `dataset export` and the page read."""
    from pacorl.dataset.folder import collect_answers
    from pacorl.studio.annotate.routes import plan
    from pacorl.studio.annotate.store import Store

    plan(folder, ["ben"])
    collect_answers(folder)
    with Store(folder / "annotations.db") as store:
        store.next_tasks("ann", limit=2)
        store.progress("ann")
        store.controls_passed()
        store.skips()


LEARNED = '{"kind": "epoch", "epoch": 1, "step": 1, "held_out_loss": 0.5}\n'


def prepare_studio(folder: Path) -> None:
    """Characters with trainings, and a run whose groups a person ranks."""
    from qa.attack.images import png

    from pacorl.io.documents import write_json

    characters, runs = studio(folder)
    for name in ("hero", "villain"):
        characters.save(name, "red round hero", added=[png(16, 16), png(16, 8)])
        characters.save(name, "red round hero", captions={"01.png": "waving, flag"})
        training = folder / "loras" / f"{name}-lora"
        write_json(training / "request.json", {"character": name, "steps": 3})
        (training / "run").mkdir()
        (training / "run" / "metrics.jsonl").write_text(LEARNED)
    run, group = runs.folder / "mine", "000001-aa"
    write_json(run / "request.json", {"rounds": 3, "groups": 1})
    write_json(run / "rankings" / "asked.json", {"groups": [group]})
    shown = {"prompt": "p", "theme": "t", "panels": ["a", "b"], "grid": "1x2", "images": 2}
    write_json(run / "rankings" / group / "group.json", shown)
    write_json(run / "rankings" / group / "ranks.json", [1, 2])
    (run / "run").mkdir()
    (run / "run" / "metrics.jsonl").write_text(LEARNED)


def studio(folder: Path) -> tuple[Any, Any]:
    """The characters and the taught runs of a folder, whose trainer is at work."""
    from pacorl.config.options import StudioModels
    from pacorl.studio.characters import Characters
    from pacorl.studio.taste import TasteRuns
    from pacorl.studio.trainer_process import TrainerProcess

    class Working(TrainerProcess):
        def runs(self, folder: Path) -> bool:
            return folder.name == "mine"

    names, trainer = StudioModels(), Working()
    return Characters(folder, names, trainer=trainer), TasteRuns(folder / "taste", names, trainer=trainer)


def mutate_studio(folder: Path, draw: random.Random) -> str:
    """Damages one of its files."""
    path = draw.choice(sorted(path for path in folder.rglob("*.*") if path.is_file() and path.suffix != ".png"))
    damage = {".json": damage_value, ".jsonl": damage_line}.get(path.suffix, damage_bytes)
    what = draw.choices([damage, damage_bytes, damage_file], [60, 30, 10])[0](path, draw)
    return f"{what} of {path.name}"


def read_studio(folder: Path) -> None:
    """What the page asks. A damaged character is left out of the list, and of its trainings the damaged ones."""
    characters, runs = studio(folder)
    listed = characters.summaries()
    if not listed:
        raise WrongError("lost", "both characters are missing")
    for shown in listed:
        json.dumps(shown, ensure_ascii=False, allow_nan=False).encode()  # as an answer is sent
        characters.find(shown["name"])
    for name in runs.names_of_runs():
        json.dumps(runs.state(name), ensure_ascii=False, allow_nan=False).encode()
        runs.rank(name, "000001-aa", [2, 1])
    for name in ("hero", "villain"):
        characters.save(name, "red round hero", captions={"02.png": "standing, tree"})


def targets() -> list[Target]:
    made = {"prompts": edits, "gedit": edits, "edit-reward": choices}

    def target(kind: str) -> Target:
        def prepare(folder: Path) -> None:
            write(folder / "t.parquet", made[kind]())

        run = partial(read, kind=kind)
        return Target(name=f"tables/{kind}", prepare=prepare, mutate=mutate, run=run, names=("t.parquet", "/work"))

    history = Target(
        name="tables/history",
        prepare=prepare_history,
        mutate=mutate_set,
        run=read_history,
        names=("set 000001", "/work"),
    )
    annotations = Target(
        name="tables/annotations",
        prepare=prepare_annotations,
        mutate=mutate_annotations,
        run=read_annotations,
        names=("annotations.db", "instances.jsonl"),
    )
    in_studio = Target(
        name="tables/studio",
        prepare=prepare_studio,
        mutate=mutate_studio,
        run=read_studio,
        names=("/work", "mine", "hero", "villain", "000001-aa"),
    )
    return [*map(target, made), history, annotations, in_studio]
