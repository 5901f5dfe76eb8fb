"""Checkpoints of a run: saving, restoring, and folders that survive kills and full disks.

A checkpoint holds the adapter, its moving average, the optimizer's state and every rank's random generators. Its
state.json holds the epoch (its draws follow from the seed), the optimizer step (the learning rate follows from it), the
length of the log, the config, and the SHA-256 of all other files. Its `lora/` is the averaged adapter for use
elsewhere. docs/survives.md lists the failures that it survives.
"""

from __future__ import annotations

import errno
import itertools
import logging
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pacorl.config.base import changed_keys, changes_to, check_changes, frozen_changes
from pacorl.config.user_files import code_digest, file_digests, user_files
from pacorl.grpo.lora_config import LoraConfig
from pacorl.grpo.lora_run import LoraRun
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.start import Resume, checkpoints, named_start, step_of
from pacorl.io.documents import as_read_back, dump_json, read_json, read_object, write_json
from pacorl.io.files import (
    PRIVATE,
    aside_of,
    check_digests,
    digests,
    flush_to_disk,
    flush_tree,
    open_aside,
    remove_made,
    safetensors_errors,
    text_digest,
)
from pacorl.judge import JUDGE
from pacorl.judge.judge import BackendOptions
from pacorl.models.adapters import adapter_state, full_state, full_tensor, set_adapter_state, shard_like
from pacorl.models.lora import ADAPTER_FILES, save_lora
from pacorl.rewards.reward import RewardFunction

logger = logging.getLogger(__name__)

STATE = (
    *("epoch", "step", "seed", "evaluated", "score", "best_by", "bad_steps", "log_lines", "processes"),
    *("config", "files", "sha256"),
)
"""Required keys of state.json."""
JUDGES_OF_A_RUN = ("judge", "evaluation.judge")
"""Config sections of the judges of the rewards and of the held-out rewards."""
ACCESS_KEYS = ("api_key_env", "concurrency", "timeout", "retries", "startup", "outage", "overlap")
"""Keys that affect a judge's requests, not its answers."""
SOURCE_KEYS = ("checkpoint", "adapter", "model")
"""Keys of a judge's location, free as long as its `BackendOptions.identity` stays."""
FREE_KEYS = (
    *("out", "save_every", "keep_checkpoints", "trackers", "evaluation.every", "prompts.leaks", "monitor"),
    *("advantages.max_missing", "model.gradient_checkpointing", "reward_timeout"),
    *(f"{judge}.{key}" for judge, key in itertools.product(JUDGES_OF_A_RUN, ACCESS_KEYS)),
)
"""Config keys that a resumed run may change: no reward, gradient or learning rate depends on them."""
LENGTH_KEYS = ("epochs", "max_steps")
"""Config keys that are free under a constant schedule. Under a cosine schedule the learning rate depends on them."""
SEAL = "sha256"
"""Key in state.json: hash of its other keys."""
CHECKPOINT_FILES = (
    *(f"{kind}.safetensors" for kind in ("adapter", "average", "old", "optimizer")),
    *(f"lora/{name}" for name in ADAPTER_FILES),
    *("generators.json", "state.json"),
)
"""Patterns of a checkpoint's files. Files of other names belong to the user and are never deleted."""
HALF_DONE = re.compile(r"\.(step-\d{6,})\.(partial|replaced|deleted)")
"""Names of temporary folders that a kill leaves among the checkpoints."""


# --- a run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunState:
    """Content of a checkpoint, unsharded."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    """File stem → weights or moments by name."""
    state: dict[str, Any]
    """Content of state.json."""
    generators: Sequence[Mapping[str, Any]]
    """Random state of each rank."""


def stepped_parameters(run: LoraRun) -> dict[str, nn.Parameter]:
    """Map names to the optimizer's parameters, in its order."""
    # The optimizer knows parameters by position; names survive another number of processes.
    names = {parameter: name for name, parameter in run.transformer.named_parameters()}
    parameters: dict[str, nn.Parameter] = {}
    for group in run.optimizer.param_groups:
        parameters |= {names[parameter]: parameter for parameter in group["params"]}
    return parameters


