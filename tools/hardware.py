"""Requirements of each recipe by its plan: `python -m tools.hardware > docs/hardware.md`.

Each row is `pacorl train-policy RECIPE --dry-run` with gradient checkpointing: peaks on meta tensors with published
shapes, equal on every machine. The column of measured seconds comes from a day with a card: the committed one, or that
of `python -m tools.hardware day.jsonl`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.page import at_full_depth, device, device_name, two_depths
from benchmarks.gpu_day.results import Results

from pacorl.config.base import load
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.lab.plan import cost
from pacorl.lab.plan.components import PHASES
from pacorl.lab.plan.cost import COPIES_SHARE, PRODUCTS_SHARE, Card, Load, roofline, roofline_seconds
from pacorl.lab.plan.plan import CARD_MARGIN, Plan, plan_policy, with_checkpointing
from pacorl.lab.plan.work import work_of
from pacorl.models.quantize import NONE

ROOT = Path(__file__).parents[1]
DAY = ROOT / "benchmarks" / "gpu_day" / "h200.jsonl"
"""Results of the last day with a card."""
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

The memory of each recipe decides its card. A row is the plan of `pacorl train-policy RECIPE --dry-run` with gradient
checkpointing, from the published shapes on meta tensors. On [a card](engine.md#a-day-with-an-h200) FLUX.1-dev's peaks
lay between 0.1 GiB above and 0.7 GiB below the plan. The smallest card has room for the largest phase and 1 GiB of
CUDA's own memory; if several GPUs train, the row is for one of them. `pacorl doctor RECIPE` compares your own changes
with your card. Without a card it plans both choices of
`gradient_checkpointing: auto`.

This page is made by `python -m tools.hardware > docs/hardware.md`.

| Recipe | Generator | Written for | Device, GiB | Its largest phase | Smallest card | Host, GiB | Disk, GiB |
|---|---|---|---|---|---|---|---|
"""

NEEDS = """
"Host" is the main memory of one process at its peak: pages of the checkpoint's files, which the processes of a machine
share, 1 GiB for Python and CUDA, prompts and rollouts. "Disk" is for checkpoints and adapters; the weights to download
come on top. Generating needs less: `pacorl generate --dry-run --model MODEL` lists
it, and `--memory low` and `lowest` make it less. The 7B judge alone takes 15.4 GiB of weights in bfloat16, and 8.7
GiB in int8.
"""

END = """
[scaling.md](scaling.md) explains sharding, and [recipes.md](recipes.md) each recipe.
"""

TIMED = tuple(card for card in cost.CARDS if card.name.split()[1].partition("-")[0] not in ("A100", "H200"))
"""One card of each size of the computed table; another has rows once it is measured."""

RATES = """
## Seconds per epoch

*Computed* by a roofline: a phase of the plan takes the longest of three times, those of its FLOPs at {products:.0%} of
the card's peak, of its bytes in the card's memory at {copies:.0%}, and of streamed weights at {copies:.0%} of the bus.
The phases add up. No card overlaps the three completely: expect more. The shares are assumptions, and the peaks are the
makers':

| Card | Products in bf16, TFLOP/s | Memory, GB/s | PCIe ×16, GB/s |
|---|---|---|---|
"""

SECONDS = """
A phase without a remark is bounded by its products, *memory* by the card's memory and *bus* by the streamed weights.
Every forward is taken to have the recipe's whole batch, and `w8a8` counts as bf16. A recipe has rows for the two
smallest cards that hold it. Judging counts where the judge computes on the card that trains. Left out are evaluations,
prompts, CLIP, models that change places by `memory: low`, and waiting for other cards.

*Measured* are sampling and training alone{measured}, by `python -m benchmarks.gpu_day`:
at full depth or extrapolated from two depths, for recipes of FLUX.1-dev whose batch was measured.

| Recipe | GPUs that train | PFLOP an epoch | Card | Sampling | Training | Decoding | Judging | Seconds | Measured |
|---|---|---|---|---|---|---|---|---|---|
"""
TIMED_PHASES = ("sampling", "training", "decoding", "judging")


