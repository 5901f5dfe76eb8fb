"""Requirements of a judge's training before it starts: `pacorl train-reward CONFIG --dry-run`.

Data, labels, steps and weights are counted, and absent and faulty sources are listed with the fix. No weights are
loaded, and the network is not used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch

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

    Absent data and weights are listed, the published architecture replaces absent configs, and a faulty source does not
    hide the faults of other sources.

    Raises:
        ValueError: The config itself cannot be run: its batch, its trainer's keys, its targets, another kind of model.
    """
    # The config alone.
    check_trackers(config.trackers)
    training_arguments(config, evaluates=bool(config.data.evaluation))
    per_forward, forwards = micro_batches(config, world=processes().num_processes)

    # Data.
    train = _read("data.train", config.data.train, limit=None, scratch=config.out / "data")
    limit = config.data.evaluation_limit
    evaluation = _read("data.evaluation", config.data.evaluation, limit=limit, scratch=config.out / "data")
    steps: int | str = math.ceil(config.epochs * math.ceil(len(train.comparisons) / config.optimizer.batch))
    if train.absences or train.faults:
        steps = "unknown until all its data are here"

    # Weights. The adapter of `start` has the config's shape, so that a new one has the same count.
    checkpoint = sources.vision_language_model(config.model.checkpoint, key="model.checkpoint")
    start = sources.adapter_absence("tuning.start", config.tuning.start)
    if checkpoint.folder:
        source_of(str(checkpoint.folder))  # refuses a model of another family
    model = model_on_meta(checkpoint.configs["model"], dtype=getattr(torch, config.model.dtype))
    with META:
        tuned = tune(model, config.tuning.model_copy(update={"start": ""}) if start else config.tuning)
    trained, total = parameter_counts(tuned)
    frozen_bytes = (total - trained) * model.dtype.itemsize
    faults = [*train.faults, *evaluation.faults]
    faults += _answer_faults(config, checkpoint, [*train.comparisons, *evaluation.comparisons])
    return Plan(
        (*train.absences, *evaluation.absences, *checkpoint.absences, *([start] if start else [])),
        tuple(faults),
        (checkpoint.note,) if checkpoint.note else (),
        facts={
            "train": _balance(train.comparisons),
            "evaluation": _balance(evaluation.comparisons),
            "optimizer_steps": config.max_steps or steps,
            "pairs_per_forward": per_forward,
            "forwards_per_step": forwards,
            "trained_parameters": trained,
            "all_parameters": total,
            "frozen_weights_gib": round(frozen_bytes / 2**30, 3),
            "training_state_gib": round(trained * STATE_BYTES / 2**30, 3),
        },
    )


@dataclass(slots=True)
class SourceData:
    """Readable comparisons of a config key, and its absent and faulty sources."""

    comparisons: list[Comparison] = field(default_factory=list)
    absences: list[MissingFile] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def _read(key: str, names: Sequence[str], *, limit: int | None, scratch: Path) -> SourceData:
    """Read every source of a config key, also after an absent or faulty one."""
    data = SourceData()
    for source in names:
        try:
            if absence := _comparisons_absence(key, source):
                data.absences.append(absence)
                continue
            comparisons = comparisons_from(source, limit=limit, scratch=scratch)
            check_readable(chain(*(comparison.images for comparison in comparisons)))
            data.comparisons += comparisons
        except MissingImagesError as missing:
            # Its list of files may have thousands of lines.
            data.absences.append(MissingFile(key, source, str(missing).partition(":\n")[0]))
        except (ValueError, OSError) as fault:
            data.faults.append(f"{key} = {source}: {fault}")
    return data


def _comparisons_absence(key: str, source: str) -> MissingFile | None:
    """Describe absent training pairs; None if they are here, as the tiny world always is.

    Raises:
        ValueError: As `missing_file` does.
    """
    missing = missing_file(source)
    if missing is None:
        return None
    # PaCo-Dataset is known by its folder's name or by the names of its entries.
    folder, _, entry = source.rpartition(":")
    home = Path(folder or source)
    remedy = f"{missing} is not there; put it there, or name {SOURCES}"
    if home.name == "PaCo-Dataset" or entry in PACO_ENTRIES:
        remedy = (
            f"PaCo-Dataset: `hf download --repo-type dataset {PACO_HOME} --local-dir {home}`, then unpack it there as "
            f"its card says (decompress.sh); {missing} is not there"
        )
    return MissingFile(key, source, remedy)


def _balance(comparisons: Sequence[Comparison]) -> dict[str, int]:
    yes = sum(comparison.consistent for comparison in comparisons)
    explained = sum(bool(comparison.reasons) for comparison in comparisons)
    return {"pairs": len(comparisons), "yes": yes, "no": len(comparisons) - yes, "with reasons": explained}


def _answer_faults(config: JudgeConfig, checkpoint: Checkpoint, comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Check that the checkpoint's processor, if it is here, loads and reads every answer's decision."""
    if checkpoint.folder is None:
        return
    try:
        processor = processor_of(str(checkpoint.folder), max_pixels=config.model.max_pixels)
        collator = Collator(processor, target=config.loss.target)
    except (ValueError, OSError) as fault:
        yield f"model.checkpoint = {config.model.checkpoint}: {fault}"
        return
    try:
        check_answers(collator, comparisons)
    except ValueError as fault:
        yield f"data: {fault}"
