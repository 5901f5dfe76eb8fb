"""A run's checkpoints: what is saved, how it is put back, and folders that outlive kills and full disks.

A checkpoint holds the adapter, its moving average, the optimizer's state, every rank's random generators, and in
state.json the data position (the epoch: what it draws follows from the seed), the optimizer step (the learning rate
follows from it), how far the log went, the config, and the SHA-256 of all other files. `lora/` in it is the averaged
adapter for use elsewhere. docs/survives.md says what outlives what.
"""

from __future__ import annotations

import hashlib
import logging
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pacorl.config.base import changes_to, check_changes, frozen_changes
from pacorl.config.user_files import user_files
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.start import Resume, checkpoints, named_start, step_of
from pacorl.io.documents import as_read_back, dump_json, read_json, read_object, write_json
from pacorl.io.files import (
    PRIVATE,
    check_digests,
    digests,
    flush_to_disk,
    flush_tree,
    make_folder,
    remove_made,
    safetensors_errors,
)
from pacorl.judge import JUDGE
from pacorl.judge.judge import BackendOptions
from pacorl.models.lora.adapters import (
    MovingAverage,
    OldPolicy,
    adapter_state,
    full_state,
    full_tensor,
    set_adapter_state,
    shard_like,
)
from pacorl.models.lora.formats import ADAPTER_FILES, save_lora
from pacorl.runtime.processes import Runtime

logger = logging.getLogger(__name__)

STATE = (
    *("epoch", "step", "seed", "evaluated", "score", "best_by", "bad_steps", "log_lines", "processes"),
    *("config", "files", "sha256"),
)
"""What state.json must hold."""
JUDGES_OF_A_RUN = ("judge", "evaluation.judge")
"""Sections of the judges: of the rewards, and of the measures that are never rewarded."""
ACCESS_KEYS = ("api_key_env", "concurrency", "timeout", "retries", "startup", "outage", "overlap")
"""Keys of a judge that decide how it is asked, and not what it answers."""
SOURCE_KEYS = ("checkpoint", "adapter", "model")
"""Keys of a judge that decide where it lies, free as long as its `BackendOptions.identity` stays."""
FREE_KEYS = (
    *("out", "save_every", "keep_checkpoints", "trackers", "evaluation.every", "prompts.leaks", "monitor"),
    *("advantages.max_missing", "model.gradient_checkpointing", "reward_timeout"),
    *(f"{judge}.{key}" for judge in JUDGES_OF_A_RUN for key in ACCESS_KEYS),
)
"""Config keys that a resumed run may change: no reward, no gradient and no learning rate follows from them."""
LENGTH_KEYS = ("epochs", "max_steps")
"""Config keys that are free too, unless the learning rate follows from them: under a cosine schedule."""
SEAL = "sha256"
"""Of state.json: of everything else in it."""
# DeepSpeed keeps its optimizer's shards in a folder of its own.
ENGINE = "deepspeed"
CHECKPOINT_FILES = (
    *(f"{kind}.safetensors" for kind in ("adapter", "average", "old", "optimizer")),
    *(f"lora/{name}" for name in ADAPTER_FILES),
    *(f"{ENGINE}/**/*", "latest", "zero_to_fp32.py"),
    *("generators.json", "state.json"),
)
"""Patterns of a checkpoint's files. Files of other names are the user's, and are never deleted."""
HALF_DONE = re.compile(r"\.(step-\d{6,})\.(partial|replaced|deleted)")
"""Names of the folders that a kill leaves beside checkpoints."""
WRITING = Lock()
"""Held while a thread of this process writes a checkpoint."""


# --- a run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainedWeights:
    """What of a run's weights a checkpoint holds."""

    runtime: Runtime
    transformer: nn.Module
    """In the launcher's wrapper."""
    optimizer: torch.optim.Optimizer
    average: MovingAverage
    old: OldPolicy | None

    @property
    def unwrapped(self) -> nn.Module:
        """The transformer without the wrapper."""
        return self.runtime.unwrap(self.transformer)

    def stepped(self) -> dict[str, nn.Parameter]:
        """The weights that the optimizer steps, by name, in its order."""
        names = {parameter: name for name, parameter in self.unwrapped.named_parameters()}
        return {names[parameter]: parameter for group in self.optimizer.param_groups for parameter in group["params"]}


