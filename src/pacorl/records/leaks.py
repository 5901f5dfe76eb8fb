"""Keeping what a run is measured on out of what it is trained on: finding shared prompts, and splits without them.

Two prompts are one if their texts differ only in case, spaces and punctuation, or, on request, if they share
most of their word triples. Two edits are one if they start from one image, whatever the instruction: GEdit-Bench
asks for each of its edits in two languages. The released recipes train on 150 prompts of T2IS-Bench, and on most of
GEdit-Bench; so a benchmark also looks at what a run was trained on, and gives its figures with and without that.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pacorl.core.grid import shared_text
from pacorl.io.documents import read_jsonl, read_yaml
from pacorl.io.files import digest
from pacorl.records.comparisons import comparisons_from
from pacorl.records.prompts import prompts_from
from pacorl.types import Prompt

Why = Literal["text", "near", "image"]
WORDS = {"text": "the same text", "near": "nearly the same text", "image": "the same image to edit"}
SHOWN = 3
"""How many examples a message gives."""
SHINGLE = 3
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
    """A training prompt that is also measured on."""

    prompt: Prompt
    other: Prompt
    against: str
    """Where the other one comes from."""
    why: Why


def find_leaks(
    train: Sequence[Prompt], against: Mapping[str, Sequence[Prompt]], *, near: float | None = None
) -> list[Leak]:
    """The training prompts that are also in `against` (name → prompts), each once, with the first reason.

    near: the share of word triples (Jaccard) from which two texts are nearly the same; None for equal ones only.
    """
    leaks: dict[int, Leak] = {}
    for name, prompts in against.items():
        # Backwards, so that the first prompt of a key stays.
        equals = {key: prompt for prompt in reversed(prompts) for key in _keys(prompt)}
        resembling = _Resembling(prompts, near) if near is not None else None
        for position, prompt in enumerate(train):
            if position in leaks:
                continue
            if equal := next((equals[key] for key in _keys(prompt) if key in equals), None):
                leaks[position] = Leak(prompt, equal, name, "image" if prompt.sources else "text")
            elif resembling and not prompt.sources and (nearest := resembling.nearest(prompt)):
                leaks[position] = Leak(prompt, nearest, name, "near")
    return [leaks[position] for position in sorted(leaks)]


def leak_report(leaks: Sequence[Leak], *, total: int) -> str:
    """How many training prompts leak, into what, and the first few. Empty if none does."""
    if not leaks:
        return ""
    counts = Counter((leak.against, leak.why) for leak in leaks)
    totals = "; ".join(f"{count} in {name} ({WORDS[why]})" for (name, why), count in counts.items())
    examples = "; ".join(
        f"training prompt {leak.prompt.id} is {leak.against}'s {leak.other.id}: {leak.prompt.text[:60]!r}"
        for leak in leaks[:SHOWN]
    )
    more = f" and {len(leaks) - SHOWN} more" if len(leaks) > SHOWN else ""
    return f"{len(leaks)} of {total} training prompts are measured on: {totals}. {examples}{more}"


def check_leaks(
    train: Sequence[Prompt],
    evaluation: Sequence[Prompt],
    *,
    benchmarks: Mapping[str, Sequence[Prompt]],
    action: Literal["refuse", "warn", "off"],
    near: float | None = None,
) -> str:
    """What a run should be told about its prompts; empty if none leaks.

    Raises ValueError with the report and the fix if one does and `action` is "refuse".
    """
    if action == "off":
        return ""
    against = {"prompts.evaluation": evaluation, **benchmarks}
    report = leak_report(find_leaks(train, against, near=near), total=len(train))
    if report and action == "refuse":
        raise ValueError(
            f"{report}. Split them with `pacorl prompts split`, or go on with prompts.leaks=warn: what is measured is "
            "then partly what was trained on"
        )
    return report


def split_prompts(
    prompts: Sequence[Prompt],
    *,
    test: int,
    seed: int = 42,
    keep_out: Mapping[str, Sequence[Prompt]] | None = None,
    near: float | None = None,
) -> tuple[list[Prompt], list[Prompt], list[Leak]]:
    """(training, test, what was kept out). Prompts of one text or one image go to one side, together.

    test: about how many prompts to hold out, drawn by `seed`; the last family drawn may exceed it. What `keep_out`
    holds goes to neither side. Raises ValueError if nothing would be left to train on.
    """
    leaks = find_leaks(prompts, keep_out or {}, near=near)
    # By identity: an id is a position in a file, and these prompts may come from several.
    dropped = {id(leak.prompt) for leak in leaks}
    families = _families([prompt for prompt in prompts if id(prompt) not in dropped])
    random.Random(seed).shuffle(families)
    held_out: list[Prompt] = []
    while families and len(held_out) < test:
        held_out += families.pop()
    if not families:
        raise ValueError(
            f"holding out {test} of {len(prompts)} prompts, {len(leaks)} kept out, leaves none to train on"
        )
    position = {id(prompt): index for index, prompt in enumerate(prompts)}
    train, test_prompts = (
        sorted(side, key=lambda prompt: position[id(prompt)])
        for side in ([prompt for family in families for prompt in family], held_out)
    )
    return train, test_prompts, leaks


# --- what a run was trained on ---------------------------------------------------------------------------------


def id_text(name: str) -> str:
    """An item's id as one of its texts."""
    return f"id {name}"


