"""Sampling for training: seeds, shared starts, and the ratio before any update."""

from itertools import product

import pytest
import torch
from peft.tuners.lora import Linear
from toy_world import ToyPolicy

from pacorl.core.objectives.diffusion_nft import DiffusionNft
from pacorl.core.objectives.grpo_clip import GrpoClip
from pacorl.core.objectives.grpo_guard import GrpoGuard
from pacorl.core.sampling import Sampler
from pacorl.core.schedule import seed_of
from pacorl.data.characters import character_prompts, vocabulary
from pacorl.engine.rollout import (
    ConditioningCache,
    Row,
    assign_groups,
    check_mixed_sizes,
    collect,
    epoch_rows,
    one_size_batches,
    sigmas_of,
)
from pacorl.engine.runtime import Runtime
from pacorl.lora.adapters import FusedLora, OldPolicy, adapter_off, adapter_state, add_lora, can_fuse_lora
from pacorl.policies.flux import FLUX, LORA_TARGETS, FluxPolicy, tiny_flux
from pacorl.train.update import Batch, PolicyLoss, update_policy
from pacorl.types import Prompt, Size

PROMPTS = character_prompts("train", 4)
SAMPLER = Sampler(size=Size(64, 64), steps=4, sde_steps=(1, 2))


@pytest.fixture(scope="module")
def policy() -> FluxPolicy:
    """A tiny FLUX with an adapter that does something."""
    torch.manual_seed(0)
    pipeline = tiny_flux(vocabulary())
    for parameter in pipeline.transformer.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    policy = FLUX.over(pipeline, max_sequence_length=48)
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
    shared = Sampler(**{name: getattr(SAMPLER, name) for name in ("size", "steps", "sde_steps")}, shared_noise=True)
    rollout = collect(policy, rows(), sampler=shared, cache=ConditioningCache(policy), seed=1, epoch=0)
    before = rollout.latents_BSNC[:, 0]
    assert torch.equal(before[0], before[1])
    assert not torch.allclose(before[1], before[2], atol=1e-2)
    assert not torch.allclose(rollout.final_BNC[0], rollout.final_BNC[1], atol=1e-2)


@pytest.mark.parametrize("shared", [False, True])
def test_every_draw_has_its_own_noise(shared: bool) -> None:
    """Over seeds, epochs, rows and steps no two draws are alike; with a shared start those of one group start alike."""
    policy = ToyPolicy()
    sampler = Sampler(size=Size(32, 32), steps=4, sde_steps=(0, 1, 2), shared_noise=shared, keeps_means=True)
    cache, starts, steps = ConditioningCache(policy), [], []
    for seed, epoch in product((1, 2), (0, 1, 2)):
        rollout = collect(policy, rows(), sampler=sampler, cache=cache, seed=seed, epoch=epoch)
        assert rollout.mean_BSNC is not None
        starts.append(rollout.latents_BSNC[:, 0].flatten(1))
        steps.append((rollout.next_latents_BSNC - rollout.mean_BSNC).flatten(0, 1).flatten(1))
    draws = torch.cat(starts + steps)
    expected = torch.eye(len(draws), dtype=torch.bool)
    if shared:
        group = torch.arange(len(torch.cat(starts))) // 2
        expected[: len(group), : len(group)] = group[:, None] == group
    assert torch.equal(torch.corrcoef(draws) > 0.5, expected)


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
    shared = Sampler(size=Size(64, 64), steps=4, sde_steps=(2,), shared_noise=True)
    cache, prefixes = ConditioningCache(policy), dict[int, torch.Tensor]()
    whole = collect(policy, rows(), sampler=shared, cache=cache, seed=1, epoch=0)
    assert counting.rows == [2, 2, 4, 4]
    counting.rows.clear()
    parts = [
        collect(
            policy, rows()[start : start + 1], sampler=shared, cache=cache, seed=1, epoch=0, shared_prefixes=prefixes
        )
        for start in range(4)
    ]
    assert counting.rows == [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], "4 rows × 2 steps, and 2 steps for each of 2 groups"
    torch.testing.assert_close(torch.cat([part.final_BNC for part in parts]), whole.final_BNC, rtol=0, atol=1e-5)


