"""Recomputation of an epoch or an evaluation: `pacorl verify RUN --epoch K`, `--evaluation K`.

The trainer makes the epoch again in a temporary folder, from the checkpoint before it and with the recorded scores, or
the evaluation from the checkpoint of its epoch. Then the records of both ledgers are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from pacorl.config import base as configs
from pacorl.config.reward_section import RewardConfig
from pacorl.core.metric_names import HELD_OUT
from pacorl.grpo.epoch import run_epoch
from pacorl.grpo.evaluated import sample_files
from pacorl.grpo.ledger import Record, read_ledger
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.scoring import Scorer, Scores
from pacorl.grpo.start import checkpoints
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.documents import JsonObject, as_read_back, dump_yaml, read_jsonl, read_object, read_text
from pacorl.io.files import text_digest
from pacorl.lab.verify.audit import Kind, check_samples, ranges, repeatable
from pacorl.rewards import build_rewards
from pacorl.rewards.reward import Reward, RewardFunction
from pacorl.runtime.processes import Runtime

Answer = Literal["equal bits", "equal within the stated tolerance", "differs"]
Floats = NDArray[np.float64]

TOLERANCE = {"start": 1e-6, "samples": 1e-4, "scores": 1e-3, "advantages": 1e-3, "weights": 1e-2, "images": 1e-2}
"""Largest difference due to other processes, threads, devices or versions.

Relative norm of the difference for samples, advantages and images; for weights it is relative to the epoch's change of
the weights. Largest absolute difference for scores. For images of middle brightness 0.01 is one level of 255 per byte.
"""


@dataclass(frozen=True, slots=True)
class Quantity:
    """Comparison of one hashed quantity."""

    name: str
    equal: bool
    """Whether the bits are equal."""
    difference: float
    """Measured as `TOLERANCE` describes."""
    tolerance: float

    @property
    def close(self) -> bool:
        """Whether the quantity is equal, or within its tolerance."""
        return self.equal or self.difference <= self.tolerance


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of an epoch or an evaluation with its recomputation."""

    kind: Kind
    epoch: int
    quantities: list[Quantity]
    """In the order of computation."""
    environment: dict[str, list[Any]]
    """Name → [recorded, today], where they differ."""

    @property
    def answer(self) -> Answer:
        """The worst of all quantities."""
        if all(quantity.equal for quantity in self.quantities):
            return "equal bits"
        if self.first:
            return "differs"
        return "equal within the stated tolerance"

    @property
    def first(self) -> Quantity | None:
        """The first quantity that differs by more than its tolerance."""
        return next((quantity for quantity in self.quantities if not quantity.close), None)

    def to_dict(self) -> JsonObject:
        """Convert to a JSON object. An infinite difference becomes null."""
        first = self.first.name if self.first else None
        document: JsonObject = as_read_back(asdict(self) | {"answer": self.answer, "first": first})
        return document


def recompute(run: Path, epoch: int, kind: Kind = "epoch") -> Comparison | None:
    """Compute an epoch or an evaluation again, and compare. All ranks call it.

    Returns:
        The comparison, on the main process.

    Raises:
        ValueError: if the ledger is damaged or lacks the record, or if a checkpoint, config or file of the evaluation
            is missing.
    """
    # Records: of the epoch or evaluation, of the event before it, and of the start that made both.
    records = read_ledger(run)
    indices = {record["epoch"]: index for index, record in enumerate(records) if record["kind"] == kind}
    if epoch not in indices:
        raise ValueError(f"{run} has no record of {kind} {epoch}; it has {ranges(list(indices))}")
    index = indices[epoch]
    start = next(record for record in reversed(records[:index]) if record["kind"] == "start")

    # Checkpoint to begin from.
    sources = repeatable(run, records, kind)
    if epoch not in sources:
        raise ValueError(
            f"{kind} {epoch} is made again from the checkpoint after epoch {epoch - (kind == 'epoch')}, which "
            f"{run / 'checkpoints'} does not have; --{kind} may be {ranges(list(sources))}"
        )
    if kind == "evaluation":
        check_samples(run, records[index])
    config = _config_of(run, start)

    # The run's number of threads: the division of a sum among threads changes its last bits.
    torch.set_num_threads(start["environment"]["threads"])
    with TemporaryDirectory() as folder:
        # The main process's folder, for all ranks: they exchange encoded prompts in it.
        runtime = Runtime()
        out = runtime.on_main(Path(folder).joinpath("run").absolute)
        replay(config, out, checkpoint=sources[epoch], start=start, record=records[index])
        if not runtime.is_main:
            return None

        # Start first: the checkpoint may contain the evaluation already, which would sort its start behind it.
        again = sorted(read_ledger(out), key=lambda record: record["kind"] != "start")
        recomputed = start["recomputed"] if kind == "evaluation" else []
        scores = [_evaluation_scores(path, epoch, recomputed) for path in (run, out)] if recomputed else []
        return compare(start, records[index - 1 : index + 1], again, scores)


