"""One run of a claim, and its grades by the oracle, which no run is rewarded by."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from pacorl.config.base import load
from pacorl.config.recipes import recipe
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.documents import read_jsonl
from pacorl.io.quiet import quiet_loading
from pacorl.tiny.grading import read_sets
from pacorl.tiny.world import LOOKS
from pacorl.types import Prompt
from research.claims.claim import CLAIMS, Claim, Evaluation, read_curves, results_of
from research.tiny.measure import measures


def run_policy(claim: Claim, arm: str, seed: int, out: Path, *, more: Sequence[str] = (), keep: bool = True) -> None:
    """Train one arm with one seed, and append its evaluations to the results.

    Args:
        more: further settings, for trials; their results are not kept.

    Raises:
        ValueError: the claim is not committed, or has this run already.
    """
    if keep and more:
        raise ValueError("a run with further settings is a trial; add --trial, which keeps no results")
    if keep:
        _check_new(claim, arm, seed)
    quiet_loading()
    settings = {**claim.settings, **claim.arms[arm], "seed": seed, "out": str(out)}
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    config = load(PolicyConfig, recipe(claim.recipe), [*words, *more])
    PolicyTrainer(config, resume=True, extra_metrics=graded).train()

    evaluations = []
    for line in read_jsonl(out / "metrics.jsonl"):
        if line["kind"] == "evaluation":
            metrics = {name: round(float(line[name]), 4) for name in METRICS if name in line}
            evaluations.append(Evaluation(arm=arm, seed=seed, at=line["epoch"], metrics=metrics))
    lines = "".join(f"{evaluation.model_dump_json()}\n" for evaluation in evaluations)
    print(lines, end="")
    if keep:
        with results_of(claim).open("a", encoding="utf-8") as file:
            file.write(lines)


def _check_new(claim: Claim, arm: str, seed: int) -> None:
    if (arm, seed) in read_curves(claim):
        raise ValueError(f"{results_of(claim).name} has {arm} with seed {seed}; delete its lines to run it again")
    path = CLAIMS / f"{claim.name}.yaml"
    status = ["git", "status", "--porcelain", "--", str(path)]
    if subprocess.run(status, cwd=CLAIMS, capture_output=True, text=True, check=True).stdout:
        raise ValueError(f"{path.name} is not committed, and predictions precede runs; commit it first")


METRICS = (
    "within", "across", "kappa", "least_kappa", *(f"kappa/{name}" for name in LOOKS),
    "diversity", "valid", "pose", "prop", "place",
)  # fmt: skip


def graded(prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> dict[str, float]:
    """Grade an evaluation by `measures`, of which METRICS are kept."""
    return measures(prompts, read_sets(prompts, images))
