"""Scoring the consistency of pictures: pairs, whole sets, a reference against candidates.

    from pacorl.score.reward import PacoReward
    judge = PacoReward.from_pretrained("X-GenGroup/PaCo-Reward-7B")
    judge.score("a.png", "b.png", theme="a dentist in blue scrubs")

A pair's score is the judge's P(Yes), mean over the questions that were asked (and over both orders, if wanted). A pair
of which any question stayed unanswered has no score, and its reason is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pacorl.core import questions
from pacorl.core.grid import split
from pacorl.io.documents import read_json
from pacorl.io.images import ImageError, check_shape
from pacorl.io.net import open_source
from pacorl.judges.pairwise import ask_pairs, errors_of
from pacorl.types import Grid, Question, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.judges.judge import Judge

TINY_NOTE = (
    "Judged by the embedded tiny judge, which knows the tiny world of drawn characters only and can say nothing of "
    "other images. Name a real one with --judge, e.g. X-GenGroup/PaCo-Reward-7B."
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A question to be put to every pair."""

    label: str
    """What a table calls it."""
    text: str


@dataclass(frozen=True, slots=True)
class PairScore:
    """What the judge says of two images of a set (indices into it)."""

    first: int
    second: int
    by_question: tuple[float | None, ...]
    """P(Yes) of each question, mean of both orders where both were asked."""
    order_gap: float | None = None
    """How far P(Yes) of the two orders lies apart, mean over the questions; None if one order was asked."""
    error: str = ""
    reasons: str = ""
    declined: bool = False
    """Whether the judge declined it, because an image is outside of what it knows."""

    @property
    def p_yes(self) -> float | None:
        """The pair's score; None if a question stayed unanswered."""
        return _mean(self.by_question) if None not in self.by_question else None


