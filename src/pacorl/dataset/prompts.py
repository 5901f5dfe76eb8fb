"""Writes T2IS records, balanced over a taxonomy (`pacorl dataset prompts`).

A writer turns an order (subcategory, layout, number) into a record. `LlmWriter` asks a language model; `TinyWriter`
makes the prompts of the tiny world and needs no network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from pacorl.core.grid import panel_tags, panel_texts, parse_layout
from pacorl.data.characters import Split, character_prompts
from pacorl.dataset.llm import ChatError, ChatModel, estimate
from pacorl.dataset.manifest import DatasetStep, Progress, silent
from pacorl.dataset.taxonomy import PromptOrder, Subject, orders
from pacorl.io.documents import Journal, read_journal, write_jsonl
from pacorl.types import Grid

Record = dict[str, Any]
Writer = Callable[[PromptOrder, Sequence[str]], Record]
"""(order, themes that exist already) → a T2IS record without its idx. Raises ChatError if there is no usable answer."""

COUNT_WORDS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")
REMEMBERED_THEMES = 12
"""So many of a subcategory's themes are named to the model, as not to be repeated."""
TOKENS_PER_RECORD = (600, 900)
"""Of one record, prompt and completion, for the estimate of a dry run."""

Text = Annotated[str, Field(min_length=8, max_length=2000)]


class Draft(BaseModel):
    """The answer of a language model."""

    model_config = ConfigDict(extra="forbid")

    theme: Text
    """The instruction that a person would give."""
    shared: Text
    """What all panels have in common."""
    panels: list[Text]
    criteria: dict[str, dict[str, Text]]
    """dimension → name → what must hold over all panels."""


def compose(draft: Draft, order: PromptOrder) -> Record:
    """A draft as a T2IS record.

    Raises:
        ValueError: if the draft does not fit its order, or would be read back as something else.
    """
    grid, dimensions = order.grid, order.subject.dimensions
    if len(draft.panels) != grid.count:
        raise ValueError(f"a {grid} layout needs {grid.count} panels, got {len(draft.panels)}")
    if set(draft.criteria) != set(dimensions) or not all(draft.criteria.values()):
        raise ValueError(f"criteria must be given for exactly {', '.join(dimensions)}, got {sorted(draft.criteria)}")
    panels = [sentence(panel) for panel in draft.panels]
    tags = panel_tags(grid)
    tagged = " ".join(f"{tag}:{panel}" for tag, panel in zip(tags, panels, strict=True))
    word = COUNT_WORDS[grid.count] if grid.count < len(COUNT_WORDS) else str(grid.count)
    text = f"{word}-PANEL Images with a {grid} grid layout. {sentence(draft.shared)} {tagged}"
    # Readers find panels by their tags: a model's own capitals before a colon would be taken for one.
    if list(panel_texts(text)) != panels or parse_layout(text) != grid:
        raise ValueError("a text holds capitals before a colon after a sentence, which would be read as a panel's tag")
    return {
        "prompt": text,
        "height": 1024,
        "width": 1024,
        "layout": str(grid),
        "theme": draft.theme,
        "category": order.subject.category,
        "task_name": order.subject.name,
        "criteria": draft.criteria,
        "from": "Generated",
    }


def sentence(text: str) -> str:
    """The text on one line, ending as a sentence does."""
    line = " ".join(text.split())
    return line if line.endswith((".", '"', "!", "?")) else line + "."


class LlmWriter:
    """Asks a language model for one record at a time."""

    def __init__(self, model: ChatModel, *, attempts: int = 3) -> None:
        self.model, self.attempts = model, attempts
        self._taken: set[str] = set()
        self._lock = Lock()

    def __call__(self, order: PromptOrder, themes: Sequence[str]) -> Record:
        existing = {theme.casefold() for theme in themes}

        def check(draft: Draft) -> None:
            compose(draft, order)
            theme = draft.theme.casefold()
            with self._lock:  # another thread's answer may be the same
                if theme in existing | self._taken:
                    raise ValueError("this theme exists already")
                self._taken.add(theme)

        messages = [{"role": "user", "content": request_text(order, themes)}]
        return compose(self.model.ask_json(messages, Draft, check=check, attempts=self.attempts), order)


def request_text(order: PromptOrder, themes: Sequence[str]) -> str:
    """The request for one record."""
    subject, count = order.subject, order.grid.count
    dimensions = ", ".join(subject.dimensions)
    example = ", ".join(f'"{dimension}": {{"<short name>": "<what must hold>"}}' for dimension in subject.dimensions)
    avoid = "".join(f"\n- {theme}" for theme in themes[-REMEMBERED_THEMES:])
    return (
        f"Write one request for a set of {count} images that belong together.\n"
        f"Kind: {subject.category}, {subject.name}. What the set must keep: {dimensions}.\n"
        "Be concrete and visual: name the subject, its looks, the style, the light. The panels must differ in what "
        "they show and agree in what they keep.\n"
        f"Answer with one JSON object and nothing else:\n"
        f'{{"theme": "<the request in one or two sentences>", "shared": "<what all images have in common>", '
        f'"panels": [<exactly {count} texts, one per image>], "criteria": {{{example}}}}}\n'
        "Two or three criteria per dimension, each a full sentence."
        + (f"\nThese exist already; write something else:{avoid}" if avoid else "")
    )


