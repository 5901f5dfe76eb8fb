"""Builders of a policy run's parts from its config. Each rejects settings that cannot work."""

from collections.abc import Mapping, Sequence

import torch

from pacorl.config.base import ConfigError
from pacorl.config.user_files import blamed_on_code
from pacorl.core.metric_names import HELD_OUT
from pacorl.core.objectives import OBJECTIVES
from pacorl.core.objectives.contract import check_objective
from pacorl.core.objectives.grpo_clip import PANEL_RANGE, SET_RANGE, ClippedOptions
from pacorl.grpo.lora_config import LoraConfig
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.net import UnreachableError
from pacorl.judge import open_judge
from pacorl.judge.judge import Judge
from pacorl.models.adapters import add_lora, start_from
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.models.policies.policy import check_images
from pacorl.records.leaks import check_leaks
from pacorl.records.prompts import load_prompts
from pacorl.rewards import asks_judge, build_rewards, check_rewards, reward_spec
from pacorl.rewards.reward import Reward, RewardFunction, smoke_test
from pacorl.rewards.spec import UserReward
from pacorl.runtime.compiled import compile_blocks, compile_decoder
from pacorl.types import Prompt, Size


def checked_config(config: PolicyConfig, functions: Mapping[str, RewardFunction]) -> PolicyConfig:
    """Check the config as far as possible without weights, and drop unused judges.

    Args:
        functions: rewards that are Python functions, by their names in the config.

    Raises:
        ValueError: if the checkpoint is distilled, or a reward, its arguments or the user's own objective are wrong.
    """
    objective = config.objective.name
    if objective in OBJECTIVES.users:
        with blamed_on_code("objective", objective):
            check_objective(OBJECTIVES[objective], config.objective)
    config.generator.check_trainable(config.model.checkpoint)
    for name in functions:
        if all(reward.name != name for reward in config.rewards):
            raise ConfigError(f"the function {name!r} is no reward of the config; add it as rewards=[{{name: {name}}}]")
    built_in = tuple(reward for reward in config.rewards if reward.name not in functions)
    check_rewards(built_in)
    check_rewards(config.evaluation.rewards, key="evaluation.rewards")
    # Functions cannot use the run's judge, so they do not keep it.
    used = without_idle_judges(config.model_copy(update={"rewards": built_in}))
    return used.model_copy(update={"rewards": config.rewards})


def without_idle_judges(config: PolicyConfig) -> PolicyConfig:
    """Drop the judges that no reward or evaluation reward uses. Idempotent.

    Returns:
        The config, with `judge` and `evaluation.judge` None unless they are used.

    Raises:
        ConfigError: if `judge` is none, and a reward needs it; the message names the reward.
    """
    asking = [f"rewards.{reward.key}" for reward in config.rewards if asks_judge(reward)]
    held_out = [f"evaluation.rewards.{measure.key}" for measure in config.evaluation.rewards if asks_judge(measure)]
    if not config.evaluation.judge:
        asking += held_out
    if asking and config.judge is None:
        raise ConfigError(f"judge is none, and needed by {', '.join(asking)}; set judge.checkpoint=…, or remove them")
    if not held_out:
        config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"judge": ""})})
    if asking:
        return config
    return config.model_copy(update={"judge": None})


def with_credit(
    config: PolicyConfig, functions: Mapping[str, RewardFunction], prompts: Sequence[Prompt]
) -> tuple[PolicyConfig, str]:
    """Choose `advantages.credit` if it is left out: panel if every reward has parts and no prompt is an edit, else set.

    A clip range that is left out follows from it.

    Returns:
        The config, and the choice with its reason; empty if the config made it.
    """
    note = ""
    if config.advantages.credit is None:
        # A panel is credited by its own scores, which every reward must have.
        without = []
        for reward in config.rewards:
            target = functions.get(reward.name) or reward_spec(reward.name).target
            if not hasattr(target, "panel_scores"):
                without.append(reward.key)

        # An edit is one image.
        credit, reason = "panel", "every reward has scores of panels"
        if any(prompt.sources for prompt in prompts):
            credit, reason = "set", "the prompts are edits"
        elif without:
            credit, reason = "set", f"{', '.join(without)} has no scores of panels"
        note = f"advantages.credit is {credit}: {reason}"
        config = config.model_copy(update={"advantages": config.advantages.model_copy(update={"credit": credit})})

    # A panel's ratio is a mean over fewer tokens than a set's, and varies more.
    if isinstance(config.objective, ClippedOptions) and config.objective.clip_range is None:
        clip_range = PANEL_RANGE if config.advantages.credit == "panel" else SET_RANGE
        config = config.model_copy(update={"objective": config.objective.model_copy(update={"clip_range": clip_range})})
    return config, note


def read_prompts(config: PolicyConfig) -> tuple[list[Prompt], list[Prompt], str]:
    """Read training and evaluation prompts, and return a warning if they overlap.

    Raises:
        ValueError: if they overlap and are not the same prompts on purpose, or if the generator does not take their
            images.
    """
    # All training prompts: an epoch draws from them in turn.
    model = config.model.checkpoint
    train = load_prompts(config.prompts.train, model=model)
    limit = config.prompts.evaluation_limit
    evaluation = load_prompts(config.prompts.evaluation, limit=limit, model=model)
    for prompt in [*train, *evaluation]:
        check_images(config.generator.policy, prompt, f"model.kind {config.model.kind}")
    leaks = check_leaks(train, evaluation, deliberate=config.prompts.evaluation == config.prompts.train)
    return train, evaluation, leaks


