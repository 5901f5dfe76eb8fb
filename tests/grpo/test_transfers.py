"""Sampling and training do not wait for the card: a model on the meta device tells, from which nothing can be read."""

from collections import Counter
from typing import Any

import pytest
import torch
from edit_twins import flux_policy
from tests.twins import TWINS
from torch.utils._python_dispatch import TorchDispatchMode

from pacorl.core.sampler import Sampler, Tree
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import Draw, draw_samples, integrate
from pacorl.grpo.rows import Row
from pacorl.models.adapters import add_lora
from pacorl.models.policies import POLICIES
from pacorl.models.policies.flux import LORA_TARGETS, FluxPolicy
from pacorl.plan.generators import Inputs
from pacorl.tiny.world import set_prompts, vocabulary
from pacorl.types import Samples, Size

SIZE = Size(32, 32)
PROMPTS = set_prompts("train", 2)
META = torch.device("meta")


class Waits(TorchDispatchMode):
    """Counts within the block what makes the host wait for a card, with the meta device in the card's place.

    `read` is a copy from the card or a number read off it, and is answered with zeros. `sent` is a copy to the card
    that is not said to be asynchronous, or an index on the host into a tensor on the card.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name in {"_local_scalar_dense", "equal", "nonzero"} and args[0].is_meta:
            self.counted["read"] += 1
            return 0
        to = kwargs.get("device")
        if name == "_to_copy" and to is not None and args[0].is_meta != (torch.device(to) == META):
            reads = args[0].is_meta
            self.counted["read" if reads else "sent"] += reads or not kwargs.get("non_blocking")
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=to)
        if name == "copy_" and args[0].is_meta != args[1].is_meta:
            self.counted["read" if args[1].is_meta else "sent"] += 1
            return args[0]
        if name == "index" and args[0].is_meta and any(i is not None and not i.is_meta for i in args[1]):
            self.counted["sent"] += 1
        return func(*args, **kwargs)


@pytest.fixture(scope="module")
def policy() -> FluxPolicy:
    """A tiny FLUX on the meta device, whose prompts were encoded before it went there."""
    policy = flux_policy()
    add_lora(policy.transformer, rank=4, alpha=8, targets=LORA_TARGETS)
    return policy


@pytest.fixture(scope="module")
def cache(policy: FluxPolicy) -> ConditioningCache:
    cache = ConditioningCache(policy)
    cache.prepare(PROMPTS, SIZE)
    for component in policy.pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.to("meta")
    return cache


@torch.no_grad()
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "qwen_edit" else pytest.mark.slow) for kind in POLICIES]
)
def test_no_kind_waits_in_a_denoising_step(kind: str) -> None:
    policy: Any = POLICIES.named(kind).over(TWINS[kind](vocabulary()))
    sigmas = policy.sigmas(3, SIZE)
    policy.transformer.to("meta")
    for steps in (1, 3):  # Qwen-Image sends its tables of positions in the first forward
        with Waits() as waits:
            conditioning, noise = Inputs(policy).conditioning(SIZE, batch=2), policy.noise([0, 1], SIZE)
            integrate(policy, noise, conditioning, size=SIZE, sigmas=sigmas, grid=range(steps + 1))
    assert not +waits.counted


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param(Tree(2, (1, 1)), marks=pytest.mark.slow),
        Tree(1, (2, 1)),
    ],
)
def test_sampling_waits_for_its_images_alone(policy: FluxPolicy, cache: ConditioningCache, tree: Tree) -> None:
    sampler = Sampler(size=SIZE, steps=4, sde_steps=(0, 2), tree=tree, keeps_means=True)
    rows = [Row(PROMPTS[number // 2], number) for number in range(4)]
    at_steps: Counter[str] = Counter()
    with Waits() as waits:
        samples = Samples()
        for _ in draw_samples(Draw(policy, sampler, cache, 1, 0, 4), [rows], samples):
            at_steps.update(waits.counted)
    # By the time that the first images were there: the endpoints, and the pixels.
    assert at_steps == Counter({"read": 2})
    assert waits.counted["sent"] == 0
    assert not any(tensor.is_meta for nodes in samples.nodes for tensor in (nodes.latents_VNC, nodes.log_prob_B))
