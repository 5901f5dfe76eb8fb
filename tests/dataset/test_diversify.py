from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from pacorl.dataset.diversify import compare, diversify, embedder, unit
from pacorl.dataset.folder import PromptRecord, read_prompts
from pacorl.dataset.selections import (
    SELECTIONS,
    Goal,
    equal_quotas,
    facility_location,
    farthest_point,
    independent_set,
    nearest_selected,
    neighbours,
    select,
    spread,
)
from pacorl.types import Prompt

pytest.importorskip("faiss", reason="faiss is not installed")


@pytest.fixture
def vectors():
    return unit(np.random.default_rng(0).normal(size=(300, 8)))


def distances(vectors):
    table = 1 - vectors @ vectors.T
    np.fill_diagonal(table, np.inf)
    return table


def test_neighbours_are_the_nearest_others(vectors):
    doubled = np.concatenate([vectors[:50], vectors[:50]])  # a duplicate is a neighbour, oneself is not
    similarity, index = neighbours(doubled, count=5)
    table = distances(doubled)
    assert np.allclose(np.sort(table, 1)[:, :5], 1 - similarity, atol=1e-5)
    assert not (index == np.arange(100)[:, None]).any()


def test_independent_set_is_independent_and_maximal(vectors):
    kept = independent_set(vectors, Goal(distance=0.3))
    table = distances(vectors)
    assert table[np.ix_(kept, kept)].min() >= 0.3 - 1e-6
    left = sorted(set(range(300)) - set(kept))
    assert (table[np.ix_(left, kept)].min(1) < 0.3 + 1e-6).all()


def test_farthest_point_is_within_twice_the_best():
    vectors = unit(np.random.default_rng(1).normal(size=(12, 3)))
    chord = np.sqrt(2 * (1 - vectors @ vectors.T).clip(0))  # a metric, in the same order as the distance
    best = max(
        min(chord[a, b] for a, b in itertools.combinations(chosen, 2))
        for chosen in itertools.combinations(range(12), 4)
    )
    kept = farthest_point(vectors, Goal(number=4))
    assert min(chord[a, b] for a, b in itertools.combinations(kept, 2)) >= best / 2


def test_farthest_point_stops_at_a_distance(vectors):
    kept = farthest_point(vectors, Goal(distance=0.3))
    assert nearest_selected(vectors, kept).min() >= 0.3 - 1e-6
    left = sorted(set(range(300)) - set(kept))
    assert distances(vectors)[np.ix_(left, kept)].min(1).max() < 0.3 + 1e-6


def test_lazy_facility_location_equals_the_plain_greedy_choice():
    vectors = unit(np.random.default_rng(2).normal(size=(25, 4)))  # fewer than NEIGHBOURS: the graph is complete
    gains = np.maximum(vectors @ vectors.T, 0)
    covered, plain = np.zeros(25), []
    for _ in range(6):
        plain.append(int(np.argmax(np.maximum(gains - covered[:, None], 0).sum(0))))
        covered = np.maximum(covered, gains[:, plain[-1]])
    assert facility_location(vectors, Goal(number=6)) == plain


@pytest.mark.parametrize("method", SELECTIONS)
def test_number_is_met_and_the_choice_repeats(vectors, method):
    kept = select(vectors, Goal(number=40), method=method)
    assert len(set(kept)) == 40
    assert select(vectors, Goal(number=40), method=method) == kept


@pytest.mark.parametrize("method", SELECTIONS)
def test_duplicates_go_first(method):
    base = unit(np.random.default_rng(3).normal(size=(30, 16)))
    kept = select(np.concatenate([base, base]), Goal(number=30), method=method)
    assert {index % 30 for index in kept} == set(range(30))


def test_per_category_gets_equal_shares(vectors):
    categories = ["a"] * 200 + ["b"] * 95 + ["c"] * 5
    kept = select(vectors, Goal(number=45), categories=categories)
    counts = {name: sum(categories[index] == name for index in kept) for name in "abc"}
    assert counts == {"a": 20, "b": 20, "c": 5}
    assert equal_quotas({"a": 1, "b": 9}, 6) == {"a": 1, "b": 5}


def test_spread_by_hand():
    vectors = unit(np.array([[1, 0], [0, 1], [-1, 0], [1, 0.001]]))
    found = spread(vectors, [0, 1, 2])
    assert found.nearest == pytest.approx(1)
    assert found.mean_nearest == pytest.approx(1)
    assert found.coverage == pytest.approx(1, abs=1e-5)
    assert spread(vectors, [0, 1, 3]).pair in {(0, 3), (3, 0)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either a number"),
        ({"number": 3, "distance": 0.1}, "not both"),
        ({"number": 0}, "at least 1"),
        ({"distance": 3.0}, "between 0 and 2"),
    ],
)
def test_goals_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        Goal(**options)