@dataclass(frozen=True, slots=True)
class OddOneOut:
    """The image that fits the others least."""

    image: int
    with_others: float
    """Mean score of its pairs."""
    among_others: float | None
    """Mean score of the pairs without it; None if none was scored."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The scored pairs of some images."""

    names: tuple[str, ...]
    images: tuple[Image, ...]
    asked: tuple[Asked, ...]
    pairs: tuple[PairScore, ...]

    @property
    def mean(self) -> float | None:
        """Mean over the pairs that have a score."""
        return _mean([pair.p_yes for pair in self.pairs])

    @property
    def missing(self) -> tuple[PairScore, ...]:
        return tuple(pair for pair in self.pairs if pair.p_yes is None)

    @property
    def matrix(self) -> tuple[tuple[float | None, ...], ...]:
        """Every image against every other; None on the diagonal and where there is no score."""
        found = {(pair.first, pair.second): pair.p_yes for pair in self.pairs}
        found |= {(pair.second, pair.first): pair.p_yes for pair in self.pairs}
        every = range(len(self.names))
        return tuple(tuple(found.get((row, col)) for col in every) for row in every)

    def mean_of(self, image: int) -> float | None:
        """Mean score of an image's pairs."""
        return _mean([pair.p_yes for pair in self.pairs if image in (pair.first, pair.second)])

    @property
    def odd_one_out(self) -> OddOneOut | None:
        """Of three images or more, the one whose pairs score lowest."""
        means = {image: mean for image in range(len(self.names)) if (mean := self.mean_of(image)) is not None}
        if len(self.names) < 3 or not means:
            return None
        odd = min(means, key=lambda image: means[image])
        rest = [pair.p_yes for pair in self.pairs if odd not in (pair.first, pair.second)]
        return OddOneOut(odd, means[odd], _mean(rest))

    @property
    def ranked(self) -> tuple[PairScore, ...]:
        """The pairs, best first; those without a score last."""
        return tuple(sorted(self.pairs, key=lambda pair: (pair.p_yes is None, -(pair.p_yes or 0.0))))

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints; names stand for images."""
        odd = self.odd_one_out
        return {
            "images": list(self.names),
            "questions": {asked.label: asked.text for asked in self.asked},
            "mean": self.mean,
            "missing": len(self.missing),
            "odd_one_out": odd
            and {"image": self.names[odd.image], "with_others": odd.with_others, "among_others": odd.among_others},
            "pairs": [self._pair_dict(pair) for pair in self.pairs],
            "matrix": [list(row) for row in self.matrix],
        }

    def _pair_dict(self, pair: PairScore) -> dict[str, Any]:
        optional = {"order_gap": pair.order_gap, "error": pair.error, "reasons": pair.reasons}
        if pair.declined:
            optional["declined"] = True
        return {
            "images": [self.names[pair.first], self.names[pair.second]],
            "p_yes": pair.p_yes,
            "by_question": dict(zip((asked.label for asked in self.asked), pair.by_question, strict=True)),
        } | {key: value for key, value in optional.items() if value not in (None, "")}


# --- questions and pictures ------------------------------------------------------------------------------------


def questions_about(theme: str = "", criteria: Mapping[str, str] | None = None) -> tuple[Asked, ...]:
    """The questions that a theme and written criteria (label → text) ask for; without either, the plain one."""
    asked = [Asked(label, questions.meets_criterion(text)) for label, text in (criteria or {}).items()]
    if theme:
        return (Asked("theme", questions.same_theme(theme)), *asked)
    return tuple(asked) or (Asked("consistent", questions.consistent()),)


def read_criteria(values: Sequence[str]) -> dict[str, str]:
    """Label → text from criteria written out, or from JSON files of them in the T2IS form (dimension → name → text).

    Raises ValueError if a file is no such JSON.
    """
    criteria: dict[str, str] = {}
    for value in values:
        if value.endswith(".json"):
            criteria |= _criteria_file(Path(value))
        else:
            criteria[value] = value
    return criteria


def _criteria_file(path: Path) -> dict[str, str]:
    document = read_json(path)
    document = document.get("criteria", document) if isinstance(document, dict) else document
    found: dict[str, str] = {}
    for dimension, named in document.items() if isinstance(document, dict) else ():
        inner = named if isinstance(named, dict) else {"": named}
        for name, text in inner.items():
            if not isinstance(text, str) or not text:
                raise ValueError(f"{path}: criterion {dimension}.{name} is {text!r}, not a text")
            found[" / ".join(filter(None, (dimension, name)))] = text
    if not found:
        raise ValueError(f'{path}: holds no criteria; write {{"Identity": {{"Hat": "The same hat in all images."}}}}')
    return found


def open_images(
    sources: Sequence[Path | str], *, keep_going: bool = False
) -> tuple[tuple[str, ...], tuple[Image, ...], dict[str, str]]:
    """Names, images, and what was left out and why (empty unless `keep_going`); sources are files or http(s) URLs.

    Raises ImageError naming every file that cannot be used, and if fewer than one remains.
    """
    opened: dict[str, Image] = {}
    refused: dict[str, str] = {}
    for source in sources:
        name = _unused(str(source), opened)
        try:
            opened[name] = open_source(source)
        except (ImageError, OSError) as error:
            refused[str(source)] = _reason(error, source)
    if refused and not (keep_going and opened):
        raise ImageError("\n".join(refused.values()))
    return tuple(opened), tuple(opened.values()), refused


def cut(name: str, sheet: Image, grid: Grid) -> tuple[tuple[str, ...], tuple[Image, ...]]:
    """The panels of a sheet, named by their place."""
    panels = split(sheet, grid)
    for number, panel in enumerate(panels, 1):
        check_shape(panel, f"panel {number} of {name}")
    return tuple(f"{name}[{number}]" for number in range(1, grid.count + 1)), tuple(panels)


def _unused(name: str, taken: Mapping[str, object]) -> str:
    """The name, or with a number where one picture is given twice."""
    return next(n for n in itertools.chain([name], (f"{name} ({i})" for i in itertools.count(2))) if n not in taken)


def _reason(error: Exception, source: Path | str) -> str:
    return f"{source}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)


def check_count(count: int, *, ranking: bool = False) -> None:
    """Raises ValueError if there are too few images to compare; costs nothing, so that a door can ask it first."""
    if count < 2 and ranking:
        raise ValueError("ranking needs a reference and at least one candidate")
    if count < 2:
        raise ValueError(f"{count} image has nothing to be compared with; give two or more, or a --grid")


# --- scoring ---------------------------------------------------------------------------------------------------


def score_set(
    judge: Judge,
    images: Sequence[Image],
    *,
    names: Sequence[str] = (),
    asked: Sequence[Asked] = (),
    symmetric: bool = False,
    reasons: bool = False,
) -> Scores:
    """Scores every pair of two images or more, in one call of the judge. Raises ValueError for fewer."""
    check_count(len(images))
    pairs = list(itertools.combinations(range(len(images)), 2))
    return _scores(judge, images, pairs, names, asked, symmetric=symmetric, reasons=reasons)


def rank(
    judge: Judge,
    images: Sequence[Image],
    *,
    names: Sequence[str] = (),
    asked: Sequence[Asked] = (),
    symmetric: bool = False,
    reasons: bool = False,
) -> Scores:
    """Scores the first image, the reference, against each of the others; `ranked` holds them best first."""
    check_count(len(images), ranking=True)
    pairs = [(0, candidate) for candidate in range(1, len(images))]
    return _scores(judge, images, pairs, names, asked, symmetric=symmetric, reasons=reasons)


def _scores(
    judge: Judge,
    images: Sequence[Image],
    pairs: Sequence[tuple[int, int]],
    names: Sequence[str],
    asked: Sequence[Asked],
    *,
    symmetric: bool,
    reasons: bool,
) -> Scores:
    asked = tuple(asked) or questions_about()
    texts = {number: question.text for number, question in enumerate(asked)}
    (answers,) = ask_pairs(judge, [images], [texts], pairs=lambda _: pairs, symmetric=symmetric)
    scored = [_pair_score(pair, list(named.values())) for pair, named in answers.items()]
    if reasons:
        scored = [
            pair if pair.p_yes is None else replace(pair, reasons=_reasons(judge, images, pair, asked))
            for pair in scored
        ]
    names = tuple(names) or tuple(f"image {number}" for number in range(1, len(images) + 1))
    return Scores(names, tuple(images), asked, tuple(scored))


def _pair_score(pair: tuple[int, int], verdicts: Sequence[Verdict]) -> PairScore:
    """`verdicts`: one per question."""
    return PairScore(
        *pair,
        by_question=tuple(verdict.p_yes for verdict in verdicts),
        order_gap=_mean([verdict.order_gap for verdict in verdicts]),
        error=errors_of(verdicts),
        declined=any(verdict.declined for verdict in verdicts),
    )


def _reasons(judge: Judge, images: Sequence[Image], pair: PairScore, asked: Sequence[Asked]) -> str:
    both = (images[pair.first], images[pair.second])
    texts = [judge.explain(Question(both, one.text)) for one in asked]
    return (
        texts[0]
        if len(asked) == 1
        else "\n".join(f"{one.label}: {text}" for one, text in zip(asked, texts, strict=True))
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# --- judges ----------------------------------------------------------------------------------------------------


class PacoReward:
    """A judge behind the calls that a script makes."""

    def __init__(self, judge: Judge, *, name: str = "") -> None:
        self.judge = judge
        self.name = name or type(judge).__name__

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
    ) -> PacoReward:
        """A judge from a transformers folder or hub name (with a PEFT `adapter`), the URL of a server, or an
        endpoints YAML (`model` is its name there). "tiny" is the embedded one, of the tiny world only. `variants` adds
        up the spellings of Yes and of No, as EditReward-Bench does. `decline`: images outside of what the judge knows
        get no score, if its checkpoint says what it knows (`judges.domain`).

        Raises ValueError if it cannot be what was asked for; for a server, before any question.
        """
        text = str(source)
        if not text.startswith(("http://", "https://")) and not text.endswith((".yaml", ".yml")):
            local = _local(text, adapter=adapter, temperature=temperature, variants=variants, decline=decline)
            return cls(local, name=_local_name(text, adapter))
        from pacorl.judges.http.judge import connected

        if adapter:
            raise ValueError("a server's adapters have names of their own; name one as the model instead of an adapter")
        judge = connected(
            text,
            model=model,
            api_key_env=api_key_env,
            temperature=temperature,
            variants=variants,
            decline=decline,
        )
        return cls(judge, name=judge.model)

    @property
    def note(self) -> str:
        """What a reader of the scores must know of the judge; empty for most."""
        domain = getattr(self.judge, "domain", None)
        if domain is None or self.name == "tiny":
            return TINY_NOTE if self.name == "tiny" else ""
        return f"Judged by {self.name}, which knows {domain.name} only and declines other images."

    def score(
        self,
        first: Image | Path | str,
        second: Image | Path | str,
        *,
        theme: str = "",
        criteria: Mapping[str, str] | None = None,
        symmetric: bool = False,
    ) -> float:
        """P(Yes) of two images: files, http(s) URLs, or PIL's own. Raises RuntimeError if the judge gives no answer."""
        scores = self.score_set([first, second], theme=theme, criteria=criteria, symmetric=symmetric)
        if scores.mean is None:
            raise RuntimeError(f"{self.name} gave no verdict: {scores.pairs[0].error}")
        return scores.mean

    def score_set(self, images: Sequence[Image | Path | str], **options: Any) -> Scores:
        """Every pair of two images or more; options as in `score`, and `reasons`."""
        return self._ask(score_set, images, **options)

    def rank(self, images: Sequence[Image | Path | str], **options: Any) -> Scores:
        """The first image against each of the others; options as in `score`, and `reasons`."""
        return self._ask(rank, images, **options)

    def explain(self, first: Image | Path | str, second: Image | Path | str, *, theme: str = "") -> str:
        """The judge's answer in words."""
        (asked,) = questions_about(theme)
        return self.judge.explain(Question((_as_image(first), _as_image(second)), asked.text))

    def close(self) -> None:
        """Lets go of a server."""
        close = getattr(self.judge, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(
        self,
        how: Callable[..., Scores],
        images: Sequence[Image | Path | str],
        *,
        theme: str = "",
        criteria: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Scores:
        opened = [_as_image(image) for image in images]
        return how(self.judge, opened, asked=questions_about(theme, criteria), **options)


def _local(checkpoint: str, *, adapter: str, **options: Any) -> Judge:
    from transformers.utils import logging

    from pacorl.judges.local import LocalJudge, placement

    logging.disable_progress_bar()  # one would be drawn for the weights, between a command's own lines
    return LocalJudge.from_pretrained(checkpoint, adapter=adapter, **options, **placement(checkpoint))


def _local_name(checkpoint: str, adapter: str) -> str:
    return f"{checkpoint} + {adapter}" if adapter else checkpoint


def _as_image(image: Image | Path | str) -> Image:
    return open_source(image) if isinstance(image, str | Path) else image
