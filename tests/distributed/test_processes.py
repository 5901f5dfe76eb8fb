"""Two processes against one, over gloo: the same weights, averages and moments, under DDP and FSDP2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import worlds
from runs import train, train_each, write_edit_twins
from safetensors.torch import load_file
from tiny_runs import JPEG_SIZE

from pacorl.config.recipes import recipe
from pacorl.grpo.checkpoint import TENSORS, section_of
from pacorl.grpo.start import checkpoints

pytestmark = pytest.mark.slow

SETTINGS = [
    "epochs=1",
    "prompts_per_epoch=2",
    "group_size=4",
    "trackers=[]",
    "prompts.train=tiny:train:2",
    "prompts.evaluation=tiny:dev:3",
    "sampling.steps=2",
    "sampling.suffix={}",
    "optimizer.updates_per_epoch=2",
    "sampling.batch=1",  # four batches an update, so that gradients are accumulated before they cross
    "evaluation.size=[64,64]",
    "evaluation.steps=1",
    "evaluation.batch=1",  # three batches for two processes: an uneven last round
    "advantages.credit=set",  # the paper's, and its clip range
    "objective={}",
]
MODES = {"two": (2, {}), "sharded": (2, worlds.fsdp2())}

CHEAP = [f"rewards=[{{name: '{JPEG_SIZE}'}}]", "prompts.evaluation=tiny:dev:1", "evaluation.every=0"]
"""For what is not about judging: a reward without a model."""
OBJECTIVES = {
    # Contrast compares whole groups: one for each update of each process.
    "flux": ["prompts_per_epoch=4", "prompts.train=tiny:train:4"],
    "flux_suffix": [
        *CHEAP,
        "sampling.steps=5",
        "sampling.suffix={solver: ab2, steps: 2}",
        "objective.clip_range=1",  # the second update is not clipped away
        "prompts.evaluation=tiny:dev:3",
    ],
}
EDITS = ("kontext", "qwen_edit", "qwen_edit_plus", "klein")
# Weights in bf16, codes in bytes and an adapter in fp32, in one block that FSDP2 shards.
# In bf16 the rounding of other sums shows, so no node has children in both processes, and one update no ratio to clip.
OBJECTIVES["flux_packed"] = [
    *CHEAP,
    "model.dtype=bfloat16",
    "memory=low",
    "sampling.tree={}",
    "optimizer.updates_per_epoch=1",
]
LONG = tuple(case for case in (*OBJECTIVES, *EDITS) if case != "flux_suffix")
"""Left to `make nightly`: other objectives, packed weights and edit models."""
QUICK = tuple(case for case in (*OBJECTIVES, *EDITS) if case not in LONG)
CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.nightly) for case in LONG)]


def edit_settings(kind: str, folder: Path) -> list[str]:
    """Of a run of a tiny edit model; its prompts are of two shapes, and so are its batches."""
    return [
        *SETTINGS,
        *CHEAP,
        f"model={{kind: {kind}, checkpoint: '{folder / kind}', dtype: float32, gradient_checkpointing: false}}",
        "model.true_cfg_scale=2.0" if kind.startswith("qwen") else "model.max_sequence_length=48",
        "adapter={rank: 2, alpha: 4}",
        f"prompts.train={folder / 'train.jsonl'}",
        f"prompts.evaluation={folder / 'dev.jsonl'}",
        "sampling.size=[32,32]",
        "sampling.steps=3",
        "sampling.suffix={}",
        "optimizer.updates_per_epoch=2",
        "evaluation.steps=2",
        "evaluation.size=[32,32]",
        "optimizer.lr=1.0e-3",
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of this module's runs: MODE/CASE, beside the edit models that they load."""
    folder = tmp_path_factory.mktemp("runs")
    worlds.run(write_edit_twins, folder)
    return folder


@pytest.fixture(scope="module")
def quick_runs(folder: Path) -> Path:
    launch(QUICK, folder)
    return folder


