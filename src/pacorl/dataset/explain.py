"""Reasons for labelled pairs by a vision-language model that sees the label (`pacorl dataset explain`).

The judge learns to answer Yes or No and then why. An explanation for the other label is flagged and left out; the next
call tries failed pairs again.
"""

import base64
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from pacorl.dataset.export import label
from pacorl.dataset.llm import fill_journal
from pacorl.dataset.rules import pair_key
from pacorl.io.documents import Journal, JsonObject
from pacorl.io.images import open_image, png_bytes
from pacorl.io.terminal import Progress, silent
from pacorl.judge.chat import ChatError, ChatModel
from pacorl.types import Comparison

DIMENSIONS = ("style", "identity", "logic")


class Explanation(BaseModel):
    """The answer of the model."""

    answer: Literal["Yes", "No"]
    style: str = Field(min_length=8, max_length=1000)
    identity: str = Field(min_length=8, max_length=1000)
    logic: str = Field(min_length=8, max_length=1000)

    @property
    def reasons(self) -> str:
        return " ".join(f"{name.capitalize()}: {' '.join(getattr(self, name).split())}" for name in DIMENSIONS)


def explain(
    folder: Path,
    model: ChatModel,
    *,
    rankings: Sequence[Path] = (),
    workers: int = 4,
    limit: int | None = None,
    progress: Progress = silent,
) -> JsonObject:
    """Explain labelled pairs: rankings → explanations.jsonl.

    Args:
        rankings: files of further rankings.

    Returns:
        The number of explained, flagged and failed pairs, and the first fault if there is one.
    """
    labels = label(folder, rankings)
    pairs = {pair_key(pair): pair for pair in labels.pairs[:limit]}

    journal = Journal(folder / "explanations.jsonl")
    rows = journal.items

    # A label may change when more people rank: the pair then needs reasons for the new label.
    missing = []
    for key, pair in pairs.items():
        row = rows.get(key)
        if row is None or row["status"] == "failed" or row["consistent"] != pair.consistent:
            missing.append(pair)

    # Explain them, and count all pairs. Answers arrive in any order, and the journal keeps each at once.
    answer = partial(explain_pair, labels.file_of, model)
    fill_journal(journal, missing, answer, workers=workers, progress=progress)
    counts: JsonObject = {"pairs": len(pairs), "explained": 0, "contradicted": 0, "failed": 0}
    for key in pairs:
        row = rows[key]
        counts[row["status"]] += 1
        if row["status"] == "failed":
            counts.setdefault("first_fault", row["error"])
    return counts


def explain_pair(file_of: Mapping[str, Path], model: ChatModel, pair: Comparison) -> JsonObject:
    """Request one row of explanations.jsonl: `explained`, `contradicted` or `failed`."""
    images = [image.as_posix() for image in pair.images]
    row: JsonObject = {
        "key": pair_key(pair),
        "images": images,
        "consistent": pair.consistent,
        "reasons": "",
        "error": "",
    }
    # The images travel inside the request, so that any server can read them.
    content: list[JsonObject] = []
    for image in images:
        data = png_bytes(open_image(file_of[image]))
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        content.append({"type": "image_url", "image_url": {"url": url}})
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": request_text(pair)}]}]

    try:
        explanation = model.ask_json(messages, Explanation, check=lambda answer: None)
    except ChatError as error:
        return row | {"status": "failed", "error": str(error)}
    # Not asked again: a model that is asked until it agrees agrees with every label.
    if (explanation.answer == "Yes") != pair.consistent:
        return row | {"status": "contradicted", "error": "the answer argued for the other label"}
    return row | {"status": "explained", "reasons": explanation.reasons}


def request_text(pair: Comparison) -> str:
    """Request for one pair, the label included."""
    verdict = "consistent" if pair.consistent else "not consistent"
    word = "Yes" if pair.consistent else "No"
    dimensions = ", ".join(f'"{name}": "<one or two sentences>"' for name in DIMENSIONS)
    return (
        f"{pair.question}\n\n"
        f"People compared these two images with others and found them {verdict}: the answer is {word}. "
        "Say what can be seen that speaks for this, for style, for identity and for logic. Name concrete things in the "
        "images; do not mention the people or this note. If you are sure that the answer is wrong, say so by answering "
        "otherwise.\n"
        f'Answer with one JSON object and nothing else: {{"answer": "Yes" or "No", {dimensions}}}'
    )
