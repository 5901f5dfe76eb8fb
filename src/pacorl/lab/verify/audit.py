"""Checks of a run's files against its ledger: `pacorl verify RUN`. They compute no epoch and no image again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Literal

from safetensors.torch import load_file

from pacorl.core.metric_names import SECONDS
from pacorl.grpo.checkpoint import best_checkpoint, check_whole
from pacorl.grpo.ledger import FILES, Record, line_hash, read_ledger, summary, weight_items
from pacorl.grpo.start import checkpoints
from pacorl.io.documents import JsonObject, read_jsonl, read_object, read_text
from pacorl.io.files import check_digests, safetensors_errors, text_digest
from pacorl.report.folder import numbers
from pacorl.report.page import check_report

Kind = Literal["epoch", "evaluation"]
"""Kind of a repeatable record."""
Moment = tuple[int, int]
"""Epoch and optimizer step."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    topic: str
    fine: bool
    text: str
    """The files that were checked, or the fault."""


@dataclass(frozen=True, slots=True)
class Audit:
    """Results of all checks."""

    findings: list[Finding]
    overhead: float
    """Share of hashing in the epochs' time."""
    epochs: list[int]
    """Epochs that can be computed again: the checkpoint before them exists."""
    evaluations: list[int]
    """Epochs whose evaluation can be computed again: their checkpoint exists."""

    @property
    def fine(self) -> bool:
        """Whether no check failed."""
        return all(finding.fine for finding in self.findings)

    def to_dict(self) -> JsonObject:
        """Convert to a JSON object."""
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
    epochs = list(repeatable(run, records, "epoch"))
    evaluations = list(repeatable(run, records, "evaluation"))
    return Audit(findings, _overhead(run), epochs, evaluations)


def _overhead(run: Path) -> float:
    total = hashing = 0.0
    for line in read_jsonl(run / "metrics.jsonl"):
        if line.get("kind") != "epoch":
            continue
        seconds = numbers(line)
        hashing += seconds.get(f"{SECONDS}hashes", 0.0)
        # Sampling hides a part of the rewards' seconds, which does not lengthen the epoch.
        total += sum(value for name, value in seconds.items() if name.startswith(SECONDS) and "hidden" not in name)
    return hashing / total if total else 0.0


# --- checks: each returns its finding's text, or raises ValueError or OSError ----------------------------------


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
    if text_digest(read_text(run / "config.yaml")) != newest["config"]:
        raise ValueError(f"{run / 'config.yaml'} is not the config that the newest start had")
    return "config.yaml is that of the newest start"


def _check_log(run: Path, records: Sequence[Record]) -> str:
    log = run / "metrics.jsonl"
    # Lines of the log, and the lines that the ledger recorded.
    lines = [(_name(line), line_hash(line)) for line in read_jsonl(log) if line.get("kind") in ("epoch", "evaluation")]
    recorded = []
    for record in records:
        if record["kind"] != "start":
            recorded.append((_name(record), record["metrics"]))

    # Lines that are missing or changed, before lines that are repeated, added or in another order.
    for line in recorded:
        name = line[0]
        if line not in lines:
            fault = "has another line than the run wrote for" if name in dict(lines) else "lacks"
            raise ValueError(f"{log} {fault} {name}")
    for logged, line in zip_longest(lines, recorded):
        if logged != line:
            raise ValueError(f"{log} has a line of {(logged or line)[0]} that the ledger lacks there")
    return f"metrics.jsonl has the lines of all {len(recorded)} epochs and evaluations"


def _check_evaluations(run: Path, records: Sequence[Record]) -> str:
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    recorded: set[str] = set()
    for record in evaluations:
        check_samples(run, record)
        recorded.update(record["files"])

    # The page shows every evaluation that it finds.
    for path in sorted((run / "samples").rglob("*")):
        name = path.relative_to(run).as_posix()
        if path.is_file() and name.startswith("samples/evaluation-") and name not in recorded:
            raise ValueError(f"{path} belongs to no recorded evaluation; delete it if it is not the run's")
    images = len(recorded) - len(evaluations)
    return f"samples/ has the records and {images} images of {len(evaluations)} evaluations"


def check_samples(run: Path, evaluation: Record) -> None:
    """Raise ValueError, naming epoch and file, if an evaluation's records or images differ from the ledger."""
    try:
        check_digests(run, evaluation["files"])
    except (ValueError, OSError) as fault:
        raise ValueError(f"evaluation {evaluation['epoch']}: {fault}") from None


