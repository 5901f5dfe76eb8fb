"""Weights that stay in main memory: what is computed with them, when they travel, and whole runs on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import SMALL, metrics, tiny_run, train_policy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pacorl.core.objectives import RATIO_DEVIATION
from pacorl.models.int8 import WeightStream, quantize_model
from pacorl.plan.ledger import META, MemoryLedger

WIDTH, BLOCKS = 256, 12


def stack(form: str, *, stream: bool, device: str = "cpu") -> nn.Module:
    """Blocks of two layers."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))
    model = nn.Sequential(*blocks).requires_grad_(False).to(device)
    quantize_model(model, form, device=device, stream=stream)
    return model


def run(model: nn.Module, x: Tensor, *, blocks: Sequence[int] = range(BLOCKS)) -> Tensor:
    for number in blocks:
        x = checkpoint(model[number], x, use_reentrant=False)  # type: ignore[index]
    return x


@pytest.mark.parametrize("name", ["none", "int8"])
def test_outputs_and_gradients_are_those_of_weights_that_stay(name: str) -> None:
    """A second time too, when the order is known, and in another order than the known one."""
    at_home, streamed = stack(name, stream=False), stack(name, stream=True)
    for blocks in (range(BLOCKS), range(BLOCKS), [3, 1, 1, 7], range(BLOCKS)):
        outputs, gradients = [], []
        for model in (at_home, streamed):
            leaf = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH).requires_grad_()
            output = run(model, leaf, blocks=blocks)
            output.square().sum().backward()
            outputs.append(output)
            gradients.append(leaf.grad)
        assert torch.equal(*outputs)
        assert torch.equal(*gradients)
        assert gradients[0].any()


def test_at_most_two_layers_lie_on_the_device() -> None:
    """In forwards, in what is computed again for the backward, and in the backward itself."""
    x = torch.empty(1, WIDTH, device=META, requires_grad=True)
    for form, weight in (("none", 4 * WIDTH * WIDTH), ("int8", WIDTH * WIDTH + 4 * WIDTH)):
        model = stack(form, stream=True, device="meta")
        unpacked = 4 * WIDTH * WIDTH * (form != "none")
        for layers in (1, 2):  # before the order is known none is sent ahead
            with MemoryLedger() as ledger:
                run(model, x).sum().backward()
            assert layers * weight <= ledger.peak <= 2.2 * weight + unpacked


def card_stream(number: int) -> torch.Stream:
    """A stream of torch's own type, of a card that need not be here."""
    return torch.Stream(stream_id=number, device_index=0, device_type=1)


def test_copies_follow_the_computing_stream_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's streams none is unequal to None, which the first one is compared with."""
    synchronized: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: (device, len(synchronized)))
    stream, (main, scorer) = WeightStream(), map(card_stream, (0, 3))
    for computing, switches in ((main, 1), (main, 1), (card_stream(0), 1), (scorer, 2), (main, 3)):
        stream._ahead = ((), ())
        before = len(synchronized)
        stream._follow(computing)  # type: ignore[arg-type]
        assert stream._computing == computing
        assert (stream._copier, len(synchronized)) == ((computing.device, switches), switches)
        assert (stream._ahead is None) == (switches > before)


# --- models ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_learns_what_a_run_in_low_memory_learns(tmp_path: Path) -> None:
    lines, adapters = [], []
    for memory in ("low", "lowest"):
        out = tmp_path / memory
        folder = train_policy(tiny_run([f"memory={memory}", f"out={out}", *SMALL]))
        (line,) = metrics(folder, "epoch")
        assert line["grad_norm"] > 0
        assert line[RATIO_DEVIATION] == 0.0
        lines.append({key: value for key, value in line.items() if "seconds" not in key})
        adapters.append(load_file(next(out.glob("checkpoints/step-*/state.safetensors"))))
    low, lowest = adapters
    assert low.keys() == lowest.keys()
    assert all(torch.equal(low[name], lowest[name]) for name in low)
    assert any(weight.any() for name, weight in low.items() if "lora_B" in name)
