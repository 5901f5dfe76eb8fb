"""The last block without the text's rows: the same velocity and gradients for less."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers_own import diffusers_own
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pacorl.models.lora.adapters import add_lora
from pacorl.models.policies.flux import FluxPolicy
from pacorl.models.policies.last_block import prune_last_block_text
from pacorl.types import Conditioning, Size

TEXT, SIDE = 48, 4


@pytest.fixture
def adapted(flux: FluxPolicy) -> nn.Module:
    """diffusers' transformer, with an adapter that does something."""
    transformer: nn.Module = diffusers_own(flux.pipeline).transformer.requires_grad_(False)
    torch.manual_seed(0)
    add_lora(transformer, rank=4, alpha=8, targets=flux.lora_targets)
    for name, parameter in transformer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return transformer


def velocity(flux: FluxPolicy, transformer: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    config = transformer.config
    conditioning = Conditioning(
        {
            "tokens": torch.randn(2, TEXT, config.joint_attention_dim, generator=generator),
            "pooled": torch.randn(2, config.pooled_projection_dim, generator=generator),
        }
    )
    policy = copy.copy(flux)
    policy.transformer = transformer
    return policy.velocity(
        torch.randn(2, SIDE * SIDE, config.in_channels, generator=generator),
        torch.tensor([0.9, 0.3]),
        conditioning,
        Size(SIDE * policy.token_pixels, SIDE * policy.token_pixels),
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_velocity_and_gradients_are_the_whole_blocks(flux: FluxPolicy, adapted: nn.Module, checkpointing: bool) -> None:
    spared = copy.deepcopy(adapted)
    prune_last_block_text(spared)
    outcomes = []
    for transformer in (adapted, spared):
        if checkpointing:
            transformer.train().enable_gradient_checkpointing()
        output = velocity(flux, transformer)
        output.square().sum().backward()
        outcomes.append((output.detach(), {n: p.grad for n, p in transformer.named_parameters() if p.grad is not None}))
    (expected, expected_gradients), (output, gradients) = outcomes
    assert expected.std() > 0.1
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert {f"single_transformer_blocks.3.attn.to_{which}.lora_B.default.weight" for which in "qkv"} <= set(gradients)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-4)


def test_a_copy_computes_with_its_own_weights(flux: FluxPolicy, adapted: nn.Module) -> None:
    prune_last_block_text(adapted)
    copied = copy.deepcopy(adapted)
    before = velocity(flux, adapted)
    torch.nn.init.zeros_(copied.single_transformer_blocks[-1].proj_out.weight)
    assert not torch.allclose(velocity(flux, copied), before)
    assert torch.equal(velocity(flux, adapted), before)


def test_what_is_spared_is_the_texts_part(flux: FluxPolicy, adapted: nn.Module) -> None:
    """Of the last block's four products with D² or 4·D² weights only keys and values see the text."""
    block = adapted.single_transformer_blocks[-1]
    width, mlp = block.attn.to_q.base_layer.in_features, block.mlp_hidden_dim

    def flops() -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            velocity(flux, adapted)
        return int(counter.get_total_flops())

    whole = flops()
    prune_last_block_text(adapted)
    rows, rank = 2 * TEXT, 4
    weights = 2 * rows * (width * width + width * mlp + (width + mlp) * width)
    adapter = 2 * rows * 2 * width * rank
    scores = 2 * 2 * rows * (TEXT + SIDE * SIDE) * width  # not every attention is counted
    assert weights + adapter <= whole - flops() <= weights + adapter + scores


def test_another_attention_is_left_alone(flux: FluxPolicy, adapted: nn.Module) -> None:
    class Other:
        pass

    block = adapted.single_transformer_blocks[-1]
    block.attn.processor = Other()
    prune_last_block_text(adapted)
    assert "forward" not in vars(block)
