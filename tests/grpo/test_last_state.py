"""The copy of the last finished state, from which a run is saved whose main thread cannot save it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toy_world import toy_config

from pacorl.grpo import last_state
from pacorl.grpo.start import checkpoints
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.documents import read_json
from pacorl.runtime.watch import UNSAVED

pytestmark = pytest.mark.usefixtures("toy")


def content(checkpoint: Path) -> dict[str, Any]:
    """Its files: tensors by name, and other documents."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    found = {str(path.relative_to(checkpoint)): path for path in files}
    content = {
        name: load_file(path) if path.suffix == ".safetensors" else read_json(path) for name, path in found.items()
    }
    for digest in ("files", "sha256"):  # of an order of metadata, which safetensors draws
        del content["state.json"][digest]
    return content


@pytest.mark.parametrize("objective", ["grpo_clip", "diffusion_nft"])
def test_it_is_the_checkpoint_that_the_run_would_have_written_whatever_came_after(
    tmp_path: Path, objective: str
) -> None:
    config = toy_config(tmp_path / "run", f"objective.name={objective}", "sampling.tree={}", "save_every=100")
    trainer = PolicyTrainer(config)
    trainer.run_epoch()
    trainer.keep_state()
    trainer.save()
    expected = content(checkpoints(config.out / "checkpoints")[-1])
    shutil.rmtree(config.out / "checkpoints")
    trainer.run_epoch()  # which changes all of it
    assert trainer.last_state.save() == "stopped after epoch 1, and saved; go on with --resume auto"
    trainer.close()
    (saved,) = checkpoints(config.out / "checkpoints")
    found = content(saved)
    assert found.keys() == expected.keys()
    assert "optimizer.safetensors" in found
    for name, value in expected.items():
        if name.endswith(".safetensors"):
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)
        else:
            assert found[name] == value, name


@pytest.mark.slow
def test_a_state_that_a_checkpoint_holds_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = PolicyTrainer(toy_config(tmp_path / "run", "epochs=1"))
    written: list[int] = []
    assert trainer.last_state.save() == UNSAVED, "before the first copy"
    trainer.train()
    monkeypatch.setattr(last_state, "write_run", lambda run, config, *, targets: written.append(run.state["epoch"]))
    trainer.last_state.save()
    assert written == []
    shutil.rmtree(checkpoints(tmp_path / "run" / "checkpoints")[-1])
    trainer.last_state.save()
    assert written == [1]
