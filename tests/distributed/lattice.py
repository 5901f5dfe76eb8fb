"""What changes bits? Small runs by processes, shards, batches and stops, each held to one that has none of these.

    make lattice                                                # all rows
    …/lattice.py --write --cases "toy: awm" "sd3: grpo_clip"    # some rows alone

Runs are compared by their ledgers, as `pacorl verify` compares them. `--write` remakes the table of docs/verify.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import worlds
from edit_twins import drawn, settings_of, source_image
from toy_world import toy_config, toy_world

from pacorl.config.base import load
from pacorl.core.objectives import OBJECTIVES
from pacorl.grpo.ledger import Record, read_ledger
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.start import checkpoints
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.lab.verify.recompute import Comparison, compare, recompute, replay
from pacorl.models.policies import POLICIES
from pacorl.tiny.characters import vocabulary
from pacorl.types import Prompt

if TYPE_CHECKING:
    from PIL import Image

PAGE = Path(__file__).parents[2] / "docs" / "verify.md"
BEGIN, END = "<!-- lattice -->\n", "<!-- end of lattice -->\n"
SETTINGS = [
    *("prompts_per_epoch=4", "group_size=4", "sampling.batch=4", "optimizer.updates_per_epoch=1"),
    *("judge=none", "rewards=[{name: redness}]", "prompts.leaks=off", "evaluation.every=0", "best_by=''"),
    *("evaluation.steps=2", "prompts.evaluation_limit=1", "adapter.rank=2", "adapter.alpha=4"),
]
"""Sixteen samples in four batches: four processes have one each."""
UPDATES = "toy: two updates twice"
TOY = {
    **{name: [f"objective.name={name}"] for name in OBJECTIVES},
    "tree": ["sampling.tree={seeds: 2}", "advantages.among=siblings"],
    "suffix": ["sampling.steps=5", "sampling.suffix={solver: ab2, steps: 2, check_every: 1}"],
    UPDATES.removeprefix("toy: "): ["optimizer.updates_per_epoch=2", "objective.inner_epochs=2", "sampling.batch=2"],
}
"""What may be different between objectives and forms of an epoch, on the toy world."""
CASES = (*(f"toy: {name}" for name in TOY), *(f"{kind}: grpo_clip" for kind in POLICIES))


LONG = ("4 processes", "batches of 1, 2 processes", "stopped, 2 go on")
"""Variations that are run on the toy world alone."""


@dataclass(frozen=True)
class Variation:
    """How a run departs from the one that it is held to."""

    world: int = 1
    sharded: bool = False
    settings: tuple[str, ...] = ()
    goes_on: bool = False
    """From that run's checkpoint after the first epoch."""
    same_scores: bool = False
    """Trains on that run's scores, as `pacorl verify --epoch` does."""


BASE, SAME_SCORES = "base", "batches of 2, same scores"
VARIATIONS = {
    BASE: Variation(settings=("epochs=2",)),
    "2 processes": Variation(world=2),
    "4 processes": Variation(world=4),
    "2 shards": Variation(world=2, sharded=True),
    "batches of 2": Variation(settings=("sampling.batch=2",)),
    SAME_SCORES: Variation(settings=("sampling.batch=2",), same_scores=True),
    "batches of 1, 2 processes": Variation(world=2, settings=("sampling.batch=1",)),
    "stopped": Variation(settings=("epochs=2",), goes_on=True),
    "stopped, 2 go on": Variation(world=2, settings=("epochs=2",), goes_on=True),
}


