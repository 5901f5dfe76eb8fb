"""Checkpoints of a run on this machine, absent files, and the published architectures that replace absent configs.

The hub is not asked: its names are looked up in the local cache only.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pacorl.config.reward_section import MeasureConfig
from pacorl.config.user_files import is_in_file
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.documents import read_object
from pacorl.io.hub import HUB_NAME, OF_MODEL, OF_PIPELINE, PIPELINE, download_command, local_file
from pacorl.judge import open_judge
from pacorl.judge.adapter import base_of
from pacorl.judge.judge import JudgeSettings, close_judge
from pacorl.judge.local import BASES, EMBEDDED
from pacorl.models.lora import adapter_file
from pacorl.models.policies import POLICIES
from pacorl.models.policies.policy import WITHOUT_WEIGHTS, Parts, PolicyOptions
from pacorl.models.policies.spec import SINGLE_FILE, check_single_file
from pacorl.plan.generators import model_on_meta
from pacorl.rewards import asks_judge, build_rewards
from pacorl.rewards.clip import ClipEncoder
from pacorl.rewards.reward import Reward
from pacorl.types import TINY

CLIP_PARAMETERS = 986_109_441
"""Parameters of CLIP ViT-H-14, of CLIP-T. Every CLIP is planned as this one."""
AGAIN = "fetch the checkpoint again"


@dataclass(frozen=True, slots=True)
class MissingFile:
    """A run's absent file or checkpoint, unreachable judge or broken reward."""

    key: str
    """The config key that names it."""
    source: str
    """The key's value."""
    remedy: str
    """Instructions to get or mend it."""
    bytes: int = 0
    """Size of a download of published weights; 0 if it is unknown."""


def generator_of(model: PolicyOptions) -> tuple[Parts, list[MissingFile]]:
    """Read the config.json of each component of a generator; published configs replace absent ones.

    Raises:
        ValueError: The folder holds another kind of model.
    """
    spec = POLICIES[model.kind]
    source = str(spec.committed.folder) if model.checkpoint == TINY else model.checkpoint
    local_part = ""
    if source.endswith(SINGLE_FILE):
        # The file has the transformer alone; its other components are the published ones.
        check_single_file(source)
        source = spec.published
        local_part = "transformer"
    index = local_file(str(Path(source).expanduser()), PIPELINE)
    folders = {}
    if index:
        spec.check_source(str(index.parent))
        folders = {name: index.parent / name for name in spec.parts}
    configs, lacking = _read(spec.parts, folders)
    lacking = [name for name in lacking if name != local_part]
    return configs, _absent_weights("model.checkpoint", source, lacking, configs, OF_PIPELINE)


def judge(key: str, settings: JudgeSettings | None) -> tuple[Parts, list[MissingFile]]:
    """Read a judge's configs, `model` and `processor`; empty without a judge, or for one behind HTTP.

    A judge behind HTTP is asked for its models, and is absent if it does not answer.
    """
    if settings is None:
        return {}, []
    if settings.remote:
        try:
            close_judge(open_judge(settings, device="cpu", startup=0))
        except (ValueError, OSError, RuntimeError) as fault:
            return {}, [MissingFile(key, settings.checkpoint, str(fault))]
        return {}, []

    # A LoRA names its base, whose configs have the shapes. If they are absent, use the published base that the name
    # contains, or else the first.
    source = base_of(settings.checkpoint) or settings.checkpoint
    base = next((base for base in BASES if base.lower() in source.lower()), next(iter(BASES)))
    source = str(EMBEDDED.get(source, source))
    config = local_file(str(Path(source).expanduser()), "config.json")
    configs, lacking = _read(read_object(BASES[base]), {"model": config.parent} if config else {})
    return configs, _absent_weights(key, source, lacking, configs)


