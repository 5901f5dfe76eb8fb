"""The table of docs/hardware.md: `python -m research.hardware`.

Each row is `pacorl train-policy RECIPE --dry-run` with gradient checkpointing: peaks on meta tensors with published
shapes, equal on every machine.
"""

from __future__ import annotations

from pathlib import Path

from pacorl.config.base import load
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.plan.plan import Plan, plan_policy, with_checkpointing
from pacorl.plan.rows import PHASES

ROOT = Path(__file__).parents[1]
RECIPES = {
    "flux_t2is": 7,
    "flux_t2is_fast": 6,
    "flux_t2is_1gpu": 1,
    "flux_t2is_own": 1,
    "flux_t2is_24gb": 1,
    "flux_t2is_12gb": 1,
    "kontext_edit": 7,
    "kontext_edit_1gpu": 1,
    "kontext_edit_24gb": 1,
    "klein_t2is_16gb": 1,
    "klein_edit_16gb": 1,
    "qwen_edit": 7,
    "qwen_edit_1gpu": 1,
    "qwen_edit_24gb": 1,
}
"""A config's name → how many GPUs train: of eight, or the one that the judge uses too."""
CARDS = (8, 12, 16, 24, 32, 40, 48, 80, 141)
"""GB of the cards that are sold; a card's GB are 10^9 bytes."""
CUDA_BYTES = 2**30
"""CUDA's own, which the plan leaves out."""


def planned(run: PolicyConfig) -> Plan:
    """Plan a recipe, with gradient checkpointing where `auto` may turn it off: a smaller card needs it."""
    return plan_policy(with_checkpointing(run, on=run.model.gradient_checkpointing is not False))


def row(name: str, run: PolicyConfig, plan: Plan) -> str:
    """Format a recipe's row."""
    largest = PHASES[max(PHASES, key=plan.phase_bytes)]
    trains = RECIPES[name]
    written_for = f"8 GPUs, {trains} of them train" if trains > 1 else "1 GPU, with the judge"
    peak, host, disk = (f"{count / 2**30:.1f}" for count in (plan.peak_bytes, plan.host_bytes, plan.disk_bytes))
    link = f"[{name}.yaml](../configs/{name}.yaml)"
    cells = (link, run.model.checkpoint, written_for, peak, largest, smallest_card(plan), host, disk)
    return f"| {' | '.join(cells)} |"


def smallest_card(plan: Plan) -> str:
    """Return the smallest card for the plan's largest phase."""
    for card in CARDS:
        if plan.peak_bytes + CUDA_BYTES <= card * 10**9:
            return f"{card} GB"
    return "more than one"


if __name__ == "__main__":
    for name in RECIPES:
        config = load(PolicyConfig, ROOT / "configs" / f"{name}.yaml")
        print(row(name, config, planned(config)))
