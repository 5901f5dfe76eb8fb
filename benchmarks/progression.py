"""A progression in four stages on the tiny world: is it generated, and does the judge see where it fails?

    python benchmarks/progression.py             # configs/cases/tiny_journey.yaml, 12 seeds

The tiny world has no plant that grows. It has a journey: one hero at the house, then the tree, the lamp, the boat.
Identity and style must stay, the place must go on. Three things are measured:

generated sets by the tiny generator. The oracle reads how many panels are at their stage, and how often all four are;
          the judge reads the stages too (of the four texts, the one that it is surest a panel shows), and answers each
          criterion for every pair of panels, which is compared with what the oracle sees.
drawn     faultless journeys of many heroes, and the same with one fault: two stages swapped, a stage repeated, a hat,
          a colour or the time of day changed in one panel. The judge says "in order" where it reads the four stages as
          they should be, and "kept" where every criterion of every pair is more likely Yes than No.

day       likewise drawn: one hero in one place at dawn, by day, at sunset, at night, and with a fault. The judge says
          "goes on" where it answers No to "one palette" for every pair, and "kept" where it answers Yes to every
          identity criterion of every pair. So a stage that stands still can be seen by pairs, and who has changed.

Pairs alone cannot tell stages from the same in another order; that needs a judge that reads single panels. It is the
tiny judge that is measured, on its own world.
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

from pacorl.core import questions
from pacorl.generate.generator import Generator
from pacorl.generate.storyboard import generate_storyboard, pages, read_storyboard
from pacorl.io.quiet import quiet_loading
from pacorl.judge.judge import Judge
from pacorl.judge.local import LocalJudge
from pacorl.runtime.cores import use_cores
from pacorl.tiny.characters import VALUES, Oracle, Panel, draw, panels_of
from pacorl.types import Question

CASE = Path(__file__).parents[1] / "configs" / "cases" / "tiny_journey.yaml"
CRITERIA = {
    "colour": "The hero has the same colour in all images.",
    "shape": "The hero has the same shape in all images.",
    "hat": "The hero wears the same hat in all images.",
    "palette": "All images share one palette and time of day.",
}
DAY = ("candy", "day", "sunset", "night")
FAULTS = ("none", "swapped", "repeated", "hat", "colour", "palette")


def main() -> None:
    options = arguments()
    quiet_loading()
    use_cores()
    judge = LocalJudge.from_pretrained(options.judge)
    board = read_storyboard(CASE)
    wanted = [Panel.parse(text) for text in pages(board, "tiny")[0].panels]
    result: dict[str, object] = {}
    if options.seeds:
        generator = Generator.from_pretrained("tiny", adapter=options.adapter)
        sets = [generate_storyboard(generator, board, seed=seed)[0].panels for seed in range(options.seeds)]
        result["generated"] = generated(judge, sets, wanted)
    result["drawn"] = drawn(judge, wanted, count=options.drawn)
    result["day"] = day(judge, count=options.drawn)
    print(json.dumps(result, indent=2))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12, help="sets to generate; 0 for the drawn ones alone")
    parser.add_argument("--drawn", type=int, default=24, help="heroes, of the test split")
    parser.add_argument("--adapter", default="")
    parser.add_argument("--judge", default="tiny", help="a checkpoint folder")
    return parser.parse_args()


def generated(judge: Judge, sets: Sequence[Sequence[Image.Image]], wanted: Sequence[Panel]) -> dict[str, object]:
    """What the generator makes, by the oracle, and how far the judge agrees with it."""
    oracle = Oracle()
    seen = [oracle.read(panels) for panels in sets]
    at_stage = [[bool(see) and see.prop == want.prop for see, want in zip(row, wanted, strict=True)] for row in seen]
    places = [panel.prop for panel in wanted]
    read = [read_stages(judge, panels, wanted) for panels in sets]
    same_reading = [
        places[said] == see.prop
        for row, saw in zip(read, seen, strict=True)
        for said, see in zip(row, saw, strict=True)
        if see
    ]
    return {
        "sets": len(sets),
        "panels at their stage, by the oracle": round(fmean(hit for row in at_stage for hit in row), 3),
        "all four in order, by the oracle": round(fmean(all(row) for row in at_stage), 3),
        "judge reads the stage as the oracle does": round(fmean(same_reading), 3),
        "judge and oracle agree on pairs": {
            name: round(fmean(agreements(judge, sets, seen, name)), 3) for name in CRITERIA
        },
    }


def agreements(
    judge: Judge, sets: Sequence[Sequence[Image.Image]], seen: Sequence[Sequence[Panel | None]], name: str
) -> list[bool]:
    """Per pair of valid panels: does the judge's answer to one criterion fit what the oracle reads?"""
    asked, truth = [], []
    for panels, row in zip(sets, seen, strict=True):
        for i, j in combinations(range(len(panels)), 2):
            first, second = row[i], row[j]
            if first and second:
                asked.append(Question((panels[i], panels[j]), questions.meets_criterion(CRITERIA[name])))
                truth.append(getattr(first, name) == getattr(second, name))
    answers = [(verdict.p_yes or 0.0) > 0.5 for verdict in judge.verdicts(asked)]
    return [a == b for a, b in zip(answers, truth, strict=True)]


