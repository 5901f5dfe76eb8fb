"""Rankings of one's own become a dataset: `pacorl dataset export --rankings`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image

from pacorl.core import questions
from pacorl.dataset.export import export
from pacorl.dataset.folder import write_records
from pacorl.dataset.importing import joined_rankings
from pacorl.io.files import digest
from pacorl.records.comparisons import comparisons_from
from pacorl.records.rankings import Ranking

EXAMPLE = Path(__file__).parents[2] / "examples" / "rankings" / "rankings.csv"


@pytest.fixture
def mine(tmp_path: Path):
    """Writes rankings.csv below a header, beside three folders of images that are all different."""
    folder = tmp_path / "mine"
    for group in range(3):
        for number in range(4):
            path = folder / f"{group}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (80 * group, 60 * number, 0)).save(path)

    def write(*lines: str, header: str = "reference,candidates,theme,annotator") -> Path:
        (folder / "rankings.csv").write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
        return folder / "rankings.csv"

    return write


def line(group: int, rest: str = ",") -> str:
    return f"{group}/0.png,{group}/1.png | {group}/2.png | {group}/3.png,{rest}"


def test_the_example_becomes_comparisons_that_a_judge_learns_from(tmp_path: Path) -> None:
    images = [path for path in EXAMPLE.parent.rglob("*") if path.suffix in {".png", ".jpg"}]
    assert sum(path.stat().st_size for path in images) < 300_000
    exported = export(tmp_path, rankings=[EXAMPLE], test_share=0.25)
    assert {name: split["groups"] for name, split in exported["splits"].items()} == {"train": 6, "test": 2}
    train, test = (comparisons_from(f"{tmp_path}/export/consistency_{split}.jsonl") for split in ("train", "test"))
    assert (len(train), len(test)) == (12, 4)
    assert not {path for one in train for path in one.images} & {path for one in test for path in one.images}
    answers, _ = joined_rankings(tmp_path, [EXAMPLE])
    assert len(answers) == 12
    assert {one.question for one in train + test} == {questions.same_theme(answer.theme) for answer in answers}
    fox = {one.images: one.consistent for one in train + test if "fox" in one.group}
    shown = {digest(path): path.name for path in (EXAMPLE.parent / "images/fox").iterdir()}
    names = {frozenset(shown[digest(path)] for path in paths): consistent for paths, consistent in fox.items()}
    assert names == {frozenset({"reference.png", "c.png"}): True, frozenset({"reference.png", "d.png"}): False}


def test_copies_of_an_image_are_that_image(mine, tmp_path: Path) -> None:
    source = mine(line(0), line(1), line(2))
    (source.parent / "copy.png").write_bytes((source.parent / "0/2.png").read_bytes())
    source = mine(line(0), "1/0.png,1/1.png | copy.png,,", line(2))
    counts = export(tmp_path, rankings=[source], test_share=0.5)
    assert sorted(split["groups"] for split in counts["splits"].values()) == [1, 1]
    mine("0/0.png,0/2.png | copy.png,,")
    with pytest.raises(ValueError, match=r"rankings\.csv:2: two of its images are the same"):
        export(tmp_path, rankings=[source])


def test_a_theme_of_all_is_no_leak_between_groups_that_are_given(mine, tmp_path: Path) -> None:
    source = mine(*(line(group, "One hero,") for group in range(3)))
    with pytest.raises(ValueError, match=r"all 3 groups hang together .* \(--test-share 0\)"):
        export(tmp_path, rankings=[source])
    assert export(tmp_path, rankings=[source], test_share=0.0)["splits"]["train"]["groups"] == 1
    lines = [line(group, f"One hero,,hero {group}") for group in range(3)]
    mine(*lines, header="reference,candidates,theme,annotator,group")
    counts = export(tmp_path, rankings=[source])
    assert {name: split["groups"] for name, split in counts["splits"].items()} == {"train": 2, "test": 1}


def test_everybodys_file_has_votes_about_the_same_pairs(mine, tmp_path: Path) -> None:
    """Ben's images are copies in a folder of his own, under other names."""
    source = mine(*(line(group, ",ann") for group in range(3)))
    theirs = shutil.copytree(tmp_path / "mine", tmp_path / "theirs")
    (theirs / "rankings.csv").unlink()
    (theirs / "1").rename(theirs / "one")
    rows = ["0/0.png,0/3.png | 0/2.png | 0/1.png,ben", "one/0.png,one/1.png | one/2.png | one/3.png,ben"]
    (theirs / "ben.csv").write_text("\n".join(["reference,candidates,annotator", *rows]))
    both = [source, theirs / "ben.csv"]
    counts = export(tmp_path, rankings=both, test_share=0.5)
    assert counts["balance"] == {"votes": 10, "yes": 2, "no": 2, "contradicted": 2, "undecided": 2}
    assert [split["groups"] for split in counts["splits"].values()] == [1, 1]
    assert counts["alike"] == dict.fromkeys(("ann", "ben"), "3 of 6 pairs")
    # The page asked one question of Ben's about images of the folder.
    shutil.copytree(theirs / "one", tmp_path / "images")
    ranked = (tuple(f"images/{number}.png" for number in (3, 2, 1)), "images/0.png")
    write_records(tmp_path / "rankings.jsonl", [Ranking("i", "eve", "g", ranked[1], ranked[0])])
    assert export(tmp_path, rankings=both, test_share=0.5)["balance"]["undecided"] == 2
    write_records(tmp_path / "rankings.jsonl", [Ranking("i", "ben", "g", ranked[1], ranked[0])])
    with pytest.raises(ValueError, match=r"ben\.csv:3: ben ranked the same candidates in i; take one out"):
        export(tmp_path, rankings=both)


