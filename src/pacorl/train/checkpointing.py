"""A run's checkpoints: what is saved, and how it is put back.

A checkpoint holds the adapter, its moving average, the optimizer's state, every rank's random generators, and in
state.json the data position (the epoch: what it draws follows from the seed), the optimizer step (the learning rate
follows from it) and how far the log went. `lora/` in it is the averaged adapter for use elsewhere.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pacorl.config.policy_run import PolicyRun
from pacorl.engine.checkpoint import (
    Checkpoint,
    aside_of,
    checkpoints,
    load_checkpoint,
    open_aside,
    optimizer_tensors,
    prune,
    put_in_place,
    random_state,
    recover,
    set_optimizer_tensors,
    set_random_state,
    write_checkpoint,
)
from pacorl.engine.runtime import Runtime
from pacorl.io.documents import read_object, write_json
from pacorl.lora.adapters import MovingAverage, OldPolicy, adapter_state, full_state, set_adapter_state
from pacorl.lora.formats import save_lora

Resume = bool | str | Path
"""False or "" for a new run, True or "auto" for the newest checkpoint if there is one, or a checkpoint's folder."""

ENGINE = "deepspeed"
"""DeepSpeed keeps its optimizer's shards in a folder of its own."""


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
    def bare(self) -> nn.Module:
        """The transformer without the wrapper."""
        return self.runtime.unwrap(self.transformer)

    def stepped(self) -> dict[str, nn.Parameter]:
        """The weights that the optimizer steps, by name, in its order."""
        names = {parameter: name for name, parameter in self.bare.named_parameters()}
        return {names[parameter]: parameter for group in self.optimizer.param_groups for parameter in group["params"]}


def save_run(weights: TrainedWeights, config: PolicyRun, state: Mapping[str, Any], *, targets: Sequence[str]) -> None:
    """Write a checkpoint to resume from, and the averaged adapter for use elsewhere. All ranks call it.

    Args:
        weights: the run's.
        config: where it lies, the adapter's shape, and how many checkpoints are kept.
        state: what state.json holds.
        targets: the adapter's modules.

    Raises:
        OSError: on all ranks, if the disk is full.
    """
    runtime = weights.runtime
    tensors = {"adapter": full_state(adapter_state(weights.bare)), "average": full_state(weights.average.state)}
    if weights.old:
        tensors["old"] = full_state(weights.old.state)
    generators = runtime.gather(random_state())
    target = config.out / "checkpoints" / f"step-{state['step']:06d}"
    aside = runtime.on_main(partial(open_aside, target))
    if runtime.deepspeed:
        weights.transformer.save_checkpoint(aside, tag=ENGINE, exclude_frozen_parameters=True)  # type: ignore[operator]
    else:
        tensors["optimizer"] = optimizer_tensors(weights.optimizer, list(weights.stepped()))
    export = partial(
        save_lora,
        state=tensors["average"],
        rank=config.adapter.rank,
        alpha=config.adapter.alpha,
        targets=tuple(targets),
        base=config.model.checkpoint,
    )
    runtime.on_main(partial(_write, config, target, tensors=tensors, state=state, generators=generators, export=export))


def _write(
    config: PolicyRun,
    target: Path,
    *,
    tensors: dict[str, dict[str, Tensor]],
    state: Mapping[str, Any],
    generators: list[Any],
    export: Callable[[Path], None],
) -> None:
    write_checkpoint(
        target, tensors=tensors, state=state, generators=generators, export=lambda folder: export(folder / "lora")
    )
    best = _best(target.parent)
    prune(target.parent, keep=config.keep_checkpoints, newest=state["step"], best=best)
    if best:
        write_json(target.parent / "best.json", {"checkpoint": best.name} | _score_of(best))
    # The copy comes last: `--resume` repeats it, and the checkpoint before it is whole.
    publish(target, config.out / "adapter")


def publish(checkpoint: Path, folder: Path) -> None:
    """Copies a checkpoint's averaged adapter to where a user looks for the newest.

    Raises OSError with the fix where the disk is full; what was there stays.
    """
    try:
        shutil.copytree(checkpoint / "lora", open_aside(folder), dirs_exist_ok=True)
        put_in_place(folder)
    except OSError as error:
        shutil.rmtree(aside_of(folder), ignore_errors=True)
        raise OSError(
            f"{folder} could not be written; the same adapter is in {checkpoint / 'lora'}, and the run can go on from "
            "there with --resume auto when there is room"
        ) from error


def _score_of(path: Path) -> dict[str, Any]:
    state = read_object(path / "state.json")
    return {"best_by": state["best_by"], "score": state["score"]}


def _best(folder: Path) -> Path | None:
    """The checkpoint with the highest score; the later of equals."""
    scored = [(path, _score_of(path)["score"]) for path in checkpoints(folder)]
    ranked = [(score, number, path) for number, (path, score) in enumerate(scored) if score is not None]
    return max(ranked)[2] if ranked else None


# --- going on --------------------------------------------------------------------------------------------------


def starting_point(config: PolicyRun, resume: Resume) -> Path | None:
    """The checkpoint that a run starts from, if any; clears what a kill left half done.

    Raises ValueError where `out` holds a run that is not to be resumed, or the named checkpoint is none.
    """
    folder = config.out / "checkpoints"
    recover(folder)
    existing = checkpoints(folder)
    automatic = resume is True or str(resume) == "auto"
    named = None if automatic or not resume else Path(str(resume)).resolve()
    foreign = named is not None and named.parent != folder.resolve()
    if (foreign or not resume) and (existing or (config.out / "metrics.jsonl").exists()):
        raise ValueError(
            f"{config.out} holds a run already; go on with --resume auto, or name another folder with out=…"
        )
    if named is None:
        return _published(existing[-1], config.out) if automatic and existing else None
    if not (named / "state.json").is_file():
        found = f"; the run has {', '.join(path.name for path in existing)}" if existing else ""
        raise ValueError(f"--resume {resume} is not a checkpoint (no state.json){found}")
    return _published(named, config.out)


def _published(checkpoint: Path, out: Path) -> Path:
    """The run may have been killed between its last checkpoint and the copy of its adapter."""
    publish(checkpoint, out / "adapter")
    return checkpoint


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
    if state["seed"] != seed:
        raise ValueError(f"{path} was made with seed {state['seed']}, the config says {seed}")
    set_adapter_state(weights.bare, tensors["adapter"])
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
    made_by = _engine_name(deepspeed=(checkpoint.path / ENGINE).is_dir())
    today = _engine_name(deepspeed=weights.runtime.deepspeed)
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
    engine.load_checkpoint(checkpoint.path, tag=ENGINE, load_module_strict=False)


def _engine_name(*, deepspeed: bool) -> str:
    return "DeepSpeed" if deepspeed else "DDP, FSDP2 or single-process"
