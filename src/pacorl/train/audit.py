"""Is a run what its ledger says? `pacorl verify RUN` computes nothing again for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from pacorl.core.metric_names import SECONDS
from pacorl.io.documents import read_jsonl, read_object, read_text
from pacorl.io.files import check_digests, safetensors_errors
from pacorl.train.checkpoint import check_whole
from pacorl.train.ledger import Record, line_hash, read_ledger, sha256, summary, weight_items
from pacorl.train.start import checkpoints


@dataclass(frozen=True, slots=True)
class Finding:
    """What was checked, whether it is fine, and what was seen."""

    topic: str
    fine: bool
    text: str


@dataclass(frozen=True, slots=True)
class Audit:
    """What of a run was checked without computing anything again."""

    findings: list[Finding]
    overhead: float
    """The share of the epochs' time that hashing took."""
    epochs: list[int]
    """Those that can be made again, since the checkpoint before them is here."""

    @property
    def fine(self) -> bool:
        """Whether all of it is."""
        return all(finding.fine for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """For programs."""
        return {"fine": self.fine, **asdict(self)}


def audit(run: Path) -> Audit:
    """Check that a run's ledger, config, log and checkpoints fit each other.

    Raises:
        ValueError: if the run has no ledger, or its chain is broken; the message names the line.
    """
    records = read_ledger(run)
    findings = []
    for topic, check in CHECKS.items():
        try:
            findings.append(Finding(topic, True, check(run, records)))
        except (ValueError, OSError) as fault:
            findings.append(Finding(topic, False, str(fault)))
    return Audit(findings, _overhead(run), list(repeatable_epochs(run, records)))


def _overhead(run: Path) -> float:
    lines = [line for line in read_jsonl(run / "metrics.jsonl") if line["kind"] == "epoch"]
    # What sampling hid of the rewards' time is no part of an epoch's.
    phases = [{k: v for k, v in line.items() if k.startswith(SECONDS) and "hidden" not in k} for line in lines]
    total = sum(sum(spent.values()) for spent in phases)
    return sum(spent.get(f"{SECONDS}hashes", 0.0) for spent in phases) / total if total else 0.0


def _check_ledger(run: Path, records: Sequence[Record]) -> str:
    for before, record in pairwise(records):
        goes_on = record["kind"] == "start" and _moment(record) == _moment(before)
        if goes_on and record["hashes"]["weights"] != before["hashes"]["weights"]:
            raise ValueError(f"the start after epoch {record['epoch']} had other weights than that epoch left")
    starts = sum(record["kind"] == "start" for record in records)
    return f"epochs: {len(records) - starts}, starts: {starts}; their chain is whole"


def _check_config(run: Path, records: Sequence[Record]) -> str:
    newest = [record for record in records if record["kind"] == "start"][-1]
    if sha256(read_text(run / "config.yaml")) != newest["config"]:
        raise ValueError(f"{run / 'config.yaml'} is not the config that the newest start had")
    return "config.yaml is that of the newest start"


def _check_log(run: Path, records: Sequence[Record]) -> str:
    lines = {line["epoch"]: line for line in read_jsonl(run / "metrics.jsonl") if line["kind"] == "epoch"}
    epochs = [record for record in records if record["kind"] == "epoch"]
    for record in epochs:
        line = lines.get(record["epoch"])
        if line is None or record["metrics"] not in (line_hash(line), line_hash(line, judge_counts=True)):
            fault = "lacks epoch" if line is None else "has another line than the run wrote for epoch"
            raise ValueError(f"{run / 'metrics.jsonl'} {fault} {record['epoch']}")
    return f"metrics.jsonl has the lines of all {len(epochs)} epochs"


def _check_checkpoints(run: Path, records: Sequence[Record]) -> str:
    # Of an epoch and the start that follows it the epoch is what counts.
    recorded = {_moment(record): record["hashes"]["weights"] for record in reversed(records)}
    checked = []
    for path in checkpoints(run / "checkpoints"):
        check_whole(path)
        state = read_object(path / "state.json")
        # A run that stops within an epoch saves a state of which there is no record.
        if _moment(state) not in recorded:
            continue
        if _weights_hash(path) != recorded[_moment(state)]:
            raise ValueError(f"{path} has other weights than epoch {state['epoch']} left")
        checked.append(f"{path.name} (epoch {state['epoch']})")
    return f"the weights of {', '.join(checked) or 'no checkpoint'} are those that the epochs left"


def _check_adapter(run: Path, records: Sequence[Record]) -> str:
    existing = checkpoints(run / "checkpoints")
    if not existing:
        return "there is none yet"
    files = read_object(existing[-1] / "state.json").get("files", {})
    prefix = "lora/"
    check_digests(run / "adapter", {n.removeprefix(prefix): sha for n, sha in files.items() if n.startswith(prefix)})
    return f"adapter/ is that of {existing[-1].name}"


CHECKS: Mapping[str, Callable[[Path, Sequence[Record]], str]] = {
    "ledger": _check_ledger,
    "config": _check_config,
    "log": _check_log,
    "checkpoints": _check_checkpoints,
    "adapter": _check_adapter,
}


def _moment(state: Mapping[str, Any]) -> tuple[int, int]:
    return state["epoch"], state["step"]


def _weights_hash(checkpoint: Path) -> str:
    with safetensors_errors(checkpoint):
        adapter, average = (load_file(checkpoint / f"{kind}.safetensors") for kind in ("adapter", "average"))
    return summary(weight_items(adapter, average))[0]


def repeatable_epochs(run: Path, records: Sequence[Record]) -> dict[int, Path | None]:
    """Each epoch that can be made again, and from what: a checkpoint, or None for the seed."""
    existing = {_moment(read_object(path / "state.json")): path for path in checkpoints(run / "checkpoints")}
    starts: dict[int, Path | None] = {}
    for before, record in pairwise(records):
        if record["kind"] != "epoch":
            continue
        source = before.get("checkpoint")
        if _moment(before) in existing:
            starts[record["epoch"]] = existing[_moment(before)]
        elif before["kind"] == "start" and source is None:
            starts[record["epoch"]] = None
        elif source and Path(source).is_absolute() and Path(source).is_dir():  # another run's
            starts[record["epoch"]] = Path(source)
    return starts


def ranges(numbers: Sequence[int]) -> str:
    """1–3, 5."""
    ends = [n for n in numbers if n + 1 not in numbers]
    starts = [n for n in numbers if n - 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True)) or "none"
