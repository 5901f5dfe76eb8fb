"""Steps, weights and absent files of a judge's training: `pacorl train-reward CONFIG --dry-run`."""

from __future__ import annotations

import math
from itertools import chain

import torch

from pacorl.io.documents import blamed_on
from pacorl.io.images import check_readable
from pacorl.judge_training.judge_config import JudgeConfig
from pacorl.judge_training.loop import training_arguments
from pacorl.judge_training.tuning import parameter_counts, source_of, tune
from pacorl.plan import sources
from pacorl.plan.generators import model_on_meta
from pacorl.plan.ledger import META
from pacorl.plan.plan import Plan
from pacorl.plan.sources import MissingFile
from pacorl.records.comparisons import MissingDataError, comparisons_from
from pacorl.types import Comparison

STATE_BYTES = 16
"""Bytes of a trained parameter: the fp32 weight, its gradient and AdamW's two moments."""


def plan_reward(config: JudgeConfig) -> Plan:
    """Check everything but the weights themselves, and count the work of a run.

    Absent data and weights are listed, and the published architecture replaces absent configs.

    Raises:
        ValueError: The config cannot be run: its batch, its trainer's keys, its targets, another kind of model, or a
            source that is no data. The message names the key.
    """
    training_arguments(config, evaluates=bool(config.data.evaluation))
    absences: list[MissingFile] = []
    train = _comparisons(config, "train", absences)
    evaluation = _comparisons(config, "evaluation", absences)
    with blamed_on("data"):
        check_readable(chain(*(comparison.images for comparison in [*train, *evaluation])))
    # None if data are absent.
    steps = None if absences else math.ceil(config.epochs * math.ceil(len(train) / config.optimizer.batch))

    # Weights. The adapter of `start` has the config's shape, so that a new one has the same count.
    checkpoint = sources.vision_language_model(config.model.checkpoint, key="model.checkpoint")
    start = list(sources.absent_adapters("tuning.start", config.tuning.start))
    if checkpoint.folder:
        source_of(str(checkpoint.folder))  # refuses a model of another family
    dtype = getattr(torch, config.model.dtype)
    model = model_on_meta(checkpoint.configs["model"], dtype=dtype)
    with META:
        tuned = tune(model, config.tuning.model_copy(update={"start": ""}))
    trained, total = parameter_counts(tuned)
    facts = {
        "train_pairs": len(train),
        "evaluation_pairs": len(evaluation),
        "optimizer_steps": config.max_steps or steps,
        "trained_parameters": trained,
        "gib_without_activations": round(((total - trained) * dtype.itemsize + trained * STATE_BYTES) / 2**30, 1),
    }
    return Plan([*absences, *checkpoint.absences, *start], facts=facts)


def _comparisons(config: JudgeConfig, name: str, absences: list[MissingFile]) -> list[Comparison]:
    """Read the pairs of `data.train` or `data.evaluation`, and note what is absent."""
    comparisons: list[Comparison] = []
    key = f"data.{name}"
    limit = config.data.evaluation_limit if name == "evaluation" else None
    for source in getattr(config.data, name):
        with blamed_on(f"{key} = {source}"):
            try:
                comparisons += comparisons_from(source, limit=limit, scratch=config.out / "data")
            except MissingDataError as error:
                # Its list of files may have thousands of lines.
                absences.append(MissingFile(key, source, str(error).partition(":\n")[0]))
    return comparisons
