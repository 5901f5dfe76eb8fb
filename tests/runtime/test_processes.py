"""What processes agree on."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from toy_world import toy_config, toy_world

from pacorl.grpo.trainer import PolicyTrainer
from pacorl.runtime.processes import Runtime, lost_ranks


def test_batches_are_sharded_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Runtime()
    assert machine.shard("abc") == [(0, "a"), (1, "b"), (2, "c")]
    for rank, share in enumerate(([(0, "a"), (2, "c")], [(1, "b"), (-1, "a")])):
        with monkeypatch.context() as patch:
            patch.setattr(machine, "world", 2)
            patch.setattr(machine, "rank", rank)
            assert machine.shard("abc") == share


def test_rows_of_all_ranks_are_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Runtime()
    monkeypatch.setattr(machine, "gather", lambda outcome: [outcome, ({1: "b"}, None)])
    assert list(machine.gather_rows(lambda: {2: "c", 0: "a"}).items()) == [(0, "a"), (1, "b"), (2, "c")]


@pytest.mark.parametrize(("size", "moved"), [(3.0, 1.0), (0.5, 0.5), (math.inf, 0.0), (math.nan, 0.0)])
def test_a_step_is_clipped_taken_if_it_is_finite_and_forgotten(size: float, moved: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.tensor([-size])
    norm = Runtime().step(optimizer, [weight], max_norm=1.0)
    assert norm == pytest.approx(size, nan_ok=True)
    assert weight.item() == pytest.approx(moved, abs=1e-5)
    assert weight.grad is None


def test_gradients_cross_processes_with_the_last_backward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, model, kept = Runtime(), torch.nn.Linear(1, 1), []
    monkeypatch.setattr(machine.accelerator, "no_sync", lambda model: nullcontext(kept.append(model)))
    for last in (False, False, True):
        with machine.accumulating(model, last=last):
            pass
    assert kept == [model, model]


def test_sampling_and_training_attend_by_the_same_kernels() -> None:
    """cuDNN's have another graph where gradients are wanted."""
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    Runtime()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(("settings", "precision"), [("model.dtype=bfloat16", "tf32"), ("", "ieee")])
def test_tf32_is_for_what_stays_fp32_beside_a_bf16_generator(tmp_path: Path, settings: str, precision: str) -> None:
    with toy_world():
        PolicyTrainer(toy_config(tmp_path, *settings.split())).close()
    assert torch.backends.cuda.matmul.fp32_precision == precision
    # Inductor asks by the older names, which raise if only the newer switch is set.
    assert torch.backends.cuda.matmul.allow_tf32 is (precision == "tf32")
    assert torch.get_float32_matmul_precision() == ("high" if precision == "tf32" else "highest")


GLOO = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [::1]:20463")
NCCL = torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0.")


@pytest.mark.parametrize("fault", [GLOO, NCCL])
def test_a_lost_rank_is_one_line(fault: RuntimeError) -> None:
    with (
        pytest.raises(RuntimeError, match=r"^rank 0 of 4 has lost another rank.* --resume auto$") as lost,
        lost_ranks(0, 4),
    ):
        raise fault
    assert not any(word in str(lost.value) for word in ("gloo", "NCCL", "::1"))


@pytest.mark.parametrize(("world", "words"), [(1, "gloo"), (2, "shapes do not fit")])
def test_other_faults_stay_what_they_are(world: int, words: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{words}$"), lost_ranks(0, world):
        raise RuntimeError(words)
