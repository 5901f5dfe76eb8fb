"""Was a run trained on what a benchmark asks? Its config names the data; texts and ids are compared.

The released recipes train on 150 prompts of T2IS-Bench and on most of GEdit-Bench, so this is worth a look: leaked
items are named, and the figures are given with and without them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pacorl.core.grid import shared_text
from pacorl.data.comparisons import comparisons_from
from pacorl.data.files import read_jsonl
from pacorl.data.records import prompts_from

IDS = ("original_idx", "case_id")
"""Keys of a training record that name the benchmark's item it came from."""

QUOTED = re.compile(r"theme: \"(.+?)\", do the two|[Ii]nstruction:? '(.+?)'(?:,|\. )", re.DOTALL)
"""The theme or instruction inside a judge's question (core/questions.py)."""


def id_text(name: str) -> str:
    """An item's id as one of its texts."""
    return f"id {name}"


def leaks(texts: Mapping[str, Sequence[str]], run: Path) -> dict[str, str]:
    """Item → the text or id that it shares with the training data of a run's folder.

    texts: item → its texts (`Benchmark.texts`). Raises ValueError where the folder, or the data that its config
    names, is not there: what cannot be compared must not count as clean.
    """
    known = {_plain(text) for text in trained_texts(run)} - {""}
    found = {item: [text for text in own if _plain(text) in known] for item, own in texts.items()}
    return {item: shared[0][:80] for item, shared in found.items() if shared}


def trained_texts(run: Path) -> Iterator[str]:
    """Every text and id of the data that a policy's or a judge's run was trained on."""
    config = _config(run)
    prompts, data = (config.get(section) or {} for section in ("prompts", "data"))
    sources = [prompts["train"]] if "train" in prompts else list(data.get("train") or [])
    if not sources:
        raise ValueError(f"{run / 'config.yaml'} names neither prompts.train nor data.train; name a training run")
    for source in sources:
        try:
            yield from _prompt_texts(str(source)) if "train" in prompts else _comparison_texts(source)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{run} was trained on {source}, which cannot be compared with the items: {error}"
            ) from None


def _config(run: Path) -> Mapping[str, Any]:
    path = run / "config.yaml"
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{run} is no run's folder: {' '.join(str(error).split())}") from None
    return document if isinstance(document, Mapping) else {}


def _prompt_texts(source: str) -> Iterator[str]:
    for prompt in prompts_from(source):
        yield from (prompt.text, prompt.theme, shared_text(prompt.text), *prompt.panels)
    if source.endswith(".jsonl"):
        for row in read_jsonl(Path(source)):
            yield from (id_text(str(row[name])) for name in IDS if row.get(name))


def _comparison_texts(source: Any) -> Iterator[str]:
    for comparison in comparisons_from(str(source)):
        yield from (text for found in QUOTED.findall(comparison.question) for text in found)


def _plain(text: str) -> str:
    """Without what does not make two texts different: case, spaces, a full stop at the end."""
    return " ".join(text.casefold().split()).rstrip(".")