def _config_of(run: Path, start: Record) -> PolicyConfig:
    """Find a start's config: config.yaml, or a checkpoint's if the run changed it since."""
    path = run / "config.yaml"
    if text_digest(read_text(path)) == start["config"]:
        return configs.load(PolicyConfig, path)
    for checkpoint in checkpoints(run / "checkpoints"):
        document = read_object(checkpoint / "state.json").get("config")
        if document and text_digest(dump_yaml(document)) == start["config"]:
            return configs.validated(PolicyConfig, document)
    raise ValueError(
        f"the config of the start after epoch {start['epoch']} is neither in {path} nor in a checkpoint: it was "
        "changed by hand, or its checkpoints are gone"
    )


# --- the run again ---------------------------------------------------------------------------------------------


def replay(config: PolicyConfig, out: Path, *, checkpoint: Path | None, start: Record, record: Record) -> None:
    """Make an epoch or an evaluation again, without a judge. All ranks call it.

    Args:
        config: of the run.
        out: the folder to work in.
        checkpoint: to begin from; None for the seed.
        start: record of the start that made the epoch or evaluation.
        record: record of the epoch or evaluation.
    """
    # Rewards without a judge score again; the others return their recorded scores.
    recomputed = start["recomputed"]
    scored = [reward for reward in config.rewards if reward.key in recomputed]
    functions: dict[str, RewardFunction] = {}
    for reward in config.rewards:
        functions[reward.key] = lambda prompts, images: [0.0] * len(images)
    functions |= build_rewards(scored, judge=None, device=Runtime().device)

    # The trainer, in the temporary folder.
    is_epoch = record["kind"] == "epoch"
    replayed = _replay_config(config, out, measures=None if is_epoch else recomputed)
    trainer = PolicyTrainer(replayed, resume=checkpoint or False, allow_changes=True, rewards=functions)
    try:
        if is_epoch:
            recorded = {}
            for row, *scores in record["scores"]["scores"]:
                recorded[row] = scores
            parts = dict(record["scores"].get("parts", []))
            run_epoch(trainer, scorer=partial(ReplayingScorer, recorded=recorded, parts=parts, recomputed=recomputed))
        else:
            trainer.evaluate()
    finally:
        trainer.close()


class ReplayingScorer(Scorer):
    """Scorer that returns recorded scores, except for rewards that need no judge."""

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        *,
        recorded: Mapping[int, Scores],
        parts: Mapping[int, dict[str, Sequence[float | None]]],
        recomputed: Sequence[str],
        **options: Any,
    ) -> None:
        """
        Args:
            rewards: by name.
            recorded: global row → one score per reward.
            parts: global row → recorded parts of its scores.
            recomputed: names of the rewards that score again.
            options: of `Scorer`.
        """
        super().__init__(rewards, **options)
        self.recorded = recorded
        self.recorded_parts = parts
        self.recomputed = recomputed

    def results(self) -> dict[int, Scores]:
        """Return the scores as `Scorer` does. Rows that the run did not score have no scores."""
        again = super().results()
        for row, scores in again.items():
            recorded = self.recorded.get(row, [None] * len(scores))
            recorded_parts = self.recorded_parts.get(row, {})
            for index, name in enumerate(self.rewards):
                if name not in self.recomputed:
                    scores[index] = recorded[index]
                    if name in recorded_parts:
                        self._parts.setdefault(row, {})[name] = recorded_parts[name]
        return again


