"""The launcher's layouts at the published width: every rank's loop on a pretended card of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import accelerate_line

pytestmark = pytest.mark.campaign


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_a_layout_s_loop(layout: str, tmp_path: Path) -> None:
    """Loading, an epoch, an evaluation, a checkpoint, and going on from it, in two processes.

    Each rank checks that no denoising step waits for its card, and with DDP that the plan holds.
    """
    script = Path(__file__).with_name("layout_rank.py")
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *accelerate_line(layout), script, tmp_path],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"rank-{rank}" / "peaks.json").read_text()) for rank in range(2))
    # The main process encodes the odd prompt; all else is the same on each card.
    assert {**first, "encode": 0} == {**second, "encode": 0}
    if layout == "fsdp2":  # the weights come block by block, and are never whole on a card
        assert first["check"] < 2**28
