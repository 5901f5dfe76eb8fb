"""The weight of the decision token: LoRA on the tiny judge for α ∈ {1/n, 0.01, 0.1, 0.5, 0.9, 1}, three seeds.

    python benchmarks/alpha_sweep.py --out runs/alpha_sweep      # --quick: three α, one seed, a quarter of the steps

The start is deliberately weak: the committed judge is asked whether two panels show one hero *whatever the palette*,
a question that it was never taught. Each run is
`pacorl train-reward configs/reward/tiny.yaml` with one α and one seed, on the same pairs of training characters;
measured is the decision on pairs of test characters. A finished run is not run again.

Reasons of `tiny:train` are so short that 1/n is about 0.09. With `--length 10|40|160` they carry the evidence in about
so many tokens, and test pairs have a palette that no training pair shows (`evidence.py`); `--seed` runs one seed.

Writes results.json, table.md and alpha_sweep.svg into --out. The paper finds α = 0.1 best for a 7B judge and reports no
table (arXiv 2512.04784, §3.2).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from evidence import LENGTHS, write_pairs
from markupsafe import Markup

from pacorl.config.base import load
from pacorl.io.quiet import quiet_loading
from pacorl.judge_training.judge_config import JudgeConfig
from pacorl.records.comparisons import comparisons_from
from pacorl.report.figures import Scale, tag
from pacorl.runtime.cores import use_cores

RECIPE = Path(__file__).parents[1] / "configs" / "reward" / "tiny.yaml"
ALPHAS = ("uniform", "0.01", "0.1", "0.5", "0.9", "1")
LABELS = {"uniform": "1/n", "0.01": ".01", "0.1": ".1", "0.5": ".5", "0.9": ".9", "1": "1"}
MEASURES = {"decision_accuracy": "decision accuracy", "auc": "AUC", "ece": "ECE", "order_gap": "order gap"}
PLOTTED = ("decision_accuracy", "auc")
SAME_START = 1e-3
"""A measure of one judge may differ by so much from machine to machine; another judge's differs by more."""


@dataclass(frozen=True, slots=True)
class Result:
    """One run."""

    alpha: str
    seed: int
    before: dict[str, float]
    after: dict[str, float]
    cpu_seconds: float


