"""The table of docs/running.md: `python -m research.hardware`.

Each row is `pacorl train-policy RECIPE --dry-run`: peaks on meta tensors with published shapes, equal on every machine.
"""

from __future__ import annotations

from pathlib import Path

from pacorl.config.base import load
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.plan.plan import Plan, plan_training

ROOT = Path(__file__).parents[1]
RECIPES = (
    "flux_t2is model.gradient_checkpointing=true",
    "flux_t2is_1gpu",
    "flux_t2is_24gb",
    "flux_t2is_24gb memory=lowest model.compile=none evaluation.batch=2",
    "kontext_edit model.gradient_checkpointing=true",
    "qwen_edit model.gradient_checkpointing=true",
    "klein_t2is_16gb",
)
"""Recipes, with changes."""
CARDS = (8, 12, 16, 24, 32, 40, 48, 80, 141)
"""GB of the cards that are sold; a card's GB are 10^9 bytes."""
CUDA_BYTES = 2**30
"""CUDA's own, which the plan leaves out."""


def run_of(name: str) -> PolicyConfig:
    """Load a recipe with its changes."""
    recipe, *changes = name.split()
    return load(PolicyConfig, ROOT / "configs" / f"{recipe}.yaml", changes)


def planned(run: PolicyConfig) -> Plan:
    """Plan one process."""
    return plan_training(run.model_copy(update={"processes": 1}))


def row(name: str, plan: Plan) -> str:
    """Format a recipe's row."""
    peak, host = (f"{count / 2**30:.1f}" for count in (plan.peak_bytes, plan.memory.host))
    recipe, *changes = name.split()
    link = f"[{recipe}.yaml](../configs/{recipe}.yaml)" + "".join(f" `{change}`" for change in changes)
    return f"| {link} | {smallest_card(plan)} | {peak} | {host} |"


def smallest_card(plan: Plan) -> str:
    """Return the smallest card for the plan's largest phase."""
    for card in CARDS:
        if plan.peak_bytes + CUDA_BYTES <= card * 10**9:
            return f"{card} GB"
    return "more than one"


if __name__ == "__main__":
    for name in RECIPES:
        print(row(name, planned(run_of(name))))
