"""Where a run's checkpoints lie on this machine, what is absent, and what the published models are made of.

Nothing here asks the network: a hub name is looked up in the local cache alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pacorl.config.base import ConfigError
from pacorl.config.judge_run import ComparisonsConfig
from pacorl.config.policy_run import PolicyRun
from pacorl.data.comparisons import SOURCES, missing_file
from pacorl.data.edits import LANGUAGES
from pacorl.io.documents import read_object
from pacorl.judges import JUDGES
from pacorl.judges.judge import BackendOptions, InProcessOptions
from pacorl.judges.local import TINY_JUDGE
from pacorl.lora.formats import HUB_NAME, HUB_PATH, PEFT_CONFIG, adapter_file
from pacorl.policies import POLICIES
from pacorl.policies.meta import WITHOUT_WEIGHTS
from pacorl.policies.policy import Parts, PolicySpec
from pacorl.rewards import build_rewards
from pacorl.rewards.clip import AESTHETIC_SOURCE, CLIP_L, Aesthetic, ClipEncoder
from pacorl.types import TINY

PACO_HOME = "X-GenGroup/PaCo-Dataset"
PACO_ENTRIES = frozenset(
    source.rpartition(":")[2] for source in (*ComparisonsConfig().train, *ComparisonsConfig().evaluation)
)
T2IS_HOME = "github.com/X-GenGroup/PaCo-RL, PaCo-GRPO/dataset/T2IS/half_2by2/{train,test}_metadata.jsonl"

GEDIT_COMMAND = "hf download --repo-type dataset stepfun-ai/GEdit-Bench --local-dir GEdit-Bench"


assert JUDGES["local"].architecture is not None
JUDGE_PARTS: Parts = read_object(JUDGES["local"].architecture)
"""Qwen2.5-VL-7B as published, which PaCo-Reward-7B is trained from: 8.29 B parameters."""
CLIP_PARTS: Parts = read_object(Path(__file__).with_name("clip.json"))
"""CLIP as published: ViT-H-14 is that of CLIP-T, CLIP-I and PickScore (986 M parameters), ViT-L-14 that of the
aesthetic head (428 M)."""
NOT_READY = 2
"""Exit code of a dry run if something is absent or at fault."""
JUDGE_BASE = "Qwen2.5-VL-7B"
"""Whose sizes stand in for those of a judge that is not here."""


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
    reasons = [f"{len(absences)} absent ({', '.join(dict.fromkeys(one.key for one in absences))})"] if absences else []
    reasons += [f"{faults} at fault"] if faults else []
    if reasons:
        return f"verdict: it would not run: {' and '.join(reasons)}"
    mind = f"; mind the {'note' if notes == 1 else f'{notes} notes'} above" if notes else ""
    return f"verdict: all that it needs is here{mind}"


def assumed_note(key: str, published: str) -> str:
    """What to say if the published architecture stands in for a checkpoint."""
    return f"{key} is not here: its sizes are those of {published} as published"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is known of a checkpoint without loading it."""

    parts: Parts
    assumed: bool
    """Whether `parts` are the published ones, because the checkpoint's own are not here."""
    absences: tuple[MissingFile, ...]
    folder: Path | None = None
    """Where it lies on this machine."""


def generator(config: PolicyRun) -> Checkpoint:
    """The generator's parts.

    Raises:
        ConfigError: The folder holds another kind of model.
    """
    source, spec, key = config.model.checkpoint, config.generator, "model.checkpoint"
    folder = _folder(source, tiny=spec.tiny.folder if spec.tiny else None, marker="model_index.json")
    if folder is None:
        return Checkpoint(spec.parts, assumed=True, absences=(_absence(key, source, "a diffusers checkpoint"),))
    own = {name: _part(folder / name) for name in spec.parts}
    parts = {name: own[name] or published for name, published in spec.parts.items()}
    _check_kind(config, folder, transformer=parts["transformer"].get("_class_name"))
    lacking = [name for name in spec.parts if name not in WITHOUT_WEIGHTS and not _has_weights(folder / name)]
    absences = (_absence(key, source, f"the weights of {', '.join(lacking)}"),) if lacking else ()
    return Checkpoint(parts, assumed=not own["transformer"], absences=absences)


def _part(folder: Path) -> dict[str, Any]:
    """A part's config; of a processor the options of its images."""
    if folder.name != "processor":
        return _json(folder / "config.json")
    options = _json(folder / "preprocessor_config.json") or _json(folder / "processor_config.json")
    return image_options(options.get("image_processor", options))


