"""A run's ledger: hashes of each epoch and each evaluation, with which `pacorl verify` compares the run.

`ledger.jsonl` has one record per epoch and per evaluation, `starts.jsonl` one per start, with its environment. Equal
runs have equal ledgers, however often they were stopped. A hash only says whether two things are equal. A sketch beside
it says how far apart they are: each of its numbers is a sum of the values under random signs, so that the mean square
of two sketches' differences estimates the mean square of what lies behind them (Johnson and Lindenstrauss, 1984; with
64 numbers to some 20 %).
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import pacorl
from pacorl.config import base as configs
from pacorl.core.metric_names import HELD_OUT, SECONDS
from pacorl.grpo.builders import FunctionReward
from pacorl.grpo.checkpoint import TrainedWeights
from pacorl.grpo.evaluated import EvaluatedSample, sample_files
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.scoring import Scores
from pacorl.io.documents import append_jsonl, dump_json, parse_object, read_jsonl, read_text, write_jsonl
from pacorl.io.files import PRIVATE, digest
from pacorl.io.versions import versions
from pacorl.judge.judge import Counters
from pacorl.models.lora.adapters import adapter_state, full_state
from pacorl.rewards.reward import Deferred, Reward
from pacorl.runtime.processes import Runtime
from pacorl.types import Advantages, Samples

FILES = {"epoch": "ledger.jsonl", "evaluation": "ledger.jsonl", "start": "starts.jsonl"}
"""A record's kind → where it stands."""
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "accelerate", "numpy", "safetensors")
"""Whose versions may change the bits of an epoch."""
BUCKETS = 64
"""Numbers of a sketch."""
JUDGE_COUNTS = frozenset(f"judge/{field.name}" for field in fields(Counters))
"""Names in metrics.jsonl of what a judge over HTTP was asked."""
WIDTH = 1024
"""Values that are summed under one row of signs."""

Record = dict[str, Any]
Item = tuple[str, float]
"""A hash, and one projection of what is hashed."""


class Ledger:
    """A run's ledger, written by the main process only (give `folder=None` on the others); all ranks call all of it."""

    def __init__(self, folder: Path | None, runtime: Runtime) -> None:
        self.folder, self.runtime = folder, runtime
        self.hashes: dict[str, str] = {}
        """Of the epoch that is going on, by quantity, in the order in which they come about."""
        self.sketches: dict[str, list[float]] = {}
        self.scores: dict[str, list[list[Any]]] = {}
        """[row, score of each reward …] of the epoch that is going on."""
        self._chains = dict.fromkeys(FILES.values(), "")

    def start(self, weights: TrainedWeights, *, epoch: int, step: int, evaluated: int, **facts: Any) -> None:
        """Drop the records that the run makes again, and write the record of a start.

        Args:
            weights: the run's, as it starts.
            epoch: finished epochs.
            step: optimizer steps taken.
            evaluated: epoch of the newest evaluation; −1 before the first.
            facts: what else is known of the start.
        """
        start = {"kind": "start", "epoch": epoch, "step": step, "evaluated": evaluated, **facts}
        for name in self._chains:
            if self.folder and (path := self.folder / name).exists():
                records = list(takewhile(lambda record: _position(record) < _position(start), _readable(path)))
                write_jsonl(path, records, mode=PRIVATE)
                self._chains[name] = records[-1]["chain"] if records else ""
        self.note_weights(weights)
        self._append(start | {"environment": environment_of(self.runtime)})

    def note_samples(self, samples: Sequence[Samples], scores: Mapping[int, Scores]) -> None:
        """Hash this rank's samples with those of all others, and keep the scores.

        Args:
            samples: this rank's, by update.
            scores: of all ranks, by global row.
        """
        items = self.runtime.gather_rows(lambda: sample_items(samples))
        table = self.scores["scores"] = [[row, *scores[row]] for row in sorted(scores)]
        self._note("samples", items.values())
        self.hashes["scores"] = sha256(dump_json(table, indent=None))

    def note_advantages(self, values: Advantages) -> None:
        """Hash what the scores came to."""
        levels = [] if values.value_LB is None else [*values.value_LB]
        selected = [] if values.kept_B is None else [values.kept_B]
        by_sample = torch.stack([x.double() for x in (values.value_B, values.used_B, *levels, *selected)], dim=1)
        self._note("advantages", [item(str(row), x.numpy()) for row, x in enumerate(by_sample)])

    def note_weights(self, weights: TrainedWeights) -> None:
        """Hash the trained adapter and its average."""
        # Shards are exchanged here, so every rank takes part before the main one hashes.
        adapter, average = full_state(adapter_state(weights.unwrapped)), full_state(weights.average.state)
        if self.folder:
            self._note("weights", weight_items(adapter, average))

    def write(self, *, epoch: int, step: int, line: Mapping[str, Any]) -> None:
        """Append the record of a finished epoch, whose line of metrics.jsonl is `line`."""
        self._append({"kind": "epoch", "epoch": epoch, "step": step, "metrics": line_hash(line), "scores": self.scores})

    def write_evaluation(
        self,
        weights: TrainedWeights,
        samples: Sequence[EvaluatedSample],
        *,
        seed: int,
        line: Mapping[str, Any],
        score: float | None,
    ) -> None:
        """Append the record of an evaluation.

        Args:
            weights: the run's, whose average was evaluated.
            samples: of all ranks; their files are written already.
            seed: the run's.
            line: its line of metrics.jsonl.
            score: by which the best checkpoint is chosen.
        """
        self.note_weights(weights)
        if not self.folder:
            return
        self._note("images", [item(f"{s.prompt.id} {s.noise_seed(seed)}", np.asarray(s.image)) for s in samples])
        files = {name: digest(self.folder / name) for name in sample_files(line["epoch"], len(samples))}
        facts = {"metrics": line_hash(line), "score": score, "files": files}
        self._append({"kind": "evaluation", "epoch": line["epoch"], "step": line["step"], **facts})

    def _note(self, quantity: str, items: Iterable[Item]) -> None:
        self.hashes[quantity], self.sketches[quantity] = summary(items)

    def _append(self, record: Record) -> None:
        record |= {"hashes": self.hashes, "sketches": self.sketches}
        self.hashes, self.sketches, self.scores = {}, {}, {}
        if self.folder:
            name = FILES[record["kind"]]
            self._chains[name] = record["chain"] = chained(self._chains[name], record)
            append_jsonl(self.folder / name, record)


