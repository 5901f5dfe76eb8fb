"""The forwards that a plan counts are those that an epoch makes, in every form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rollouts import collect
from tiny_runs import JPEG_SIZE
from toy_world import ToyPolicy, toy_config, toy_world

from pacorl.config.base import load
from pacorl.core.objectives import OBJECTIVES
from pacorl.grpo import epoch
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rollout import Draw
from pacorl.grpo.rows import assign_rows, epoch_rows
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.grpo.update import PolicyLoss, update_policy
from pacorl.models.adapters import add_lora
from pacorl.plan.work import work_of
from pacorl.runtime.processes import Runtime
from pacorl.types import Advantages, Samples

PAPER = ["group_size=16", "sampling.steps=10", "sampling.suffix={}", "sampling.batch=16"]
QUICKSTART = ["group_size=12", "sampling.steps=6", "sampling.suffix={}", "sampling.batch=12"]
ONE_START = "sampling.tree={seeds: 1}"
TWO_STEPS = "sampling.sde_steps=[1,2]"
NFT = "objective.name=diffusion_nft"

FORMS = [
    ([*PAPER], (10, 1, 0)),
    pytest.param([*PAPER, ONE_START], (8 + 2 / 16, 1 / 16, 0), marks=pytest.mark.slow),
    pytest.param([*PAPER, ONE_START, "sampling.batch=4"], (8 + 2 / 16, 1 / 16, 0), marks=pytest.mark.slow),
    ([*PAPER, ONE_START, "sampling.suffix={solver: ab2, steps: 4}"], (4 + 2 / 16, 1 / 16, 0)),
    pytest.param([*PAPER, "sampling.suffix.steps=4"], (4 + 2, 1, 0), marks=pytest.mark.slow),
    pytest.param([*PAPER, "sampling.tree={seeds: 4}"], (8 + 8 / 16, 4 / 16, 0), marks=pytest.mark.slow),
    ([*PAPER, "sampling.tree={seeds: 2}"], (8 + 4 / 16, 2 / 16, 0)),
    ([*PAPER, "sampling.tree={seeds: 1, branches: [4, 4]}", TWO_STEPS], (7 + (2 + 4) / 16, 5 / 16, 0)),
    pytest.param(
        [*PAPER, "sampling.tree={seeds: 1, branches: [4, 4]}", "sampling.sde_steps=[1,4]"],
        (5 + 14 / 16, 5 / 16, 0),
        marks=pytest.mark.slow,
    ),
    ([*PAPER, ONE_START, "objective.kl_weight=0.1"], (8 + 2 / 16, 1 / 16, 1 / 16)),
    ([*PAPER, ONE_START, "sampling.sde_steps=[9]"], (10 / 16, 1 / 16, 0)),
    pytest.param([*PAPER, NFT, TWO_STEPS], (10, 2, 2), marks=pytest.mark.slow),
    ([*PAPER, NFT, "objective.kl_weight=0.1"], (10, 1, 2)),
    ([*PAPER, NFT, ONE_START], (8 + 2 / 16, 1, 1)),
    ([*PAPER, "objective.name=awm"], (10, 1, 0.5)),
    pytest.param([*QUICKSTART], (6, 1, 0), marks=pytest.mark.slow),
    pytest.param([*QUICKSTART, ONE_START], (4 + 2 / 12, 1 / 12, 0), marks=pytest.mark.slow),
    pytest.param(
        [*QUICKSTART, ONE_START, "sampling.suffix={solver: ab2, steps: 2}"],
        (2 + 2 / 12, 1 / 12, 0),
        marks=pytest.mark.slow,
    ),
]


@pytest.fixture(autouse=True)
def _toy() -> Iterator[None]:
    with toy_world():
        yield


class Counted:
    """Counts the rows that pass a transformer: sampled, trained, and of another policy within the update."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        self.count: Counter[str] = Counter()
        self.phase = "sampling"
        transformer.register_forward_pre_hook(self._forward)

    def _forward(self, module: torch.nn.Module, args: Any) -> None:
        quiet = "sampling" if self.phase == "sampling" else "other_policies"
        self.count["training" if torch.is_grad_enabled() else quiet] += len(args[0])
        if torch.is_grad_enabled():
            self.count["trained forwards"] += 1


def config_of(tmp_path: Path, *settings: str) -> PolicyConfig:
    fixed = ["judge=none", f"rewards=[{{name: '{JPEG_SIZE}'}}]", "sampling.sde_steps=[1]"]
    return toy_config(tmp_path / "run", *fixed, *settings)


