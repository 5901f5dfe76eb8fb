"""Checkpoints of a run on this machine, absent files, and the published architectures that replace absent configs.

The hub is not asked: its names are looked up in the local cache only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pacorl.config.reward_section import MeasureConfig
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.documents import JsonObject, read_object
from pacorl.io.hub import HUB_NAME, OF_MODEL, OF_PIPELINE, PIPELINE, download_command, local_file
from pacorl.judge import open_judge
from pacorl.judge.judge import Judge, JudgeSettings, close_judge
from pacorl.judge.local import BASES, EMBEDDED, base_of
from pacorl.models.lora import HUB_PATH, adapter_file
from pacorl.models.policies import POLICIES
from pacorl.models.policies.policy import WITHOUT_WEIGHTS, Parts, PolicyOptions
from pacorl.models.policies.spec import SINGLE_FILE, PolicySpec, check_single_file
from pacorl.plan.generators import model_on_meta
from pacorl.rewards import build_rewards
from pacorl.rewards.clip import ClipEncoder, ClipReward
from pacorl.rewards.consistency import EditConsistency
from pacorl.rewards.reward import Reward
from pacorl.types import TINY, Prompt

JUDGE_PARTS: Parts = read_object(next(iter(BASES.values())))
"""Qwen2.5-VL-7B as published, the base of PaCo-Reward-7B: 8.29 B parameters."""
CLIP_PARTS: Parts = {"model": read_object(Path(__file__).with_name("clip.json"))}
"""CLIP ViT-H-14 as published, of CLIP-T and CLIP-I: 986 M parameters. Every absent CLIP is planned as this one."""
IMAGE_OPTIONS = ("patch_size", "merge_size", "min_pixels", "max_pixels", "size")
"""Options of an image processor that decide an image's size."""


@dataclass(frozen=True, slots=True)
class MissingFile:
    """A run's file or checkpoint that is absent from this machine, or a judge that does not answer."""

    key: str
    """The config key that names it."""
    source: str
    """The key's value."""
    remedy: str
    """Instructions to get it."""
    bytes: int = 0
    """Size of a download of published weights; 0 if it is unknown."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's configs, read without its weights."""

    configs: Parts
    """Config.json of each component; image options of a processor."""
    absences: Sequence[MissingFile] = ()
    folder: Path | None = None


# --- checkpoints -----------------------------------------------------------------------------------------------


def generator_of(model: PolicyOptions, spec: PolicySpec) -> Checkpoint:
    """Read the configs of a generator; those that are absent are the published ones.

    Raises:
        ValueError: The folder holds another kind of model.
    """
    source = model.checkpoint
    here: Collection[str] = WITHOUT_WEIGHTS
    if source.endswith(SINGLE_FILE):
        # The transformer alone, beside the published other parts.
        check_single_file(source)
        source = spec.published
        here = {*here, "transformer"}
    published = f"a diffusers checkpoint, planned as {spec.published}"
    folder = str(spec.committed.folder) if source == TINY else source
    checkpoint = _checkpoint(
        "model.checkpoint", folder, spec.parts, published, here, marker=PIPELINE, files=OF_PIPELINE
    )
    if checkpoint.folder:
        spec.check_source(str(checkpoint.folder))
    return checkpoint


def judge(key: str, settings: JudgeSettings | None, *, ask: bool = False) -> Checkpoint:
    """Read a judge's configs, `model` and `processor` (image options); empty for a judge behind HTTP, or without one.

    Args:
        key: the config's key of its checkpoint.
        settings: the config's section.
        ask: whether a judge behind HTTP is asked for its models, and is absent if it does not answer.
    """
    if settings is None:
        return Checkpoint({})
    if not settings.remote:
        # A LoRA names its base, whose configs have the shapes.
        return vision_language_model(base_of(settings.checkpoint) or settings.checkpoint, key=key)
    absences = []
    if ask:
        try:
            close_judge(open_judge(settings, device="cpu", startup=0))
        except (ValueError, OSError, RuntimeError) as fault:
            absences.append(MissingFile(key, settings.checkpoint, str(fault)))
    return Checkpoint({}, absences)


def vision_language_model(source: str, *, key: str) -> Checkpoint:
    """Read the configs of a judge or its base: `model` and `processor` (image options)."""
    # The published base that the name contains, or else the first.
    base = next((base for base in BASES if base.lower() in source.lower()), next(iter(BASES)))
    folder = str(EMBEDDED.get(source, source))
    return _checkpoint(key, folder, read_object(BASES[base]), f"a judge, planned as {base}", files=())


def _checkpoint(
    key: str,
    source: str,
    published: Parts,
    what: str,
    here: Collection[str] = WITHOUT_WEIGHTS,
    *,
    marker: str = "config.json",
    files: Sequence[str],
) -> Checkpoint:
    """Read a checkpoint's configs from its folder, the named one or the newest in the hub's cache.

    Args:
        key: the config's key.
        source: its value.
        published: configs in place of absent ones.
        what: description of the checkpoint, if all of it is absent.
        here: components that need no weights here.
        marker: a file of every such checkpoint.
        files: options of the download that choose what is read.
    """
    file = local_file(str(Path(source).expanduser()), marker)
    home = file.parent if file else None
    configs = dict(published)
    lacking = [name for name in published if name not in here]
    for name in published:
        # A pipeline's components have folders of their own.
        folder = home / name if home and marker == PIPELINE else home
        if folder:
            configs[name] = _saved(folder, name) or configs[name]
            if name in lacking and _has_weights(folder):
                lacking.remove(name)
    if not lacking:
        return Checkpoint(configs, (), home)
    if home:
        what = f"the weights of {', '.join(lacking)}"
    return Checkpoint(configs, [_absence(key, source, what, [configs[name] for name in lacking], files)], home)