def build_adapted_policy(config: LoraConfig, *, sizes: Sequence[Size], device: torch.device) -> PipelinePolicy:
    """Build the policy with a trainable adapter, loaded from `adapter.start` if set.

    Its transformer is not on the device yet: encode the prompts, and then call `place_transformer`.

    Raises:
        ValueError: if one of the `sizes` is not supported.
    """
    from accelerate.utils import set_seed

    # torch draws the adapter's initial weights, and users' rewards may draw from the others. NumPy takes 32 bits.
    set_seed(config.seed % 2**32)

    policy = config.generator.load(config.model, device=device, staged=True)
    # Every size of the run, before it has cost an epoch.
    for size in sizes:
        policy.check_size(size)
    # After the sizes are checked: the adapter changes the modules.
    add_adapter(config, policy)
    compile_models(config, policy)

    # A run that continues an earlier adapter.
    if config.adapter.start:
        shape = {"rank": config.adapter.rank, "alpha": config.adapter.alpha}
        start_from(policy.transformer, config.adapter.start, **shape, base=config.model.checkpoint)
    return policy


def add_adapter(config: LoraConfig, policy: PipelinePolicy) -> None:
    """Add the config's adapter to a policy, and enable gradient checkpointing if configured.

    Raises:
        ValueError: if a target matches no linear layer.
    """
    if config.model.gradient_checkpointing:
        policy.transformer.enable_gradient_checkpointing()  # type: ignore[operator]
    targets = tuple(config.adapter.targets or policy.lora_targets)
    add_lora(policy.transformer, rank=config.adapter.rank, alpha=config.adapter.alpha, targets=targets)
    freeze_idle_layers(policy)


def compile_models(config: LoraConfig, policy: PipelinePolicy) -> None:
    """Compile the transformer's blocks and the VAE's decoder, if configured.

    The blocks' own backward then takes the place of gradient checkpointing. Packed weights are unpacked once more for
    it, for which checkpoints around the blocks stay.
    """
    if config.model.compile == "none":
        return
    recompute = config.model.gradient_checkpointing and config.memory == "normal"
    if recompute:
        policy.transformer.disable_gradient_checkpointing()  # type: ignore[operator]
    compile_blocks(policy.transformer, packed=config.memory != "normal", recompute=recompute)
    compile_decoder(policy.pipeline.vae)


def place_transformer(
    config: LoraConfig, policy: PipelinePolicy, *, device: torch.device, sharded: bool = False
) -> None:
    """Move the adapted transformer to the device.

    For FSDP2 it stays in host memory: the launcher moves it to the device block by block, so that no GPU needs room for
    the whole model. Quantised weights go to the device, since processes cannot share them.
    """
    policy.place_transformer("cpu" if sharded and config.memory == "normal" else device)
    torch.cuda.empty_cache()  # buffers of packing and casting


def freeze_idle_layers(policy: PipelinePolicy) -> None:
    """Freeze adapted layers without effect on the image, so that DDP does not wait for their gradients.

    Example: Qwen-Image discards the text output of its last block.
    """
    for name in policy.idle_layers:
        policy.transformer.get_submodule(name).requires_grad_(False)


def open_judges(
    config: PolicyConfig, *, remote: bool, device: torch.device, processes: int, resumed: bool = False
) -> dict[str, Judge]:
    """Open the config's judges elsewhere, or those of this process: `rewards` and `held_out`.

    Remote judges open before any weights load, in-process judges after the encoders have left the device.

    Raises:
        ValueError: if a remote judge refuses.
        ConnectionError: if a judge does not answer; UnreachableError if the run was `resumed`.
    """
    judges = {}
    for name, settings in (("rewards", config.judge), ("held_out", config.held_out_judge)):
        if settings and settings.remote == remote:
            try:
                judges[name] = open_judge(settings, device=device, processes=processes)
            except UnreachableError as fault:
                # A server that has answered this run before is away. The address of a new run may be wrong.
                if resumed:
                    raise
                raise ConnectionError(str(fault)) from None
    return judges


def build_run_rewards(
    config: PolicyConfig,
    functions: Mapping[str, RewardFunction],
    judges: Mapping[str, Judge],
    *,
    device: torch.device,
    train: Sequence[Prompt],
    evaluation: Sequence[Prompt],
) -> tuple[dict[str, Reward], dict[str, Reward]]:
    """Build the rewards in the config's order, and score trial images with each, before the first epoch.

    Returns:
        The rewards, and the held-out rewards of the evaluation, `held_out/NAME`.
    """
    # Functions replace the rewards of their names.
    built_in = [reward for reward in config.rewards if reward.name not in functions]
    built = build_rewards(built_in, judge=judges.get("rewards"), device=device)
    rewards: dict[str, Reward] = {}
    for reward in config.rewards:
        function = functions.get(reward.name)
        rewards[reward.key] = UserReward(function, reward.name) if function else built[reward.key]
    # Without a judge of its own the evaluation asks the rewards' judge.
    held_out_judge = judges.get("held_out") or judges.get("rewards")
    measures = build_rewards(config.evaluation.rewards, judge=held_out_judge, device=device)
    held_out = {f"{HELD_OUT}{key}": measure for key, measure in measures.items()}

    # Every prompt to be scored and trial images.
    for group, checked, tried, size in (
        (rewards, [*train, *evaluation], train, config.sampling.size),
        (held_out, evaluation, evaluation, config.evaluation.size),
    ):
        for key, scorer in group.items():
            scorer.check(checked)
            # Judges are left out: connecting or loading has tested them.
            if not hasattr(scorer, "judge"):
                smoke_test(key, scorer, tried, size=Size(*size), seconds=config.reward_timeout)
    return rewards, held_out
