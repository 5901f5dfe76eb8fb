"""Compute an epoch or an evaluation of a run again: `pacorl verify RUN --epoch K`, `--evaluation K`.

The trainer itself does so in a folder of its own: an epoch from the checkpoint before it and with the scores that the
run recorded, an evaluation from the checkpoint of its epoch. Then the ledgers of both are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from pacorl.config import base as configs
from pacorl.config.reward_section import RewardConfig
from pacorl.core.metric_names import HELD_OUT
from pacorl.grpo.epoch import run_epoch
from pacorl.grpo.evaluated import sample_files
from pacorl.grpo.ledger import Record, read_ledger, sha256
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.scoring import Scorer, Scores
from pacorl.grpo.start import checkpoints
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.documents import dump_yaml, read_jsonl, read_object, read_text
from pacorl.io.files import write_atomic
from pacorl.lab.verify.audit import Kind, check_samples, ranges, repeatable
from pacorl.rewards import build_rewards
from pacorl.rewards.reward import Reward, RewardFunction
from pacorl.runtime.processes import Runtime
from pacorl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

Answer = Literal["equal bits", "equal within the stated tolerance", "differs"]

TOLERANCE = {"start": 1e-6, "samples": 1e-4, "scores": 1e-3, "advantages": 1e-3, "weights": 1e-2, "images": 1e-2}
"""The largest difference that other processes, threads, devices or versions may make.

