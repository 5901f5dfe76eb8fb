"""The GPU benchmark's schedule loses one part to one fault, and its parts run on the tiny shapes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu_day import kernels, machine, measuring, page, product, runner
from benchmarks.gpu_day.parts import PARTS, SkipPart, UnusableMachine
from benchmarks.gpu_day.results import Results
from torch.profiler import ProfilerActivity, profile

import pacorl

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
NAMES = list(PARTS)


def day(out: Path, *line: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark on the tiny shapes."""
    command = [sys.executable, "-m", "benchmarks.gpu_day", "--tiny", *line]
    if "--resume" not in line:
        command += ["--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)


def injected(faults: Sequence[str], *, shift: int = 0) -> list[str]:
    """Arguments that give each part one of some faults, in turn."""
    return ["--inject", *(f"{name}={faults[(number + shift) % len(faults)]}" for number, name in enumerate(NAMES))]


def check_outcomes(results: Results, faults: Sequence[str], *, shift: int) -> None:
    """Every part has the outcome of its own fault, and the record that it made before it."""
    outcomes = results.outcomes()
    assert list(outcomes) == NAMES
    for number, name in enumerate(NAMES):
        fault = faults[(number + shift) % len(faults)]
        expected, reason = {
            "pass": ("done", ""),
            "kill": ("failed", "ended by signal 9"),
            "hang": ("timeout", "killed after"),
            "oom": ("failed", "OutOfMemoryError: CUDA out of memory (injected)"),
        }[fault]
        assert outcomes[name]["outcome"] == expected
        assert reason in outcomes[name]["reason"]
    assert [record["part"] for record in results.records() if "figure" in record] == NAMES


HALVES = pytest.mark.parametrize(
    "shift", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.campaign)]
)
"""The parts of even number have the fault, and those of odd number."""


@HALVES
def test_a_kill_costs_one_part(shift: int, tmp_path: Path) -> None:
    out, faults = tmp_path / "day.jsonl", ("kill", "pass")
    done = day(out, *injected(faults, shift=shift))
    assert done.returncode == 1, done.stderr
    check_outcomes(Results(out), faults, shift=shift)
    assert "ended by signal 9" in out.with_suffix(".md").read_text()


@HALVES
@pytest.mark.parametrize("fault", [pytest.param("hang", marks=pytest.mark.campaign), "oom"])
def test_a_hang_and_an_error_cost_one_part(fault: str, shift: int, tmp_path: Path) -> None:
    out = tmp_path / "day.jsonl"
    limit = ["--limit", "3"] if fault == "hang" else []
    assert day(out, *limit, *injected((fault, "pass"), shift=shift)).returncode == 1
    check_outcomes(Results(out), (fault, "pass"), shift=shift)


@pytest.mark.slow
def test_a_resumed_day_runs_what_is_left_and_then_what_was_lost(tmp_path: Path) -> None:
    out = tmp_path / "day.jsonl"
    first = ["--parts", "rates", "form-bf16", "--inject", "rates=kill", "form-bf16=pass"]
    assert day(out, *first).returncode == 1
    with out.open("a") as handle:
        handle.write('{"part": "judge", "fig')  # a kill of the whole machine
    again = ["--parts", "rates", "form-bf16", "judge", "--inject", "rates=pass", "judge=pass"]
    done = day(out, "--resume", str(out), *again)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["judge", "rates"]
    assert {record["outcome"] for record in Results(out).outcomes().values()} == {"done"}
    refused = day(out, *first)
    assert (refused.returncode, "go on with --resume" in refused.stderr) == (2, True)


def test_a_killed_part_leaves_nothing_in_the_compiler_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a file there would fail the part each time it is run again."""
    line = "import os, pathlib; half = pathlib.Path(os.environ['TORCHINDUCTOR_CACHE_DIR'], 'half.so'); half.touch(); "
    line += f"pathlib.Path({str(tmp_path / 'seen')!r}).write_text(str(half)); os.kill(os.getpid(), 9)"
    monkeypatch.setattr(runner, "command", lambda *_: [sys.executable, "-c", line])
    options = runner.arguments(["--tiny"])
    record = runner.outcome(PARTS["rates"], options, Results(tmp_path / "day.jsonl"), limit=60)
    assert record["reason"] == "ended by signal 9"
    half = Path((tmp_path / "seen").read_text())
    assert not half.parent.exists()


def test_a_slice_ends_with_what_is_left(tmp_path: Path) -> None:
    assert runner.arguments([]).slice == 9
    out = tmp_path / "day.jsonl"
    done = day(out, "--slice", "0.1", *injected(("pass",)))
    assert done.returncode == 0
    assert done.stdout.startswith(f"left: {', '.join(NAMES)}; go on with --resume")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)], ids=["told", "killed"]
)
def test_a_stopped_day_leaves_no_process(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """A part that went on would share the card with the next slice, and write into its results."""
    out = tmp_path / "day.jsonl"
    line = [sys.executable, "-m", "benchmarks.gpu_day", "--tiny", "--out", str(out), "--parts", "rates"]
    process = subprocess.Popen([*line, "--inject", "rates=hang"], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not any(Results(out).records()) and time.monotonic() < deadline:
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    assert process.wait(60) == code
    assert children
    deadline = time.monotonic() + 60
    while any(map(is_running, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, children))


def is_running(pid: str) -> bool:
    """Whether there is such a process, and nobody's zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_machine_without_a_package_is_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpcore2", None)
    with pytest.raises(UnusableMachine, match=r"import of httpcore2 .*\(needed packages: --needs\)"):
        list(machine.describe_machine(runner.arguments(["--tiny"])))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a card is here")
