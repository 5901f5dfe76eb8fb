"""Does repair make sets sound? Shares by the oracle before and after, on sets of the tiny generator.

    nice python benchmarks/repair.py                       # 32 held-out prompts, 12 tries each: about 5 CPU minutes
    nice python benchmarks/repair.py --without-references --prompts 16 --json

The tiny generator makes a set of four panels for every held-out prompt. `generate.repair` redraws the panels that fail
the gate, which compares each with one drawing of the prompt's character, or with the other panels. A set is sound if
the oracle, which neither gate nor repair reads, recognises every panel and all show the same character and palette. A
repair with fewer tries is the beginning of a longer one. Intervals: 95 %, bootstrap over prompts; gains are paired.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from PIL.Image import Image

from pacorl.core.ranking import bootstrap
from pacorl.generate.generator import Generator
from pacorl.generate.repair import Repair, panel_prompt, redraw_by, repair_set
from pacorl.generate.sets import generate_sets
from pacorl.io.quiet import quiet_loading
from pacorl.judge.check import ControlError, check_set
from pacorl.judge.local import LocalJudge
from pacorl.runtime.cores import use_cores
from pacorl.tiny.characters import Oracle, Panel, character_prompts, draw, set_of
from pacorl.types import Prompt

SIDE = 64


def main() -> None:
    options = arguments()
    quiet_loading()
    use_cores()
    generator = Generator.from_pretrained("tiny")
    judge = LocalJudge.from_pretrained("tiny", decline=True)
    budgets = sorted({tries for tries in (4, 8, options.tries) if tries <= options.tries})

    # Column 0: before. Then a column for each number of tries.
    sound_PT = []
    match_PT = []
    passed = []
    spent = []
    refused = 0
    prompts = character_prompts("test", options.prompts)
    for number, prompt in enumerate(prompts):
        (made,) = generate_sets(generator, prompt, seed=seed_of(number))
        panels = made.panels
        references = not options.without_references
        repair = repaired(
            generator, judge, prompt, panels, number, tries=options.tries, least=options.min, references=references
        )
        grades = [graded(prompt, panels, repair, budget) for budget in (0, *budgets)]
        sound_PT.append([grade["all_equal_pairs"] == 1 == grade["valid"] for grade in grades])
        match_PT.append([grade["prompt_match"] for grade in grades])
        passed.append(repair is not None and repair.after.passed)
        spent.append(len(repair.tries) if repair else 0)
        refused += repair is None

    result = {
        "sets": len(prompts),
        "compared with": "the other panels" if options.without_references else "one drawing of the character",
        "sound": intervals(np.array(sound_PT, dtype=float), budgets),
        "prompt match": intervals(np.array(match_PT), budgets),
        "passed": int(sum(passed)),
        "passed and sound": int(sum(ok and sound[-1] for ok, sound in zip(passed, sound_PT, strict=True))),
        "refused by a control": refused,
        "tries per set": float(np.mean(spent)),
    }
    print(json.dumps(result, indent=2) if options.json else table(result))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tries", type=int, default=12)
    parser.add_argument("--min", type=float, default=0.5, help="threshold of the gate")
    parser.add_argument("--without-references", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def repaired(
    generator: Generator,
    judge: LocalJudge,
    prompt: Prompt,
    panels: Sequence[Image],
    number: int,
    *,
    tries: int,
    least: float,
    references: bool,
) -> Repair | None:
    """Repair the set of a prompt; None if the judge fails a control with its first panel."""
    subject = Panel.parse(prompt.panels[0]).kept
    (drawn,) = set_of(subject, 1, random.Random(number))
    characters = [("hero", [draw(drawn, SIDE)])] if references else []
    seeds = [seed_of(number)] * prompt.grid.count
    redraw = redraw_by(generator, [panel_prompt("tiny", text) for text in prompt.panels], seeds=seeds)
    try:
        return repair_set(
            panels,
            gate=partial(check_set, judge, least=least, characters=characters),
            redraw=redraw,
            tries=tries,
        )
    except ControlError:
        return None


def seed_of(number: int) -> int:
    """Return the seed of a set; its tries count on from there."""
    return 1000 * number


def graded(prompt: Prompt, panels: Sequence[Image], repair: Repair | None, tries: int) -> dict[str, float]:
    """Grade the set as it is after some tries."""
    panels = list(panels)
    for attempt in repair.tries[:tries] if repair else ():
        if attempt.accepted:
            panels[attempt.panel] = attempt.image
    return Oracle().grade(prompt, panels)


def intervals(value_PT: np.ndarray[Any, Any], budgets: list[int]) -> dict[str, dict[str, float | None]]:
    """Compute the mean before, and after each number of tries, and the paired gains."""
    gains_PT = value_PT[:, 1:] - value_PT[:, :1]
    columns = np.concatenate([value_PT, gains_PT], axis=1)
    found = bootstrap(range(len(columns)), lambda index_P: columns[index_P].mean(axis=0))
    names = ["before", *(f"after {tries} tries" for tries in budgets), *(f"gain of {tries} tries" for tries in budgets)]
    return {
        name: {"mean": interval.mean, "low": interval.low, "high": interval.high}
        for name, interval in zip(names, found, strict=True)
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['sets']} sets, compared with {result['compared with']}"]
    for figure in ("sound", "prompt match"):
        for name, row in result[figure].items():
            lines.append(f"{figure}, {name:<18} {row['mean']:.3f} ({row['low']:.3f} to {row['high']:.3f})")
    lines.append(
        f"passed {result['passed']}, of them sound {result['passed and sound']}; "
        f"refused by a control {result['refused by a control']}"
    )
    lines.append(f"{result['tries per set']:.1f} tries per set")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
