"""Generator and scoring models take turns on the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pacorl.config.base import load
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.plan.ledger import META
from pacorl.runtime.turns import Turns


class Holder:
    def __init__(self) -> None:
        self.model = nn.Linear(4, 4)

    def models(self) -> list[nn.Module]:
        return [self.model]


def devices(*modules: nn.Module) -> list[str]:
    return [parameter.device.type for module in modules for parameter in module.parameters()]


def test_scoring_models_are_on_the_device_only_while_they_score() -> None:
    # The meta device stands for a card; nothing comes back from it, so that one way is seen.
    generator, holder = nn.Linear(4, 4).requires_grad_(False), Holder()
    turns = Turns(generator, device=META)
    turns.add([holder, lambda prompts, images: [0.0]])
    assert turns.scorers == [holder.model]
    block = turns.scoring()
    block.__enter__()
    assert devices(holder.model) == ["meta", "meta"]
    assert devices(generator) == ["cpu", "cpu"]
    with pytest.raises(NotImplementedError, match="meta"):  # leaving copies the models back
        block.__exit__(None, None, None)


def test_what_is_trained_and_where_it_lies_stays() -> None:
    generator = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    before = [(parameter, parameter.data_ptr(), parameter.clone()) for parameter in generator.parameters()]
    turns = Turns(generator, device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match="judge"), turns.scoring():
        raise RuntimeError("judge")
    for (old, pointer, value), new in zip(before, generator.parameters(), strict=True):
        assert old is new
        assert torch.equal(value, new)
        assert pointer == new.data_ptr()


def test_memory_is_the_form_of_every_model_of_a_run() -> None:
    run = load(PolicyConfig, None, ["memory=low"])
    assert (run.model.quantize, run.judge.quantize, run.model.stream) == ("int8", "int8", False)
    assert PolicyConfig.model_validate(run.model_dump(mode="json")).model.quantize == "int8"
    assert load(PolicyConfig, None, ["memory=low", "judge=none"]).judge is None
    other = "evaluation={judge: tiny, rewards: [{name: consistency}]}"
    held_out = load(PolicyConfig, None, ["memory=lowest", other]).held_out_judge
    assert (held_out.quantize, held_out.stream) == ("int8", True)
