"""Sampling for training: seeds, shared starts, and the ratio before any update."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from drawn_adapters import draw_adapter
from rollouts import collect
from tests.twins import tiny_flux
from tests.twins.parts import vocabulary
from toy_world import ToyPolicy

from pacorl.core.objectives.grpo_clip import GrpoClip
from pacorl.core.objectives.grpo_guard import GrpoGuard
from pacorl.core.sampler import Sampler, Suffix, Tree
from pacorl.core.schedule import seed_of
from pacorl.core.sde import Past, Transition, ab2, flow_sde, log_prob
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import Draw, sample_images
from pacorl.grpo.rows import Row
from pacorl.grpo.update import PolicyLoss, update_policy
from pacorl.models.adapters import adapter_state, add_lora
from pacorl.models.policies.flux import FLUX, LORA_TARGETS, FluxPolicy
from pacorl.runtime.processes import Runtime
from pacorl.tiny.world import set_prompts
from pacorl.types import Advantages, Conditioning, Prompt, Samples, Size

PROMPTS = set_prompts("train", 4)
OWN = Tree(seeds=2, branches=(1, 1))
SHARED = Tree(seeds=1, branches=(2, 1))
SAMPLER = Sampler(size=Size(64, 64), steps=4, sde_steps=(1, 2), tree=OWN)


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
    draw_adapter(policy.transformer, std=0.05)
    return policy


def draw_of(policy, *, sampler=SAMPLER, cache=None, seed=1, epoch=0, batch=4):  # type: ignore[no-untyped-def]
    return Draw(policy, sampler, cache or ConditioningCache(policy), seed, epoch, batch)


def drawn(policy, rows, **options):  # type: ignore[no-untyped-def]
    """The samples of some rows."""
    return collect(draw_of(policy, **options), rows)


def finals(samples: Samples) -> torch.Tensor:
    return torch.cat([rollout.final_BNC for rollout in samples.rollouts])


def values(advantages: list[float], used: list[bool] | None = None) -> Advantages:
    used_B = torch.tensor(used or [True] * len(advantages))
    return Advantages(torch.tensor(advantages, dtype=torch.float64), used_B, {})


def rows(count: int = 4, group: int = 2) -> list[Row]:
    return [Row(PROMPTS[number // group], number) for number in range(count)]


def test_samples_are_what_a_loop_over_them_draws() -> None:
    """Two groups, a step between the stochastic ones, and a suffix of two steps out of three."""
    policy, size, tree = ToyPolicy(), Size(16, 16), Tree(1, (2, 2))
    suffix = Suffix(solver="ab2", steps=2)
    sampler = Sampler(size=size, steps=6, sde_steps=(0, 2), tree=tree, suffix=suffix)
    samples = drawn(policy, rows(8, 4), sampler=sampler, seed=5, epoch=3)
    sigmas = policy.sigmas(6, size).tolist()
    for row, final in zip(rows(8, 4), finals(samples), strict=True):
        conditioning = policy.collate(policy.encode([row.prompt], size))

        def velocity(x: torch.Tensor, step: int, text: Conditioning = conditioning) -> torch.Tensor:
            return policy.velocity(x, torch.tensor(sigmas[step : step + 1]), text, size)

        x = policy.noise([seed_of(5, 3, "start", tree.node_of(row.number, 0))], size)
        for level, step in enumerate(sampler.sde_steps):
            transition = flow_sde(
                x,
                velocity(x, step),
                sigma=sigmas[step],
                sigma_next=sigmas[step + 1],
                noise_level=sampler.noise_level,
                sigma_max=sigmas[1],
            )
            child = tree.node_of(row.number, level + 1)
            x = transition.mean_BNC + transition.std * policy.noise([seed_of(5, 3, "step", step, child)], size)
            nodes = next(nodes for nodes in samples.nodes if nodes.level == level and row.number in nodes.row_B)
            expected = log_prob(x, Transition(transition.mean_BNC, transition.std))[0]
            torch.testing.assert_close(nodes.log_prob_B[nodes.row_B.index(row.number)], expected, rtol=1e-4, atol=1e-4)
            if level == 0:
                x = x + velocity(x, 1) * (sigmas[2] - sigmas[1])
        past = None
        for here, following in ((3, 5), (5, 6)):
            now, length = velocity(x, here), sigmas[following] - sigmas[here]
            x, past = ab2(x, now, length, past), Past(now, length)
        torch.testing.assert_close(final, x[0], rtol=1e-4, atol=1e-4)


class OwnSizes(ToyPolicy):
    """Samples each prompt at the size of its record."""

    def size_of(self, prompt: Prompt, size: Size) -> Size:
        return prompt.size or size


def test_images_keep_their_places_among_sizes() -> None:
    policy, sizes = OwnSizes(), [Size(16, 16), Size(32, 16), Size(16, 16), Size(32, 16), Size(16, 16)]
    prompts = [replace(PROMPTS[0], id=number, size=size) for number, size in enumerate(sizes)]
    sampler, cache = Sampler(size=Size(8, 8), steps=2), ConditioningCache(policy)
    images = sample_images(policy, prompts, sampler=sampler, cache=cache, seeds=range(5), batch=2)
    assert [Size(image.height, image.width) for image in images] == sizes


class Counting:
    """Counts the rows that pass through a policy's velocity."""

    def __init__(self, policy: FluxPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        velocity = policy.velocity

        def counted(x, *args):  # type: ignore[no-untyped-def]
            self.rows.append(len(x))
            return velocity(x, *args)

        monkeypatch.setattr(policy, "velocity", counted)


@pytest.mark.parametrize(
    "case",
    [
        (Tree(4, (1,)), (1,), 2, [2, 2, 2, 2, 2, 2, 2, 2]),
        (Tree(1, (4,)), (2,), 4, [1, 1, 1, 4]),
        (Tree(2, (2,)), (0,), 4, [2, 4, 4, 4]),
        pytest.param((Tree(1, (2, 2)), (0, 2), 4, [1, 2, 2, 4]), marks=pytest.mark.slow),
        (Tree(1, (2, 2)), (0, 1), 2, [1, 1, 1, 2, 2, 2, 2]),
        pytest.param((Tree(2, (1, 2)), (1, 2), 4, [2, 2, 2, 4]), marks=pytest.mark.slow),
    ],
)
def test_each_distinct_latent_passes_once(
    policy: FluxPolicy, monkeypatch: pytest.MonkeyPatch, case: tuple[Tree, tuple[int, ...], int, list[int]]
) -> None:
    """Rows of each forward: in sampling, and in training one forward and one backward per node."""
    tree, sde_steps, batch, forwards = case
    counting = Counting(policy, monkeypatch)
    sampler = Sampler(size=Size(64, 64), steps=4, sde_steps=sde_steps, tree=tree)
    draw = draw_of(policy, sampler=sampler, batch=batch)
    samples = collect(draw, [Row(PROMPTS[0], number) for number in range(4)])
    assert counting.rows == forwards
    counting.rows.clear()
    loss = PolicyLoss(draw, GrpoClip())
    metrics = update_policy(loss, samples, values([1.0, -1.0, 0.5, 2.0]), runtime=Runtime())
    assert sum(counting.rows) == sum(tree.seeds * math.prod(tree.branches[:level]) for level in range(len(sde_steps)))
    assert len(counting.rows) == len(samples.nodes)
    assert metrics["ratio_deviation"] == 0.0


@pytest.mark.parametrize(
    ("checkpointing", "kernel", "tree"),
    [
        pytest.param(*case, marks=[] if number in {0, 5, 10} else [pytest.mark.slow])
        for number, case in enumerate(product([False, True], ["flow_sde", "cps"], [OWN, SHARED, Tree(1, (2, 2))]))
    ],
)
def test_before_an_update_the_ratio_is_exactly_one(
    policy: FluxPolicy, checkpointing: bool, kernel: str, tree: Tree
) -> None:
    sampler = Sampler(size=Size(64, 64), steps=4, sde_steps=(0, 2), sde_type=kernel, keeps_means=True, tree=tree)
    toggle = (
        policy.transformer.enable_gradient_checkpointing
        if checkpointing
        else policy.transformer.disable_gradient_checkpointing
    )
    toggle()
    policy.transformer.train()
    draw = draw_of(policy, sampler=sampler)
    samples, advantages = collect(draw, rows()), values([1.0, -1.0, 0.5, 2])
    for options in (GrpoClip(clip_range=1e-4), GrpoGuard(clip_range=1e-4)):
        policy.transformer.zero_grad()
        metrics = update_policy(PolicyLoss(draw, options), samples, advantages, runtime=Runtime())
        assert metrics["ratio_deviation"] == 0.0
        norms = [p.grad.norm().item() for p in policy.transformer.parameters() if p.grad is not None]
        assert len(norms) == len(adapter_state(policy.transformer))
        assert sum(norms) > 0


def test_a_process_may_lack_the_sample_that_names_a_node(policy: FluxPolicy) -> None:
    sampler = replace(SAMPLER, tree=Tree(1, (4, 1)))
    numbered = [Row(PROMPTS[0], number) for number in range(4)]
    whole, half = (finals(drawn(policy, share, sampler=sampler)) for share in (numbered, numbered[2:]))
    torch.testing.assert_close(half, whole[2:], rtol=0, atol=1e-5)