Of samples, advantages and images it is the norm of the difference over the norm, of weights over the norm of what the
epoch changed, of scores the largest absolute one. For images of middle brightness .01 is one level of 255 per byte.
"""


@dataclass(frozen=True, slots=True)
class Quantity:
    """One thing that an epoch came to, then and now."""

    name: str
    equal: bool
    """Bit for bit."""
    difference: float
    """As `TOLERANCE` has it."""
    tolerance: float

    @property
    def close(self) -> bool:
        """Whether it is equal, or within the tolerance."""
        return self.equal or self.difference <= self.tolerance


@dataclass(frozen=True, slots=True)
class Comparison:
    """An epoch or an evaluation, recorded and computed again."""

    kind: Kind
    epoch: int
    quantities: list[Quantity]
    """In the order in which they come about."""
    environment: dict[str, list[Any]]
    """What was another one then: name → [then, now]."""

    @property
    def answer(self) -> Answer:
        """The worst of all quantities."""
        if all(quantity.equal for quantity in self.quantities):
            return "equal bits"
        return "equal within the stated tolerance" if self.first is None else "differs"

    @property
    def first(self) -> Quantity | None:
        """The first quantity that differs by more than its tolerance."""
        return next((quantity for quantity in self.quantities if not quantity.close), None)

    def to_dict(self) -> dict[str, Any]:
        """For programs; a difference that is not finite is None."""
        quantities = [asdict(q) | {"difference": _finite(q.difference)} for q in self.quantities]
        first = self.first.name if self.first else None
        return {"kind": self.kind, "epoch": self.epoch, "answer": self.answer, "first": first} | {
            "quantities": quantities,
            "environment": self.environment,
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class ReplayingScorer(Scorer):
    """Scores with what the run recorded, but for rewards that need no judge."""

    def __init__(
        self, rewards: Mapping[str, Reward], *, own: Sequence[str], table: list[list[Any]], **options: Any
    ) -> None:
        """
        Args:
            rewards: all of the run, by name.
            own: those of them that score again.
            table: row and recorded score of each reward, by sample.
            options: of `Scorer`.
        """
        super().__init__({name: rewards[name] for name in own}, **options)
        self.names, self.recorded = list(rewards), {row: scores for row, *scores in table}

    def results(self) -> dict[int, Scores]:
        """As of `Scorer`. Rows that the run did not score have no scores."""
        merged: dict[int, Scores] = {}
        for row, scores in super().results().items():
            recorded = dict(zip(self.names, self.recorded.get(row, [None] * len(self.names)), strict=True))
            merged[row] = [*(recorded | dict(zip(self.rewards, scores, strict=True))).values()]
        return merged


class Recomputation(PolicyTrainer):
    """A run that makes one epoch or evaluation again in a folder of its own, and asks no judge."""

    def __init__(
        self, config: PolicyConfig, *, folder: Path, checkpoint: Path | None, start: Record, record: Record
    ) -> None:
        """
        Args:
            config: of the run.
            folder: to work in.
            checkpoint: to begin from; None for the seed.
            start: the record of the start that made the epoch or evaluation.
            record: the record of the epoch or evaluation.
        """
        self._own = list(start["recomputed"])
        self._table: list[list[Any]] = next(iter(record.get("scores", {}).values()), [])
        own = [reward for reward in config.rewards if reward.key in self._own]
        functions: dict[str, RewardFunction] = {reward.key: _stand_in for reward in config.rewards}
        functions |= build_rewards(own, judge=None, device=Runtime().device)
        super().__init__(
            _replay_config(config, folder, measures=self._own if record["kind"] == "evaluation" else None),
            resume=checkpoint or False,
            allow_changes=True,
            rewards=functions,
        )

    def run_epoch(self) -> dict[str, float]:
        """Run the epoch with the scores that were recorded."""
        return run_epoch(self, scorer=partial(ReplayingScorer, own=self._own, table=self._table))


def _stand_in(prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float]:
    """Scores the trial image that a run shows its rewards; `ReplayingScorer` asks it nothing."""
    return [0.0] * len(images)


def _replay_config(config: PolicyConfig, folder: Path, *, measures: Sequence[str] | None) -> PolicyConfig:
    """Configure the same samples and updates without judges, and without all that only measures them.

    Args:
        config: the run's.
        folder: to work in.
        measures: names of the scorers of an evaluation; None for an epoch.
    """
    held_out = [reward for reward in config.evaluation.rewards if f"{HELD_OUT}{reward.key}" in (measures or ())]
    limit = 1 if measures is None else config.prompts.evaluation_limit
    rewards = tuple(RewardConfig(name=reward.key, weight=reward.weight) for reward in config.rewards)
    suffix = config.sampling.suffix.model_copy(update={"check_every": 0})
    sections: dict[str, dict[str, Any]] = {
        "prompts": {"evaluation_limit": limit, "leaks": "off", "benchmarks": ()},
        "evaluation": {"judge": None, "rewards": tuple(held_out), "compare_sizes": False, "compare_trained": False},
        "sampling": {"suffix": suffix},
        "advantages": {"max_missing": 1.0},
    }
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    plain = {"out": folder, "trackers": (), "judge": None, "best_by": "", "rewards": rewards}
    return config.model_copy(update=changed | plain)


def recompute(run: Path, epoch: int, kind: Kind = "epoch") -> Comparison | None:
    """Compute an epoch or an evaluation again from a checkpoint, and compare. All ranks call it.

    Returns:
        The comparison, on the main process.

    Raises:
        ValueError: if the ledger is damaged or lacks the record, or if a checkpoint, config or file of the evaluation
            is missing.
    """
    records = read_ledger(run)
    index = next((i for i, r in enumerate(records) if r["kind"] == kind and r["epoch"] == epoch), None)
    if index is None:
        epochs = [record["epoch"] for record in records if record["kind"] == kind]
        raise ValueError(f"{run} has no record of {kind} {epoch}; it has {ranges(epochs)}")
    start = next(record for record in reversed(records[:index]) if record["kind"] == "start")
    sources = repeatable(run, records, kind)
    if epoch not in sources:
        raise ValueError(
            f"{kind} {epoch} is made again from the checkpoint after epoch {epoch - (kind == 'epoch')}, which "
            f"{run / 'checkpoints'} does not have; --{kind} may be {ranges(list(sources))}"
        )
    if kind == "evaluation":
        check_samples(run, records[index])
    # As many as the run had: how a sum is cut among threads changes its last bits.
    torch.set_num_threads(start["environment"]["threads"])
    with TemporaryDirectory() as folder:
        config = _config_of(run, start, Path(folder) / "recorded.yaml")
        again = Recomputation(
            config,
            # The main process's, for all: they write and read each other's encoded prompts in it.
            folder=Runtime().on_main(Path(folder).joinpath("run").absolute),
            checkpoint=sources[epoch],
            start=start,
            record=records[index],
        )
        try:
            again.run_epoch() if kind == "epoch" else again.evaluate()
        finally:
            again.close()
        if not again.runtime.is_main:
            return None
        # The checkpoint may know of the evaluation already, so that its start would come after it.
        repeated = sorted(read_ledger(again.config.out), key=lambda record: record["kind"] != "start")
        recorded = records[index - 1 : index + 1]
        if kind == "epoch":
            return compare(start, recorded, repeated)
        names = start["recomputed"]
        scores = [_scores_of(out, epoch, names) for out in (run, again.config.out)] if names else []
        return compare(start, recorded, repeated, scores)


def _config_of(run: Path, start: Record, copy: Path) -> PolicyConfig:
    """The config that a start had: config.yaml's, or if the run changed it since, one that a checkpoint has."""
    texts = [read_text(run / "config.yaml")]
    states = (read_object(path / "state.json") for path in checkpoints(run / "checkpoints"))
    texts += [dump_yaml(state["config"]) for state in states if "config" in state]
    for text in texts:
        if sha256(text) == start["config"]:
            write_atomic(copy, text)
            return configs.load(PolicyConfig, copy)
    raise ValueError(
        f"the config of the start after epoch {start['epoch']} is neither in {run / 'config.yaml'} nor in a "
        "checkpoint: it was changed by hand, or its checkpoints are gone"
    )