def trained_on(texts: Mapping[str, Sequence[str]], run: Path) -> dict[str, str]:
    """Item → the text or id that it shares with the training data of a run's folder.

    texts: item → its texts (`Benchmark.texts`). Raises ValueError if the folder, or the data that its config
    names, is not there: what cannot be compared must not count as clean.
    """
    learned = {plain(text) for text in _trained_texts(run)} - {""}

    shared = {}
    for item, of_item in texts.items():
        shared[item] = next((text for text in of_item if plain(text) in learned), "")

    return {item: text[:80] for item, text in shared.items() if text}


def _trained_texts(run: Path) -> Iterator[str]:
    """Every text and id of the data that a policy's or a judge's run was trained on."""
    try:
        config = read_yaml(run / "config.yaml")
    except ValueError as error:
        raise ValueError(f"{run} is no run's folder: {error}") from None
    prompts, data = ((config if isinstance(config, Mapping) else {}).get(key) or {} for key in ("prompts", "data"))
    sources = [prompts["train"]] if "train" in prompts else list(data.get("train") or [])
    if not sources:
        raise ValueError(f"{run / 'config.yaml'} names neither prompts.train nor data.train; name a training run")
    for source in map(str, sources):
        try:
            yield from _prompt_texts(source) if "train" in prompts else _comparison_texts(source)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{run} was trained on {source}, which cannot be compared with the items: {error}"
            ) from None


def _prompt_texts(source: str) -> Iterator[str]:
    for prompt in prompts_from(source):
        yield from (prompt.text, prompt.theme, shared_text(prompt.text), *prompt.panels)
    if source.endswith(".jsonl"):
        for row in read_jsonl(Path(source)):
            yield from (id_text(str(row[name])) for name in IDS if row.get(name))


def _comparison_texts(source: str) -> Iterator[str]:
    for comparison in comparisons_from(source):
        for quotations in QUOTED.findall(comparison.question):
            yield from quotations


# --- sameness --------------------------------------------------------------------------------------------------


def _keys(prompt: Prompt) -> list[str]:
    """What makes two prompts one: an edit's images, else the text."""
    return [f"image {digest(source)}" for source in prompt.sources] or [f"text {plain(prompt.text)}"]


def _families(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Prompts that share a key, directly or through others, in order of their first member."""
    family_of: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        # One edit of two sources joins the families of both.
        joined = {}
        for key in _keys(prompt):
            if key in family_of:
                joined[id(family_of[key])] = family_of[key]

        family = [member for members in joined.values() for member in members] + [prompt]
        for member in family:
            family_of.update(dict.fromkeys(_keys(member), family))
    return list({id(family_of[_keys(prompt)[0]]): family_of[_keys(prompt)[0]] for prompt in prompts}.values())


def plain(text: str) -> str:
    """A text without what does not make it another one: case, spaces, punctuation, ways to encode a letter."""
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


class _Resembling:
    """Finds the prompt that shares most word triples with another, by an index of them."""

    def __init__(self, prompts: Sequence[Prompt], least: float) -> None:
        self.prompts = prompts
        self.least = least
        self.shingles = [_shingles(prompt.text) for prompt in prompts]
        self.holders: dict[str, list[int]] = defaultdict(list)
        for number, shingles in enumerate(self.shingles):
            for shingle in shingles:
                self.holders[shingle].append(number)

    def nearest(self, prompt: Prompt) -> Prompt | None:
        """The nearest one, if it shares at least the least share."""
        shingles = _shingles(prompt.text)
        shared = Counter(number for shingle in shingles for number in self.holders.get(shingle, ()))
        # Negated, so that of equal shares the first prompt is the greatest pair.
        shares = [(count / len(shingles | self.shingles[number]), -number) for number, count in shared.items()]
        best, number = max(shares, default=(0.0, 0))
        return self.prompts[-number] if best >= self.least else None


def _shingles(text: str) -> set[str]:
    words = plain(text).split()
    return {" ".join(words[start : start + SHINGLE]) for start in range(max(len(words) - SHINGLE + 1, 1))}
