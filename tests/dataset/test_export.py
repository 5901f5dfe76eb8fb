from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pacorl.bench.consistency_rank import read_rank_data
from pacorl.cli.dataset import app
from pacorl.dataset.export import Export, export, label
from pacorl.dataset.folder import read_instances, read_pairs, write_records
from pacorl.dataset.importing import import_folder
from pacorl.dataset.rules import label_pairs
from pacorl.io.documents import read_jsonl, write_jsonl
from pacorl.io.files import digest
from pacorl.io.images import open_image
from pacorl.records.comparisons import answer_text, load_comparisons, load_sharegpt
from pacorl.records.rankings import Ranking

SHARES = {"train": 0.5, "test": 0.5}


@pytest.fixture
def ranked(dataset):
    """A folder in which two people have ranked every instance at random."""
    folder = dataset(prompts=4, grids=3)
    rng = random.Random(0)
    write_records(
        folder / "rankings.jsonl",
        [
            Ranking(
                one.id, who, one.group, one.reference, tuple(rng.sample(one.candidates, 3)), one.theme, one.category
            )
            for one in read_instances(folder / "instances.jsonl")
            for who in ("ann", "ben")
        ],
    )
    return folder


@pytest.mark.slow
def test_nothing_leaks_between_splits(ranked):
    export(ranked, shares=SHARES)
    rows = {split: read_jsonl(ranked / f"export/comparisons_{split}.jsonl") for split in ("train", "test")}
    assert all(rows.values())
    for key in (lambda row: {row["group"]}, lambda row: set(row["images"]), lambda row: {row["question"]}):
        train, test = (set().union(*(key(row) for row in rows[split])) for split in ("train", "test"))
        assert not train & test


def test_candidates_between_best_and_worst_keep_groups_together(tmp_path):
    """They are in no pair, but in the benchmark's rankings: here each is the reference of the next group."""
    answers = []
    for number in range(6):
        candidates = (f"best{number}.png", f"reference{number + 1 - number % 2 * 2}.png", f"worst{number}.png")
        answers.append(
            Ranking(f"i{number}", "ann", f"g{number}", f"reference{number}.png", candidates, f"theme {number}")
        )
    pairs, _ = label_pairs(answers)
    bundle = Export(tmp_path, tmp_path / "out", pairs=pairs, answers=answers)
    for seed in range(8):
        bundle.assign_splits({"train": 0.5, "test": 0.5}, seed=seed)
        for number in (0, 2, 4):
            assert bundle.split_of[f"g{number}"] == bundle.split_of[f"g{number + 1}"]


@pytest.mark.slow
def test_sharegpt_holds_every_pair_and_its_images(ranked):
    counts = export(ranked, shares=SHARES)
    info = json.loads((ranked / "export/dataset_info.json").read_text())
    assert sorted(info) == ["consistency_test", "consistency_train"]
    rows = [row for entry in info.values() for row in json.loads((ranked / "export" / entry["file_name"]).read_text())]
    assert len(rows) == counts["balance"]["yes"] + counts["balance"]["no"]
    for row in rows:
        user, assistant = row["messages"]
        assert user["content"].startswith("<image><image>Given two subfigures")
        assert assistant["content"] in ("Yes.", "No.")
        assert [open_image(ranked / "export" / name).size for name in row["images"]] == [(32, 32)] * 2


