"""Judges of edit pairs by their published wordings: P(Yes), a rubric's scores, or a choice between two edits.

A wording is read from the file that its authors publish, so that a judge reads the words of its training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pacorl.bench.rating import INSTRUCTION, UnratedError, ask_scores, read_rubric, unified_text
from pacorl.core import questions as wordings
from pacorl.io.documents import JsonObject, blamed_on, object_within, read_text, read_yaml
from pacorl.io.files import text_digest
from pacorl.judge.judge import ChatJudge
from pacorl.judge.pairwise import ask
from pacorl.types import Chat, Question

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.bench.rating import Rubric
    from pacorl.judge.paco_reward import PacoReward

About = Literal["followed", "consistent", "quality"]
"""Whether the instruction was followed, all else was kept, or the image looks right."""
FORMS = ("PVC-Judge's YAML", "EditScore's vie_prompts.py", "UnifiedReward-Edit's scripts or folder", "a rubric's YAML")

PVC_INSTRUCTION = "{{ instruction }}"
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
BETTER = {"edited image 1 is better": (1.0, 0.0), "edited image 2 is better": (0.0, 1.0), "equal": (0.0, 0.0)}
"""Words of a rank of UnifiedReward-Edit, as its authors' Pref-GRPO reads it → the scores of both edits."""


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
            if errors:
                results.append({"error": errors[0]})
            else:
                results.append({"scores": [verdict.p_yes for verdict in both]})
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
    """Wording about two edits at once: a system prompt, then texts and images."""

    blocks: tuple[str | int, ...]
    """Texts with INSTRUCTION, and indices of a comparison's images."""
    read: Callable[[str], tuple[float, float]]
    """Answer → scores of both edits. Raises ValueError if it has none."""
    digest: str
    abouts: tuple[About, ...] = ("followed", "consistent", "quality")
    """Dimensions that one answer is about."""
    system: str = ""

    def chat(self, comparison: Comparison) -> Chat:
        """Build the request about two edits."""
        content: list[str | Image] = []
        for block in self.blocks:
            if isinstance(block, int):
                content.append(comparison.images[block])
            else:
                content.append(block.replace(INSTRUCTION, comparison.instruction))
        return Chat(tuple(content), self.system)


@dataclass(frozen=True)
class PairChoice:
    """Comparison of both edits in words, as PVC-Judge and UnifiedReward-Edit answer."""

    judge: PacoReward
    wording: PairWording

    @property
    def abouts(self) -> tuple[About, ...]:
        return self.wording.abouts

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
                results.append({"scores": list(self.wording.read(answer))})
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


def read_better(answer: str) -> tuple[float, float]:
    """Read the scores of both edits from a rank of UnifiedReward-Edit. Raises ValueError unless it names one winner."""
    named = [scores for words, scores in BETTER.items() if words in answer.lower()]
    if len(named) != 1:
        raise ValueError(f"an answer must say which edited image is better, or equal, it is {answer[:60]!r}")
    return named[0]


def read_two_scores(answer: str) -> tuple[float, float]:
    """Read UnifiedReward-Edit's scores of both edits, decimals that may be negative.

    Raises ValueError if there are not two of them.
    """
    scores = re.findall(r"[-−]?\d+\.\d+", answer)
    if len(scores) != 2:
        raise ValueError(f"an answer must hold two decimal scores, it is {answer[:60]!r}")
    return float(scores[0].replace("−", "-")), float(scores[1].replace("−", "-"))


PAIR_READERS = {"which edited image is better": read_better, "provide the scores for each image": read_two_scores}
"""What a text of UnifiedReward-Edit asks about two edits → reader of its answers."""


def read_wording(path: Path) -> Rubric | PairWording:
    """Read a published wording. Raises ValueError if the file has none of the known forms."""
    # EditScore and UnifiedReward-Edit publish modules, PVC-Judge a YAML; a rubric of one's own is a YAML too.
    text = unified_text(path) if path.suffix == ".py" else ""
    if text:
        return _of_unified(path, text)
    if path.suffix == ".py" or path.is_dir():
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
        blocks: list[str | int] = []
        for entry in entries:
            block = _block(entry)
            if blocks and isinstance(blocks[-1], int) and isinstance(block, str):
                blocks.append(AFTER_IMAGE)
            blocks.append(block)
        if sorted(block for block in blocks if isinstance(block, int)) != sorted(IMAGES.values()):
            raise ValueError("'user_prompt' must show input_image and both edited_images, each once")
        if not any(isinstance(block, str) and INSTRUCTION in block for block in blocks):
            raise ValueError(f"'user_prompt' must hold {PVC_INSTRUCTION}")
    digest = text_digest(read_text(path))[:16]
    system = str(document.get("system_prompt") or "")
    return PairWording(tuple(blocks), read_winner, digest, abouts=("consistent",), system=system)


def _of_unified(path: Path, text: str) -> PairWording:
    """Build UnifiedReward-Edit's wording about two edits: the three images, then the text."""
    for question, read in PAIR_READERS.items():
        if question in text:
            return PairWording((0, 1, 2, text), read, text_digest(text)[:16])
    raise ValueError(f"{path}: asks about one edit; give its folder for point scores, or a script about two edits")


def _block(entry: Any) -> str | int:
    if isinstance(entry, dict) and isinstance(entry.get("text"), str):
        # Its authors render blocks with Jinja, which drops one line break at the end.
        return str(entry["text"]).removesuffix("\n").replace(PVC_INSTRUCTION, INSTRUCTION)
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
