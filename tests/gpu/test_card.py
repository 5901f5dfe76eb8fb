"""The loop on a card: streams, packed weights, launchers and a killed run. `make test-gpu` runs it in minutes.

`make nightly` runs each of them on the CPU too.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from research.gpu_day.bench import FORMS, Bench, run_of
from research.gpu_day.day import arguments
from tiny_runs import metrics
from torch import Tensor, nn

from pacorl.core.objectives import RATIO_DEVIATION
from pacorl.core.questions import same_theme
from pacorl.grpo.scoring import torch_context
from pacorl.judge.local import LocalJudge
from pacorl.models.int8 import quantize_model
from pacorl.types import Question

ROOT = Path(__file__).parents[2]
SIDE = 64
OPTIONS = arguments(["--tiny"])
PANELS = [Image.effect_noise((SIDE, SIDE), 50) for _ in range(4)]
QUESTIONS = [Question(pair, same_theme("a red fox")) for pair in combinations(PANELS, 2)]
CARD = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")]
DEVICES = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.nightly), pytest.param("cuda", marks=CARD)]
)


SMALL = [
    "epochs=3", "prompts_per_epoch=2", "group_size=2", "save_every=1", "trackers=[]", "prompts.train=tiny:train:3",
    "prompts.evaluation=tiny:dev:1", "sampling.steps=2", "sampling.suffix={}", "sampling.batch=2",
    "evaluation.size=[64,64]", "evaluation.steps=1", "optimizer.updates_per_epoch=1",
]  # fmt: skip


def bench(device: str, *, form: str = "bf16", dtype: str = "float32") -> Bench:
    """A tiny generator in one form."""
    config = run_of(OPTIONS, *FORMS[form], f"model.dtype={dtype}", "sampling.steps=2")
    return Bench(config, device=torch.device(device))


@pytest.fixture(scope="module")
def judges() -> dict[str, LocalJudge]:
    """The tiny judge by device, loaded once."""
    return {}


def judge_on(device: str, judges: dict[str, LocalJudge]) -> LocalJudge:
    if device not in judges:
        judges[device] = LocalJudge.from_pretrained("tiny", device=device)
    return judges[device]


@contextmanager
def judging(judge: LocalJudge) -> Iterator[None]:
    """Ask a judge again and again on another thread, with the context and stream that a run gives its scorer."""
    context, ended, faults = torch_context(), threading.Event(), list[BaseException]()

    def ask() -> None:
        try:
            with context():
                while not ended.is_set():
                    judge.verdicts(QUESTIONS)
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert faults == []


@pytest.mark.compiles
@DEVICES
@pytest.mark.parametrize("form", FORMS)
def test_the_ratio_is_one_before_an_update(device: str, form: str, judges: dict[str, LocalJudge]) -> None:
    """In batches of each size, alone and with the judge at work; on a CPU, which has no streams, of one size."""
    here, judge, deviations = bench(device, form=form, dtype="bfloat16"), judge_on(device, judges), {}
    for batch, concurrent in product((1, 3, 8) if device == "cuda" else (3,), (False, True)):
        with judging(judge) if concurrent else nullcontext():
            deviations[batch, concurrent] = here.train(here.collect(batch))
    assert set(deviations.values()) == {0.0}, deviations


WIDTH, BLOCKS = 256, 12


def stack(device: str, *, stream: bool) -> nn.Module:
    """Blocks of two int8 layers."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))
    model = nn.Sequential(*blocks).requires_grad_(False).to(device)
    quantize_model(model, "int8", device=device, stream=stream)
    return model


def output_and_gradient(model: nn.Module, order: Sequence[int], device: str) -> tuple[Tensor, Tensor]:
    leaf = torch.linspace(-1, 1, 3 * WIDTH, device=device).view(3, WIDTH).requires_grad_()
    x: Tensor = leaf
    for number in order:
        x = model[number](x)  # type: ignore[index]
    x.square().sum().backward()
    assert leaf.grad is not None
    return x.detach(), leaf.grad


@DEVICES
def test_streamed_weights_are_resident_ones_bit_for_bit(device: str, judges: dict[str, LocalJudge]) -> None:
    resident, streamed = stack(device, stream=False), stack(device, stream=True)
    draw = random.Random(0)
    with judging(judge_on(device, judges)):
        for _ in range(200 if device == "cuda" else 20):
            order = [draw.randrange(BLOCKS) for _ in range(draw.randint(1, 2 * BLOCKS))]
            expected, actual = (output_and_gradient(model, order, device) for model in (resident, streamed))
            assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True)), order


# --- whole runs, in processes of their own ---------------------------------------------------------------------


def start(device: str, out: Path, *launcher: str, settings: Sequence[str] = (), resume: bool = False) -> Any:
    """`pacorl train-policy configs/tiny.yaml`, by itself or by a launcher's module."""
    line = [sys.executable, *launcher, "-m", "pacorl", "train-policy", str(ROOT / "configs" / "tiny.yaml")]
    line += [*SMALL, *settings, f"out={out}", *(["--resume", "auto"] if resume else [])]
    hidden = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    environment = os.environ | hidden | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@DEVICES
@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_the_launch_files_train_on_one_rank(device: str, engine: str, tmp_path: Path) -> None:
    config = ROOT / "configs" / "launch" / f"{engine}.yaml"
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config), "--num_processes", "1"]
    process = start(device, tmp_path / "run", *launcher, settings=["epochs=1"])
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, printed[-3000:]
    assert len(metrics(tmp_path / "run", "epoch")) == 1


@DEVICES
@pytest.mark.parametrize("setting", ["memory=low", "model.dtype=bfloat16"])
def test_a_run_trains_in_each_kind_of_weights(device: str, setting: str, tmp_path: Path) -> None:
    process = start(device, tmp_path / "run", settings=["epochs=1", setting])
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, printed[-3000:]
    (line,) = metrics(tmp_path / "run", "epoch")
    assert line[RATIO_DEVIATION] == 0.0
