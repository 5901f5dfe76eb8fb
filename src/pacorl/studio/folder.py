"""The studio's folder: pages with their recipes, characters, LoRAs, and a trash folder for all that is removed.

pages/0001/1.png, 2.png …             candidates, best first; each PNG carries its recipe
pages/0001/before.png, try-1.png …    the page or picture before it, and the tries of a repair
characters/NAME/card.yaml, 01.png, 01.txt …    as `records.characters` has them
loras/NAME/config.yaml, log.txt, run/ a training of `pacorl train-character`
sources/DIGEST.png                    pictures that an editor changes
trash/N/…                             removed files, under their former paths
draft.json, key                       the form of the page, and the secret of its link
"""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
import unicodedata
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from PIL.Image import Image
from pydantic import BaseModel, Field

from pacorl import __version__
from pacorl.core.grid import parse_layout
from pacorl.io.documents import blamed_on, dump_yaml, parse_json, read_json, read_text, read_yaml, typed, write_json
from pacorl.io.files import (
    PRIVATE,
    LockedError,
    inside,
    make_folder,
    remove_made,
    safe_name,
    sole_holder,
    sweep,
    write_atomic,
)
from pacorl.io.images import images_in, png_bytes, png_texts
from pacorl.records.characters import CARD, Card, read_character
from pacorl.types import Character, Grid

RECIPE = "pacorl page"
"""Text chunk of a PNG with its recipe."""
MOST_PICTURES = 60
"""Most pictures of a character."""
SIDE = 1536
"""Longer side of a character's picture: training and generators read 1,024 pixels."""


class TryLine(BaseModel):
    """A redrawn panel of a page, accepted or not."""

    panel: int
    verdict: str
    accepted: bool


class Recipe(BaseModel):
    """Everything that draws a page again."""

    sentence: str = ""
    theme: str = ""
    panels: list[str] = []
    layout: str = "2x2"
    prompt: str = ""
    """The whole prompt; empty for a picture of another program."""
    character: str = ""
    sources: list[str] = []
    """Digests of the pictures that it changes."""
    model: str = ""
    loras: dict[str, float] = {}
    """LoRA → strength."""
    seed: int = 0
    note: str = ""
    """How it came about, such as `panel 2 redrawn`."""
    tries: list[TryLine] = []
    judge: str = ""
    score: float | None = None
    matrix: list[list[float | None]] = []
    parts: dict[str, float | None] = {}
    rank: int = 1
    tied: int = 1

    @property
    def grid(self) -> Grid:
        return parse_layout(self.layout)

    @property
    def name(self) -> str:
        """What a person calls it."""
        return self.theme or self.sentence or self.note or "a page"

    @property
    def texts(self) -> dict[str, str]:
        """Text chunks of its PNG: itself, and of a picture that was drawn here the ones that the commands read."""
        texts = {RECIPE: self.model_dump_json()}
        if self.model:
            drawn = {"model": self.model, "prompt": self.prompt, "layout": self.layout, "seed": str(self.seed)}
            texts |= {"Software": f"pacorl {__version__}", **drawn}
        return texts

    @classmethod
    def of(cls, png: Path | bytes) -> Self | None:
        """Read the recipe of a PNG; None without one. Raises ValueError for a damaged one."""
        text = png_texts(png).get(RECIPE)
        if text is None:
            return None
        recipe = typed(parse_json(text), cls)
        _ = recipe.grid
        return recipe


class Verdict(BaseModel):
    """The result of a check, kept beside its page."""

    passed: bool
    lines: list[str]
    odd: int | None = None


class Draft(BaseModel):
    """The form of the page, and the models that were chosen on it."""

    sentence: str = ""
    unfolded: str = ""
    """The sentence of which the panels were written."""
    theme: str = ""
    panels: list[str] = []
    layout: str = ""
    character: str = ""
    sources: list[str] = []
    candidates: int = Field(4, ge=1, le=50)
    seed: int | None = Field(None, ge=0, le=2**31)
    """None for a new one at every draw."""
    tab: str = ""
    """The tab that is open at a reload."""
    page: int = 0
    """The page that is open; 0 for none."""
    candidate: int = 0
    model: str = ""
    """Empty before a choice."""
    editor: str = ""
    judge: str = ""
    loras: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class Page:
    """A page on the disk, with all its candidates."""

    number: int
    folder: Path
    candidates: tuple[Path, ...]
    recipes: tuple[Recipe, ...]
    """One per candidate."""
    tries: tuple[Path, ...]

    @property
    def before(self) -> Path | None:
        path = self.folder / "before.png"
        return path if path.is_file() else None

    @property
    def verdict(self) -> Verdict | None:
        """The last check of the best candidate."""
        path = self.folder / "check.json"
        return typed(read_json(path), Verdict) if path.is_file() else None


