"""The judge's interface for Python scripts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pacorl.core.batches import in_batches
from pacorl.gate.scores import TOGETHER, Scores, opened, question_about, score_set
from pacorl.io.images import as_rgb
from pacorl.io.net import UnreachableError
from pacorl.judge import check_judge, identity_at, judge_from
from pacorl.judge.calibration import read_calibration
from pacorl.types import Question, Verdict

if TYPE_CHECKING:
    from pacorl.judge.judge import Judge

ImageLike = Any
"""A path, a URL, or PIL's image."""


class PacoReward(AbstractContextManager["PacoReward", None]):
    """Scores of image pairs and sets, for scripts.

    Example:
        from PIL import Image

        from pacorl import PacoReward

        red, blue = (Image.new("RGB", (32, 32), colour) for colour in ("red", "blue"))
        with PacoReward.from_pretrained("tiny") as reward:  # or a hub name, a folder, a server's URL
            p_yes = reward.score(red, blue, theme="a dentist in blue scrubs")  # paths and URLs are images too
    """

    def __init__(self, judge: Judge, *, name: str = "") -> None:
        self.judge = judge
        """The judge."""
        self.name = name or type(judge).__name__
        """The judge's name in messages and pages."""

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, variants: bool = False, calibration: str | Path = "", memory: str = "normal"
    ) -> PacoReward:
        """Load a judge by its name.

        Args:
            source: A folder or hub name of a model or of a LoRA on one, the URL of a server (`URL#MODEL`, its key in
                PACORL_API_KEY), or "tiny" for the embedded judge of the tiny world.
            variants: Add up the spellings of Yes and of No, as EditReward-Bench does.
            calibration: A file of `pacorl calibrate`, whose curve maps P(Yes).
            memory: `low` for a judge in this process on a small card, `lowest` for a smaller one.

        Raises:
            ValueError: The judge is missing or does not fit the options, or the calibration is of another judge.
            ConnectionError: The server does not answer.
        """
        check_judge(str(source), calibration=calibration)
        curve = read_calibration(calibration)
        judge, name = judge_from(str(source), variants=variants, calibration=curve, memory=memory)
        if curve:  # once more: only now are a hub's weights here
            curve.check_judge(str(source), name, identity_at(str(source), judge))
        return cls(judge, name=name)

    @property
    def note(self) -> str:
        """Caveats for readers of the scores; empty for most judges."""
        # Of a judge over HTTP its server has the note.
        return str(getattr(self.judge, "note", ""))

    @property
    def about(self) -> dict[str, str]:
        """Name and caveats, for the JSON document of scores."""
        return {"judge": self.name, "note": self.note}

    def score(self, first: ImageLike, second: ImageLike, **options: Any) -> float:
        """Compute P(Yes) of two images, from 0 to 1; options (theme) as in `score_set`.

        Raises:
            ImageError: for an invalid image.
            ConnectionError: if the judge's server is silent.
            RuntimeError: if the judge gives no answer.
        """
        scores = self.score_set([first, second], **options)
        if scores.mean is None:
            raise RuntimeError(f"{self.name} gave no verdict: {scores.pairs[0].error}")
        return scores.mean

    def score_pairs(
        self, pairs: Sequence[tuple[ImageLike, ImageLike]], *, themes: str | Sequence[str] = ""
    ) -> list[Verdict]:
        """Score many pairs, `TOGETHER` in one call of the judge.

        Args:
            pairs: Two images each, in any form that `score_set` accepts; opened as they are asked about.
            themes: The theme of all pairs, or of each; without one the plain question is asked.

        Returns:
            One verdict per pair, in order: `p_yes`, or None with the reason as `error`, such as an image that cannot
            be read.

        Raises:
            ValueError: for another number of themes, or no two images.

        Example:
            verdicts = reward.score_pairs([("a.png", "b.png"), ("a.png", "c.png")], themes="a red fox")
            print([verdict.p_yes for verdict in verdicts])
        """
        of_pair = [themes] * len(pairs) if isinstance(themes, str) else themes
        if len(of_pair) != len(pairs):
            raise ValueError(f"{len(pairs)} pairs and {len(of_pair)} themes; give one for each pair, or one text")
        for number, pair in enumerate(pairs):
            if len(pair) != 2:
                raise ValueError(f"pairs[{number}] has {len(pair)} images; a pair has two")

        verdicts: dict[int, Verdict] = {}
        for chunk in in_batches(list(enumerate(zip(pairs, of_pair, strict=True))), TOGETHER):
            questions = {}
            for number, (pair, theme) in chunk:
                try:
                    images = tuple(as_rgb(image, "an image of a pair") for image in opened(pair))
                except ValueError as fault:
                    # One bad file costs its own pairs alone.
                    verdicts[number] = Verdict(None, str(fault))
                    continue
                questions[number] = Question(images, question_about(theme))
            verdicts |= zip(questions, self.judge.verdicts([*questions.values()]), strict=True)
        return [verdicts[number] for number in range(len(pairs))]

    def score_set(
        self, images: Sequence[ImageLike], *, theme: str = "", ranking: bool = False, reasons: bool = False
    ) -> Scores:
        """Score every pair of two or more images.

        Args:
            images: Two or more images: files, http(s) URLs or PIL images.
            theme: The common theme; without one the plain question is asked.
            ranking: Compare only the first image with each candidate.
            reasons: Request the answer in words too, which takes far longer.

        Raises:
            ImageError: for an invalid image.
            ValueError: for fewer than two images.
            ConnectionError: if the judge's server is silent.
        """
        scores = score_set(self.judge, opened(images), theme=theme, ranking=ranking, reasons=reasons)
        if scores.mean is None and getattr(self.judge, "is_silent", False):
            raise UnreachableError(f"{self.name} does not answer: {scores.pairs[0].error}")
        return scores

    def close(self) -> None:
        """Close the connection to a server."""
        # Only a remote judge has a `close`.
        getattr(self.judge, "close", lambda: None)()

    def __exit__(self, *error: object) -> None:
        self.close()
