"""The parts of the day; each yields its records."""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle, product
from pathlib import Path

import torch
from PIL import Image

from pacorl.core.devices import available_device
from pacorl.judge import judge_from
from pacorl.plan.plan import plan_training
from pacorl.rewards.consistency import Consistency
from pacorl.types import Grid, Prompt

from .bench import FORMS, TINY_SETTINGS, Bench, run_of
from .day import Record, dies_with_parent
from .measuring import measured, synchronize, timed

SENSORS = ("name", "driver_version", "clocks.sm", "power.draw", "temperature.gpu", "clocks_event_reasons.active")
"""Fields of nvidia-smi: MHz, W, °C, and a bit mask of reasons for a lowered clock."""
EPOCHS = (
    "save_every=1", "trackers=[]", "prompts_per_epoch=2", "prompts.train=tiny:train:4", "evaluation.size=[512,512]",
    "prompts.evaluation=tiny:test:2", "evaluation.steps=4", "evaluation.rewards=[]", "rewards=[{name: consistency}]",
)  # fmt: skip
"""Short epochs of the recipe on the tiny world's prompts, with the judge as the only reward."""


def measure_card(options: argparse.Namespace) -> Iterator[Record]:
    """The machine, then FLOP/s of square products in the generator's type: in a burst, and window by window."""
    packages = {"python": platform.python_version()}
    for name in ("torch", "accelerate", "diffusers", "peft", "transformers", "triton"):
        with suppress(PackageNotFoundError):  # no triton without a card
            packages[name] = version(name)
    yield {"recipe": options.recipe, "tiny": options.tiny, **packages, **sensors()}

    side, dtype = (512, torch.float32) if options.tiny else (8192, torch.bfloat16)
    matrix = torch.randn(side, side, device=available_device(), dtype=dtype)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    timed(partial(multiply, 20))  # chooses a kernel
    time.sleep(1)  # an idle card has its highest clock
    seconds = min(timed(partial(multiply, 20)) for _ in range(3)) / 20
    yield {"products": "in a burst", "side": side, "flops_per_second": 2 * side**3 / seconds}

    count = math.ceil((0.2 if options.tiny else 2) / seconds)
    for window in range(10):
        started = time.perf_counter()
        multiply(count)
        reading = sensors()  # while the card works on what is queued
        synchronize()
        rate = 2 * side**3 * count / (time.perf_counter() - started)
        yield {"products": "sustained", "window": window, "flops_per_second": rate, **reading}


def sensors() -> dict[str, str]:
    """Read the card's clock, power and temperature; empty without nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return {}
    query = ["nvidia-smi", f"--query-gpu={','.join(SENSORS)}", "--format=csv,noheader,nounits"]
    printed = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    return dict(zip(SENSORS, printed.partition("\n")[0].split(", "), strict=False))


def measure_generator(form: str, options: argparse.Namespace) -> Iterator[Record]:
    """Four forwards and a trained step: of the recipe at full depth beside its plan, of a form at two depths."""
    run = run_of(options, *FORMS.get(form, ()))
    # Double blocks, with twice as many single ones: the line through two depths has a form's cost per block.
    depths, batches = ((1, 2), (2,)) if options.tiny else ((4, 8), (1, 4))
    phases = [("sample", False), ("train", False), ("train", True)]
    if form == "recipe":
        depths, batches = (None,), (run.sampling.batch,)
        phases.append(("decode", False))
        for checkpointing in (False, True):
            planned = plan_training(run_of(options, f"model.gradient_checkpointing={checkpointing}")).memory.phases
            yield {"form": form, "checkpointing": checkpointing, "planned": dict(planned)}
    for blocks in depths:
        bench = Bench(run, blocks=blocks)
        bench.train(bench.collect(batches[0]))  # the optimizer's moments exist from its first step on
        for batch, (phase, checkpointing) in product(batches, phases):
            record = {"form": form, "blocks": blocks, "batch": batch, "phase": phase, "checkpointing": checkpointing}
            bench.checkpoint_gradients(enabled=checkpointing)
            try:
                yield {**record, **measured_phase(bench, phase, batch)}
            except torch.OutOfMemoryError as error:
                yield {**record, "error": str(error).partition("\n")[0]}
        del bench  # before the next one is built


def measured_phase(bench: Bench, phase: str, batch: int) -> Record:
    """Measure a phase; for training also the ratio's deviation from 1 in a first step on new samples."""
    if phase == "sample":
        return measured(partial(bench.sample, batch))
    samples = bench.collect(batch)
    if phase == "decode":
        rollout = samples.rollouts[0]
        return measured(partial(bench.policy.decode, rollout.final_BNC.to(bench.policy.device), rollout.size))
    return {"ratio_deviation": bench.train(samples), **measured(partial(bench.train, samples))}


def measure_judge(options: argparse.Namespace) -> Iterator[Record]:
    """Grids per call of the reward, with six questions each whose common prefixes are computed once."""
    checkpoint = checkpoint_of("judge", options)
    reward = Consistency(judge_from(str(checkpoint))[0])
    side = run_of(options).sampling.size[0]
    prompt = Prompt(id=0, text="", theme="A small red fox who runs a lighthouse by the northern sea.", grid=Grid(2, 2))
    for grids in (1, 4, 8, 16):
        # Two batches in turn: the judge keeps its last call's features, and the images of a run are always new.
        batches = cycle([[Image.effect_noise((side, side), 50) for _ in range(grids)] for _ in range(2)])
        scores = map(partial(reward, [prompt] * grids), batches)
        yield {"judge": grids, **measured(partial(next, scores))}


def train(options: argparse.Namespace, *, epochs: int) -> Iterator[Record]:
    """Run `pacorl train-policy` up to an epoch, from where an earlier part has left it, and hand on its log."""
    generator, judge = checkpoint_of("flux", options), checkpoint_of("judge", options)
    run = generator.parent / "run"
    settings = [f"model.checkpoint={generator}", f"judge.checkpoint={judge}", f"out={run}", f"epochs={epochs}"]
    tiny = ("group_size=4", "model.compile=none", *TINY_SETTINGS) if options.tiny else ()
    started = time.monotonic()
    python("pacorl", "train-policy", options.recipe, *EPOCHS, *tiny, *settings, "--resume", "auto")
    yield {"command": "train-policy", "epochs": epochs, "seconds": time.monotonic() - started}
    for line in (run / "metrics.jsonl").read_text("utf-8").splitlines():
        yield {"log": json.loads(line)}


def checkpoint_of(kind: str, options: argparse.Namespace) -> Path:
    """Return the folder of a checkpoint of random weights, which is written unless an earlier part has."""
    width = "tiny" if options.tiny else "published"
    folder: Path = options.work / width / kind
    if not folder.exists():
        incomplete = folder.with_suffix(".incomplete")
        shutil.rmtree(incomplete, ignore_errors=True)
        python("research.twin", kind, str(incomplete), "--width", width)
        incomplete.rename(folder)
    return folder


def python(*line: str) -> None:
    """Run a module; if it fails, this part does, with the module's message as its last line."""
    if code := subprocess.call([sys.executable, "-m", *line], preexec_fn=dies_with_parent):
        sys.exit(code)


RUN = {
    "card": measure_card,
    "judge": measure_judge,
    "epoch": partial(train, epochs=1),
    "resumed": partial(train, epochs=3),  # its last epoch compiles nothing
    **{form: partial(measure_generator, form) for form in ("recipe", *FORMS)},
}