def redness(prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> list[float]:
    """A reward that moves little if images do."""
    return [float(np.asarray(image, dtype=np.float64)[..., 0].mean()) / 255 for image in images]


def config_of(case: str, variation: Variation, folder: Path, out: Path) -> PolicyConfig:
    """The config of a case's run."""
    kind, _, name = case.partition(": ")
    settings = ["epochs=1", *SETTINGS]
    if kind == "toy":
        return toy_config(out, *settings, *TOY[name], *variation.settings)
    spec = POLICIES[kind]
    prompts = folder / "edits.jsonl" if spec.edits and not spec.sets else "tiny:train:4"
    options = {**settings_of(spec), "gradient_checkpointing": "false", "dtype": "float32"}
    model = [f"model.{key}={value}" for key, value in options.items()]
    sizes = [f"{section}.size=[32, 32]" for section in ("sampling", "evaluation")]
    texts = [f"prompts.{key}={prompts}" for key in ("train", "evaluation")]
    overrides = [*settings, *model, *sizes, *texts, "trackers=[]", "sampling.steps=3", "save_every=1", f"out={out}"]
    overrides += [
        f"model.kind={kind}",
        f"model.checkpoint={folder / kind}",
        f"objective.name={name}",
        "optimizer.lr=0.01",
    ]
    return load(PolicyConfig, None, [*overrides, *variation.settings])


def write_inputs(folder: Path, kinds: Sequence[str]) -> None:
    """Twins with drawn weights as checkpoints, and four edits of one source."""
    source_image(folder / "source.png", height=64, width=64)
    edits = [{"image": "source.png", "instruction": f"Paint the hero in shade {number}."} for number in range(4)]
    (folder / "edits.jsonl").write_text("".join(json.dumps(edit) + "\n" for edit in edits))
    for kind in kinds:
        torch.manual_seed(0)
        drawn(POLICIES[kind].twin(vocabulary())).save_pretrained(folder / kind)


def train_all(cases: Sequence[str], name: str, folder: Path) -> None:
    """One variation's runs of all cases, in this process or as one of several: to start those costs most."""
    from accelerate.state import AcceleratorState
    from transformers.utils import logging

    from pacorl.io.quiet import quiet_loading

    quiet_loading()
    logging.set_verbosity_error()
    variation = VARIATIONS[name]
    for case in cases:
        AcceleratorState._reset_state()  # FSDP2's plugin keeps the block classes of the first model
        start = checkpoints(out_of(folder, BASE, case) / "checkpoints")[0] if variation.goes_on else False
        with toy_world() if case.startswith("toy") else nullcontext():
            config = config_of(case, variation, folder, out_of(folder, name, case))
            if variation.same_scores:
                train_on_scores(config, read_ledger(out_of(folder, BASE, case)))
            else:
                PolicyTrainer(config, resume=start, rewards={"redness": redness}).train()


def train_on_scores(config: PolicyConfig, records: Sequence[Record]) -> None:
    """One epoch from the seed, on the scores of another run's first one."""
    epoch = next(record for record in records if record["kind"] == "epoch")
    replay(config, config.out, checkpoint=None, start=records[0], record=epoch)


def out_of(folder: Path, variation: str, case: str) -> Path:
    return folder / variation.replace(" ", "_") / case.replace(": ", "_").replace(" ", "_")


def compared(folder: Path, variation: str, case: str) -> Comparison:
    """The newest epoch of a variation's run, held to the same epoch of the base's."""
    ledgers = (read_ledger(out_of(folder, name, case)) for name in (BASE, variation))
    base, other = ([record for record in ledger if record["kind"] != "evaluation"] for ledger in ledgers)
    index = next(
        i for i, record in enumerate(base) if record["kind"] == "epoch" and record["epoch"] == other[-1]["epoch"]
    )
    return compare(base[0], base[index - 1 : index + 1], other[-2:])


def verify(run: Path, out: Path) -> None:
    """`pacorl verify RUN --epoch 1` and `--evaluation 2` of the toy world, as one of several processes."""
    with toy_world():
        comparisons = [recompute(run, 1), recompute(run, 2, "evaluation")]
    answers = [comparison.to_dict() for comparison in comparisons if comparison]
    if answers:
        out.write_text(json.dumps(answers))


def fits(case: str, name: str) -> bool:
    """Whether a variation of a case is run: the toy's transformer has no blocks to shard, and twins take longer."""
    if case == UPDATES and "batches" in name:
        return False  # batches decide which samples each of several updates has
    return name not in (("2 shards", SAME_SCORES) if case.startswith("toy") else LONG)


def lattice(cases: Sequence[str], variations: Sequence[str], folder: Path) -> dict[str, dict[str, Comparison]]:
    """case → variation → how it compares with the base."""
    kinds = sorted({kind for kind in (case.partition(":")[0] for case in cases) if kind != "toy"})
    worlds.run(write_inputs, folder, kinds)
    for name in (BASE, *variations):
        started, variation = time.monotonic(), VARIATIONS[name]
        fitting = [case for case in cases if fits(case, name)]
        extra = worlds.fsdp2() if variation.sharded else {}
        processes = (
            worlds.start(train_all, fitting, name, folder, world=variation.world, extra=extra) if fitting else []
        )
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"a run of {name} failed")
        print(f"{name}: {len(fitting)} runs, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return {case: {name: compared(folder, name, case) for name in variations if fits(case, name)} for case in cases}


def cell(comparison: Comparison | None) -> str:
    """`=` for equal bits, else the quantity that lies farthest out, by its tolerance."""
    if comparison is None:
        return ""
    if comparison.answer == "equal bits":
        return "="
    worst = comparison.first or max(comparison.quantities, key=lambda q: q.difference / q.tolerance)
    return f"{'**differs** ' if comparison.first else ''}{worst.name} {worst.difference:.0e}"


def table(rows: Mapping[str, Sequence[str]], variations: Sequence[str]) -> str:
    """For the docs."""
    lines = [f"| | {' | '.join(variations)} |", "|---" * (len(variations) + 1) + "|"]
    return "\n".join([*lines, *(f"| {case} | {' | '.join(cells)} |" for case, cells in rows.items())]) + "\n"


def shown_rows() -> dict[str, list[str]]:
    """The page's cells by case."""
    lines = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()[2:]
    return {case: cells for case, *cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", nargs="+", default=CASES, choices=CASES, metavar="CASE", help=f"of {', '.join(CASES)}"
    )
    parser.add_argument("--write", action="store_true", help="remake the table of docs/verify.md")
    options = parser.parse_args()
    variations = [name for name in VARIATIONS if name != BASE]
    with tempfile.TemporaryDirectory() as folder:
        rows = lattice(options.cases, variations, Path(folder))
    cells = {case: [cell(row.get(name)) for name in variations] for case, row in rows.items()}
    print(table(cells, variations))
    if options.write:
        # Rows that were not run stay as they are.
        newest = {**shown_rows(), **cells}
        before, _, after = PAGE.read_text().partition(BEGIN)
        text = table({case: newest[case] for case in CASES if case in newest}, variations)
        PAGE.write_text(before + BEGIN + text + END + after.partition(END)[2])
    sys.exit(any(comparison.first for row in rows.values() for comparison in row.values()))


if __name__ == "__main__":
    main()