@pytest.mark.slow
def test_export_twice_is_the_same(ranked):
    export(ranked, shares=SHARES)
    before = {path: path.read_bytes() for path in (ranked / "export").rglob("*") if path.is_file()}
    export(ranked, shares=SHARES)
    assert {path: path.read_bytes() for path in (ranked / "export").rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_dry_run_counts_what_an_export_would(ranked):
    planned = export(ranked, shares=SHARES, dry_run=True)
    assert not (ranked / "pairs.jsonl").exists()
    assert export(ranked, shares=SHARES) == planned


@pytest.mark.slow
def test_an_export_is_told_in_sentences(ranked):
    counts = export(ranked, shares=SHARES, dry_run=True)
    told = CliRunner().invoke(app, ["export", str(ranked), "--test-share", "0.5", "--dry-run"]).stdout
    made = counts["balance"]
    assert f"{made['rankings']} rankings by 2 people label {made['yes']} pairs Yes and {made['no']} No" in told
    for name, split in counts["splits"].items():
        assert f"{name}: {split['yes']} pairs Yes and {split['no']} No, of {split['groups']} prompts" in told
    assert "imported" not in told


@pytest.mark.slow
def test_exports_are_what_a_judge_learns_from(ranked):
    pairs = label(ranked).pairs
    explained = {"key": pairs[0].key, "consistent": pairs[0].consistent, "status": "explained", "reasons": "Both red."}
    write_jsonl(ranked / "explanations.jsonl", [explained])
    export(ranked, shares=SHARES)
    for split in ("train", "test"):
        lines = load_comparisons(ranked / f"export/comparisons_{split}.jsonl")
        records = load_sharegpt(ranked / "export", f"consistency_{split}")
        assert [replace(one, answer="") for one in records] == lines
        assert [one.answer for one in records] == [answer_text(one) for one in lines]
        known = {pair.images: pair for pair in pairs}
        for one in lines:
            pair = known[tuple(path.relative_to(ranked / "export").as_posix() for path in one.images)]
            assert (one.question, one.consistent, one.category) == (pair.question, pair.consistent, pair.category)
            assert one.reasons == ("Both red." if pair.key == pairs[0].key else "")


def test_the_benchmark_of_an_export_is_one_that_runs(ranked):
    export(ranked, shares=SHARES, formats=["consistency_rank"])
    items = read_rank_data(ranked / "export/benchmark").items.values()
    rows = read_jsonl(ranked / "export/benchmark/consistency_full_rank.jsonl")
    assert [item.best_first for item in items] == [tuple(row["rank_images"]) for row in rows]
    assert all(item.prompt and item.criteria for item in items)


@pytest.mark.slow
def test_sharegpt_round_trip(ranked, tmp_path):
    export(ranked, shares=SHARES, formats=["sharegpt"])
    other = tmp_path / "other"
    counts = import_folder(other, ranked / "export", kind="sharegpt", name="ours")
    pairs, known = read_pairs(other / "imported/ours/pairs.jsonl"), read_pairs(ranked / "pairs.jsonl")
    assert counts["pairs"] == len(known)
    assert sorted((pair.images[0].removeprefix("imported/ours/files/"), pair.consistent) for pair in pairs) == sorted(
        (pair.images[0], pair.consistent) for pair in known
    )
    assert export(other, shares=SHARES, formats=["jsonl"])["balance"]["imported_yes"] == counts["yes"]


def test_the_benchmark_has_images_and_criteria(ranked):
    export(ranked, shares=SHARES, formats=["consistency_rank"])
    bench = ranked / "export/benchmark"
    row = read_jsonl(bench / "consistency_full_rank.jsonl")[0]
    assert sorted(row["rank_images"]) == row["comp_images"]
    assert (bench / "images" / row["folder"] / row["ref_image"]).is_file()
    prompts = read_jsonl(bench / "prompt_data.jsonl")
    assert "Identity" in prompts[0]["criteria"]


def test_another_export_leaves_nothing_of_the_last(ranked):
    export(ranked, shares=SHARES, formats=["sharegpt", "jsonl", "consistency_rank"])
    (ranked / "export" / "README.md").write_text("mine")
    export(ranked, shares={"train": 1.0}, formats=["jsonl"])
    names = sorted(path.name for path in (ranked / "export").rglob("*") if path.is_file() and path.suffix != ".png")
    assert names == [".pacorl", "README.md", "comparisons_train.jsonl"]


def test_a_file_of_an_earlier_export_that_was_edited_stays(ranked):
    export(ranked, shares=SHARES, formats=["jsonl", "sharegpt"])
    (ranked / "export" / "dataset_info.json").write_text("mine")
    export(ranked, shares=SHARES, formats=["jsonl"])
    assert (ranked / "export" / "dataset_info.json").read_text() == "mine"
    assert not (ranked / "export" / "consistency_train.json").exists()


def test_a_manifest_of_somebody_else_deletes_nothing_elsewhere(ranked, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("mine")
    export(ranked, shares=SHARES, formats=["jsonl"])
    manifest = json.loads((ranked / "manifests/export.json").read_text())
    leading_out = f"export/{'../' * 30}{str(secret).lstrip('/')}"
    manifest["outputs"] |= {leading_out: digest(secret), str(secret): digest(secret)}
    (ranked / "manifests/export.json").write_text(json.dumps(manifest))
    export(ranked, shares={"train": 1.0}, formats=["jsonl"])
    assert secret.read_text() == "mine"


def test_a_folder_of_somebody_else_is_refused_and_stays(ranked, tmp_path):
    """LLaMA-Factory's own folder of data, whose list of datasets an export would replace."""
    theirs = tmp_path / "LLaMA-Factory" / "data"
    theirs.mkdir(parents=True)
    (theirs / "dataset_info.json").write_text("theirs")
    result = CliRunner().invoke(app, ["export", str(ranked), "--out", str(theirs)])
    assert "holds files that this command did not make; name an empty or a new folder" in str(result.exception)
    assert {path.name: path.read_text() for path in theirs.iterdir()} == {"dataset_info.json": "theirs"}


def test_other_reasons_are_another_export(ranked):
    export(ranked, shares=SHARES, formats=["jsonl"])
    before = json.loads((ranked / "manifests/export.json").read_text())["plan"]["inputs"]
    assert list(before) == ["pairs.jsonl", "rankings.jsonl"]
    pair = label(ranked).pairs[0]
    row = {"key": pair.key, "consistent": pair.consistent, "status": "explained", "reasons": "Both red."}
    write_jsonl(ranked / "explanations.jsonl", [row])
    export(ranked, shares=SHARES, formats=["jsonl"])
    after = json.loads((ranked / "manifests/export.json").read_text())["plan"]["inputs"]
    assert list(after) == [*before, "explanations.jsonl"]


def test_a_deleted_image_is_named(ranked):
    lost = read_pairs_after_label(ranked)[0].images[0]
    (ranked / lost).unlink()
    with pytest.raises(ValueError, match=lost):
        export(ranked, shares=SHARES)


def read_pairs_after_label(folder):
    label(folder)
    return read_pairs(folder / "pairs.jsonl")


def test_no_rankings_is_an_error(dataset):
    with pytest.raises(ValueError, match="rank with `pacorl dataset annotate` first"):
        export(dataset(prompts=1, grids=2))


def test_unknown_format_is_named(ranked):
    with pytest.raises(ValueError, match="unknown formats csv"):
        export(ranked, formats=["csv"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [], "images": ["../secret.png", "a.png"]}, r"record 1: its turns are \[\]"),
        (
            {"messages": [{"role": "user", "content": "<image>Q"}, {"role": "assistant", "content": "No"}],
             "images": ["b.png"]},
            "record 1: a pair shows two images, this has 1",
        ),
        (
            {"messages": [{"role": "user", "content": "<image><image>Q"}, {"role": "assistant", "content": "Yes. R"}],
             "images": ["../secret.png", "a.png"]},
            r"record 1: '\.\./secret\.png' leads out of",
        ),
        (
            {"messages": [{"role": "user", "content": "<image><image>Q"}, {"role": "assistant", "content": "Maybe"}],
             "images": ["a.png", "b.png"]},
            "must begin with Yes or No",
        ),
        (
            {"messages": [{"role": "user", "content": "<image><image>Q"}, {"role": "assistant", "content": "No"}],
             "images": ["a.png", "b.png"]},
            r"1 image\(s\) missing; unpack them into its folder:\n  .*a\.png$",
        ),
    ],
)  # fmt: skip
def test_bad_sharegpt_records_are_named_and_leave_nothing(tmp_path, row, message):
    source = tmp_path / "bad"
    source.mkdir()
    for name in ("secret.png", "bad/b.png"):
        (tmp_path / name).write_bytes(b"x")
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "images": "images"}
    info = {"d": {"file_name": "d.json", "formatting": "sharegpt", "columns": columns, "tags": tags}}
    (source / "dataset_info.json").write_text(json.dumps(info))
    (source / "d.json").write_text(json.dumps([row]))
    with pytest.raises(ValueError, match=message):
        import_folder(tmp_path / "set", source, kind="sharegpt")
    assert not (tmp_path / "set/imported/bad/pairs.jsonl").exists()