def page(records: Sequence[Mapping[str, Any]] = ()) -> str:
    """Write the tables of all recipes in Markdown; `records` are measurements of a card."""
    needs = ""
    seconds = ""
    cards = [card for card in cost.CARDS if card in TIMED or card.name == device_name(records)]
    for name, processes in RECIPES.items():
        run = load(PolicyConfig, ROOT / "configs" / f"{name}.yaml")
        plan = planned(run)
        needs += row(name, run, plan)
        measured = {device_name(records): measured_epoch(run, records, processes=processes)}
        seconds += seconds_rows(name, plan, measured, cards=cards)

    rates = RATES.format(products=PRODUCTS_SHARE, copies=COPIES_SHARE)
    for card in cards:
        rates += f"| {sold_as(card)} | {card.tflops:g} | {card.memory_rate:g} | {card.bus_rate:g} |\n"
    heading = SECONDS.format(measured=f" on an {device(records)}" if records else "")
    return INTRODUCTION + needs + NEEDS + rates + heading + seconds + END


def planned(run: PolicyConfig) -> Plan:
    """Plan a recipe, with gradient checkpointing where `auto` may turn it off: a smaller card needs it."""
    on = run.model.gradient_checkpointing is not False
    return plan_policy(with_checkpointing(run, on=on))


def seconds_rows(name: str, plan: Plan, measured: Mapping[str, str], *, cards: Sequence[Card] = TIMED) -> str:
    """Format a recipe's rows, for the two smallest cards that hold it and for a measured one.

    Each has the computed seconds of an epoch and its phases, and the measured ones by the card's name.
    """
    assert plan.cost is not None
    trains = RECIPES[name]
    phases = {phase: load * (1 / trains) for phase, load in plan.cost.epoch_phases.items()}
    rows = ""
    large_enough = [card for card in cards if plan.peak_bytes + CARD_MARGIN <= card.gigabytes * 10**9]
    smallest = [card for card in large_enough if card in TIMED][:2]
    for card in large_enough:
        if card not in smallest and not measured.get(card.name):
            continue
        by_phase = []
        for phase in TIMED_PHASES:
            by_phase.append(phase_cell(card, phases[phase]) if phase in phases else "")
        epoch = f"{roofline_seconds(card, phases.values()):.0f}"
        work = (link(name), str(trains), f"{plan.cost.epoch / 1e15:.3g}")
        cells = (*work, sold_as(card), *by_phase, epoch, measured.get(card.name, ""))
        rows += f"| {' | '.join(cells)} |\n"
    return rows


def phase_cell(card: Card, load: Load) -> str:
    """Format the seconds of a phase, and what bounds it unless products do."""
    seconds, bound = roofline(card, load)
    number = f"{seconds:.3g}" if seconds < 1000 else f"{seconds:.0f}"
    return number if bound == "products" else f"{number} *{bound}*"


def sold_as(card: Card) -> str:
    """Name a card by its size and its model."""
    return f"{card.gigabytes} GB, {card.name.removeprefix('NVIDIA ')}"


def measured_epoch(run: PolicyConfig, records: Sequence[Mapping[str, Any]], *, processes: int) -> str:
    """Compute the seconds of an epoch from measured forwards; empty if its form or batch was not measured."""
    batch = run.sampling.batch
    work = work_of(run, world=1)
    nodes = work.node_batch or batch
    memory = "" if run.model.gradient_checkpointing is True else " without checkpointing"
    training = "trained step" + memory
    here = []
    for record in records:
        if record.get("side") == run.sampling.size[0]:
            here.append(record)

    if run.model.kind != "flux":
        return ""
    # At full depth if it was measured, else extrapolated from two depths.
    form = form_of(run)
    whole = {}
    for record in here:
        if (record.get("full_form"), record.get("batch")) == (form, batch):
            whole[record["full"]] = record["seconds"]
    forwards = work.forwards_per_image
    depths = two_depths(here)
    if batch == nodes and whole:
        # The number of steps that were timed together, by the latest settings.
        settings = [record["settings"] for record in records if "settings" in record]
        forward = whole["sample"] / int(settings[-1]["steps"])
        step = whole["train" + memory]
    elif (form, batch, "a forward") in depths and (form, nodes, training) in depths:
        forward = at_full_depth(depths[form, batch, "a forward"], "seconds")
        step = at_full_depth(depths[form, nodes, training], "seconds")
    else:
        return ""
    sampling = forwards["sampling"] * forward / batch
    update = forwards["training"] * step / nodes
    return f"{work.samples / processes * (sampling + update):.0f}"


def form_of(run: PolicyConfig) -> str:
    """Return the name of a recipe's form in the benchmark."""
    if run.model.compile != "none":
        return "compiled" if run.model.quantize == NONE else f"compiled-{run.model.quantize}"
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
        "day", type=Path, nargs="?", default=DAY, help="results of `python -m benchmarks.gpu_day`, measured"
    )
    print(page(list(Results(parser.parse_args().day).records())), end="")
