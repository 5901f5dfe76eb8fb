"""The studio's folder: pages with their recipes, characters, LoRAs, and a trash folder for all that is removed.

pages/0001/1.png, 2.png …             candidates, best first; each PNG carries its recipe
pages/0001/before.png, try-1.png …    the page or picture before it, and the tries of a repair
characters/NAME/card.yaml, 01.png, 01.txt …    as `records.characters` has them
loras/NAME/1, 2 …                     trainings of a character, as `studio.teaching` has them
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
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Self

from PIL.Image import Image
from pydantic import BaseModel, Field

from pacorl import __version__
from pacorl.core.grid import parse_layout
from pacorl.io.documents import dump_yaml, parse_json, read_json, read_text, read_yaml, typed, write_json
from pacorl.io.files import PRIVATE, LockedError, make_folder, safe_name, sole_holder, sweep, write_atomic
from pacorl.io.images import images_in, png_bytes, png_texts
from pacorl.records.characters import CARD, Card, read_character
from pacorl.types import Character, Grid

RECIPE = "pacorl page"
"""Text chunk of a PNG with its recipe."""
MOST_PICTURES = 60
"""Most pictures of a character that is drawn or taught."""
SIDE = 1536
"""Longer side of a character's picture: training and generators read 1,024 pixels."""


class Words(BaseModel):
    """What a page is to show."""

    sentence: str = ""
    theme: str = ""
    panels: list[str] = []
    layout: str = ""
    """Rows x columns; empty for what suits the number of panels."""
    character: str = ""
    sources: list[str] = []
    """Digests of the pictures to change."""
    seed: int | None = Field(None, ge=0, lt=2**32)


class Recipe(Words):
    """Everything that draws a page again, and what was said about it."""

    prompt: str = ""
    """The whole prompt; empty for a picture of another program."""
    model: str = ""
    loras: dict[str, float] = {}
    """LoRA → strength."""
    note: str = ""
    """How it came about, such as `panel 2 redrawn`."""
    judge: str = ""
    score: float | None = None
    matrix: list[list[float | None]] = []
    parts: dict[str, float | None] = {}
    rank: int = 1
    tied: int = 1
    tries: list[str] = []
    """Verdicts of the panels that a repair drew."""
    verdict: list[str] = []
    """Sentences of the last check; empty before one."""
    odd: int | None = None
    """The panel that fits least, if the check failed."""

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