def test_the_merged_adapter_paints_the_same_and_leaves_no_trace(policy: FluxPolicy) -> None:
    before = {name: value.clone() for name, value in policy.transformer.state_dict().items()}
    cache = ConditioningCache(policy)
    plain = collect(policy, rows(), sampler=SAMPLER, cache=cache, seed=1, epoch=0)
    merged = collect(policy, rows(), sampler=SAMPLER, cache=cache, seed=1, epoch=0, fused=FusedLora(policy.transformer))
    torch.testing.assert_close(merged.final_BNC, plain.final_BNC, rtol=0, atol=1e-5)
    after = policy.transformer.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with adapter_off(policy.transformer):
        base = collect(policy, rows(), sampler=SAMPLER, cache=cache, seed=1, epoch=0)
    assert not torch.allclose(base.final_BNC, plain.final_BNC, atol=1e-3), "the adapter changes nothing here"


def test_in_bf16_nothing_is_merged(policy: FluxPolicy) -> None:
    """Rounding takes away the change of a young adapter, so that the merged model would be the base."""
    assert can_fuse_lora(policy.transformer)
    layer = next(module for module in policy.transformer.modules() if isinstance(module, Linear))
    weight = layer.base_layer.weight.data.bfloat16()
    change = (layer.get_delta_weight("default") * 1e-4).bfloat16()
    lost = ((weight + change) == weight).double().mean()
    assert lost > 0.9
    layer.base_layer.weight.data = weight
    try:
        assert not can_fuse_lora(policy.transformer)
    finally:
        layer.base_layer.weight.data = weight.float()


def test_sigmas_may_be_shifted_for_another_size(policy: FluxPolicy) -> None:
    prompt = PROMPTS[0]
    own = Sampler(size=Size(64, 64), steps=4)
    shifted = Sampler(size=Size(64, 64), steps=4, shift_size=Size(128, 128))
    assert torch.equal(sigmas_of(policy, shifted, prompt), policy.sigmas(4, Size(128, 128)))
    assert (sigmas_of(policy, shifted, prompt)[1:-1] > sigmas_of(policy, own, prompt)[1:-1]).all()


class TwoSizes:
    """A policy whose prompts are painted at sizes of their own."""

    def __init__(self, sizes: list[Size]) -> None:
        self._sizes = {prompt.id: size for prompt, size in zip(PROMPTS, sizes, strict=True)}

    def size_of(self, prompt: Prompt, size: Size) -> Size:
        return self._sizes[prompt.id]


def test_batches_hold_one_size() -> None:
    wide, tall = Size(32, 64), Size(64, 32)
    mixed = TwoSizes([wide, tall, wide, wide])
    assert one_size_batches(mixed, PROMPTS, size=Size(64, 64), batch=2) == [[0, 2], [3], [1]]
    check_mixed_sizes(mixed, PROMPTS, size=Size(64, 64), group_size=6, batch=3)
    check_mixed_sizes(TwoSizes([wide] * 4), PROMPTS, size=Size(64, 64), group_size=6, batch=4)
    with pytest.raises(ValueError, match=r"sampled at 2 sizes .* set sampling\.batch to one of 1, 2, 3, 6"):
        check_mixed_sizes(mixed, PROMPTS, size=Size(64, 64), group_size=6, batch=4)


