"""Ledger of a run: hashes of each epoch and each evaluation, which `pacorl verify` compares with the run.

`ledger.jsonl` has a record per epoch and per evaluation, `starts.jsonl` a record per start, with its environment. Equal
runs have equal ledgers, however often they were stopped. A hash shows whether two values are equal, and a sketch how
far apart they are: each of its numbers is a sum of the values under random signs, so the mean square of two sketches'
difference estimates that of the values (Johnson and Lindenstrauss, 1984; with 64 numbers to some 20 %).
"""

from __future__ import annotations

import hashlib
import itertools
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import pacorl
from pacorl.core.metric_names import HELD_OUT, SECONDS
from pacorl.grpo.builders import FunctionReward
from pacorl.grpo.evaluated import EvaluatedSample, noise_seed, sample_files
from pacorl.grpo.lora_run import LoraRun
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.scoring import Parts, Scores
from pacorl.io.documents import append_jsonl, dump_json, parse_object, read_jsonl, read_text, write_jsonl
from pacorl.io.files import PRIVATE, digest, text_digest
from pacorl.io.versions import versions
from pacorl.judge.judge import Counters
from pacorl.models.lora.adapters import adapter_state, full_state
from pacorl.rewards.reward import Deferred, Reward
from pacorl.runtime.processes import Runtime
from pacorl.types import Advantages, Samples

FILES = {"epoch": "ledger.jsonl", "evaluation": "ledger.jsonl", "start": "starts.jsonl"}
"""Kind of a record → its file."""
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "accelerate", "numpy", "safetensors")
"""Libraries whose versions may change the bits of an epoch."""
BUCKETS = 64
"""Numbers of a sketch."""
JUDGE_COUNTS = frozenset(f"judge/{field.name}" for field in fields(Counters))
"""Names in metrics.jsonl of the request counts of a judge over HTTP."""
WIDTH = 1024
"""Values that are summed under one row of signs."""

Record = dict[str, Any]
Item = tuple[str, float]
"""Hash and projection of a value."""


class Ledger:
    """Writer of a run's ledger. All ranks call all methods; ranks without a `folder` write no file."""

    def __init__(self, folder: Path | None, runtime: Runtime) -> None:
        self.folder = folder
        self.runtime = runtime
        self.hashes: dict[str, str] = {}
        """Quantity of the current epoch → hash, in the order of computation."""
        self.sketches: dict[str, list[float]] = {}
        self.scores: dict[str, list[list[Any]]] = {}
        """"scores" → [row, score of each reward …] of the current epoch."""
        self._chains = dict.fromkeys(FILES.values(), "")

    def start(self, run: LoraRun, *, epoch: int, step: int, evaluated: int, **facts: Any) -> None:
        """Drop the records that the run makes again and their samples, and write the record of a start.

        Args:
            run: the run, as it starts.
            epoch: finished epochs.
            step: optimizer steps taken.
            evaluated: epoch of the newest evaluation; −1 before the first.
            facts: further fields of the record.
        """
        start = {"kind": "start", "epoch": epoch, "step": step, "evaluated": evaluated, **facts}
        for name in self._chains:
            if self.folder and (self.folder / name).exists():
                path = self.folder / name
                records = []
                for line in read_text(path).splitlines():
                    try:
                        record = parse_object(line)
                    except ValueError:  # a line cut short by a crash
                        break
                    if _position(record) < _position(start):
                        records.append(record)
                    elif record["kind"] == "evaluation":
                        # By their names: a ledger from elsewhere must not name other files.
                        for file in sample_files(record["epoch"], len(record["files"]) - 1):
                            (self.folder / file).unlink(missing_ok=True)
                write_jsonl(path, records, mode=PRIVATE)
                self._chains[name] = records[-1]["chain"] if records else ""
        self.note_weights(run)
        self._append(start | {"environment": environment_of(self.runtime)})

    def note_samples(
        self, samples: Sequence[Samples], scores: Mapping[int, Scores], parts: Mapping[int, Parts] | None = None
    ) -> None:
        """Hash all ranks' samples, and keep the scores.

        Args:
            samples: this rank's, by update.
            scores: of all ranks, by global row.
            parts: parts of the scores by panel, by global row; None without panel credit.
        """
        # In the order of global rows, whatever the number of processes.
        items = self.runtime.gather_rows(lambda: sample_items(samples))
        self._note("samples", items.values())
        table = [[row, *scores[row]] for row in sorted(scores)]
        self.scores["scores"] = table
        hashed = dump_json(table, indent=None)
        if parts is not None:
            self.scores["parts"] = [[row, dict(sorted(parts[row].items()))] for row in sorted(parts)]
            hashed += dump_json(self.scores["parts"], indent=None)
        self.hashes["scores"] = text_digest(hashed)

    def note_advantages(self, values: Advantages) -> None:
        """Hash the advantages: by sample, by level of the tree, and the samples that are trained on."""
        columns = [values.value_B, values.used_B]
        if values.value_LB is not None:
            columns += [*values.value_LB]
        if values.value_LBP is not None:
            columns += [*values.value_LBP.transpose(1, 2).flatten(0, 1)]
        if values.kept_B is not None:
            columns.append(values.kept_B)
        by_sample = torch.stack([column.double() for column in columns], dim=1)
        self._note("advantages", [item(str(row), x.numpy()) for row, x in enumerate(by_sample)])

    def note_weights(self, run: LoraRun) -> None:
        """Hash the trained adapter and its average."""
        # Shards are exchanged here, so every rank takes part before the main process hashes.
        adapter = full_state(adapter_state(run.transformer))
        average = full_state(run.average.state)
        if self.folder:
            self._note("weights", weight_items(adapter, average))

    def write(self, *, epoch: int, step: int, line: Mapping[str, Any]) -> None:
        """Append the record of a finished epoch, whose line of metrics.jsonl is `line`."""
        self._append({"kind": "epoch", "epoch": epoch, "step": step, "metrics": line_hash(line), "scores": self.scores})

    def write_evaluation(
        self,
        run: LoraRun,
        samples: Sequence[EvaluatedSample],
        *,
        line: Mapping[str, Any],
        score: float | None,
    ) -> None:
        """Append the record of an evaluation.

        Args:
            run: the run, whose average was evaluated.
            samples: of all ranks; their files are written already.
            line: its line of metrics.jsonl.
            score: by which the best checkpoint is chosen.
        """
        self.note_weights(run)
        if not self.folder:
            return
        seed = run.config.seed
        names = [f"{s.prompt.id} {noise_seed(seed, (s.prompt, s.index))}" for s in samples]
        self._note("images", [item(name, np.asarray(s.image)) for name, s in zip(names, samples, strict=True)])
        record = {
            "kind": "evaluation",
            "epoch": line["epoch"],
            "step": line["step"],
            "metrics": line_hash(line),
            "score": score,
            "files": {name: digest(self.folder / name) for name in sample_files(line["epoch"], len(samples))},
        }
        self._append(record)

    def _note(self, quantity: str, items: Iterable[Item]) -> None:
        self.hashes[quantity], self.sketches[quantity] = summary(items)

    def _append(self, record: Record) -> None:
        record |= {"hashes": self.hashes, "sketches": self.sketches}
        self.hashes = {}
        self.sketches = {}
        self.scores = {}
        if self.folder:
            name = FILES[record["kind"]]
            self._chains[name] = record["chain"] = chained(self._chains[name], record)
            append_jsonl(self.folder / name, record)