def test_a_person_answers_a_question_about_images_once(mine, tmp_path: Path) -> None:
    source = mine(line(0, "One hero,ann"), line(0, "One style,ann"), line(0, "One hero,bob"), line(1))
    assert export(tmp_path, rankings=[source], test_share=0.5)["balance"]["votes"] == 8
    with pytest.raises(ValueError, match=r"rankings\.csv:2: ann ranked the same candidates in .*rankings\.csv:2; take"):
        export(tmp_path, rankings=[source, source])
    # Who ranks otherwise is another person, and needs a name.
    mine(line(0), "0/0.png,0/3.png | 0/2.png | 0/1.png,,")
    with pytest.raises(ValueError, match=r"rankings\.csv:3: unnamed ranked the same .*csv:2; take .*annotator"):
        export(tmp_path, rankings=[source])


def test_groups_are_told_apart_by_images_and_names_and_not_by_files(mine, tmp_path: Path) -> None:
    """Two folders with rankings.csv have other images under the same paths; a named group is one in both."""
    source = mine(line(0), line(1))
    theirs = shutil.copytree(tmp_path / "mine", tmp_path / "theirs")
    for path in theirs.rglob("*.png"):
        Image.open(path).transpose(Image.Transpose.ROTATE_90).resize((9, 9)).save(path)
    both = [source, theirs / "rankings.csv"]
    counts = export(tmp_path, rankings=both, test_share=0.5)
    assert [split["groups"] for split in counts["splits"].values()] == [2, 2]
    for name in ("one.csv", "two.csv"):
        own = tmp_path / ("mine" if name == "one.csv" else "theirs") / name
        own.write_text("reference,candidates,group\n0/0.png,0/1.png | 0/2.png,fox\n1/0.png,1/1.png | 1/2.png,owl\n")
    counts = export(tmp_path, rankings=[tmp_path / "mine/one.csv", theirs / "two.csv"], test_share=0.5)
    assert [split["groups"] for split in counts["splits"].values()] == [1, 1]
    for split in ("train", "test"):
        assert len(comparisons_from(f"{tmp_path}/export/consistency_{split}.jsonl")) == 4


def test_all_faults_are_named_at_once(mine, tmp_path: Path) -> None:
    source = mine("0/0.png,0/1.png,,", ",0/1.png | 0/2.png,,", line(1), "0/0.png")
    with pytest.raises(ValueError, match=r"(?s)rankings\.csv:2: .*rankings\.csv:3: reference: is empty .*\.csv:5: "):
        export(tmp_path, rankings=[source])
    mine(line(0, ",ann"), "0/0.png,0/9.png | 0/1.png,,", line(1, ",Ann"))
    with pytest.raises(ValueError, match=r"(?s)rankings\.csv:3: .*9\.png .*rankings\.csv:4: 'Ann' is written 'ann'"):
        export(tmp_path, rankings=[source])


def test_a_small_test_split_is_said(mine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    export(tmp_path, rankings=[mine(line(0), line(1))], test_share=0.5)
    assert "2 pairs of 1 prompts is uncertain by ±0.69" in caplog.text
