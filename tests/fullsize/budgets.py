"""What a forward, a trained step and an image cost at full size, as a page.

    PYTHONPATH=src:tests/fullsize:tests/judges python tests/fullsize/budgets.py > docs/budgets.md

Every figure is of FLUX.1-dev at its published width and depth, on the pretended card of this folder.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from traced import CONFIGS, Deep, Trace, traced_deep

from pacorl.config.base import load
from pacorl.config.policy_run import PolicyConfig
from pacorl.plan.work import work_of

UNIT = 21.5e12
"""FLOPs: about a forward of FLUX.1-dev at 512 × 512."""
ALONE = ["judge=none", "best_by=''", "rewards=[{name: jpeg_size}]", "evaluation.rewards=[]"]
"""Without what scores the images."""
FORMS: dict[str, tuple[list[str], float]] = {
    "own noise": ([], 13.4),
    "node": (["sampling.tree={seeds: 1}"], 8.6),
    "node, four suffix steps": (["sampling.tree={seeds: 1}", "sampling.suffix={solver: ab2, steps: 4}"], 4.6),
}
"""Forms of an image of configs/flux_t2is.yaml → its settings, and the units that it may take."""

HEAD = """# Budgets

After this page you know what a forward, a trained step and an image of FLUX.1-dev ask of a card at full size.
Nothing was measured on a card: the project's own loop runs at the published width on a pretended one, with one and
two blocks of each kind, and every further block asks for the same. A kernel is an operation of torch that writes
memory; a card fuses a few of them. Copies to the host are what the host would wait for.

This page is made by `PYTHONPATH=src:tests/fullsize:tests/judges python tests/fullsize/budgets.py > docs/budgets.md`.

## One image at 512 × 512 through the transformer, by `configs/flux_t2is.yaml`

| What | Kernels | GB moved | TFLOP | Copies to the host |
|---|---|---|---|---|
"""
IMAGES = """
A trained step is a forward with gradients, its recomputation (gradient checkpointing) and its backward.

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
    to_host: float


def cost(deep: Deep, what: str) -> Cost:
    """At the published depth."""

    def per_step(name: str) -> Callable[[Trace], float]:
        def read(trace: Trace) -> float:
            if what == "forward":
                return float(getattr(trace.single["forward"], name))
            train = trace.phases["train"]
            return float(getattr(train, name)) / train.forwards

        return read

    return Cost(*(deep(per_step(name)) for name in ("kernels", "bytes", "flops", "to_host")))


def images_of(flux: Deep) -> Iterator[tuple[str, float]]:
    """Each form, and how many units an image of it takes."""
    forward, trained = cost(flux, "forward").flops, cost(flux, "trained step").flops
    decode = flux(lambda trace: trace.phases["decode"].flops / trace.images)
    for form, (overrides, _) in FORMS.items():
        count = work_of(load(PolicyConfig, CONFIGS / "flux_t2is.yaml", overrides), world=1).forwards_per_image
        yield form, (count["sampling"] * forward + count["training"] * trained + decode) / UNIT


def page(flux: Deep) -> str:
    costs = {what: cost(flux, what) for what in ("forward", "trained step")}
    lines = [
        f"| {what} | {c.kernels:,.0f} | {c.bytes / 1e9:.1f} | {c.flops / 1e12:.2f} | {c.to_host:.2g} |"
        for what, c in costs.items()
    ]
    images = [f"| {form} | {value:.2f} | {FORMS[form][1]} |" for form, value in images_of(flux)]
    return HEAD + "\n".join(lines) + "\n" + IMAGES + "\n".join(images) + "\n"


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # the ratio of values that nobody computed deviates from 1
    with TemporaryDirectory() as folder:
        print(page(traced_deep("flux_t2is", Path(folder), overrides=ALONE)), end="")