@dataclass(frozen=True, slots=True)
class RunState:
    """All that a checkpoint holds, unsharded; of DeepSpeed's optimizer nothing, which saves its shards itself."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    """File's stem → weights or moments by name."""
    state: Mapping[str, Any]
    """Of state.json, but the config."""
    generators: Sequence[Mapping[str, Any]]
    """The random state of each rank."""

    def in_host_memory(self) -> RunState:
        """A copy that no later step of the run changes."""
        copied = {
            kind: {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}
            for kind, tensors in self.tensors.items()
        }
        return RunState(copied, self.state, self.generators)


def gather_state(weights: TrainedWeights, state: Mapping[str, Any]) -> RunState:
    """Gather what a checkpoint holds. All ranks call it.

    Args:
        weights: the run's.
        state: what state.json holds; the main process's is taken.
    """
    # Shards are exchanged here, so every rank gathers in one order.
    tensors = {"adapter": full_state(adapter_state(weights.unwrapped)), "average": full_state(weights.average.state)}
    if weights.old:
        tensors["old"] = full_state(weights.old.state)
    if not weights.runtime.deepspeed:
        tensors["optimizer"] = optimizer_tensors(weights.optimizer, list(weights.stepped()))
    states, generators = zip(*weights.runtime.gather((state, random_state())), strict=True)
    return RunState(tensors, states[0], generators)


def save_run(
    weights: TrainedWeights, config: PolicyConfig, state: Mapping[str, Any], *, targets: Sequence[str]
) -> Path:
    """Write a checkpoint to resume from, and the averaged adapter for use elsewhere. All ranks call it.

    Args:
        weights: the run's.
        config: its folder, the adapter's shape, and how many checkpoints are kept.
        state: what state.json holds.
        targets: the adapter's modules.

    Returns:
        The checkpoint.

    Raises:
        OSError: on all ranks, if the disk is full.
    """
    runtime, run = weights.runtime, gather_state(weights, state)
    if not runtime.deepspeed:
        runtime.on_main(partial(write_run, run, config, targets=targets))
        return checkpoint_of(run, config)
    aside = runtime.on_main(partial(open_aside, checkpoint_of(run, config)))
    weights.transformer.save_checkpoint(aside, tag=ENGINE, exclude_frozen_parameters=True)  # type: ignore[operator]
    runtime.on_main(partial(write_run, run, config, targets=targets, opened=True))
    return checkpoint_of(run, config)


def checkpoint_of(run: RunState, config: PolicyConfig) -> Path:
    """The folder of a state's checkpoint."""
    return config.out / "checkpoints" / f"step-{run.state['step']:06d}"


def write_run(run: RunState, config: PolicyConfig, *, targets: Sequence[str], opened: bool = False) -> None:
    """Write a checkpoint, and derive what follows from it. One rank calls it.

    Args:
        run: what the checkpoint holds.
        config: the run's.
        targets: the adapter's modules.
        opened: whether the folder aside is open already, and holds files of the checkpoint.

    Raises:
        OSError: if the disk is full.
    """
    target, tensors = checkpoint_of(run, config), run.tensors
    rank, alpha, base = config.adapter.rank, config.adapter.alpha, config.model.checkpoint

    def export(folder: Path) -> None:
        save_lora(folder / "lora", tensors["average"], rank=rank, alpha=alpha, targets=tuple(targets), base=base)

    # The thread that ends a hung run writes one too (`grpo.last_state`).
    with WRITING:
        if not opened:
            open_aside(target)
        state = {**run.state, "config": config.model_dump(mode="json")}
        write_checkpoint(target, tensors=tensors, state=state, generators=run.generators, export=export)
        settle(target, config)


def settle(checkpoint: Path, config: PolicyConfig) -> None:
    """Derive from a newest checkpoint what follows from it: best.json, which ones are kept, and adapter/.

    A kill may come between the checkpoint and any of these, so a resumed run does it again.
    """
    folder = checkpoint.parent
    best = best_checkpoint(folder)
    if best:
        # Before the pruning, which may delete the one that the file has named so far.
        write_json(folder / "best.json", best)
    kept = folder / best["checkpoint"] if best else None
    prune(folder, keep=config.keep_checkpoints, newest=step_of(checkpoint), best=kept)
    publish(checkpoint, config.out / "adapter")


def best_checkpoint(folder: Path) -> dict[str, Any] | None:
    """Derive the content of best.json: the checkpoint with the highest score, the later of equals.

    A warning names each damaged checkpoint. Without a scored checkpoint the content is None.
    """
    scored = []
    for path in checkpoints(folder):
        try:
            state = read_object(path / "state.json")
        except ValueError as fault:
            logger.warning("%s; it cannot be the best checkpoint", fault)
            continue
        if state.get("score") is not None:
            scored.append({"checkpoint": path.name, "best_by": state["best_by"], "score": state["score"]})
    return max(scored, key=lambda best: (best["score"], step_of(folder / best["checkpoint"])), default=None)


