"""A run's checkpoints: what is saved, and how it is put back.

A checkpoint holds the adapter, its moving average, the optimizer's state, every rank's random generators, and in
state.json the data position (the epoch: what it draws follows from the seed), the optimizer step (the learning rate
follows from it) and how far the log went. `lora/` in it is the averaged adapter for use elsewhere.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from pacorl.config.policy_run import PolicyRun
from pacorl.engine.runtime import (
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
from pacorl.io.documents import read_object, write_json
from pacorl.lora.adapters import adapter_state, full_state, set_adapter_state
from pacorl.lora.formats import save_lora
from pacorl.train.training import Training

Resume = bool | str | Path
"""False or "" for a new run, True or "auto" for the newest checkpoint if there is one, or a checkpoint's folder."""

ENGINE = "deepspeed"
"""DeepSpeed keeps its optimizer's shards in a folder of its own."""


def save(training: Training) -> None:
    """A checkpoint to resume from, and the averaged adapter for use elsewhere. All ranks call it.

    Raises OSError, on all ranks, where the disk is full.
    """
    runtime, config = training.runtime, training.config
    tensors = {
        "adapter": full_state(adapter_state(training.bare)),
        "average": full_state(training.average.state),
    }
    if training.old:
        tensors["old"] = full_state(training.old.state)
    generators = runtime.gather(random_state())
    target = config.out / "checkpoints" / f"step-{training.step:06d}"
    aside = runtime.on_main(partial(open_aside, target))
    if runtime.deepspeed:
        training.policy.transformer.save_checkpoint(aside, tag=ENGINE, exclude_frozen_parameters=True)  # type: ignore[operator]
    else:
        tensors["optimizer"] = optimizer_tensors(training.optimizer, list(_stepped(training)))
    runtime.on_main(partial(_write, training, target, tensors, generators))


def _write(training: Training, target: Path, tensors: dict[str, dict[str, Tensor]], generators: list[Any]) -> None:
    config = training.config

    def export(folder: Path) -> None:
        save_lora(
            folder / "lora",
            tensors["average"],
            rank=config.adapter.rank,
            alpha=config.adapter.alpha,
            targets=training.targets,
            base=config.model.checkpoint,
        )

    write_checkpoint(target, tensors=tensors, state=_state(training), generators=generators, export=export)
    best = _best(target.parent)
    prune(target.parent, keep=config.keep_checkpoints, newest=training.step, best=best)
    if best:
        write_json(target.parent / "best.json", {"checkpoint": best.name} | _judgement(best))
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


def _state(training: Training) -> dict[str, Any]:
    config = training.config
    return {
        "epoch": training.epoch,
        "step": training.step,
        "seed": config.seed,
        "evaluated": training.evaluated,
        # Only an evaluation of these very weights says how good they are.
        "score": training.score if training.evaluated == training.epoch else None,
        "best_by": config.best_by,
        "bad_steps": training.bad_steps,
        "log_lines": training.logbook.lines(),
        "processes": training.runtime.world,
    }


def _judgement(path: Path) -> dict[str, Any]:
    state = read_object(path / "state.json")
    return {"best_by": state["best_by"], "score": state["score"]}


def _best(folder: Path) -> Path | None:
    """The checkpoint with the highest score; the later of equals."""
    scored = [(path, _judgement(path)["score"]) for path in checkpoints(folder)]
    known = [(score, number, path) for number, (path, score) in enumerate(scored) if score is not None]
    return max(known)[2] if known else None


def _stepped(training: Training) -> dict[str, nn.Parameter]:
    """The weights that the optimizer steps, by name, in its order."""
    names = {parameter: name for name, parameter in training.bare.named_parameters()}
    return {names[parameter]: parameter for group in training.optimizer.param_groups for parameter in group["params"]}


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


def restore(training: Training, path: Path) -> int:
    """Puts a checkpoint's state in place, also of a run on another number of processes; returns how many lines its
    log had.

    Raises ValueError where it does not fit the config.
    """
    checkpoint = load_checkpoint(path)
    state, tensors = checkpoint.state, checkpoint.tensors
    if state["seed"] != training.config.seed:
        raise ValueError(f"{path} was made with seed {state['seed']}, the config says {training.config.seed}")
    set_adapter_state(training.bare, tensors["adapter"])
    training.average.load(tensors["average"])
    if training.old:
        # A run that began with another objective sampled with the trained weights.
        training.old.load(tensors.get("old", tensors["adapter"]))
    _restore_optimizer(training, checkpoint)
    if state["processes"] == training.runtime.world:
        set_random_state(checkpoint.generators[training.runtime.rank])
    training.epoch, training.step, training.bad_steps = state["epoch"], state["step"], state["bad_steps"]
    training.evaluated, training.score = state["evaluated"], state["score"]
    return int(state["log_lines"])


def _restore_optimizer(training: Training, checkpoint: Checkpoint) -> None:
    held: Literal["deepspeed", "torch"] = "deepspeed" if (checkpoint.path / ENGINE).is_dir() else "torch"
    wanted: Literal["deepspeed", "torch"] = "deepspeed" if training.runtime.deepspeed else "torch"
    if held != wanted:
        raise ValueError(
            f"{checkpoint.path} holds the optimizer of a {_engine_name(held)} run, this is a {_engine_name(wanted)} "
            f"one; resume with the launcher that made it, or start anew with adapter.start={checkpoint.path}/lora"
        )
    if held == "torch":
        set_optimizer_tensors(training.optimizer, _stepped(training), checkpoint.tensors["optimizer"])
        return
    if checkpoint.state["processes"] != training.runtime.world:
        raise ValueError(
            f"{checkpoint.path} was made by {checkpoint.state['processes']} DeepSpeed processes, here are "
            f"{training.runtime.world}; ZeRO's shards fit the number that made them"
        )
    engine: Any = training.policy.transformer
    engine.load_checkpoint(checkpoint.path, tag=ENGINE, load_module_strict=False)


def _engine_name(engine: Literal["deepspeed", "torch"]) -> str:
    return {"deepspeed": "DeepSpeed", "torch": "DDP, FSDP2 or single-process"}[engine]