def _position(record: Record) -> tuple[int, int]:
    """Sort key: an epoch, a start that evaluates it, its evaluation, a start that finds it evaluated."""
    orders = {"epoch": 0, "evaluation": 2, "start": 3 if record.get("evaluated") == record["epoch"] else 1}
    return record["epoch"], orders[record["kind"]]


def _readable(path: Path) -> Iterable[Record]:
    """The records up to one that a crash cut short."""
    for line in read_text(path).splitlines():
        try:
            record = parse_object(line)
        except ValueError:
            return
        yield record


def read_ledger(run: Path) -> list[Record]:
    """Read the records of a run's starts, epochs and evaluations, in the order of events.

    Raises:
        ValueError: if there are none, or a chain is broken; the message names the line.
    """
    records = [record for name in dict.fromkeys(FILES.values()) for record in _read_chain(run / name)]
    return sorted(records, key=_position)


def _read_chain(path: Path) -> list[Record]:
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}: it is no policy run, one without an epoch, or older")
    records, chain = read_jsonl(path), ""
    for number, record in enumerate(records, start=1):
        chain = chained(chain, record)
        if record.get("chain") != chain:
            raise ValueError(f"{path}:{number}: this record, or one before it, is not what the run wrote")
    return records


# --- hashes ----------------------------------------------------------------------------------------------------


def sha256(text: str) -> str:
    """SHA-256 of a text, in hexadecimal."""
    # By hashlib's own measure here: sha256 .49 GB/s, blake2b .42, since processors have instructions for the former.
    return hashlib.sha256(text.encode()).hexdigest()


def chained(chain: str, record: Record) -> str:
    """The hash of a record and, through `chain`, of all before it."""
    return sha256(chain + dump_json({key: value for key, value in record.items() if key != "chain"}, indent=None))


def line_hash(line: Mapping[str, Any]) -> str:
    """Hash a line of metrics.jsonl without its times and the judge's counts, which a retried question changes."""
    kept = {key: value for key, value in line.items() if not key.startswith(SECONDS) and key not in JUDGE_COUNTS}
    return sha256(dump_json(kept, indent=None))


def weight_items(adapter: Mapping[str, Tensor], average: Mapping[str, Tensor]) -> list[Item]:
    """Of a trained adapter and its moving average, both unsharded."""
    states = {"adapter": adapter, "average": average}
    return tensor_items({f"{kind}/{name}": value for kind, state in states.items() for name, value in state.items()})


