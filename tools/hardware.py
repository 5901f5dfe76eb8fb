"""Requirements of each recipe by its plan: `python -m tools.hardware > docs/hardware.md`.

Each row is `pacorl train-policy RECIPE --dry-run` with gradient checkpointing: peaks on meta tensors with published
shapes, equal on every machine. `python -m tools.hardware day.jsonl` fills the column of measured seconds with the
results of a card.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.page import at_full_depth, device, two_depths
from benchmarks.gpu_day.results import Results

from pacorl.config.base import load
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.lab.plan import cost
from pacorl.lab.plan.components import PHASES
from pacorl.lab.plan.cost import REACHED, Card
from pacorl.lab.plan.plan import CARD_MARGIN, Plan, plan_policy, with_checkpointing
from pacorl.lab.plan.work import work_of
from pacorl.models.quantize import NONE

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

INTRODUCTION = """# Hardware

The memory of each recipe decides its card. Nothing here was measured on a card: a row is the plan of
`pacorl train-policy RECIPE --dry-run` with gradient checkpointing, from the published shapes on meta tensors. The
smallest card has room for the largest phase and 1 GiB of CUDA's own memory; if several GPUs train, the row is for one
of them. `pacorl doctor RECIPE` compares your own changes with your card.

This page is made by `python -m tools.hardware > docs/hardware.md`.

| Recipe | Generator | Written for | Device, GiB | Its largest phase | Smallest card | Host, GiB | Disk, GiB |
|---|---|---|---|---|---|---|---|
"""

NEEDS = """
"Host" is the main memory of one process at its peak, loading included: pages of the checkpoint's files, which the
processes of a machine share, 1 GiB for Python and CUDA, prompts and rollouts. "Disk" is for the run's checkpoints and
adapters; the weights to download come on top. Generating needs less: `pacorl generate --dry-run --model MODEL` lists
it, and `--memory low` and `lowest` make it less. The 7B judge alone takes 15.4 GiB of weights in bfloat16, and 8.7
GiB in int8.
"""

END = """
[scaling.md](scaling.md) explains sharding, and [recipes.md](recipes.md) each recipe.
"""

TIMED = tuple(card for card in cost.CARDS if "A100" not in card.name)
"""One card of each size."""

SECONDS = """
## Seconds per epoch

*Computed*, not measured: the FLOPs of an epoch by the plan, at {share:.0%} of the card's peak in bf16, without any time
for data that moves. The judge counts where it computes on the card that trains. Evaluations do not count, and `w8a8`
counts as bf16. A dash marks a card that is too small for the recipe. *Measured* are sampling and training alone, at two
depths by `python -m benchmarks.gpu_day`, and extrapolated to the published depth.
`python -m tools.hardware day.jsonl` fills this column from its results{measured}.

| Recipe | GPUs that train | PFLOP an epoch | {cards} | Measured |
|---|---|---|{rules}---|
"""


def page(records: Sequence[Mapping[str, Any]] = ()) -> str:
    """Write the tables of all recipes in Markdown; `records` are measurements of a card."""
    needs = ""
    seconds = ""
    for name, processes in RECIPES.items():
        run = load(PolicyConfig, ROOT / "configs" / f"{name}.yaml")
        plan = planned(run)
        needs += row(name, run, plan)
        seconds += seconds_row(name, plan, measured_epoch(run, records, processes=processes))

    heading = SECONDS.format(
        share=REACHED,
        measured=f", which here are those of {device(records)}" if records else "",
        cards=" | ".join(f"{card.gigabytes} GB, {card.name.removeprefix('NVIDIA ')}" for card in TIMED),
        rules="---|" * len(TIMED),
    )
    return INTRODUCTION + needs + NEEDS + heading + seconds + END


def planned(run: PolicyConfig) -> Plan:
    """Plan a recipe, with gradient checkpointing where `auto` may turn it off: a smaller card needs it."""
    on = run.model.gradient_checkpointing is not False
    return plan_policy(with_checkpointing(run, on=on))


def seconds_row(name: str, plan: Plan, measured: str) -> str:
    """Format a recipe's computed and measured seconds of an epoch."""
    assert plan.cost is not None
    flops = plan.cost.epoch
    computed = [seconds_on(card, plan, flops / RECIPES[name]) for card in TIMED]
    cells = (link(name), str(RECIPES[name]), f"{flops / 1e15:.3g}", *computed, measured)
    return f"| {' | '.join(cells)} |\n"


def seconds_on(card: Card, plan: Plan, flops: float) -> str:
    """Format the seconds of some FLOPs on a card; a dash if the run does not fit."""
    fits = plan.peak_bytes + CARD_MARGIN <= card.gigabytes * 10**9
    return f"{3600 * card.hours(flops):.0f}" if fits else "–"


def measured_epoch(run: PolicyConfig, records: Sequence[Mapping[str, Any]], *, processes: int) -> str:
    """Compute the seconds of an epoch from measured forwards; empty if its form or batch was not measured."""
    batch = run.sampling.batch
    work = work_of(run, world=1)
    nodes = work.node_batch or batch
    training = "trained step" if run.model.gradient_checkpointing is True else "trained step without checkpointing"
    here = [record for record in records if record.get("side") == run.sampling.size[0]]
    depths = two_depths(here) if run.model.kind == "flux" else {}
    sampled = depths.get((form_of(run), batch, "a forward"))
    trained = depths.get((form_of(run), nodes, training))
    if not (sampled and trained):
        return ""
    forwards = work.forwards_per_image
    sampling = forwards["sampling"] * at_full_depth(sampled, "seconds") / batch
    update = forwards["training"] * at_full_depth(trained, "seconds") / nodes
    return f"{work.samples / processes * (sampling + update):.0f}"


def form_of(run: PolicyConfig) -> str:
    """Return the name of a recipe's form in the benchmark."""
    if run.model.quantize != NONE:
        if run.sampling.products == "w8a8":
            return "w8a8"
        return "streamed" if run.model.stream else run.model.quantize
    return "fused" if run.sampling.fuse_lora else "bf16"


def link(name: str) -> str:
    """Link a recipe."""
    return f"[{name}.yaml](../configs/{name}.yaml)"


def row(name: str, run: PolicyConfig, plan: Plan) -> str:
    """Format a recipe's row of the table."""
    largest = PHASES[max(PHASES, key=plan.phase_bytes)]
    peak = f"{plan.peak_bytes / 2**30:.1f}"
    host = f"{plan.host_bytes / 2**30:.1f}"
    disk = f"{plan.disk_bytes / 2**30:.1f}"
    trains = RECIPES[name]
    written_for = f"8 GPUs, {trains} of them train" if trains > 1 else "1 GPU, with the judge"
    cells = (link(name), run.model.checkpoint, written_for, peak, largest, smallest_card(plan), host, disk)
    return f"| {' | '.join(cells)} |\n"


def smallest_card(plan: Plan) -> str:
    """Return the smallest card for the plan's largest phase."""
    for card in CARDS:
        if plan.peak_bytes + CUDA_BYTES <= card * 10**9:
            return f"{card} GB"
    return "more than one"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.hardware", description="Write docs/hardware.md.")
    parser.add_argument(
        "day", type=Path, nargs="?", help="results of `python -m benchmarks.gpu_day`, for the measured column"
    )
    day = parser.parse_args().day
    print(page(list(Results(day).records()) if day else ()), end="")
