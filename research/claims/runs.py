"""One run of a claim, and its grades by the oracle, which no run is rewarded by."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from PIL import Image

from pacorl.config.base import load
from pacorl.config.recipes import recipe
from pacorl.core.grid import parse_layout
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.documents import read_jsonl
from pacorl.io.processor import load_processor
from pacorl.io.quiet import quiet_loading
from pacorl.judge.local import TINY_JUDGE
from pacorl.judge_training.judge_config import JudgeConfig
from pacorl.judge_training.judge_trainer import JudgeTrainer
from pacorl.records.comparisons import save_comparisons
from pacorl.records.prompts import save_prompts
from pacorl.tiny.comparisons import draw_comparisons
from pacorl.tiny.grading import read_sets
from pacorl.tiny.oracle import read_panels
from pacorl.tiny.world import LOOKS, VALUES, set_prompts
from pacorl.types import Comparison, Prompt
from research.claims.claim import CLAIMS, Claim, Evaluation, read_curves, results_of
from research.tiny.measure import measures


def run(claim: Claim, arm: str, seed: int, out: Path, *, more: Sequence[str] = (), keep: bool = True) -> None:
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
    if claim.trainer == "judge":
        evaluations = _train_judge(claim, settings, more, arm=arm, seed=seed)
    else:
        evaluations = _train_policy(claim, settings, more, arm=arm, seed=seed)
    lines = "".join(f"{evaluation.model_dump_json()}\n" for evaluation in evaluations)
    print(lines, end="")
    if keep:
        with results_of(claim).open("a", encoding="utf-8") as file:
            file.write(lines)


def _train_policy(
    claim: Claim, settings: dict[str, Any], more: Sequence[str], *, arm: str, seed: int
) -> list[Evaluation]:
    if grid := settings.pop("grid", None):
        settings |= _prompts_of_grid(grid, Path(settings["out"]) / "prompts")
    config = load(PolicyConfig, recipe(claim.recipe), [*_words(settings), *more])
    PolicyTrainer(config, resume=True, extra_metrics=graded).train()

    evaluations = []
    seconds = 0.0
    for line in read_jsonl(config.out / "metrics.jsonl"):
        if line["kind"] == "epoch":
            seconds += sum(line[f"seconds/{phase}"] for phase in ("sampling", "scoring", "updating"))
        if line["kind"] == "evaluation":
            metrics = {name: round(float(line[name]), 4) for name in METRICS if name in line} | {
                "seconds": round(seconds, 1)
            }
            evaluations.append(Evaluation(arm=arm, seed=seed, at=line["epoch"], metrics=metrics))
    return evaluations


def _prompts_of_grid(layout: str, folder: Path) -> dict[str, object]:
    """Write prompts of another grid than the world's 2x2, and return the settings that name them."""
    sources = {}
    for role, split, count in (("train", "train", 288), ("evaluation", "dev", 48)):
        path = folder / f"{split}.jsonl"
        save_prompts(set_prompts(split, count, grid=parse_layout(layout)), path)  # type: ignore[arg-type]
        sources[f"prompts.{role}"] = str(path)
    return sources


def _train_judge(
    claim: Claim, settings: dict[str, Any], more: Sequence[str], *, arm: str, seed: int
) -> list[Evaluation]:
    tokens = settings.pop("reasons")
    sources = []
    for split, count in (("train", 800), ("test", 120)):
        folder = Path(settings["out"]) / "pairs" / split
        # The same pairs for all arms of a seed.
        comparisons = draw_comparisons(folder, split=split, count=count, seed=seed)
        save_comparisons(with_longer_reasons(comparisons, tokens), folder / "pairs.jsonl")
        sources.append(str(folder / "pairs.jsonl"))
    settings |= {"data.train": sources[:1], "data.evaluation": sources[1:]}
    config = load(JudgeConfig, recipe(claim.recipe), [*_words(settings), *more])
    JudgeTrainer(config, resume=True).train()

    evaluations: list[Evaluation] = []
    for line in read_jsonl(config.out / "metrics.jsonl"):
        if line["kind"] == "evaluation":
            metrics = {name: round(float(line[name]), 4) for name in ("decision_accuracy", "auc")}
            evaluations.append(Evaluation(arm=arm, seed=seed, at=line["step"], metrics=metrics))
    return evaluations


def _words(settings: Mapping[str, object]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def with_longer_reasons(comparisons: Sequence[Comparison], tokens: int) -> list[Comparison]:
    """Let reasons say more of what both images show, until an answer has about so many tokens."""
    tokenizer = load_processor(str(TINY_JUDGE)).tokenizer
    longer = []
    for comparison in comparisons:
        panels = read_panels([Image.open(path) for path in comparison.images])
        sentences = cycle(
            f"The {place} shows the {name} {getattr(panel, name)}."
            for name in VALUES
            for place, panel in zip(("first", "second"), panels, strict=True)
        )
        reasons = comparison.reasons
        while len(tokenizer(reasons).input_ids) < tokens:
            reasons = f"{reasons} {next(sentences)}"
        longer.append(replace(comparison, reasons=reasons))
    return longer


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
