"""A run's checkpoints: what is saved, and how it is put back."""

from __future__ import annotations

from pathlib import Path

from pacorl.engine.runtime import load_checkpoint, prune, save_checkpoint
from pacorl.models.adapters import adapter_state, save_lora, set_adapter_state
from pacorl.train.training import Training


def save(training: Training) -> None:
    """A checkpoint to resume from, and the averaged adapter for use elsewhere."""
    runtime, config = training.runtime, training.config
    runtime.accelerator.wait_for_everyone()
    if not runtime.is_main:
        return
    transformer = runtime.accelerator.unwrap_model(training.policy.transformer)
    save_checkpoint(
        config.out / "checkpoints",
        step=training.step,
        tensors={"adapter": adapter_state(transformer), "average": training.average.state},
        optimizer=training.optimizer.state_dict(),
        state={"epoch": training.epoch, "step": training.step, "seed": config.seed},
    )
    prune(config.out / "checkpoints", keep=config.keep_checkpoints)
    save_lora(
        config.out / "adapter",
        training.average.state,
        rank=config.adapter.rank,
        alpha=config.adapter.alpha,
        targets=training.targets,
    )


def restore(training: Training, path: Path) -> None:
    """Puts a checkpoint's state in place. Raises ValueError where it does not fit."""
    tensors, optimizer, state = load_checkpoint(path)
    if state["seed"] != training.config.seed:
        raise ValueError(f"{path} was made with seed {state['seed']}, the config says {training.config.seed}")
    set_adapter_state(training.policy.transformer, tensors["adapter"])
    training.average.load(tensors["average"])
    training.optimizer.load_state_dict(optimizer)
    training.epoch, training.step, training.resumed = state["epoch"], state["step"], True
