"""What a policy run is made of: each builder makes one thing from the config, and refuses what cannot work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pacorl.config.policy_run import PolicyRun, RewardConfig
from pacorl.data.leaks import check_leaks
from pacorl.data.records import prompts_from
from pacorl.engine.adapter_check import check_adapter
from pacorl.engine.rollout import ConditioningCache, assign_groups, check_mixed_sizes
from pacorl.engine.runtime import Runtime
from pacorl.engine.trackers import check_trackers
from pacorl.judges.judge import Judge, close_judge
from pacorl.lora.adapters import add_lora, start_from
from pacorl.policies import build_policy
from pacorl.policies.policy import Policy
from pacorl.rewards import build_rewards, check_rewards
from pacorl.rewards.reward import Reward, smoke_test
from pacorl.train.judging import load_judge, reach_judge, without_idle_judges
from pacorl.types import Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image

RewardFunction = Callable[[Sequence[Prompt], "Sequence[Image]"], Sequence["float | None"]]
"""Prompts and images → one score per image, None if there is none."""


class FunctionReward:
    """A Python function as a reward."""

    def __init__(self, function: RewardFunction) -> None:
        self.function = function

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Accept every prompt."""

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        return list(self.function(prompts, images))


def checked_config(config: PolicyRun, functions: Mapping[str, RewardFunction]) -> PolicyRun:
    """The config without idle judges, after all checks that need no weights; functions stand among its rewards.

    Raises:
        ValueError: if a tracker is not installed, or a reward or its arguments are wrong.
    """
    check_trackers(config.trackers)
    named = [reward for reward in config.rewards if reward.name not in functions]
    weighted = {reward.name: reward for reward in config.rewards if reward.name in functions}
    check_rewards(named)
    check_rewards(config.evaluation.rewards, key="evaluation.rewards")
    # Whether a judge is idle is asked of the rewards that have names; a function brings its own means.
    config = without_idle_judges(config.model_copy(update={"rewards": tuple(named)}))
    own = tuple(weighted.get(name, RewardConfig(name=name)) for name in functions)
    return config.model_copy(update={"rewards": (*named, *own)})


def read_prompts(config: PolicyRun) -> tuple[list[Prompt], list[Prompt], str]:
    """The training prompts, the evaluation's, and a warning if they leak into each other.

    Raises:
        ValueError: if they leak and `prompts.leaks` is refuse.
    """
    train = prompts_from(config.prompts.train, limit=None)
    evaluation = prompts_from(config.prompts.evaluation, limit=config.prompts.evaluation_limit)
    leaks = check_leaks(
        train,
        evaluation,
        benchmarks={name: prompts_from(name) for name in config.prompts.benchmarks},
        action=config.prompts.leaks,
        near=config.prompts.near,
    )
    return train, evaluation, leaks or ""


def check_division(config: PolicyRun, runtime: Runtime) -> None:
    """Refuse sizes that leave a process without its share of an epoch.

    Raises:
        ValueError: if samples, updates, processes and batches do not divide; it names sizes that would.
    """
    rows = range(config.prompts_per_epoch * config.group_size)
    updates = config.optimizer.updates_per_epoch
    assign_groups(rows, batch=config.sampling.batch, updates=updates, world=runtime.world, rank=runtime.rank)


def build_adapted_policy(config: PolicyRun, *, device: torch.device) -> Policy:
    """The policy with a trainable adapter, which starts from `adapter.start` if that is given."""
    torch.manual_seed(config.seed)  # the adapter's first weights are drawn from it
    policy = build_policy(config.model, device=device, record_sizes=config.prompts.record_sizes)
    for size in (*config.sampling.sizes, config.evaluation.size):
        policy.check_size(Size(*size))
    if config.model.gradient_checkpointing:
        policy.transformer.enable_gradient_checkpointing()  # type: ignore[operator]
    shape = {"rank": config.adapter.rank, "alpha": config.adapter.alpha}
    add_lora(policy.transformer, **shape, targets=adapter_targets(config, policy))
    if config.adapter.start:
        start_from(policy.transformer, config.adapter.start, **shape, base=config.model.checkpoint)
    return policy


