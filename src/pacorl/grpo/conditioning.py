"""Cache of encoded prompts, in memory or in files shared by the processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open
from safetensors.torch import save_file

from pacorl.io.files import PART, PRIVATE, make_folder, remove_made, replacing, text_digest, weight_write_errors
from pacorl.types import Conditioning, Prompt, Size

if TYPE_CHECKING:
    from pacorl.models.policies.pipeline import PipelinePolicy
    from pacorl.runtime.processes import Runtime


Key = tuple[str | tuple[Path, ...] | Size | None, ...]
"""Text, sources, references and size of a prompt's image."""


def key_of(prompt: Prompt, size: Size) -> Key:
    """Return what a prompt's encoding depends on: sources and references are encoded at the size of its image."""
    has_images = prompt.sources or prompt.references
    return (prompt.text, prompt.sources, prompt.references, size if has_images else None)


class ConditioningCache:
    """Each prompt encoded once per run; a prompt with images, which are encoded with it, once per size.

    Keyed by text and images, not by id: training and evaluation prompts are numbered apart.
    """

    def __init__(self, policy: PipelinePolicy) -> None:
        self._policy = policy
        self._known: set[Key] = set()
        """Keys of the encoded prompts."""
        self._encoded: dict[Key, Conditioning] = {}

    def batch(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        """Collate one batch on the device, for prompts of one `size`."""
        self._encode(prompts, size)
        keys = [key_of(prompt, size) for prompt in prompts]
        # Each file once: the samples of a group share their prompt.
        conditionings = {key: self._read(key) for key in dict.fromkeys(keys)}
        return self._policy.collate([conditionings[key] for key in keys])

    def prepare(self, prompts: Sequence[Prompt], size: Size) -> None:
        """Encode prompts that are not cached yet, for a config's `size`."""
        # Edits differ in size by their sources.
        by_size: dict[Size, list[Prompt]] = {}
        for prompt in prompts:
            by_size.setdefault(self._policy.size_of(prompt, size), []).append(prompt)
        for sampled_size, group in by_size.items():
            self._encode(group, sampled_size)

    def _encode(self, prompts: Sequence[Prompt], size: Size) -> None:
        new = {key_of(prompt, size): prompt for prompt in prompts}
        new = {key: prompt for key, prompt in new.items() if key not in self._known}
        if new:
            self._add(new, size)
            self._known |= set(new)

    def _read(self, key: Key) -> Conditioning:
        return self._encoded[key]

    def _add(self, prompts: dict[Key, Prompt], size: Size) -> None:
        self._encoded |= dict(zip(prompts, self._policy.encode(list(prompts.values()), size), strict=True))


class ConditioningFiles(ConditioningCache):
    """The conditionings of a run in files that its processes write together, each its share, and map to read.

    For FLUX.1-dev a prompt takes 4 MiB: in main memory 100,000 of them would be 420 GB, in each process.
    """

    FILES = (f"{'[0-9a-f]' * 64}.safetensors", f".*{PART}", ".tmp*")
    """Patterns of complete and interrupted files."""
    CHUNK = 32
    """Prompts that a process encodes and writes together. A multiple of the policies' batches, so that batches, and
    the last bits of the encodings, do not depend on the number of processes."""

    def __init__(self, policy: PipelinePolicy, folder: Path, *, runtime: Runtime) -> None:
        """
        Args:
            folder: a shared folder; files of an earlier run are deleted.
        """
        super().__init__(policy)
        self.folder = folder
        self.runtime = runtime
        runtime.on_main(self.remove)
        runtime.on_main(lambda: make_folder(folder))

    def remove(self) -> None:
        """Delete the files; the main process does it at a run's end. Files of other names stay."""
        with suppress(OSError):  # they are found and deleted when the run goes on
            remove_made(self.folder, self.FILES)

    def _read(self, key: Key) -> Conditioning:
        # Opened per batch: Linux maps at most some 65,000 files at a time, and its page cache serves repeated reads.
        with safe_open(self._path(key), framework="pt") as file:
            return Conditioning({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no dict

    def _add(self, prompts: dict[Key, Prompt], size: Size) -> None:
        ordered = list(prompts)
        runtime = self.runtime

        def write() -> dict[int, None]:
            for start in range(runtime.rank * self.CHUNK, len(ordered), runtime.world * self.CHUNK):
                keys = ordered[start : start + self.CHUNK]
                encoded = self._policy.encode([prompts[key] for key in keys], size)
                for key, conditioning in zip(keys, encoded, strict=True):
                    path = self._path(key)
                    with weight_write_errors(path), replacing(path, mode=PRIVATE, flush=False) as temporary:
                        save_file({n: t.contiguous() for n, t in conditioning.tensors.items()}, temporary)
            return {}

        runtime.gather_rows(write)  # ranks wait for each other, and a fault on one is raised on all

    def _path(self, key: Key) -> Path:
        # Named by content: training and evaluation prompts are numbered apart.
        return self.folder / f"{text_digest(repr(key))}.safetensors"
