"""The queue of images: what is generated, what is not generated again, and what a kill leaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from PIL import Image

from pacorl.core.schedule import seed_of
from pacorl.generate.image_queue import RECIPE, ImageJob, ImageSource, Shard, generate_missing, missing_images
from pacorl.io.images import png_texts
from pacorl.types import Prompt

JOBS = [ImageJob(f"case{number}", Prompt(number, "a hat"), f"images/{number}.png") for number in range(5)]


def grey(prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Image.Image]:
    return [Image.new("L", (8, 8), seed % 256) for seed in seeds]


def by_batch(prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Image.Image]:
    """Images that depend on their position in the batch and on its other seeds, as kernels' last bits may."""
    total = sum(seeds) % 256
    return [Image.new("RGB", (8, 8), (seed % 256, total, position)) for position, seed in enumerate(seeds)]


def source(*, seed: int = 3, load=lambda: grey) -> ImageSource:
    return ImageSource(load, {"model": "grey"}, seed=seed, batch=2)


def files(folder: Path) -> dict[str, bytes]:
    return {job.file: (folder / job.file).read_bytes() for job in JOBS}


def stop_after(images: int) -> Callable[[ImageJob, Image.Image], None]:
    """A `save_panels` that is killed when so many images are finished."""
    calls = iter(range(images))

    def save_panels(job: ImageJob, image: Image.Image) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt

    return save_panels


def test_another_recipe_is_another_image(tmp_path: Path) -> None:
    generate_missing(JOBS, tmp_path, source())
    assert len(missing_images(JOBS, tmp_path, source(seed=4))) == 5
    assert generate_missing(JOBS, tmp_path, source(seed=4)) == 5
    (tmp_path / JOBS[2].file).write_bytes(b"torn")
    assert missing_images(JOBS, tmp_path, source(seed=4)) == [JOBS[2]]


def test_a_job_may_bring_its_own_seed(tmp_path: Path) -> None:
    own = ImageJob("case0", Prompt(0, "a hat", sources=(Path("some/where/cat.png"),)), "images/0.png", seed=77)
    generate_missing([own, JOBS[1]], tmp_path, source())
    recipes = [json.loads(png_texts(tmp_path / job.file)[RECIPE]) for job in (own, JOBS[1])]
    assert recipes[0] == {"generator": {"model": "grey"}, "prompt": "a hat", "seed": 77, "sources": ["cat.png"]}
    assert recipes[1] == {"generator": {"model": "grey"}, "prompt": "a hat", "seed": seed_of(3, "case1")}


def test_panels_are_there_before_their_image(tmp_path: Path) -> None:
    """A kill between the two leaves a missing image, which is generated again, and never an image without panels."""

    def killed(job: ImageJob, image: Image.Image) -> None:
        assert not (tmp_path / job.file).exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_missing(JOBS, tmp_path, source(), save_panels=killed)
    assert len(missing_images(JOBS, tmp_path, source())) == 5


@pytest.mark.parametrize("finished", range(1, 5))
def test_a_resumed_job_repeats_the_batches_of_one_that_was_never_stopped(tmp_path: Path, finished: int) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    generate_missing(JOBS, whole, source(load=lambda: by_batch))
    with pytest.raises(KeyboardInterrupt):
        generate_missing(JOBS, stopped, source(load=lambda: by_batch), save_panels=stop_after(finished))
    kept = {job.file: (stopped / job.file).stat().st_mtime_ns for job in JOBS[:finished]}
    assert generate_missing(JOBS, stopped, source(load=lambda: by_batch)) == 5 - finished
    assert files(stopped) == files(whole)
    assert {name: (stopped / name).stat().st_mtime_ns for name in kept} == kept, "an equal image is not rewritten"


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_batches_do_not_depend_on_the_number_of_processes(tmp_path: Path, count: int) -> None:
    generate_missing(JOBS, tmp_path / "one", source(load=lambda: by_batch))
    for index in range(count):
        generate_missing(JOBS, tmp_path / "more", source(load=lambda: by_batch), shard=Shard(index, count))
    assert files(tmp_path / "more") == files(tmp_path / "one")


def test_a_shard_is_torchrun_s_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Shard.of_process() == Shard(0, 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert Shard.of_process() == Shard(1, 4)
