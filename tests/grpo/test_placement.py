"""Where the adapted transformer lies."""

import torch
from tiny_runs import tiny_run

from pacorl.grpo import builders


def test_fsdp2_takes_weights_from_main_memory(small: list[str]) -> None:
    """A card that need not have room for the whole transformer gets nothing of it before it is sharded."""
    config, card = tiny_run(small), torch.device("meta")
    policy = builders.build_adapted_policy(config, sizes=[], device=torch.device("cpu"))
    builders.place_transformer(config, policy, device=card, sharded=True)
    assert {parameter.device.type for parameter in policy.transformer.parameters()} == {"cpu"}