@pytest.fixture(scope="module")
def long_runs(folder: Path) -> Path:
    launch(LONG, folder)
    return folder


@pytest.fixture
def run_of(request: pytest.FixtureRequest) -> Callable[[str, str], Path]:
    """The folder of a finished run, by mode and case: in one process, in two, in two with sharded weights.

    All runs of a group share their launches; one that fails is not tried again, and each test shows its error.
    """

    def found(mode: str, case: str) -> Path:
        runs: Path = request.getfixturevalue("long_runs" if case in LONG else "quick_runs")
        return runs / mode / case

    return found


def launch(cases: Sequence[str], folder: Path) -> None:
    """Run all cases in each mode, one after the other in the same processes."""
    for name, (world, extra) in {"one": (1, {}), **MODES}.items():
        runs = [settings(case, folder, out=folder / name / case) for case in cases]
        worlds.run(train_each, runs, world=world, extra=extra)


def settings(case: str, folder: Path, *, out: Path) -> tuple[Path | None, list[str]]:
    """A case's config file, if it has one, and its overrides."""
    if case in EDITS:
        return None, [*edit_settings(case, folder), f"out={out}"]
    return recipe(), [*SETTINGS, *OBJECTIVES[case], f"out={out}"]


def weights(run: Path, part: str) -> torch.Tensor:
    """All weights of a checkpoint's part in one row."""
    found = section_of(load_file(checkpoints(run / "checkpoints")[-1] / TENSORS), part)
    return torch.cat([found[name].flatten().double() for name in sorted(found)])


def difference(own: torch.Tensor, other: torch.Tensor) -> float:
    """Relative, by norms."""
    return float((own - other).norm() / other.norm())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", ["adapter", "average", "optimizer"])
def test_weights(run_of: Callable[[str, str], Path], mode: str, case: str, part: str) -> None:
    assert difference(weights(run_of(mode, case), part), weights(run_of("one", case), part)) < 1e-4


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_counts_every_image_once(run_of: Callable[[str, str], Path], mode: str) -> None:
    one, other = (
        [json.loads(line) for line in (run / "samples" / "evaluation-000000.jsonl").read_text().splitlines()]
        for run in (run_of("one", "flux_suffix"), run_of(mode, "flux_suffix"))
    )
    assert [line["prompt_id"] for line in other] == [line["prompt_id"] for line in one]
    assert len(one) == 3
    for mine, own in zip(other, one, strict=True):
        assert mine["scores"] == pytest.approx(own["scores"], abs=1e-4)


@pytest.mark.nightly
def test_a_run_goes_on_with_other_processes(run_of: Callable[[str, str], Path], tmp_path: Path) -> None:
    """From one process to two with sharded weights: the checkpoint is whole, whatever made it."""
    shutil.copytree(run_of("one", "flux"), tmp_path / "on")
    longer = [*SETTINGS, *OBJECTIVES["flux"], "epochs=2", f"out={tmp_path / 'on'}", "evaluation.every=0"]
    worlds.run(train, longer, True, world=2, extra=worlds.fsdp2())
    state = json.loads((checkpoints(tmp_path / "on" / "checkpoints")[-1] / "state.json").read_text())
    assert (state["epoch"], state["step"]) == (2, 4)
    assert difference(weights(tmp_path / "on", "adapter"), weights(run_of("one", "flux"), "adapter")) > 1e-4


def test_one_ranks_signal_saves_on_all(tmp_path: Path) -> None:
    """The second of two processes is told to stop; both end, and what they saved is whole."""
    run = tmp_path / "stopped"
    both = worlds.start(train, [*SETTINGS, "epochs=1000", "save_every=1000", f"out={run}"], world=2)
    worlds.wait_for((run / "metrics.jsonl").exists, both)
    both[1].terminate()
    for process in both:
        process.join(120)
    assert all(process.exitcode for process in both)  # Interrupted, on both
    assert checkpoints(run / "checkpoints")
