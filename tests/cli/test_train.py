"""`pacorl train-reward`: the plan, and one line for what is wrong."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pacorl import cli

RECIPE = Path(__file__).parents[2] / "configs" / "reward" / "tiny.yaml"
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's


def test_the_end_of_standard_input_is_a_signal_to_stop() -> None:
    code = "import signal, sys, time; from pacorl.cli.train import watch_stdin; "
    code += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); "
    code += "watch_stdin(); print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        process.stdin.write(b"not the end")
        process.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.stdin.close()
        assert process.wait(30) == 75


@pytest.mark.slow
def test_a_signal_while_a_run_loads_ends_it_to_be_started_again(tmp_path: Path) -> None:
    slow, began = tmp_path / "slow.py", tmp_path / "began"
    slow.write_text(
        f"import pathlib, time\npathlib.Path({str(began)!r}).touch()\ntime.sleep(600)\ndef score(prompts, images): ..."
    )
    recipe = RECIPE.parents[1] / "tiny.yaml"
    words = [f"rewards=[{{name: '{slow}:score'}}]", f"out={tmp_path / 'run'}"]
    line = [sys.executable, "-m", "pacorl", "train-policy", str(recipe), *words]
    with subprocess.Popen(line) as process:
        while not began.exists() and process.poll() is None:
            time.sleep(0.05)
        process.terminate()
        try:
            assert process.wait(timeout=120) == 75
        finally:
            process.kill()


def test_a_judges_training_ends_with_its_verdict_and_page(tmp_path: Path) -> None:
    words = ["train-reward", str(RECIPE), f"out={tmp_path / 'run'}", "max_steps=1", "trackers=[]"]
    words += ["data.train=['tiny:train:16']", "data.evaluation=['tiny:dev:12']"]
    shown = CliRunner().invoke(cli.app, words)
    assert shown.exit_code == 0, shown.exception
    lines = shown.stdout.splitlines()
    (verdict,) = [line for line in lines if line.startswith("The judge is ")]
    assert f"done: {tmp_path / 'run/report.html'}" in lines
    assert verdict in (tmp_path / "run/report.html").read_text()
