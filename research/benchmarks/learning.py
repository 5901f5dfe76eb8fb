"""Judged samples and CPU seconds that a form of the epoch needs until the tiny world's generator has learned.

    python -m research.benchmarks.learning --out runs/tuning --forms set nft --seeds 0 1 2  # choose settings here
    python -m research.benchmarks.learning --out runs/learning --split test  # the table: many hours
    python -m research.benchmarks.learning --out runs/learning --forms  # the table of what ran

A run is `configs/tiny.yaml` with the form's settings, judge's share included, on one thread. Every three epochs the
averaged adapter samples 48 prompts at full size, and the oracle grades them; neither is counted. A form has learned
when the attributes that panels share have risen by 0.10 and by 0.15, on a monotone fit through all evaluations of its
budget of epochs. A run that does not get there counts with its whole budget, and its row says how many did not.

Settings are tuned on seeds 0 to 2 and the development prompts. The table is of seeds 3 to 8 and the test prompts, which
tuning never sees. Intervals draw the seeds again. Prompt match and diversity at the end of the budget stand beside, as
changes from the untrained generator.

A run that was stopped goes on from its last evaluation, and a finished one is not run again: each leaves a JSON in
--out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from research.benchmarks.learned import crossing, detectable, pooled_ratio

from pacorl.config import base as configs
from pacorl.config.recipes import recipe
from pacorl.core.grid import split
from pacorl.core.sampler import Sampler
from pacorl.core.schedule import seed_of
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rollout import sample_images
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.quiet import quiet_loading
from pacorl.tiny.oracle import Oracle, evenness, grade, majority
from pacorl.tiny.words import asked_in
from pacorl.types import Size

OWN_NOISE = ("sampling.tree={seeds: 12}", "sampling.suffix={}")
SET = ("advantages.credit=set", "objective={}")
NFT = ("objective.name=diffusion_nft", *OWN_NOISE)
FORMS: dict[str, Sequence[str]] = {
    "set": SET,
    "panel": (),
    "paper": (*SET, *OWN_NOISE),
    "awm": (*SET, "objective.name=awm", *OWN_NOISE),
    "awm_shared_trunks": (*SET, "objective.name=awm"),
    "nft": (*SET, *NFT),
    "quickstart": NFT,
}
"""Form → what it changes in configs/tiny.yaml, which has panel credit; the last makes it configs/quickstart.yaml."""
BASE = "set"
RISES = (0.10, 0.15)
UNITS = ("judged", "cpu_seconds")
GRADES = ("attribute_agreement", "prompt_match", "valid", "diversity")

Run = dict[str, Any]


def main() -> None:
    options = arguments()
    quiet_loading()
    torch.set_num_threads(1)
    forms = dict(FORMS) | ({options.name: tuple(options.set)} if options.name else {})
    chosen = [options.name] if options.name else options.forms
    for seed in options.seeds:
        for form in chosen:
            learn(form, forms[form], seed, options)
    found = [json.loads(path.read_text()) for path in sorted(options.out.glob("*.json"))]
    runs = [run for run in found if "epochs" in run and ended(run, options)]
    if len(runs) < len(found):
        print(f"{len(found) - len(runs)} runs are not finished, and left out", file=sys.stderr)
    rows = summary(runs, options.base)
    print(json.dumps({"rows": rows, "runs": runs}, indent=2) if options.json else table(rows, options.base))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=list(FORMS))
    parser.add_argument("--name", help="a form of your own, with --set")
    parser.add_argument("--set", nargs="+", default=[], help="its settings, as KEY=VALUE of configs/tiny.yaml")
    parser.add_argument("--base", default=BASE, help="the form that others are divided by")
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 5, 6, 7, 8])
    parser.add_argument("--split", choices=["dev", "test"], default="dev")
    parser.add_argument("--every", type=int, default=3, help="epochs between evaluations")
    parser.add_argument("--epochs", type=int, default=45, help="budget of a run")
    parser.add_argument("--until", type=float, help="end a run once its fit has risen by so much; else at its budget")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


# --- a run -----------------------------------------------------------------------------------------------------


def learn(form: str, overrides: Sequence[str], seed: int, options: argparse.Namespace) -> None:
    """Run one form to the end of its budget, or go on where it was stopped."""
    file, folder = options.out / f"{form}-{seed}.json", options.out / f"{form}-{seed}"
    made = {"form": form, "seed": seed, "settings": list(overrides), "split": options.split, "every": options.every}
    run = json.loads(file.read_text()) if file.exists() else made
    if made != {key: run[key] for key in made}:
        raise SystemExit(f"{file} was made with {run['settings']} on {run['split']}; give another --out")
    if "epochs" in run and ended(run, options):
        return

    trainer = PolicyTrainer(config_of(overrides, seed, folder, options), resume=(folder / "checkpoints").exists())
    if "epochs" not in run:
        run |= {"epochs": [0], "judged": [0], "cpu_seconds": [0.0]}
        run |= {name: [value] for name, value in (untrained(run, options.out) or grades(trainer)).items()}
    while run["epochs"][-1] > trainer.epoch:  # a line whose checkpoint was not written any more
        for column in ("epochs", *UNITS, *GRADES):
            run[column].pop()

    judged = options.every * trainer.config.prompts_per_epoch * trainer.config.group_size
    while not ended(run, options):
        started = time.process_time()
        for _ in range(options.every):
            trainer.run_epoch()
        run["cpu_seconds"].append(run["cpu_seconds"][-1] + time.process_time() - started)
        run["judged"].append(run["judged"][-1] + judged)
        run["epochs"].append(trainer.epoch)
        for name, value in grades(trainer).items():
            run[name].append(value)

        file.write_text(json.dumps(run, indent=1) + "\n")
        trainer.save()
        print(f"{form} {seed}: epoch {trainer.epoch}, agreement {run['attribute_agreement'][-1]:.3f}", flush=True)
    trainer.close()


def ended(run: Run, options: argparse.Namespace) -> bool:
    """Check whether a run has spent its budget, or has risen by `--until`."""
    if run["epochs"][-1] >= options.epochs:
        return True
    return options.until is not None and not missed([run], options.until)


def untrained(run: Run, out: Path) -> dict[str, float]:
    """Take the untrained generator's grades from a run of the same seed by another form, which has the same images.

    Nothing without such a run, or if a form changes the generator or its evaluation.
    """
    changed = ("model.", "evaluation.", "prompts.")
    for path in sorted(out.glob(f"*-{run['seed']}.json")):
        other = json.loads(path.read_text())
        same = all(other[key] == run[key] for key in ("split", "seed"))
        if same and not any(setting.startswith(changed) for setting in (*run["settings"], *other["settings"])):
            return {name: other[name][0] for name in GRADES}
    return {}


def config_of(overrides: Sequence[str], seed: int, folder: Path, options: argparse.Namespace) -> PolicyConfig:
    settings = [f"out={folder}", f"seed={seed}", f"epochs={options.epochs}", "save_every=1000", "trackers=[]"]
    settings += [f"prompts.evaluation=tiny:{options.split}", f"prompts.evaluation_limit={options.prompts}"]
    return configs.load(PolicyConfig, recipe(), [*settings, *overrides])


@torch.no_grad()
def grades(trainer: PolicyTrainer) -> dict[str, float]:
    """Let the oracle grade the averaged adapter's images at full size."""
    config, prompts, oracle = trainer.config, trainer.evaluation_prompts, Oracle()
    with trainer.lora.average.swapped_in():
        images = sample_images(
            trainer.policy,
            prompts,
            sampler=Sampler(size=Size(*config.evaluation.size), steps=config.evaluation.steps),
            cache=trainer.cache,
            seeds=[seed_of(config.seed, "evaluation", prompt.id, 0) for prompt in prompts],
            batch=config.evaluation.batch,
        )

    graded, majorities = [], []
    for prompt, image in zip(prompts, images, strict=True):
        seen = oracle.read(split(image, prompt.grid))
        graded.append(grade(asked_in(prompt), seen))
        majorities.append(majority(seen))
    means = {name: fmean(each[name] for each in graded) for name in GRADES if name != "diversity"}
    return means | {"diversity": evenness(majorities)}


