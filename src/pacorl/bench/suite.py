"""Benchmarks in general: items with keys, raw results of them, and tables of figures with the paper's rows.

A measured row of a table has intervals; a row copied from the paper is marked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from pacorl.bench.options import GENERATOR, BenchmarkOptions
from pacorl.core.ranking import Floats, Indices, Interval
from pacorl.generate.image_queue import ImageJob, ImageSource, Shard, generate_missing, image_source
from pacorl.io.documents import JsonObject, read_object
from pacorl.io.files import inside, text_digest
from pacorl.io.images import open_image
from pacorl.io.terminal import Progress
from pacorl.judge.judge import Judge
from pacorl.judge.pairwise import ask_each, errors_of
from pacorl.records.fields import by_key
from pacorl.records.prompts import evenly_spread
from pacorl.report.html import render
from pacorl.types import Question

if TYPE_CHECKING:
    from PIL.Image import Image

Item = TypeVar("Item")
Row = dict[str, Any]
"""Raw result of one item: `key` and the judgements, or `error` with the reason why there are none."""
Texts = Mapping[str, Sequence[str]]
"""Item in order → its texts and ids."""
PUBLISHED = Path(__file__).with_name("published.json")
INTERVALS = "Intervals are 95 %, bootstrapped over {}; fewer than eight have none."
"""Note of a table, to be completed by what is drawn."""


class PaperTable(NamedTuple):
    """Table printed in a paper."""

    source: str
    """Citation, e.g. `arXiv 2512.04784, Tab. 2`."""
    rows: Mapping[str, Sequence[float | None]]
    """Name → one figure per column, or fewer if the last columns are ours alone."""
    items: int = 0
    """Number of items of the published data, of one language if there are two."""


NO_PAPER = PaperTable("", {})


def paper_table(name: str) -> PaperTable:
    """Read a table of published.json."""
    table = read_object(PUBLISHED)[name]
    return PaperTable(table["source"], table["rows"], table["items"])


@dataclass(frozen=True, slots=True)
class Line:
    """Row of a table."""

    name: str
    cells: Sequence[Interval]
    """Figures; NaN if there is none."""
    published: bool = False
    """Whether it is copied from the paper."""

    @property
    def texts(self) -> list[str]:
        """Printed cells, such as `0.449 (0.431 to 0.467)`; – if there is no figure."""
        return ["–" if isnan(cell.mean) else cell.text() for cell in self.cells]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns."""

    title: str
    columns: Sequence[str]
    notes: Sequence[str] = ()
    lines: Sequence[Line] = ()

    @property
    def markdown(self) -> str:
        """A heading, a GitHub-flavoured table and its notes."""
        return render("benchmark.md", table=self).rstrip()

    def to_dict(self) -> JsonObject:
        """Table for programs."""
        # Figures under the columns' names, since a list of numbers could be misread.
        rows = []
        for line in self.lines:
            values = {name: cell.document() for name, cell in zip(self.columns, line.cells, strict=True)}
            rows.append({"name": line.name, "published": line.published, "values": values})
        return {"title": self.title, "rows": rows, "notes": self.notes}


