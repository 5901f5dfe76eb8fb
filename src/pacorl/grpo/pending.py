"""Samples and answers of an epoch interrupted during scoring.

They are written only if a run stops while it waits for scores. A run resumed from the checkpoint of that moment reuses
the samples and repeats no answered question.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from pacorl.grpo.checkpoint import SEAL, put_in_place
from pacorl.grpo.rows import Row
from pacorl.io.documents import read_jsonl, read_object, write_json, write_jsonl
from pacorl.io.files import PRIVATE, aside_of, check_digests, digests, open_aside, remove_made
from pacorl.io.outage import Answers, KeepsAnswers
from pacorl.runtime.processes import Runtime, SharedFault
from pacorl.types import NodeBatch, Prompt, Rollout, Samples, Size

logger = logging.getLogger(__name__)

FOLDER = "pending"
MARK = "pending.json"
ANSWERS = "answers.jsonl"
FILES = (MARK, ANSWERS, "rank-*-update-*.safetensors")
"""Patterns of the folder's files."""
NOT_KEPT = "nothing of the next is kept"


class PendingEpoch:
    """Samples and answers of the current epoch. All ranks call every method."""

    def __init__(self, run: Path, runtime: Runtime, services: Mapping[str, object]) -> None:
        """Record the answers of `services` (by config key) that support it, in the folder `run`."""
        self.folder = run / FOLDER
        self.runtime = runtime
        self.answers: dict[str, Answers] = {}
        self.samples: Sequence[Samples] | None = None
        """Complete samples of this rank by update."""
        self._mark: dict[str, Any] = {}
        """Content of the folder's mark; empty if the folder is unusable."""
        for name, service in services.items():
            if isinstance(service, KeepsAnswers):
                self.answers[name] = Answers()
                service.keep_answers(self.answers[name])

    def open(self, checkpoint: Path | None, *, same_config: bool) -> None:
        """Load the folder if it belongs to this checkpoint; otherwise remove it with a warning."""
        self._mark = self.runtime.on_main(partial(self._usable_mark, checkpoint, same_config=same_config))
        if not self._mark:
            return
        for line in read_jsonl(self.folder / ANSWERS):
            if line["service"] in self.answers:
                self.answers[line["service"]].known[line["question"]] = line["answer"]

    def _usable_mark(self, checkpoint: Path | None, *, same_config: bool) -> dict[str, Any]:
        shutil.rmtree(aside_of(self.folder), ignore_errors=True)
        if not (self.folder / MARK).exists():
            return {}
        try:
            mark = read_object(self.folder / MARK)
            if checkpoint is None or mark.get(SEAL) != _seal(checkpoint):
                raise ValueError(f"{self.folder} is not of the checkpoint that the run goes on from")
            if not same_config:
                raise ValueError(f"{self.folder} is of another config")
            check_digests(self.folder, mark["files"])
        except (ValueError, KeyError) as fault:
            logger.warning("%s; the epoch is sampled and judged again", fault)
            remove_made(self.folder, FILES)
            return {}
        return mark

    def recall(self, rows: Sequence[Sequence[Row]]) -> list[Samples] | None:
        """Load this rank's samples of the interrupted epoch; None if there are none for these rows.

        Args:
            rows: rows of each update in sampling order.
        """
        if not self._mark.get("complete") or self._mark["processes"] != self.runtime.world:
            return None
        self._mark = {}

        # Tensors hold the ids of prompts only.
        prompts = {row.prompt.id: row.prompt for row in chain(*rows)}
        samples = []
        is_same = True
        for number, update_rows in enumerate(rows):
            update = unpacked(load_file(self._file(self.folder, number)), prompts)
            drawn: list[int] = []
            for rollout in update.rollouts:
                drawn += rollout.row_B
            is_same = is_same and drawn == [row.number for row in update_rows]
            samples.append(update)

        if not all(self.runtime.gather(is_same)):
            return None
        self.hold(samples)
        return samples

    def hold(self, samples: Sequence[Samples]) -> None:
        """Hold the complete samples of the epoch, to be written if the run stops."""
        self.samples = samples

    def keep(self, checkpoint: Path) -> str:
        """Write samples and answers for a run resumed from `checkpoint`.

        Returns:
            A summary for a message.
        """
        # 1. Without samples and answers there is no folder.
        runtime = self.runtime
        complete = all(runtime.gather(self.samples is not None))
        answers = runtime.gather({name: a.known | a.given for name, a in self.answers.items()})
        if not complete and not any(any(of_rank.values()) for of_rank in answers):
            return NOT_KEPT
        aside = runtime.on_main(partial(open_aside, self.folder))

        # 2. Each rank writes its samples, then the main process the answers and the mark.
        def write() -> dict[int, str]:
            # A partial epoch on any rank is of no use to the resumed run.
            if complete and self.samples:
                for update, samples in enumerate(self.samples):
                    save_file(packed(samples), self._file(aside, update))
            return {runtime.rank: ""}

        # The main process writes the mark last: a folder without it is ignored.
        def finish() -> None:
            write_jsonl(aside / ANSWERS, _lines(answers), mode=PRIVATE)
            mark = {"complete": complete, "processes": runtime.world, SEAL: _seal(checkpoint)}
            write_json(aside / MARK, mark | {"files": digests(aside)}, mode=PRIVATE)
            put_in_place(self.folder, made=FILES)

        # A full disk costs the epoch's images, and not the run's checkpoint.
        try:
            runtime.gather_rows(write)
            runtime.on_main(finish)
        except (SharedFault, OSError) as fault:
            if runtime.is_main:
                logger.warning("%s could not be written (%s); the epoch will be sampled again", self.folder, fault)
                shutil.rmtree(aside, ignore_errors=True)
            return NOT_KEPT
        return "the images and answers of the next are kept" if complete else "the answers since are kept"

    def clear(self) -> None:
        """Discard the samples and answers of a finished epoch or evaluation."""
        self.samples = None
        self._mark = {}
        for answers in self.answers.values():
            answers.clear()
        if self.runtime.is_main:
            remove_made(self.folder, FILES)

    def _file(self, folder: Path, update: int) -> Path:
        return folder / f"rank-{self.runtime.rank:05d}-update-{update:05d}.safetensors"


