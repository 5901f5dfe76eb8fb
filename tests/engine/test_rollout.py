"""Sampling for training: seeds, shared starts, and the ratio before any update."""

import pytest
import torch

from pacorl.core.objectives import grpo_clip
from pacorl.data.characters import character_prompts, vocabulary
from pacorl.engine.rollout import ConditioningCache, Row, Sampler, assign_groups, collect, epoch_rows, seed_of
from pacorl.models import tiny
from pacorl.models.adapters import adapter_state, add_lora
from pacorl.models.flux import LORA_TARGETS, FluxPolicy
from pacorl.train.update import Batch, accumulate_gradients
from pacorl.types import Size

PROMPTS = character_prompts("train", 4)
SAMPLER = Sampler(size=Size(64, 64), steps=4, noise_steps=(1, 2))


@pytest.fixture(scope="module")
def policy() -> FluxPolicy:
    """A tiny FLUX with an adapter that does something."""
    torch.manual_seed(0)
    pipeline = tiny.tiny_flux(vocabulary())
    for parameter in pipeline.transformer.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    policy = FluxPolicy(pipeline, text_tokens=48)
    add_lora(policy.transformer, rank=4, alpha=8, targets=LORA_TARGETS)
    with torch.no_grad():
        for value in adapter_state(policy.transformer).values():
            value.copy_(torch.randn_like(value) * 0.05)
    return policy


def rows(count: int = 4, group: int = 2) -> list[Row]:
    return [Row(PROMPTS[number // group], number) for number in range(count)]


def test_what_is_drawn_does_not_depend_on_the_batch(policy: FluxPolicy) -> None:
    cache = ConditioningCache(policy)
    together = collect(policy, rows(), sampler=SAMPLER, cache=cache, seed=1, epoch=3)
    alone = collect(policy, rows()[2:3], sampler=SAMPLER, cache=cache, seed=1, epoch=3)
    torch.testing.assert_close(together.final_BNC[2], alone.final_BNC[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(together.log_prob_BS[2], alone.log_prob_BS[0], rtol=0, atol=1e-5)
    other = collect(policy, rows()[2:3], sampler=SAMPLER, cache=cache, seed=1, epoch=4)
    assert not torch.allclose(other.final_BNC, alone.final_BNC, atol=1e-2)


def test_a_group_may_share_its_start(policy: FluxPolicy) -> None:
    shared = Sampler(**{name: getattr(SAMPLER, name) for name in ("size", "steps", "noise_steps")}, shared_noise=True)
    rollout = collect(policy, rows(), sampler=shared, cache=ConditioningCache(policy), seed=1, epoch=0)
    before = rollout.before_BSNC[:, 0]
    assert torch.equal(before[0], before[1])
    assert not torch.allclose(before[1], before[2], atol=1e-2)
    assert not torch.allclose(rollout.final_BNC[0], rollout.final_BNC[1], atol=1e-2)


class Counting:
    """Counts the rows that pass through a policy's velocity."""

    def __init__(self, policy: FluxPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        velocity = policy.velocity

        def counted(x, *args):  # type: ignore[no-untyped-def]
            self.rows.append(len(x))
            return velocity(x, *args)

        monkeypatch.setattr(policy, "velocity", counted)


def test_a_shared_prefix_is_computed_once(policy: FluxPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(policy, monkeypatch)
    shared = Sampler(size=Size(64, 64), steps=4, noise_steps=(2,), shared_noise=True)
    collect(policy, rows(), sampler=shared, cache=ConditioningCache(policy), seed=1, epoch=0)
    assert counting.rows == [2, 2, 4, 4]


def test_prompts_are_encoded_once(policy: FluxPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = policy.encode
    monkeypatch.setattr(policy, "encode", lambda prompts, size: encoded.append(len(prompts)) or encode(prompts, size))
    cache = ConditioningCache(policy)
    for epoch in range(3):
        collect(policy, rows(), sampler=SAMPLER, cache=cache, seed=1, epoch=epoch)
    assert sum(encoded) == 2


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kernel", ["flow_sde", "cps"])
def test_before_an_update_the_ratio_is_exactly_one(policy: FluxPolicy, checkpointing: bool, kernel: str) -> None:
    from accelerate import Accelerator

    sampler = Sampler(size=Size(64, 64), steps=4, noise_steps=(0, 2), kernel=kernel)
    toggle = (
        policy.transformer.enable_gradient_checkpointing
        if checkpointing
        else policy.transformer.disable_gradient_checkpointing
    )
    toggle()
    policy.transformer.train()
    cache = ConditioningCache(policy)
    rollout = collect(policy, rows(), sampler=sampler, cache=cache, seed=1, epoch=0)
    policy.transformer.zero_grad()
    metrics = accumulate_gradients(
        policy,
        [Batch(rollout, torch.tensor([1.0, -1.0, 0.5, 2.0]))],
        sampler=sampler,
        cache=cache,
        objective=grpo_clip,
        clip_range=1e-4,
        kl_weight=0.0,
        accelerator=Accelerator(),
    )
    assert metrics["ratio_deviation/0"] == 0.0
    assert metrics["ratio_deviation/2"] == 0.0
    norms = [p.grad.norm().item() for p in policy.transformer.parameters() if p.grad is not None]
    assert len(norms) == len(adapter_state(policy.transformer))
    assert sum(norms) > 0


def test_epochs_use_every_prompt_before_one_comes_again() -> None:
    prompts = character_prompts("train", 6)
    drawn = [
        row.prompt.id for epoch in range(3) for row in epoch_rows(prompts, epoch=epoch, count=2, group_size=3, seed=0)
    ]
    assert sorted(drawn) == sorted(3 * list(range(6)))
    assert [row.number for row in epoch_rows(prompts, epoch=1, count=2, group_size=3, seed=0)] == list(range(6))


def test_batches_do_not_depend_on_the_number_of_processes() -> None:
    numbered = [Row(PROMPTS[0], number) for number in range(24)]
    alone = assign_groups(numbered, batch=3, updates=2, world=1, rank=0)
    for update in range(2):
        dealt = [assign_groups(numbered, batch=3, updates=2, world=2, rank=rank)[update] for rank in range(2)]
        together = sorted([[row.number for row in batch] for part in dealt for batch in part])
        assert together == sorted([row.number for row in batch] for batch in alone[update])


def test_groups_that_do_not_divide_name_what_would() -> None:
    with pytest.raises(ValueError, match="batches of 1, 2, 3, 6 would"):
        assign_groups([Row(PROMPTS[0], n) for n in range(24)], batch=5, updates=2, world=2, rank=0)


def test_seeds_are_what_they_were() -> None:
    assert seed_of(42, 0, "start", 7) == seed_of(42, 0, "start", 7) < 2**63
    assert len({seed_of(42, epoch, "start", row) for epoch in range(10) for row in range(100)}) == 1000
