"""Requirements of a judge's training before it starts: `pacorl train-reward CONFIG --dry-run`.

Data, labels, steps and weights are counted, and absent sources are listed with the fix. No weights are loaded, and the
network is not used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch

from pacorl.io.documents import blamed_on
from pacorl.io.images import check_readable
from pacorl.judge_training.examples import Collator, check_answers
from pacorl.judge_training.judge_config import ComparisonsConfig, JudgeConfig
from pacorl.judge_training.loop import micro_batches, processes, training_arguments
from pacorl.judge_training.tuning import parameter_counts, processor_of, source_of, tune
from pacorl.plan import sources
from pacorl.plan.generators import model_on_meta
from pacorl.plan.ledger import META
from pacorl.plan.plan import Plan
from pacorl.plan.sources import Checkpoint, MissingFile
from pacorl.records.comparisons import SOURCES, MissingImagesError, comparisons_from, missing_file
from pacorl.runtime.logbook import check_trackers
from pacorl.types import Comparison

PACO_HOME = "X-GenGroup/PaCo-Dataset"
PACO_ENTRIES = {source.rpartition(":")[2] for source in (*ComparisonsConfig().train, *ComparisonsConfig().evaluation)}
STATE_BYTES = 16
"""Bytes of a trained parameter: the fp32 weight, its gradient and AdamW's two moments."""


def plan_reward(config: JudgeConfig) -> Plan:
    """Check everything but the weights themselves, and count the work of a run.

    Absent data and weights are listed, and the published architecture replaces absent configs.

    Raises:
        ValueError: The config cannot be run: its batch, its trainer's keys, its targets, another kind of model, or a
            source that is no data. The message names the key.
    """
    # The config alone.
    check_trackers(config.trackers)
    training_arguments(config, evaluates=bool(config.data.evaluation))
    per_forward, forwards = micro_batches(config, world=processes().num_processes)

    # Data.
    absences: list[MissingFile] = []
    train, evaluation = (
        _comparisons(config, name, absences, limit=limit)
        for name, limit in (("train", None), ("evaluation", config.data.evaluation_limit))
    )
    comparisons = [*train, *evaluation]
    with blamed_on("data"):
        check_readable(chain(*(comparison.images for comparison in comparisons)))
    steps: int | str = math.ceil(config.epochs * math.ceil(len(train) / config.optimizer.batch))
    if absences:
        steps = "unknown until all its data are here"

    # Weights. The adapter of `start` has the config's shape, so that a new one has the same count.
    checkpoint = sources.vision_language_model(config.model.checkpoint, key="model.checkpoint")
    start = sources.adapter_absence("tuning.start", config.tuning.start)
    if checkpoint.folder:
        source_of(str(checkpoint.folder))  # refuses a model of another family
    dtype = getattr(torch, config.model.dtype)
    model = model_on_meta(checkpoint.configs["model"], dtype=dtype)
    with META:
        tuned = tune(model, config.tuning.model_copy(update={"start": ""}) if start else config.tuning)
    trained, total = parameter_counts(tuned)
    _check_answers(config, checkpoint, comparisons)
    absences += [*checkpoint.absences, *([start] if start else [])]
    plan = Plan(
        tuple(absences),
        facts={
            "train": _balance(train),
            "evaluation": _balance(evaluation),
            "optimizer_steps": config.max_steps or steps,
            "pairs_per_forward": per_forward,
            "forwards_per_step": forwards,
            "trained_parameters": trained,
            "all_parameters": total,
            "frozen_weights_gib": round((total - trained) * dtype.itemsize / 2**30, 3),
            "training_state_gib": round(trained * STATE_BYTES / 2**30, 3),
        },
    )
    return plan.with_notes(checkpoint.note)


def _comparisons(config: JudgeConfig, name: str, absences: list[MissingFile], *, limit: int | None) -> list[Comparison]:
    """Read the pairs of `data.train` or `data.evaluation`, and note what is absent; the tiny world always is here."""
    comparisons: list[Comparison] = []
    for source in getattr(config.data, name):
        key = f"data.{name}"
        with blamed_on(f"{key} = {source}"):
            try:
                if missing := missing_file(source):
                    absences.append(MissingFile(key, source, _remedy(source, missing)))
                else:
                    comparisons += comparisons_from(source, limit=limit, scratch=config.out / "data")
            except MissingImagesError as error:
                # Its list of files may have thousands of lines.
                absences.append(MissingFile(key, source, str(error).partition(":\n")[0]))
    return comparisons


def _remedy(source: str, missing: Path) -> str:
    """Say how to get absent pairs. PaCo-Dataset is known by its folder's name or by the names of its entries."""
    folder, _, entry = source.rpartition(":")
    home = Path(folder or source)
    if home.name == "PaCo-Dataset" or entry in PACO_ENTRIES:
        return (
            f"PaCo-Dataset: `hf download --repo-type dataset {PACO_HOME} --local-dir {home}`, then unpack it there as "
            f"its card says (decompress.sh); {missing} is not there"
        )
    return f"{missing} is not there; put it there, or name {SOURCES}"


def _balance(comparisons: Sequence[Comparison]) -> dict[str, int]:
    yes = sum(comparison.consistent for comparison in comparisons)
    explained = sum(bool(comparison.reasons) for comparison in comparisons)
    return {"pairs": len(comparisons), "yes": yes, "no": len(comparisons) - yes, "with reasons": explained}


def _check_answers(config: JudgeConfig, checkpoint: Checkpoint, comparisons: Sequence[Comparison]) -> None:
    """Check that the checkpoint's processor, if it is here, loads and reads every answer's decision."""
    if checkpoint.folder is None:
        return
    with blamed_on(f"model.checkpoint = {config.model.checkpoint}"):
        processor = processor_of(str(checkpoint.folder), max_pixels=config.model.max_pixels)
        collator = Collator(processor, target=config.loss.target)
    with blamed_on("data"):
        check_answers(collator, comparisons)