@pytest.mark.parametrize(("settings", "forwards"), FORMS)
def test_the_forwards_of_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], forwards: tuple[float, float, float]
) -> None:
    """Two groups in two updates, through the trainer: the plan's count, the epoch's and the arithmetic's are one."""
    config = config_of(tmp_path, *settings)
    expected = dict(zip(("sampling", "training", "other_policies"), forwards, strict=True))
    assert work_of(config, world=1).forwards_per_image == pytest.approx(expected)
    training = PolicyTrainer(config)
    counted, learn, backward = Counted(training.lora.transformer), epoch.learn, training.runtime.backward

    def learning(*args: Any) -> Any:
        counted.phase = "update"
        return learn(*args)

    def back(loss: torch.Tensor) -> None:
        counted.count["backwards"] += 1
        backward(loss)

    monkeypatch.setattr(epoch, "learn", learning)
    monkeypatch.setattr(training.runtime, "backward", back)
    training.run_epoch()
    training.close()
    images = 2 * config.group_size
    assert {phase: counted.count[phase] / images for phase in expected} == pytest.approx(expected)
    assert counted.count["backwards"] == counted.count["trained forwards"]


@pytest.mark.parametrize(
    ("model", "passes"),
    [
        ("{kind: sd3}", 2),
        ("{kind: sd3, guidance_scale: 1}", 1),
        ("{kind: flux, guidance_scale: 3.5}", 1),
        ("{kind: flux, true_cfg_scale: 2}", 2),
    ],
)
def test_classifier_free_guidance_takes_two_forwards(tmp_path: Path, model: str, passes: int) -> None:
    config = config_of(tmp_path, *PAPER, ONE_START, "objective.kl_weight=0.1")
    guided = config.model_copy(update={"model": load(PolicyConfig, None, [f"model={model}"]).model})
    plain, counted = (work_of(each, world=1).forwards_per_image for each in (config, guided))
    assert counted == {phase: passes * count for phase, count in plain.items()}


@pytest.mark.parametrize(("world", "sampling", "training"), [(1, 8 + 2 / 16, 1 / 16), (2, 8 + 4 / 16, 2 / 16)])
def test_a_node_on_several_processes_is_counted_on_each(
    tmp_path: Path, world: int, sampling: float, training: float
) -> None:
    settings = [*PAPER, ONE_START, "prompts_per_epoch=1", "sampling.batch=8", "optimizer.updates_per_epoch=1"]
    config, policy = config_of(tmp_path, *settings), ToyPolicy()
    work = work_of(config, world=world)
    assert work.forwards_per_image == pytest.approx({"sampling": sampling, "training": training, "other_policies": 0})
    add_lora(policy.transformer, rank=2, alpha=4, targets=policy.lora_targets)
    counted, cache = Counted(policy.transformer), ConditioningCache(policy)
    loss = PolicyLoss(policy, work.sampler, cache, config.objective)
    values = Advantages(torch.randn(16), torch.ones(16, dtype=torch.bool), {})
    rows = epoch_rows(toy_prompts(), epoch=0, count=1, group_size=16, seed=1)
    for rank in range(world):
        (units,) = assign_rows(rows, tree=work.sampler.tree, batch=8, updates=1, world=world, rank=rank)
        parts = [collect(Draw(policy, work.sampler, cache, 1, 0, 8), unit) for unit in units]
        nodes = [batch for part in parts for batch in part.nodes]
        update_policy(loss, Samples(nodes=nodes), values, runtime=Runtime(), draw=(1, 0, 0))
    assert counted.count["sampling"] / 16 == sampling
    assert counted.count["training"] / 16 == training


def toy_prompts() -> list[Any]:
    from pacorl.tiny.world import set_prompts

    return set_prompts("train", 1)


def saved_bytes(group: int) -> int:
    """What the graph of an update holds at most, of a group that shares its noise."""
    policy = ToyPolicy()
    add_lora(policy.transformer, rank=2, alpha=4, targets=policy.lora_targets)
    config = toy_config(Path("unused"), f"group_size={group}", f"sampling.batch={group}", ONE_START)
    sampler = config.sampling.sampler(0, group_size=group, seed=1, spec=OBJECTIVES["grpo_clip"])
    cache = ConditioningCache(policy)
    rows = epoch_rows(toy_prompts(), epoch=0, count=1, group_size=group, seed=1)
    samples = collect(Draw(policy, sampler, cache, 1, 0, group), rows)
    values, held = Advantages(torch.randn(group), torch.ones(group, dtype=torch.bool), {}), Held(policy.transformer)
    with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda tensor: tensor):
        update_policy(
            PolicyLoss(policy, sampler, cache, config.objective), samples, values, runtime=Runtime(), draw=(1, 0, 0)
        )
    return held.bytes


class Held:
    """Adds up what the transformer's forwards save for their backwards."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        self.bytes = 0
        self.inside = False
        transformer.register_forward_pre_hook(lambda *_: setattr(self, "inside", True))
        transformer.register_forward_hook(lambda *_: setattr(self, "inside", False))

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.bytes += tensor.nbytes if self.inside else 0
        return tensor


def test_an_update_holds_one_image_whatever_the_group() -> None:
    assert saved_bytes(2) == saved_bytes(12) > 0