class ImageCache:
    """Images of one folder, each opened once: a judge recognises equal images by their identity."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[str, Image] = {}

    def open(self, name: str) -> Image:
        """Open an image by name. Raises ValueError naming the file if it cannot be used."""
        if name not in self._opened:
            self._opened[name] = open_image(inside(self.folder, name))  # names in the data are untrusted input
        return self._opened[name]


class Benchmark(ABC, Generic[Item]):
    """Items of published data, a measurement of each, and figures over many.

    A subclass is an entry of `BENCHMARKS`.

    Example:
        class PairAccuracy(Benchmark[Pair]):
            name = "pairs"
            table = Table("Pairs", ("Accuracy",), notes=(INTERVALS.format("prompts"),))

            def read(self, source): …                    # the published data
            def texts(self): …                           # of each item
            def questions(self, key, images, judge): …   # about an item
            def score(self, key, p_yes, images): …       # the contents of its row
            def figures(self, rows): …                   # an interval per column
    """

    name: ClassVar[str]
    """Key in `BENCHMARKS`, and in the settings of a run."""
    table: ClassVar[Table]
    """The table, without lines."""
    paper: ClassVar[PaperTable] = NO_PAPER
    """Published rows for comparison."""
    takes: ClassVar[tuple[str, ...]] = ()
    """Further options: of `GENERATOR`, or the benchmark's own."""
    all_spellings: ClassVar[bool] = False
    """Whether P(Yes) sums every spelling of Yes and of No."""
    batch: ClassVar[int] = 16
    """Items per call of the judge."""

    def __init__(self, source: Path, options: BenchmarkOptions) -> None:
        """Read the published data, before anything heavy is loaded.

        Raises:
            ValueError: if they cannot be used, or there are none.
        """
        self.options = options
        self.out = options.out or Path("runs") / "bench" / self.name
        """Folder of the run."""
        file, items = self.read(source)
        all_items = by_key(items, attrgetter("key"), source=file)
        if not all_items:
            raise ValueError(f"{file} holds no records")
        self.items: Mapping[str, Item] = dict(evenly_spread(list(all_items.items()), options.limit))
        """The selected items by key, in order."""
        self.total = len(all_items)
        """Number of items, whatever the limit."""
        self.folder = file.parent
        """Folder of the data."""
        # The content and not the path: results stay valid if the data are moved. All of it: a limit may be raised.
        self.fingerprint = text_digest(repr(items))[:16]

    @property
    def images(self) -> Path:
        """Folder of the images that are asked about."""
        return self.folder

    def settings(self, judge: str) -> JsonObject:
        """Inputs of the results, as JSON: the data, the judge by its name, the questions."""
        return {"benchmark": self.name, "data": self.fingerprint, "judge": judge}

    @abstractmethod
    def read(self, source: Path) -> tuple[Path, Sequence[Item]]:
        """Read and check the data: the file of the items, beside their images, and the items, each with a `key`.

        Raises:
            ValueError: naming the file and line of a fault.
        """

    @abstractmethod
    def texts(self) -> Texts:
        """Item in order → its texts and ids, which are looked up in a model's training data."""

    def measure(self, keys: Sequence[str], judge: Judge) -> list[Row]:
        """Measure one row per item, in order, with all questions in one call of the judge.

        Raises:
            ValueError: if the data of one cannot be used.
        """
        images = ImageCache(self.images)
        questions_of_items = [self.questions(key, images, judge) for key in keys]
        rows: list[Row] = []
        for key, answers in zip(keys, ask_each(judge, questions_of_items), strict=True):
            p_yes = {name: verdict.p_yes for name, verdict in answers.items() if verdict.p_yes is not None}
            # A score of fewer answers would not be comparable.
            if len(p_yes) < len(answers):
                rows.append({"key": key, "error": errors_of(answers.values()) or "no answer"})
            else:
                rows.append({"key": key} | self.score(key, p_yes, images))
        return rows

    def questions(self, key: str, images: ImageCache, judge: Judge) -> Mapping[Any, Question]:
        """Build the questions about an item, under keys of any type, by which `score` gets the answers."""
        raise NotImplementedError

    def score(self, key: str, p_yes: Mapping[Any, float], images: ImageCache) -> Row:
        """Compute the contents of an item's row from the answers to its questions."""
        raise NotImplementedError

    @abstractmethod
    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        """Compute the columns from the rows of measured items."""


class ImageBenchmark(Benchmark[Item]):
    """Benchmark of a generator's images, or of finished ones."""

    takes: ClassVar[tuple[str, ...]] = GENERATOR
    edits: ClassVar[bool]
    """Whether the generator edits images, or makes sets."""
    images_in: ClassVar[str] = ""
    """Subfolder of a run with the measured images."""

    @property
    def images(self) -> Path:
        return self.options.images or self.out / self.images_in

    @property
    def source(self) -> ImageSource:
        """The generator, without loading it."""
        options = self.options
        return image_source(options, edits=self.edits, memory=options.memory, batch=options.image_batch)

    def settings(self, judge: str) -> JsonObject:
        # What changes the images; of finished ones, their folder.
        images: JsonObject = {"images": str(self.options.images)}
        if not self.options.images:
            images = {**self.source.generator, "seed": self.options.seed}
        return super().settings(judge) | {"images": images}

    @abstractmethod
    def jobs(self) -> list[ImageJob]:
        """List the images to generate."""

    def save_panels(self, job: ImageJob, image: Image) -> None:
        """Write the panels that are measured, if an image is cut."""

    def generate(self, shard: Shard, progress: Progress) -> None:
        """Generate a share's images that the run's folder lacks."""
        generate_missing(
            self.jobs(), self.out, self.source, shard=shard, save_panels=self.save_panels, progress=progress
        )


def macro_means(
    values_NK: Floats, groups: Sequence[str], column_N: Indices, *, columns: int
) -> Callable[[Indices], Floats]:
    """Prepare averages of values per group and column, and then over the groups that have any.

    Args:
        values_NK: K values of each item.
        groups: Group of each item, such as its task type.
        column_N: Column of each item, such as its dimension.

    Returns:
        A function of indices of items, with repetition: their (K, columns) means; NaN for a column without items.
    """
    # Numbers instead of names: an interval computes the means 2,000 times.
    names, group_N = np.unique(groups, return_inverse=True)
    shape = (len(names), columns)
    cell_N = group_N * columns + column_N

    def means(drawn: Indices) -> Floats:
        cell_D = cell_N[drawn]
        size = shape[0] * shape[1]
        count = np.bincount(cell_D, minlength=size).reshape(shape)
        sums = [np.bincount(cell_D, value_D, size).reshape(shape) for value_D in values_NK[drawn].T]
        # A draw may lack a group, and even a column.
        with np.errstate(invalid="ignore"):
            return np.asarray((np.array(sums) / np.maximum(count, 1)).sum(1) / (count > 0).sum(0))

    return means