def test_an_endpoint_objective_samples_without_noise_and_learns(policy: FluxPolicy) -> None:
    sampler = Sampler(size=Size(64, 64), steps=4, sde_steps=(1, 3), stochastic=False)
    cache, old = ConditioningCache(policy), OldPolicy(policy.transformer)
    rollout = collect(policy, rows(), sampler=sampler, cache=cache, seed=1, epoch=0)
    assert rollout.latents_BSNC.shape[1] == rollout.log_prob_BS.shape[1] == 0
    learner = PolicyLoss(policy, sampler, cache, DiffusionNft(beta=0.1, kl_weight=0.1), old=old)
    batch = Batch(rollout, torch.tensor([5.0, -5.0, 1.0, 0.0]), torch.tensor([True, True, True, False]))
    before = {name: value.clone() for name, value in adapter_state(policy.transformer).items()}
    policy.transformer.zero_grad()
    metrics = update_policy(learner, [batch], runtime=Runtime(), draw=(1, 0, 0))
    assert metrics["velocity_change"] == 0.0
    assert metrics["kl"] > 0
    assert all(torch.equal(before[name], value) for name, value in adapter_state(policy.transformer).items())
    assert sum(p.grad.norm().item() for p in policy.transformer.parameters() if p.grad is not None) > 0


def test_the_sampling_copy_lags_behind_as_published(policy: FluxPolicy) -> None:
    old = OldPolicy(policy.transformer)
    first = {name: value.clone() for name, value in old.state.items()}
    with torch.no_grad():
        for value in adapter_state(policy.transformer).values():
            value.add_(1.0)
    for step, share in ((100, 0.9), (5000, 0.5)):
        old.load(first)
        old.follow(step)
        for name, value in old.state.items():
            torch.testing.assert_close(value, first[name] + share)
    with torch.no_grad():
        for value in adapter_state(policy.transformer).values():
            value.sub_(1.0)


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
    """Also where the adapter was in the weights at the steps without noise."""
    sampler = Sampler(size=Size(64, 64), steps=4, sde_steps=(0, 2), sde_type=kernel, keeps_means=True)
    toggle = (
        policy.transformer.enable_gradient_checkpointing
        if checkpointing
        else policy.transformer.disable_gradient_checkpointing
    )
    toggle()
    policy.transformer.train()
    cache = ConditioningCache(policy)
    merged = FusedLora(policy.transformer)
    rollout = collect(policy, rows(), sampler=sampler, cache=cache, seed=1, epoch=0, fused=merged)
    batch = Batch(rollout, torch.tensor([1.0, -1.0, 0.5, 2.0]), torch.ones(4, dtype=torch.bool))
    for options in (GrpoClip(clip_range=1e-4), GrpoGuard(clip_range=1e-4)):
        policy.transformer.zero_grad()
        learner = PolicyLoss(policy, sampler, cache, options)
        metrics = update_policy(learner, [batch], runtime=Runtime(), draw=(1, 0, 0))
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


def test_prompts_are_shuffled_anew_each_time_and_for_each_seed() -> None:
    prompts = character_prompts("train", 12)
    orders = {
        tuple(row.prompt.id for row in epoch_rows(prompts, epoch=turn, count=12, group_size=1, seed=seed))
        for seed, turn in product((0, 1), range(4))
    }
    assert len(orders) == 8
    assert all(sorted(order) == list(range(12)) for order in orders)


def test_batches_do_not_depend_on_the_number_of_processes() -> None:
    numbered = [Row(PROMPTS[0], number) for number in range(24)]
    alone = assign_groups(numbered, batch=3, updates=2, world=1, rank=0)
    for update in range(2):
        dealt = [assign_groups(numbered, batch=3, updates=2, world=2, rank=rank)[update] for rank in range(2)]
        together = sorted([[row.number for row in batch] for part in dealt for batch in part])
        assert together == sorted([row.number for row in batch] for batch in alone[update])


def test_groups_that_do_not_divide_name_what_would() -> None:
    with pytest.raises(ValueError, match="batches of 1, 2, 3, 6; or 20 or 40 samples"):
        assign_groups([Row(PROMPTS[0], n) for n in range(24)], batch=5, updates=2, world=2, rank=0)


def test_seeds_are_what_they_were() -> None:
    assert seed_of(42, 0, "start", 7) == seed_of(42, 0, "start", 7) < 2**63
    assert len({seed_of(42, epoch, "start", row) for epoch in range(10) for row in range(100)}) == 1000
