"""Checkpoints of a run on this machine, absent files, and the published architectures that replace absent configs.

The hub is not asked: its names are looked up in the local cache only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
from pacorl.rewards.clip import ClipEncoder
from pacorl.rewards.consistency import EditConsistency
from pacorl.rewards.reward import Reward
from pacorl.types import TINY, Prompt

JUDGE_PARTS: Parts = read_object(next(iter(BASES.values())))
"""Qwen2.5-VL-7B as published, the base of PaCo-Reward-7B: 8.29 B parameters."""
CLIP_CONFIG: JsonObject = read_object(Path(__file__).with_name("clip.json"))
"""CLIP ViT-H-14 as published, of CLIP-T and CLIP-I: 986 M parameters. Every CLIP is planned as this one."""


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
    source, key = model.checkpoint, "model.checkpoint"
    needed = [name for name in spec.parts if name not in WITHOUT_WEIGHTS]
    if source.endswith(SINGLE_FILE):
        # The transformer alone, beside the published other parts.
        check_single_file(source)
        source = spec.published
        needed.remove("transformer")
    folder = _folder(str(spec.committed.folder) if source == TINY else source, marker=PIPELINE)
    if not folder:
        shapes = [spec.parts[name] for name in needed]
        what = f"a diffusers checkpoint, planned as {spec.published}"
        return Checkpoint(spec.parts, [_absence(key, source, what, shapes, OF_PIPELINE)])
    spec.check_source(str(folder))
    saved = {name: _json(folder / name / "config.json") for name in spec.parts}
    saved["processor"] = _processor(folder / "processor")
    configs = {name: saved.get(name) or config for name, config in spec.parts.items()}
    lacking = [name for name in needed if not _has_weights(folder / name)]
    if not lacking:
        return Checkpoint(configs, (), folder)
    shapes = [configs[name] for name in lacking]
    what = f"the weights of {', '.join(lacking)}"
    return Checkpoint(configs, [_absence(key, source, what, shapes, OF_PIPELINE)], folder)


def judge(settings: JudgeSettings | None, *, key: str) -> Checkpoint:
    """Read a judge's configs, `model` and `processor` (image options); empty for a judge behind HTTP, or without one.

    Args:
        settings: the config's section.
        key: the config's key of its checkpoint.
    """
    if settings is None or settings.remote:
        return Checkpoint({})
    # A LoRA names its base, whose configs have the shapes.
    return vision_language_model(base_of(settings.checkpoint) or settings.checkpoint, key=key)


def vision_language_model(source: str, *, key: str) -> Checkpoint:
    """Read the configs of a judge or its base: `model` and `processor` (image options)."""
    folder = _folder(str(EMBEDDED.get(source, source)), marker="config.json")
    if folder is None:
        # The published base that the name contains, or else the first.
        base = next((base for base in BASES if base.lower() in source.lower()), next(iter(BASES)))
        configs = read_object(BASES[base])
        return Checkpoint(configs, [_absence(key, source, f"a judge, planned as {base}", [configs["model"]])])
    configs = {"model": _json(folder / "config.json"), "processor": _processor(folder) or JUDGE_PARTS["processor"]}
    absences = [] if _has_weights(folder) else [_absence(key, source, "its weights", [configs["model"]])]
    return Checkpoint(configs, absences, folder)


def _processor(folder: Path) -> JsonObject:
    """Read a processor's image options from either of transformers' two files."""
    saved = _json(folder / "preprocessor_config.json") or _json(folder / "processor_config.json")
    return image_options(saved.get("image_processor", saved))


def image_options(saved: JsonObject) -> JsonObject:
    """Keep the saved options of an image processor that decide an image's size."""
    names = ("patch_size", "merge_size", "min_pixels", "max_pixels", "size")
    return {name: saved[name] for name in names if saved.get(name)}


# --- rewards ---------------------------------------------------------------------------------------------------


def rewards_of(config: PolicyConfig, *, judge: Judge | None = None) -> Iterator[tuple[str, Reward]]:
    """List (config key, reward) of the run and its evaluation, without loading weights.

    Rewards of users' files are left out, because making one executes its file.
    """
    for key, rewards in (("rewards", config.rewards), ("evaluation.rewards", config.evaluation.rewards)):
        built_in = [reward for reward in rewards if ".py:" not in reward.name]
        for name, reward in build_rewards(built_in, judge=judge).items():
            yield f"{key}.{name}", reward


def clip_encoders(config: PolicyConfig) -> dict[str, ClipEncoder]:
    """Map config keys to the encoders of their rewards, which are not loaded."""
    encoders = {f"{key}.args.checkpoint": getattr(reward, "clip", None) for key, reward in rewards_of(config)}
    return {key: encoder for key, encoder in encoders.items() if isinstance(encoder, ClipEncoder)}


