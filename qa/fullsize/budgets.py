"""What a forward, a trained step and an image cost at full size, as a page.

    PYTHONPATH=src:qa/fullsize:tests/judge python qa/fullsize/budgets.py > docs/budgets.md

Every figure is of a generator at its published width and depth, on the pretended card of this folder.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from traced import CONFIGS, Deep, Trace, deep_run

from pacorl.config.base import load
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.lab.plan.work import work_of

UNIT = 21.5e12
"""FLOPs: about a forward of FLUX.1-dev at 512 × 512."""
ALONE = ["judge=none", "best_by=''", "rewards=[{name: jpeg_size}]", "evaluation.rewards=[]"]
"""Without what scores the images."""
CHECKPOINTED = "model.gradient_checkpointing=true"
UNCHECKPOINTED = "model.gradient_checkpointing=false"
ONE = ["sampling.batch=1", "sampling.suffix.check_every=0", "prompts.evaluation_limit=1", CHECKPOINTED, *ALONE]
FLUX, FLUX_WITHOUT = "FLUX.1-dev, 512 × 512", "the same without gradient checkpointing"
GENERATORS: dict[str, tuple[str, list[str]]] = {
    FLUX: ("flux_t2is", ONE),
    FLUX_WITHOUT: ("flux_t2is", [*ONE, UNCHECKPOINTED]),
    "FLUX.1-dev in int8, streamed, 512 × 512": ("flux_t2is_12gb", ONE),
    "FLUX.2-klein base 4B in int8, 512 × 512": ("klein_t2is_16gb", ONE),
    "Qwen-Image-Edit, 384 × 384": ("qwen_edit", ONE),
}
"""By the name on the page, the recipe and its settings."""
FORMS: dict[str, tuple[list[str], float]] = {
    "own noise": ([CHECKPOINTED], 13.4),
    "own noise, without gradient checkpointing": ([UNCHECKPOINTED], 12.4),
    "node": ([CHECKPOINTED, "sampling.tree={seeds: 1}"], 8.6),
    "node, four suffix steps": (
        [CHECKPOINTED, "sampling.tree={seeds: 1}", "sampling.suffix={solver: ab2, steps: 4}"],
        4.6,
    ),
}
"""Forms of an image of configs/flux_t2is.yaml → its settings, and the units that it may take."""

HEAD = """# Budgets

A forward, a trained step and an image at full size, counted in kernels and GB. Nothing was measured on a card: the
project's own loop runs at the published width on a pretended one, with one, two or three blocks of each kind, and every
further block asks for the same. A kernel is an operation of torch that writes memory; a card fuses a few of them. GB
sent are weights from main memory ([scaling.md](scaling.md#weights-that-stay-in-main-memory)), and copies to the host
operations for which the host would wait.

This page is made by `PYTHONPATH=src:qa/fullsize:tests/judge python qa/fullsize/budgets.py > docs/budgets.md`.

## One image through the transformer

| Generator | What | Kernels | GB moved | TFLOP | GB sent | Copies to the host |
|---|---|---|---|---|---|---|
"""
IMAGES = """
The recipes are `configs/flux_t2is.yaml`, `configs/flux_t2is_12gb.yaml`, `configs/klein_t2is_16gb.yaml` (of whose
guidance this is one of two forwards) and `configs/qwen_edit.yaml`. A trained step is a forward with gradients, its
recomputation (gradient checkpointing) and its backward.

## An image, from noise to its share of the update

In units of 21.5 TFLOP: the forwards of an epoch by `pacorl train-policy --dry-run`, at the costs above, and one decode.

| Form of `configs/flux_t2is.yaml` | Units | At most |
|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a forward or a trained step."""

    kernels: float
    bytes: float
    flops: float
    streamed: float
    to_host: float


def cost(deep: Deep[Trace], what: str) -> Cost:
    """At the published depth."""

    def per_step(name: str) -> Callable[[Trace], float]:
        def read(trace: Trace) -> float:
            if what == "forward":
                return float(getattr(trace.single["forward"], name))
            train = trace.phases["train"]
            return float(getattr(train, name)) / train.forwards

        return read

    return Cost(*(deep(per_step(name)) for name in ("kernels", "bytes", "flops", "streamed", "to_host")))


def images_of(traced: Mapping[str, Deep[Trace]]) -> Iterator[tuple[str, float]]:
    """Each form whose generator is traced, and how many units an image of it takes."""
    forward = cost(traced[FLUX], "forward").flops
    decode = traced[FLUX](lambda trace: trace.phases["decode"].flops / trace.images)
    for form, (overrides, _) in FORMS.items():
        generator = FLUX_WITHOUT if UNCHECKPOINTED in overrides else FLUX
        if generator not in traced:
            continue
        trained = cost(traced[generator], "trained step").flops
        count = work_of(load(PolicyConfig, CONFIGS / "flux_t2is.yaml", overrides), world=1).forwards_per_image
        yield form, (count["sampling"] * forward + count["training"] * trained + decode) / UNIT


def traced_generators(folder: Path, names: Iterable[str] = tuple(GENERATORS)) -> dict[str, Deep[Trace]]:
    traced = {}
    for number, name in enumerate(names):
        recipe, overrides = GENERATORS[name]
        traced[name] = deep_run(recipe, folder / str(number), overrides=overrides)
    return traced


def cost_rows(traced: Mapping[str, Deep[Trace]]) -> list[str]:
    """Rows of the page's first table."""
    costs = ((name, what, cost(traced[name], what)) for name in traced for what in ("forward", "trained step"))
    return [
        f"| {name} | {what} | {c.kernels:,.0f} | {c.bytes / 1e9:.1f} | {c.flops / 1e12:.2f} "
        f"| {c.streamed / 1e9:.1f} | {c.to_host:.2g} |"
        for name, what, c in costs
    ]


def image_rows(traced: Mapping[str, Deep[Trace]]) -> list[str]:
    """Rows of the page's second table."""
    return [f"| {form} | {value:.2f} | {FORMS[form][1]} |" for form, value in images_of(traced)]


def page(traced: Mapping[str, Deep[Trace]]) -> str:
    return HEAD + "\n".join(cost_rows(traced)) + "\n" + IMAGES + "\n".join(image_rows(traced)) + "\n"


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # the ratio of values that nobody computed deviates from 1
    with TemporaryDirectory() as folder:
        print(page(traced_generators(Path(folder))), end="")
