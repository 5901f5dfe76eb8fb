"""Leaks of evaluation data into training data: finding shared prompts, and splits without them.

Two prompts are equal if their texts differ only in case, spaces and punctuation. Two edits are equal if they start from
one image, whatever the instruction: GEdit-Bench has each of its edits in two languages. The released recipes train on
150 prompts of T2IS-Bench, and on most of GEdit-Bench. Therefore a benchmark also reads the training data of a run, and
reports figures with and without the shared items.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

from pacorl.core.batches import components
from pacorl.core.grid import shared_text
from pacorl.io.documents import read_jsonl, read_yaml
from pacorl.io.files import kept_digest
from pacorl.records.comparisons import comparisons_from
from pacorl.records.prompts import prompts_from
from pacorl.types import Prompt

Why = Literal["text", "image"]
WORDS = {"text": "the same text", "image": "the same image to edit"}
LEAKS = "leaks.txt"
"""File of a run with its warning about training prompts that it evaluates on."""
SHOWN = 3
"""Examples in a message."""
IDS = ("original_idx", "case_id")
"""Keys of a training record that name the benchmark's item it came from."""
QUOTED = re.compile(
    r"theme: \"((?:(?!theme: \").)+?)\", do the two|[Ii]nstruction:? '((?:(?![Ii]nstruction:? ').)+?)'(?:,|\. )",
    re.DOTALL,
)
"""The theme or instruction inside a judge's question (core/questions.py). Neither may hold its own beginning: a text of
nothing but beginnings would be searched to its end from each of them."""


@dataclass(frozen=True, slots=True)
class Leak:
    """A training prompt that equals an evaluation prompt."""

    prompt: Prompt
    other: Prompt
    """The evaluation prompt."""
    against: str
    """Source of the evaluation prompt."""
    why: Why


def find_leaks(train: Sequence[Prompt], against: Mapping[str, Sequence[Prompt]]) -> list[Leak]:
    """Find the training prompts that are also in `against` (name → prompts), each once, with the first reason."""
    leaks: dict[int, Leak] = {}
    for name, prompts in against.items():
        equals: dict[str, Prompt] = {}
        for prompt in prompts:
            for key in _keys(prompt):
                equals.setdefault(key, prompt)

        for position, prompt in enumerate(train):
            if position in leaks:
                continue
            same = [equals[key] for key in _keys(prompt) if key in equals]
            if same:
                leaks[position] = Leak(prompt, same[0], name, "image" if prompt.sources else "text")

    return [leaks[position] for position in sorted(leaks)]


def leak_report(leaks: Sequence[Leak], *, total: int) -> str:
    """Count the leaks per source and show the first few. Empty if there are none."""
    if not leaks:
        return ""

    counts = Counter((leak.against, leak.why) for leak in leaks)
    totals = "; ".join(f"{count} in {name} ({WORDS[why]})" for (name, why), count in counts.items())

    examples = []
    for leak in leaks[:SHOWN]:
        prompt = leak.prompt
        examples.append(f"training prompt {prompt.id} is {leak.against}'s {leak.other.id}: {prompt.text[:60]!r}")
    report = f"{len(leaks)} of {total} training prompts are measured on: {totals}"
    # If every prompt is measured on, the two sets are one, and examples would explain no more.
    if len(leaks) == total > 1:
        return report
    report += f". {'; '.join(examples)}"
    if len(leaks) > SHOWN:
        report += f" and {len(leaks) - SHOWN} more"
    return report


def check_leaks(
    train: Sequence[Prompt],
    evaluation: Sequence[Prompt],
    *,
    benchmarks: Mapping[str, Sequence[Prompt]],
    deliberate: bool,
) -> str:
    """Return the report of the leaks between a run's prompts; empty if there are none.

    Args:
        train: training prompts.
        evaluation: evaluation prompts.
        benchmarks: prompts of further benchmarks by name.
        deliberate: whether the evaluation's prompts are named as the training prompts themselves.

    Raises:
        ValueError: with the report and the fix, if there are leaks into a benchmark, or into other evaluation prompts.
    """
    against = {} if deliberate else {"prompts.evaluation": evaluation}
    report = leak_report(find_leaks(train, {**against, **benchmarks}), total=len(train))
    if report:
        raise ValueError(
            f"{report}. Split them with `pacorl data SOURCE --test N --out FOLDER`, or set prompts.evaluation to the "
            "training prompts, and nothing is held out"
        )
    if not deliberate:
        return ""
    seen = leak_report(find_leaks(train, {"prompts.evaluation": evaluation}), total=len(train))
    return f"{seen}; for unseen prompts give prompts.evaluation others, from Python pass evaluation_prompts="