def _read(published: Parts, folders: Mapping[str, Path]) -> tuple[Parts, list[str]]:
    """Read a checkpoint's configs.

    Args:
        published: configs in place of absent ones.
        folders: folder of each component; empty if there is no such checkpoint on this machine.

    Returns:
        Configs, and the components whose weights are not here.
    """
    configs = dict(published)
    lacking = []
    for name in published:
        folder = folders.get(name)
        if folder and (folder / "config.json").exists():
            configs[name] = read_object(folder / "config.json", fix=AGAIN)
        if name not in WITHOUT_WEIGHTS and not (folder and _has_weights(folder)):
            lacking.append(name)
    return configs, lacking


def _has_weights(folder: Path) -> bool:
    """Check that a folder has weights: every shard that its index names, or one file."""
    for index in folder.glob("*.safetensors.index.json"):
        # An interrupted download leaves the index and some of the shards.
        return all((folder / shard).exists() for shard in read_object(index, fix=AGAIN)["weight_map"].values())
    return any(folder.glob("*.safetensors"))


def rewards_of(rewards: Sequence[MeasureConfig]) -> Mapping[str, Reward]:
    """Build rewards by key, without a judge and weights; users' rewards that ask a judge are left out."""
    return build_rewards(
        [reward for reward in rewards if not (is_in_file(reward.name) and asks_judge(reward))], judge=None
    )


def absent_prompts(config: PolicyConfig) -> Iterator[MissingFile]:
    """List the absent prompts of a run; the tiny world's are built in."""
    data = config.prompts
    remedy = "`pacorl data t2is` for sets; for edits `pacorl data FOLDER` of GEdit-Bench; or name a file of your own"
    for key, source in (("train", data.train), ("evaluation", data.evaluation)):
        if not source.startswith("tiny:") and not Path(source).exists():
            yield MissingFile(f"prompts.{key}", source, remedy)


def absences_of(config: PolicyConfig, encoders: Collection[ClipEncoder]) -> Iterator[MissingFile]:
    """List the absent models of rewards and adapters of a run."""
    for encoder in encoders:
        if not local_file(encoder.checkpoint, "model.safetensors"):
            command = download_command(encoder.checkpoint, *OF_MODEL)
            yield _absence("rewards", encoder.checkpoint, "a CLIP", command, size=4 * CLIP_PARAMETERS)
    yield from absent_lora(config.adapter.start)


def absent_lora(source: str) -> Iterator[MissingFile]:
    """List the LoRA that a training starts from, if it is named and absent."""
    try:
        if source:
            adapter_file(source, fetch=False)
    except (ValueError, OSError):
        repo, _, path = source.partition(":")
        files = ["--include", f"'{path}*'"] if path else []
        yield _absence("adapter.start", source, "a LoRA", download_command(repo, *files))


def _absent_weights(
    key: str, source: str, lacking: Sequence[str], configs: Parts, files: Sequence[str] = ()
) -> list[MissingFile]:
    """Describe a checkpoint that lacks components; `files` are options of the download that select files."""
    if not lacking:
        return []
    # In bf16, as they are published.
    size = 0
    for name in lacking:
        model = model_on_meta(configs[name], dtype=torch.bfloat16)
        size += sum(weight.nbytes for weight in model.parameters())
    what = f"the weights of {', '.join(lacking)}"
    return [_absence(key, source, what, download_command(source, *files), size=size)]


def _absence(key: str, source: str, what: str, command: str, *, size: int = 0) -> MissingFile:
    """Describe an absent checkpoint by the command that downloads it, and its bytes if they are known."""
    if Path(source).expanduser().exists() or not HUB_NAME.fullmatch(source.partition(":")[0]):
        return MissingFile(key, source, f"{what}: put it into the folder {source}, or name a model of the hub")
    steps = f"`{command}`"
    if source in [spec.published for spec in POLICIES.values() if spec.gated]:
        steps = f"accept the licence at https://huggingface.co/{source}, `hf auth login`, then {steps}"
    known_size = f", {size / 10**9:.0f} GB" if size else ""
    return MissingFile(key, source, f"{what}: {steps}{known_size}", size)
