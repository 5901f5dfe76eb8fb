"""Conditionings in files: what comes back, who encodes, and how long processes wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from toy_world import ToyPolicy

from pacorl.grpo.conditioning import ConditioningCache, ConditioningFiles
from pacorl.types import Conditioning, Prompt, Size

PROMPTS = [Prompt(number, f"a fox, {number}") for number in range(100)]
SMALL, LARGE = Size(16, 16), Size(32, 32)


class CountingPolicy(ToyPolicy):
    """Counts what it encodes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoded: list[str] = []

    def encode(self, prompts: Sequence[Prompt], size: Size) -> list[Conditioning]:
        self.encoded += [prompt.text for prompt in prompts]
        return super().encode(prompts, size)


class OneOf:
    """A process of several, whose part in a gathering is its own act."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world

    def gather_rows(self, act: Callable[[], Any]) -> Any:
        return act()

    def on_main(self, act: Callable[[], Any]) -> Any:
        return act() if self.rank == 0 else None


def test_what_is_read_is_what_was_encoded_and_each_text_is_encoded_once(tmp_path: Path) -> None:
    policy, in_memory = CountingPolicy(), ConditioningCache(ToyPolicy())
    files = ConditioningFiles(policy, tmp_path / "run" / "conditionings", runtime=OneOf())  # type: ignore[arg-type]
    for size in (SMALL, LARGE):
        files.prepare(PROMPTS, size)
    assert policy.encoded == [prompt.text for prompt in PROMPTS]
    assert len(list(files.folder.iterdir())) == len(PROMPTS)
    wanted = [PROMPTS[3], PROMPTS[3], PROMPTS[70]]
    for name, tensor in files.batch(wanted, LARGE).tensors.items():
        assert torch.equal(tensor, in_memory.batch(wanted, LARGE).tensors[name])
    files.remove()
    assert not files.folder.exists()


def test_ranks_share_the_encoding_in_the_batches_of_one(tmp_path: Path) -> None:
    policies = [CountingPolicy() for _ in range(3)]
    folder = tmp_path / "conditionings"
    caches = [
        ConditioningFiles(policy, folder, runtime=OneOf(rank, 3))  # type: ignore[arg-type]
        for rank, policy in enumerate(policies)
    ]
    for cache in caches:
        cache.prepare(PROMPTS, SMALL)
    encoded = [text for policy in policies for text in policy.encoded]
    assert sorted(encoded) == sorted(prompt.text for prompt in PROMPTS)
    assert policies[1].encoded == [prompt.text for prompt in PROMPTS[32:64]]
    # Each reads what another wrote.
    expected = ConditioningCache(ToyPolicy()).batch(PROMPTS, SMALL)
    assert torch.equal(caches[2].batch(PROMPTS, SMALL).tensors["text"], expected.tensors["text"])


def test_a_new_run_does_not_read_what_an_earlier_one_wrote(tmp_path: Path) -> None:
    first = ConditioningFiles(CountingPolicy(), tmp_path / "c", runtime=OneOf())  # type: ignore[arg-type]
    first.prepare(PROMPTS[:2], SMALL)
    policy = CountingPolicy()
    second = ConditioningFiles(policy, tmp_path / "c", runtime=OneOf())  # type: ignore[arg-type]
    second.prepare(PROMPTS[:1], SMALL)
    assert policy.encoded == [PROMPTS[0].text]
    assert len(list(second.folder.iterdir())) == 1


def test_only_encoded_prompts_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    for name in ("notes.txt", "mine.safetensors"):
        (tmp_path / "c" / name).write_text("mine")
    files = ConditioningFiles(CountingPolicy(), tmp_path / "c", runtime=OneOf())  # type: ignore[arg-type]
    files.prepare(PROMPTS[:2], SMALL)
    encoded = [path for path in files.folder.iterdir() if len(path.stem) == 64]
    assert [path.stat().st_mode & 0o777 for path in encoded] == [0o600] * 2
    files.remove()
    assert sorted(path.name for path in files.folder.iterdir()) == ["mine.safetensors", "notes.txt"]