# --- the table -------------------------------------------------------------------------------------------------


def summary(runs: Sequence[Run], base: str) -> list[dict[str, Any]]:
    """Compare each form with the base: one row per form."""
    by_form: dict[str, list[Run]] = {}
    for run in runs:
        by_form.setdefault(run["form"], []).append(run)

    rows = []
    for form, several in by_form.items():
        row: dict[str, Any] = {"form": form, "seeds": [run["seed"] for run in several]}
        row["epochs"] = min(run["epochs"][-1] for run in several)
        for name in GRADES:
            row[name] = fmean(run[name][-1] - run[name][0] for run in several)
        for rise in RISES:
            for unit in UNITS:
                spent = until_learned(several, rise, unit)
                compared = {}
                if form != base and base in by_form:
                    compared = compare(spent, until_learned(by_form[base], rise, unit))
                row[f"{rise:.2f} {unit}"] = {"mean": fmean(spent.values())} | compared
            row[f"{rise:.2f} missed"] = missed(several, rise)
        rows.append(row)
    return rows


def until_learned(runs: Sequence[Run], rise: float, unit: str) -> dict[int, float]:
    """Seed → spent until it had learned, or its budget."""
    spent = {}
    for run in runs:
        reached = crossing(run[unit], run["attribute_agreement"], rise)
        spent[run["seed"]] = run[unit][-1] if reached is None else reached
    return spent