def main() -> None:
    options = arguments()
    quiet_loading()
    use_cores()
    alphas, seeds, steps = options.alphas, range(options.seeds), options.steps
    if options.seed is not None:
        seeds = range(options.seed, options.seed + 1)
    if options.quick:
        alphas, seeds, steps = ("uniform", "0.1", "1"), range(1), max(1, steps // 4)
    if options.length:
        data = options.out / "data"
        test = write_pairs(data / "test", split="test", count=options.test_pairs, length=options.length)
        train = write_pairs(data / "train", split="train", count=options.pairs, length=options.length)
    else:
        test = drawn(f"tiny:test:{options.test_pairs}", options.out)
        train = drawn(f"tiny:train:{options.pairs}", options.out)
    results = []
    for seed in seeds:
        for alpha in alphas:
            results.append(run(alpha, seed, steps=steps, train=train, test=test, out=options.out))
            print(line(results[-1]), flush=True)
            check_start(results)
    (options.out / "results.json").write_text(json.dumps([asdict(one) for one in results], indent=2) + "\n")
    (options.out / "table.md").write_text(table(results))
    (options.out / "alpha_sweep.svg").write_text(plot(results))
    print(table(results))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--alphas", nargs="+", choices=ALPHAS, default=ALPHAS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, help="this seed alone")
    parser.add_argument("--length", type=int, choices=LENGTHS, help="tokens of reasons that carry the evidence")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps of 16 pairs")
    parser.add_argument("--pairs", type=int, default=800, help="training pairs")
    parser.add_argument("--test-pairs", type=int, default=240)
    parser.add_argument("--quick", action="store_true", help="three α, one seed, a quarter of the steps")
    found = parser.parse_args()
    found.out.mkdir(parents=True, exist_ok=True)
    return found


def drawn(source: str, out: Path) -> Path:
    """The JSONL of pairs that are drawn once for all runs."""
    comparisons_from(source, scratch=out / "data")
    return out / "data" / source.replace(":", "-") / "comparisons.jsonl"


def run(alpha: str, seed: int, *, steps: int, train: Path, test: Path, out: Path) -> Result:
    """One training, or what it left behind. Raises ValueError where that was made with other settings."""
    from pacorl.judge_training.judge_trainer import JudgeTrainer

    folder = out / f"alpha-{alpha}-steps-{steps}-seed-{seed}"
    known = folder / "result.json"
    if not known.exists():
        overrides = [f"out={folder}", f"seed={seed}", f"loss.alpha={alpha}", f"max_steps={steps}", "trackers=[]"]
        overrides += [f"data.train=['{train}']", f"data.evaluation=['{test}']", "evaluate_every=0", "save_every=1000"]
        started = time.process_time()
        JudgeTrainer(load(JudgeConfig, RECIPE, overrides), resume=folder.exists()).train()
        summary = json.loads((folder / "summary.json").read_text())
        measured = [{name: summary[when][name]["mean"] for name in MEASURES} for when in ("before", "after")]
        found = Result(alpha, seed, *measured, cpu_seconds=time.process_time() - started)
        known.write_text(json.dumps(asdict(found)))
    return Result(**json.loads(known.read_text()))


def check_start(results: Sequence[Result]) -> None:
    """Raises ValueError where runs began from different judges: their ends cannot be compared."""
    first, last = results[0], results[-1]
    if any(abs(first.before[name] - last.before[name]) > SAME_START for name in MEASURES):
        raise ValueError(f"α {last.alpha}, seed {last.seed} began from another judge than α {first.alpha}, seed "
                         f"{first.seed}; give another --out and start over")  # fmt: skip


def line(one: Result) -> str:
    values = "  ".join(f"{name} {one.before[name]:.3f} → {one.after[name]:.3f}" for name in MEASURES)
    return f"α {LABELS[one.alpha]:>4}  seed {one.seed}  {values}  {one.cpu_seconds:.0f} CPU s"


def by_alpha(results: Sequence[Result], name: str) -> dict[str, list[float]]:
    """A measure of every seed, by α in the order of the sweep."""
    found: dict[str, list[float]] = {}
    for one in sorted(results, key=lambda one: ALPHAS.index(one.alpha)):
        found.setdefault(one.alpha, []).append(one.after[name])
    return found


def table(results: Sequence[Result]) -> str:
    """Means over seeds, with lowest and highest where there are several."""
    before = results[0].before
    rows = [f"| α | {' | '.join(MEASURES.values())} |", f"|---|{'---|' * len(MEASURES)}"]
    rows.append(f"| before | {' | '.join(f'{before[name]:.3f}' for name in MEASURES)} |")
    for alpha in by_alpha(results, "auc"):
        cells = [cell(by_alpha(results, name)[alpha]) for name in MEASURES]
        rows.append(f"| {LABELS[alpha]} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def cell(values: Sequence[float]) -> str:
    spread = f" [{min(values):.3f}, {max(values):.3f}]" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{spread}"


def plot(results: Sequence[Result]) -> str:
    """Held-out accuracy and AUC by α: a dot for each seed, a line through the means, the start dashed."""
    width, height, left, right, top, bottom = 560, 300, 52, 420, 16, 252
    alphas = list(by_alpha(results, "auc"))
    values = [one.after[name] for one in results for name in PLOTTED] + [results[0].before[name] for name in PLOTTED]
    low = max(0.0, min(values) // 0.1 * 0.1)
    y = Scale(low, 1.0, bottom, top)
    places = [left + (index + 0.5) * (right - left) / len(alphas) for index in range(len(alphas))]
    marks = [tag("rect", width=width, height=height, fill="white")]
    for step in range(round(low * 10), 11):
        marks.append(tag("line", x1=left, x2=right, y1=y(step / 10), y2=y(step / 10), stroke="#ddd"))
        marks.append(tag("text", f"{step / 10:.1f}", x=left - 8, y=y(step / 10) + 4, text_anchor="end"))
    for place, alpha in zip(places, alphas, strict=True):
        marks.append(tag("text", LABELS[alpha], x=place, y=bottom + 20, text_anchor="middle"))
    marks.append(
        tag("text", "α, the weight of the decision", x=(left + right) / 2, y=bottom + 40, text_anchor="middle")
    )
    for name, colour, row in zip(PLOTTED, ("#1f6fb4", "#c2571a"), (0, 1), strict=True):
        marks += series(by_alpha(results, name), places=places, y=y, colour=colour)
        start = {"y1": y(results[0].before[name]), "y2": y(results[0].before[name]), "stroke_dasharray": "4 4"}
        marks.append(tag("line", x1=left, x2=right, stroke=colour, stroke_opacity=0.6, **start))
        marks.append(tag("text", MEASURES[name], x=right + 14, y=top + 14 + 18 * row, fill=colour))
    marks.append(tag("text", "dashed: before", x=right + 14, y=top + 50, fill="#777"))
    return str(tag("svg", *marks, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}",
                   width=width, height=height, font_family="sans-serif", font_size=12))  # fmt: skip


def series(found: dict[str, list[float]], *, places: list[float], y: Scale, colour: str) -> list[Markup]:
    """A dot for each seed, a line through the means."""
    columns = list(zip(places, found.values(), strict=True))
    points = " ".join(f"{x:.1f},{y(fmean(several)):.1f}" for x, several in columns)
    dots = [tag("circle", cx=x, cy=y(one), r=3, fill=colour, fill_opacity=0.6) for x, many in columns for one in many]
    return [tag("polyline", points=points, fill="none", stroke=colour, stroke_width=2), *dots]


if __name__ == "__main__":
    main()
