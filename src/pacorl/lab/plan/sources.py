"""Where a run's checkpoints lie on this machine, what is absent, and what the published models are made of.

Nothing here asks the network: a hub name is looked up in the local cache alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pacorl.config.base import ConfigError
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.documents import read_object
from pacorl.io.hub import HUB_NAME
from pacorl.judge import JUDGE, JUDGES
from pacorl.judge.judge import BackendOptions, InProcessOptions
from pacorl.models.lora.formats import HUB_PATH, PEFT_CONFIG, adapter_file
from pacorl.models.policies import POLICIES
from pacorl.models.policies.policy import WITHOUT_WEIGHTS, Parts, PolicyOptions
from pacorl.models.policies.spec import PolicySpec
from pacorl.records.edits import LANGUAGES
from pacorl.rewards import build_rewards
from pacorl.rewards.clip import AESTHETIC_SOURCE, CLIP_L, Aesthetic, ClipEncoder
from pacorl.rewards.consistency import EditConsistency
from pacorl.rewards.reward import Reward
from pacorl.types import TINY, Prompt

T2IS_HOME = "github.com/X-GenGroup/PaCo-RL, PaCo-GRPO/dataset/T2IS/half_2by2/{train,test}_metadata.jsonl"
GEDIT_COMMAND = "hf download --repo-type dataset stepfun-ai/GEdit-Bench --local-dir GEdit-Bench"

LOCAL_JUDGE = JUDGES[JUDGE.default]
assert LOCAL_JUDGE.architecture is not None
JUDGE_PARTS: Parts = read_object(LOCAL_JUDGE.architecture)
"""Qwen2.5-VL-7B as published, which PaCo-Reward-7B is trained from: 8.29 B parameters."""
CLIP_PARTS: Parts = read_object(Path(__file__).with_name("clip.json"))
"""CLIP as published: ViT-H-14 is that of CLIP-T, CLIP-I and PickScore (986 M parameters), ViT-L-14 that of the
aesthetic head (428 M)."""
NOT_READY = 2
"""Exit code of a dry run if something is absent or at fault."""


@dataclass(frozen=True, slots=True)
class MissingFile:
    """Something that a run needs and that is not on this machine."""

    key: str
    """The config key that names it."""
    source: str
    """What the key says."""
    remedy: str
    """Where to get it."""


def verdict(absences: Sequence[MissingFile], *, faults: int = 0, notes: int = 0) -> str:
    """The last line of a dry run: whether it would run, and what it lacks."""
    keys = dict.fromkeys(absence.key for absence in absences)
    reasons = [f"{len(absences)} absent ({', '.join(keys)})"] if absences else []
    reasons += [f"{faults} at fault"] if faults else []
    if reasons:
        return f"verdict: it would not run: {' and '.join(reasons)}"
    mind = f"; mind the {'note' if notes == 1 else f'{notes} notes'} above" if notes else ""
    return f"verdict: all that it needs is here{mind}"


# --- checkpoints -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint says of itself without being loaded."""

    configs: Parts
    """Component → its config.json; of a processor its image options."""
    absences: tuple[MissingFile, ...] = ()
    note: str = ""
    """Which published model's sizes stand in for its own; empty if its own are here."""
    folder: Path | None = None
    """Where it lies on this machine."""


def generator(config: PolicyConfig) -> Checkpoint:
    """The parts of a run's generator; see `generator_of`."""
    return generator_of(config.model, config.generator)


def generator_of(model: PolicyOptions, spec: PolicySpec) -> Checkpoint:
    """The generator's parts.

    Raises:
        ConfigError: The folder holds another kind of model.
    """
    source, key = model.checkpoint, "model.checkpoint"
    note = _stand_in(key, spec.published.split("/")[1])
    folder = _folder(source, tiny=spec.tiny.folder if spec.tiny else None, marker="model_index.json")
    if folder is None:
        return Checkpoint(spec.parts, (_absence(key, source, "a diffusers checkpoint"),), note)
    local = {
        name: _processor(folder / name) if name == "processor" else _json(folder / name / "config.json")
        for name in spec.parts
    }
    configs = {name: local[name] or published for name, published in spec.parts.items()}
    # FLUX.1 and its Kontext have one architecture: only the pipeline's name tells them apart.
    pipeline = _json(folder / "model_index.json").get("_class_name", spec.pipeline)
    classes = {
        str(configs["transformer"].get("_class_name")): spec.parts["transformer"]["_class_name"],
        pipeline: spec.pipeline,
    }
    for present, needed in classes.items():
        if present != needed:
            raise ConfigError(
                f"{key}: {source} holds a {present}, and model.kind {spec.kind!r} needs a {needed} such as "
                f"{spec.published}"
            )
    lacking = [name for name in spec.parts if name not in WITHOUT_WEIGHTS and not _has_weights(folder / name)]
    absences = (_absence(key, source, f"the weights of {', '.join(lacking)}"),) if lacking else ()
    return Checkpoint(configs, absences, "" if local["transformer"] else note)