@dataclass(frozen=True, slots=True)
class Removed:
    """Something in the trash, to be put back by `Folder.undo`."""

    what: str
    trash: Path


class Folder:
    """The folder of one studio, which holds its lock until `close`."""

    def __init__(self, path: Path) -> None:
        """Make the folder if it is missing. Raises ValueError if another studio has it."""
        self.path = path
        self._held = ExitStack()
        make_folder(path)
        try:
            self._held.enter_context(sole_holder(path / ".lock"))
        except LockedError:
            raise ValueError(f"{path} is another studio's folder; name another one with --folder") from None
        sweep(path)
        if not (path / "key").is_file():
            write_atomic(path / "key", secrets.token_urlsafe(16), mode=PRIVATE)
        for unfinished in (path / "pages").glob(".new-*"):  # of a killed studio
            shutil.rmtree(unfinished)
        self._pages: dict[int, Page] = {}
        self._read_pages()

    def close(self) -> None:
        self._held.close()

    @property
    def key(self) -> str:
        """The secret of the link, the same at every start, so that the address and its cookie stay good."""
        return read_text(self.path / "key").strip()

    @property
    def draft(self) -> Draft:
        path = self.path / "draft.json"
        try:
            return typed(read_json(path), Draft) if path.is_file() else Draft()
        except ValueError:  # of another version: a form is no work that could be lost
            return Draft()

    def keep_draft(self, draft: Draft) -> None:
        write_json(self.path / "draft.json", draft.model_dump(), mode=PRIVATE)

    def file(self, name: str) -> Path:
        """Find an image for the page. Raises ValueError unless it is a PNG of this folder."""
        path = inside(self.path, name)
        if path.suffix != ".png" or not path.is_file():
            raise ValueError(f"there is no image {name[:80]!r}")
        return path

    # --- pages -------------------------------------------------------------------------------------------------------

    @property
    def pages(self) -> list[Page]:
        """All pages, the newest first."""
        return sorted(self._pages.values(), key=lambda page: page.number, reverse=True)

    def page(self, number: int) -> Page | None:
        return self._pages.get(number)

    def add_page(
        self,
        images: Sequence[tuple[Image, Recipe]],
        *,
        before: Image | None = None,
        tries: Sequence[Image] = (),
    ) -> Page:
        """Write a page: all of its files, or none.

        Args:
            images: candidates, best first.
            before: the page or picture that it was made of.
            tries: redrawn panels, in the order of the recipe's tries.
        """
        pages = self.path / "pages"
        make_folder(pages)
        taken = [int(path.name) for path in [*pages.glob("[0-9]*"), *(self.path / "trash").glob("*/pages/[0-9]*")]]
        target = pages / f"{max(taken, default=0) + 1:04d}"
        files = {}
        for number, (image, recipe) in enumerate(images, 1):
            files[f"{number}.png"] = png_bytes(image, recipe.texts)
        if before:
            files["before.png"] = png_bytes(before)
        files |= {f"try-{number}.png": png_bytes(image) for number, image in enumerate(tries, 1)}
        with tempfile.TemporaryDirectory(prefix=".new-", dir=pages, ignore_cleanup_errors=True) as staged:
            for name, content in files.items():
                write_atomic(Path(staged, "page", name), content, mode=PRIVATE)
            Path(staged, "page").rename(target)
        self._read_pages()
        return self._pages[int(target.name)]

    def keep_verdict(self, page: Page, verdict: Verdict) -> None:
        write_json(page.folder / "check.json", verdict.model_dump(), mode=PRIVATE)

    def _read_pages(self) -> None:
        """Read the pages that are new on the disk, and forget those that are gone."""
        known = self._pages
        self._pages = {}
        for folder in sorted((self.path / "pages").glob("[0-9]*")):
            page = known.get(int(folder.name)) or _page(folder)
            if page:
                self._pages[page.number] = page

    # --- pictures to change ------------------------------------------------------------------------------------------

    def add_source(self, image: Image) -> str:
        """Store a picture under the digest of its content, and return the digest."""
        content = png_bytes(image)
        digest = sha256(content).hexdigest()[:16]
        write_atomic(self.source(digest), content, mode=PRIVATE)
        return digest

    def source(self, digest: str) -> Path:
        return self.path / "sources" / f"{safe_name(digest)}.png"

    # --- characters --------------------------------------------------------------------------------------------------

    def characters(self) -> list[str]:
        return sorted(card.parent.name for card in (self.path / "characters").glob(f"*/{CARD}"))

    def character(self, name: str) -> Character:
        """Read a character that can be drawn. Raises ValueError naming a fault."""
        return read_character(self.character_folder(name), most=MOST_PICTURES)

    def character_folder(self, name: str) -> Path:
        folder = self.path / "characters" / safe_name(name)
        if not (folder / CARD).is_file():
            raise ValueError(f"there is no character called {name[:40]!r}")
        return folder

    def description(self, name: str) -> str:
        path = self.character_folder(name) / CARD
        document = read_yaml(path)
        with blamed_on(path):
            return typed(document, Card).description

    def pictures(self, name: str) -> list[tuple[Path, str]]:
        """List the pictures of a character, each with its caption."""
        listed = []
        for path in images_in(self.character_folder(name)):
            caption = path.with_suffix(".txt")
            listed.append((path, read_text(caption) if caption.is_file() else ""))
        return listed

    def new_character(self, name: str, description: str) -> str:
        """Make a character's folder, named without accents and spaces: "banana king" → "banana_king"."""
        plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
        folder = safe_name(re.sub(r"[^\w.-]+", "_", plain.strip()) or name)
        if folder in self.characters():
            raise ValueError(f"there is a character called {name} already; give another name")
        self.describe(folder, description)
        return folder

    def describe(self, name: str, description: str) -> None:
        """Write what a character looks like; traits that a person wrote into the card by hand stay."""
        path = self.path / "characters" / safe_name(name) / CARD
        if not description.strip():
            raise ValueError(f"{name} has no description; say what the character looks like")
        card: dict[str, Any] = typed(read_yaml(path), Card).model_dump() if path.is_file() else {}
        card["description"] = description.strip()
        typed(card, Card)
        write_atomic(path, dump_yaml(card), mode=PRIVATE)

    def add_picture(self, name: str, image: Image, caption: str = "") -> Path:
        """Add a picture behind a character's last one."""
        folder = self.character_folder(name)
        numbers = [int(path.stem) for path in images_in(folder) if path.stem.isdecimal()]
        if len(images_in(folder)) >= MOST_PICTURES:
            raise ValueError(f"{name} has {MOST_PICTURES} pictures, which is the most")
        path = folder / f"{max(numbers, default=0) + 1:02d}.png"
        image = image.copy()
        image.thumbnail((SIDE, SIDE))
        self.caption(path, caption)  # first, so that no picture is seen without its caption
        write_atomic(path, png_bytes(image), mode=PRIVATE)
        return path

    def caption(self, picture: Path, caption: str) -> None:
        """Write what a picture shows; an empty caption is the description alone."""
        path = picture.with_suffix(".txt")
        if caption.strip():
            write_atomic(path, caption.strip(), mode=PRIVATE)
        else:
            remove_made(path.parent, [path.name])

    # --- removal -----------------------------------------------------------------------------------------------------

    def remove(self, what: str, *paths: Path) -> Removed:
        """Move files or folders into the trash."""
        make_folder(self.path / "trash")
        numbers = [int(path.name) for path in (self.path / "trash").glob("[0-9]*")]
        trash = self.path / "trash" / str(max(numbers, default=0) + 1)
        for path in paths:
            if path.exists():
                target = trash / path.relative_to(self.path)
                make_folder(target.parent)
                path.rename(target)
        self._read_pages()
        return Removed(what, trash)

    def undo(self, removed: Removed) -> None:
        """Put files back from the trash. Raises ValueError if something else has their place meanwhile."""
        moves = {}
        for path in sorted(removed.trash.rglob("*")):
            if path.is_file():
                moves[path] = self.path / path.relative_to(removed.trash)
        for target in moves.values():
            if target.exists():
                raise ValueError(f"{target.relative_to(self.path)} is taken meanwhile; it stays in {removed.trash}")
        for path, target in moves.items():
            make_folder(target.parent)
            path.rename(target)
        shutil.rmtree(removed.trash)
        self._read_pages()


def _page(folder: Path) -> Page | None:
    """Read a page's folder; None if it has no candidate. A file that somebody else put there is left alone."""
    recipes = {}
    for path in sorted(folder.glob("[0-9]*.png"), key=lambda path: int(path.stem)):
        try:
            recipe = Recipe.of(path)
        except ValueError:
            continue
        if recipe:
            recipes[path] = recipe
    if not recipes:
        return None
    tries = sorted(folder.glob("try-*.png"), key=lambda path: int(path.stem[4:]))
    return Page(int(folder.name), folder, tuple(recipes), tuple(recipes.values()), tuple(tries))
