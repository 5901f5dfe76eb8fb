"""PaCo-Reward: teaches a vision-language model to decide whether two images are consistent, and to say why.

    pacorl train-reward configs/reward/paco_reward_7b.yaml
    accelerate launch --num_processes 8 --no_python pacorl train-reward configs/reward/paco_reward_7b.yaml

Supervised fine-tuning by the weighted likelihood (arXiv 2512.04784, §3.2) on the transformers `Trainer`. A run's
folder holds config.yaml, metrics.jsonl, summary.json, checkpoints/, adapter/ (or model/), and merged/ on request.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import ProgressCallback, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

from pacorl.config import base as configs
from pacorl.config.judge_run import RewardRun
from pacorl.data.comparisons import comparisons_from
from pacorl.engine.logbook import Logbook
from pacorl.engine.runtime import Interrupted
from pacorl.engine.trackers import check_trackers
from pacorl.io.images import check_readable
from pacorl.train_judge.callbacks import (
    MARK,
    Checkpoints,
    Progress,
    RunLog,
    SkipBadSteps,
    StopOnSignal,
    complete_checkpoints,
    step_of,
)
from pacorl.train_judge.data import Collator, Rows, in_both_orders, in_order
from pacorl.train_judge.metrics import decision_metrics
from pacorl.train_judge.model import load_model, merge, processor_of, save_processor, source_of, tune
from pacorl.train_judge.trainer import JudgeTrainer, Tally
from pacorl.types import Comparison


@dataclasses.dataclass(frozen=True)
class Material:
    """What a run learns from and is measured on, checked before any weights are loaded."""

    train: list[Comparison]
    evaluation: list[Comparison]
    processor: Any
    collator: Collator


def train_reward(config: RewardRun, *, resume: bool = False) -> Path:
    """Runs a config to its end and returns the run's folder.

    With `resume` the run goes on from its newest complete checkpoint, if there is one. Raises ValueError for what
    cannot be trained on, and Interrupted after a SIGTERM or SIGINT, when the state is saved.
    """
    check_trackers(config.trackers)
    checkpoint = _checkpoint(config.out, resume=resume)
    material = gather(config)
    arguments = training_arguments(config, evaluates=bool(material.evaluation), resumed=checkpoint is not None)
    main = processes().is_main_process
    settings = config.model_dump(mode="json")
    logbook = Logbook(config.out if main else None, trackers=config.trackers, axis="step", settings=settings)
    if resume:
        logbook.cut_back(step_of(checkpoint) if checkpoint else -1)
    if main:
        (config.out / "config.yaml").write_text(configs.dump(config))
    tally, stop, guard = Tally(), StopOnSignal(), SkipBadSteps(limit=config.optimizer.max_bad_steps)
    if checkpoint and main:  # one process carries the sums of all
        tally.sums = json.loads((checkpoint / MARK).read_text())["tally"]
    callbacks = [
        RunLog(logbook, evaluates=bool(material.evaluation)),
        Checkpoints(tally, keep=config.keep_checkpoints),
        stop,
        guard,
    ]
    try:
        with stop.listening():
            trainer = _trainer(config, material, arguments, tally, callbacks)
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if guard.failure:
            raise ValueError(guard.failure)
        if stop.stopped:
            raise Interrupted(f"stopped after step {trainer.state.global_step}, and saved; go on with --resume")
        _save(config, trainer, material.processor)
    finally:
        logbook.close()
    return config.out


def processes() -> PartialState:
    """This process among the others; several on a machine without a GPU talk over gloo."""
    return PartialState(cpu=not torch.accelerator.is_available())


def _checkpoint(out: Path, *, resume: bool) -> Path | None:
    if resume:
        return next(reversed(complete_checkpoints(out / "checkpoints")), None)
    if (out / "metrics.jsonl").exists() or complete_checkpoints(out / "checkpoints"):
        raise ValueError(f"{out} holds a run already; go on with --resume, or name another folder with out=…")
    return None


def gather(config: RewardRun) -> Material:
    """Reads and checks data and tokenizer. Raises ValueError for whatever cannot be trained on."""
    with processes().main_process_first():  # pairs of the tiny world are drawn once
        train = [one for source in config.data.train for one in _read(source, config, None)]
        limit = config.data.evaluation_limit
        evaluation = [one for source in config.data.evaluation for one in _read(source, config, limit)]
        if processes().is_main_process:  # once for all: a picture that is found damaged in a long run ends it there
            check_readable(path for one in [*train, *evaluation] for path in one.images)
    processor = processor_of(config.model.checkpoint, max_pixels=config.model.max_pixels)
    collator = Collator(processor, target=config.loss.target)
    check_answers(collator, [*train, *evaluation])
    return Material(train, evaluation, processor, collator)


def check_answers(collator: Collator, comparisons: Sequence[Comparison]) -> None:
    """Raise ValueError for an answer whose first token is not its decision."""
    # One answer of each beginning: the first token depends on nothing after.
    for one in {(one.consistent, one.answer[:16]): one for one in comparisons}.values():
        collator.answer_ids(one)


def _read(source: str, config: RewardRun, limit: int | None) -> list[Comparison]:
    return comparisons_from(source, limit=limit, scratch=config.out / "data")


def training_arguments(config: RewardRun, *, evaluates: bool, resumed: bool = False) -> TrainingArguments:
    """The Trainer's arguments, `config.trainer` among them.

    Raises ValueError where `config.trainer` names what does not exist, or what the config says elsewhere.
    """
    micro, accumulate = micro_batches(config, world=processes().num_processes)
    every = config.evaluate_every
    ours: dict[str, Any] = {
        "output_dir": str(config.out / "checkpoints"),
        "seed": config.seed,
        "data_seed": config.seed,
        "num_train_epochs": config.epochs,
        "max_steps": config.max_steps or -1,
        "learning_rate": config.optimizer.lr,
        "lr_scheduler_type": "cosine",
        "warmup_steps": config.optimizer.warmup,
        "weight_decay": config.optimizer.weight_decay,
        "max_grad_norm": config.optimizer.max_grad_norm,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulate,
        "bf16": config.model.dtype == "bfloat16",
        "activation_checkpointing": config.model.gradient_checkpointing,
        "logging_strategy": "steps",
        "logging_steps": config.log_every,
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps" if evaluates and every else "no",
        "eval_on_start": evaluates and not resumed,
        "save_strategy": "steps",
        "save_steps": config.save_every,
        "report_to": [],
        "remove_unused_columns": False,
        "dataloader_num_workers": config.data.workers,
        "use_cpu": not torch.accelerator.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    if evaluates and every:
        ours["eval_steps"] = every
    if config.model.gradient_checkpointing:
        ours["activation_checkpointing_kwargs"] = {"use_reentrant": False}
    defaults = {
        "per_device_eval_batch_size": config.optimizer.micro_batch,
        "ddp_find_unused_parameters": False,
        "disable_tqdm": not sys.stderr.isatty(),
    }
    _check_more(config.trainer, taken=ours)
    return TrainingArguments(**ours, **(defaults | config.trainer))


def _check_more(more: Mapping[str, Any], *, taken: Mapping[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    for name in more:
        if name not in known:
            raise ValueError(f"trainer.{name}: transformers' TrainingArguments has no such key")
        if name in taken:
            raise ValueError(f"trainer.{name}: a key of the config says it already; set that one")


def micro_batches(config: RewardRun, *, world: int) -> tuple[int, int]:
    """(comparisons per forward, forwards per optimizer step) of each of `world` processes.

    Raises ValueError where the batch cannot be dealt evenly.
    """
    batch = config.optimizer.batch
    if batch % world:
        raise ValueError(f"optimizer.batch {batch} cannot be dealt to {world} processes; make it a multiple of {world}")
    own = batch // world
    micro = next(size for size in range(min(own, config.optimizer.micro_batch), 0, -1) if own % size == 0)
    return micro, own // micro


def _trainer(
    config: RewardRun, material: Material, arguments: TrainingArguments, tally: Tally, callbacks: Sequence[Any]
) -> JudgeTrainer:
    set_seed(config.seed)  # the adapter's first weights
    full = config.tuning.method == "full"
    # All weights learn in fp32, under autocast where the config says bfloat16: its steps are too coarse for AdamW's.
    model = tune(load_model(config.model.checkpoint, dtype="float32" if full else config.model.dtype), config.tuning)
    rows = in_both_orders(material.evaluation) if material.evaluation else None
    trainer = JudgeTrainer(
        alpha=None if config.loss.alpha == "uniform" else float(config.loss.alpha),
        yes=material.collator.yes,
        no=material.collator.no,
        tally=tally,
        measure=measure_of(rows, material.evaluation) if rows else _nothing,
        model=model,
        args=arguments,
        train_dataset=in_order(material.train),
        eval_dataset=rows,
        data_collator=material.collator,
        callbacks=list(callbacks),
    )
    trainer.remove_callback(PrinterCallback)
    if trainer.pop_callback(ProgressCallback):
        trainer.add_callback(Progress())
    return trainer


def measure_of(rows: Rows, comparisons: Sequence[Comparison]) -> Callable[[Mapping[int, float]], dict[str, float]]:
    """P(Yes) by row of `in_both_orders` → `decision_metrics`."""
    places = {(id(row.comparison), row.swapped): index for index, row in enumerate(rows.rows)}

    def measure(p_yes: Mapping[int, float]) -> dict[str, float]:
        swapped = [places.get((id(one), True)) for one in comparisons]
        return decision_metrics(
            [p_yes[places[id(one), False]] for one in comparisons],
            [one.consistent for one in comparisons],
            swapped=[None if index is None else p_yes[index] for index in swapped],
            category=[one.category for one in comparisons],
        )

    return measure


def _nothing(p_yes: Mapping[int, float]) -> dict[str, float]:
    return {}


def _save(config: RewardRun, trainer: JudgeTrainer, processor: Any) -> None:
    """The trained weights, and a summary."""
    full = config.tuning.method == "full"
    folder = config.out / ("model" if full else "adapter")
    trainer.save_model(str(folder))
    if not processes().is_main_process:
        return
    for name in ("training_args.bin", "README.md"):  # a pickle, and an empty form; config.yaml says more
        (folder / name).unlink(missing_ok=True)
    if full:
        save_processor(processor, folder, source=source_of(config.model.checkpoint))
    elif config.merge:
        merge(config.model.checkpoint, folder, config.out / "merged", dtype=config.model.dtype, processor=processor)
    summary = {"steps": trainer.state.global_step, "seed": config.seed} | _evaluations(config.out)
    (config.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def _evaluations(out: Path) -> dict[str, Any]:
    """The first and the last evaluation of metrics.jsonl."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["kind"] == "evaluation"]
    return {"before": found[0], "after": found[-1]} if found else {}
