"""What a policy run is made of: each builder makes one thing from the config, and refuses what cannot work."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from pacorl.config.base import ConfigError
from pacorl.config.reward_section import RewardConfig
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rollout import OdeForm
from pacorl.grpo.rows import check_mixed_sizes
from pacorl.io.outage import OUTAGE_SECONDS, Answers, KeepsAnswers, UnreachableError
from pacorl.judge import JUDGES, open_judge
from pacorl.judge.judge import BackendOptions, Judge, close_judge
from pacorl.models.lora.adapters import add_lora, start_from
from pacorl.models.lora.layers import fuse_lora, place_stacks
from pacorl.models.policies import build_policy
from pacorl.models.policies.policy import Policy
from pacorl.models.quantize import NONE
from pacorl.models.quantize.w8a8 import Int8Products
from pacorl.records.leaks import check_leaks
from pacorl.records.prompts import prompts_from
from pacorl.rewards import asks_judge, build_rewards, check_rewards
from pacorl.rewards.reward import Reward, RewardFunction, smoke_test
from pacorl.runtime.compiled import compile_blocks
from pacorl.runtime.logbook import check_trackers
from pacorl.types import Conditioning, Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image


class FunctionReward:
    """A Python function as a reward."""

    def __init__(self, function: RewardFunction) -> None:
        self.function = function

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Accept every prompt."""

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        return list(self.function(prompts, images))


def checked_config(config: PolicyConfig, functions: Mapping[str, RewardFunction]) -> PolicyConfig:
    """The config without idle judges, after all checks that need no weights; functions stand among its rewards.

    Raises:
        ValueError: if a tracker is not installed, or a reward or its arguments are wrong.
    """
    check_trackers(config.trackers)
    built_in = [reward for reward in config.rewards if reward.name not in functions]
    weighted = {reward.name: reward for reward in config.rewards if reward.name in functions}
    check_rewards(built_in)
    check_rewards(config.evaluation.rewards, key="evaluation.rewards")
    # Idle judges are found by the other rewards alone: a function brings its own means.
    config = without_idle_judges(config.model_copy(update={"rewards": tuple(built_in)}))
    added = tuple(weighted.get(name, RewardConfig(name=name)) for name in functions)
    return config.model_copy(update={"rewards": (*built_in, *added)})


def without_idle_judges(config: PolicyConfig, *, run: bool = True) -> PolicyConfig:
    """Drop the judges that nothing asks: no reward, no measure of the evaluation, and not `best_by`.

    Args:
        config: the run.
        run: whether the files of users' rewards are run to know what they ask; else they are parsed.

    Returns:
        The config, its `judge` and `evaluation.judge` None unless they are asked. Doing it again changes nothing.

    Raises:
        ConfigError: if `judge` is none, and a reward or measure asks it; the message names which.
    """
    rewards = [f"rewards.{reward.key}" for reward in config.rewards if asks_judge(reward, run=run)]
    measures = [
        f"evaluation.rewards.{reward.key}" for reward in config.evaluation.rewards if asks_judge(reward, run=run)
    ]
    asking = rewards + ([] if config.evaluation.judge else measures)
    asking += ["best_by p_yes"] if config.best_by == "p_yes" else []
    if asking and config.judge is None:
        raise ConfigError(
            f"judge is none, and {', '.join(asking)} {'asks' if len(asking) == 1 else 'ask'} a judge; name one "
            "(judge.checkpoint=…), or leave out what asks it"
        )
    evaluation = config.evaluation.model_copy(update={"judge": config.evaluation.judge if measures else None})
    return config.model_copy(update={"judge": config.judge if asking else None, "evaluation": evaluation})


def read_prompts(config: PolicyConfig) -> tuple[list[Prompt], list[Prompt], str]:
    """The training prompts, the evaluation's, and a warning if they leak into each other.

    Raises:
        ValueError: if they leak and `prompts.leaks` is refuse, or are edits and a setting rules these out.
    """
    train = prompts_from(config.prompts.train, limit=None)
    evaluation = prompts_from(config.prompts.evaluation, limit=config.prompts.evaluation_limit)
    config.check_prompts([*train, *evaluation])
    leaks = check_leaks(
        train,
        evaluation,
        benchmarks={name: prompts_from(name) for name in config.prompts.benchmarks},
        action=config.prompts.leaks,
        near=config.prompts.near,
    )
    return train, evaluation, leaks or ""


def patience(config: PolicyConfig) -> float:
    """Seconds that a process may wait for another one.

    That one waits for a judge or a reward service until an outage is given up, and then for the failure budget.
    """
    scores = config.prompts_per_epoch * config.group_size * len(config.rewards)
    missing = math.ceil(config.advantages.max_missing * scores)
    judges = (config.judge, config.evaluation.judge)
    services = [reward for reward in (*config.rewards, *config.evaluation.rewards) if reward.name == "http"]
    outages = [float(service.args.get("outage", OUTAGE_SECONDS)) for service in services]
    return max((judge.patience(missing) for judge in judges if judge), default=0.0) + sum(outages)


