"""Prompts that differ: an independent set of the graph of near prompts, its spread, and the step."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from pacorl.dataset.diversify import diversify, embedded, independent_set, unit
from pacorl.dataset.folder import read_prompts


@pytest.fixture
def vectors():
    return unit(np.random.default_rng(0).normal(size=(300, 8)))


def distances(vectors):
    table = 1 - vectors @ vectors.T
    np.fill_diagonal(table, np.inf)
    return table


def test_the_set_is_independent_and_maximal(vectors):
    """Of a distance that it found itself: that of its nearest pair."""
    kept = independent_set(vectors, 40)
    assert len(set(kept)) == 40
    table = distances(vectors)
    nearest = table[np.ix_(kept, kept)].min()
    left = sorted(set(range(300)) - set(kept))
    # At a distance that is a little larger there are fewer: of the next prompts none is free.
    assert (table[np.ix_(left, kept)].min(1) < nearest + 0.02).all()
    assert independent_set(vectors, 40) == kept


def test_duplicates_go_first():
    base = unit(np.random.default_rng(3).normal(size=(30, 16)))
    kept = independent_set(np.concatenate([base, base]), 30)
    assert {index % 30 for index in kept} == set(range(30))


def test_more_than_there_are_is_all(vectors):
    assert sorted(independent_set(vectors[:5], 9)) == [0, 1, 2, 3, 4]


def assert_beats_chance(texts: list[str], *, number: int) -> None:
    """On the nearest pair, the mean of 50 random selections."""
    vectors = embedded(texts)
    random = [distances(vectors[Random(f"0-{draw}").sample(range(len(texts)), number)]).min() for draw in range(50)]
    assert distances(vectors[independent_set(vectors, number)]).min() > np.mean(random)


def test_it_beats_chance():
    rng = np.random.default_rng(0)
    subjects = [
        f"a {age} {who} {where}"
        for age in ("red", "blue", "old", "new", "tiny", "grey")
        for who in ("fox", "ship", "house", "king", "lamp")
        for where in ("in snow", "at sea", "by night", "on a hill")
    ]
    texts = [subjects[i] for i in (rng.zipf(1.4, 250) - 1) % len(subjects)]
    assert_beats_chance([f"A 1x2 set of {text}, take {i}." for i, text in enumerate(texts)], number=25)


def test_step_writes_reports_and_repeats(dataset):
    folder = dataset(prompts=12, grids=2, paired=False)
    (folder / "diverse.jsonl").unlink()
    assert diversify(folder, number=5, dry_run=True)["prompts"] == 12
    assert not (folder / "diverse.jsonl").exists()
    counts = diversify(folder, number=5)
    kept = read_prompts(folder / "diverse.jsonl")
    assert counts["kept"] == len(kept) == 5
    written = (folder / "diverse.jsonl").stat().st_mtime_ns
    assert diversify(folder, number=5) == counts
    assert (folder / "diverse.jsonl").stat().st_mtime_ns == written
