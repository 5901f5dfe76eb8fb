"""Judges of edit pairs by their published wordings: P(Yes), a rubric's scores, or a choice between two edits.

A wording is read from the file that its authors publish, so that a judge reads the words of its training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pacorl.bench.rating import UnratedError, ask_scores, read_rubric
from pacorl.core import questions as wordings
from pacorl.io.documents import JsonObject, blamed_on, object_within, read_text, read_yaml
from pacorl.judge.judge import ChatJudge
from pacorl.judge.pairwise import ask
from pacorl.types import Chat, Question

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.bench.rating import Rubric
    from pacorl.judge.paco_reward import PacoReward

About = Literal["followed", "consistent", "quality"]
"""Whether the instruction was followed, all else was kept, or the image looks right."""
FORMS = ("PVC-Judge's YAML", "EditScore's vie_prompts.py", "a rubric of semantics, quality and scale")

INSTRUCTION = "{{ instruction }}"
IMAGES = {"input_image": 0, "edited_images 0": 1, "edited_images 1": 2}
"""Source and index of a block's image → its index in a comparison."""
AFTER_IMAGE = "\n"
"""Text between an image and the text that follows, in PVC-Judge's training."""
CHOICES = {
    **dict.fromkeys(("image a", "image_a", "a"), (1.0, 0.0)),
    **dict.fromkeys(("image b", "image_b", "b"), (0.0, 1.0)),
    **dict.fromkeys(("tie", "equal", "both", "none"), (0.0, 0.0)),
}
"""Accepted spellings of a winner → the scores of both edits."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two edits of one source, and the dimension in which they are compared."""

    images: tuple[Image, Image, Image]
    """The source, then both edits."""
    instruction: str
    about: About


@dataclass(frozen=True)
class YesNo:
    """P(Yes) of each edit by the released wordings, which have none for image quality."""

    judge: PacoReward
    abouts: tuple[About, ...] = ("followed", "consistent")

    def settings(self) -> JsonObject:
        return {"judge": self.judge.name}

    def compare(self, comparisons: Sequence[Comparison]) -> list[JsonObject]:
        questions = {}
        for number, comparison in enumerate(comparisons):
            followed = comparison.about == "followed"
            wording = wordings.edit_followed_in_a_word if followed else wordings.edit_consistent_in_a_word
            source, *edits = comparison.images
            for index, edit in enumerate(edits):
                pair = (source, edit.resize(source.size))
                questions[number, index] = Question(pair, wording(comparison.instruction))

        verdicts = ask(self.judge.judge, questions)
        results: list[JsonObject] = []
        for number in range(len(comparisons)):
            both = (verdicts[number, 0], verdicts[number, 1])
            errors = [verdict.error for verdict in both if not verdict.valid]
            results.append({"error": errors[0]} if errors else {"scores": [verdict.p_yes for verdict in both]})
        return results


@dataclass(frozen=True)
class Rated:
    """Scores of each edit by a rubric in words, as EditScore and UnifiedReward-Edit give them."""

    judge: PacoReward
    rubric: Rubric
    abouts: tuple[About, ...] = ("followed", "consistent", "quality")

    def settings(self) -> JsonObject:
        return {"judge": self.judge.name, "rubric": self.rubric.digest}

    def compare(self, comparisons: Sequence[Comparison]) -> list[JsonObject]:
        results: list[JsonObject] = []
        for comparison in comparisons:
            try:
                results.append({"scores": [self._score(comparison, edit) for edit in comparison.images[1:]]})
            except UnratedError as fault:
                results.append({"error": str(fault)})
        return results

    def _score(self, comparison: Comparison, edit: Image) -> float:
        if comparison.about == "quality":
            quality, _ = ask_scores(self.judge.judge, Question((edit,), self.rubric.quality), self.rubric.scale)
            return min(quality)
        text = self.rubric.semantics.replace("{instruction}", comparison.instruction)
        question = Question((comparison.images[0], edit), text)
        (followed, consistent), _ = ask_scores(self.judge.judge, question, self.rubric.scale)
        return followed if comparison.about == "followed" else consistent