def judge(options: BackendOptions | None, *, key: str) -> Checkpoint:
    """A judge's parts, `model` and `processor` (its image options); none of a judge behind HTTP, or without one.

    Args:
        options: The config's section.
        key: That section's name.

    Raises:
        ConfigError: The checkpoint is a LoRA that does not say what it was trained on.
    """
    if not isinstance(options, InProcessOptions):
        return Checkpoint({})
    source, key = options.checkpoint, f"{key}.checkpoint"
    lora = None if _vision_language_folder(source) else _folder(source, tiny=LOCAL_JUDGE.tiny, marker=PEFT_CONFIG)
    if lora is None:
        return vision_language_model(source, key=key)
    base = _json(lora / PEFT_CONFIG).get("base_model_name_or_path")
    if not base:
        raise ConfigError(
            f"{key} {source} is a LoRA adapter that names no base; set {key} to its base and "
            f"{key.removesuffix('checkpoint')}adapter={source}"
        )
    return vision_language_model(base, key=f"{key} (the base of {source})")


def vision_language_model(source: str, *, key: str) -> Checkpoint:
    """The parts of a judge, or of what one is made from: `model` and `processor` (its image options)."""
    folder = _vision_language_folder(source)
    if folder is None:
        absence = _absence(key, source, "a transformers checkpoint")
        return Checkpoint(JUDGE_PARTS, (absence,), _stand_in(key.partition(" ")[0], LOCAL_JUDGE.base))
    configs = {"model": _json(folder / "config.json"), "processor": _processor(folder) or JUDGE_PARTS["processor"]}
    absences = () if _has_weights(folder) else (_absence(key, source, "its weights"),)
    return Checkpoint(configs, absences, folder=folder)


def _vision_language_folder(source: str) -> Path | None:
    return _folder(source, tiny=LOCAL_JUDGE.tiny, marker="config.json")


def _stand_in(key: str, published: str) -> str:
    return f"{key} is not here: its sizes are those of {published} as published"


def _processor(folder: Path) -> dict[str, Any]:
    """A processor's image options, whichever of transformers' two files holds them."""
    saved = _json(folder / "preprocessor_config.json") or _json(folder / "processor_config.json")
    return image_options(saved.get("image_processor", saved))


