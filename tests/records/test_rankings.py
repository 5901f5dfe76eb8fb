"""Rankings in CSV and JSONL: the documented form, those that are accepted, and one line for the rest."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pacorl.records.rankings import Ranking, load_rankings

EXAMPLE = Path(__file__).parents[2] / "examples" / "rankings" / "rankings.csv"
TIERS = (("a.png",), ("b.png", "c.png"), ("d.png",))


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
    assert ranking.ranks == (1, 2, 2, 4)
    assert ranking == Ranking(
        line=2,
        reference="r 1.png",
        tiers=TIERS,
        theme="A fox, red",
        criteria={"Consistency": {"Criterion 1": "Same scarf.", "Criterion 2": "Same ink."}},
        annotator="ann",
        group="fox",
        category="Animals",
    )


@pytest.mark.parametrize(
    "text",
    [
        "reference,candidates\nr.png,a.png|b.png = c.png|d.png",
        "\ufeffReference , Candidates\r\nr.png,a.png > b.png = c.png > d.png\r\n",
        "reference;candidates\nr.png;a.png | b.png = c.png | d.png\n;\n\n",
        'reference;candidates\nr.png;"a.png; b.png = c.png; d.png"\n',
        'reference,candidates\nr.png,"a.png, b.png = c.png, d.png"\n',
        "reference\tcandidates\tnotes\nr.png\ta.png | b.png = c.png | d.png\tfine\n",
        "reference,1,2,3,4\nr.png,a.png,b.png = c.png,d.png,\n",
        "theme,Rank 1,Rank 2,Rank 3,reference\n,a.png,b.png = c.png,d.png,r.png\n",
        "reference,best,second,third,worst,comment\nr.png,a.png,,b.png = c.png,d.png,\n",
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
    assert ranking == Ranking(line=2, reference="r.png", tiers=TIERS, criteria=expected)  # type: ignore[arg-type]


def test_an_equals_sign_in_a_name_is_no_tie(tmp_path: Path) -> None:
    ranking = only(written(tmp_path, "reference,candidates\nr.png,seed=1.png | seed=2.png\n"))
    assert ranking.tiers == (("seed=1.png",), ("seed=2.png",))


GOOD = "reference,candidates\nr.png,a.png | b.png\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1: no column is called 'reference', there are ; the first line names the columns, e.g. reference,cand"),
        ("r.png,a.png,b.png\n", "1: no column is called 'reference', there are r.png, a.png, b.png; the first line"),
        ("reference,theme\nr.png,x\n", "1: no candidates; give one column 'candidates', or columns 1, 2, 3 …, or best"),
        ("reference,candidates,1,2\n", "1: candidates are in candidates and in 1, 2; give one column"),
        ("reference,1,3\nr.png,a,b\n", "1: the rank columns are 1, 3; number them 1, 2, 3 … from left to right"),
        ("reference,candidates,candidates\n", "1: two columns are called 'candidates'"),
        ("reference,candidates,anotator\nr.png,a | b,x\n", "2: unknown name 'anotator'; did you mean 'annotator'?"),
        (f"{GOOD}r.png,a.png,b.png\n", "3: 'b.png' has no column name; name its column (ranks are 1, 2"),
        (f"{GOOD},a.png | b.png\n", "3: 'reference' is empty; name the image that the candidates are compared with"),
        (f"{GOOD}r.png,a.png\n", "3: a ranking needs two candidates or more, this has ['a.png']; separate them by '|'"),
        (f"{GOOD}r.png,a.png | b.png | a.png\n", "3: candidate 'a.png' is ranked twice; name each once"),
        (f"{GOOD}r.png,a.png | r.png\n", "3: 'r.png' is the reference and a candidate; take it out of the candidates"),
        (f"{GOOD}r.png,a.png = b.png\n", "3: all candidates are tied, so there is nothing to learn; remove the line"),
        ("reference,1,2,3\nr.png,a.png,,c.png\n", "2: column '2' is empty; move the worse candidates up"),
        ("reference,best,worst\nr.png,a.png,\n", "2: column 'worst' is empty"),
        (f'{GOOD}"r.png,a.png | b.png\n', "3: not valid CSV (unexpected end of data)"),
        (f'reference,candidates\n"r\n.png",a | b\n{GOOD[:3]},a\n', "4: a ranking needs two candidates"),
        ("reference,candidates\n", " holds no rankings; give one a line, below a header such as reference,cand"),
    ],
)
def test_a_bad_line_of_a_csv_is_named_with_its_fix(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(f"{path}:{message}")):
        load_rankings(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "1: not valid JSON"),
        ("[]", "1: a ranking is a JSON object, this is a list"),
        (
            '{"reference": "r", "candidates": "a | b"}',
            "1: 'candidates' must be a list of paths, best first, got 'a | b'",
        ),
        ('{"reference": "r", "candidates": ["a", ["b", 3]]}', "1: 'candidates' must be a list of paths, best first"),
        ('{"reference": "r", "candidates": ["a", []]}', "1: 'candidates' must be a list of paths, best first"),
        ('{"reference": ["r"], "candidates": ["a", "b"]}', "1: 'reference' must be a text, got ['r']"),
        ('{"reference": "r", "candidate": ["a", "b"]}', "1: unknown name 'candidate'; did you mean 'candidates'?"),
        ('{"reference": "r", "candidates": ["a", "b"], "criteria": 3}', "1: 'criteria' must be a text, texts by name"),
        ('{"reference": "r", "candidates": ["a", "b"], "theme": 3}', "1: 'theme' must be a text, got 3"),
    ],
)
def test_a_bad_line_of_a_jsonl_is_named_with_its_fix(tmp_path: Path, row: str, message: str) -> None:
    path = written(tmp_path, row, "mine.jsonl")
    with pytest.raises(ValueError, match=re.escape(f"{path}:{message}")):
        load_rankings(path)


def test_other_files_say_what_to_save(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mine\.xlsx: rankings are read from \.csv and \.jsonl files; save a spreads"):
        load_rankings(written(tmp_path, "PK", "mine.xlsx"))
    latin = tmp_path / "latin.csv"
    latin.write_bytes(GOOD.encode() + "r.png,ä.png | b.png\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.csv:3: not UTF-8 text; save the file as UTF-8"):
        load_rankings(latin)
    with pytest.raises(ValueError, match=r"gone\.csv: cannot be read \(No such file"):
        load_rankings(tmp_path / "gone.csv")
