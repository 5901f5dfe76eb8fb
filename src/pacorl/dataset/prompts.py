"""Write T2IS records (`pacorl dataset prompts`), balanced over a taxonomy.

A taxonomy (a YAML of categories, subcategories and the dimensions that a set must keep) yields orders, and a writer
turns an order into a record. `llm_writer` asks a language model; `tiny_writer` writes the prompts of the tiny world.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from pacorl.core.batches import grouped
from pacorl.dataset.llm import fill_journal
from pacorl.dataset.manifest import DatasetStep
from pacorl.io.documents import Journal, JsonObject, blamed_on, read_yaml, typed, write_jsonl
from pacorl.io.terminal import Progress, silent
from pacorl.judge.chat import ChatError, ChatModel
from pacorl.records.compose import compose
from pacorl.records.prompts import record_of
from pacorl.tiny.world import set_prompts
from pacorl.types import Grid, Size

Dimensions = Annotated[list[Literal["Style", "Identity", "Logic"]], Field(min_length=1)]
Taxonomy = Annotated[dict[str, Annotated[dict[str, Dimensions], Field(min_length=1)]], Field(min_length=1)]
PAPER = Path(__file__).with_name("taxonomy.yaml")
TINY = Path(__file__).with_name("taxonomy_tiny.yaml")
REMEMBERED_THEMES = 12
"""Number of a subcategory's latest themes in the request, which the model must not repeat."""
SIZE = Size(1024, 1024)


@dataclass(frozen=True, slots=True)
class Subject:
    """One subcategory of a taxonomy."""

    category: str
    name: str
    dimensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """Order of one prompt."""

    key: str
    number: int
    """Its position among all orders; names the record."""
    subject: Subject
    grid: Grid


Writer = Callable[[PromptOrder, Sequence[str]], JsonObject]
"""(order, existing themes of its subject) → a T2IS record without its idx. Raises ChatError without a usable answer."""


def read_taxonomy(path: Path = PAPER) -> list[Subject]:
    """Read the subjects of a taxonomy. Raises ValueError unless it is `category: {subcategory: [dimensions]}`."""
    document = read_yaml(path)
    with blamed_on(path):
        taxonomy = typed(document, Taxonomy)
    subjects = []
    for category, entries in taxonomy.items():
        subjects += [Subject(category, name, tuple(dimensions)) for name, dimensions in entries.items()]
    return subjects


def orders(subjects: Sequence[Subject], *, count: int, grid: Grid) -> list[PromptOrder]:
    """Plan `count` prompts: categories share equally, and subcategories within them."""
    # Subjects by category, in the order of the taxonomy.
    categories = list(grouped((subject.category, subject) for subject in subjects).values())

    planned: list[PromptOrder] = []
    for number in range(count):
        lap, category = divmod(number, len(categories))
        turn, position = divmod(lap, len(categories[category]))
        subject = categories[category][position]
        planned.append(PromptOrder(f"{subject.category}/{subject.name}/{turn}", number, subject, grid))
    return planned


Text = Annotated[str, Field(min_length=3, max_length=2000)]


class SetReply(BaseModel):
    """A language model's answer."""

    theme: Text
    """The request in a person's words."""
    shared: str = ""
    """Shared description of all panels."""
    panels: list[Text]
    criteria: dict[str, dict[str, Text]] = {}
    """dimension → name → the requirement over all panels."""


def llm_writer(model: ChatModel) -> Writer:
    """Writer that asks a language model for one record of a subject at a time."""

    def write(order: PromptOrder, themes: Sequence[str]) -> JsonObject:
        def check(reply: SetReply) -> None:
            if len(reply.panels) != order.grid.count:
                raise ValueError(f"exactly {order.grid.count} panels are needed, got {len(reply.panels)}")
            dimensions = order.subject.dimensions
            if set(reply.criteria) != set(dimensions) or not all(reply.criteria.values()):
                raise ValueError(f"criteria must be given for exactly {', '.join(dimensions)}")
            if reply.theme in themes:
                raise ValueError("this theme exists already")
            compose(reply.theme, reply.panels, order.grid, shared=reply.shared)  # refuses empty texts and panel tags

        messages = [{"role": "user", "content": request_text(order, themes)}]
        reply = model.ask_json(messages, SetReply, check=check)
        prompt = compose(reply.theme, reply.panels, order.grid, shared=reply.shared)
        return record_of(replace(prompt, size=SIZE, criteria=reply.criteria)) | _kind(order)

    return write