def save_run(run: LoraRun, state: Mapping[str, Any], *, targets: Sequence[str]) -> Path:
    """Write a checkpoint to resume from, and the averaged adapter for use elsewhere. All ranks call it.

    Args:
        run: the run.
        state: content of state.json, without the config and the hashes; the main process's is written.
        targets: name suffixes of the adapted modules.

    Returns:
        The checkpoint.

    Raises:
        OSError: on all ranks, if the disk is full.
    """
    # 1. A collective per tensor: every rank gathers in the same order.
    config = run.config
    tensors = {"adapter": full_state(adapter_state(run.transformer)), "average": full_state(run.average.state)}
    if run.old:
        tensors["old"] = full_state(run.old.state)
    tensors["optimizer"] = optimizer_tensors(run.optimizer, list(stepped_parameters(run)))
    generators = run.runtime.gather(random_state())
    target = config.out / "checkpoints" / f"step-{run.step:06d}"

    # 2. One rank writes, and updates the files derived from the checkpoint.
    def export(folder: Path) -> None:
        save_lora(
            folder / "lora",
            tensors["average"],
            rank=config.adapter.rank,
            alpha=config.adapter.alpha,
            targets=tuple(targets),
            base=config.model.checkpoint,
        )

    def write() -> None:
        content = {**state, "config": config.model_dump(mode="json")}
        write_checkpoint(target, tensors=tensors, state=content, generators=generators, export=export)
        settle(target, config)

    run.runtime.on_main(write)
    return target


def settle(checkpoint: Path, config: LoraConfig) -> None:
    """Update the files derived from the newest checkpoint: best.json, adapter/, and the pruned checkpoints.

    A kill may interrupt it, so a resumed run repeats it.
    """
    folder = checkpoint.parent
    best = best_checkpoint(folder)
    best_path = None
    if best:
        best_path = folder / best["checkpoint"]
        write_json(folder / "best.json", best)  # before pruning deletes the earlier best
    prune(folder, keep=config.keep_checkpoints, newest=step_of(checkpoint), best=best_path)
    publish(checkpoint, config.out / "adapter")


def best_checkpoint(folder: Path) -> dict[str, Any] | None:
    """Find the checkpoint with the highest score, the later of equals, as the content of best.json.

    Logs a warning for each damaged checkpoint. None without a scored checkpoint.
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
    """Copy a checkpoint's averaged adapter to `folder`, the newest adapter of the run.

    Raises:
        OSError: if the disk is full, with the fix, or a folder has the name of one of the files. The earlier adapter
            stays.
    """
    for name in ADAPTER_FILES:
        if (folder / name).is_dir():
            fix = f"a folder in the place of a file; move it away, the same adapter is in {checkpoint / 'lora'}"
            raise OSError(errno.EISDIR, fix, str(folder / name))
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


def starting_point(config: LoraConfig, resume: Resume) -> Path | None:
    """Find the checkpoint to start from, if any, and clean up after a kill.

    "auto" takes the newest whole checkpoint, and logs a warning for damaged checkpoints.

    Raises:
        ValueError: if `out` holds a run but `resume` is false, or the named checkpoint is missing or damaged.
    """
    folder = config.out / "checkpoints"
    recover(folder)
    # A named checkpoint must be whole; "auto" goes back to the newest that is.
    start = named_start(config.out, resume)
    existing = checkpoints(folder)
    if start is not None:
        check_whole(start)
    elif resume and existing:
        start = _newest_whole(existing)
        # A damaged newer checkpoint stays until it is written again.
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
        raise ValueError(f"{checkpoint / 'state.json'} is damaged: its content does not match its hash")
    check_digests(checkpoint, state["files"])


def _seal_of(state: Mapping[str, Any]) -> str:
    """Hash the content of a state.json, so that a changed number is not mistaken for the run's."""
    return text_digest(dump_json(state))


