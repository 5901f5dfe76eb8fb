"""One real vLLM per test run, serving a judge of random weights and a LoRA on it.

`tests/vllm/install.sh` makes its environment; without it, or on a machine that cannot run it, these tests are
skipped. VLLM_BIN names another `vllm` to test against.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from judges import draw_lora
from tests.twins.parts import tiny_judge, vocabulary

from pacorl.judge.local import LocalJudge
from pacorl.judge_training.judge_config import RewardTuningConfig
from pacorl.judge_training.tuning import save_processor, tune
from pacorl.serve.vllm import vllm_command

ROOT = Path(__file__).parents[2]
SHIMS = Path(__file__).with_name("shims")
STARTUP_SECONDS = 600


@dataclass(frozen=True)
class Served:
    """What runs, and the same judges in this process."""

    url: str
    base: LocalJudge
    merged: LocalJudge


def _program() -> Path:
    program = Path(os.environ.get("VLLM_BIN", ROOT / ".venv-vllm" / "bin" / "vllm"))
    if not program.is_file():
        pytest.skip(f"{program} is not there; tests/vllm/install.sh makes it")
    return program


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    program = _program()
    folder = tmp_path_factory.mktemp("vllm")
    checkpoint, adapter = _judge(folder / "judge"), folder / "adapter"
    _adapter(checkpoint, adapter)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    extra = ["--served-model-name", "judge", "--dtype", "float32", "--max-model-len", "2048"]
    extra += ["--enforce-eager", "--max-num-seqs", "16"]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONPATH": str(SHIMS),
    }
    command = vllm_command(str(adapter), "judge-lora", port=port, extra=extra)
    with subprocess.Popen([program, *command[1:]], env=environment) as process:
        try:
            deadline = time.monotonic() + STARTUP_SECONDS
            while not _is_healthy(port):
                assert process.poll() is None, f"vLLM ended with code {process.returncode}; its log is above"
                assert time.monotonic() < deadline, "vLLM was not healthy in time; its log is above"
                time.sleep(0.5)
            yield Served(
                f"http://127.0.0.1:{port}/v1",
                LocalJudge.from_pretrained(checkpoint),
                LocalJudge.from_pretrained(checkpoint, adapter=str(adapter)),
            )
        finally:
            process.terminate()


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _judge(folder: Path) -> Path:
    """A judge under the file names of the released ones, which vLLM's transformers asks for."""
    torch.manual_seed(0)
    model, processor = tiny_judge(vocabulary())
    # For questions longer than a block of vLLM's cache; a panel of 32 px keeps its size.
    processor.image_processor.size = dict(processor.image_processor.size) | {"longest_edge": 256 * 256}
    model.save_pretrained(folder)
    save_processor(processor, folder, source=str(folder))
    return folder


def _adapter(checkpoint: Path, folder: Path) -> None:
    """A LoRA on the language model's attention whose B matrices are drawn, so that it changes the answers."""
    model = LocalJudge.from_pretrained(checkpoint).model
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    draw_lora(tune(model, RewardTuningConfig(rank=8, alpha=16, targets=targets))).save_pretrained(folder)
