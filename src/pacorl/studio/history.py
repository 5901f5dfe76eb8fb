"""The studio's sets, each in one file on the disk.

`set-000012.zip` contains `set.json`, the result as the page shows it, and its images. Entries are written atomically,
and the oldest are removed when there are too many. `favourites.json` lists the entries that stay.
"""

from __future__ import annotations

import io
import json
import logging
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field

from pacorl.core.grid import parse_layout, split
from pacorl.io.documents import parse_object, read_json, typed, write_json
from pacorl.io.files import PRIVATE, LockedError, make_folder, replacing, sole_holder, sweep
from pacorl.io.images import open_image, png_bytes

logger = logging.getLogger(__name__)

MAX_SETS = 200
MAX_BYTES = 4 * 2**30
"""Size of all entries: 50 candidates of 1024², each with its base, are about 150 MB."""
FAVOURITES = "favourites.json"
WORDS = 2000
"""Letters of a set's words that the page searches."""
DOCUMENT = "set.json"
DOCUMENT_BYTES = 16 * 2**20
"""Largest unpacked document of a set. Documents of 50 candidates have a tenth of it."""
IMAGE_BYTES = 128 * 2**20
"""Largest unpacked image of a set. Uploads have 75 MB."""
LEAST_KEPT = 0.5
"""Score from which the page counts a picture of a sheet as the character."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A set in the list of sets."""

    path: Path
    bytes: int
    summary: Mapping[str, Any]


class StoredImage(BaseModel):
    """An image of a set, its recipe and its scores."""

    image: str
    layout: Annotated[str, AfterValidator(lambda text: str(parse_layout(text)))]
    score: float | None
    rank: int
    matrix: list[Any]
    recipe: dict[str, str]
    error: str
    base: StoredImage | None


class StoredSet(BaseModel):
    """Required fields of a set's document."""

    kind: str
    theme: str
    made: str
    sources: list[str]
    asked: dict[str, Any]
    candidates: list[StoredImage] = Field(min_length=1)