@dataclass(frozen=True)
class PairWording:
    """PVC-Judge's wording: a system prompt, then texts and images."""

    system: str
    blocks: tuple[str | int, ...]
    """Texts with the instruction's placeholder, and indices of a comparison's images."""
    digest: str

    def chat(self, comparison: Comparison) -> Chat:
        """Build the request about two edits."""
        content: list[str | Image] = []
        for number, block in enumerate(self.blocks):
            if isinstance(block, int):
                content.append(comparison.images[block])
                continue
            if number and isinstance(self.blocks[number - 1], int):
                content.append(AFTER_IMAGE)
            content.append(block.replace(INSTRUCTION, comparison.instruction))
        return Chat(tuple(content), self.system)


@dataclass(frozen=True)
class PairChoice:
    """Choice between both edits in words, as PVC-Judge answers."""

    judge: PacoReward
    wording: PairWording
    abouts: tuple[About, ...] = ("consistent",)

    def settings(self) -> JsonObject:
        return {"judge": self.judge.name, "wording": self.wording.digest}

    def compare(self, comparisons: Sequence[Comparison]) -> list[JsonObject]:
        judge = self.judge.judge
        if not isinstance(judge, ChatJudge):
            raise ValueError(f"{self.judge.name} cannot answer a chat; give PairChoice a judge with `reply`")
        results: list[JsonObject] = []
        for comparison in comparisons:
            try:
                answer = judge.reply(self.wording.chat(comparison))
                results.append({"scores": list(read_winner(answer))})
            except (RuntimeError, ValueError) as fault:
                results.append({"error": str(fault)})
        return results


def read_winner(answer: str) -> tuple[float, float]:
    """Read the scores of both edits from the JSON object in an answer. Raises ValueError if it names no winner."""
    winner = object_within(answer).get("winner")
    scores = CHOICES.get(winner.strip().lower()) if isinstance(winner, str) else None
    if scores is None:
        raise ValueError(f"'winner' must be 'Image A', 'Image B' or 'Tie', it is {str(winner)[:60]!r}")
    return scores


def read_wording(path: Path) -> Rubric | PairWording:
    """Read a published wording. Raises ValueError if the file has none of the known forms."""
    # EditScore publishes a module, PVC-Judge a YAML; a rubric of one's own is a YAML too.
    if path.suffix == ".py":
        return read_rubric(path)
    document = read_yaml(path)
    if not isinstance(document, dict) or not document.keys() & {"user_prompt", "semantics"}:
        raise ValueError(f"{path}: no wording of a judge; give {', '.join(FORMS)}")
    if "user_prompt" not in document:
        return read_rubric(path)

    with blamed_on(path):
        # Texts and images in the order of the chat.
        entries = document["user_prompt"]
        if not isinstance(entries, list):
            raise ValueError("'user_prompt' must be a list of texts and images")
        blocks = [_block(entry) for entry in entries]
        if sorted(block for block in blocks if isinstance(block, int)) != sorted(IMAGES.values()):
            raise ValueError("'user_prompt' must show input_image and both edited_images, each once")
        if not any(isinstance(block, str) and INSTRUCTION in block for block in blocks):
            raise ValueError(f"'user_prompt' must hold {INSTRUCTION}")
    digest = hashlib.sha256(read_text(path).encode()).hexdigest()[:16]
    return PairWording(str(document.get("system_prompt") or ""), tuple(blocks), digest)


def _block(entry: Any) -> str | int:
    if isinstance(entry, dict) and isinstance(entry.get("text"), str):
        # Its authors render blocks with Jinja, which drops one line break at the end.
        return str(entry["text"]).removesuffix("\n")
    image = entry.get("image") if isinstance(entry, dict) else None
    source = f"{image.get('source')} {image.get('index', '')}".strip() if isinstance(image, dict) else ""
    if source not in IMAGES:
        raise ValueError(f"'user_prompt' holds {str(entry)[:60]}, neither a text nor an image of a pair of edits")
    return IMAGES[source]


EditJudge = YesNo | Rated | PairChoice
"""Judge of comparisons: `compare` returns `scores` of both edits, or an `error`, for each."""


def edit_judge(judge: PacoReward, wording: Path | None) -> EditJudge:
    """Create the judge of comparisons: P(Yes), or the form of a wording file."""
    if wording is None:
        return YesNo(judge)
    form = read_wording(wording)
    return PairChoice(judge, form) if isinstance(form, PairWording) else Rated(judge, form)