def test_beats_chance_also_in_an_embedding_that_did_not_select():
    rng = np.random.default_rng(0)
    subjects = [
        f"a {age} {who} {where}"
        for age in ("red", "blue", "old", "new", "tiny", "grey")
        for who in ("fox", "ship", "house", "king", "lamp")
        for where in ("in snow", "at sea", "by night", "on a hill")
    ]
    texts = [subjects[i] for i in (rng.zipf(1.4, 250) - 1) % len(subjects)]
    records = [
        PromptRecord(f"{i}", Prompt(id=i, text=f"A 1x2 set of {text}, take {i}."), {}) for i, text in enumerate(texts)
    ]
    assert_beats_chance(records, number=25, best=False)


def assert_beats_chance(records, *, number, best):
    """On the nearest pair the mean of the draws, on the mean nearest distance that too, or with `best` every draw."""
    rows = compare(records, number=number, draws=50)
    chance = {row.measured_by: row for row in rows if row.selection == "random"}
    chosen = [row for row in rows if row.selection == "independent_set"]
    assert len(chosen) == 2 * 3
    for row in chosen:
        assert row.nearest > chance[row.measured_by].nearest
        beaten = chance[row.measured_by]
        assert row.mean_nearest > (beaten.best_mean_nearest if best else beaten.mean_nearest)


@pytest.mark.skipif("PACORL_T2IS" not in os.environ, reason="PACORL_T2IS does not name the folder of T2IS prompts")
@pytest.mark.parametrize("number", [30, 50, 75, 100, 150, 200])
def test_beats_chance_on_the_real_prompts(number):
    folder = Path(os.environ["PACORL_T2IS"])
    records = [record for name in ("train", "test") for record in read_prompts(folder / f"{name}.jsonl")]
    assert_beats_chance(records, number=number, best=True)


def test_step_writes_reports_and_repeats(dataset):
    folder = dataset(prompts=12, grids=2, paired=False)
    (folder / "diverse.jsonl").unlink()
    assert diversify(folder, goal=Goal(number=5), dry_run=True)["prompts"] == 12
    assert not (folder / "diverse.jsonl").exists()
    counts = diversify(folder, goal=Goal(number=5))
    kept = read_prompts(folder / "diverse.jsonl")
    assert counts["kept"] == len(kept) == 5
    assert set(counts["pair"]) <= {record.idx for record in kept}
    written = (folder / "diverse.jsonl").stat().st_mtime_ns
    assert diversify(folder, goal=Goal(number=5)) == counts
    assert (folder / "diverse.jsonl").stat().st_mtime_ns == written


@pytest.mark.parametrize("kind", ["clip", "mean", "first"])
def test_transformer_embedders_load_and_pool(tmp_path, kind):
    import torch
    from transformers import BertConfig, BertModel, CLIPTextConfig, CLIPTextModelWithProjection

    from pacorl.models.twins import clip_tokenizer_of

    texts = ["a red fox in the snow", "a fox", "a blue ship at sea with seven old sailors"]
    tokenizer = clip_tokenizer_of(texts * 3)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32}
    if kind == "clip":
        ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
        config = CLIPTextConfig(**sizes, **ids, num_hidden_layers=1, num_attention_heads=2, projection_dim=12)
        model = CLIPTextModelWithProjection(config)
    else:
        model = BertModel(BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=80))
    model.eval().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    if kind == "first":
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode_cls_token": true}')
    rows = embedder(f"transformers:{tmp_path}")(texts)
    assert np.linalg.norm(rows, axis=1) == pytest.approx(1, abs=1e-5)
    with torch.no_grad():
        output = model(**tokenizer([texts[2]], return_tensors="pt"))
    alone = {
        "clip": lambda: output.text_embeds[0],
        "mean": lambda: output.last_hidden_state[0].mean(0),
        "first": lambda: output.last_hidden_state[0, 0],
    }[kind]().numpy()
    assert rows[2] == pytest.approx(alone / np.linalg.norm(alone), abs=1e-5)


def test_words_by_hand():
    rows = embedder("words")(["red fox", "the red fox", "blue ship"])
    assert rows @ rows.T == pytest.approx(np.array([[1, 2 / 6**0.5, 0], [2 / 6**0.5, 1, 0], [0, 0, 1]]), abs=1e-6)


def test_unknown_embedder_is_named():
    with pytest.raises(ValueError, match="there are tfidf, letters, words and transformers:CHECKPOINT"):
        embedder("word2vec")


@pytest.mark.campaign
@pytest.mark.parametrize("method", SELECTIONS)
@pytest.mark.parametrize("number", [40_000, 100_000])
def test_many_vectors_take_little_memory(method, number):
    """The peak of the process: all similarities of 40,000 vectors would take 6 GB."""
    import resource

    rng = np.random.default_rng(0)
    clusters = number // 50
    centres = rng.normal(size=(clusters, 128))
    rows = unit(centres[rng.integers(0, clusters, number)] + 0.7 * rng.normal(size=(number, 128)))
    kept = select(rows, Goal(number=clusters), method=method)
    found = spread(rows, kept)
    chance = spread(rows, rng.permutation(number)[:clusters].tolist())
    assert found.mean_nearest > chance.mean_nearest
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 * 2**20  # KiB
