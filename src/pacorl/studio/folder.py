"""The studio's folder: pages, characters, their LoRAs, and a trash folder for removed files.

pages/TIME/1.png, 2.png …            drawings, best first, and behind them the tries of a repair; with recipes
characters/NAME/card.yaml, TIME.png, TIME.txt …      as `records.characters` has them
loras/MODEL/NAME                     trainings, as `studio.teaching` has them
trash/TIME/…                         removed files, under their former paths
draft.json, key                      the form of the page, and the secret of its link
"""

import re
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Self
from unicodedata import normalize

from PIL.Image import Image, Resampling
from pydantic import AfterValidator, BaseModel, ConfigDict, Json

from pacorl.config.options import StudioModels
from pacorl.core.grid import join, parse_layout, split
from pacorl.io.documents import dump_yaml, read_object, read_yaml, typed
from pacorl.io.files import make_folder, sole_holder, sweep, write_atomic
from pacorl.io.images import images_in, natural, open_image, png_bytes, png_texts, upright_size
from pacorl.records.characters import CARD, Card, read_caption, read_character
from pacorl.report.html import render
from pacorl.types import Character, Grid, Matrix, Size
from pacorl.web import secret_in

MOST_PICTURES = 60
"""Most pictures to teach a character from."""
EXAMPLE = (
    "Four pictures of a white hero in town at night: standing with house; waving with tree; waving with boat; "
    "waving with ball"
)
"""First sentence, which every model can draw."""
SHEET = "Let the hero be jumping.\nPut the hero at the beach.\nPut a boat beside the hero.\nShow the scene at night."
SIDE = 1536
"""Longer side of a character's picture: training and generators read 1,024 pixels."""


class Recipe(BaseModel):
    """Parsed text chunks of a drawing: the chunks of `pacorl generate`, and the studio's own."""

    model_config = ConfigDict(extra="allow")  # settings of the generator

    prompt: str = ""
    """Empty for a picture of another program."""
    layout: Annotated[str, AfterValidator(lambda text: str(parse_layout(text)))] = "1x1"
    theme: str = ""
    panels: Json[list[str]] = []
    characters: Json[list[str]] = []
    model: str = ""
    adapter: str = ""
    seed: Json[int] = 0
    score: Json[float | None] = None
    """Mean over the pairs of panels; of a changed picture, that it is as asked."""
    judge: str = ""
    likeness: Json[float | None] = None
    """How well its panels show its character, beside the character's first picture; None without one."""
    sources: Json[list[str]] = []
    """Names of a character's pictures that it changes."""
    references: Json[list[str]] = []
    """Names of a character's pictures that a page was drawn with."""
    redrawn: Json[dict[str, str]] = {}
    """Number of each panel that was drawn again → its seed."""

    # Of the studio
    form: str = ""
    """Words of the form by which it was drawn, as a person wrote them."""
    looks: str = ""
    """Description of its character at that time."""
    note: str = ""
    """Origin, such as `Panel 2 drawn again`."""
    tied: Json[int] = 1
    """Number of drawings that the judge does not tell apart from it, itself included."""
    matrix: Json[Matrix] = ()
    """Score of each pair of panels; empty for a single picture."""
    checked: Json[list[str]] = []
    """Sentences of the last check; empty before one."""
    odd: Json[int | None] = None
    """Index of the panel that fits least, if the check failed."""

    def updated(self, **changes: object) -> Self:
        """Copy it with other values, which are not checked."""
        return self.model_copy(update=changes)

    @property
    def texts(self) -> dict[str, str]:
        """Text chunks of its PNG."""
        return self.model_dump(round_trip=True, exclude_unset=True)

    @property
    def grid(self) -> Grid:
        return parse_layout(self.layout)

    @property
    def character(self) -> str:
        """Name of its character; empty without one."""
        return next(iter(self.characters), "")

    @property
    def words(self) -> str:
        """Words of the form by which it was drawn: a person's, or else those of the model."""
        return self.form or "\n".join([self.theme or self.prompt, *self.panels])

    @property
    def name(self) -> str:
        return self.theme or self.prompt or self.note or "a page"

    @property
    def standing(self) -> str:
        """Caption: the note, the judge's score with its question, and the size of a tie; `not judged` without any."""
        return render("caption.txt", recipe=self).strip()


