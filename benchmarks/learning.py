"""How many CPU seconds the forms of an epoch need until the tiny world's generator has learned.

    python benchmarks/learning.py --out runs/learning                    # all forms, three seeds: hours
    python benchmarks/learning.py --out runs/learning --forms shared node_ab2 --seeds 0 --json

A run is `configs/tiny.yaml` with the form's settings, judge's share included, on one thread. After every few epochs
the averaged adapter samples the development prompts at full size, and the oracle grades them; neither is counted. A
run ends as soon as the attributes that panels share have risen by `--rise` in two successive evaluations, or counts as
a miss. Its seconds are those until the second of them.

A run that was stopped goes on from its last evaluation, a finished one is not run again: each leaves a JSON in --out.
Ratios are by the form `shared` of the same seed: one initial noise per group, one forward per sample from the SDE step
on, in sampling and in training, which is what pacorl did before it computed each distinct latent once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from epoch import step_of_each_sample

from pacorl.config import base as configs
from pacorl.config.recipes import recipe
from pacorl.core.grid import split
from pacorl.core.sampler import Sampler
from pacorl.core.schedule import seed_of
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rollout import sample_images
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.quiet import quiet_loading
from pacorl.models.lora.layers import fuse_lora
from pacorl.tiny.characters import Oracle
from pacorl.types import Size

FORMS: dict[str, Sequence[str]] = {
    "own": ("sampling.tree={seeds: 12}", "sampling.suffix={}"),
    "shared": ("sampling.suffix={}",),
    "node": ("sampling.suffix={}",),
    "node_ab2": (),
    "tree": ("sampling.tree={seeds: 1, branches: [4, 3]}", "sampling.sde_steps=[1,2]"),
    "antithetic": ("sampling.tree={seeds: 1, antithetic: true}",),
    "awm": ("objective.name=awm", "sampling.tree={seeds: 12}", "sampling.suffix={}"),
}
"""Form → what it changes in the quickstart's recipe, which is node_ab2."""
BASE = "shared"