def changes_since(
    checkpoint: Path, config: PolicyConfig, *, code: Mapping[str, str], allowed: bool
) -> dict[str, list[Any]]:
    """Compare a config and the user's code (`code_identities`) with a checkpoint's.

    Returns:
        Dotted key → [value before, value now].

    Raises:
        ConfigError: if code, or a key that is not free, changes and changes are not `allowed`.
    """
    state = read_object(checkpoint / "state.json")
    before = state["config"]
    changes = changes_to(config, before)
    free = list(free_keys(config))
    # A judge at another place may be the same judge: its weights and prompt decide.
    recorded = state.get("judges", {})
    for key, now in judge_identities(config).items():
        then = recorded.get(key) or _identity_of(before, key)
        if then and then == now:
            free += [f"{key}.{source}" for source in SOURCE_KEYS]
        elif then and now:
            path = f"{key}.checkpoint"
            changes[path] = [
                f"{_value_at(before, path)} ({then})",
                f"{_value_at(config.model_dump(), path)} ({now})",
            ]
    frozen = frozen_changes(changes, free=free)
    # Code of other names came or went with a key.
    edited = changed_keys(state.get("code", {}), code, path="code of ")
    frozen |= edited
    check_changes(frozen, allowed=allowed)
    return changes | edited


def free_keys(config: PolicyConfig) -> tuple[str, ...]:
    """List the config keys that a resumed run may change, except its judges' sources."""
    return FREE_KEYS + LENGTH_KEYS if config.optimizer.schedule == "constant" else FREE_KEYS


def code_identities(config: PolicyConfig, functions: Mapping[str, RewardFunction]) -> dict[str, str]:
    """Hash the user's code: reward function's name, or `path/to/file.py:NAME` in the config → short digest."""
    digests = {name: code_digest(function) for name, function in functions.items()}
    digests |= file_digests(config.model_dump(mode="json"))
    return {name: f"sha256 {digest[:12]}" for name, digest in digests.items()}


def judge_identities(config: PolicyConfig) -> dict[str, str]:
    """Map each judge's section to the identity of its weights and prompt; empty if it cannot be determined yet."""
    judges = zip(JUDGES_OF_A_RUN, (config.judge, config.evaluation.judge), strict=True)
    return {key: options.identity() for key, options in judges if options}


def _identity_of(config: Mapping[str, Any], key: str) -> str:
    """Compute the identity of an old config's judge from today's files; empty if they are missing."""
    section = _value_at(config, key)
    if not section:
        return ""
    try:
        with user_files(run=False):  # a checkpoint may be somebody else's
            return BackendOptions.model_validate(JUDGE.validate(section)).identity()
    except (ValueError, OSError):
        return ""


def _value_at(document: Mapping[str, Any], key: str) -> Any:
    value: Any = document
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def restore(run: LoraRun, path: Path) -> dict[str, Any]:
    """Restore a run's weights, optimizer and generators from a checkpoint, also with another number of processes.

    Args:
        run: the run, changed in place.
        path: the checkpoint.

    Returns:
        The content of state.json.

    Raises:
        ValueError: if the checkpoint does not fit the run.
    """
    # 1. Check that it is complete and of this run.
    checkpoint = load_checkpoint(path)
    state = checkpoint.state
    tensors = checkpoint.tensors
    for kind in ("adapter", "average", "optimizer"):
        if kind not in tensors:
            raise ValueError(f"{path} has no {kind}.safetensors; go on from another checkpoint")
    if state["seed"] != run.config.seed:
        raise ValueError(f"{path} was made with seed {state['seed']}, the config has seed {run.config.seed}")

    # 2. Weights and optimizer.
    set_adapter_state(run.transformer, tensors["adapter"])
    run.average.load(tensors["average"])
    if run.old:
        # Without "old" the run began with a path objective, which samples by the trained weights.
        run.old.load(tensors.get("old", tensors["adapter"]))
    set_optimizer_tensors(run.optimizer, stepped_parameters(run), tensors["optimizer"])

    # 3. Generators, if each rank has one. Draws follow from (seed, epoch, row) anyway.
    if state["processes"] == run.runtime.world:
        set_random_state(checkpoint.generators[run.runtime.rank])
    return state


# --- random generators and an optimizer's state ----------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """Return the state of this process's random generators, as JSON values."""
    # As JSON, not as a pickle: a checkpoint must not run code.
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
    """Restore the generators from a `random_state`."""
    version, words, spare = state["python"]
    random.setstate((version, tuple(words), spare))
    numpy = state["numpy"]
    key = np.array(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(state["torch"])), dtype=torch.uint8))
    # A run may resume without a GPU.
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(list(bytes.fromhex(state["cuda"])), dtype=torch.uint8))


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, Tensor]:
    """Return an optimizer's unsharded state by parameter names, `exp_avg/NAME`. All ranks call it."""
    state = optimizer.state_dict()["state"]
    tensors = {}
    for number, name in enumerate(names):
        for kind, value in state.get(number, {}).items():
            tensors[f"{kind}/{name}"] = full_tensor(value)
    return tensors


