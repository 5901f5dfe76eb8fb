"""A progression in four stages on the tiny world: is it painted, and does the judge see where it fails?

    python benchmarks/progression.py             # configs/cases/tiny_journey.yaml, 12 seeds

The tiny world has no plant that grows. It has a journey: one hero at the house, then the tree, the lamp, the boat.
Identity and style must stay, the place must go on. Two things are measured:

painted   sheets by the tiny generator. The oracle reads how many panels are at their stage, and how often all four are;
          the judge reads the stages too (of the four places, the one that it is surest a panel shows), and answers each
          criterion for every pair of panels, which is compared with what the oracle sees.
drawn     faultless journeys of many heroes, and the same with one fault: two stages swapped, a stage repeated, a hat,
          a colour or the time of day changed in one panel. The judge says "in order" where it reads the four stages as
          they should be, and "kept" where every criterion of every pair is more likely Yes than No.

Pairs alone cannot tell a journey from one in the wrong order: what they see is who and in which style. The order is
read from single panels here. It is the tiny judge that is measured, on its own world.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean

from PIL import Image

from pacorl.app.quiet import quiet_loading
from pacorl.app.threads import use_cores
from pacorl.core import questions
from pacorl.data.characters import VALUES, Oracle, Panel, all_panels, draw, split_of
from pacorl.generate.generator import Generator
from pacorl.generate.storyboard import pages, paint_storyboard, read_storyboard
from pacorl.models.judge import Judge, LocalJudge
from pacorl.types import Question

CASE = Path(__file__).parents[1] / "configs" / "cases" / "tiny_journey.yaml"
CRITERIA = {
    "colour": "The hero has the same colour in all images.",
    "shape": "The hero has the same shape in all images.",
    "hat": "The hero wears the same hat in all images.",
    "palette": "All images share one palette and time of day.",
}
FAULTS = ("none", "swapped", "repeated", "hat", "colour", "palette")


def main() -> None:
    options = arguments()
    quiet_loading()
    use_cores()
    judge = LocalJudge.from_pretrained("tiny")
    board = read_storyboard(CASE)
    wanted = [Panel.parse(text) for text in pages(board, "tiny")[0].panels]
    generator = Generator.load("tiny", adapter=options.adapter)
    sheets = [paint_storyboard(generator, board, seed=seed)[0].panels for seed in range(options.seeds)]
    result = {"painted": painted(judge, sheets, wanted), "drawn": drawn(judge, wanted, count=options.drawn)}
    print(json.dumps(result, indent=2))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--drawn", type=int, default=24, help="heroes, of the test split")
    parser.add_argument("--adapter", default="")
    return parser.parse_args()


def painted(judge: Judge, sheets: Sequence[Sequence[Image.Image]], wanted: Sequence[Panel]) -> dict[str, object]:
    """What the generator paints, by the oracle, and how far the judge agrees with it."""
    oracle = Oracle()
    seen = [oracle.read(panels) for panels in sheets]
    at_stage = [[bool(see) and see.prop == want.prop for see, want in zip(row, wanted, strict=True)] for row in seen]
    places = [panel.prop for panel in wanted]
    read = [read_stages(judge, panels, places) for panels in sheets]
    same_reading = [
        said == see.prop for row, saw in zip(read, seen, strict=True) for said, see in zip(row, saw, strict=True) if see
    ]
    return {
        "sheets": len(sheets),
        "panels at their stage, by the oracle": round(fmean(hit for row in at_stage for hit in row), 3),
        "all four in order, by the oracle": round(fmean(all(row) for row in at_stage), 3),
        "judge reads the stage as the oracle does": round(fmean(same_reading), 3),
        "judge and oracle agree on pairs": {
            name: round(fmean(agreements(judge, sheets, seen, name)), 3) for name in CRITERIA
        },
    }


def agreements(
    judge: Judge, sheets: Sequence[Sequence[Image.Image]], seen: Sequence[Sequence[Panel | None]], name: str
) -> list[bool]:
    """Per pair of valid panels: does the judge's answer to one criterion fit what the oracle reads?"""
    asked, truth = [], []
    for panels, row in zip(sheets, seen, strict=True):
        for i, j in combinations(range(len(panels)), 2):
            first, second = row[i], row[j]
            if first and second:
                asked.append(Question((panels[i], panels[j]), questions.meets_criterion(CRITERIA[name])))
                truth.append(getattr(first, name) == getattr(second, name))
    said = [(verdict.p_yes or 0.0) > 0.5 for verdict in judge.verdicts(asked)]
    return [a == b for a, b in zip(said, truth, strict=True)]


def drawn(judge: Judge, wanted: Sequence[Panel], *, count: int) -> dict[str, dict[str, float]]:
    """Per fault: how often the judge says "in order" and "kept", over `count` held-out heroes."""
    rng = random.Random(0)
    heroes = rng.sample(sorted({panel.kept for panel in all_panels() if split_of(panel) == "test"}), count)
    places = [panel.prop for panel in wanted]
    table = {}
    for fault in FAULTS:
        sheets = []
        for kept in heroes:
            journey = [Panel(*kept, panel.pose, panel.prop) for panel in wanted]
            sheets.append([draw(panel, 64) for panel in with_fault(journey, fault, rng)])
        table[fault] = {
            "in order": round(fmean(read_stages(judge, panels, places) == places for panels in sheets), 3),
            "kept": round(fmean(is_kept(judge, panels) for panels in sheets), 3),
        }
    return table


def with_fault(journey: Sequence[Panel], fault: str, rng: random.Random) -> list[Panel]:
    panels, place = list(journey), rng.randrange(len(journey))
    other = rng.choice([index for index in range(len(journey)) if index != place])
    if fault == "swapped":
        panels[place], panels[other] = panels[other], panels[place]
    elif fault == "repeated":
        panels[place] = panels[other]
    elif fault != "none":
        values = [value for value in VALUES[fault] if value != getattr(panels[place], fault)]
        panels[place] = replace(panels[place], **{fault: rng.choice(values)})
    return panels


def read_stages(judge: Judge, panels: Sequence[Image.Image], places: Sequence[str]) -> list[str]:
    """The place that each panel shows most surely, by the judge."""
    asked = [Question((panel,), questions.shows_text(place)) for panel in panels for place in places]
    sure = [verdict.p_yes or 0.0 for verdict in judge.verdicts(asked)]
    rows = [sure[start : start + len(places)] for start in range(0, len(sure), len(places))]
    return [places[row.index(max(row))] for row in rows]


def is_kept(judge: Judge, panels: Sequence[Image.Image]) -> bool:
    asked = [
        Question(pair, questions.meets_criterion(text))
        for pair in combinations(panels, 2)
        for text in CRITERIA.values()
    ]
    return all((verdict.p_yes or 0.0) > 0.5 for verdict in judge.verdicts(asked))


if __name__ == "__main__":
    main()