def test_a_machine_without_a_card_is_unusable() -> None:
    with pytest.raises(UnusableMachine, match="no CUDA device is here; --tiny"):
        list(machine.describe_machine(runner.arguments([])))


def test_an_unusable_machine_ends_the_day_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each part would fail likewise, and take the time of a card."""
    line = f"import sys; print('no diffusers', file=sys.stderr); sys.exit({runner.UNUSABLE})"
    monkeypatch.setattr(runner, "command", lambda *_: [sys.executable, "-c", line])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    out = tmp_path / "day.jsonl"
    assert runner.run_day(runner.arguments(["--tiny", "--out", str(out)])) == 2
    assert list(Results(out).outcomes()) == ["machine"]
    printed = capsys.readouterr().out
    assert printed.startswith("machine: unusable")
    assert "no diffusers" in printed


def test_parts_fit_a_slice_and_the_first_are_worth_most() -> None:
    assert all(part.seconds < 9 * 60 for part in PARTS.values())
    worth = [part.value / part.seconds for part in PARTS.values()]
    assert worth == sorted(worth, reverse=True)
    assert NAMES[:2] == ["machine", "rates"]
    options = runner.arguments([])
    assert sum(part.seconds for part in PARTS.values()) < 60 * options.minutes
    assert not runner.fits(PARTS["product"], 439, options)
    assert runner.fits(PARTS["product"], 440, options)
    assert runner.time_limit(PARTS["product"], options) == 60 + 2.5 * 440
    assert runner.time_limit(PARTS["rates"], runner.arguments(["--tiny", "--slice", "20"])) == 20 * 60


def test_carried_wheels_are_unpacked_once(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "carried-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried/__init__.py", "VALUE = 1")
    site = runner.unpacked(tmp_path)
    assert (site / "carried" / "__init__.py").read_text() == "VALUE = 1"
    assert runner.unpacked(tmp_path) == site


def test_memory_that_does_not_suffice_is_a_record() -> None:
    def work() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    record = measuring.measured(work, CPU, repeats=1)
    assert record == {"error": "out of memory: CUDA out of memory. Tried to allocate 2 GiB"}


def test_a_card_s_memory_is_in_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks, and the allocator's retries since the warm-up."""
    calls = {"synchronize": None, "empty_cache": None, "reset_peak_memory_stats": None}
    for name, value in {**calls, "max_memory_allocated": 3, "max_memory_reserved": 5}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    retries = iter((2, 9))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": next(retries)})
    record = measuring.measured(lambda: None, torch.device("cuda"), repeats=1)
    assert {name: record[name] for name in ("allocated", "reserved", "retries")} == {
        "allocated": 3,
        "reserved": 5,
        "retries": 7,
    }


def test_kernels_have_classes() -> None:
    seconds = {
        "sm90_xmma_gemm_bf16bf16_bf16f32": 1.0,
        "nvjet_tst_128x256": 2.0,
        "flash_fwd_kernel<...>": 4.0,
        "Memcpy HtoD (Pinned -> Device)": 8.0,
        "at::native::vectorized_elementwise_kernel<4>": 16.0,
        "aten::addmm": 32.0,
        "aten::bmm": 64.0,
        "aten::_fused_rms_norm": 128.0,
    }
    assert kernels.classified(seconds) == {"attention": 4.0, "gemm": 99.0, "copy": 8.0, "norm and elementwise": 144.0}


