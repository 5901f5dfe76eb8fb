"""Rankings in CSV and JSONL: the documented form, and one line for the rest."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pacorl.records.rankings import Ranking, load_rankings

EXAMPLE = Path(__file__).parents[2] / "examples" / "rankings" / "rankings.csv"
TIERS = (("a.png",), ("b.png", "c.png"), ("d.png",))
ORDER = {"candidates": ("a.png", "b.png", "c.png", "d.png"), "ranks": (1, 2, 2, 4)}


def written(folder: Path, text: str, name: str = "mine.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def only(path: Path) -> Ranking:
    (ranking,) = load_rankings(path)
    return ranking


def test_the_example_ranks_eight_references() -> None:
    rankings = load_rankings(EXAMPLE)
    assert len({one.reference for one in rankings}) == 8
    assert {one.annotator for one in rankings} == {"ann", "ben"}
    assert all(len(one.candidates) == 4 and one.theme for one in rankings)
    assert any(len(tier) == 2 for one in rankings for tier in one.tiers)


def test_every_column_is_read(tmp_path: Path) -> None:
    header = "reference,candidates,theme,criteria,annotator,group,category"
    line = '"r 1.png",a.png | b.png = c.png | d.png,"A fox, red",Same scarf. | Same ink.,ann,fox,Animals'
    ranking = only(written(tmp_path, f"{header}\n{line}\n"))
    assert ranking.tiers == TIERS
    assert ranking == Ranking(
        instance="2",
        annotator="ann",
        group="fox",
        own_group=True,
        reference="r 1.png",
        theme="A fox, red",
        criteria={"Consistency": {"Criterion 1": "Same scarf.", "Criterion 2": "Same ink."}},
        category="Animals",
        **ORDER,
    )


@pytest.mark.parametrize(
    "text",
    [
        "reference,candidates\nr.png,a.png|b.png = c.png|d.png",
        "\ufeffReference , Candidates\r\nr.png,a.png | b.png = c.png | d.png\r\n",
        "reference;candidates;notes\nr.png;a.png | b.png = c.png | d.png;fine\n;\n\n",
    ],
)
def test_reasonable_spreadsheets_say_the_same(tmp_path: Path, text: str) -> None:
    ranking = only(written(tmp_path, text))
    assert (ranking.reference, ranking.tiers) == ("r.png", TIERS)


@pytest.mark.parametrize(
    ("criteria", "expected"),
    [
        (None, {}),
        ("Same hat.", {"Consistency": {"Criterion 1": "Same hat."}}),
        (["Hat.", "Ink."], {"Consistency": {"Criterion 1": "Hat.", "Criterion 2": "Ink."}}),
        ({"Hat": "Same hat."}, {"Consistency": {"Hat": "Same hat."}}),
        ({"Identity": {"Hat": "Same hat."}}, {"Identity": {"Hat": "Same hat."}}),
    ],
)
def test_jsonl_has_ties_as_lists_and_criteria_in_any_depth(tmp_path: Path, criteria: object, expected: object) -> None:
    row = {"reference": "r.png", "candidates": ["a.png", ["b.png", "c.png"], "d.png"], "criteria": criteria, "id": 7}
    ranking = only(written(tmp_path, "\n" + json.dumps(row), "mine.jsonl"))
    assert ranking == Ranking("2", "", "", "r.png", criteria=expected, **ORDER)


def test_an_equals_sign_in_a_name_is_no_tie(tmp_path: Path) -> None:
    ranking = only(written(tmp_path, "reference,candidates\nr.png,seed=1.png | seed=2.png\n"))
    assert ranking.tiers == (("seed=1.png",), ("seed=2.png",))


GOOD = "reference,candidates\nr.png,a.png | b.png\n"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", " holds no rankings"),
        ("r.png,a.png,b.png\n", "1: .*'reference'"),
        ("reference,candidates,candidates\n", "1: .*'candidates'"),
        ("reference,candidates,anotator\nr.png,a | b,x\n", "2: .*'anotator'; did you mean 'annotator'"),
        (f"{GOOD}r.png,a.png,b.png\n", "3: .*'b.png'"),
        (f"{GOOD}r.png,a.png\n", "3: .*separate them by"),
        (f"{GOOD}r.png,a.png | b.png | a.png\n", "3: .*'a.png' is ranked twice"),
        (f"{GOOD}r.png,a.png = b.png\n", "3: all candidates are tied"),
        (f'{GOOD}"r.png,a.png | b.png\n', "3: not valid CSV"),
        (f'reference,candidates\n"r\n.png",a | b\n{GOOD[:3]},a\n', "4: a ranking needs two candidates"),
    ],
)
def test_a_bad_line_of_a_csv_is_named(tmp_path: Path, text: str, place: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}:{place}"):
        load_rankings(path)