def image_options(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the size of an image among an image processor's saved options."""
    names = ("patch_size", "merge_size", "min_pixels", "max_pixels", "size")
    return {name: saved[name] for name in names if saved.get(name)}


# --- what rewards load -----------------------------------------------------------------------------------------


def rewards_of(config: PolicyConfig) -> Iterator[tuple[str, Reward]]:
    """Config key → reward, of the run and of its evaluation; none can ask a judge, and nothing is loaded.

    Rewards of users' files are left out: making one runs its file.
    """
    for key, rewards in (("rewards", config.rewards), ("evaluation.rewards", config.evaluation.rewards)):
        for name, reward in build_rewards(
            [reward for reward in rewards if ".py:" not in reward.name], judge=None
        ).items():
            yield f"{key}.{name}", reward


def clip_encoders(config: PolicyConfig) -> dict[str, ClipEncoder]:
    """Config key → what encodes for that reward; nothing is loaded."""
    encoders = {f"{key}.args.checkpoint": getattr(reward, "clip", None) for key, reward in rewards_of(config)}
    return {key: encoder for key, encoder in encoders.items() if isinstance(encoder, ClipEncoder)}


def clip_parts(encoder: ClipEncoder) -> Mapping[str, Any]:
    """The config of an encoder's model: its own if it is here, else the published one's."""
    folder = _clip_folder(encoder)
    published = CLIP_PARTS["ViT-L-14" if encoder.checkpoint == CLIP_L else "ViT-H-14"]
    # A checkpoint's own config.json may leave its class out.
    names = ("architectures", "model_type")
    return {**_json(folder / "config.json"), **{name: published[name] for name in names}} if folder else published


def _clip_folder(encoder: ClipEncoder) -> Path | None:
    return _folder(encoder.checkpoint, tiny=Path(encoder.checkpoint), marker="config.json")


def _reward_absences(config: PolicyConfig) -> Iterator[MissingFile]:
    """Models and files of rewards that are not here."""
    for key, encoder in clip_encoders(config).items():
        folder = _clip_folder(encoder)
        if folder is None or not (_has_weights(folder) or any(folder.glob("pytorch_model*.bin"))):
            yield _absence(key, encoder.checkpoint, "a CLIP model")
    for key, reward in rewards_of(config):
        if isinstance(reward, Aesthetic) and not reward.head_path.is_file():
            remedy = f"the published head: get it from {AESTHETIC_SOURCE}"
            yield MissingFile(f"{key}.args.head", str(reward.head_path), remedy)


# --- absences --------------------------------------------------------------------------------------------------


def all_absences(config: PolicyConfig, checkpoints: Sequence[Checkpoint]) -> tuple[MissingFile, ...]:
    """Everything that the run needs and that is not here, data first."""
    edits = planned_sources(config) > 0
    data, judges = config.prompts, {"judge": config.judge, "evaluation.judge": config.evaluation.judge}
    prompts = [("prompts.train", data.train), ("prompts.evaluation", data.evaluation)]
    prompts += [("prompts.benchmarks", name) for name in data.benchmarks]
    adapters = {"adapter.start": config.adapter.start}
    adapters |= {
        f"{key}.adapter": judge.adapter for key, judge in judges.items() if isinstance(judge, InProcessOptions)
    }
    absences = [
        *(prompts_absence(key, source, spec=config.generator, edits=edits) for key, source in prompts),
        *(absence for checkpoint in checkpoints for absence in checkpoint.absences),
        *_reward_absences(config),
        *(adapter_absence(key, source) for key, source in adapters.items()),
    ]
    return tuple(absence for absence in absences if absence)


def planned_sources(config: PolicyConfig, prompts: Sequence[Prompt] = ()) -> int:
    """How many sources a prompt of the run has at most, as its prompts say it, or before they are here its rewards."""
    spec = config.generator
    if prompts and spec.sets:
        return max(len(prompt.sources) for prompt in prompts)
    about_edits = any(isinstance(reward, EditConsistency) for _, reward in rewards_of(config))
    return int(spec.edits and (not spec.sets or about_edits))


def prompts_absence(key: str, source: str, *, spec: PolicySpec, edits: bool) -> MissingFile | None:
    """Where to get a prompt file that is not here; None if it is (the tiny world always is).

    Args:
        key: The config's.
        source: What it says.
        spec: The generator's.
        edits: Whether edits are asked for, and no sets.
    """
    name, _, language = source.rpartition(":")
    if source.startswith("tiny:") or Path(name if language in LANGUAGES else source).exists():
        return None
    if not edits:
        return MissingFile(key, source, f"T2IS records: {T2IS_HOME}; or name a JSONL or text file of your own")
    return MissingFile(
        key,
        source,
        f"edits: `{GEDIT_COMMAND}`, then `pacorl prompts split {spec.edit_data} --test 128 --out "
        f"{Path(source).parent}`; or name ShareGPT-4o-Image's JSON, or a JSONL of your own edits "
        "({image, instruction})",
    )


def adapter_absence(key: str, source: str) -> MissingFile | None:
    """Where to get an adapter that is not here; None if it is, or none is named."""
    if not source:
        return None
    try:
        adapter_file(source, fetch=False)
    except (ValueError, OSError):
        return _absence(key, source, "a LoRA adapter")
    return None


def _absence(key: str, source: str, lacking: str) -> MissingFile:
    return MissingFile(key, source, f"{lacking}: {_remedy(source)}")


def _remedy(source: str) -> str:
    if source == TINY:
        return "`python -m tools.tiny all` makes it again"
    if (in_repo := HUB_PATH.fullmatch(source)) and not Path(source).exists():
        return f"`hf download {in_repo['repo']} --include '{in_repo['path']}*'`"
    if not HUB_NAME.fullmatch(source) or Path(source).expanduser().exists():
        return f"put it into the folder {source}, or name a model of the hub"
    get = f"`hf download {source}`"
    if source in {spec.published for spec in POLICIES.values() if spec.gated}:
        return f"gated; accept the licence at https://huggingface.co/{source}, `hf auth login`, then {get}"
    return get


# --- folders ---------------------------------------------------------------------------------------------------


def _folder(source: str, *, tiny: Path | None, marker: str) -> Path | None:
    """The local folder that holds `marker`: the committed one, a named one, or the newest in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    local = tiny if source == TINY else Path(source).expanduser()
    if local and (local / marker).exists():
        return local
    # An existing folder is meant as that folder, even if its name could be the hub's.
    if source == TINY or (local and local.exists()) or not HUB_NAME.fullmatch(source):
        return None
    cached = try_to_load_from_cache(source, marker)
    return Path(cached).parent if isinstance(cached, str) else None


def _has_weights(folder: Path) -> bool:
    """Whether a part's weights are all there: every shard that its index names, or one file."""
    index = next(iter(sorted(folder.glob("*.safetensors.index.json"))), None)
    if index is None:
        return any(folder.glob("*.safetensors"))
    # A download that was broken off leaves the index and some of the shards.
    # A set: the index names a shard once for each of its tensors.
    return all((folder / shard).exists() for shard in set(_json(index)["weight_map"].values()))


def _json(path: Path) -> dict[str, Any]:
    """A JSON file's mapping, empty if there is no file. Raises ValueError if it is not one."""
    return read_object(path, fix="fetch the checkpoint again") if path.exists() else {}
