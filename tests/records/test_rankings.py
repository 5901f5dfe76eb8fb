"""Rankings in CSV and JSONL: the documented form, and one line for the rest."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pacorl.records.rankings import Ranking, load_rankings

TIERS = (("a.png",), ("b.png", "c.png"), ("d.png",))


def written(folder: Path, text: str, name: str = "mine.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def only(path: Path) -> Ranking:
    (ranking,) = load_rankings(path)
    return ranking


def test_every_column_is_read(tmp_path: Path) -> None:
    header = "reference,candidates,theme,annotator,group,category"
    line = '"r 1.png",a.png | b.png = c.png | d.png,"A fox, red",ann,fox,Animals'
    ranking = only(written(tmp_path, f"{header}\n{line}\n"))
    named = {"theme": "A fox, red", "category": "Animals", "own_group": True}
    assert ranking == Ranking("2", "ann", "fox", "r 1.png", TIERS, **named)
    assert ranking.candidates == ("a.png", "b.png", "c.png", "d.png")


@pytest.mark.parametrize(
    "text",
    [
        "reference,candidates\nr.png,a.png|b.png = c.png|d.png",
        "\ufeffreference,candidates,notes\r\nr.png,a.png | b.png = c.png | d.png,fine\r\n,,\r\n",
        "reference; candidates;notes\nr.png;a.png | b.png = c.png | d.png;a, b, c, d, e, f, g, h\n;;\n",
        "reference\tcandidates\nr.png\ta.png | b.png = c.png | d.png\n",
    ],
)
def test_reasonable_spreadsheets_say_the_same(tmp_path: Path, text: str) -> None:
    ranking = only(written(tmp_path, text))
    assert (ranking.reference, ranking.tiers) == ("r.png", TIERS)
    # An equals sign in a name is no tie.
    assert only(written(tmp_path, text.replace("a.png", "a=1.png"))).tiers == (("a=1.png",), *TIERS[1:])


def test_jsonl_has_ties_as_lists(tmp_path: Path) -> None:
    criteria = {"Identity": {"Hat": "Same hat."}}
    row = {"reference": "r.png", "candidates": ["a.png", ["b.png", "c.png"], "d.png"], "criteria": criteria, "id": 7}
    ranking = only(written(tmp_path, "\n" + json.dumps(row), "mine.jsonl"))
    assert ranking == Ranking("2", "", "", "r.png", TIERS, criteria=criteria)


GOOD = "reference,candidates\nr.png,a.png | b.png\n"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "1: .*'reference'"),
        ("reference;order\n", "1: .*'candidates'"),
        ("reference,order\n", "1: .*'candidates'"),
        ("reference,candidates\n", ".*rankings"),
        ("reference,candidates,anotator\nr.png,a | b,x\n", "2: .*'anotator'.*'annotator'"),
        (f"{GOOD}r.png,a.png,b.png\n", "3: .*a cell for each column"),
        (f"{GOOD}r.png,a.png\n", "3: .*' \\| '"),
        (f"{GOOD}r.png,\n", "3: .*candidates"),
        (f"{GOOD}r.png\n", "3: .*a cell for each column"),
        (f"{GOOD}r.png;a.png | b.png\n", "3: .*','"),
        (f"{GOOD}r.png,a.png | b.png | a.png\n", "3: .*'a.png'"),
        (f"{GOOD}r.png,a.png = b.png\n", "3: .*all are tied"),
        (f'{GOOD}"r.png,a.png | b.png\n', "[34]: not valid CSV"),
    ],
)
def test_a_bad_line_of_a_csv_is_named(tmp_path: Path, text: str, place: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}:{place}"):
        load_rankings(path)