class TinyWriter:
    """Prompts of the tiny world; the oracle can read every panel."""

    def __init__(self, *, count: int, split: Split = "train", seed: int = 0) -> None:
        self._count, self._split, self._seed = count, split, seed
        self._records_of: dict[Grid, list[Record]] = {}

    def __call__(self, order: PromptOrder, themes: Sequence[str]) -> Record:
        subject = {"category": order.subject.category, "task_name": order.subject.name}
        return self._of(order.grid)[order.number] | subject

    def _of(self, grid: Grid) -> list[Record]:
        if grid not in self._records_of:
            written = character_prompts(self._split, self._count, seed=self._seed, grid=grid)
            self._records_of[grid] = [
                {
                    "prompt": prompt.text,
                    "layout": str(grid),
                    "theme": prompt.theme,
                    "criteria": {dimension: dict(texts) for dimension, texts in prompt.criteria.items()},
                    "from": "Tiny",
                }
                for prompt in written
            ]
        return self._records_of[grid]


def make_writer(name: str, *, count: int, seed: int, chat: ChatModel | None) -> Writer:
    """The writer of a name: `llm`, which needs `chat`, or `tiny`.

    Raises:
        ValueError: for another name, or if no language model is named.
    """
    if name == "tiny":
        return TinyWriter(count=count, seed=seed)
    if name != "llm":
        raise ValueError(f"unknown writer {name!r}; there are llm and tiny")
    if chat is not None and not chat.model:
        raise ValueError("no language model is named; give --model, and --endpoint unless it is the client's default")
    return LlmWriter(chat or ChatModel(""))


def write_all(
    folder: Path,
    writer: Writer,
    *,
    subjects: Sequence[Subject],
    count: int,
    grids: Sequence[Grid],
    options: Mapping[str, Any],
    seed: int = 0,
    workers: int = 1,
    tokens: tuple[int, int] = TOKENS_PER_RECORD,
    price: tuple[float, float] = (0.0, 0.0),
    dry_run: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Fills prompts.jsonl with `count` records, going on where an earlier call stopped.

    A record that could not be written is reported under `failed` and tried again by the next call; no written record
    is lost.

    Args:
        options: names the writer in the manifest.
        tokens: of one record, prompt and completion, for the estimate of a dry run.
        price: per million of them.

    Returns:
        How many records there are, and how many of each category.

    Raises:
        ChatRefusedError: at once, if the server answers no request at all.
    """
    planned = orders(subjects, count=count, grids=grids)
    plan = {"count": count, "grids": [str(grid) for grid in grids], **options}
    step = DatasetStep(folder, "prompts", options=plan, seed=seed)
    finished = step.counts_if_done()
    if finished is not None:
        return finished
    path = folder / "manifests" / "prompts.journal.jsonl"
    if dry_run:
        done = read_journal(path)
        missing = sum(order.key not in done for order in planned)
        return {"records": count, "to_write": missing, "estimate": estimate(missing, tokens, price)}
    journal = Journal(path)
    failed = _write_missing(writer, planned, journal, workers=workers, progress=progress)
    rows = [
        {"idx": f"{order.number:04d}", **journal.items[order.key]["record"]}
        for order in planned
        if order.key in journal
    ]
    write_jsonl(folder / "prompts.jsonl", rows)
    counts = {"records": len(rows), "failed": failed, "by_category": _by_category(rows)}
    return counts if failed else step.finish(outputs=[folder / "prompts.jsonl"], counts=counts)


def _write_missing(
    writer: Writer, planned: Sequence[PromptOrder], journal: Journal, *, workers: int, progress: Progress
) -> dict[str, str]:
    """Writes the records that the journal lacks; returns key → fault of those that could not be written."""
    failed: dict[str, str] = {}
    themes: dict[Subject, list[str]] = {}
    for order in planned:
        if order.key in journal:
            themes.setdefault(order.subject, []).append(journal.items[order.key]["record"]["theme"])
    missing = [order for order in planned if order.key not in journal]

    def write(order: PromptOrder) -> Record:
        earlier = themes.setdefault(order.subject, [])
        record = writer(order, tuple(earlier))  # read when a thread is free, so that it holds all themes so far
        earlier.append(record["theme"])
        return record

    with ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(write, order): order for order in missing}
        try:
            for done, future in enumerate(as_completed(running), 1):
                order = running[future]
                try:
                    record = future.result()
                except ChatError as error:
                    failed[order.key] = str(error)
                else:
                    journal.add({"key": order.key, "record": record})
                progress(done, len(missing))
        except BaseException:
            # A refused key or Ctrl-C: requests that wait would each cost time and money for nothing.
            pool.shutdown(cancel_futures=True)
            raise
    return failed


def _by_category(rows: Sequence[Record]) -> dict[str, int]:
    names = [row["category"] for row in rows]
    return {name: names.count(name) for name in sorted(set(names))}