class Draft(BaseModel):
    """State of the page: its form, and the open tab, page and drawing."""

    words: str = EXAMPLE
    """A sentence; or a shared description and a line per panel."""
    sheet: str = SHEET
    """Changes to a character's pictures, a line per new picture."""
    name: str = ""
    """Name of a new character."""
    description: str = ""
    character: str = ""
    seed: int | None = None
    """Seed of the next drawing; None for a new one."""
    tab: str = "Pages"
    page: str = ""
    """Name of the open page."""
    drawing: int = 0
    chosen: StudioModels | None = None
    """The models that were chosen here, in the form that fits this machine; None for the command's."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A PNG with its recipe."""

    path: Path
    recipe: Recipe

    @property
    def size(self) -> Size:
        return upright_size(self.path)

    @property
    def panels(self) -> list[Image]:
        return split(open_image(self.path), self.recipe.grid)

    def rewrite(self, **changes: object) -> None:
        """Write it again, with another recipe."""
        recipe = self.recipe.updated(**changes)
        write_atomic(self.path, png_bytes(open_image(self.path), recipe.texts))


class Folder:
    """The folder of one studio, which holds its lock until `close`."""

    def __init__(self, path: Path) -> None:
        """Make the folder if it is missing. Raises ValueError if another studio has it."""
        self.path = path
        self._held = ExitStack()
        make_folder(path)
        path.chmod(0o700)  # drawings and the key of the page are the owner's alone
        self._held.enter_context(sole_holder(path / ".lock", fix="name another folder with --folder"))
        sweep(path)
        self.key = secret_in(path / "key")
        """The secret of the link."""
        self.removal = ""
        """The last removal, in words; empty if it cannot be undone."""
        self._moves: dict[Path, Path] = {}
        """Former path → path in the trash, of the last removal."""

    def close(self) -> None:
        self._held.close()

    def read_draft(self) -> Draft:
        path = self.path / "draft.json"
        if not path.is_file():
            return Draft()
        try:
            return typed(read_object(path), Draft)
        except ValueError:  # damaged, or of another version: a form is no work that could be lost
            return Draft()

    # --- pages -------------------------------------------------------------------------------------------------------

    @property
    def pages(self) -> list[list[Drawing]]:
        """All pages, the newest first."""
        folders = sorted((self.path / "pages").glob("*"), reverse=True)
        return [page for folder in folders if (page := self.page(folder.name))]

    def page(self, name: str) -> list[Drawing]:
        """Read a page; empty if there is none. A file of another program in its folder is left alone."""
        paths = sorted((self.path / "pages" / name).glob("[0-9]*.png"), key=natural)
        return [drawing for path in paths if (drawing := _drawing(path, path.stat().st_mtime_ns))]

    def add_page(self, drawings: Sequence[tuple[Image, Recipe]]) -> str:
        """Write a page, all of its files or none, and return its name."""
        staged = self.path / "unfinished"
        shutil.rmtree(staged, ignore_errors=True)  # of a killed studio, or a full disk
        for number, (image, recipe) in enumerate(drawings, 1):
            write_atomic(staged / f"{number}.png", png_bytes(image, recipe.texts))
        target = self.path / "pages" / timestamp()
        make_folder(target.parent)
        staged.rename(target)
        return target.name

    # --- characters --------------------------------------------------------------------------------------------------

    def characters(self) -> list[str]:
        return sorted(card.parent.name for card in (self.path / "characters").glob(f"*/{CARD}"))

    def character(self, name: str, *, least: int = 0) -> Character:
        """Read a character. Raises ValueError naming a fault."""
        return read_character(self.character_folder(name), least=least, most=MOST_PICTURES)

    def description(self, name: str) -> str:
        """Read what a character looks like, without opening its pictures."""
        return typed(read_yaml(self.character_folder(name) / CARD), Card).description.strip()

    def character_folder(self, name: str) -> Path:
        return self.path / "characters" / name

    def new_character(self, name: str, description: str) -> str:
        """Make a character's folder, and return its name: "banana king" → "banana_king"."""
        # Typed letters are composed; those of a Mac's file names are not.
        name = re.sub(r"\s+", "_", normalize("NFC", name.strip()))
        if not re.fullmatch(r"[\w-][\w.-]{0,79}", name):
            raise ValueError(f"{name[:99]!r} cannot name a character; use at most 80 letters, digits, '-', '_' and '.'")
        if self.character_folder(name).exists():
            raise ValueError(f"there is a character called {name} already; give another name")
        self.describe(name, description)
        return name

    def describe(self, name: str, description: str) -> None:
        """Write a character's description; what else its card has stays."""
        path = self.character_folder(name) / CARD
        former = read_yaml(path) if path.is_file() else {}
        # Of one line: it takes the place of a name in a sentence.
        card = typed(former | {"description": " ".join(description.split())}, Card)
        write_atomic(path, dump_yaml(card.model_dump()))

    def pictures(self, name: str) -> list[tuple[Path, str]]:
        """List the pictures of a character, each with its caption."""
        return [(path, read_caption(path)[1]) for path in images_in(self.character_folder(name))]

    def add_picture(self, name: str, image: Image, caption: str = "") -> None:
        """Add a picture behind a character's last one, made smaller if it is large."""
        path = self.character_folder(name) / f"{timestamp()}.png"
        image.thumbnail((SIDE, SIDE))
        self.caption(path, caption)  # first, so that no picture is seen without its caption
        write_atomic(path, png_bytes(image))

    def caption(self, picture: Path, caption: str) -> None:
        """Save a picture's caption; an empty caption leaves the character's description alone."""
        path = picture.with_suffix(".txt")
        if caption.strip():
            write_atomic(path, caption.strip())
        else:
            path.unlink(missing_ok=True)

    # --- removal -----------------------------------------------------------------------------------------------------

    def remove(self, what: str, *paths: Path) -> None:
        """Move files or folders into the trash; `undo` brings the last ones back. Captions wait for their pictures."""
        trash = self.path / "trash" / timestamp()
        moves = {path: trash / path.relative_to(self.path) for path in paths}
        for path, trashed in moves.items():
            make_folder(trashed.parent)
            path.rename(trashed)
        self.removal, self._moves = f"Removed {what}.", moves

    def remove_character(self, name: str) -> None:
        """Remove a character and its LoRAs: another one of this name must not be drawn with them."""
        loras = [path for path in (self.path / "loras").glob("*/*") if path.name == name]
        self.remove(plain(name), self.character_folder(name), *loras)

    def undo(self) -> None:
        """Restore the last removal. Raises FileExistsError if something new has its place, and can be tried again."""
        for path in self._moves:
            if path.exists():
                raise FileExistsError(f"there is a new {path.name}; remove it before you undo the removal")
        for path, trashed in self._moves.items():
            trashed.rename(path)
        self.removal, self._moves = "", {}


def plain(name: str) -> str:
    return name.replace("_", " ")


def timestamp() -> str:
    """Name a new file: no other has or had this name, and names sort by age."""
    return f"{datetime.now():%Y%m%d-%H%M%S-%f}"


def page_of(panels: Sequence[Image], grid: Grid, size: tuple[int, int] | None = None) -> Image:
    """Join panels in one image, all at one size, by default the first's."""
    return join([panel.resize(size or panels[0].size, Resampling.LANCZOS) for panel in panels], grid)


@lru_cache(maxsize=4096)
def _drawing(path: Path, changed: int) -> Drawing | None:
    """Read a drawing once per state of its file; None if it is damaged."""
    texts = png_texts(path)
    try:
        if not texts:
            return None
        return Drawing(path, Recipe.model_validate(texts))
    except ValueError:
        return None