def publish(checkpoint: Path, folder: Path) -> None:
    """Copy a checkpoint's averaged adapter to where a user looks for the newest.

    Raises:
        OSError: if the disk is full, with the fix; what was there stays.
    """
    try:
        aside = open_aside(folder)
        for path in sorted((checkpoint / "lora").iterdir()):
            if path.name in ADAPTER_FILES:
                shutil.copy2(path, aside / path.name)
        put_in_place(folder, made=ADAPTER_FILES)
    except OSError as error:
        shutil.rmtree(aside_of(folder), ignore_errors=True)
        raise OSError(
            f"{folder} could not be written; the same adapter is in {checkpoint / 'lora'}, and the run can go on from "
            "there with --resume auto when there is room"
        ) from error


def starting_point(config: PolicyConfig, resume: Resume) -> Path | None:
    """The checkpoint that a run starts from, if any; clears what a kill left half done.

    "auto" takes the newest whole one, and names damaged ones that it passes over.

    Raises:
        ValueError: if `out` holds a run that is not to be resumed, or the named checkpoint is none, or damaged.
    """
    folder = config.out / "checkpoints"
    recover(folder)
    start, existing = named_start(config.out, resume), checkpoints(folder)
    if start is not None:
        check_whole(start)
    elif resume and existing:
        start = _newest_whole(existing)
        if start == existing[-1]:
            settle(start, config)
    if start:
        publish(start, config.out / "adapter")
    return start


def _newest_whole(existing: Sequence[Path]) -> Path:
    for path in reversed(existing):
        try:
            check_whole(path)
        except ValueError as fault:
            logger.warning("%s; the checkpoint before it is taken", fault)
        else:
            return path
    raise ValueError(f"no checkpoint in {existing[0].parent} is whole; copy one back, or start anew with out=…")


def check_whole(checkpoint: Path) -> None:
    """Raise ValueError, naming the file, if a checkpoint is damaged."""
    state = read_object(checkpoint / "state.json")
    missing = [key for key in STATE if key not in state]
    if missing:
        raise ValueError(f"{checkpoint / 'state.json'} has no {missing[0]!r}")
    if state.pop(SEAL) != _seal_of(state):
        raise ValueError(f"{checkpoint / 'state.json'} is damaged: it is not what was written")
    check_digests(checkpoint, state["files"])


