"""Is a run what its ledger says? `pacorl verify RUN` computes nothing again for that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file

from pacorl.core.metric_names import SECONDS
from pacorl.grpo.checkpoint import best_checkpoint, check_whole
from pacorl.grpo.ledger import FILES, Record, line_hash, read_ledger, sha256, summary, weight_items
from pacorl.grpo.start import checkpoints
from pacorl.io.documents import read_jsonl, read_object, read_text
from pacorl.io.files import check_digests, safetensors_errors
from pacorl.report.page import check_report

Kind = Literal["epoch", "evaluation"]
"""A kind of record that can be computed again."""


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
    """Epochs that can be computed again, since the checkpoint before them exists."""
    evaluations: list[int]
    """Epochs whose evaluation can be computed again, since their checkpoint exists."""

    @property
    def fine(self) -> bool:
        """Whether all of it is."""
        return all(finding.fine for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """For programs."""
        return {"fine": self.fine, **asdict(self)}


def audit(run: Path) -> Audit:
    """Check that a run's ledger, config, log, evaluations, checkpoints and page fit each other.

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
    epochs, evaluations = (list(repeatable(run, records, kind)) for kind in ("epoch", "evaluation"))
    return Audit(findings, _overhead(run), epochs, evaluations)


def _overhead(run: Path) -> float:
    lines = [line for line in read_jsonl(run / "metrics.jsonl") if line["kind"] == "epoch"]
    # What sampling hid of the rewards' time is no part of an epoch's.
    phases = [{k: v for k, v in line.items() if k.startswith(SECONDS) and "hidden" not in k} for line in lines]
    total = sum(sum(spent.values()) for spent in phases)
    return sum(spent.get(f"{SECONDS}hashes", 0.0) for spent in phases) / total if total else 0.0


def _check_ledger(run: Path, records: Sequence[Record]) -> str:
    for before, record in pairwise(records):
        same = _moment(record) == _moment(before)
        if same and record["hashes"]["weights"] != before["hashes"]["weights"]:
            raise ValueError(
                f"the {record['kind']} after epoch {record['epoch']} had other weights than that epoch left"
            )
    counts = Counter(record["kind"] for record in records)
    counted = ", ".join(f"{kind}s: {counts[kind]}" for kind in FILES)
    return f"{counted}; their chain is whole"


def _check_config(run: Path, records: Sequence[Record]) -> str:
    newest = [record for record in records if record["kind"] == "start"][-1]
    if sha256(read_text(run / "config.yaml")) != newest["config"]:
        raise ValueError(f"{run / 'config.yaml'} is not the config that the newest start had")
    return "config.yaml is that of the newest start"


def _check_log(run: Path, records: Sequence[Record]) -> str:
    log = run / "metrics.jsonl"
    lines = [line for line in read_jsonl(log) if line["kind"] in ("epoch", "evaluation")]
    found = [(_name(line), line_hash(line)) for line in lines]
    written = [(_name(record), record["metrics"]) for record in records if record["kind"] != "start"]
    for name, sha in written:
        if (name, sha) not in found:
            fault = "has another line than the run wrote for" if name in dict(found) else "lacks"
            raise ValueError(f"{log} {fault} {name}")
    for line, record in zip_longest(found, written):
        if line != record:
            raise ValueError(f"{log} has a line of {(line or record)[0]} that the ledger lacks there")
    return f"metrics.jsonl has the lines of all {len(written)} epochs and evaluations"


def _check_evaluations(run: Path, records: Sequence[Record]) -> str:
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    for record in evaluations:
        check_samples(run, record)
    images = sum(len(record["files"]) - 1 for record in evaluations)
    return f"samples/ has the records and {images} images of {len(evaluations)} evaluations"


def check_samples(run: Path, evaluation: Record) -> None:
    """Raise ValueError, naming epoch and file, if an evaluation's records or images are not those of the ledger."""
    try:
        check_digests(run, evaluation["files"])
    except (ValueError, OSError) as fault:
        raise ValueError(f"evaluation {evaluation['epoch']}: {fault}") from None


def _check_best(run: Path, records: Sequence[Record]) -> str:
    folder = run / "checkpoints"
    scores = {_moment(record): record.get("score") for record in records}
    epochs: dict[str, int] = {}
    for path in checkpoints(folder):
        state = read_object(path / "state.json")
        epochs[path.name] = state["epoch"]
        # A run that was stopped in an evaluation saved a state without its score.
        if _moment(state) in scores and state.get("score") not in (None, scores[_moment(state)]):
            raise ValueError(f"{path / 'state.json'} has another score than the evaluation of epoch {state['epoch']}")
    best, file = best_checkpoint(folder), folder / "best.json"
    if best is None:
        if file.exists():
            raise ValueError(f"{file} names a best checkpoint, and none has a score")
        return "no checkpoint has a score yet"
    if read_object(file) != best:
        where = f"{best['checkpoint']} (epoch {epochs[best['checkpoint']]})"
        raise ValueError(f"{file} does not have the checkpoint with the highest score, {where}, and its score")
    return f"best.json has the score of {best['checkpoint']}"


def _check_page(run: Path, records: Sequence[Record]) -> str:
    if not (run / "report.html").exists():
        return "there is none yet"
    return f"report.html is what the files after epoch {check_report(run)} come to"


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
    "evaluations": _check_evaluations,
    "checkpoints": _check_checkpoints,
    "best": _check_best,
    "adapter": _check_adapter,
    "page": _check_page,
}


def _moment(state: Mapping[str, Any]) -> tuple[int, int]:
    return state["epoch"], state["step"]


def _name(entry: Mapping[str, Any]) -> str:
    return f"{entry['kind']} {entry['epoch']}"


def _weights_hash(checkpoint: Path) -> str:
    with safetensors_errors(checkpoint):
        adapter, average = (load_file(checkpoint / f"{kind}.safetensors") for kind in ("adapter", "average"))
    return summary(weight_items(adapter, average))[0]


def repeatable(run: Path, records: Sequence[Record], kind: Kind) -> dict[int, Path | None]:
    """Map each epoch or evaluation that can be computed again to its checkpoint, or to None for the seed."""
    existing = {_moment(read_object(path / "state.json")): path for path in checkpoints(run / "checkpoints")}
    sources: dict[int, Path | None] = {}
    starts: dict[int, Path | None] = {}
    for record in records:
        epoch, source = record["epoch"], record.get("checkpoint")
        if record["kind"] == kind and (before := epoch - (kind == "epoch")) in sources:
            starts[epoch] = sources[before]
        if _moment(record) in existing:
            sources[epoch] = existing[_moment(record)]
        elif record["kind"] == "start" and source is None:
            sources[epoch] = None
        elif source and Path(source).is_absolute() and Path(source).is_dir():  # another run's
            sources[epoch] = Path(source)
    return starts


def ranges(numbers: Sequence[int]) -> str:
    """1–3, 5."""
    ends = [n for n in numbers if n + 1 not in numbers]
    starts = [n for n in numbers if n - 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True)) or "none"
