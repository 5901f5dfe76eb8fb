"""Checkpoints of a LoRA's training: saving, restoring, and folders that survive kills and full disks.

A checkpoint is a folder `step-000040` with
    state.safetensors   adapter, moving average, sampling policy if it lags, and the optimizer's moments
    state.json          the epoch (its draws follow from the seed), the step, the length of the log, the config,
                        the identities of its rewards, and the SHA-256 of the other files
    lora/               the averaged adapter for use elsewhere
Policies and characters share the format and the rules for changes on resume. docs/running.md lists the
failures that it survives.
"""

import logging
import math
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pacorl.config.base import changes_to, check_changes, check_replaces
from pacorl.config.user_files import code_digest, file_digests
from pacorl.core.devices import pinned
from pacorl.grpo.lora_config import LoraConfig
from pacorl.grpo.lora_training import LoraTraining, section_of
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.start import checkpoints, step_of
from pacorl.io.documents import as_read_back, read_object, write_json
from pacorl.io.files import (
    PRIVATE,
    aside_of,
    check_digests,
    check_no_link,
    check_start,
    digests,
    flush_to_disk,
    flush_tree,
    open_aside,
    replacing,
    safetensors_errors,
)
from pacorl.judge import identity_at
from pacorl.judge.judge import Judge
from pacorl.models.lora import save_lora
from pacorl.rewards.reward import RewardFunction
from pacorl.runtime.logbook import Progress

logger = logging.getLogger(__name__)

TENSORS = "state.safetensors"
PLACES = {"judge": "judge.checkpoint", "evaluation.judge": "evaluation.judge"}
"""Judge of the rewards or of the held-out rewards → config key of its place, free as long as its identity stays."""
FREE_KEYS = (
    *("out", "epochs", "steps", "save_every", "keep_checkpoints", "trackers", "evaluation.every", "monitor"),
    *("character", "model.gradient_checkpointing", "reward_timeout"),
    # These change the rounding of sums alone. `sampling.batch` decides which samples an update has.
    *("evaluation.batch", "optimizer.micro_batch"),
)
"""Config keys that a resumed run may change: no reward, gradient or learning rate depends on them."""
HALF_DONE = re.compile(r"\.(step-\d{6,})\.(partial|replaced)")
"""Names of temporary folders that a kill leaves among the checkpoints."""