def published(ranked):
    """A folder as others publish it, of one's own rankings."""
    export(ranked, shares=SHARES, formats=["sharegpt"])
    return ranked / "export"


@pytest.mark.slow
def test_a_dry_import_counts_and_writes_nothing(ranked, tmp_path):
    source, other = published(ranked), tmp_path / "other"
    arguments = ["import", str(other), str(source), "--kind", "sharegpt", "--name", "theirs", "--json"]
    planned = CliRunner().invoke(app, [*arguments, "--dry-run"], catch_exceptions=False)
    assert planned.exit_code == 0
    assert "dry run: nothing was written" in planned.stderr
    assert not other.exists()
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    counts = json.loads(done.stdout)
    assert json.loads(planned.stdout) == counts
    assert counts["pairs"] > 0
    assert counts["images"] == sum(path.is_file() for path in (other / "imported/theirs/files").rglob("*"))
    plan = json.loads((other / "manifests/import-theirs.json").read_text())["plan"]
    inputs = {Path(name).name for name in plan["inputs"]}
    assert inputs == {"dataset_info.json", "consistency_train.json", "consistency_test.json"}


@pytest.mark.slow
def test_an_import_again_repairs_it_and_changes_nothing(ranked, tmp_path):
    source, other = published(ranked), tmp_path / "other"
    counts = import_folder(other, source, kind="sharegpt", name="theirs")
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    next((other / "imported/theirs/files").rglob("*.png")).unlink()
    heard = []
    again = import_folder(
        other, source, kind="sharegpt", name="theirs", progress=lambda done, total: heard.append((done, total))
    )
    assert again == counts
    assert heard[-1] == (counts["images"], counts["images"])
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_two_sources_of_one_name_do_not_replace_each_other(ranked, tmp_path):
    source, other = published(ranked), tmp_path / "other"
    import_folder(other, source, kind="sharegpt")
    shutil.copytree(source, tmp_path / "copy" / "export")
    import_folder(other, tmp_path / "copy" / "export", kind="sharegpt")  # the same files from elsewhere
    before = read_pairs(other / "imported/export/pairs.jsonl")
    (source / "consistency_test.json").write_text("[]")
    with pytest.raises(ValueError, match=r"'export' is already the import of .*/copy/export; give this one a --name"):
        import_folder(other, source, kind="sharegpt")
    assert read_pairs(other / "imported/export/pairs.jsonl") == before


def test_a_pair_counts_once_and_one_with_both_labels_not_at_all(ranked, tmp_path):
    source = published(ranked)
    rows = json.loads((source / "consistency_train.json").read_text())
    same, other = rows[0], json.loads(json.dumps(rows[1]))
    same = {**same, "images": same["images"][::-1]}
    answer = other["messages"][1]
    answer["content"] = "No." if answer["content"].startswith("Yes") else "Yes."
    (source / "consistency_train.json").write_text(json.dumps([*rows, same, other]))
    counts = import_folder(tmp_path / "other", source, kind="sharegpt")
    assert (counts["repeated"], counts["contradictory"]) == (2, 1)
    pairs = read_pairs(tmp_path / "other/imported/export/pairs.jsonl")
    assert len(pairs) == counts["pairs"] == len(read_pairs(ranked / "pairs.jsonl")) - 1
    assert not any(set(pair.images) == {f"imported/export/files/{name}" for name in other["images"]} for pair in pairs)


def test_another_folder_than_the_kind_says_is_named(tmp_path):
    with pytest.raises(ValueError, match="unknown kind 'csv'; there are sharegpt"):
        import_folder(tmp_path / "set", tmp_path, kind="csv")