def drawn(judge: Judge, wanted: Sequence[Panel], *, count: int) -> dict[str, dict[str, float]]:
    """Per fault: how often the judge says "in order" and "kept", over `count` held-out heroes."""
    rng = random.Random(0)
    heroes = rng.sample(sorted({panel.kept for panel in panels_of("test")}), count)
    journeys = [[Panel(*kept, panel.pose, panel.prop) for panel in wanted] for kept in heroes]
    table = {}
    for fault in FAULTS:
        sets = [[draw(panel, 64) for panel in with_fault(journey, fault, rng)] for journey in journeys]
        in_order = [
            read_stages(judge, panels, journey) == list(range(len(journey)))
            for panels, journey in zip(sets, journeys, strict=True)
        ]
        kept = [min(said(judge, panels, list(CRITERIA))) > 0.5 for panels in sets]
        table[fault] = {"in order": round(fmean(in_order), 3), "kept": round(fmean(kept), 3)}
    return table


def day(judge: Judge, *, count: int) -> dict[str, dict[str, float]]:
    """Per fault: how often the judge says "goes on" and "kept" of a drawn day, over `count` held-out heroes."""
    rng = random.Random(1)
    heroes = rng.sample(panels_of("test"), count)
    table = {}
    for fault in ("none", "repeated", "hat", "colour", "shape"):
        sets = [
            [draw(panel, 64) for panel in with_fault([replace(hero, palette=time) for time in DAY], fault, rng)]
            for hero in heroes
        ]
        goes_on = [max(said(judge, panels, ["palette"])) < 0.5 for panels in sets]
        kept = [min(said(judge, panels, ["colour", "shape", "hat"])) > 0.5 for panels in sets]
        table[fault] = {"goes on": round(fmean(goes_on), 3), "kept": round(fmean(kept), 3)}
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


def read_stages(judge: Judge, panels: Sequence[Image.Image], stages: Sequence[Panel]) -> list[int]:
    """The stage whose text each panel shows most surely, by the judge."""
    asked = [Question((panel,), questions.shows_text(stage.text)) for panel in panels for stage in stages]
    sure = [verdict.p_yes or 0.0 for verdict in judge.verdicts(asked)]
    rows = [sure[start : start + len(stages)] for start in range(0, len(sure), len(stages))]
    return [row.index(max(row)) for row in rows]


def said(judge: Judge, panels: Sequence[Image.Image], names: Sequence[str]) -> list[float]:
    """P(Yes) of some criteria for every pair of panels."""
    asked = [
        Question(pair, questions.meets_criterion(CRITERIA[name])) for pair in combinations(panels, 2) for name in names
    ]
    return [verdict.p_yes or 0.0 for verdict in judge.verdicts(asked)]


if __name__ == "__main__":
    main()
