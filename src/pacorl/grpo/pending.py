"""The unfinished epoch of a run that stopped while it waited for scores: its samples, and the answers so far.

Samples are complete when scores are waited for, so they are written only if a run stops then. The run that goes on
from the checkpoint saved at that moment neither samples again nor asks what was answered.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from pacorl.grpo.checkpoint import SEAL, aside_of, open_aside, put_in_place
from pacorl.grpo.rows import Row
from pacorl.io.documents import read_jsonl, read_object, write_json, write_jsonl
from pacorl.io.files import check_digests, digests, remove_made
from pacorl.io.outage import Answers, KeepsAnswers
from pacorl.runtime.processes import Runtime, SharedFault
from pacorl.types import NodeBatch, Prompt, Rollout, Samples, Size

logger = logging.getLogger(__name__)

FOLDER = "pending"
MARK = "pending.json"
ANSWERS = "answers.jsonl"
FILES = (MARK, ANSWERS, "rank-*-update-*.safetensors")
"""Patterns of the folder's files."""
NOTHING = "nothing of the next is kept"


class PendingEpoch:
    """Samples and answers of the epoch that is going on. All ranks call all of it."""

    def __init__(self, run: Path, runtime: Runtime, services: Mapping[str, object]) -> None:
        """Begin to keep the answers of those `services` that can, by their keys in the config."""
        self.folder, self.runtime = run / FOLDER, runtime
        self.answers: dict[str, Answers] = {}
        self.samples: Sequence[Samples] | None = None
        """This rank's by update, once they are complete."""
        self._mark: dict[str, Any] = {}
        """Content of the folder's mark; empty if the folder is of no use."""
        for name, service in services.items():
            if isinstance(service, KeepsAnswers):
                self.answers[name] = Answers()
                service.keep_answers(self.answers[name])

    def open(self, checkpoint: Path | None, *, same_config: bool) -> None:
        """Take up what the run left that saved this checkpoint; what another one left is removed with a note."""
        self._mark = self.runtime.on_main(partial(self._usable_mark, checkpoint, same_config=same_config))
        if not self._mark:
            return
        for line in read_jsonl(self.folder / ANSWERS):
            if answers := self.answers.get(line["service"]):
                answers.known[line["question"]] = line["answer"]

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
        """This rank's samples as an earlier process drew them; None if they are to be drawn.

        Args:
            rows: of each update, in the order in which they are drawn.
        """
        if not self._mark.get("complete") or self._mark["processes"] != self.runtime.world:
            return None
        prompts = {row.prompt.id: row.prompt for update in rows for row in update}
        paths = [self._file(self.folder, update) for update in range(len(rows))]
        samples = [unpacked(load_file(path), prompts) for path in paths]
        self._mark = {}
        drawn = [[row for rollout in update.rollouts for row in rollout.row_B] for update in samples]
        is_same = drawn == [[row.number for row in update] for update in rows]
        if not all(self.runtime.gather(is_same)):
            return None
        self.hold(samples)
        return samples

    def hold(self, samples: Sequence[Samples]) -> None:
        """Remember the complete samples of the epoch, to be written if the run stops."""
        self.samples = samples

    def keep(self, checkpoint: Path) -> str:
        """Write samples and answers beside the checkpoint that the run will go on from.

        Returns:
            What the resumed run will find, for a message.
        """
        runtime = self.runtime
        complete = all(runtime.gather(self.samples is not None))
        answers = runtime.gather({name: a.known | a.given for name, a in self.answers.items()})
        if not complete and not any(any(of_rank.values()) for of_rank in answers):
            return NOTHING
        aside = runtime.on_main(partial(open_aside, self.folder))

        def write() -> dict[int, str]:
            for update, samples in enumerate(self.samples or () if complete else ()):
                save_file(packed(samples), self._file(aside, update))
            return {runtime.rank: ""}

        def finish() -> None:
            write_jsonl(aside / ANSWERS, _lines(answers))
            mark = {"complete": complete, "processes": runtime.world, SEAL: _seal(checkpoint)}
            write_json(aside / MARK, mark | {"files": digests(aside)})
            put_in_place(self.folder, made=FILES)

        try:
            runtime.gather_rows(write)
            runtime.on_main(finish)
        except (SharedFault, OSError) as fault:
            if runtime.is_main:
                logger.warning("%s could not be written (%s); the epoch will be sampled again", self.folder, fault)
                shutil.rmtree(aside, ignore_errors=True)
            return NOTHING
        return "the images and answers of the next are kept" if complete else "the answers since are kept"

    def clear(self) -> None:
        """Forget an epoch or an evaluation that is finished."""
        self.samples, self._mark = None, {}
        for answers in self.answers.values():
            answers.clear()
        if self.runtime.is_main:
            remove_made(self.folder, FILES)

    def _file(self, folder: Path, update: int) -> Path:
        return folder / f"rank-{self.runtime.rank:05d}-update-{update:05d}.safetensors"


def _seal(checkpoint: Path) -> str:
    return str(read_object(checkpoint / "state.json").get(SEAL))


def _lines(ranks: Sequence[Mapping[str, Mapping[str, float | None]]]) -> list[dict[str, Any]]:
    merged: dict[tuple[str, str], float | None] = {}
    for services in ranks:
        for name, answers in services.items():
            merged |= {(name, question): answer for question, answer in answers.items()}
    return [
        {"service": name, "question": question, "answer": answer} for (name, question), answer in sorted(merged.items())
    ]


# --- samples as tensors ----------------------------------------------------------------------------------------


def packed(samples: Samples) -> dict[str, Tensor]:
    """Samples as tensors by `rollouts/NUMBER/FIELD` and `nodes/NUMBER/FIELD`."""
    tensors: dict[str, Tensor] = {}
    for kind in BATCHES:
        for number, batch in enumerate(getattr(samples, kind)):
            for field in fields(batch):
                if (value := getattr(batch, field.name)) is not None:
                    tensors[f"{kind}/{number}/{field.name}"] = FORMS[str(field.type)].pack(value)
    # Cloned: batches share their sigmas, and safetensors takes no storage twice.
    return {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}


def unpacked(tensors: Mapping[str, Tensor], prompts: Mapping[int, Prompt]) -> Samples:
    """Undo `packed`; `prompts` by their ids."""
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
    """How a field's value is written as a tensor, and read again."""

    pack: Callable[[Any], Tensor]
    unpack: Callable[[Tensor, Mapping[int, Prompt]], Any]


def _bytes_of(images: Sequence[Image.Image]) -> Tensor:
    """(B, H, W, C), uint8."""
    return torch.from_numpy(np.stack([np.asarray(image) for image in images]))


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
    "list[Image]": Form(_bytes_of, lambda tensor, prompts: [Image.fromarray(pixels) for pixels in tensor.numpy()]),
    "Size": Form(
        lambda size: torch.tensor([size.height, size.width]),
        lambda tensor, prompts: Size(*tensor.tolist()),
    ),
}
"""Form of each type that a field of a batch has, as its annotation names it."""
BATCHES: Mapping[str, type[Rollout | NodeBatch]] = {"nodes": NodeBatch, "rollouts": Rollout}
"""Field of `Samples` → its items."""
