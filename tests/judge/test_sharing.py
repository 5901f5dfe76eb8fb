"""The tree of prefixes: every token once, every prompt whole. That sharing changes no number is in test_local.py."""

from __future__ import annotations

import random

import pytest
import torch
from judges import build, processor_of_any_size

from pacorl.judge.local import LocalJudge
from pacorl.judge.sharing import STATES, BranchCache, Node, batches, can_share


@pytest.mark.parametrize("tokens", [1, 30, 100, 10**6])
def test_batches_keep_to_their_tokens(tokens: int) -> None:
    rng = random.Random(0)
    nodes = [Node(0, rng.randint(1, 60), 0, children=[Node(0, 1, 0)] * rng.randint(0, 1)) for _ in range(50)]
    found = list(batches(nodes, tokens=tokens))
    assert sorted(id(node) for batch in found for node in batch) == sorted(map(id, nodes))
    for batch in found:
        assert len(batch) == 1 or len(batch) * max(map(len, batch)) <= tokens
        assert min(map(len, batch)) * 2 > max(map(len, batch))
        assert len({bool(node.children) for node in batch}) == 1


def test_rows_that_keep_states_are_of_one_length_and_few() -> None:
    parents = [Node(0, length, 0, children=[Node(0, 1, 0)]) for length in [9] * (STATES + 1) + [8]]
    leaves = [Node(0, length, 0) for length in (9, 8)]
    found = list(batches([*leaves, *parents], tokens=10**6, recurrent=True))
    assert [len(batch) for batch in found] == [STATES, 1, 1, 2]


def test_recurrent_layers_go_on_from_the_rows_above() -> None:
    """A convolution of four inputs over the whole run, and over its end with what the cache keeps of its beginning."""
    generator = torch.Generator().manual_seed(0)
    whole_BCT, kernel_OCK = (torch.randn(shape, generator=generator) for shape in ((2, 3, 9), (5, 3, 4)))
    state_BD = torch.randn(2, 6, generator=generator)
    above = BranchCache(None, [0, 0], keep=True)
    above.update_conv_state(whole_BCT[..., :5], 0, conv_kernel_size=4)
    above.update_recurrent_state(state_BD, 0)

    rows = [1, 0, 1]
    below = BranchCache(above, rows, keep=False)
    input_BCT = below.update_conv_state(whole_BCT[rows, :, 5:], 0, conv_kernel_size=4)
    expected = torch.nn.functional.conv1d(whole_BCT, kernel_OCK)[rows, :, -4:]
    torch.testing.assert_close(torch.nn.functional.conv1d(input_BCT, kernel_OCK)[..., -4:], expected)
    assert torch.equal(below.get_recurrent_state(0), state_BD[rows])


def test_an_unproven_model_is_refused() -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2VLConfig, Qwen3_5Config, Qwen3VLMoeConfig

    assert can_share(Qwen2VLConfig())
    assert can_share(Qwen3_5Config())
    assert not can_share(Qwen3VLMoeConfig())
    assert not can_share(Qwen2VLConfig(attn_implementation="flash_attention_2"))
    sliding = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    assert not can_share(Qwen2_5_VLConfig(text_config=sliding))
    eager = build("qwen2_5_vl", processor := processor_of_any_size())
    eager.config.get_text_config()._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="another qwen2_5_vl"):
        LocalJudge(eager, processor)