def adapter_targets(config: PolicyRun, policy: Policy) -> tuple[str, ...]:
    """The suffixes of the modules that the adapter is added to."""
    return tuple(config.adapter.targets or policy.lora_targets)


def encode_prompts(
    config: PolicyRun, policy: Policy, train_prompts: Sequence[Prompt], evaluation_prompts: Sequence[Prompt]
) -> ConditioningCache:
    """Every prompt at every size that it will be sampled at, encoded once; then the encoders leave the device.

    Raises:
        ValueError: if batches would mix sizes, or the adapter changes nothing.
    """
    cache = ConditioningCache(policy)
    for size in (Size(*size) for size in config.sampling.sizes):
        check_mixed_sizes(policy, train_prompts, size=size, group_size=config.group_size, batch=config.sampling.batch)
        cache.prepare(train_prompts, size)
        if config.evaluation.compare_sizes:
            cache.prepare(evaluation_prompts, size)
    cache.prepare(evaluation_prompts, Size(*config.evaluation.size))
    size = policy.size_of(train_prompts[0], Size(*config.sampling.size))
    check_adapter(policy, cache.batch(train_prompts[:1], size), size, targets=adapter_targets(config, policy))
    policy.free_encoders()  # before a judge is loaded, so that both never lie on the device together
    return cache


@dataclass(slots=True)
class RunJudges:
    """Who answers the rewards' questions, and who answers for the measures that are never rewarded."""

    rewards: Judge | None
    held_out: Judge | None

    def close(self) -> None:
        """End what they run beside the training."""
        close_judge(self.rewards)
        close_judge(self.held_out)


def reach_judges(config: PolicyRun, *, processes: int) -> RunJudges:
    """The judges of other processes, met before weights load; None for those of this process, and for none.

    Raises:
        ValueError: if one refuses; the other one is closed.
    """
    judges = RunJudges(None, None)
    with ExitStack() as on_fault:
        on_fault.callback(judges.close)
        judges.rewards = reach_judge(config.judge, processes=processes) if config.judge else None
        judges.held_out = reach_judge(config.evaluation.judge, processes=processes) if config.evaluation.judge else None
        on_fault.pop_all()  # the run closes them
    return judges


def load_judges(judges: RunJudges, config: PolicyRun, *, device: torch.device) -> None:
    """Load those of this process. If the evaluation names no judge of its own, the rewards' answers for it too."""
    if config.judge and not judges.rewards:
        judges.rewards = load_judge(config.judge, device=device)
    if config.evaluation.judge and not judges.held_out:
        judges.held_out = load_judge(config.evaluation.judge, device=device)
    judges.held_out = judges.held_out or judges.rewards


def build_run_rewards(
    configs: Sequence[RewardConfig],
    functions: Mapping[str, RewardFunction],
    *,
    judge: Judge | None,
    device: torch.device,
    checked: Sequence[Prompt],
    tried: Sequence[Prompt],
    size: tuple[int, int],
) -> Mapping[str, Reward]:
    """The rewards in the config's order, tried once: what cannot score fails now, not after the first epoch.

    Args:
        configs: the rewards.
        functions: those of them that are Python functions, by name.
        judge: who answers their questions.
        device: where models of this process live.
        checked: every prompt that they will meet.
        tried: the prompts that trial images are made for.
        size: of the trial images.
    """
    built = build_rewards([one for one in configs if one.name not in functions], judge=judge, device=device)
    rewards: dict[str, Reward] = {
        one.key: FunctionReward(functions[one.name]) if one.name in functions else built[one.key] for one in configs
    }
    for reward in rewards.values():
        reward.check(checked)
    # A judge has shown already that it answers, when it was met or loaded.
    unasked = {key: reward for key, reward in rewards.items() if not hasattr(reward, "judge")}
    smoke_test(unasked, tried, size=Size(*size))
    return rewards


def build_optimizer(config: PolicyRun, policy: Policy) -> torch.optim.Optimizer:
    """AdamW over the adapter's weights."""
    return torch.optim.AdamW(
        [parameter for parameter in policy.transformer.parameters() if parameter.requires_grad],
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        weight_decay=config.optimizer.weight_decay,
    )
