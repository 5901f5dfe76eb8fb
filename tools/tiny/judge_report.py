"""How often the tiny judge is right, by kind of question: `python -m tools.tiny judge-report`.

Examples are those of its lessons, about characters of the split `test`, and the judge reads images through its own
processor. A kind whose answers are all No is measured beside as many sound pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, cast

import numpy as np
from diffusers import AutoencoderKL
from PIL import Image

from pacorl.core import questions
from pacorl.judge.judge import Judge
from pacorl.judge_training.loop import auc
from pacorl.tiny import characters
from pacorl.tiny.characters import IDENTITY, KEPT, VALUES, Panel
from pacorl.types import Question
from tools.tiny import pretrain_judge as lessons
from tools.tiny.defects import DEFECTS, OF_THE_PROP, SIZES, Defect, Mixed, by_kind, draw_defects, draw_mixed
from tools.tiny.negatives import draw_negatives
from tools.tiny.pretrain_judge import ImageBank, TrainingExample

Make = Callable[[Panel, Sequence[Panel], Random, ImageBank], TrainingExample]


class Drawings:
    """An `ImageBank` that draws on demand and keeps the images themselves."""

    def __init__(
        self, sizes: Sequence[int], *, negatives: Sequence[Image.Image], faulty: Sequence[Mixed | Defect] = ()
    ) -> None:
        self.sizes = sizes
        self.negatives = negatives
        self.mixed, self.defects = by_kind(faulty)
        self.images: list[Image.Image] = []

    def of(self, panel: Panel, rng: Random) -> int:
        """Draw a panel at one of the sizes."""
        return self._add(characters.draw(panel, rng.choice(self.sizes)))

    def of_negative(self, rng: Random) -> int:
        """Choose a negative."""
        return self._add(rng.choice(self.negatives))

    def of_faulty(self, panel: Mixed | Defect) -> int:
        """Return the index of a faulty panel."""
        return self._add(panel.image)

    def _add(self, image: Image.Image) -> int:
        self.images.append(image)
        return len(self.images) - 1


@dataclass(frozen=True, slots=True)
class Measured:
    """The answers to one kind of question."""

    kind: str
    count: int
    right: float
    """Share of right decisions."""
    auc: float
    yes: float
    """Share of questions whose answer is Yes."""


def measure_judge(judge: Judge, *, vae: AutoencoderKL, count: int, kinds: Sequence[str] = ()) -> list[Measured]:
    """Measure a judge on `count` examples of each kind, or of the named ones."""
    negatives = draw_negatives(300, seed=12345, vae=vae)
    faulty: list[Mixed | Defect] = []
    for draw in (draw_mixed, draw_defects):
        faulty += draw(600, split="test", rng=Random("report"), vae=vae)

    unknown = sorted({*kinds} - {*every_kind(faulty)})
    if unknown:
        raise ValueError(f"there is no kind {unknown[0]!r} of question; there are {', '.join(every_kind(faulty))}")
    rows = []
    for kind, (make, sizes, chosen) in every_kind(faulty).items():
        if kinds and kind not in kinds:
            continue
        bank = Drawings(sizes, negatives=negatives, faulty=chosen)
        rows.append(_measured(judge, kind, make, bank, count))
    return rows


def every_kind(faulty: Sequence[Mixed | Defect]) -> dict[str, tuple[Make, Sequence[int], Sequence[Mixed | Defect]]]:
    """Return kind → maker of its examples, sizes of its panels, and its faulty panels."""
    kinds: dict[str, tuple[Make, Sequence[int], Sequence[Mixed | Defect]]] = {}
    for size in SIZES:
        kinds[f"pairs of {size} px"] = (lessons._pair_example, (size,), ())
        kinds[f"texts of {size} px"] = (lessons._text_example, (size,), ())
    kinds |= {
        "pairs of two sizes": (lessons._pair_example, SIZES, ()),
        "criteria": (lessons._criterion_example, SIZES, ()),
        "references": (lessons._reference_example, SIZES, ()),
        "pose and framing": (lessons._pose_example, SIZES, ()),
        "parts of texts": (lessons._partial_text, SIZES, ()),
        "descriptions": (description, SIZES, ()),
        "single words": (single_word, SIZES, ()),
        "texts of faulty panels": (lessons._faulty_text, SIZES, faulty),
        "criteria of mixed palettes": (lessons._faulty_criterion, SIZES, faulty),
        "mixed palettes": (beside_sound(lessons._mixed_pair), SIZES, faulty),
    }
    for name in DEFECTS:
        if name not in OF_THE_PROP:
            chosen = [panel for panel in faulty if isinstance(panel, Defect) and panel.name == name]
            kinds[f"defects: {name}"] = (beside_sound(lessons._damaged_pair), SIZES, chosen)
    return kinds


def beside_sound(make: Make) -> Make:
    """Alternate, by chance, the examples of a kind and sound pairs."""

    def alternating(panel: Panel, pool: Sequence[Panel], rng: Random, bank: ImageBank) -> TrainingExample:
        if rng.random() < 0.5:
            return make(panel, pool, rng, bank)
        images = (bank.of(panel, rng), bank.of(lessons._new_scene(panel, rng), rng))
        question = rng.choice((questions.consistent(), questions.same_theme(lessons._theme(panel, rng))))
        return TrainingExample(images, question, "Yes.")

    return alternating


def description(panel: Panel, pool: Sequence[Panel], rng: Random, bank: ImageBank) -> TrainingExample:
    """Ask whether a panel shows a character by its description, as the reward `reference` does."""
    names = rng.choice((KEPT, IDENTITY, ("colour", "shape")))
    shows = rng.random() < 0.5
    looks = panel if shows else characters.redrawn_once(panel, rng, names=names)
    text = questions.shows_text(lessons.described(looks, names, rng))
    return TrainingExample((bank.of(panel, rng),), text, "Yes." if shows else "No.")


def single_word(panel: Panel, pool: Sequence[Panel], rng: Random, bank: ImageBank) -> TrainingExample:
    """Ask whether a panel shows one value of an attribute."""
    name = rng.choice(tuple(VALUES))
    shows = rng.random() < 0.5
    value = getattr(panel if shows else characters.with_another(panel, name, rng), name)
    return TrainingExample((bank.of(panel, rng),), questions.shows_text(value), "Yes." if shows else "No.")


def _measured(judge: Judge, kind: str, make: Make, bank: Drawings, count: int) -> Measured:
    rng = Random(f"report-{kind}")
    pool = characters.panels_of("test")
    examples = [make(rng.choice(pool), pool, rng, cast(Any, bank)) for _ in range(count)]
    asked = []
    for example in examples:
        asked.append(Question(tuple(bank.images[image] for image in example.images), example.question))

    # A missing answer counts as No.
    p_yes = np.array([verdict.p_yes or 0.0 for verdict in judge.verdicts(asked)])
    yes = np.array([example.yes for example in examples])
    return Measured(kind, count, float(np.mean((p_yes > 0.5) == yes)), auc(p_yes, yes), float(yes.mean()))


def table(rows: Sequence[Measured]) -> str:
    """Format the rows as Markdown."""
    lines = ["| kind | right | AUC | Yes |", "|---|---|---|---|"]
    for row in rows:
        lines.append(f"| {row.kind} | {row.right:.3f} | {row.auc:.3f} | {row.yes:.2f} |")
    return "\n".join(lines)