# --- reading ---------------------------------------------------------------------------------------------------


def read_ledger(run: Path) -> list[Record]:
    """Read the records of a run's starts, epochs and evaluations, in the order of events.

    Raises:
        ValueError: if there are none, or a chain is broken; the message names the line.
    """
    records = []
    for name in dict.fromkeys(FILES.values()):
        path = run / name
        if not path.is_file():
            raise ValueError(f"{run} has no {name}: it is no policy run, has no finished epoch, or is older")
        chain = ""
        for number, record in enumerate(read_jsonl(path), start=1):
            chain = chained(chain, record)
            if record.get("chain") != chain:
                raise ValueError(f"{path}:{number}: this record, or one before it, is not what the run wrote")
            records.append(record)
    return sorted(records, key=_position)


def _position(record: Record) -> tuple[int, int]:
    """Sort key: epoch, start before its evaluation, evaluation, start after its evaluation."""
    orders = {"epoch": 0, "evaluation": 2, "start": 3 if record.get("evaluated") == record["epoch"] else 1}
    return record["epoch"], orders[record["kind"]]


# --- hashes ----------------------------------------------------------------------------------------------------


def chained(chain: str, record: Record) -> str:
    """Hash a record and, through `chain`, all records before it."""
    return text_digest(chain + dump_json({key: value for key, value in record.items() if key != "chain"}, indent=None))


def line_hash(line: Mapping[str, Any]) -> str:
    """Hash a line of metrics.jsonl without its times and the judge's counts, which a retried request changes."""
    fixed = {}
    for key, value in line.items():
        if not key.startswith(SECONDS) and key not in JUDGE_COUNTS:
            fixed[key] = value

    return text_digest(dump_json(fixed, indent=None))


def weight_items(adapter: Mapping[str, Tensor], average: Mapping[str, Tensor]) -> list[Item]:
    """Hash a trained adapter and its moving average, both unsharded."""
    tensors = {f"adapter/{name}": value for name, value in adapter.items()}
    tensors |= {f"average/{name}": value for name, value in average.items()}
    return [item(name, tensors[name].detach().cpu().numpy()) for name in sorted(tensors)]


