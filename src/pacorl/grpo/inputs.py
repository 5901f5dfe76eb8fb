"""Python values as the inputs of a run: a model, rewards and prompts become its config.

    inputs = run_inputs("tiny", rewards=[redness], prompts=["a red hero", "a blue hero"], epochs=2)
    inputs.config, inputs.functions

Prompts become files of the run's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, slots=True)
class RunInputs:
    """A run's config, and the Python objects that it names."""

    config: PolicyConfig
    """The run's config."""
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
    if isinstance(settings.get("objective"), str):
        settings = {**settings, "objective": {"name": settings["objective"]}}
    if isinstance(prompts, Mapping):  # the config's section
        settings = {**settings, "prompts": prompts}
        prompts = None

    # 1. Rewards. A recipe's own rewards and measures do not join them; those of a whole config stay.
    whole = source if isinstance(source, PolicyConfig) else None
    sections, functions = _split(rewards or ())
    changes: dict[str, Any] = {}
    if rewards is not None and not (whole and isinstance(rewards, Mapping)):
        changes["rewards"] = sections
        if not whole:
            changes["evaluation"] = {"rewards": []}

    # 2. Settings by the config's keys.
    changes = merged(changes, {key: value for key, value in settings.items() if value != {}})
    config = whole
    if changes or not config:
        config = validated(PolicyConfig, merged(_document(source), changes))

    # 3. Prompts, as files of the run.
    if prompts is not None or evaluation_prompts is not None:
        named_start(config.out, resume)  # refuses the folder of another run before anything is written there
        update = _with_prompts(config, prompts, evaluation_prompts)
        if whole or "prompts_per_epoch" in settings:
            update.pop("prompts_per_epoch", None)
        config = config.model_copy(update=update)
    return RunInputs(config, functions, None if isinstance(source, str | Path | PolicyConfig) else source)


# --- the model ---------------------------------------------------------------------------------------------------


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


# --- rewards -----------------------------------------------------------------------------------------------------


def _split(rewards: AnyRewards) -> tuple[list[Any], dict[str, RewardFunction]]:
    """Split rewards into sections of a config's `rewards`, and the functions that these name."""
    if isinstance(rewards, Mapping):
        return [{"name": name} for name in rewards], dict(rewards)
    if callable(rewards) or isinstance(rewards, str):
        raise ConfigError(f"rewards is {rewards!r}; give a list, e.g. rewards=[{_name_of(rewards)}]")

    # A function's name is its key in metrics.
    sections: list[Any] = []
    functions: dict[str, RewardFunction] = {}
    for position, reward in enumerate(rewards):
        if isinstance(reward, str):
            sections.append({"name": reward})
            continue
        if not callable(reward):
            sections.append(reward.model_dump() if isinstance(reward, RewardConfig) else reward)
            continue
        name = _name_of(reward)
        if name in functions or not name.isidentifier():
            raise ConfigError(
                f"rewards[{position}] is named {name}, which cannot be a metric's name, or is another's too; give "
                "rewards by names of your own: rewards={'my_reward': …}"
            )
        functions[name] = reward
        sections.append({"name": name})
    return sections, functions


def _name_of(reward: Any) -> str:
    return str(getattr(reward, "__name__", type(reward).__name__))


# --- prompts -----------------------------------------------------------------------------------------------------


def _with_prompts(config: PolicyConfig, train: AnyPrompts | None, evaluation: AnyPrompts | None) -> dict[str, Any]:
    """Write prompts into the run's folder, and return the config's changed keys."""
    section: dict[str, str] = {}
    changes: dict[str, Any] = {}
    for key, source in {"train": train, "evaluation": evaluation}.items():
        if isinstance(source, str | Path):
            section[key] = str(source)
        elif source is not None:
            given = "prompts" if key == "train" else "evaluation_prompts"
            prompts = _read(source, key=given, model=config.model.checkpoint)
            section[key] = _written(prompts, config.out / "prompts", name=key)
            if key == "train":
                # Whole updates; a list is often shorter than an epoch of the paper.
                updates = config.optimizer.updates_per_epoch
                least = -(-len(prompts) // updates) * updates
                changes["prompts_per_epoch"] = min(config.prompts_per_epoch, least)

    if train is not None and evaluation is None:
        section["evaluation"] = section["train"]
    return {**changes, "prompts": config.prompts.model_copy(update=section)}


def _read(source: Any, *, key: str, model: str) -> list[Prompt]:
    """Convert texts, prompts and records to prompts."""
    # Ids are positions, also of prompts that bring an id of their own.
    prompts = []
    for number, item in enumerate(source):
        with blamed_on(f"{key}[{number}]"):
            if isinstance(item, Prompt):
                prompts.append(replace(item, id=number))
            elif isinstance(item, str):
                prompts.append(sentence_prompt(item, number, model=model))
            elif isinstance(item, Mapping):
                prompts.append(record_prompt(item, number, model=model))
            else:
                fix = "give a text, a Prompt, or a record with 'prompt', or with 'theme' and 'panels'"
                raise ValueError(f"a {type(item).__name__}; {fix}")
    if not prompts:
        raise ConfigError(f"{key} is empty; give at least one text")
    if len({bool(prompt.sources) for prompt in prompts}) > 1:
        raise ConfigError(f"{key} holds sets and edits; give a list of one of them")
    return prompts


def _written(prompts: Sequence[Prompt], folder: Path, *, name: str) -> str:
    """Write prompts to a file named by their content, so that a resumed run finds its own."""
    path = folder / f"{name}-{text_digest(repr(prompts))[:8]}.jsonl"
    # Its name is its content's hash, so an existing file is equal.
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_prompts(prompts, path)
    return str(path)