class Draft(Words):
    """The form of the page, what is open, and the chosen models."""

    unfolded: str = ""
    """The sentence of which the panels were written."""
    candidates: int = Field(4, ge=1, le=50)
    tab: str = "Pages"
    page: int = 0
    """The page that is open; 0 for none."""
    candidate: int = 0
    shown_character: str = ""
    model: str = ""
    """Empty before a choice."""
    editor: str = ""
    judge: str = ""
    loras: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class Page:
    """A page on the disk, with all its candidates."""

    folder: Path
    candidates: tuple[Path, ...]
    recipes: tuple[Recipe, ...]
    """One per candidate."""

    @property
    def number(self) -> int:
        return int(self.folder.name)

    @property
    def before(self) -> Path | None:
        path = self.folder / "before.png"
        return path if path.is_file() else None

    @property
    def tries(self) -> list[Path]:
        return sorted(self.folder.glob("try-*.png"), key=lambda path: int(path.stem[4:]))


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
        self.removed: tuple[str, dict[Path, Path]] | None = None
        """What was removed last: in words, and former path → path in the trash."""

    def close(self) -> None:
        self._held.close()

    @property
    def key(self) -> str:
        """The secret of the link, the same at every start, so that the address and its cookie stay good."""
        return read_text(self.path / "key").strip()

    def read_draft(self) -> Draft:
        path = self.path / "draft.json"
        try:
            return typed(read_json(path), Draft) if path.is_file() else Draft()
        except ValueError:  # of another version: a form is no work that could be lost
            return Draft()

    def keep_draft(self, draft: Draft) -> None:
        write_json(self.path / "draft.json", draft.model_dump(), mode=PRIVATE)

    # --- pages -------------------------------------------------------------------------------------------------------

    @property
    def pages(self) -> list[Page]:
        """All pages, the newest first."""
        folders = sorted((self.path / "pages").glob("[0-9]*"), key=lambda folder: int(folder.name), reverse=True)
        return [page for folder in folders if (page := _read_page(folder))]

    def page(self, number: int) -> Page | None:
        return _read_page(self.path / "pages" / f"{number:04d}")

    def add_page(
        self, images: Sequence[tuple[Image, Recipe]], *, before: Image | None = None, tries: Sequence[Image] = ()
    ) -> Page:
        """Write a page: all of its files, or none.

        Args:
            images: candidates, best first.
            before: the page or picture that it was made of.
            tries: redrawn panels, in the order of the recipe's tries.
        """
        files = {f"{number}.png": png_bytes(image, recipe.texts) for number, (image, recipe) in enumerate(images, 1)}
        files |= {f"try-{number}.png": png_bytes(image) for number, image in enumerate(tries, 1)}
        if before:
            files["before.png"] = png_bytes(before)
        pages = self.path / "pages"
        make_folder(pages)
        # A removed page comes back under its number.
        taken = [*pages.glob("[0-9]*"), *self.path.glob("trash/*/pages/[0-9]*")]
        target = pages / f"{_next([path.name for path in taken]):04d}"
        with tempfile.TemporaryDirectory(prefix=".new-", dir=pages, ignore_cleanup_errors=True) as staged:
            for name, content in files.items():
                write_atomic(Path(staged, "page", name), content, mode=PRIVATE)
            Path(staged, "page").rename(target)
        page = _read_page(target)
        assert page
        return page

    def keep_recipe(self, page: Page, candidate: int, recipe: Recipe, image: Image) -> None:
        """Write a candidate again, with another recipe."""
        write_atomic(page.candidates[candidate], png_bytes(image, recipe.texts), mode=PRIVATE)

    def add_source(self, image: Image) -> str:
        """Store a picture to change under the digest of its content, and return the digest."""
        content = png_bytes(image)
        digest = sha256(content).hexdigest()[:16]
        write_atomic(self.source(digest), content, mode=PRIVATE)
        return digest

    def source(self, digest: str) -> Path:
        return self.path / "sources" / f"{safe_name(digest)}.png"

    # --- characters --------------------------------------------------------------------------------------------------

    def characters(self) -> list[str]:
        return sorted(card.parent.name for card in (self.path / "characters").glob(f"*/{CARD}"))

    def character(self, name: str, *, least: int = 1) -> Character:
        """Read a character. Raises ValueError naming a fault."""
        return read_character(self.character_folder(name), least=least, most=MOST_PICTURES)

    def character_folder(self, name: str) -> Path:
        return self.path / "characters" / safe_name(name)

    def pictures(self, name: str) -> list[tuple[Path, str]]:
        """List the pictures of a character, each with its caption."""
        return [(path, _text_of(path.with_suffix(".txt"))) for path in images_in(self.character_folder(name))]

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
        path = self.character_folder(name) / CARD
        if not description.strip():
            raise ValueError(f"{name} has no description; say what the character looks like")
        card = typed(read_yaml(path), Card) if path.is_file() else Card(description="new")
        document = card.model_dump() | {"description": description.strip()}
        typed(document, Card)
        write_atomic(path, dump_yaml(document), mode=PRIVATE)

    def add_picture(self, name: str, image: Image, caption: str = "") -> None:
        """Add a picture behind a character's last one."""
        folder = self.character_folder(name)
        path = folder / f"{_next([path.stem for path in images_in(folder)]):02d}.png"
        image = image.copy()
        image.thumbnail((SIDE, SIDE))
        self.caption(path, caption)  # first, so that no picture is seen without its caption
        write_atomic(path, png_bytes(image), mode=PRIVATE)

    def caption(self, picture: Path, caption: str) -> None:
        """Write what a picture shows; an empty caption is the description alone."""
        path = picture.with_suffix(".txt")
        if caption.strip():
            write_atomic(path, caption.strip(), mode=PRIVATE)
        else:
            path.unlink(missing_ok=True)

    # --- removal -----------------------------------------------------------------------------------------------------

    def remove(self, what: str, *paths: Path) -> None:
        """Move files or folders into the trash; `undo` brings the last ones back."""
        trash = self.path / "trash"
        trash /= str(_next([path.name for path in trash.glob("*")]))
        moved = {}
        for path in filter(Path.exists, paths):
            moved[path] = trash / path.relative_to(self.path)
            make_folder(moved[path].parent)
            path.rename(moved[path])
        self.removed = (what, moved)

    def undo(self) -> None:
        """Put the files back that were removed last. Raises ValueError if something else has their place meanwhile."""
        _, moved = self.removed or ("", {})
        for path, trashed in moved.items():
            if path.exists():
                raise ValueError(f"{path.relative_to(self.path)} is taken meanwhile; it stays in {trashed.parent}")
        for path, trashed in moved.items():
            trashed.rename(path)
        self.removed = None


def _next(names: Sequence[str]) -> int:
    """Return the number behind the highest of these."""
    return max((int(name) for name in names if name.isdecimal()), default=0) + 1


def _text_of(path: Path) -> str:
    return read_text(path) if path.is_file() else ""


def _read_page(folder: Path) -> Page | None:
    """Read a page's folder; None if it has no candidate. A file that somebody else put there is left alone."""
    recipes = {}
    for path in sorted(folder.glob("[0-9]*.png"), key=lambda path: int(path.stem)):
        if recipe := _recipe_of(path, path.stat().st_mtime_ns):
            recipes[path] = recipe
    return Page(folder, tuple(recipes), tuple(recipes.values())) if recipes else None


@lru_cache(maxsize=4096)
def _recipe_of(path: Path, changed: int) -> Recipe | None:
    """Read a recipe once per state of its file; None if it is damaged."""
    try:
        return Recipe.of(path)
    except ValueError:
        return None
