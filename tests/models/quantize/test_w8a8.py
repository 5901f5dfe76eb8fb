"""Products of int8 weights and int8 activations: their values, where they are used, and whole runs with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import metrics, tiny_run
from torch import Tensor, nn

from pacorl.config.base import ConfigError, load
from pacorl.core.objectives import RATIO_DEVIATION
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import train_policy
from pacorl.models.lora.adapters import add_lora
from pacorl.models.policies.flux import tiny_flux
from pacorl.models.quantize import QUANTIZERS
from pacorl.models.quantize.linear import QuantizedLinear, quantize_model
from pacorl.models.quantize.w8a8 import LEAST_TOKENS, Int8Products, int8_product

SMALL = [
    "epochs=1", "prompts_per_epoch=2", "group_size=4", "save_every=1", "trackers=[]", "model.quantize=int8",
    "prompts.train=tiny:train:3", "prompts.evaluation=tiny:dev:2", "sampling.steps=4", "sampling.batch=4",
    "evaluation.size=[64,64]", "evaluation.steps=2",
]  # fmt: skip


def layer(dtype: torch.dtype) -> QuantizedLinear:
    torch.manual_seed(0)
    plain = nn.Linear(64, 48, dtype=dtype).requires_grad_(False)
    return QuantizedLinear(plain.weight, plain.bias, QUANTIZERS["int8"])


def reference(packed: QuantizedLinear, x_TI: Tensor) -> Tensor:
    """Token by token, with the sums in int64."""
    rows = []
    for x_I in x_TI:
        scale = x_I.abs().max().float() / 127
        codes_I = (x_I.float() / scale).round().long()
        sums_O = (packed.weight.long() * codes_I).sum(1)
        product_O = sums_O * scale * packed.scale.flatten().float() + packed.bias
        rows.append(product_O.to(x_I.dtype))
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_reference_to_the_bit(dtype: torch.dtype) -> None:
    packed, x_BTI = layer(dtype), torch.randn(2, LEAST_TOKENS, 64, dtype=dtype)
    x_BTI[0] *= 1000  # each token has a scale of its own
    product_BTO = int8_product(packed, x_BTI)
    expected_BTO = torch.stack([reference(packed, x_TI) for x_TI in x_BTI])
    assert torch.equal(product_BTO, expected_BTO)
    error = (product_BTO - packed(x_BTI)).norm(dim=-1) / packed(x_BTI).norm(dim=-1)
    assert 0 < error.max() < 0.03


def test_few_tokens_and_zeros_are_exact() -> None:
    packed, x_TI = layer(torch.float32), torch.randn(LEAST_TOKENS - 1, 64)
    assert torch.equal(int8_product(packed, x_TI), packed(x_TI))
    zeros = torch.zeros(LEAST_TOKENS, 64)
    assert torch.equal(int8_product(packed, zeros), packed(zeros))


def test_sensitive_layers_stay_exact_and_all_do_outside_of_the_block() -> None:
    transformer: Any = tiny_flux(["a red fox"]).transformer
    quantize_model(transformer, "int8", device="cpu")
    add_lora(transformer, rank=4, alpha=8, targets=["attn.to_q"])
    products = Int8Products(transformer)
    names = {name for name, module in transformer.named_modules() if module in products.layers}
    assert "transformer_blocks.0.attn.to_q.base_layer" in names
    assert "transformer_blocks.0.ff.net.2" in names
    assert not any("norm" in name or "proj_out" in name or "embed" in name for name in names)
    packed = [module for module in transformer.modules() if isinstance(module, QuantizedLinear)]
    assert len(names) < len(packed)
    with products.swapped_in():
        assert all("forward" in vars(module) for module in products.layers)
    assert not any("forward" in vars(module) for module in packed)


def test_other_forms_have_no_int8_products() -> None:
    transformer: Any = tiny_flux(["a red fox"]).transformer
    quantize_model(transformer, "fp8", device="cpu")
    assert not Int8Products(transformer).layers


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["low", pytest.param("lowest", marks=pytest.mark.campaign)])
def test_a_run_samples_other_images_and_has_a_ratio_of_exactly_1(memory: str, tmp_path: Path) -> None:
    lines = {}
    for products in ("exact", "w8a8"):
        config = tiny_run([*SMALL, f"memory={memory}", f"out={tmp_path / products}", f"sampling.products={products}"])
        (lines[products],) = metrics(train_policy(config), "epoch")
    for line in lines.values():
        assert {value for key, value in line.items() if key.startswith(RATIO_DEVIATION)} == {0.0}
    means = [line["reward/panel_match/mean"] for line in lines.values()]
    assert means[0] != means[1]


def test_other_weights_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.products w8a8 .* model\.quantize is nf4; set it to int8"):
        load(PolicyConfig, None, ["sampling.products=w8a8", "model.quantize=nf4"])