def _scores_of(run: Path, epoch: int, names: Sequence[str]) -> list[list[Any]]:
    """Read image number and scores of each image of an evaluation."""
    rows = []
    for number, line in enumerate(read_jsonl(run / sample_files(epoch, 0)[0])):
        scores = {**line["scores"], **{f"{HELD_OUT}{name}": score for name, score in line["held_out"].items()}}
        rows.append([number, *(scores[name] for name in names)])
    return rows


def compare(
    start: Record, recorded: Sequence[Record], again: Sequence[Record], scores: Sequence[list[list[Any]]] = ()
) -> Comparison:
    """Compare an epoch or an evaluation that was computed again with the run's.

    Args:
        start: the record of the run's start that made it.
        recorded: the run's record before it, and its own.
        again: the start and the record that were made again.
        scores: of an evaluation's images, then and now; empty if no reward was computed again.
    """
    then, now = start["environment"], again[0]["environment"]
    differing = {name: [then.get(name), now[name]] for name in now if then.get(name) != now[name]}
    record = recorded[1]
    quantities = _quantities(recorded, again) if record["kind"] == "epoch" else _evaluated(recorded, again, scores)
    return Comparison(record["kind"], record["epoch"], list(quantities), differing)


def _evaluated(
    recorded: Sequence[Record], again: Sequence[Record], scores: Sequence[list[list[Any]]]
) -> Iterator[Quantity]:
    for name, quantity in (("start", "weights"), ("images", "images")):
        then, now = (_sketch(records[1], quantity) for records in (recorded, again))
        equal = recorded[1]["hashes"][quantity] == again[1]["hashes"][quantity]
        yield Quantity(name, equal, _apart(then, now, scale=now), TOLERANCE[name])
    if scores:
        then_scores, now_scores = scores
        difference = _scores_apart(then_scores, now_scores)
        yield Quantity("scores", then_scores == now_scores, difference, TOLERANCE["scores"])


def _quantities(recorded: Sequence[Record], again: Sequence[Record]) -> Iterator[Quantity]:
    (before, epoch), (before_again, epoch_again) = recorded, again
    equal = before["hashes"]["weights"] == before_again["hashes"]["weights"]
    started = [_sketch(record, "weights") for record in (before, before_again)]
    yield Quantity("start", equal, _apart(*started, scale=started[1]), TOLERANCE["start"])
    for name, sha in epoch["hashes"].items():
        kind = name.rpartition("/")[2]
        if kind == "scores":
            difference = _scores_apart(epoch["scores"][name], epoch_again["scores"][name])
        else:
            then, now = _sketch(epoch, name), _sketch(epoch_again, name)
            # What an epoch adds to the weights is small beside them, and is what it is held to.
            difference = _apart(then, now, scale=now - started[1] if kind == "weights" else now)
        yield Quantity(name, sha == epoch_again["hashes"][name], difference, TOLERANCE[kind])


def _sketch(record: Record, name: str) -> NDArray[np.float64]:
    return np.array(record["sketches"][name], dtype=np.float64)  # null, which stands for NaN, becomes NaN


def _apart(then: NDArray[np.float64], now: NDArray[np.float64], *, scale: NDArray[np.float64]) -> float:
    difference, size = float(np.linalg.norm(then - now)), float(np.linalg.norm(scale))
    return difference / size if size else math.inf if difference else 0.0


def _scores_apart(then: list[list[Any]], now: list[list[Any]]) -> float:
    """The largest difference of two scores; infinite if only one of them is missing."""
    before, after = (np.array(table, dtype=np.float64) for table in (then, now))
    if before.shape != after.shape or (np.isnan(before) != np.isnan(after)).any():
        return math.inf
    return float(np.nanmax(np.abs(before - after)))