def _replay_config(config: PolicyConfig, out: Path, *, measures: Sequence[str] | None) -> PolicyConfig:
    """Configure the same samples and updates without judges and without measurements.

    Args:
        config: of the run.
        out: the folder to work in.
        measures: names of an evaluation's measures that are computed again; None for an epoch.
    """
    # No measurements that the recorded hashes do not need.
    suffix = config.sampling.suffix.model_copy(update={"check_every": 0})
    prompts: dict[str, Any] = {"leaks": "off", "benchmarks": ()}
    if measures is None:
        prompts["evaluation_limit"] = 1
    # An evaluation's own measures, as far as they need no judge.
    held_out = [reward for reward in config.evaluation.rewards if f"{HELD_OUT}{reward.key}" in (measures or ())]
    evaluation = {"judge": None, "rewards": tuple(held_out), "compare_sizes": False, "compare_trained": False}
    changes = {
        "out": out,
        "trackers": (),
        "judge": None,
        "best_by": "",
        "rewards": tuple(RewardConfig(name=reward.key, weight=reward.weight) for reward in config.rewards),
        "prompts": config.prompts.model_copy(update=prompts),
        "evaluation": config.evaluation.model_copy(update=evaluation),
        "sampling": config.sampling.model_copy(update={"suffix": suffix}),
        "advantages": config.advantages.model_copy(update={"max_missing": 1.0}),
    }
    return config.model_copy(update=changes)


def _evaluation_scores(run: Path, epoch: int, names: Sequence[str]) -> Floats:
    """Read an evaluation's scores: (images, names), NaN where a score is missing."""
    rows = []
    for line in read_jsonl(run / sample_files(epoch, 0)[0]):
        scores = dict(line["scores"])
        for name, score in line["held_out"].items():
            scores[f"{HELD_OUT}{name}"] = score
        rows.append([scores[name] for name in names])
    return np.array(rows, dtype=np.float64)


# --- comparison ------------------------------------------------------------------------------------------------


def compare(
    start: Record, recorded: Sequence[Record], again: Sequence[Record], scores: Sequence[Floats] = ()
) -> Comparison:
    """Compare an epoch or an evaluation with its recomputation.

    Args:
        start: record of the run's start that made it.
        recorded: the run's record before it, and its own.
        again: records of the recomputation's start, and of the epoch or evaluation.
        scores: recorded and new scores of an evaluation; empty if no reward was computed again.
    """
    # The environment may explain a difference.
    then = start["environment"]
    now = again[0]["environment"]
    environment = {}
    for name in now:
        if then.get(name) != now[name]:
            environment[name] = [then.get(name), now[name]]

    # The quantities, in the order of computation.
    before, record = recorded
    before_again, now = again
    if record["kind"] == "epoch":
        same_scores = record["hashes"]["scores"] == now["hashes"]["scores"]
        quantities = [
            _hashed("start", "weights", before, before_again),
            _hashed("samples", "samples", record, now),
            _scored(_epoch_scores(record), _epoch_scores(now), equal=same_scores),
            _hashed("advantages", "advantages", record, now),
            # An epoch changes the weights little, so their difference is relative to the change.
            _hashed("weights", "weights", record, now, since=before_again),
        ]
    else:
        quantities = [_hashed("start", "weights", record, now), _hashed("images", "images", record, now)]
        if scores:
            old, new = scores
            quantities.append(_scored(old, new, equal=np.array_equal(old, new, equal_nan=True)))
    return Comparison(record["kind"], record["epoch"], quantities, environment)


def _epoch_scores(record: Record) -> Floats:
    """Return an epoch's scores, and then their parts, as one row."""
    values = list(chain(*record["scores"]["scores"]))
    for _, panel_scores in record["scores"].get("parts", []):
        values += chain(*panel_scores.values())
    return np.array(values, dtype=np.float64)


def _hashed(name: str, key: str, then: Record, now: Record, *, since: Record | None = None) -> Quantity:
    """Compare two records by a quantity's hash and sketch. The difference is relative to the sketch, or its change."""
    # JSON's null, written for NaN, becomes NaN.
    old = np.array(then["sketches"][key], dtype=np.float64)
    new = np.array(now["sketches"][key], dtype=np.float64)
    # Relative to the quantity itself, or for weights to their change within the epoch.
    scale = new - np.array(since["sketches"][key], dtype=np.float64) if since else new
    difference = float(np.linalg.norm(old - new))
    size = float(np.linalg.norm(scale))
    if size:
        difference /= size
    elif difference:
        difference = math.inf
    return Quantity(name, then["hashes"][key] == now["hashes"][key], difference, TOLERANCE[name])


def _scored(then: Floats, now: Floats, *, equal: bool) -> Quantity:
    """Compare two arrays of scores. The difference is infinite if a score is missing in one of them."""
    difference = math.inf
    if then.shape == now.shape and np.array_equal(np.isnan(then), np.isnan(now)):
        difference = float(np.nanmax(np.abs(then - now), initial=0.0))
    return Quantity("scores", equal, difference, TOLERANCE["scores"])