def test_annotations_are_no_kernels() -> None:
    """On a card torch gives the optimizer's step all seconds of its kernels, which have rows of their own."""
    weights = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(weights.parameters())
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        weights(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    events = profiler.key_averages()
    assert any(event.key.startswith("Optimizer.step") for event in events)
    seconds = kernels.kernel_seconds(events, CPU)
    assert "aten::addmm" in seconds
    assert not [name for name in seconds if name.startswith("Optimizer.step")]


def test_two_depths_give_the_whole() -> None:
    common = {"form": "int8", "batch": 1, "phase": "sample"}
    records = [
        {**common, "blocks": blocks, "seconds": 1 + 0.5 * blocks, "allocated": blocks * 2**30} for blocks in (2, 4)
    ]
    assert page.extrapolated(records) == [["int8", "1", "a forward", "0.5", "10.5", "19.00 GiB", "–"]]
    assert runner.depth("4+8") == 4


def test_a_day_of_two_depth_settings_extrapolates_over_all_depths() -> None:
    common = {"form": "int8", "batch": 1, "phase": "sample"}
    records = [{**common, "blocks": blocks, "seconds": 1 + 0.5 * blocks} for blocks in (2, 4, 8)]
    assert page.extrapolated(records) == [["int8", "1", "a forward", "0.5", "10.5", "–", "–"]]


def test_torch_finds_the_allocator_configured() -> None:
    """Each part imports torch after this, and a run's memory depends on the setting."""
    line = "from benchmarks.gpu_day import runner; runner.use_sources(runner.arguments([])); import os, sys; "
    line += "print(os.environ['PYTORCH_ALLOC_CONF'], 'torch' in sys.modules)"
    environment = {key: value for key, value in os.environ.items() if key not in pacorl.ALLOCATOR}
    command = [sys.executable, "-c", line]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "expandable_segments:True False\n", done.stderr


def test_the_source_tree_comes_before_an_installation(tmp_path: Path) -> None:
    """The package is installed here; that of another tree is imported all the same."""
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    package = tmp_path / "src" / "pacorl" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.touch()
    line = "from benchmarks.gpu_day import runner; runner.use_sources(runner.arguments([])); import pacorl; "
    command = [sys.executable, "-c", line + "print(pacorl.__file__)"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(package), done.stderr


TITLES = {
    "machine": "Machine",
    "rates": "Rates",
    "full": "Full depth",
    "kernels": "Kernels",
    "judge": "Judge and launchers",
    "launchers": "Judge and launchers",
    "product": "Figures",
}
"""Part → title of the table with its records; of all other parts it is Forms."""
LONG = ("form-compiled", "form-compiled-int8", "product", "full", "full-recipe", "launchers")


def parts_of_a_day() -> Iterator[Any]:
    """All parts; compiling and the whole product take minutes."""
    for name in NAMES:
        yield pytest.param(name, marks=pytest.mark.campaign if name in LONG else pytest.mark.slow)


@pytest.mark.compiles
# torch warns of in-place operations on a sharded block's output, which diffusers only concatenates and slices.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.parametrize("name", list(parts_of_a_day()))
def test_every_part_runs_on_the_tiny_shapes(name: str) -> None:
    options = runner.arguments(["--tiny", "--repeats", "1", "--steps", "2", "--batches", "2", "--rank", "8"])
    if name == "product":
        options.depth = 1
    try:
        records = list(PARTS[name].load()(options))
    except SkipPart as reason:
        pytest.skip(str(reason))
    assert records
    assert not [record for record in records if "error" in record]
    assert {record["ratio_deviation"] for record in records if "ratio_deviation" in record} <= {0.0}
    text = page.page(records)
    assert f"## {TITLES.get(name, 'Forms')}" in text
    if name.startswith("form-"):
        assert "extrapolated" in text
    if name == "launchers":
        assert {record["wrapper"] for record in records} == {"none", "DDP", "FSDP2"}
    if name == "product":
        assert "run, epoch: seconds" in text
        assert "resumed for a second epoch" in text
        assert len([record for record in records if record.get("run", {}).get("kind") == "epoch"]) == 2


@pytest.mark.campaign
def test_a_part_s_records_are_in_the_results_and_on_the_page(tmp_path: Path) -> None:
    out = tmp_path / "day.jsonl"
    done = day(out, "--repeats", "1", "--parts", "rates")
    assert done.returncode == 0, json.dumps(Results(out).outcomes(), indent=1)
    assert [record["part"] for record in Results(out).records() if "rate" in record]
    assert "## Rates" in out.with_suffix(".md").read_text()


@pytest.mark.slow
def test_a_killed_command_of_the_product_leaves_its_last_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert product.run("--version") > 0
    assert "pacorl" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match=r"pacorl twin failed: .*nonesuch"):
        product.run("twin", "nonesuch", "/nowhere")