def build_adapted_policy(config: PolicyConfig, *, device: torch.device) -> Policy:
    """The policy with a trainable adapter, which starts from `adapter.start` if that is given.

    Its transformer is not on the device yet: `encode_prompts` and then `place_transformer` follow.
    """
    config.generator.check_trainable(config.model.checkpoint)
    # The adapter's first weights are drawn next. Nothing here draws from the other two; a user's reward may.
    torch.manual_seed(config.seed)
    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)
    policy = build_policy(config.model, device=device, record_sizes=config.prompts.record_sizes, staged=True)
    for size in (*config.sampling.sizes, config.evaluation.size):
        policy.check_size(Size(*size))
    add_adapter(config, policy)
    if config.model.compile == "blocks":
        compile_blocks(policy.transformer)
    if config.adapter.start:
        shape = {"rank": config.adapter.rank, "alpha": config.adapter.alpha}
        start_from(policy.transformer, config.adapter.start, **shape, base=config.model.checkpoint)
    return policy


def add_adapter(config: PolicyConfig, policy: Policy) -> None:
    """Add the config's adapter to a policy, with gradient checkpointing if that is on.

    Raises:
        ValueError: if a target matches no linear layer, or layers that no image depends on.
    """
    if config.model.gradient_checkpointing:
        policy.transformer.enable_gradient_checkpointing()  # type: ignore[operator]
    targets = adapter_targets(config, policy)
    add_lora(policy.transformer, rank=config.adapter.rank, alpha=config.adapter.alpha, targets=targets)
    freeze_idle_layers(policy, targets=targets)


def ode_form(transformer: nn.Module, products: str, *, fuse: bool) -> OdeForm | None:
    """The form in which a transformer computes ODE steps, by `sampling.products` and `sampling.fuse_lora`."""
    return Int8Products(transformer) if products == "w8a8" else fuse_lora(transformer, enabled=fuse)


def adapter_targets(config: PolicyConfig, policy: Policy) -> tuple[str, ...]:
    """The suffixes of the modules that the adapter is added to."""
    return tuple(config.adapter.targets or policy.lora_targets)


def encode_prompts(
    config: PolicyConfig,
    policy: Policy,
    train_prompts: Sequence[Prompt],
    evaluation_prompts: Sequence[Prompt],
    *,
    cache: ConditioningCache,
) -> ConditioningCache:
    """Encode every prompt once, at every size that it will be sampled at, into `cache`; then the encoders are dropped.

    Raises:
        ValueError: if batches would mix sizes.
    """
    for size in (Size(*size) for size in config.sampling.sizes):
        check_mixed_sizes(policy, train_prompts, size=size, group_size=config.group_size, batch=config.sampling.batch)
        cache.prepare(train_prompts, size)
        if config.evaluation.compare_sizes:
            cache.prepare(evaluation_prompts, size)
    cache.prepare(evaluation_prompts, Size(*config.evaluation.size))
    policy.free_encoders()  # before transformer and judge come, so that they never lie on the device together
    torch.cuda.empty_cache()
    return cache


def place_transformer(
    config: PolicyConfig,
    policy: Policy,
    cache: ConditioningCache,
    prompt: Prompt,
    *,
    device: torch.device,
    sharded: bool = False,
) -> None:
    """Put the adapted transformer on the device, and check with a prompt that its adapter matters.

    If FSDP2 is going to shard it, it stays in main memory, unchecked. The launcher then brings it to the device block
    by block, each process its share, so that no card needs room for the whole.

    Raises:
        ValueError: if the adapter changes nothing.
    """
    # Packing is work for the device, and packed weights are this process's own: in main memory each would have them.
    if sharded and config.model.quantize == NONE:
        policy.place_transformer("cpu")
        return
    if config.sampling.fuse_lora and config.model.quantize == NONE and not config.model.stream:
        place_stacks(policy.transformer, device)
    policy.place_transformer(device)
    torch.cuda.empty_cache()  # what packing and casting needed
    size = policy.size_of(prompt, Size(*config.sampling.size))
    check_adapter(policy, cache.batch([prompt], size), size, targets=adapter_targets(config, policy))


def freeze_idle_layers(policy: Policy, *, targets: tuple[str, ...]) -> None:
    """Freeze the adapted layers that no image depends on, so that no process waits for their gradients.

    What Qwen-Image's last block makes of the text, for one, is thrown away.

    Args:
        policy: with its adapter.
        targets: the suffixes of the adapter's modules.

    Raises:
        ValueError: if all layers of a target are idle: training it would train nothing.
    """
    adapted = set(_second_matrices(policy))
    _check_targets(policy, targets, learning=adapted - policy.idle_layers)
    for name in adapted & policy.idle_layers:
        policy.transformer.get_submodule(name).requires_grad_(False)


