"""A judge behind the calls that a script makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pacorl.io.images import as_rgb
from pacorl.io.remote import open_source
from pacorl.judge import judge_from
from pacorl.judge.score_set import questions_about, score_set
from pacorl.judge.scores import Scores
from pacorl.models.quantize import NONE
from pacorl.types import Question

if TYPE_CHECKING:
    from pacorl.judge.judge import Judge

ImageLike = Any
"""A path, an http(s) URL, PIL's image, or an array or tensor of pixels."""

TINY_NOTE = (
    "Judged by the embedded tiny judge, which knows the tiny world of drawn characters only and can say nothing of "
    "other images. Name a real one with --judge, e.g. X-GenGroup/PaCo-Reward-7B."
)


class PacoReward(AbstractContextManager["PacoReward", None]):
    """A judge behind the calls that a script makes.

    Example:
        from PIL import Image

        from pacorl import PacoReward

        red, blue = (Image.new("RGB", (32, 32), colour) for colour in ("red", "blue"))
        with PacoReward.from_pretrained("tiny", decline=False) as reward:  # or a hub name, a folder, a server's URL
            p_yes = reward.score(red, blue, theme="a dentist in blue scrubs")  # paths and URLs are images too
    """

    def __init__(self, judge: Judge, *, name: str = "") -> None:
        if isinstance(judge, str | Path):
            raise TypeError(
                f"PacoReward takes a judge; PacoReward.from_pretrained({str(judge)!r}) loads one by its name"
            )
        self.judge = judge
        """Answers the questions."""
        self.name = name or type(judge).__name__
        """What messages and pages call the judge."""

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path = "tiny",
        *,
        adapter: str = "",
        model: str = "",
        api_key_env: str = "",
        temperature: float = 1.0,
        variants: bool = False,
        decline: bool = True,
        quantize: str = NONE,
        stream: bool = False,
    ) -> PacoReward:
        """A judge by its name.

        Args:
            source: A transformers folder, a hub name, the URL of a server, an endpoints YAML, or "tiny" for the
                embedded judge, which knows the tiny world only.
            adapter: A PEFT LoRA on top of a checkpoint.
            model: The judge's name at a server.
            api_key_env: The environment variable that holds a server's key.
            temperature: Divides the Yes − No logit.
            variants: Adds up the spellings of Yes and of No, as EditReward-Bench does.
            decline: Images outside of what the judge knows get no score, if its checkpoint says what it knows.
            quantize: `none`, or the form in which the blocks of a judge in this process are packed, such as `int8`.
            stream: Whether these weights stay in main memory, and are sent to the device layer by layer.

        Raises:
            ValueError: if it cannot be what was asked for; for a server, before any question.
        """
        judge, name = judge_from(
            str(source),
            adapter=adapter,
            model=model,
            api_key_env=api_key_env,
            temperature=temperature,
            variants=variants,
            decline=decline,
            quantize=quantize,
            stream=stream,
        )
        return cls(judge, name=name)

    def __repr__(self) -> str:
        return f"PacoReward({self.name!r})"

    @property
    def note(self) -> str:
        """What a reader of the scores must know of the judge; empty for most."""
        if self.name == "tiny":  # the judge that a first try meets: its note says how to name a real one
            return TINY_NOTE
        domain = getattr(self.judge, "domain", None)
        if domain is None:
            return ""
        return f"Judged by {self.name}, which knows {domain.name} only and declines other images."

    def score(
        self,
        first: ImageLike,
        second: ImageLike,
        *,
        theme: str = "",
        criteria: Mapping[str, str] | None = None,
        symmetric: bool = False,
    ) -> float:
        """P(Yes) of two images.

        Args:
            first: A file, an http(s) URL, PIL's own, or an array or tensor (`pacorl.io.images.as_rgb`).
            second: Likewise.
            theme: What they are to share; without theme and criteria the plain question is asked.
            criteria: Label → text of questions of their own; the score is the mean over them.
            symmetric: Whether both orders are asked, and their mean is taken.

        Raises:
            ImageError: if it is no image.
            RuntimeError: if the judge gives no answer.
        """
        scores = self.score_set([first, second], theme=theme, criteria=criteria, symmetric=symmetric)
        if scores.mean is None:
            raise RuntimeError(f"{self.name} gave no verdict: {scores.pairs[0].error}")
        return scores.mean

    def score_set(
        self,
        images: Sequence[ImageLike],
        *,
        theme: str = "",
        criteria: Mapping[str, str] | None = None,
        ranking: bool = False,
        symmetric: bool = False,
        reasons: bool = False,
    ) -> Scores:
        """Every pair of two images or more.

        Args:
            images: Two or more, of any form that `score` takes.
            theme: What they are to share; without theme and criteria the plain question is asked.
            criteria: Label → text of questions of their own; a pair's score is the mean over them.
            ranking: Whether the first image alone is compared with each of the others.
            symmetric: Whether both orders are asked, and their mean is taken.
            reasons: Whether the judge also answers in words, which takes longer by far.

        Raises:
            ImageError: if one is no image.
            ValueError: for fewer than two images.
        """
        return score_set(
            self.judge,
            [_as_image(image) for image in images],
            questions=questions_about(theme, criteria),
            ranking=ranking,
            symmetric=symmetric,
            reasons=reasons,
        )

    def rank(self, images: Sequence[ImageLike], **options: Any) -> Scores:
        """The first image against each of the others, `ranked` best first; options as in `score_set`."""
        return self.score_set(images, ranking=True, **options)

    def explain(self, first: ImageLike, second: ImageLike, *, theme: str = "") -> str:
        """The judge's answer in words."""
        (question,) = questions_about(theme)
        images = [as_rgb(_as_image(image), name) for image, name in ((first, "image 1"), (second, "image 2"))]
        return self.judge.explain(Question(tuple(images), question.text))

    def close(self) -> None:
        """Lets go of a server."""
        # Only a judge at a server holds anything open; the seam does not ask the others for a `close`.
        getattr(self.judge, "close", lambda: None)()

    def __exit__(self, *error: object) -> None:
        self.close()


def _as_image(image: ImageLike) -> Any:
    return open_source(image) if isinstance(image, str | Path) else image