def _saved(folder: Path, name: str) -> JsonObject:
    """Read a component's config; of a processor the image options, from either of transformers' two files."""
    if name != "processor":
        return _json(folder / "config.json")
    saved = _json(folder / "preprocessor_config.json") or _json(folder / "processor_config.json")
    saved = saved.get("image_processor", saved)
    return {option: saved[option] for option in IMAGE_OPTIONS if saved.get(option)}


def _has_weights(folder: Path) -> bool:
    """Check that a folder has weights: every shard that its index names, or one file."""
    for index in folder.glob("*.safetensors.index.json"):
        # An interrupted download leaves the index and some of the shards.
        return all((folder / shard).exists() for shard in _json(index)["weight_map"].values())
    return any(folder.glob("*.safetensors"))


def _json(path: Path) -> JsonObject:
    """Read a JSON file's mapping; empty without the file. Raises ValueError if it holds no mapping."""
    return read_object(path, fix="fetch the checkpoint again") if path.exists() else {}


# --- rewards ---------------------------------------------------------------------------------------------------


def rewards_of(rewards: Sequence[MeasureConfig], *, judge: Judge | None = None) -> Mapping[str, Reward]:
    """Build rewards by key, without loading weights.

    Rewards of users' files are left out, because making one executes its file.
    """
    return build_rewards([reward for reward in rewards if ".py:" not in reward.name], judge=judge)


def clip_encoders(config: PolicyConfig) -> set[ClipEncoder]:
    """Return the encoders of a run's rewards, which are not loaded; rewards of one checkpoint share an encoder."""
    encoders = set()
    for rewards in (config.rewards, config.evaluation.rewards):
        for reward in rewards_of(rewards).values():
            if isinstance(reward, ClipReward):
                encoders.add(reward.clip)
    return encoders


def planned_images(config: PolicyConfig, prompts: Sequence[Prompt] = ()) -> int:
    """Count the sources and references of a prompt at most; by the rewards if the prompts are absent."""
    spec = config.generator
    if prompts:
        return max(len(prompt.sources) + len(prompt.references) for prompt in prompts)
    about_edits = EditConsistency.name in {reward.name for reward in config.rewards}
    return int(spec.edits and (not spec.sets or about_edits))


# --- absences --------------------------------------------------------------------------------------------------


def absent_prompts(config: PolicyConfig) -> Iterator[MissingFile]:
    """List the absent prompts of a run; those of the tiny world are always here."""
    data = config.prompts
    remedy = "`pacorl data t2is`; or name a JSONL or text file of your own"
    if planned_images(config):
        split = f"`pacorl data {config.generator.edit_data} --test 128 --out {Path(data.train).parent}`"
        remedy = f"`pacorl data gedit`, then {split}; or name a JSONL of your own edits ({{image, instruction}})"
    files = [("train", data.train), ("evaluation", data.evaluation)]
    for key, source in [*files, *(("benchmarks", name) for name in data.benchmarks)]:
        if not source.startswith("tiny:") and not Path(source).exists():
            yield MissingFile(f"prompts.{key}", source, remedy)


def absences_of(config: PolicyConfig) -> Iterator[MissingFile]:
    """List the absent models of rewards and adapters of a run."""
    for encoder in clip_encoders(config):
        yield from _checkpoint("rewards", encoder.checkpoint, CLIP_PARTS, "a CLIP", files=OF_MODEL).absences
    yield from absent_adapters("adapter.start", config.adapter.start)
    if config.judge:
        yield from absent_adapters("judge.adapter", config.judge.adapter)


def absent_adapters(key: str, source: str) -> Iterator[MissingFile]:
    """Yield an adapter that is absent; none if it is here, or the key is empty."""
    try:
        if source:
            adapter_file(source, fetch=False)
    except (ValueError, OSError):
        yield _absence(key, source, "a LoRA")


def _absence(
    key: str, source: str, what: str, shapes: Sequence[Mapping[str, Any]] = (), files: Sequence[str] = ()
) -> MissingFile:
    """Describe an absent checkpoint; `shapes` are the configs of its models, if they are known."""
    in_repo = HUB_PATH.fullmatch(source)
    is_here = Path(source).expanduser().exists()
    if in_repo and not is_here:
        return MissingFile(key, source, f"{what}: `hf download {in_repo['repo']} --include '{in_repo['path']}*'`")
    if is_here or not HUB_NAME.fullmatch(source):
        return MissingFile(key, source, f"{what}: put it into the folder {source}, or name a model of the hub")
    # In bf16, as they are published.
    size = 0
    for shape in shapes:
        size += sum(weight.nbytes for weight in model_on_meta(shape, dtype=torch.bfloat16).parameters())
    command = f"`{download_command(source, *files)}`" + (f", {size / 10**9:.0f} GB" if size else "")
    if any(spec.gated and spec.published == source for spec in POLICIES.values()):
        command = f"gated; accept the licence at https://huggingface.co/{source}, `hf auth login`, then {command}"
    return MissingFile(key, source, f"{what}: {command}", size)