def tensor_items(tensors: Mapping[str, Tensor]) -> list[Item]:
    """Of each tensor with its name, in the order of names."""
    return [item(name, tensors[name].detach().cpu().numpy()) for name in sorted(tensors)]


def item(name: str, values: NDArray[Any]) -> Item:
    """Of an array with its name."""
    digest = hashlib.sha256(f"{name} {values.dtype} {values.shape}".encode())
    digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest(), projection(values)


def sample_items(samples: Sequence[Samples]) -> dict[int, Item]:
    """By global row: of the prompt, the latents around each SDE step with its log-probability, the endpoint, the image;
    the projection is the endpoint's."""
    items = {}
    for update in samples:
        digests = {row: hashlib.sha256(str(row).encode()) for rollout in update.rollouts for row in rollout.row_B}
        for nodes in sorted(update.nodes, key=lambda nodes: nodes.step):
            latents, following, log_probs = (
                x.numpy() for x in (nodes.latents_VNC, nodes.next_latents_ENC, nodes.log_prob_B)
            )
            rows = zip(nodes.row_B, nodes.node_B.tolist(), nodes.child_B.tolist(), log_probs, strict=True)
            for row, node, child, log_prob in rows:
                for part in (latents[node], following[child], log_prob.tobytes()):
                    digests[row].update(part)
        for rollout in update.rollouts:
            finals = rollout.final_BNC.numpy()
            for row, prompt, final, image in zip(rollout.row_B, rollout.prompts, finals, rollout.images, strict=True):
                for part in (f"{prompt.id} {image.size} {image.mode}".encode(), final, image.tobytes()):
                    digests[row].update(part)
                items[row] = digests[row].hexdigest(), projection(final)
    return items


def summary(items: Iterable[Item]) -> tuple[str, list[float]]:
    """One hash of all items, and their sketch."""
    digests, projections = zip(*items, strict=True)
    sketch = np.zeros(BUCKETS)
    np.add.at(sketch, np.arange(len(projections)) % BUCKETS, projections * np.resize(signs(), len(projections)))
    return sha256("".join(digests)), sketch.tolist()


def projection(values: NDArray[Any]) -> float:
    """The sum of an array's values under random signs, which are the product of a row's and a column's."""
    rows = -(-values.size // WIDTH)
    padded = np.zeros(rows * WIDTH)
    padded[: values.size] = values.ravel()
    return float(np.resize(signs(), rows) @ (padded.reshape(rows, WIDTH) @ signs()[-WIDTH:]))


@cache
def signs() -> NDArray[np.float64]:
    """2¹⁶ random signs, the same for ever: generators of random numbers may change with their versions."""
    bits = np.unpackbits(np.frombuffer(hashlib.shake_128(b"signs").digest(2**13), np.uint8))
    return 1 - 2 * bits.astype(np.float64)


# --- the environment -------------------------------------------------------------------------------------------


def environment_of(runtime: Runtime) -> dict[str, Any]:
    """What the bits of an epoch may depend on, beside the config."""
    device = runtime.device
    return {
        **versions(("pacorl", *LIBRARIES)),
        "source": source_hash(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "matmul": torch.backends.cuda.matmul.fp32_precision,
        "threads": torch.get_num_threads(),
        "processes": runtime.world,
        "launcher": runtime.accelerator.distributed_type.value.lower(),
    }


def start_facts(
    config: PolicyConfig, checkpoint: Path | None, rewards: Mapping[str, Reward], held_out: Mapping[str, Reward]
) -> dict[str, Any]:
    """Fields of a start record: resumed checkpoint, config hash, recomputable rewards."""
    foreign = checkpoint is not None and checkpoint.parents[1].resolve() != config.out.resolve()
    scorers = {**rewards, **{f"{HELD_OUT}{key}": reward for key, reward in held_out.items()}}
    return {
        "checkpoint": checkpoint and (str(checkpoint.resolve()) if foreign else checkpoint.name),
        "config": sha256(configs.dump(config)),
        # A judge is never asked again, nor is a person, and the code of a Python function is nowhere in the run.
        "recomputed": [
            key
            for key, reward in scorers.items()
            if not hasattr(reward, "judge") and not isinstance(reward, FunctionReward | Deferred)
        ],
    }


@cache
def source_hash() -> str:
    """The hash of this package's code: what a version's number does not say of a checkout."""
    folder, digest = Path(pacorl.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]