def request_text(order: PromptOrder, themes: Sequence[str]) -> str:
    """Request for one record."""
    subject = order.subject
    count = order.grid.count
    criteria = ", ".join(
        f'"{name}": {{"<short name>": "<what must hold in all images>"}}' for name in subject.dimensions
    )
    request = (
        f"Write one request for a set of {count} images that belong together.\n"
        f"Kind: {subject.category}, {subject.name}. What the set must keep: {', '.join(subject.dimensions)}.\n"
        "Be concrete and visual: name the subject, its looks, the style, the light. The panels must differ in what "
        "they show and agree in what they keep.\n"
        "Answer with one JSON object and nothing else:\n"
        '{"theme": "<the request in one or two sentences>", "shared": "<what all images have in common>", '
        f'"panels": [<exactly {count} texts, one per image>], "criteria": {{{criteria}}}}}\n'
        "Two or three criteria per dimension, each a full sentence."
    )
    if themes:
        request += "\nThese exist already; write something else:"
    # Only the latest: requests would grow with every record, and cost more each time.
    for theme in themes[-REMEMBERED_THEMES:]:
        request += f"\n- {theme}"
    return request


def tiny_writer(*, count: int, grid: Grid, seed: int = 0) -> Writer:
    """Writer of the tiny world's prompts, whose every panel the oracle can read."""
    # Draw all prompts at once: places take turns over the list.
    prompts = set_prompts("train", count, seed=seed, grid=grid)

    def write(order: PromptOrder, themes: Sequence[str]) -> JsonObject:
        return record_of(prompts[order.number]) | _kind(order)

    return write


def _kind(order: PromptOrder) -> JsonObject:
    return {"category": order.subject.category, "task_name": order.subject.name}


def write_all(
    folder: Path,
    writer: Writer,
    planned: Sequence[PromptOrder],
    *,
    options: JsonObject,
    seed: int = 0,
    workers: int = 1,
    progress: Progress = silent,
) -> JsonObject:
    """Fill prompts.jsonl with a record per order; a later call continues an interrupted one.

    Args:
        options: the writer's name and settings, for the manifest.

    Returns:
        The number of records, and order → fault of the `failed` records, which the next call tries again.
    """
    # Stop if the step is done.
    plan = {"count": len(planned), **options}
    step = DatasetStep(folder, "prompts", options=plan, seed=seed)
    finished = step.counts_if_done()
    if finished is not None:
        return finished

    # Themes so far, by subject, and the orders without a record.
    journal = Journal(folder / "manifests" / "prompts.journal.jsonl")
    failed: dict[str, str] = {}
    themes: dict[Subject, list[str]] = {}
    missing = []
    for order in planned:
        of_subject = themes.setdefault(order.subject, [])
        if order.key in journal:
            of_subject.append(journal.items[order.key]["record"]["theme"])
        else:
            missing.append(order)

    # Runs in a thread of the pool; only the main thread writes the journal.
    def write(order: PromptOrder) -> JsonObject | None:
        try:
            # Read the themes when a thread is free, so that all themes so far are excluded.
            record = writer(order, tuple(themes[order.subject]))
        except ChatError as error:
            failed[order.key] = str(error)
            return None
        themes[order.subject].append(record["theme"])
        return {"key": order.key, "record": record}

    fill_journal(journal, missing, write, workers=workers, progress=progress)

    # List all records in the order of the plan.
    written = []
    for order in planned:
        if order.key in journal:
            written.append(journal.items[order.key]["record"] | {"idx": f"{order.number:04d}"})
    write_jsonl(folder / "prompts.jsonl", written)

    counts = {"records": len(written), "failed": failed}
    # With failed records the step is not finished, so that the next call tries again.
    if failed:
        return counts
    return step.finish(outputs=[folder / "prompts.jsonl"], counts=counts)