def set_optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Restore an optimizer from `optimizer_tensors`, sharded like its parameters.

    Raises:
        ValueError: if the state belongs to other parameters.
    """
    state: dict[int, dict[str, Tensor]] = {}
    # torch numbers an optimizer's state by the order of its parameters.
    numbers = {name: number for number, name in enumerate(parameters)}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if name not in numbers:
            raise ValueError(f"the optimizer's state has weights that this run does not train: {name}")
        # AdamW's step counters are scalars, which no launcher shards.
        sharded = shard_like(parameters[name], value) if value.dim() else value
        state.setdefault(numbers[name], {})[kind] = sharded
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


# --- atomic folders --------------------------------------------------------------------------------------------


def put_in_place(target: Path, *, made: Sequence[str]) -> None:
    """Rename the temporary folder to `target`, so that a folder of that name is always complete.

    Args:
        target: the final name. An existing folder is replaced; its files not matching `made` are moved to the new one.
        made: patterns of the written files.
    """
    aside = aside_of(target)
    replaced = target.with_name(f".{target.name}.replaced")
    # Content before names: after a power cut the renamed folder must not lack its content.
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
    """Write a checkpoint into a temporary folder, and rename it; `export` adds further files.

    Raises:
        OSError: if the disk is full, with the fix. Earlier checkpoints are untouched.
    """
    aside = open_aside(target)
    try:
        # 1. Tensors, generators and the exported adapter.
        for kind, weights in tensors.items():
            whole = {}
            for name, value in weights.items():
                whole[name] = value.contiguous().cpu()
            save_file(whole, aside / f"{kind}.safetensors")
        write_json(aside / "generators.json", list(generators), indent=None, mode=PRIVATE)
        export(aside)

        # 2. state.json with the hashes of the files, and its own.
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


def load_checkpoint(path: Path) -> RunState:
    """Read a checkpoint.

    Raises:
        ValueError: if the folder is none, or damaged.
    """
    if not (path / "state.json").is_file():
        raise ValueError(f"{path} is not a checkpoint (no state.json)")
    with safetensors_errors(path):
        tensors = {}
        for file in sorted(path.glob("*.safetensors")):
            if file.is_file():
                tensors[file.stem] = load_file(file)
    return RunState(tensors, read_object(path / "state.json"), read_json(path / "generators.json"))


def recover(folder: Path) -> None:
    """Finish or undo the renames and deletions of checkpoints that a kill interrupted."""
    for path in sorted(folder.glob(".step-*")):
        match = HALF_DONE.fullmatch(path.name)
        if not match:
            continue
        target = folder / match[1]
        state = match[2]
        if state == "partial":
            shutil.rmtree(path, ignore_errors=True)
        elif state == "deleted":
            _delete(path, target)
        elif target.exists():
            remove_made(path, CHECKPOINT_FILES, others=target)
        else:
            path.rename(target)


def prune(folder: Path, *, keep: int, newest: int, best: Path | None = None) -> None:
    """Delete checkpoints except the newest `keep` and the `best`; also steps above `newest`, after a step back."""
    # Steps above the newest belong to a future that a step back has undone.
    past = [path for path in checkpoints(folder) if step_of(path) <= newest]
    for path in checkpoints(folder):
        if path not in past[-keep:] and path != best:
            # Renamed first: a kill must not leave half a checkpoint under its name.
            doomed = path.with_name(f".{path.name}.deleted")
            path.rename(doomed)
            _delete(doomed, path)


def _delete(doomed: Path, path: Path) -> None:
    """Delete a checkpoint's files, and move other files to `NAME.kept`."""
    users_folder = path.with_name(f"{path.name}.kept")
    try:
        users_files = remove_made(doomed, CHECKPOINT_FILES, others=users_folder)
    except OSError as error:
        logger.warning("%s could not be deleted (%s)", doomed, error)
        return
    if users_files:
        logger.warning("%s is deleted except files of other origin: %s is in %s", path, users_files[0], users_folder)