class CheckpointWriter:
    """Writer of checkpoints to resume from, and of the averaged adapter for use elsewhere, on a thread.

    A save takes of the caller's time the end of the earlier one, and a copy of the tensors into host memory that is
    kept, and pinned on GPU machines. All ranks make the same calls.
    """

    def __init__(self, lora: LoraTraining, config: LoraConfig, *, progress: Progress) -> None:
        """
        Args:
            progress: gets the seconds of the phases `copy` and `save`.
        """
        self.lora = lora
        self.config = config
        self.progress = progress
        self._kept: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pacorl-save")
        self._write: Future[float] | None = None

    def save(self, state: Mapping[str, Any]) -> Path:
        """Copy the tensors, and begin to write.

        Args:
            state: further content of state.json; the main process's is written.

        Returns:
            The checkpoint, which is whole after `finish`.

        Raises:
            OSError: on all ranks, if the earlier checkpoint could not be written.
        """
        self.finish()
        lora, config = self.lora, self.config
        target = config.out / "checkpoints" / f"step-{lora.step:06d}"
        started = time.perf_counter()
        tensors = lora.tensors()  # a collective per tensor: every rank gathers in the same order
        if lora.runtime.is_main:
            settings = config.model_dump(mode="json")
            content = {**state, "step": lora.step, "bad_steps": lora.bad_steps, "config": settings}
            # Into the kept memory: the next optimizer step changes the tensors.
            for name, value in tensors.items():
                if name not in self._kept:
                    buffer = torch.empty(value.shape, dtype=value.dtype)
                    self._kept[name] = pinned(buffer) if value.is_cuda else buffer
                self._kept[name].copy_(value, non_blocking=value.is_cuda)
            if lora.runtime.device.type == "cuda":
                torch.cuda.current_stream(lora.runtime.device).synchronize()
            self._write = self._thread.submit(self._write_all, target, self._kept, content)
        self.progress.add("copy", time.perf_counter() - started)
        return target

    def finish(self) -> None:
        """Wait until the newest checkpoint is on the disk.

        Raises:
            OSError: on all ranks, if it could not be written.
        """
        write, self._write = self._write, None
        seconds = self.lora.runtime.on_main(lambda: write.result() if write else 0.0)
        self.progress.add("save", seconds)

    def close(self) -> None:
        """Wait for a running write; `finish` raises its fault."""
        if self._write:
            wait([self._write])

    def _write_all(self, target: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> float:
        """Write a checkpoint, and update the files derived from it; return the seconds."""
        config = self.config

        def export(folder: Path) -> None:
            save_lora(
                folder / "lora",
                section_of(tensors, "average"),
                rank=config.adapter.rank,
                alpha=config.adapter.alpha,
                targets=tuple(config.adapter.targets or self.lora.policy.lora_targets),
                base=config.model.checkpoint,
            )

        started = time.perf_counter()
        write_checkpoint(target, tensors=tensors, state=state, export=export)
        settle(target, config)
        return time.perf_counter() - started


def restore(lora: LoraTraining, path: Path) -> dict[str, Any]:
    """Restore weights, optimizer and counters, also with another number of processes; return state.json's content.

    Raises:
        ValueError: if the checkpoint does not fit the run.
    """
    state = read_object(path / "state.json")
    with safetensors_errors(path):
        lora.load(load_file(path / TENSORS))
    lora.step = state["step"]
    lora.bad_steps = state["bad_steps"]
    return state


def starting_point(config: LoraConfig, *, resume: bool) -> Path | None:
    """Find the newest whole checkpoint, if any, and clean up after a kill; logs a warning for damaged checkpoints.

    Raises:
        ValueError: if `out` holds a run but `resume` is false, or all checkpoints are damaged.
    """
    check_start(config.out, resume=resume)
    folder = config.out / "checkpoints"
    recover(folder)
    existing = checkpoints(folder)
    if not existing:
        check_replaces(config)
        return None
    start = newest_whole(existing, check_whole)
    # A damaged newer checkpoint stays until it is written again.
    if start == existing[-1]:
        settle(start, config)
    return start


def newest_whole(existing: Sequence[Path], check: Callable[[Path], object]) -> Path:
    """Return the newest checkpoint that `check` accepts, and log a warning for each damaged one.

    Raises:
        ValueError: if all are damaged.
    """
    for path in reversed(existing):
        try:
            check(path)
        except ValueError as fault:
            logger.warning("%s; the checkpoint before it is taken", fault)
        else:
            return path
    raise ValueError(f"no checkpoint in {existing[0].parent} is whole; copy one back, or start anew with out=…")


def check_whole(checkpoint: Path) -> None:
    """Raise ValueError, naming the file, if a checkpoint is damaged."""
    check_digests(checkpoint, read_object(checkpoint / "state.json")["files"])


def check_changes_since(checkpoint: Path, config: LoraConfig, *, identities: Mapping[str, str]) -> None:
    """Compare a config and the identities of its rewards with a checkpoint's, and log a warning for each free change.

    Args:
        identities: of judges, code or images by name (`identities_of`).

    Raises:
        ConfigError: if an identity or a fixed key changes.
    """
    state = read_object(checkpoint / "state.json")
    changes = changes_to(config, state["config"])
    free = [*FREE_KEYS]
    # Names that came or went did so with a key of the config.
    for name in sorted(state["identities"].keys() & identities.keys()):
        if state["identities"][name] != identities[name]:
            changes[name] = [state["identities"][name], identities[name]]
        elif name in PLACES:
            # A judge at another place is the same judge: its weights and prompt decide.
            free.append(PLACES[name])
    check_changes(changes, free=free)


def identities_of(
    config: PolicyConfig, judges: Mapping[str, Judge], functions: Mapping[str, RewardFunction]
) -> dict[str, str]:
    """Identify the weights and code behind the rewards, which the config's keys do not determine.

    Args:
        judges: the opened ones of `builders.open_judges`, whose servers may publish a digest of their weights.
        functions: rewards that are Python functions, by name.

    Returns:
        Section → weights, prompt and version of its judge; and `code of NAME` → short digest of a reward function or of
        a file in the config. A judge whose identity is not known yet is left out, as is a function without source.
    """
    places = zip(PLACES, (config.judge, config.held_out_judge), ("rewards", "held_out"), strict=True)
    identities = {}
    for name, options, role in places:
        identity = identity_at(options.checkpoint, judges.get(role)) if options else ""
        if identity:
            identities[name] = identity
    digests = {name: code_digest(function) for name, function in functions.items()}
    digests |= file_digests(config.model_dump(mode="json"))
    for name, digest in digests.items():
        if digest:
            identities[f"code of {name}"] = f"sha256 {digest[:12]}"
    return identities


def settle(checkpoint: Path, config: LoraConfig) -> None:
    """Prune the checkpoints after the newest is written, and update adapter/, in which a user's files stay.

    A kill may interrupt it, so a resumed run repeats it.
    """
    best = best_checkpoint(checkpoint.parent)
    prune(checkpoint.parent, keep=config.keep_checkpoints, newest=step_of(checkpoint), best=best)
    exported = best if best and config.exports_best else checkpoint
    folder = config.out / "adapter"
    check_no_link(folder)
    for path in sorted((exported / "lora").iterdir()):
        with replacing(folder / path.name) as temporary:
            shutil.copyfile(path, temporary)


def best_checkpoint(folder: Path) -> Path | None:
    """Find the checkpoint with the highest score, the later of equals; None without a scored checkpoint.

    Logs a warning for each damaged checkpoint.
    """
    best: Path | None = None
    highest = -math.inf
    for path in checkpoints(folder):
        try:
            score = read_object(path / "state.json")["score"]
        except ValueError as fault:
            logger.warning("%s; it cannot be the best checkpoint", fault)
            continue
        if score is not None and score >= highest:
            best, highest = path, score
    return best


def write_checkpoint(
    target: Path,
    *,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    export: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write a checkpoint into a temporary folder, and rename it; `export` adds further files.

    Raises:
        OSError: if the disk is full, with the fix. Earlier checkpoints are untouched.
    """
    aside = open_aside(target)
    try:
        save_file({name: value.contiguous().cpu() for name, value in tensors.items()}, aside / TENSORS)
        export(aside)
        write_json(aside / "state.json", as_read_back({**state, "files": digests(aside)}), mode=PRIVATE)
        # Content before names: after a power cut the renamed folder must not lack its content.
        flush_tree(aside)
        # By renames, so that a folder of that name is always complete.
        replaced = target.with_name(f".{target.name}.replaced")
        if target.exists():
            target.rename(replaced)
        aside.rename(target)
        flush_to_disk(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) else error
        raise OSError(
            f"checkpoint {target} could not be written ({reason}); earlier checkpoints are untouched, "
            "make room and go on with --resume auto"
        ) from error


def recover(folder: Path) -> None:
    """Finish or undo the renames and deletions of checkpoints that a kill interrupted."""
    for path in sorted(folder.glob(".step-*")):
        match = HALF_DONE.fullmatch(path.name)
        if match and match[2] == "replaced" and not (folder / match[1]).exists():
            path.rename(folder / match[1])
        elif match:
            shutil.rmtree(path, ignore_errors=True)


def prune(folder: Path, *, keep: int, newest: int, best: Path | None = None) -> None:
    """Delete checkpoints except the newest `keep` and the `best`; also damaged ones above the `newest`."""
    # A run that went on before a damaged checkpoint has given it up.
    past = [path for path in checkpoints(folder) if step_of(path) <= newest]
    for path in checkpoints(folder):
        if path in past[-keep:] or path == best:
            continue
        try:
            # By a name that `recover` deletes: a kill must not leave half a checkpoint.
            path.rename(aside_of(path))
            shutil.rmtree(aside_of(path))
        except OSError as error:
            logger.warning("%s could not be deleted (%s)", path, error)