def image_options(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the size of a picture among an image processor's saved options."""
    kept = ("patch_size", "merge_size", "min_pixels", "max_pixels", "size")
    return {name: saved[name] for name in kept if saved.get(name)}


def _check_kind(config: PolicyRun, folder: Path, *, transformer: str | None) -> None:
    """Raises ConfigError if a folder holds another kind of model than the config says."""
    spec = config.generator
    pipeline = _json(folder / "model_index.json").get("_class_name", spec.pipeline)
    needed = {transformer: spec.parts["transformer"]["_class_name"], pipeline: spec.pipeline}
    for held, wanted in needed.items():
        if held != wanted:
            raise ConfigError(
                f"model.checkpoint: {config.model.checkpoint} holds a {held}, and model.kind {spec.kind!r} needs a "
                f"{wanted} such as {spec.published}"
            )


def judge(config: PolicyRun) -> Checkpoint:
    """The judge's parts, `model` and `processor` (its image options); none of a judge behind HTTP, or without one."""
    return _judge_at(config.judge, "judge.checkpoint")


def held_out_judge(config: PolicyRun) -> Checkpoint:
    """The same of the evaluation's own judge."""
    return _judge_at(config.evaluation.judge, "evaluation.judge.checkpoint")


def _judge_at(config: BackendOptions | None, key: str) -> Checkpoint:
    if not isinstance(config, InProcessOptions):
        return Checkpoint({}, assumed=False, absences=())
    if lora := _lora_folder(config.checkpoint):
        base = _json(lora / PEFT_CONFIG).get("base_model_name_or_path")
        if not base:
            raise ConfigError(
                f"{key} {config.checkpoint} is a LoRA adapter that names no base; set {key} to its base and "
                f"{key.removesuffix('checkpoint')}adapter={config.checkpoint}"
            )
        return vision_language_model(base, key=f"{key} (the base of {config.checkpoint})")
    return vision_language_model(config.checkpoint, key=key)


def _lora_folder(source: str) -> Path | None:
    """Where a checkpoint lies that is a LoRA and no model."""
    if _folder(source, tiny=TINY_JUDGE, marker="config.json"):
        return None
    return _folder(source, tiny=TINY_JUDGE, marker=PEFT_CONFIG)


def vision_language_model(source: str, *, key: str) -> Checkpoint:
    """The parts of a judge, or of what one is made from: `model` and `processor` (its image options)."""
    folder = _folder(source, tiny=TINY_JUDGE, marker="config.json")
    if folder is None:
        return Checkpoint(JUDGE_PARTS, assumed=True, absences=(_absence(key, source, "a transformers checkpoint"),))
    options = _json(folder / "preprocessor_config.json") or _json(folder / "processor_config.json")
    options = options.get("image_processor", options)
    parts = {"model": _json(folder / "config.json"), "processor": options or JUDGE_PARTS["processor"]}
    absences = () if _has_weights(folder) else (_absence(key, source, "its weights"),)
    return Checkpoint(parts, assumed=False, absences=absences, folder=folder)


def clip_encoders(config: PolicyRun) -> dict[str, ClipEncoder]:
    """Config key → what encodes for that reward; nothing is loaded."""
    found = {}
    for key, several in (("rewards", config.rewards), ("evaluation.rewards", config.evaluation.rewards)):
        for name, reward in build_rewards(several, judge=None).items():
            if isinstance(encoder := getattr(reward, "clip", None), ClipEncoder):
                found[f"{key}.{name}.args.checkpoint"] = encoder
    return found


def clip_parts(encoder: ClipEncoder) -> Mapping[str, Any]:
    """The config of an encoder's model: its own where it is here, else the published one's."""
    folder = _folder(encoder.checkpoint, tiny=Path(encoder.checkpoint), marker="config.json")
    published = CLIP_PARTS["ViT-L-14" if encoder.checkpoint == CLIP_L else "ViT-H-14"]
    names = ("architectures", "model_type")
    return {**_json(folder / "config.json"), **{name: published[name] for name in names}} if folder else published


def reward_absences(config: PolicyRun) -> list[MissingFile]:
    """Models and files of rewards that are not here."""
    found = []
    for key, encoder in clip_encoders(config).items():
        folder = _folder(encoder.checkpoint, tiny=Path(encoder.checkpoint), marker="config.json")
        if folder is None or not (_has_weights(folder) or any(folder.glob("pytorch_model*.bin"))):
            found.append(_absence(key, encoder.checkpoint, "a CLIP model"))
    several = [*config.rewards, *config.evaluation.rewards]
    for name, reward in build_rewards(several, judge=None).items():
        if isinstance(reward, Aesthetic) and not reward.head_path.is_file():
            remedy = f"the published head: get it from {AESTHETIC_SOURCE}"
            found.append(MissingFile(f"rewards.{name}.args.head", str(reward.head_path), remedy))
    return found


def adapter_absences(config: PolicyRun) -> list[MissingFile]:
    """Adapters that the config names and that are not here."""
    judges = {"judge": config.judge, "evaluation.judge": config.evaluation.judge}
    adapters = {"adapter.start": config.adapter.start}
    adapters |= {
        f"{key}.adapter": judge.adapter for key, judge in judges.items() if isinstance(judge, InProcessOptions)
    }
    return [absence for key, source in adapters.items() if (absence := adapter_absence(key, source))]


def adapter_absence(key: str, source: str) -> MissingFile | None:
    """Where to get an adapter that is not here; None if it is, or none is named."""
    return _absence(key, source, "a LoRA adapter") if source and not _adapter(source) else None


def prompts_absence(key: str, source: str, *, spec: PolicySpec) -> MissingFile | None:
    """Where to get a prompt file that is not here; None if it is (the tiny world always is).

    Args:
        key: The config's.
        source: What it says.
        spec: The generator's, which says whether sets or edits are asked for.
    """
    name, _, language = source.rpartition(":")
    if source.startswith("tiny:") or Path(name if language in LANGUAGES else source).exists():
        return None
    if not spec.edits:
        return MissingFile(key, source, f"T2IS records: {T2IS_HOME}; or name a JSONL or text file of your own")
    return MissingFile(
        key,
        source,
        f"edits: `{GEDIT_COMMAND}`, then `pacorl prompts split {spec.edit_data} --test 128 --out "
        f"{Path(source).parent}`; or name ShareGPT-4o-Image's JSON, or a JSONL of your own edits "
        "({image, instruction})",
    )


def comparisons_absence(key: str, source: str) -> MissingFile | None:
    """Where to get training pairs of a judge that are not here; None if they are (the tiny world always is).

    Raises ValueError as `missing_file` does.
    """
    missing = missing_file(source)
    if missing is None:
        return None
    folder, _, entry = source.rpartition(":")
    home = Path(folder or source)
    if home.name != "PaCo-Dataset" and entry not in PACO_ENTRIES:
        return MissingFile(key, source, f"{missing} is not there; put it there, or name {SOURCES}")
    return MissingFile(
        key,
        source,
        f"PaCo-Dataset: `hf download --repo-type dataset {PACO_HOME} --local-dir {home}`, then unpack it there as its "
        f"card says (decompress.sh); {missing} is not there",
    )


def _folder(source: str, *, tiny: Path | None, marker: str) -> Path | None:
    """The local folder that holds `marker`: the committed one, a named one, or the newest in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    local = tiny if source == TINY else Path(source).expanduser()
    if local and (local / marker).exists():
        return local
    if source == TINY or (local and local.exists()) or not HUB_NAME.fullmatch(source):
        return None
    cached = try_to_load_from_cache(source, marker)
    return Path(cached).parent if isinstance(cached, str) else None


def _adapter(source: str) -> bool:
    try:
        adapter_file(source, fetch=False)
    except (ValueError, OSError):
        return False
    return True


def _has_weights(folder: Path) -> bool:
    """Whether a part's weights are all there: every shard that its index names, or one file."""
    index = next(iter(sorted(folder.glob("*.safetensors.index.json"))), None)
    if index is None:
        return any(folder.glob("*.safetensors"))
    return all((folder / shard).exists() for shard in set(_json(index)["weight_map"].values()))


def _absence(key: str, source: str, what: str) -> MissingFile:
    return MissingFile(key, source, f"{what}: {_remedy(source)}")


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


def _json(path: Path) -> dict[str, Any]:
    """A JSON file's mapping, empty where there is no file. Raises ConfigError where it is not one."""
    if not path.exists():
        return {}
    try:
        return read_object(path, fix="fetch the checkpoint again")
    except ValueError as error:
        raise ConfigError(str(error)) from None


def all_absences(config: PolicyRun, checkpoints: Sequence[Checkpoint]) -> tuple[MissingFile, ...]:
    """Everything that the run needs and that is not here, data first."""
    prompts = [
        prompts_absence("prompts.train", config.prompts.train, spec=config.generator),
        prompts_absence("prompts.evaluation", config.prompts.evaluation, spec=config.generator),
    ]
    weights = [absence for checkpoint in checkpoints for absence in checkpoint.absences]
    prompts += [
        prompts_absence("prompts.benchmarks", name, spec=config.generator) for name in config.prompts.benchmarks
    ]
    return (
        *(absence for absence in prompts if absence),
        *weights,
        *reward_absences(config),
        *adapter_absences(config),
    )