class History:
    """A folder of sets. One studio at a time writes it."""

    def __init__(self, folder: Path, *, max_sets: int = MAX_SETS, max_bytes: int = MAX_BYTES) -> None:
        """
        Args:
            folder: made if it is missing.
            max_sets: most entries.
            max_bytes: most bytes of all entries; the newest entry is always kept.

        Raises:
            ValueError: another studio has the folder.
            OSError: it cannot be written.
        """
        self.folder = folder
        self.max_sets = max_sets
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held = ExitStack()

        # One studio at a time.
        make_folder(folder)
        try:
            self._held.enter_context(sole_holder(folder / ".lock"))
        except LockedError:
            raise ValueError(f"{folder} is another studio's history; name another folder with --history") from None

        favourites = folder / FAVOURITES
        self._favourites: set[str] = set()
        if favourites.is_file():
            self._favourites.update(typed(read_json(favourites), list[str]))
        # The sets of earlier studios.
        sweep(folder)
        self._entries: dict[str, Entry] = {}
        for path in sorted(folder.glob("set-*.zip")):
            name = path.stem.removeprefix("set-")
            if name.isascii() and name.isdigit():  # other files are not the studio's
                self._entries[name] = _entry(path)

    def close(self) -> None:
        self._held.close()

    def summaries(self) -> list[dict[str, Any]]:
        """List all sets, the newest first: id, time, theme, words, best score and image, and the favourites' mark."""
        listed = []
        for name, entry in reversed(list(self._entries.items())):
            if entry.summary:
                listed.append({"id": name, "favourite": name in self._favourites, **entry.summary})
        return listed

    def mark(self, name: str, *, favourite: bool) -> None:
        """Make a set a favourite, which stays when older sets are forgotten, or a usual one again."""
        with self._lock:
            marked = self._favourites | {name} if favourite else self._favourites - {name}
            self._favourites = marked & self._entries.keys()
            write_json(self.folder / FAVOURITES, sorted(self._favourites), mode=PRIVATE)

    def add(self, document: Mapping[str, Any], images: Mapping[str, bytes]) -> str:
        """Write a set to the disk.

        Args:
            document: the result on the page.
            images: PNGs by the names in the document.

        Returns:
            Its id.

        Raises:
            OSError: the disk is full, or gone.
        """
        with self._lock:
            name = f"{max((int(name) for name in self._entries), default=0) + 1:06d}"
            path = self.folder / f"set-{name}.zip"
            document = {**document, "made": datetime.now(UTC).isoformat(timespec="seconds")}
            # Not compressed: PNGs are compressed already.
            with replacing(path, mode=PRIVATE) as temporary, zipfile.ZipFile(temporary, "w") as archive:
                archive.writestr(DOCUMENT, json.dumps(document, ensure_ascii=False))
                for image, content in images.items():
                    archive.writestr(f"{image}.png", content)
            self._entries[name] = _entry(path)
            self._forget_oldest()
        return name

    def replace(self, former: str, name: str) -> None:
        """Remove a set that another one contains, and hand its mark on."""
        if former in self._favourites:
            self.mark(name, favourite=True)
        self.remove(former)

    def _forget_oldest(self) -> None:
        # The newest stays even if it alone is too large: a person is waiting for it.
        newest = max(self._entries, key=int)
        usual = sorted(self._entries.keys() - self._favourites - {newest}, key=int)
        for name in usual:
            size = sum(entry.bytes for entry in self._entries.values())
            if len(self._entries) <= self.max_sets and size <= self.max_bytes:
                return
            self._remove(name)

    def remove(self, name: str) -> None:
        """Delete a set, if there is one of this name."""
        with self._lock:
            self._remove(name)

    def _remove(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry:
            entry.path.unlink(missing_ok=True)

    def read(self, name: str) -> dict[str, Any] | None:
        """Read a set's document; None if there is no such set."""
        try:
            return _document(self._entries[name].path)
        except (KeyError, ValueError):  # no such set; deleted by hand, or damaged
            return None

    def image(self, name: str, image: str) -> bytes | None:
        """Read an image of a set; None if there is no such image."""
        try:
            # Only listed names, so that a path cannot lead out of the folder.
            with _archive(self._entries[name].path) as archive:
                return _unpacked(archive, f"{image}.png", most=IMAGE_BYTES)
        except (KeyError, ValueError):
            return None

    def export(self, name: str, number: int) -> bytes | None:
        """Pack an image of a set as a zip for other programs; None if there is no such image.

        It contains the grid image, its panels, its recipe and scores, the base's image, and the sources of an edit.
        """
        document = self.read(name)
        if document is None or not 0 <= number < len(document["candidates"]):
            return None
        candidate = document["candidates"][number]

        # Images.
        grid = parse_layout(candidate["layout"])
        files: dict[str, bytes | None] = {"image.png": self.image(name, candidate["image"])}
        if candidate["base"]:
            files["base.png"] = self.image(name, candidate["base"]["image"])
        for source in document["sources"]:
            files[f"{source}.png"] = self.image(name, source)
        if files["image.png"] and grid.count > 1:
            panels = split(open_image(files["image.png"], name=f"set {name}, image {candidate['image']}"), grid)
            for position, panel in enumerate(panels, 1):
                files[f"panel-{position}.png"] = png_bytes(panel)

        # Recipe and scores.
        recipe = {}
        for key in ("recipe", "rank", "score", "matrix", "error"):
            recipe[key] = candidate[key]

        recipe |= {"of": len(document["candidates"]), "made": document["made"], "asked": document["asked"]}
        files["recipe.json"] = json.dumps(recipe, indent=2, ensure_ascii=False).encode()

        # Files that the history lacks are left out.
        archived = io.BytesIO()
        with zipfile.ZipFile(archived, "w") as archive:
            for file, content in files.items():
                if content is not None:
                    archive.writestr(file, content)
        return archived.getvalue()


def _entry(path: Path) -> Entry:
    """Read an entry; an unreadable file keeps its number, and is not shown."""
    try:
        document = _document(path)
        best = document["candidates"][0]
        image = best["image"]
        # A sheet is ordered by its lines; if no picture is the character, its original stands for the sheet.
        if document["kind"] == "sheet":
            best = max(document["candidates"], key=lambda candidate: candidate["score"] or 0)
            image = best["image"]
            if (best["score"] or 0) < LEAST_KEPT and document["sources"]:
                image = document["sources"][0]
        summary = {key: document[key] for key in ("kind", "theme", "made")}
        # Texts and lists of texts; numbers, such as the seed, are no words.
        words = [str(value) for value in document["asked"].values() if isinstance(value, str | list | dict)]
        summary["words"] = " ".join(words)[:WORDS]
        summary |= {"image": image, "score": best["score"], "count": len(document["candidates"])}
    except ValueError as fault:
        logger.warning("%s; this set is not shown", fault)
        summary = {}
    return Entry(path, path.lstat().st_size, summary)


def _document(path: Path) -> dict[str, Any]:
    """Read a set's document. Raises ValueError with the file's name if it is malformed."""
    with _archive(path) as archive:
        document = parse_object(_unpacked(archive, DOCUMENT, most=DOCUMENT_BYTES))
        typed(document, StoredSet)
        json.dumps(document, ensure_ascii=False).encode()  # half a character could not be sent to the page
    return document


def _unpacked(archive: zipfile.ZipFile, name: str, *, most: int) -> bytes:
    """Unpack a file of an archive. Raises ValueError if it has more than `most` bytes, KeyError if it is missing."""
    size = archive.getinfo(name).file_size  # zipfile unpacks no more than is stated here
    if size > most:
        raise ValueError(f"{name} has {size:,} bytes unpacked, and at most {most:,} are read")
    return archive.read(name)


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a set's file. Raises ValueError with its name for any damage, within the block too."""
    try:
        if not path.is_file():  # opening a pipe would wait for ever
            raise ValueError("not a regular file")
        with zipfile.ZipFile(path) as archive:
            yield archive
    except Exception as fault:  # zipfile raises any class: zlib.error, NotImplementedError, struct.error
        raise ValueError(f"{path}: damaged ({fault})") from None
