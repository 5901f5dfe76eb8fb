"""Adapters change the output, survive every file form, and what does not fit is refused."""

from pathlib import Path

import pytest
import torch
from torch import nn

from pacorl.data.characters import character_prompts
from pacorl.engine.rollout import ConditioningCache
from pacorl.models import tiny
from pacorl.models.adapters import (
    MovingAverage,
    adapter_off,
    adapter_state,
    add_lora,
    load_lora,
    save_lora,
    set_adapter_state,
)
from pacorl.models.flux import LORA_TARGETS, FluxPolicy
from pacorl.types import Size

SIZE = Size(64, 64)
RANK, ALPHA = 4, 12


def fresh(flux: FluxPolicy) -> nn.Module:
    """Another transformer with the fixture's weights and no adapter."""
    transformer = tiny.tiny_flux_transformer()
    transformer.load_state_dict(flux.pipeline.transformer.state_dict())
    return transformer


def trained(transformer: nn.Module, seed: int = 0) -> nn.Module:
    """The transformer with an adapter whose weights are all nonzero."""
    torch.manual_seed(seed)
    add_lora(transformer, rank=RANK, alpha=ALPHA, targets=LORA_TARGETS)
    with torch.no_grad():
        for value in adapter_state(transformer).values():
            value.copy_(torch.randn_like(value) * 0.1)
    return transformer


@torch.no_grad()
def output(flux: FluxPolicy, transformer: nn.Module) -> torch.Tensor:
    conditioning = ConditioningCache(flux).batch(character_prompts("dev", 1), SIZE)
    own, flux.transformer = flux.transformer, transformer
    try:
        return flux.velocity(flux.noise([0], SIZE), torch.tensor([0.6]), conditioning, SIZE)
    finally:
        flux.transformer = own


def test_a_new_adapter_changes_nothing_and_a_trained_one_does(flux: FluxPolicy) -> None:
    base = output(flux, fresh(flux))
    new = fresh(flux)
    add_lora(new, rank=RANK, alpha=ALPHA, targets=LORA_TARGETS)
    assert torch.equal(output(flux, new), base)
    moved = trained(fresh(flux))
    assert not torch.allclose(output(flux, moved), base, atol=1e-3)
    with adapter_off(moved):
        torch.testing.assert_close(output(flux, moved), base)


def test_only_the_adapter_is_trained_in_fp32(flux: FluxPolicy) -> None:
    transformer = fresh(flux).to(torch.bfloat16)
    add_lora(transformer, rank=RANK, alpha=ALPHA, targets=LORA_TARGETS)
    learning = {name: p for name, p in transformer.named_parameters() if p.requires_grad}
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in learning.items())
    # 2 double blocks × 12 modules and 4 single blocks × 3, two matrices each.
    assert len(learning) == 2 * (2 * 12 + 4 * 3)


def test_peft_reads_what_is_saved(flux: FluxPolicy, tmp_path: Path) -> None:
    from peft import PeftModel

    transformer = trained(fresh(flux))
    save_lora(tmp_path, adapter_state(transformer), rank=RANK, alpha=ALPHA, targets=LORA_TARGETS)
    reloaded = PeftModel.from_pretrained(fresh(flux), tmp_path)
    torch.testing.assert_close(output(flux, reloaded), output(flux, transformer))


def test_diffusers_reads_what_is_saved(flux: FluxPolicy, tmp_path: Path) -> None:
    transformer = trained(fresh(flux))
    save_lora(tmp_path, adapter_state(transformer), rank=RANK, alpha=ALPHA, targets=LORA_TARGETS)
    expected = output(flux, transformer)
    pipeline = flux.pipeline
    own, pipeline.transformer = pipeline.transformer, fresh(flux)
    try:
        pipeline.load_lora_weights(tmp_path, weight_name="pytorch_lora_weights.safetensors")
        torch.testing.assert_close(output(flux, pipeline.transformer), expected)
    finally:
        pipeline.transformer = own


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "pytorch_lora_weights.safetensors"])
def test_both_forms_come_back(flux: FluxPolicy, tmp_path: Path, file: str) -> None:
    transformer = trained(fresh(flux))
    state = {name: value.clone() for name, value in adapter_state(transformer).items()}
    save_lora(tmp_path, state, rank=RANK, alpha=ALPHA, targets=LORA_TARGETS)
    other = trained(fresh(flux), seed=1)
    set_adapter_state(other, load_lora(tmp_path / file))
    assert all(torch.equal(adapter_state(other)[name], value) for name, value in state.items())


def test_an_adapter_of_another_shape_is_refused(flux: FluxPolicy) -> None:
    transformer = trained(fresh(flux))
    state = {name: value[:2] if "lora_A" in name else value for name, value in adapter_state(transformer).items()}
    with pytest.raises(ValueError, match=r"lora_A\.weight is \(2, .*the model's is \(4, "):
        set_adapter_state(transformer, state)


def test_an_adapter_of_another_model_is_refused(flux: FluxPolicy) -> None:
    transformer = trained(fresh(flux))
    with pytest.raises(ValueError, match="1 unknown weights"):
        set_adapter_state(transformer, {**adapter_state(transformer), "strange.lora_A.weight": torch.zeros(1)})


def test_a_target_that_matches_nothing_is_refused(flux: FluxPolicy) -> None:
    with pytest.raises(ValueError, match=r"'img_mlp\.net\.2' matches no linear layer"):
        add_lora(fresh(flux), rank=4, alpha=4, targets=["attn.to_q", "img_mlp.net.2"])


def test_no_adapter_in_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no adapter in"):
        load_lora(tmp_path)


def test_the_average_follows_at_its_interval(flux: FluxPolicy) -> None:
    transformer = trained(fresh(flux))
    average = MovingAverage(transformer, decay=0.75, interval=2)
    name, start = next((name, value.clone()) for name, value in average.state.items())
    with torch.no_grad():
        adapter_state(transformer)[name].add_(4.0)
    average.follow(1)
    assert torch.equal(average.state[name], start)
    average.follow(2)
    torch.testing.assert_close(average.state[name], start + 1.0)
    with average.applied():
        torch.testing.assert_close(adapter_state(transformer)[name], start + 1.0)
    torch.testing.assert_close(adapter_state(transformer)[name], start + 4.0)
