"""What each recipe needs, by its own plan: `python -m tools.hardware > docs/hardware.md`.

Each row is `pacorl train-policy RECIPE --dry-run` with gradient checkpointing: peaks on meta tensors and published
shapes, the same everywhere.
"""

from __future__ import annotations

from pathlib import Path

from pacorl.config.base import load
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.lab.plan.components import PHASES
from pacorl.lab.plan.plan import Plan, plan_policy

ROOT = Path(__file__).parents[1]
LAUNCHED = "8 GPUs, 7 of them train"
RECIPES = {
    "flux_t2is": LAUNCHED,
    "flux_t2is_fast": "8 GPUs, 6 of them train",
    "flux_t2is_1gpu": "1 GPU, with the judge",
    "flux_t2is_own": "1 GPU, with the judge",
    "flux_t2is_24gb": "1 GPU, with the judge",
    "flux_t2is_12gb": "1 GPU, with the judge",
    "kontext_edit": LAUNCHED,
    "kontext_edit_1gpu": "1 GPU, with the judge",
    "kontext_edit_24gb": "1 GPU, with the judge",
    "klein_t2is_16gb": "1 GPU, with the judge",
    "klein_edit_16gb": "1 GPU, with the judge",
    "qwen_edit": LAUNCHED,
    "qwen_edit_1gpu": "1 GPU, with the judge",
    "qwen_edit_24gb": "1 GPU, with the judge",
}
"""A config's name → how many devices it is written for."""
CARDS = (8, 12, 16, 24, 32, 40, 48, 80, 141)
"""GB of the cards that are sold; a card's GB are 10^9 bytes."""
CUDA_BYTES = 2**30
"""CUDA's own, which the plan leaves out."""

INTRODUCTION = """# Hardware

The memory of each recipe decides its card. Nothing here was measured on a card: a row is the plan of
`pacorl train-policy RECIPE --dry-run` with gradient checkpointing, from the published shapes on meta tensors. The
smallest card has room for the largest phase and 1 GiB of CUDA's own memory; if several GPUs train, the row is for one
of them. `pacorl doctor RECIPE` compares your own changes with your card.

This page is made by `python -m tools.hardware > docs/hardware.md`.

| Recipe | Generator | Written for | Device, GiB | Its largest phase | Smallest card | Host, GiB | Disk, GiB |
|---|---|---|---|---|---|---|---|
"""

END = """
"Host" is the main memory of one process at its peak, loading included: pages of the checkpoint's files, which the
processes of a machine share, 1 GiB for Python and CUDA, prompts and rollouts. "Disk" is for the run's checkpoints and
adapters; the weights to download come on top. Generating needs less: `pacorl generate --dry-run --model MODEL` lists
it, and `--memory low` and `lowest` make it less. The 7B judge alone takes 15.4 GiB of weights in bfloat16, and 8.7
GiB in int8.

[scaling.md](scaling.md) lists what sharding divides, and [recipes.md](recipes.md) what each recipe trains.
"""


def page() -> str:
    """The table of all recipes, in Markdown."""
    runs = {name: load(PolicyConfig, ROOT / "configs" / f"{name}.yaml") for name in RECIPES}
    return INTRODUCTION + "".join(row(name, run, smallest_plan(run)) for name, run in runs.items()) + END


def smallest_plan(run: PolicyConfig) -> Plan:
    """Plan a run for the smallest card, on which `model.gradient_checkpointing: auto` is on."""
    if run.model.gradient_checkpointing == "auto":
        model = run.model.model_copy(update={"gradient_checkpointing": True})
        run = run.model_copy(update={"model": model})
    return plan_policy(run)


def row(name: str, run: PolicyConfig, plan: Plan) -> str:
    """One recipe's line of the table."""
    largest = PHASES[max(PHASES, key=plan.phase_bytes)]
    sizes = (plan.peak_bytes, plan.host_bytes, plan.disk_bytes)
    device, host, disk = (f"{size / 2**30:.1f}" for size in sizes)
    link = f"[{name}.yaml](../configs/{name}.yaml)"
    cells = (link, run.model.checkpoint, RECIPES[name], device, largest, smallest_card(plan), host, disk)
    return f"| {' | '.join(cells)} |\n"


def smallest_card(plan: Plan) -> str:
    """The smallest card that holds the plan's largest phase."""
    needed = plan.peak_bytes + CUDA_BYTES
    return next((f"{card} GB" for card in CARDS if needed <= card * 10**9), "more than one")


if __name__ == "__main__":
    print(page(), end="")
