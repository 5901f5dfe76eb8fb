"""Folders that somebody else packed: a file that a command writes is there already, and is a link, a pipe or a folder.

Each command runs once in an empty folder, which shows what it writes; an input then puts something else in the place of
one of these files, before the command runs there for the first time, or again. Whatever it does, files that lie outside
of its folder, or in a folder that it did not make, keep their content and their mode, and none is added but in a folder
that a link in its own leads to.
"""

from __future__ import annotations

import contextlib
import os
import platform
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qa.attack.damage import content_of, remove
from qa.attack.harness import Target, WrongError
from qa.campaign.stories import STORIES, draw_images

from pacorl.tiny.characters import all_panels, draw

OUT = "run"
"""The folder that a command writes."""
ELSEWHERE = "elsewhere"
"""Its neighbour: what links lead to."""
SHARED = f"{ELSEWHERE}/copy/"
"""The folder that a linked folder leads to."""
KEPT = "kept.txt"
"""A file in a folder that stands where a file should."""
FIRST, DONE = "first", "done"
"""What OUT holds before and after the command."""
AGAIN = ".again"
"""Says that an input runs the command in a folder in which it ran already."""
SECRET = b"a key that nobody may change\n"
ASIDE = ("partial", "replaced", "deleted")
"""Endings of the hidden folders in which a command prepares, or removes, a folder."""
KINDS = ("link", "link", "copy", "copy", "dangling", "pipe", "folder", "loop", "temporary", "folder link", "aside")


@dataclass(frozen=True)
class Story:
    """A command that writes files, in a working folder."""

    run: Callable[[], object]
    prepare: Callable[[], object] = draw_images
    """Writes what it reads."""
    again: Callable[[], object] | None = None
    """What is run in a folder in which it ran already, if not the same."""


def commands(*lines: list[str]) -> Callable[[], object]:
    """Command lines, one after another, up to one that fails."""

    def run() -> object:
        from pacorl.cli import app

        code: object = 0
        for words in lines:
            code = app(words, standalone_mode=False)
            if isinstance(code, int) and code:
                break
        return code

    return run


def toy(*lines: list[str]) -> Callable[[], object]:
    """The same in the toy world."""

    def run() -> object:
        from toy_world import toy_world

        with toy_world():
            return commands(*lines)()

    return run


def make_run() -> None:
    draw_images()
    toy(*STORIES["train-policy"])()


def make_benchmark() -> None:
    from bench_data import GRIDS, rank_rows

    from pacorl.io.documents import write_jsonl
    from pacorl.tiny.characters import Panel, character_prompts, draw

    prompts = character_prompts("dev", 1)
    folder = Path("data/images", f"{prompts[0].id:04d}")
    folder.mkdir(parents=True)
    for number, panel in enumerate(prompts[0].panels):
        for grid in range(GRIDS):
            draw(Panel.parse(panel), 32).save(folder / f"{grid}_{number}.png")
    criteria = {name: dict(texts) for name, texts in prompts[0].criteria.items()}
    record = {"idx": f"{prompts[0].id:04d}", "prompt": prompts[0].text, "criteria": criteria, "category": "Character"}
    write_jsonl(Path("data/prompt_data.jsonl"), [record])
    write_jsonl(Path("data/consistency_full_rank.jsonl"), rank_rows(prompts))


def annotate() -> None:
    """What `dataset annotate` does until it listens, one ranking and one skip."""
    from pacorl.studio.annotate.links import Sharing
    from pacorl.studio.annotate.routes import prepare
    from pacorl.studio.annotate.store import Store, only_server, public_key

    folder = Path(OUT)
    with only_server(folder / "annotations.db", url="http://127.0.0.1:1"), Store(folder / "annotations.db") as store:
        prepare(store, folder, ["ann"], sharing=Sharing(controls=0), renew=["ann"] if store.people() else [])
        first, second = store.next_tasks("ann", limit=2)
        person = store.person_of(store.add_person("ann"))
        store.rank(person, public_key(first.instance.id), [2, 0, 1, 3], request=f"rank-{first.instance.id:>8}")
        store.skip(person, public_key(second.instance.id), "unclear", request=f"skip-{second.instance.id:>8}")


def prepare_annotations(folder: Path) -> None:
    """A folder whose candidates wait to be ranked."""
    from qa.attack.images import png

    from pacorl.dataset.folder import Instance, write_records

    folder.mkdir(exist_ok=True)
    names = [f"{number}.png" for number in range(5)]
    for name in names:
        (folder / name).write_bytes(png(8, 8))
    rows = [Instance(f"i{number}", "g", names[0], tuple(names[1:])) for number in range(20)]
    write_records(folder / "instances.jsonl", rows)


def draw_hero() -> None:
    """A character, and five of its images, of which one is held out."""
    folder = Path("hero")
    folder.mkdir()
    for number, panel in enumerate(all_panels()[:5]):
        draw(panel, 64).save(folder / f"{number}.png")
    (folder / "card.yaml").write_text("description: red round hero, crown, night\n")


