"""What the door for documents reads and writes, and what it says of a file that cannot be used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pacorl.io.documents import (
    Journal,
    append_jsonl,
    dump_yaml,
    parse_yaml,
    read_journal,
    read_jsonl,
    read_object,
    write_json,
    write_jsonl,
)


def test_what_is_written_is_read_back_and_no_number_as_null(tmp_path: Path) -> None:
    document = {"text": "é\u2028line", "numbers": [1, 2.5, None]}
    write_json(tmp_path / "a.json", document)
    write_jsonl(tmp_path / "a.jsonl", [document, {"a": float("-inf")}])
    append_jsonl(tmp_path / "a.jsonl", {"b": float("nan")})
    assert read_object(tmp_path / "a.json") == document
    assert read_jsonl(tmp_path / "a.jsonl") == [document, {"a": None}, {"b": None}]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b'{"a": 1,\n oops}', r"a\.json:2: "),
        (b'{"a": NaN}', r"a\.json:1: "),
        (rb'{"a": [{"b": "x\ud800"}]}', r"a\.json:1: "),
        (b'{"a":' * 50_000, r"a\.json:1: "),
        (b'{\n"a": "\xff"}', r"a\.json:2: "),
        (b"[1]", r"a\.json: .* list"),
    ],
)
def test_a_broken_document_is_named_with_its_line(tmp_path: Path, content: bytes, fault: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=fault):
        read_object(tmp_path / "a.json")
    (tmp_path / "a.jsonl").write_bytes(b"{}\n" + content.replace(b"\n", b" "))
    with pytest.raises(ValueError, match=r"a\.jsonl:2: "):
        read_jsonl(tmp_path / "a.jsonl")


NUMBERS = {"017": 17, "0o17": 15, "0x1f": 31, "1e-4": 1e-4, ".5": 0.5, "+3": 3, "true": True, "~": None, "": None}
TEXTS = ("no", "on", "Yes", "1:30")


def test_yaml_is_read_by_version_1_2_and_a_text_stays_a_text() -> None:
    for text, value in [*NUMBERS.items(), *zip(TEXTS, TEXTS, strict=True), ("!!str 017", "017")]:
        read = parse_yaml(f"a: {text}", name="f.yaml")["a"]
        assert (read, type(read)) == (value, type(value))
    for value in (*NUMBERS, *TEXTS, "12e4567", ".inf", "1_0", "2026-01-01"):
        document = {"b": value, "a": 1e-5, "c": None, "d": True, "e": [1, 2.5]}
        read = parse_yaml(dump_yaml(document), name="f.yaml")
        assert (read, list(read)) == (document, list(document))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("seed: 1\nout: x\nseed: 2", 'f.yaml:3: not valid YAML: found duplicate key "seed"'),
        ('x: 1\na: !!int ""', "f.yaml: not valid YAML: "),
        ("a: !!bool foo", "f.yaml: not valid YAML: "),
        ("a: !!python/object:os.system x", "f.yaml: not valid YAML: could not determine a constructor for the tag"),
        ('a: "\\UFFFFFFFF"', "f.yaml: not valid YAML: "),
        ("[" * 800, "f.yaml: not valid YAML: "),
    ],
)
def test_yaml_that_would_be_read_as_something_else_is_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(fault)}"):
        parse_yaml(text, name="f.yaml")


# --- the journal -----------------------------------------------------------------------------------------------


def test_journal_survives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "set" / "j.jsonl"
    Journal(path).add({"key": "a", "n": 1})
    with path.open("a") as handle:
        handle.write('{"key": "b", "n"')
    assert list(read_journal(path)) == ["a"]
    journal = Journal(path)
    assert "b" not in journal
    journal.add({"key": "b", "n": 2})
    journal.add({"key": "a", "n": 3})
    assert {key: row["n"] for key, row in read_journal(path).items()} == {"a": 3, "b": 2}