def missed(runs: Sequence[Run], rise: float) -> int:
    """Count the runs that had not learned at the end of their budget."""
    return sum(crossing(run["epochs"], run["attribute_agreement"], rise) is None for run in runs)


def compare(form: Mapping[int, float], base: Mapping[int, float]) -> dict[str, Any]:
    """Divide by the base, if it has seeds in common."""
    if not set(form) & set(base):
        return {}
    return pooled_ratio(form, base) | {"detectable": detectable(form, base)}


def table(rows: Sequence[dict[str, Any]], base: str) -> str:
    """Render two tables: what each form spends, and what it ends with."""
    titles = [f"+{rise:.2f}: {unit}" for rise in RISES for unit in ("judged samples", "CPU s")]
    lines = ["| form | seeds | " + " | ".join(titles) + " | not learned |", "|---" * (len(titles) + 3) + "|"]
    for row in rows:
        cells = [told(row[f"{rise:.2f} {unit}"]) for rise in RISES for unit in UNITS]
        short = ", ".join(str(row[f"{rise:.2f} missed"]) for rise in RISES)
        lines.append(f"| {row['form']} | {len(row['seeds'])} | {' | '.join(cells)} | {short} |")

    lines += [
        "",
        f"In brackets: by {base}, with a 95 % interval over seeds; detectable: what so many seeds would show.",
        "",
    ]
    lines += ["| form | epochs | " + " | ".join(GRADES) + " |", "|---" * (len(GRADES) + 2) + "|"]
    for row in rows:
        changes = " | ".join(f"{row[name]:+.3f}" for name in GRADES)
        lines.append(f"| {row['form']} | {row['epochs']} | {changes} |")
    return "\n".join(lines)


def told(figures: Mapping[str, Any]) -> str:
    """Render what was spent, and its ratio if there is one."""
    text = f"{figures['mean']:.0f}"
    if "ratio" not in figures:
        return text
    text += f" ({figures['ratio']:.2f} [{figures['low']:.2f}, {figures['high']:.2f}]"
    return text + ("" if figures["detectable"] is None else f"; detectable {figures['detectable']:.2f}") + ")"


if __name__ == "__main__":
    main()