def item(name: str, values: NDArray[Any]) -> Item:
    """Hash an array with its name."""
    digest = hashlib.sha256(f"{name} {values.dtype} {values.shape}".encode())
    digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest(), projection(values)


def sample_items(samples: Sequence[Samples]) -> dict[int, Item]:
    """Hash each sample by global row: latents around SDE steps, log-probabilities, prompt, endpoint, image.

    The projection is the endpoint's.
    """
    items = {}
    for update in samples:
        # One hash per row of this rank, begun with the row's number.
        rows = itertools.chain(*(rollout.row_B for rollout in update.rollouts))
        digests = {row: hashlib.sha256(str(row).encode()) for row in rows}

        # SDE steps: the node's latents, the child's, and the log-probability of the step between them.
        for nodes in sorted(update.nodes, key=lambda nodes: nodes.step):
            latents = nodes.latents_VNC.numpy()
            following = nodes.next_latents_ENC.numpy()
            log_probs = nodes.log_prob_B.numpy()
            nodes_and_children = zip(nodes.row_B, nodes.node_B.tolist(), nodes.child_B.tolist(), log_probs, strict=True)
            for row, node, child, log_prob in nodes_and_children:
                digests[row].update(latents[node])
                digests[row].update(following[child])
                digests[row].update(log_prob.tobytes())

        # Results: prompt, endpoint and image.
        for rollout in update.rollouts:
            endpoints = rollout.final_BNC.numpy()
            for row, prompt, endpoint, image in zip(
                rollout.row_B, rollout.prompts, endpoints, rollout.images, strict=True
            ):
                digests[row].update(f"{prompt.id} {image.size} {image.mode}".encode())
                digests[row].update(endpoint)
                digests[row].update(image.tobytes())
                items[row] = digests[row].hexdigest(), projection(endpoint)
    return items


def summary(items: Iterable[Item]) -> tuple[str, list[float]]:
    """Reduce items to one hash and their sketch."""
    digests, projections = zip(*items, strict=True)
    sketch = np.zeros(BUCKETS)
    np.add.at(sketch, np.arange(len(projections)) % BUCKETS, projections * np.resize(signs(), len(projections)))
    return text_digest("".join(digests)), sketch.tolist()


def projection(values: NDArray[Any]) -> float:
    """Sum an array's values under random signs, which are products of a row's and a column's."""
    # Products of two short sign vectors serve arrays of any length.
    rows = -(-values.size // WIDTH)
    padded = np.zeros(rows * WIDTH)
    padded[: values.size] = values.ravel()
    return float(np.resize(signs(), rows) @ (padded.reshape(rows, WIDTH) @ signs()[-WIDTH:]))


@cache
def signs() -> NDArray[np.float64]:
    """Derive 2¹⁶ random signs from a hash: random number generators may change with their versions."""
    bits = np.unpackbits(np.frombuffer(hashlib.shake_128(b"signs").digest(2**13), np.uint8))
    return 1 - 2 * bits.astype(np.float64)


# --- the record of a start -------------------------------------------------------------------------------------


def start_facts(
    config: PolicyConfig,
    checkpoint: Path | None,
    rewards: Mapping[str, Reward],
    held_out: Mapping[str, Reward],
    *,
    config_text: str,
) -> dict[str, Any]:
    """Fields of a start record: resumed checkpoint, config hash, recomputable rewards."""
    source = checkpoint and checkpoint.name
    if checkpoint and checkpoint.parents[1].resolve() != config.out.resolve():  # another run's
        source = str(checkpoint.resolve())

    # A judge is not asked again, nor is a person, and the run has no copy of a Python function's code.
    scorers = {**rewards, **{f"{HELD_OUT}{key}": reward for key, reward in held_out.items()}}
    recomputed = []
    for key, reward in scorers.items():
        if not hasattr(reward, "judge") and not isinstance(reward, FunctionReward | Deferred):
            recomputed.append(key)
    return {"checkpoint": source, "config": text_digest(config_text), "recomputed": recomputed}


def environment_of(runtime: Runtime) -> dict[str, Any]:
    """Collect everything but the config on which the bits of an epoch may depend."""
    device = runtime.device
    is_cuda = device.type == "cuda"
    return {
        **versions(("pacorl", *LIBRARIES)),
        "source": source_hash(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
        "cuda": torch.version.cuda if is_cuda else None,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "matmul": torch.backends.cuda.matmul.fp32_precision,
        "threads": torch.get_num_threads(),
        "processes": runtime.world,
        "launcher": runtime.accelerator.distributed_type.value.lower(),
    }


@cache
def source_hash() -> str:
    """Hash this package's code: checkouts of one version may differ."""
    folder = Path(pacorl.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]
