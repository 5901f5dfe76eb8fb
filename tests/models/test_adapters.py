"""Adapters change the output, survive every file form, and what does not fit is refused."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_adapters import draw_adapter
from torch import nn

from pacorl.models.adapters import (
    AdapterCopy,
    MovingAverage,
    adapter_names,
    adapter_off,
    adapter_state,
    add_lora,
    load_lora,
    read_adapters,
    start_from,
)
from pacorl.models.lora import save_lora

RANK, ALPHA = 2, 6


class Two(nn.Module):
    """Two layers and no more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(3, 5), nn.Linear(5, 3)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.into(x))


def adapted() -> Two:
    """With an adapter whose weights are all drawn."""
    model = Two()
    add_lora(model, rank=RANK, alpha=ALPHA, targets=["into", "out"])
    draw_adapter(model, std=1.0)
    return model


def test_a_new_adapter_is_drawn_as_the_released_recipes_do() -> None:
    """A of a normal distribution with a standard deviation of 1/r, B of zeros: the first steps depend on it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 64))
    add_lora(model, rank=8, alpha=16, targets=["0"])
    down, up = adapter_state(model).values()
    assert not up.any()
    assert float(down.std()) == pytest.approx(1 / 8, rel=0.02)
    # Of a normal distribution 0.3 % lie beyond three standard deviations, of a uniform one nothing.
    assert float((down.abs() > 3 / 8).double().mean()) == pytest.approx(0.0027, abs=0.002)


def test_only_the_adapter_is_trained_in_fp32() -> None:
    model = Two().to(torch.bfloat16)
    add_lora(model, rank=RANK, alpha=ALPHA, targets=["into", "out"])
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in learning.items())
    assert len(learning) == 2 * 2


def released(folder: Path, **changes: object) -> nn.Module:
    """PEFT's own model of an adapter, saved as the released code leaves it, in a checkpoint's `lora/`."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, lora_alpha=ALPHA, init_lora_weights="gaussian", target_modules=["into", "out"])
    model: nn.Module = get_peft_model(Two(), config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.copy_(torch.randn_like(value))
    model.save_pretrained(folder / "lora")  # type: ignore[operator]
    file = folder / "lora" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return model


@pytest.mark.parametrize("within", ["", "lora"])
def test_the_released_form_is_a_start(tmp_path: Path, within: str) -> None:
    theirs, model, x = released(tmp_path, base_model_name_or_path="org/FLUX.1-dev"), adapted(), torch.randn(4, 3)
    start_from(model, tmp_path / within, rank=RANK, alpha=ALPHA, base="org/FLUX.1-dev")
    torch.testing.assert_close(model(x), theirs(x))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rank": RANK * 2}, rf"rank {RANK}, .*rank {2 * RANK}"),
        ({"alpha": ALPHA * 2}, rf"alpha {ALPHA}, .*alpha {2 * ALPHA}"),
        ({"base": "org/FLUX.1-Kontext-dev"}, r"org/FLUX\.1-dev, .* org/FLUX\.1-Kontext-dev"),
    ],
)
def test_a_start_that_does_not_fit_names_what_would(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    released(tmp_path, base_model_name_or_path="org/FLUX.1-dev")
    model = adapted()
    before = AdapterCopy(model).state
    with pytest.raises(ValueError, match=named):
        start_from(model, tmp_path, **{"rank": RANK, "alpha": ALPHA, "base": "org/FLUX.1-dev"} | settings)
    assert all(torch.equal(before[name], value) for name, value in adapter_state(model).items())


def test_a_start_for_fewer_modules_names_them(tmp_path: Path) -> None:
    """The released adapter of Qwen-Image-Edit has attention only, for example."""
    state = {name: value for name, value in adapter_state(adapted()).items() if name.startswith("into")}
    save_lora(tmp_path, state, rank=RANK, alpha=ALPHA, targets=["into"])
    with pytest.raises(ValueError, match=r"adapter\.start .* of targets=\[into\].*2 absent weights"):
        start_from(adapted(), tmp_path, rank=RANK, alpha=ALPHA, base="tiny")


def test_the_average_follows_each_step() -> None:
    model = adapted()
    average = MovingAverage(model, decay=0.15)
    name, start = next((name, value.clone()) for name, value in average.state.items())
    with torch.no_grad():
        adapter_state(model)[name].add_(4.0)
    average.follow(1)  # the first update's decay is 1/10
    torch.testing.assert_close(average.state[name], start + 3.6)
    with average.swapped_in():
        torch.testing.assert_close(adapter_state(model)[name], start + 3.6)
    torch.testing.assert_close(adapter_state(model)[name], start + 4.0)
    average.follow(2)  # 2/11 is beyond the decay of .15
    torch.testing.assert_close(average.state[name], start + 4.0 - 0.4 * 0.15)


def test_the_averages_decay_warms_up_by_its_own_updates() -> None:
    model = adapted()
    decays = []
    for update in (0, 1, 8, 49, 50, 51, 1000):
        average = MovingAverage(model, decay=0.85)
        name, start = next((name, value.clone()) for name, value in average.state.items())
        with torch.no_grad():
            adapter_state(model)[name].add_(4.0)
        average.follow(update + 1)
        decays.append(1 - float((average.state[name] - start).mean()) / 4)
    assert decays == pytest.approx([1 / 10, 2 / 11, 9 / 18, 50 / 59, 0.85, 0.85, 0.85], rel=1e-4)


@pytest.mark.parametrize(("module", "width", "named"), [("into", 7, r"\(2, 7\)"), ("other", 3, "no layer other")])
def test_an_adapter_that_does_not_fit_is_named_with_its_file(
    tmp_path: Path, module: str, width: int, named: str
) -> None:
    state = {f"{module}.lora_A.weight": torch.ones(2, width), f"{module}.lora_B.weight": torch.ones(5, 2)}
    save_lora(tmp_path, state, rank=2, alpha=2, targets=[module])
    with pytest.raises(ValueError, match=rf"^{tmp_path}.*{named}"):
        load_lora(Two(), {str(tmp_path): 1.0})


@pytest.mark.parametrize("count", [1, 2])
def test_adapters_add_up_with_their_strengths(tmp_path: Path, count: int) -> None:
    """Against W + Σ strength · α/rank·B·A in float64; one of them changes one layer alone."""
    layers = {"into": (3, 5), "out": (5, 3)}
    expected, x = Two().double(), torch.randn(4, 3)
    model = Two()
    model.load_state_dict(expected.state_dict())
    strengths = {}
    drawn: Any = (("a", 2, 6, 0.5, ["into", "out"]), ("b", 3, 1, -1.5, ["out"]))
    for folder, rank, alpha, strength, names in drawn[:count]:
        state = {}
        for name in names:
            width, height = layers[name]
            state[f"{name}.lora_A.weight"] = torch.randn(rank, width)
            state[f"{name}.lora_B.weight"] = torch.randn(height, rank)
            change = state[f"{name}.lora_B.weight"].double() @ state[f"{name}.lora_A.weight"].double()
            expected.get_submodule(name).weight.data += strength * alpha / rank * change
        save_lora(tmp_path / folder, state, rank=rank, alpha=alpha, targets=names)
        strengths[str(tmp_path / folder)] = strength

    assert ["strength 0.5" in line for line in load_lora(model, strengths)] == [True, False][:count]
    torch.testing.assert_close(model(x).double(), expected(x.double()), rtol=1e-5, atol=1e-5)
    names = [f"{tmp_path / 'a'}:0.5", f"{tmp_path / 'b'}:-1.5"]
    assert adapter_names(strengths) == " + ".join(names[:count])
    assert read_adapters(adapter_names(strengths)) == strengths
    assert read_adapters("org/a:b.safetensors + org/a:c.pt:0.5") == {"org/a:b.safetensors": 1.0, "org/a:c.pt": 0.5}


def test_a_part_of_a_layers_name_is_no_target_though_others_match() -> None:
    with pytest.raises(ValueError, match="target 'int' matches no linear layer"):
        add_lora(Two(), rank=2, alpha=4, targets=["out", "int"])


def test_after_the_base_was_asked_the_adapter_is_on_and_alone_learns() -> None:
    model, x = adapted(), torch.randn(4, 3)
    frozen = model.get_submodule("into.lora_A")
    frozen.requires_grad_(False)  # as a module is that no output depends on
    before, learning = model(x), [name for name, value in model.named_parameters() if value.requires_grad]
    with adapter_off(model):
        assert torch.equal(model(x), Two()(x))
    assert torch.equal(model(x), before)
    assert [name for name, value in model.named_parameters() if value.requires_grad] == learning
    assert len(learning) == 3


def test_a_fault_leaves_no_copy_on_the_model() -> None:
    model = adapted()
    copy = AdapterCopy(model)
    for value in copy.state.values():
        value.zero_()
    before = {name: value.clone() for name, value in adapter_state(model).items()}
    with suppress(RuntimeError), copy.swapped_in():
        assert not any(value.any() for value in adapter_state(model).values())
        raise RuntimeError("within")
    assert all(torch.equal(before[name], value) for name, value in adapter_state(model).items())