def split_prompts(
    prompts: Sequence[Prompt],
    *,
    test: int,
    seed: int = 42,
    keep_out: Mapping[str, Sequence[Prompt]] | None = None,
) -> tuple[list[Prompt], list[Prompt], list[Leak]]:
    """Split prompts into training and test; prompts of one text or one image stay together.

    Args:
        test: minimum number of test prompts, drawn by `seed`.
        keep_out: prompts that belong to neither part.

    Returns:
        (training, test, leaks into `keep_out`), each in the order of `prompts`.

    Raises:
        ValueError: if no prompts are left for training.
    """
    # Keep out what is measured elsewhere, and group what belongs together.
    leaks = find_leaks(prompts, keep_out or {})
    # By identity: an id is a position in a file, and these prompts may come from several.
    dropped = {id(leak.prompt) for leak in leaks}
    kept = {id(prompt): prompt for prompt in prompts if id(prompt) not in dropped}
    families = components((name, key) for name, prompt in kept.items() for key in _keys(prompt))

    # Whole families, until there are enough.
    Random(seed).shuffle(families)
    held_out: set[int] = set()
    while families and len(held_out) < test:
        held_out.update(families.pop())
    if not families:
        raise ValueError(
            f"holding out {test} of {len(prompts)} prompts, {len(leaks)} kept out, leaves none to train on"
        )

    train = [prompt for name, prompt in kept.items() if name not in held_out]
    test_prompts = [prompt for name, prompt in kept.items() if name in held_out]
    return train, test_prompts, leaks


# --- training data of a run ------------------------------------------------------------------------------------


def id_text(name: str) -> str:
    """Format an item's id as one of its texts."""
    return f"id {name}"


def trained_on(texts: Mapping[str, Sequence[str]], run: Path) -> dict[str, str]:
    """Map each leaked item to the first text or id that it shares with the training data of a run's folder.

    Args:
        texts: item → its texts (`Benchmark.texts`).

    Raises:
        ValueError: if the folder or its training data is missing, since items must not count as clean unread.
    """
    learned = {plain(text) for text in _trained_texts(run)} - {""}

    # The first shared text is reason enough.
    shared = {}
    for item, item_texts in texts.items():
        for text in item_texts:
            if plain(text) in learned:
                shared[item] = text[:80]
                break
    return shared


def _trained_texts(run: Path) -> Iterator[str]:
    """Yield every text and id of the training data of a policy's or a judge's run."""
    try:
        config = read_yaml(run / "config.yaml")
    except ValueError as error:
        raise ValueError(f"{run} is no run's folder: {error}") from None
    if not isinstance(config, Mapping):
        config = {}
    prompts = config.get("prompts") or {}
    data = config.get("data") or {}

    # A policy was trained on prompts, a judge on comparisons.
    if "train" in prompts:
        read, sources = _prompt_texts, [prompts["train"]]
    else:
        read, sources = _comparison_texts, list(data.get("train") or [])
    if not sources:
        raise ValueError(f"{run / 'config.yaml'} names neither prompts.train nor data.train; name a training run")

    # A source that is gone would hide a leak.
    for source in sources:
        try:
            yield from read(str(source))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{run} was trained on {source}, which cannot be compared with the items: {error}"
            ) from None


def _prompt_texts(source: str) -> Iterator[str]:
    for prompt in prompts_from(source):
        yield from (prompt.text, prompt.theme, shared_text(prompt.text), *prompt.panels)
    if source.endswith(".jsonl"):
        for row in read_jsonl(Path(source)):
            for name in IDS:
                if row.get(name):
                    yield id_text(str(row[name]))


def _comparison_texts(source: str) -> Iterator[str]:
    for comparison in comparisons_from(source):
        for quotations in QUOTED.findall(comparison.question):
            yield from quotations


# --- sameness --------------------------------------------------------------------------------------------------


def _keys(prompt: Prompt) -> list[str]:
    """Return the keys of a prompt: the digests of an edit's images, else the text with its references' digests.

    Equal prompts share a key. Records of several characters may have one text, since their references show who acts.
    """
    if not prompt.sources:
        return [" ".join(["text", plain(prompt.text), *map(kept_digest, prompt.references)])]
    return [f"image {kept_digest(source)}" for source in prompt.sources]


def plain(text: str) -> str:
    """Normalise a text: case, spaces, punctuation and Unicode forms of a letter make no difference."""
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))
