"""Images of benchmarks: several processes generate and judge what one would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from pacorl.bench.benchmarks import BENCHMARKS, BenchmarkOptions
from pacorl.bench.running import run
from pacorl.gate.paco_reward import PacoReward
from pacorl.generate import image_sources
from pacorl.generate.image_queue import Shard
from pacorl.types import Prompt, Question, Verdict


def by_batch(prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Image.Image]:
    """Images that depend on their position in the batch and on its other seeds, as kernels' last bits may."""
    total = sum(seeds) % 256
    return [Image.new("RGB", (8, 8), (seed % 256, total, position)) for position, seed in enumerate(seeds)]


class Undecided:
    """P(Yes) = .5, whatever the question."""

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        return [Verdict(0.5) for _ in questions]

    def explain(self, question: Question) -> str:
        return '{"score": [5, 5]}'


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t2is", "gedit"])
def test_a_process_judges_what_it_generates(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_sources, "_load", lambda *arguments, **options: by_batch)
    spec, data = BENCHMARKS[name], request.getfixturevalue(f"{name}_folder")
    assert spec.generate
    made = []
    for count in (1, 2):
        options = BenchmarkOptions(model="tiny", out=tmp_path / str(count), image_batch=2)
        assert options.out
        items, measured = spec.read(data, options), []
        for index in range(count):
            monkeypatch.setenv("RANK", str(index))
            monkeypatch.setenv("WORLD_SIZE", str(count))
            spec.generate(items, options, options.out, Shard(index, count), lambda done, total: None)
            benchmark = spec.build(items, options, PacoReward(Undecided()), options.out)
            measured.append(run(benchmark, options.out, options).measured)
        assert measured == sorted(set(measured))
        assert measured[-1] == len(items.items)
        images = options.out.rglob("*.png")
        made.append({path.relative_to(options.out): path.read_bytes() for path in images})
    assert made[0] == made[1]