def _seal_of(state: Mapping[str, Any]) -> str:
    """SHA-256 of what a state.json says, itself aside: a number that changed would be taken for the run's."""
    return hashlib.sha256(dump_json(state).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of its config that a resumed run makes: dotted key → [value before, value now]."""

    all: Mapping[str, list[Any]] = field(default_factory=dict)
    frozen: Mapping[str, list[Any]] = field(default_factory=dict)
    """Those that make it another run, which somebody has allowed."""


def changes_since(checkpoint: Path, config: PolicyConfig, *, allowed: bool) -> Changes:
    """The changes of a run that goes on from a checkpoint.

    Raises:
        ConfigError: if something changes that would make it another run, and that is not `allowed`.
    """
    state = read_object(checkpoint / "state.json")
    before = state["config"]
    changes, free = changes_to(config, before), list(free_keys(config))
    recorded, now = state.get("judges", {}), judge_identities(config)
    for key in now:
        then = recorded.get(key) or _identity_of(before, key)
        if then and then == now[key]:
            free += [f"{key}.{source}" for source in SOURCE_KEYS]
        elif then and now[key]:
            old, new = _value_at(before, f"{key}.checkpoint"), _value_at(config.model_dump(), f"{key}.checkpoint")
            changes[f"{key}.checkpoint"] = [f"{old} ({then})", f"{new} ({now[key]})"]
    frozen = frozen_changes(changes, free=free)
    check_changes(frozen, allowed=allowed)
    return Changes(changes, frozen)


def free_keys(config: PolicyConfig) -> tuple[str, ...]:
    """The config keys that a resumed run may change, its judges' sources aside."""
    return FREE_KEYS + (LENGTH_KEYS if config.optimizer.schedule == "constant" else ())


def judge_identities(config: PolicyConfig) -> dict[str, str]:
    """Key of each judge's section → what decides its verdicts; empty if it cannot be known yet."""
    judges = zip(JUDGES_OF_A_RUN, (config.judge, config.evaluation.judge), strict=True)
    return {key: options.identity() for key, options in judges if options}


def _identity_of(config: Mapping[str, Any], key: str) -> str:
    """Identity of a judge whose checkpoint of the run is older, by the files of today; empty if they do not say."""
    section = _value_at(config, key)
    try:
        with user_files(run=False):  # a checkpoint may be somebody else's
            return BackendOptions.model_validate(JUDGE.validate(section)).identity() if section else ""
    except (ValueError, OSError):
        return ""


def _value_at(document: Mapping[str, Any], key: str) -> Any:
    value: Any = document
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def restore(weights: TrainedWeights, path: Path, *, seed: int) -> dict[str, Any]:
    """Put a checkpoint's weights, optimizer and generators in place, also of a run on another number of processes.

    Args:
        weights: the run's, which are changed.
        path: the checkpoint.
        seed: the config's.

    Returns:
        What state.json holds.

    Raises:
        ValueError: if the checkpoint does not fit the run.
    """
    checkpoint = load_checkpoint(path)
    state, tensors = checkpoint.state, checkpoint.tensors
    for kind in ("adapter", "average", *(() if (path / ENGINE).is_dir() else ("optimizer",))):
        if kind not in tensors:
            raise ValueError(f"{path} has no {kind}.safetensors; go on from another checkpoint")
    if state["seed"] != seed:
        raise ValueError(f"{path} was made with seed {state['seed']}, the config says {seed}")
    set_adapter_state(weights.unwrapped, tensors["adapter"])
    weights.average.load(tensors["average"])
    if weights.old:
        # A run that began with another objective sampled with the trained weights.
        weights.old.load(tensors.get("old", tensors["adapter"]))
    _restore_optimizer(weights, checkpoint)
    # With another number of processes nobody's generators fit; what is drawn follows from (seed, epoch, row) anyway.
    if state["processes"] == weights.runtime.world:
        set_random_state(checkpoint.generators[weights.runtime.rank])
    return state


def _restore_optimizer(weights: TrainedWeights, checkpoint: Checkpoint) -> None:
    engines = {True: "DeepSpeed", False: "DDP, FSDP2 or single-process"}
    made_by, today = engines[(checkpoint.path / ENGINE).is_dir()], engines[weights.runtime.deepspeed]
    if made_by != today:
        raise ValueError(
            f"{checkpoint.path} holds the optimizer of a {made_by} run, this is a {today} one; resume with the "
            f"launcher that made it, or start anew with adapter.start={checkpoint.path}/lora"
        )
    if not weights.runtime.deepspeed:
        set_optimizer_tensors(weights.optimizer, weights.stepped(), checkpoint.tensors["optimizer"])
        return
    if checkpoint.state["processes"] != weights.runtime.world:
        raise ValueError(
            f"{checkpoint.path} was made by {checkpoint.state['processes']} DeepSpeed processes, here are "
            f"{weights.runtime.world}; ZeRO's shards fit the number that made them"
        )
    engine: Any = weights.transformer
    # Not strict: frozen weights were left out of it.
    engine.load_checkpoint(checkpoint.path, tag=ENGINE, load_module_strict=False)


# --- random generators and an optimizer's state ----------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """This process's random generators, as JSON takes them."""
    version, words, spare = random.getstate()
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    state = {
        "python": [version, list(words), spare],
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Undo what was drawn since `random_state`."""
    version, words, spare = state["python"]
    random.setstate((version, tuple(words), spare))
    numpy = state["numpy"]
    key = np.array(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(state["torch"])), dtype=torch.uint8))
    # A run may go on without the card that it began on.
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(list(bytes.fromhex(state["cuda"])), dtype=torch.uint8))


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, Tensor]:
    """An optimizer's state by the names of its parameters, `exp_avg/NAME`, unsharded. Every process must call it."""
    state = optimizer.state_dict()["state"]
    return {
        f"{kind}/{name}": full_tensor(value)
        for number, name in enumerate(names)
        for kind, value in state.get(number, {}).items()
    }


def set_optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Put back what `optimizer_tensors` gave, sharded as the parameters are now.

    Raises:
        ValueError: if the state is of other parameters.
    """
    state: dict[int, dict[str, Tensor]] = {}
    numbers = {name: number for number, name in enumerate(parameters)}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if name not in numbers:
            raise ValueError(f"the optimizer's state is of a weight that this run does not train: {name}")
        # AdamW's step counters are scalars, which no launcher shards.
        fitting = shard_like(parameters[name], value) if value.dim() else value
        state.setdefault(numbers[name], {})[kind] = fitting
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


# --- folders that are whole whenever they carry a name ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint's folder holds."""

    path: Path
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    generators: list[dict[str, Any]]
    """The random state of each rank."""


def aside_of(target: Path) -> Path:
    """Where a folder is written before it takes its name."""
    return target.with_name(f".{target.name}.partial")


def open_aside(target: Path) -> Path:
    """An empty folder to write `target` into."""
    aside = aside_of(target)
    shutil.rmtree(aside, ignore_errors=True)
    make_folder(aside.parent)
    aside.mkdir()  # raises if a link has its name
    return aside


def put_in_place(target: Path, *, made: Sequence[str]) -> None:
    """Give what lies aside its name, so that a folder that has the name is whole, whatever happens meanwhile.

    Args:
        target: the name; of a folder that had it, files of other names than `made` move into the new one.
        made: patterns of the files that are written there.
    """
    aside, replaced = aside_of(target), target.with_name(f".{target.name}.replaced")
    # Content before names: a rename may otherwise outlive a power cut that what it names does not.
    flush_tree(aside)
    if target.exists():
        remove_made(replaced, made, others=target)
        target.rename(replaced)
    aside.rename(target)
    flush_to_disk(target.parent)
    remove_made(replaced, made, others=target)


def write_checkpoint(
    target: Path,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    generators: Sequence[Mapping[str, Any]],
    export: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write a checkpoint into its folder aside (`open_aside`) and give it its name; `export` adds its own files.

    Raises:
        OSError: if the disk is full, with the fix; earlier checkpoints stay as they were.
    """
    aside = aside_of(target)
    try:
        for kind, weights in tensors.items():
            whole = {name: value.contiguous().cpu() for name, value in weights.items()}
            save_file(whole, aside / f"{kind}.safetensors")
        write_json(aside / "generators.json", list(generators), indent=None, mode=PRIVATE)
        export(aside)
        sealed = as_read_back({**state, "files": digests(aside)})
        write_json(aside / "state.json", {**sealed, SEAL: _seal_of(sealed)}, mode=PRIVATE)
        put_in_place(target, made=CHECKPOINT_FILES)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) else error
        raise OSError(
            f"checkpoint {target} could not be written ({reason}); earlier checkpoints are untouched, "
            "make room and go on with --resume auto"
        ) from error


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        ValueError: if the folder is none, or damaged.
    """
    if not (path / "state.json").is_file():
        raise ValueError(f"{path} is not a checkpoint (no state.json)")
    with safetensors_errors(path):
        tensors = {file.stem: load_file(file) for file in sorted(path.glob("*.safetensors")) if file.is_file()}
    return Checkpoint(path, tensors, read_object(path / "state.json"), read_json(path / "generators.json"))


def recover(folder: Path) -> None:
    """Put back a checkpoint that a kill caught between two names, and clear what was left half done."""
    for path in sorted(folder.glob(".step-*")):
        match = HALF_DONE.fullmatch(path.name)
        if not match:
            continue
        target, state = folder / match[1], match[2]
        if state == "partial":
            shutil.rmtree(path, ignore_errors=True)
        elif state == "deleted":
            _delete(path, target)
        elif target.exists():
            remove_made(path, CHECKPOINT_FILES, others=target)
        else:
            path.rename(target)


def prune(folder: Path, *, keep: int, newest: int, best: Path | None = None) -> None:
    """Delete all but the newest `keep` and the `best`, and those beyond step `newest`, which a run that went back has
    given up."""
    past = [path for path in checkpoints(folder) if step_of(path) <= newest]
    for path in checkpoints(folder):
        if path not in past[-keep:] and path != best:
            # Half a checkpoint must not carry the name of one.
            doomed = path.with_name(f".{path.name}.deleted")
            path.rename(doomed)
            _delete(doomed, path)


def _delete(doomed: Path, path: Path) -> None:
    """Delete a checkpoint's files; other files stay in a folder whose name no checkpoint has."""
    kept = path.with_name(f"{path.name}.kept")
    try:
        others = remove_made(doomed, CHECKPOINT_FILES, others=kept)
    except OSError as error:
        logger.warning("%s could not be deleted (%s)", doomed, error)
        return
    if others:
        logger.warning("%s is deleted but for what the run did not write: %s stays in %s", path, others[0], kept)
