"""Reasons for labelled pairs, by a vision-language model that knows the label (`pacorl dataset explain`).

The judge is trained to say Yes or No and then why. An explanation that argues for the other label is requested again,
then flagged and left out; the next call tries failed pairs again.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pacorl.dataset.export import label
from pacorl.dataset.llm import ChatError, ChatModel, estimate
from pacorl.dataset.manifest import DatasetStep, Progress, silent
from pacorl.dataset.records import LabelledPair
from pacorl.io.documents import Journal, read_journal
from pacorl.io.files import inside
from pacorl.io.images import IMAGE_TYPES

DIMENSIONS = ("style", "identity", "logic")
TOKENS_PER_PAIR = (2500, 200)
"""Of one pair, prompt (two images) and completion, for the estimate of a dry run."""


class Explanation(BaseModel):
    """The answer of the model."""

    model_config = ConfigDict(extra="forbid")

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
    rule: str = "best_worst",
    question: str = "theme",
    attempts: int = 3,
    workers: int = 4,
    price: tuple[float, float] = (0.0, 0.0),
    limit: int | None = None,
    dry_run: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Explains labelled pairs: pairs.jsonl → explanations.jsonl.

    Args:
        rule, question: see `export.label`.
        attempts: how often a pair is asked for before it is flagged.
        price: per million prompt and completion tokens.
        limit: at most so many pairs.

    Returns:
        How many are explained, flagged and failed, and what that cost.

    Raises:
        ChatRefusedError: at once, if the server answers no request at all; other faults are recorded per pair.
    """
    labelled = label(folder, rule=rule, question=question, dry_run=dry_run)
    pairs = [pair for pair in labelled.pairs if not pair.reasons][:limit]
    path = folder / "explanations.jsonl"
    if dry_run:
        recorded = read_journal(path)
        missing = [pair for pair in pairs if not _is_settled(recorded, pair)]
        return {
            "pairs": len(pairs),
            "to_explain": len(missing),
            "estimate": estimate(len(missing), TOKENS_PER_PAIR, price),
        }
    journal = Journal(path)
    missing = [pair for pair in pairs if not _is_settled(journal.items, pair)]
    _explain_missing(folder, model, missing, journal, attempts=attempts, workers=workers, progress=progress)
    status = Counter(journal.items[pair.key]["status"] for pair in pairs)
    counts = {"pairs": len(pairs), **{name: status[name] for name in ("explained", "contradicted", "failed")}}
    step = DatasetStep(
        folder, "explain", inputs=[folder / "pairs.jsonl"], options={"model": model.model, "attempts": attempts}
    )
    used = {**model.usage.as_dict(), "cost": model.usage.cost(price)}
    return step.finish(outputs=[path], counts={**counts, "usage": used})


def _is_settled(journal: Mapping[str, Mapping[str, Any]], pair: LabelledPair) -> bool:
    """Whether the journal has a final word on this pair with this label."""
    row = journal.get(pair.key)
    return row is not None and row["status"] != "failed" and row["consistent"] == pair.consistent


def _explain_missing(
    folder: Path,
    model: ChatModel,
    missing: Sequence[LabelledPair],
    journal: Journal,
    *,
    attempts: int,
    workers: int,
    progress: Progress,
) -> None:
    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(explain_pair, folder, model, pair, attempts=attempts) for pair in missing]
        try:
            for done, future in enumerate(as_completed(running), 1):
                journal.add(future.result())
                progress(done, len(missing))
        except BaseException:
            # A refused key or Ctrl-C: requests that wait would each cost time and money for nothing.
            pool.shutdown(cancel_futures=True)
            raise


def explain_pair(folder: Path, model: ChatModel, pair: LabelledPair, *, attempts: int = 3) -> dict[str, Any]:
    """One row of explanations.jsonl: `explained`, `contradicted` (after `attempts`), or `failed` with its error."""
    row: dict[str, Any] = {"key": pair.key, "consistent": pair.consistent, "reasons": "", "error": ""}
    messages = [{"role": "user", "content": [*image_parts(folder, pair), {"type": "text", "text": request_text(pair)}]}]
    try:
        for _ in range(attempts):
            explanation = model.ask_json(messages, Explanation, check=lambda answer: None, attempts=attempts)
            # The model may say that the label is wrong. A reason for the other label would teach the judge a lie.
            if (explanation.answer == "Yes") == pair.consistent:
                return row | {"status": "explained", "reasons": explanation.reasons}
            model.count_contradiction()
    except ChatError as error:
        model.count_failure()
        return row | {"status": "failed", "error": str(error)}
    return row | {"status": "contradicted", "error": f"{attempts} answers argued for the other label"}


def request_text(pair: LabelledPair) -> str:
    """The request for one pair, the label included."""
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


def image_parts(folder: Path, pair: LabelledPair) -> list[dict[str, Any]]:
    """The pair as parts of a chat message.

    Raises:
        ValueError: if an image is missing.
    """
    return [{"type": "image_url", "image_url": {"url": data_url(inside(folder, name))}} for name in pair.images]


def data_url(path: Path) -> str:
    """An image file as a data URL."""
    kind = IMAGE_TYPES.get(path.suffix.lower())
    if kind is None or not path.is_file():
        raise ValueError(f"{path} is missing or no image; put it back, or export without its rankings")
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