def _check_checkpoints(run: Path, records: Sequence[Record]) -> str:
    # Reversed: an epoch's record replaces that of the start that follows it.
    recorded = {}
    for record in reversed(records):
        recorded[_moment(record)] = record["hashes"]["weights"]

    checked = []
    for path in checkpoints(run / "checkpoints"):
        check_whole(path)
        state = read_object(path / "state.json")
        moment = _moment(state)
        # A run stopped within an epoch saves a state without a record.
        if moment not in recorded:
            continue
        with safetensors_errors(path):
            adapter = load_file(path / "adapter.safetensors")
            average = load_file(path / "average.safetensors")
        if summary(weight_items(adapter, average))[0] != recorded[moment]:
            raise ValueError(f"{path} has other weights than epoch {state['epoch']} left")
        checked.append(f"{path.name} (epoch {state['epoch']})")
    return f"the weights of {', '.join(checked) or 'no checkpoint'} are those that the epochs left"


def _check_best(run: Path, records: Sequence[Record]) -> str:
    folder = run / "checkpoints"
    file = folder / "best.json"
    # Scores in the checkpoints, against the ledger's.
    recorded = {}
    for record in records:
        recorded[_moment(record)] = record.get("score")
    epochs: dict[str, int] = {}
    for path in checkpoints(folder):
        state = read_object(path / "state.json")
        moment = _moment(state)
        epochs[path.name] = state["epoch"]
        # A run stopped in an evaluation saves a state without its score.
        if moment in recorded and state.get("score") not in (None, recorded[moment]):
            raise ValueError(f"{path / 'state.json'} has another score than the evaluation of epoch {state['epoch']}")

    # best.json, against the checkpoints.
    best = best_checkpoint(folder)
    if best is None:
        if file.exists():
            raise ValueError(f"{file} names a best checkpoint, and none has a score")
        return "no checkpoint has a score yet"
    name = best["checkpoint"]
    if read_object(file) != best:
        raise ValueError(
            f"{file} does not have the checkpoint with the highest score, {name} (epoch {epochs[name]}), and its score"
        )
    return f"best.json has the score of {name}"


def _check_adapter(run: Path, records: Sequence[Record]) -> str:
    existing = checkpoints(run / "checkpoints")
    if not existing:
        return "there is none yet"
    files = read_object(existing[-1] / "state.json").get("files", {})
    # A checkpoint lists the digests of the adapter that it exported.
    prefix = "lora/"
    exported = {}
    for name, sha in files.items():
        if name.startswith(prefix):
            exported[name.removeprefix(prefix)] = sha

    check_digests(run / "adapter", exported)
    return f"adapter/ is that of {existing[-1].name}"


def _check_page(run: Path, records: Sequence[Record]) -> str:
    if not (run / "report.html").exists():
        return "there is none yet"
    return f"report.html is the page of the files after epoch {check_report(run)}"


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


def _moment(state: JsonObject) -> Moment:
    return state["epoch"], state["step"]


def _name(entry: JsonObject) -> str:
    return f"{entry['kind']} {entry.get('epoch')}"


# --- computing again -------------------------------------------------------------------------------------------


def repeatable(run: Path, records: Sequence[Record], kind: Kind) -> dict[int, Path | None]:
    """Map each epoch or evaluation that can be computed again to its checkpoint, or to None for the seed."""
    existing = {}
    for path in checkpoints(run / "checkpoints"):
        existing[_moment(read_object(path / "state.json"))] = path

    # Epoch → the state after it, as far as it still exists.
    sources: dict[int, Path | None] = {}
    starts: dict[int, Path | None] = {}
    for record in records:
        epoch = record["epoch"]
        before = epoch - 1 if kind == "epoch" else epoch
        if record["kind"] == kind and before in sources:
            starts[epoch] = sources[before]

        source = record.get("checkpoint")
        if _moment(record) in existing:
            sources[epoch] = existing[_moment(record)]
        elif record["kind"] == "start" and source is None:
            sources[epoch] = None
        elif source and Path(source).is_absolute() and Path(source).is_dir():  # another run's
            sources[epoch] = Path(source)
    return starts


def ranges(numbers: Sequence[int]) -> str:
    """Write sorted numbers as ranges: 1–3, 5."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    # A span of one number is that number.
    texts = []
    for span in spans:
        texts.append(f"{span[0]}–{span[-1]}" if len(span) > 1 else str(span[0]))
    return ", ".join(texts) or "none"
