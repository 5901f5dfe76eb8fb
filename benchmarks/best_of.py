"""Does the judge choose well? Best-of-N on the tiny world, by a judge that never sees the oracle that grades.

    python benchmarks/best_of.py                       # 48 held-out prompts, 4 candidates each, at 128 px
    python benchmarks/best_of.py --adapter runs/quickstart/adapter --json

For every held-out prompt N candidates are generated and ranked by the judge's P(Yes) over their pairs of panels. The
oracle reads what the images show. Compared are the judge's choice, a random pick (its expectation: the mean of the
candidates) and the oracle's own choice, the most that choosing could reach. Intervals: 95 %, bootstrap over prompts,
paired. Exits with 1 if the interval of agreement gained over a random pick does not lie above 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pacorl.core.grid import parse_layout
from pacorl.generate.generated_images import GeneratedImage
from pacorl.generate.generator import Generator
from pacorl.generate.sets import generate_sets
from pacorl.io.quiet import quiet_loading
from pacorl.judge.local import LocalJudge
from pacorl.records.prompts import prompts_from
from pacorl.runtime.cores import use_cores
from pacorl.tiny.characters import Oracle
from pacorl.types import Size

GRADES = ("attribute_agreement", "all_equal_pairs", "prompt_match")
DRAWS = 10_000


def main() -> int:
    options = arguments()
    quiet_loading()
    use_cores()
    sides = parse_layout(options.size)
    generator = Generator.from_pretrained("tiny", adapter=options.adapter)
    made = generate_sets(
        generator,
        prompts_from(options.prompts),
        seed=options.seed,
        best_of=options.best_of,
        judge=LocalJudge.from_pretrained(options.judge),
        size=Size(sides.rows, sides.cols),
        keep_all=True,
    )
    result = compare(made, best_of=options.best_of)
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 0 if result["gain over a random pick"]["attribute_agreement"]["low"] > 0 else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default="tiny:test:48")
    parser.add_argument("--best-of", type=int, default=4)
    parser.add_argument("--size", default="128x128")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--adapter", default="")
    parser.add_argument("--judge", default="tiny", help="a checkpoint folder")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def compare(made: list[GeneratedImage], *, best_of: int) -> dict[str, Any]:
    """`made`: candidates of each prompt in turn, best first by the judge."""
    oracle = Oracle()
    grades = [oracle.grade(one.prompt, one.panels) for one in made]
    grade_GPC = np.array([[grade[name] for grade in grades] for name in GRADES]).reshape(len(GRADES), -1, best_of)
    chosen_GP, random_GP = grade_GPC[:, :, 0], grade_GPC.mean(-1)
    draws = np.random.default_rng(0).integers(0, chosen_GP.shape[1], (DRAWS, chosen_GP.shape[1]))
    return {
        "prompts": chosen_GP.shape[1],
        "candidates": best_of,
        "a random pick": intervals(random_GP, draws),
        "the judge's choice": intervals(chosen_GP, draws),
        "the oracle's choice": intervals(grade_GPC.max(-1), draws),
        "gain over a random pick": intervals(chosen_GP - random_GP, draws),
    }


def intervals(value_GP: NDArray[np.float64], draws: NDArray[np.int64]) -> dict[str, dict[str, float]]:
    return {name: interval(row, draws) for name, row in zip(GRADES, value_GP, strict=True)}


def interval(value_P: NDArray[np.float64], draws: NDArray[np.int64]) -> dict[str, float]:
    low, high = np.quantile(value_P[draws].mean(1), [0.025, 0.975])
    return {"mean": round(float(value_P.mean()), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['prompts']} prompts, {result['candidates']} candidates each"]
    for row in ("a random pick", "the judge's choice", "the oracle's choice", "gain over a random pick"):
        cells = [
            f"{name} {one['mean']:.3f} [{one['low']:+.3f}, {one['high']:+.3f}]" for name, one in result[row].items()
        ]
        lines.append(f"{row:<24} " + "   ".join(cells))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
