"""Files of whole sets, from which a set judge is distilled.

    sets = panel_sets_from("sets.jsonl")

A source is a FILE.jsonl of one set a line, or `tiny:train|dev|test`, drawn on demand, with a count as in `tiny:dev:40`:

    {"images": ["1.png", "2.png", "3.png", "4.png"], "question": "Given two subfigures …"}

The images are the panels, relative to the file; the question is put about every pair of them. Sets of one question are
compared with one another, as the samples of a prompt are. `p_yes`, if given, is the pair judge's P(Yes) by the numbers
of its first and its second image; without it, the pair judge is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import permutations
from pathlib import Path
from random import Random

from pacorl.core.grid import shared_text
from pacorl.core.questions import same_theme, text_fault
from pacorl.io.documents import JsonObject, check_keys, read_records, text_field, typed, write_jsonl
from pacorl.io.files import make_folder, write_atomic
from pacorl.io.images import png_bytes
from pacorl.records.comparisons import check_images, image_paths
from pacorl.records.prompts import TINY, TINY_COUNTS, evenly_spread, tiny_source
from pacorl.tiny import characters
from pacorl.tiny.characters import Split
from pacorl.types import PanelSet

SOURCES = "a .jsonl of sets, or tiny:train|dev|test"
KEYS = ("images", "question", "p_yes")
TINY_COUNT = 200
"""Default number of sets of a split of the tiny world."""
TINY_SIDE = 32
"""Pixels of a drawn panel, as the tiny recipe samples them in training."""
TINY_GROUP = 8
"""Drawn sets per question."""
CHANCES = (0.0, 0.05, 0.1, 0.2, 0.3)
"""Chances that a drawn set changes an attribute of a panel."""


def panel_sets_from(source: str, *, limit: int | None = None, scratch: Path | None = None) -> list[PanelSet]:
    """Read the sets of a source, at most `limit` of them, evenly spread.

    Args:
        limit: Maximum number of sets.
        scratch: Folder in which sets of the tiny world are drawn.

    Raises:
        ValueError: naming file, line, fault and fix, or the missing images.
    """
    if source.startswith(TINY):
        split, count = tiny_source(source, counts=dict.fromkeys(TINY_COUNTS, TINY_COUNT))
        assert scratch is not None, "sets of the tiny world are drawn into files, which need a folder"
        path = scratch / f"tiny-sets-{split}-{count}" / "sets.jsonl"
        # Drawn once: several sources of a config may name the same sets.
        if not path.is_file():
            draw_sets(path, split=split, count=count)
    elif Path(source).suffix.lower() != ".jsonl":
        raise ValueError(f"{source}: no such source of sets; give {SOURCES}")
    else:
        path = Path(source)

    sets = read_records(path, partial(_panel_set, folder=path.parent), kind="set", fix=f"give {SOURCES}")
    if not sets:
        raise ValueError(f"{source}: holds no sets; give {SOURCES}")
    check_images(sets, source=source)
    return evenly_spread(sets, limit, source=source)


def _panel_set(record: JsonObject, folder: Path) -> PanelSet:
    if "consistent" in record:
        raise ValueError("this is a comparison, which form=pair learns from; form=set takes whole sets")
    check_keys(record, KEYS)
    images = image_paths(record.get("images"), folder)
    if len(images) < 2:
        raise ValueError(f"'images' must name at least two panels, got {len(images)}")
    question = text_field(record, "question")
    fault = text_fault(question) if question.strip() else "'question' is missing or empty; give the question"
    if fault:
        raise ValueError(fault)

    p_yes = typed(record.get("p_yes", ()), tuple[tuple[float | None, ...], ...])
    if p_yes and not _are_scores(p_yes, len(images)):
        raise ValueError(f"'p_yes' must be {len(images)} rows of as many probabilities, null on the diagonal")
    return PanelSet(images, question, p_yes)


def _are_scores(p_yes: Sequence[Sequence[float | None]], panels: int) -> bool:
    """Check that each ordered pair of panels has a probability."""
    if [len(row) for row in p_yes] != [panels] * panels:
        return False
    values = [p_yes[first][second] for first, second in permutations(range(panels), 2)]
    return all(value is not None and 0 <= value <= 1 for value in values)


def draw_sets(path: Path, *, split: Split, count: int) -> None:
    """Draw sets of the tiny world, of which some panels differ in what they should share, and write their file."""
    rng = Random(f"sets-{split}")
    make_folder(path.parent)
    rows: list[JsonObject] = []
    for prompt in characters.character_prompts(split, -(-count // TINY_GROUP), seed=1):
        described = [characters.Panel.parse(text) for text in prompt.panels]
        for _ in range(min(TINY_GROUP, count - len(rows))):
            shown = characters.redrawn(described, chance=rng.choice(CHANCES), rng=rng)
            names = [f"{len(rows):05d}-{panel}.png" for panel in range(len(shown))]
            for name, panel in zip(names, shown, strict=True):
                write_atomic(path.parent / name, png_bytes(characters.draw(panel, TINY_SIDE)))
            rows.append({"images": names, "question": same_theme(shared_text(prompt.text))})
    write_jsonl(path, rows)  # last: an existing file is whole