TRAIN, LEARN = STORIES["train-policy"][0], STORIES["train-reward"][0]
TEACH = ["train-character", "hero", "--config", "character/tiny", f"out={OUT}", "evaluate_every=1", "steps=1"]
TEACH += ["optimizer.batch=1", "optimizer.micro_batch=1", "gallery.steps=1", "gallery.seeds=1", "--resume", "auto"]
TEACH += ["prior.weight=0.5", "prior.prompts=[green square hero]", "prior.images=1", "keep_checkpoints=1"]
RANK = ["benchmark", "consistency-rank", "data", "--judge", "tiny", "--out", OUT]
TABLE: dict[str, Story] = {
    "train-policy": Story(toy(TRAIN), again=toy([*TRAIN, "epochs=3"])),
    "train-reward": Story(commands(LEARN), again=commands([*LEARN, "max_steps=3"])),
    "train-character": Story(commands(TEACH), draw_hero, again=commands([*TEACH, "steps=2"])),
    **{name: Story(commands(*STORIES[name])) for name in ("dataset", "export", "generate", "score")},
    "report": Story(toy(["report", OUT]), make_run),
    "publish": Story(toy(["publish", OUT, "--licence", "mit"]), make_run),
    "split": Story(commands(["prompts", "split", "tiny:train:40", "--out", OUT, "--test", "10"])),
    "benchmark": Story(commands(RANK), make_benchmark),
    "annotate": Story(annotate, lambda: prepare_annotations(Path(OUT))),
}  # fmt: skip


# --- folders ---------------------------------------------------------------------------------------------------


def prepare(folder: Path, story: Story) -> None:
    """What the command reads, what lies in OUT before it, and in DONE what it makes of that."""
    with contextlib.chdir(folder):
        story.prepare()
        Path(OUT).mkdir(exist_ok=True)
        shutil.copytree(OUT, FIRST)
        if code := story.run():
            raise AssertionError(f"the command ends with {code}")
        Path(OUT).rename(DONE)
        Path(FIRST).rename(OUT)
        Path(ELSEWHERE).mkdir()


def mutate(folder: Path, draw: random.Random) -> str:
    """Puts a link, a pipe or a folder where a file of the command is, or will be."""
    elsewhere, kind, again = folder / ELSEWHERE, draw.choice(KINDS), draw.random() < 0.5
    files, folders = _written(folder)
    name = draw.choice(folders if kind in {"folder link", "aside"} and folders else files)
    done = folder / DONE / name
    if again:
        shutil.rmtree(folder / OUT)
        shutil.copytree(folder / DONE, folder / OUT)
        (folder / AGAIN).touch()
    planted = folder / OUT / name
    if kind == "temporary":
        planted = planted.with_name(f".{planted.name}.{platform.node()}-{os.getpid()}.part")
    if kind == "aside":
        planted = planted.with_name(f".{planted.name}.{draw.choice(ASIDE)}")
    planted.parent.mkdir(parents=True, exist_ok=True)
    remove(planted)
    _plant(planted, kind, elsewhere, done)
    return f"{kind} as {planted.relative_to(folder)}{', again' if again else ''}"


def _written(folder: Path) -> tuple[list[str], list[str]]:
    """Files and folders that the command makes or changes, one for each sort: a hundred images count as one."""
    sorts: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for path in sorted((folder / DONE).rglob("*")):
        name = path.relative_to(folder / DONE).as_posix()
        first = folder / OUT / name
        if not first.exists() or (path.is_file() and path.stat().st_mtime_ns != first.stat().st_mtime_ns):
            sorts[path.is_dir()].setdefault(re.sub(r"[0-9]+", "0", name), name)
    return list(sorts[0].values()), list(sorts[1].values())


def _plant(planted: Path, kind: str, elsewhere: Path, done: Path) -> None:
    match kind:
        case "link" | "temporary":
            (elsewhere / "key").write_bytes(SECRET)
            planted.symlink_to(elsewhere / "key")
        case "copy":  # whoever reads it first finds nothing wrong
            (elsewhere / "key").write_bytes(content_of(done))
            planted.symlink_to(elsewhere / "key")
        case "dangling":
            planted.symlink_to(elsewhere / "new")
        case "loop":
            planted.symlink_to(planted.name)
        case "pipe":
            os.mkfifo(planted)
        case "folder":
            planted.mkdir()
            (planted / KEPT).write_bytes(SECRET)
        case "folder link" | "aside":
            if done.is_dir():
                shutil.copytree(done, elsewhere / "copy")
            (elsewhere / "copy").mkdir(exist_ok=True)
            (elsewhere / "copy" / KEPT).write_bytes(SECRET)
            planted.symlink_to(elsewhere / "copy")


def run(folder: Path, story: Story) -> Any:
    """Runs the command. Raises WrongError if a file that is none of its own has changed."""
    command = story.again if story.again and (folder / AGAIN).exists() else story.run
    before = _strangers(folder)
    with contextlib.chdir(folder):
        try:
            return command()
        finally:
            after = _strangers(folder)
            found = {}
            for name in sorted(before.keys() | after.keys()):
                # A user may have linked a folder of the run to another disk: it takes new files, and the run's own are
                # written again.
                is_new = name not in before
                is_own = name.startswith(SHARED) and Path(name).name != KEPT and name in after
                if before.get(name) != after.get(name) and not is_own:
                    found[name] = "gone" if name not in after else "new" if is_new else "changed"
            if found:
                raise WrongError("wrong", f"{found}")


def _strangers(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and content of every file that is not the command's."""
    paths = [path for path in (folder / ELSEWHERE).rglob("*") if path.is_file()]
    paths += (folder / OUT).rglob(KEPT)
    return {path.relative_to(folder).as_posix(): (path.stat().st_mode, path.read_bytes()) for path in paths}


def targets() -> list[Target]:
    def target(name: str, story: Story) -> Target:
        return Target(
            name=f"links/{name}",
            prepare=lambda folder: prepare(folder, story),
            mutate=mutate,
            run=lambda folder: run(folder, story),
            names=(OUT,),
            codes=(1, 2),
        )

    return [target(name, story) for name, story in TABLE.items()]
