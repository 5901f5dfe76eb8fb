from __future__ import annotations

import random

import pytest

from pacorl.bench.options import BenchmarkOptions
from pacorl.bench.running import run_benchmark
from pacorl.dataset.export import export, label, splits
from pacorl.dataset.folder import read_instances, write_records
from pacorl.dataset.rules import label_pairs
from pacorl.io.documents import read_jsonl
from pacorl.records.consistency_rank import load_ranked, save_ranked
from pacorl.records.rankings import Ranking


@pytest.fixture
def ranked(dataset):
    """A folder in which two people have ranked every instance at random."""
    folder = dataset(prompts=4, grids=3)
    rng = random.Random(0)
    answers = []
    for one in read_instances(folder / "instances.jsonl"):
        for who in ("ann", "ben"):
            order = tuple(rng.sample(one.candidates, 3))
            named = {"theme": one.theme, "category": one.category, "criteria": one.criteria}
            answers.append(Ranking(one.id, who, one.group, one.reference, order, **named))
    write_records(folder / "rankings.jsonl", answers)
    return folder


def test_candidates_between_best_and_worst_keep_groups_together():
    """They are in no pair, but in the benchmark: here each is the reference of the next group."""
    answers = []
    for number in range(6):
        candidates = (f"best{number}.png", f"reference{number ^ 1}.png", f"worst{number}.png")
        theme = f"theme {number}"
        answers.append(Ranking(f"i{number}", "ann", f"g{number}", f"reference{number}.png", candidates, theme))
    pairs, _ = label_pairs(answers)
    for seed in range(8):
        split_of, family_of = splits(pairs, answers, test_share=0.5, seed=seed)
        for number in (0, 2, 4):
            assert split_of[f"g{number}"] == split_of[f"g{number + 1}"]
            assert family_of[f"g{number + 1}"] == f"g{number}"


def test_the_benchmark_has_the_held_out_rankings_and_runs(ranked, tmp_path):
    answers = [answer for answer in label(ranked).answers if answer.annotator == "ann"]
    write_records(ranked / "rankings.jsonl", answers)
    counts = export(ranked, test_share=0.5)
    benchmark = ranked / "export/benchmark"
    read = {(item.ref_image, *item.rank_images): item for item in load_ranked(benchmark)}
    tested = {row["group"] for row in read_jsonl(ranked / "export/consistency_test.jsonl")}
    held_out = {(one.reference, *one.candidates): one for one in answers if one.group in tested}
    assert read.keys() == held_out.keys()
    assert {item.family for item in read.values()} == tested
    assert len(read) == counts["benchmark_rankings"] > 0
    for key, item in read.items():
        one = held_out[key]
        assert (item.prompt, item.category, item.criteria) == (one.theme, one.category, one.criteria)
        assert item.comp_images == sorted(one.candidates)
    # Folders that share a theme are one group of the intervals.
    save_ranked([item.model_copy(update={"family": "one"}) for item in read.values()], benchmark)
    options = BenchmarkOptions(judge="tiny", out=tmp_path / "run", limit=4)
    outcome = run_benchmark("consistency-rank", benchmark, options)
    assert outcome.measured == outcome.total == 4
    assert outcome.table.lines[0].cells[0].groups == 1


def test_another_export_leaves_nothing_of_the_last(ranked):
    export(ranked, test_share=0.5)
    (ranked / "export" / "README.md").write_text("mine")
    export(ranked, test_share=0.0)
    names = sorted(path.name for path in (ranked / "export").rglob("*") if path.is_file() and path.suffix != ".png")
    made = ["consistency_train.jsonl", "dataset_info.json"]
    assert names == sorted([".pacorl", "README.md", *made])


def test_a_deleted_image_is_named(ranked):
    lost = label(ranked).pairs[0].images[0]
    (ranked / lost).unlink()
    with pytest.raises(ValueError, match=str(lost)):
        export(ranked, test_share=0.5)
