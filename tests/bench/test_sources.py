"""Images of benchmarks: a stop and several processes change none of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from PIL import Image

from pacorl.bench.benchmarks import BENCHMARKS, BenchmarkOptions
from pacorl.bench.running import run
from pacorl.gate.paco_reward import PacoReward
from pacorl.generate import image_queue, image_sources
from pacorl.generate.image_queue import Shard
from pacorl.types import Prompt, Question, Verdict


def by_batch(prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Image.Image]:
    """Images that depend on their position in the batch and on its other seeds, as kernels' last bits may."""
    total = sum(seeds) % 256
    return [Image.new("RGB", (8, 8), (seed % 256, total, position)) for position, seed in enumerate(seeds)]


@pytest.fixture(params=["t2is", "gedit"])
def generate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, bytes]]:
    """Generate the images of a benchmark into a folder, and return its files."""
    spec, data = BENCHMARKS[request.param], request.getfixturevalue(f"{request.param}_folder")
    options = BenchmarkOptions(model="tiny", image_batch=2)
    monkeypatch.setattr(image_sources, "_load", lambda *arguments, **options: by_batch)

    def generate(out: Path, shard: Shard = Shard()) -> dict[str, bytes]:
        assert spec.generate
        spec.generate(spec.read(data, options), options, out, shard, lambda done, total: None)
        return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*.png")}

    return generate


@pytest.mark.parametrize("finished", [1, 2])
def test_a_stopped_generation_goes_on_as_one_that_was_not(
    generate: Callable[..., dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: int
) -> None:
    whole = generate(tmp_path / "whole")
    written: list[Path] = []

    def write(path: Path, content: bytes) -> None:
        if len(written) == finished:
            raise KeyboardInterrupt
        written.append(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    with monkeypatch.context() as patch:
        patch.setattr(image_queue, "write_atomic", write)
        with pytest.raises(KeyboardInterrupt):
            generate(tmp_path / "stopped")
    assert len(written) == finished
    assert generate(tmp_path / "stopped") == whole


def test_processes_generate_what_one_would(generate: Callable[..., dict[str, bytes]], tmp_path: Path) -> None:
    first, both = (generate(tmp_path / "two", Shard(index, 2)) for index in (0, 1))
    assert first != both == generate(tmp_path / "one")


class Undecided:
    """P(Yes) = .5, whatever the question."""

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        return [Verdict(0.5) for _ in questions]

    def explain(self, question: Question) -> str:
        return ""


@pytest.mark.slow
def test_a_process_judges_what_it_generates(t2is_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_sources, "_load", lambda *arguments, **options: by_batch)
    spec, counts = BENCHMARKS["t2is"], []
    for index in (0, 1):
        monkeypatch.setenv("RANK", str(index))
        monkeypatch.setenv("WORLD_SIZE", "2")
        options = BenchmarkOptions(model="tiny", out=tmp_path, image_batch=2)
        items = spec.read(t2is_folder, options)
        assert spec.generate
        spec.generate(items, options, tmp_path, Shard(index, 2), lambda done, total: None)
        benchmark = spec.build(items, options, PacoReward(Undecided()), tmp_path)
        counts.append(run(benchmark, tmp_path, options).measured)
    assert counts == [2, 3]
