"""Python values as the inputs of a run: a model, rewards and prompts become its config.

    inputs = run_inputs("tiny", rewards=[redness], prompts=["a red hero", "a blue hero"], epochs=2)
    inputs.config, inputs.functions

Prompts become files of the run's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pacorl.config.base import ConfigError, merged, read_config, validated
from pacorl.config.recipes import YAML, recipe_names
from pacorl.config.reward_section import RewardConfig
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.start import Resume, named_start
from pacorl.io.documents import blamed_on
from pacorl.io.files import text_digest
from pacorl.models.policies import POLICIES, kind_of, model_section
from pacorl.records.prompts import record_prompt, save_prompts, sentence_prompt
from pacorl.rewards.reward import RewardFunction
from pacorl.types import Prompt

AnyPrompts = str | Path | Iterable[str | Prompt | Mapping[str, Any]]
"""A source as in a config, or texts, prompts, or the records of a list or a `datasets.Dataset`."""
AnyRewards = Mapping[str, Callable[..., Any]] | Sequence[Callable[..., Any] | str | Mapping[str, Any] | RewardConfig]
"""Functions by name; or a list of functions, names of rewards, and sections of a config's `rewards`."""


class RunInputs(NamedTuple):
    """A run's config, and the Python objects that it names."""

    config: PolicyConfig
    functions: Mapping[str, RewardFunction]
    """Rewards by name."""
    pipeline: Any = None
    """A loaded diffusers pipeline; None to load the config's checkpoint."""


def run_inputs(
    source: Any,
    /,
    *,
    rewards: AnyRewards | None = None,
    prompts: AnyPrompts | None = None,
    evaluation_prompts: AnyPrompts | None = None,
    resume: Resume = False,
    **settings: Any,
) -> RunInputs:
    """Build a run's config from Python values; see `PolicyTrainer`. Prompts are written into the run's folder.

    Raises:
        ValueError: an input is of another form or a setting is invalid; one line.
    """
    # 1. Rewards. A recipe's own rewards and measures do not join them; those of a whole config stay.
    whole = source if isinstance(source, PolicyConfig) else None
    sections, functions = _split(rewards or ())
    changes: dict[str, Any] = {}
    if rewards is not None and not (whole and isinstance(rewards, Mapping)):
        changes = {"rewards": sections} if whole else {"rewards": sections, "evaluation": {"rewards": []}}

    # 2. Settings by the config's keys.
    changes = merged(changes, {key: value for key, value in settings.items() if value != {}})
    config = whole
    if changes or not config:
        config = validated(PolicyConfig, merged(_document(source), changes))

    # 3. Prompts, as files of the run.
    if prompts is not None or evaluation_prompts is not None:
        named_start(config.out, resume)  # refuses the folder of another run before anything is written there
        prompts = prompts if prompts is None or isinstance(prompts, str | Path) else list(prompts)
        train = config.prompts.train if prompts is None else _source(config, prompts, "prompts")
        evaluation = train if prompts is not None else config.prompts.evaluation
        if evaluation_prompts is not None:
            evaluation = _source(config, evaluation_prompts, "evaluation_prompts")
        update: dict[str, Any] = {
            "prompts": config.prompts.model_copy(update={"train": train, "evaluation": evaluation})
        }
        if isinstance(prompts, list) and not whole and "prompts_per_epoch" not in settings:
            # Whole updates; a list is often shorter than an epoch of the paper.
            updates = config.optimizer.updates_per_epoch
            update["prompts_per_epoch"] = min(config.prompts_per_epoch, -(-len(prompts) // updates) * updates)
        config = config.model_copy(update=update)
    return RunInputs(config, functions, None if isinstance(source, str | Path | PolicyConfig) else source)


def _document(source: Any) -> dict[str, Any]:
    """Return the keys of a config, a recipe, a YAML file, a kind, a checkpoint or a pipeline."""
    if isinstance(source, PolicyConfig):
        return source.model_dump(mode="json")
    if isinstance(source, str | Path):
        name = str(source)
        if name not in recipe_names() and not name.endswith(YAML):
            if name in POLICIES:
                return {"model": {"kind": name}}
            if "/" in name or Path(name).exists():
                return {"model": {"kind": kind_of(name), "checkpoint": name}}
        return read_config(Path(name))

    # A loaded pipeline names its own kind and checkpoint.
    section = model_section(source)
    loaded = getattr(source.transformer, "peft_config", {})
    if loaded:
        raise ConfigError(
            f"the pipeline has the adapter {next(iter(loaded))!r} loaded; call its fuse_lora() and "
            "unload_lora_weights(), or load it with adapter={'start': …}"
        )
    return {"model": section}


def _split(rewards: AnyRewards) -> tuple[list[Any], dict[str, RewardFunction]]:
    """Split rewards into sections of a config and functions, which the config names."""
    if isinstance(rewards, Mapping):
        return [{"name": name} for name in rewards], dict(rewards)
    if callable(rewards) or isinstance(rewards, str):
        raise ConfigError(
            f"rewards is {rewards!r}; give a list, e.g. rewards=[{getattr(rewards, '__name__', rewards)}]"
        )
    sections: list[Any] = []
    functions: dict[str, RewardFunction] = {}
    for reward in rewards:
        if callable(reward):
            # A function's name is its key in metrics.
            name = getattr(reward, "__name__", type(reward).__name__)
            if name in functions or not name.isidentifier():
                raise ConfigError(
                    f"a reward is named {name}, which cannot be a metric's name, or is another's too; give rewards by "
                    "names of your own: rewards={'my_reward': …}"
                )
            functions[name] = reward
            sections.append({"name": name})
        elif isinstance(reward, str):
            sections.append({"name": reward})
        else:
            sections.append(reward.model_dump() if isinstance(reward, RewardConfig) else reward)
    return sections, functions


def _source(config: PolicyConfig, prompts: AnyPrompts, key: str) -> str:
    """Return the source of prompts as a config names it; texts, prompts and records are written to a file."""
    if isinstance(prompts, str | Path):
        return str(prompts)
    model = config.model.checkpoint
    read = []
    for number, item in enumerate(prompts):
        with blamed_on(f"{key}[{number}]"):
            # Ids are positions, also of prompts that bring an id of their own.
            if isinstance(item, Prompt):
                read.append(replace(item, id=number))
            elif isinstance(item, str):
                read.append(sentence_prompt(item, number, model=model))
            elif isinstance(item, Mapping):
                read.append(record_prompt(item, number, model=model))
            else:
                raise ValueError(f"a {type(item).__name__}; give a text, a Prompt, or a record")
    if len({bool(prompt.sources) for prompt in read}) != 1:
        raise ConfigError(f"{key} is empty, or holds sets and edits; give a list of one of them")

    # Named by content, so that a resumed run finds its own file, and an existing file is equal.
    name = {"prompts": "train", "evaluation_prompts": "evaluation"}[key]
    path = config.out / "prompts" / f"{name}-{text_digest(repr(read))[:8]}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        save_prompts(read, path)
    return str(path)