def _seal(checkpoint: Path) -> str:
    return str(read_object(checkpoint / "state.json").get(SEAL))


def _lines(ranks: Sequence[Mapping[str, Mapping[str, float | None]]]) -> list[dict[str, Any]]:
    # Ranks may have asked the same question; its answer is stored once.
    merged: dict[tuple[str, str], float | None] = {}
    for services in ranks:
        for name, answers in services.items():
            for question, answer in answers.items():
                merged[name, question] = answer
    lines = []
    for (name, question), answer in sorted(merged.items()):
        lines.append({"service": name, "question": question, "answer": answer})
    return lines


# --- samples as tensors ----------------------------------------------------------------------------------------


def packed(samples: Samples) -> dict[str, Tensor]:
    """Convert samples to tensors named `rollouts/NUMBER/FIELD` and `nodes/NUMBER/FIELD`."""
    tensors: dict[str, Tensor] = {}
    for kind in BATCHES:
        for number, batch in enumerate(getattr(samples, kind)):
            for field in fields(batch):
                value = getattr(batch, field.name)
                if value is not None:
                    tensors[f"{kind}/{number}/{field.name}"] = FORMS[str(field.type)].pack(value)
    # Cloned: batches share their sigmas, and safetensors rejects shared storage.
    return {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}


def unpacked(tensors: Mapping[str, Tensor], prompts: Mapping[int, Prompt]) -> Samples:
    """Restore samples from `packed` tensors and their prompts by id."""
    # Collect the fields of each batch by its number.
    batches: dict[tuple[str, int], dict[str, Tensor]] = {}
    for path, value in tensors.items():
        kind, number, name = path.split("/")
        batches.setdefault((kind, int(number)), {})[name] = value
    samples = Samples()
    for (kind, _), batch in sorted(batches.items()):
        types = {field.name: str(field.type) for field in fields(BATCHES[kind])}
        content = {name: FORMS[types[name]].unpack(value, prompts) for name, value in batch.items()}
        getattr(samples, kind).append(BATCHES[kind](**content))
    return samples


@dataclass(frozen=True, slots=True)
class Form:
    """Conversion of a field's value to a tensor and back."""

    pack: Callable[[Any], Tensor]
    unpack: Callable[[Tensor, Mapping[int, Prompt]], Any]


AS_IT_IS = Form(lambda tensor: tensor, lambda tensor, prompts: tensor)
FORMS = {
    "Tensor": AS_IT_IS,
    "Tensor | None": AS_IT_IS,
    "int": Form(torch.tensor, lambda tensor, prompts: int(tensor)),
    "list[int]": Form(torch.tensor, lambda tensor, prompts: tensor.tolist()),
    "list[Prompt]": Form(
        lambda batch: torch.tensor([prompt.id for prompt in batch]),
        lambda tensor, prompts: [prompts[number] for number in tensor.tolist()],
    ),
    "list[Image]": Form(
        lambda images: torch.from_numpy(np.stack([np.asarray(image) for image in images])),  # (B, H, W, C), uint8
        lambda tensor, prompts: [Image.fromarray(pixels) for pixels in tensor.numpy()],
    ),
    "Size": Form(
        lambda size: torch.tensor([size.height, size.width]),
        lambda tensor, prompts: Size(*tensor.tolist()),
    ),
}
"""Annotation of a batch's field → its conversion."""
BATCHES: Mapping[str, type[Rollout | NodeBatch]] = {"nodes": NodeBatch, "rollouts": Rollout}
"""Field of `Samples` → its items."""