def _second_matrices(policy: Policy) -> dict[str, nn.Parameter]:
    """Adapted layer → its B."""
    parameters = policy.transformer.named_parameters()
    return {name.split(".lora_B.")[0]: parameter for name, parameter in parameters if ".lora_B." in name}


def _check_targets(policy: Policy, targets: tuple[str, ...], *, learning: Collection[str]) -> None:
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in learning):
            raise ValueError(
                f"adapter target {target!r} changes nothing that {type(policy.transformer).__name__} generates: "
                "no finite gradient reaches it; leave it out of adapter.targets"
            )


def check_adapter(policy: Policy, conditioning: Conditioning, size: Size, *, targets: tuple[str, ...]) -> set[str]:
    """Check that a new adapter can change the policy's images, by one forward and backward at σ = ½.

    Args:
        policy: with its adapter.
        conditioning: a batch of one.
        size: what that is sampled at.
        targets: the suffixes of the adapter's modules.

    Returns:
        The adapted layers that learn and that this output does not depend on.

    Raises:
        ValueError: if a target has no layer that changes the output: training it would train nothing.
    """
    with torch.enable_grad():
        x_BNC = policy.noise([0], size)
        velocity = policy.velocity(x_BNC, torch.full((1,), 0.5, device=x_BNC.device), conditioning, size)
        velocity.square().mean().backward()
    # A LoRA starts as the identity (B = 0), so its effect shows in gradients: if the velocity's gradient by a module's
    # B is zero, no step will ever move it.
    seconds = {name: second for name, second in _second_matrices(policy).items() if second.requires_grad}
    gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in seconds.values()]
    # Read together: 342 modules of FLUX.1 would wait for the card three times each.
    flags = torch.stack([torch.stack([gradient.any(), gradient.isfinite().all()]) for gradient in gradients]).tolist()
    policy.transformer.zero_grad(set_to_none=True)
    moves = {name: (moved, finite) for name, (moved, finite) in zip(seconds, flags, strict=True)}
    _check_targets(policy, targets, learning=[name for name in moves if all(moves[name])])
    return {name for name, (moved, _) in moves.items() if not moved}


@dataclass(slots=True)
class RunJudges:
    """Who answers the rewards' questions, and who answers for the measures that are never rewarded."""

    rewards: Judge | None = None
    held_out: Judge | None = None

    def open(
        self,
        config: PolicyConfig,
        *,
        in_process: bool,
        device: torch.device,
        processes: int,
        resumed: bool = False,
    ) -> None:
        """Open those judges of the config that run in this process, or those that do not.

        Raises:
            ValueError: if one of another process refuses.
            ConnectionError: if nobody answers; UnreachableError if the run was `resumed`.
        """
        place = {"device": device, "processes": processes}
        if config.judge and JUDGES[config.judge.backend].in_process == in_process:
            self.rewards = _opened(config.judge, resumed=resumed, **place)
        options = config.evaluation.judge
        if options and JUDGES[options.backend].in_process == in_process:
            self.held_out = _opened(options, resumed=resumed, **place)

    def close(self) -> None:
        """End what they run beside the training."""
        close_judge(self.rewards)
        close_judge(self.held_out)


def _opened(options: BackendOptions, *, resumed: bool, **place: Any) -> Judge:
    if not resumed:
        return open_judge(options, **place)
    try:
        return open_judge(options.on_resume(), **place)
    except ConnectionError as fault:
        raise UnreachableError(f"{fault}; start it again, and go on with --resume auto") from None


def build_run_rewards(
    configs: Sequence[RewardConfig],
    functions: Mapping[str, RewardFunction],
    *,
    judge: Judge | None,
    device: torch.device,
    checked: Sequence[Prompt],
    tried: Sequence[Prompt],
    size: tuple[int, int],
    resumed: bool = False,
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
        resumed: whether a service that does not answer has answered this run before, and is waited for.
    """
    built = build_rewards([c for c in configs if c.name not in functions], judge=judge, device=device)
    rewards: dict[str, Reward] = {
        c.key: FunctionReward(functions[c.name]) if c.name in functions else built[c.key] for c in configs
    }
    for reward in rewards.values():
        reward.check(checked)
        if resumed and isinstance(reward, KeepsAnswers):
            reward.keep_answers(Answers())
    # A judge has shown already that it answers, when it was met or loaded.
    judgeless = {key: reward for key, reward in rewards.items() if not hasattr(reward, "judge")}
    smoke_test(judgeless, tried, size=Size(*size))
    return rewards


def build_optimizer(config: PolicyConfig, policy: Policy, *, device: torch.device) -> torch.optim.Optimizer:
    """AdamW over the adapter's weights; on a card one kernel updates many of them."""
    return torch.optim.AdamW(
        [parameter for parameter in policy.transformer.parameters() if parameter.requires_grad],
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        weight_decay=config.optimizer.weight_decay,
        fused=device.type == "cuda" or None,
    )