def main() -> None:
    options = arguments()
    quiet_loading()
    torch.set_num_threads(1)
    forms = dict(FORMS) | ({options.name: tuple(options.set)} if options.name else {})
    chosen = options.forms or ([options.name] if options.name else list(FORMS))
    for seed in options.seeds:
        for form in chosen:
            run = learn(form, forms[form], seed, options)
            print(f"{form} seed {seed}: {verdict(run, options.rise)}", flush=True)
    results = [json.loads(path.read_text()) for path in sorted(options.out.glob("*.json"))]
    summary = {"rise": options.rise, "ratios": ratios(results, options.rise), "runs": results}
    print(json.dumps(summary, indent=2) if options.json else table(summary))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--forms", nargs="+", choices=FORMS)
    parser.add_argument("--name", help="a form of your own, with --set")
    parser.add_argument("--set", nargs="+", default=[], help="its settings, as KEY=VALUE of configs/tiny.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rise", type=float, default=0.15, help="of the attributes that panels share")
    parser.add_argument("--every", type=int, default=4, help="epochs between evaluations")
    parser.add_argument("--epochs", type=int, default=100, help="after which a run is a miss")
    parser.add_argument("--prompts", type=int, default=48, help="of the development split")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def learn(form: str, overrides: Sequence[str], seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run to its end, or what it left behind."""
    file, folder = options.out / f"{form}-{seed}.json", options.out / f"{form}-{seed}"
    run = json.loads(file.read_text()) if file.exists() else {"form": form, "seed": seed, "settings": list(overrides)}
    if run["settings"] != list(overrides):
        raise SystemExit(f"{file} was made with {run['settings']}; give another --out")
    if ended(run, options):
        return run
    trainer = PolicyTrainer(config_of(overrides, seed, folder, options), resume=(folder / "checkpoints").exists())
    in_form: AbstractContextManager[None] = step_of_each_sample(trainer) if form == BASE else nullcontext()
    with in_form:
        if "cpu_seconds" not in run:
            run |= {"cpu_seconds": [0.0], "agreement": [agreement(trainer)], "epochs": [0]}
        while run["epochs"][-1] > trainer.epoch:  # a line whose checkpoint was not written any more
            for column in ("cpu_seconds", "agreement", "epochs"):
                run[column].pop()
        while not ended(run, options):
            started = time.process_time()
            for _ in range(options.every):
                trainer.run_epoch()
            run["cpu_seconds"].append(run["cpu_seconds"][-1] + time.process_time() - started)
            run["agreement"].append(agreement(trainer))
            run["epochs"].append(trainer.epoch)
            file.write_text(json.dumps(run, indent=1) + "\n")
            trainer.save()
            print(f"  {form} {seed}: " + verdict(run, options.rise), flush=True)
    trainer.close()
    return run


def config_of(overrides: Sequence[str], seed: int, folder: Path, options: argparse.Namespace) -> PolicyConfig:
    settings = [f"out={folder}", f"seed={seed}", f"epochs={options.epochs}", "save_every=1000", "trackers=[]"]
    settings += ["prompts.evaluation=tiny:dev", f"prompts.evaluation_limit={options.prompts}"]
    return configs.load(PolicyConfig, recipe(), [*settings, *overrides])


@torch.no_grad()
def agreement(trainer: PolicyTrainer) -> float:
    """The oracle's, of the averaged adapter's images at full size."""
    config, prompts, oracle = trainer.config, trainer.evaluation_prompts, Oracle()
    with trainer.average.swapped_in():
        images = sample_images(
            trainer.policy,
            prompts,
            sampler=Sampler(size=Size(*config.evaluation.size), steps=config.evaluation.steps),
            cache=trainer.cache,
            seeds=[seed_of(config.seed, "evaluation", prompt.id, 0) for prompt in prompts],
            batch=config.evaluation.batch,
            fused=fuse_lora(trainer.transformer, enabled=True),
        )
    grades = [oracle.grade(prompt, split(image, prompt.grid)) for prompt, image in zip(prompts, images, strict=True)]
    return fmean(grade["attribute_agreement"] for grade in grades)


def seconds_to_learn(run: dict[str, Any], rise: float) -> float | None:
    """Until the second of two successive evaluations that have risen so far; None for a miss."""
    risen = [value >= run["agreement"][0] + rise for value in run["agreement"]]
    both = [index for index in range(1, len(risen)) if risen[index - 1] and risen[index]]
    return run["cpu_seconds"][both[0]] if both else None


def ended(run: dict[str, Any], options: argparse.Namespace) -> bool:
    if "cpu_seconds" not in run:
        return False
    return seconds_to_learn(run, options.rise) is not None or run["epochs"][-1] >= options.epochs


def verdict(run: dict[str, Any], rise: float) -> str:
    seconds = seconds_to_learn(run, rise)
    learned = "not learned" if seconds is None else f"learned in {seconds:.0f} CPU s"
    return (
        f"{learned}; after {run['epochs'][-1]} epochs and {run['cpu_seconds'][-1]:.0f} CPU s "
        f"{run['agreement'][0]:.3f} → {run['agreement'][-1]:.3f}"
    )


def ratios(runs: Sequence[dict[str, Any]], rise: float) -> dict[str, dict[str, float | None]]:
    """Form → seed → its seconds by those of `shared`; None for a miss of either."""
    seconds = {(run["form"], run["seed"]): seconds_to_learn(run, rise) for run in runs if "cpu_seconds" in run}
    by_form: dict[str, dict[str, float | None]] = {}
    for (form, seed), spent in seconds.items():
        base = seconds.get((BASE, seed))
        by_form.setdefault(form, {})[str(seed)] = round(spent / base, 3) if spent and base else None
    return by_form


def table(summary: dict[str, Any]) -> str:
    """A row per form: CPU seconds of each seed, and the largest ratio."""
    seconds: dict[str, list[str]] = {}
    for run in summary["runs"]:
        spent = seconds_to_learn(run, summary["rise"])
        seconds.setdefault(run["form"], []).append("miss" if spent is None else f"{spent:.0f}")
    rows = ["| form | CPU s by seed | largest ratio |", "|---|---|---|"]
    for form, several in seconds.items():
        by_seed = summary["ratios"][form].values()
        largest = "–" if None in by_seed else f"{max(value for value in by_seed if value is not None):.2f}"
        rows.append(f"| {form} | {', '.join(several)} | {largest} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