def planned_images(config: PolicyConfig, prompts: Sequence[Prompt] = ()) -> int:
    """Count the sources and references of a prompt at most; by the rewards if the prompts are absent."""
    spec = config.generator
    if prompts:
        return max(len(prompt.sources) + len(prompt.references) for prompt in prompts)
    about_edits = any(isinstance(reward, EditConsistency) for _, reward in rewards_of(config))
    return int(spec.edits and (not spec.sets or about_edits))


# --- absences --------------------------------------------------------------------------------------------------


def absences_of(config: PolicyConfig) -> Iterator[MissingFile]:
    """List the absent files of a run besides its checkpoints: prompts, models of rewards, adapters."""
    data = config.prompts
    prompts = [("prompts.train", data.train), ("prompts.evaluation", data.evaluation)]
    for key, source in [*prompts, *(("prompts.benchmarks", name) for name in data.benchmarks)]:
        if not has_prompts(source):
            yield MissingFile(key, source, _prompts_remedy(config, source))
    for key, encoder in clip_encoders(config).items():
        folder = _folder(encoder.checkpoint, marker="config.json")
        if not folder or not _has_weights(folder):
            yield _absence(key, encoder.checkpoint, "a CLIP", [CLIP_CONFIG], OF_MODEL)
    yield from absent_adapters("adapter.start", config.adapter.start)
    if config.judge:
        yield from absent_adapters("judge.adapter", config.judge.adapter)


def has_prompts(source: str) -> bool:
    """Return whether prompts are here, as those of the tiny world always are."""
    return source.startswith("tiny:") or Path(source).exists()


def _prompts_remedy(config: PolicyConfig, source: str) -> str:
    if not planned_images(config):
        return "`pacorl data t2is`; or name a JSONL or text file of your own"
    split = f"`pacorl data {config.generator.edit_data} --test 128 --out {Path(source).parent}`"
    return f"`pacorl data gedit`, then {split}; or name a JSONL of your own edits ({{image, instruction}})"


def absent_adapters(key: str, source: str) -> Iterator[MissingFile]:
    """Yield an adapter that is absent; none if it is here, or the key is empty."""
    try:
        if source:
            adapter_file(source, fetch=False)
    except (ValueError, OSError):
        yield _absence(key, source, "a LoRA")


def silent_judge(key: str, settings: JudgeSettings | None) -> Iterator[MissingFile]:
    """Yield a judge over HTTP that does not answer one request for its models."""
    if settings and settings.remote:
        try:
            close_judge(open_judge(settings, device="cpu", startup=0))
        except (ValueError, OSError, RuntimeError) as fault:
            yield MissingFile(key, settings.checkpoint, str(fault))


def _absence(
    key: str, source: str, what: str, shapes: Sequence[Mapping[str, Any]] = (), files: Sequence[str] = ()
) -> MissingFile:
    """Describe an absent checkpoint.

    Args:
        key: the config's key.
        source: its value.
        what: what is absent.
        shapes: configs of the models, if they are known.
        files: options of the download that choose what is read.
    """
    in_repo = HUB_PATH.fullmatch(source)
    is_here = Path(source).expanduser().exists()
    if source == TINY:
        return MissingFile(key, source, f"{what}: `python -m research.tiny` makes it again")
    if in_repo and not is_here:
        return MissingFile(key, source, f"{what}: `hf download {in_repo['repo']} --include '{in_repo['path']}*'`")
    if is_here or not HUB_NAME.fullmatch(source):
        return MissingFile(key, source, f"{what}: put it into the folder {source}, or name a model of the hub")
    # In bf16, as they are published.
    models = [model_on_meta(shape, dtype=torch.bfloat16) for shape in shapes]
    size = sum(weight.nbytes for model in models for weight in model.parameters())
    command = f"`{download_command(source, *files)}`" + (f", {size / 10**9:.0f} GB" if size else "")
    if any(spec.gated and spec.published == source for spec in POLICIES.values()):
        command = f"gated; accept the licence at https://huggingface.co/{source}, `hf auth login`, then {command}"
    return MissingFile(key, source, f"{what}: {command}", size)


# --- folders ---------------------------------------------------------------------------------------------------


def _folder(source: str, *, marker: str) -> Path | None:
    """Find the local folder with the file `marker`: the named one, or the newest in the hub's cache."""
    file = local_file(str(Path(source).expanduser()), marker)
    return file.parent if file else None


def _has_weights(folder: Path) -> bool:
    """Check that a folder has weights: every shard that its index names, or one file."""
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if not indices:
        return any(folder.glob("*.safetensors"))
    # An interrupted download leaves the index and some of the shards.
    return all((folder / shard).exists() for shard in set(_json(indices[0])["weight_map"].values()))


def _json(path: Path) -> JsonObject:
    """Read a JSON file's mapping; empty without the file. Raises ValueError if it holds no mapping."""
    return read_object(path, fix="fetch the checkpoint again") if path.exists() else {}
