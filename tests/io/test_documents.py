"""What the door for documents reads and writes, and what it says of a file that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacorl.io.documents import (
    Journal,
    append_jsonl,
    blamed_on,
    parse_json,
    read_journal,
    read_json,
    read_jsonl,
    read_keyed,
    read_object,
    read_records,
    read_yaml,
    text_field,
    write_json,
    write_jsonl,
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    document = {"text": "é\u2028line", "numbers": [1, 2.5, None]}
    write_json(tmp_path / "a.json", document)
    write_jsonl(tmp_path / "a.jsonl", [document])
    append_jsonl(tmp_path / "a.jsonl", {"b": 1})
    assert read_object(tmp_path / "a.json") == document
    assert read_jsonl(tmp_path / "a.jsonl") == [document, {"b": 1}]


def test_blank_lines_and_a_byte_order_mark_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \n{"a": 2}\r\n')
    assert [row["a"] for row in read_jsonl(tmp_path / "a.jsonl")] == [1, 2]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b'{"a": 1,\n oops}', r"a\.json:2: not valid JSON at column 2 \(.*\); copy it again"),
        (b'{\n"a": "\xff"}', r"a\.json:2: not UTF-8 text; save the file as UTF-8"),
        (b"[1]", r"a\.json: it must hold a JSON object, this is a list; copy it again"),
    ],
)
def test_a_broken_document_is_named_with_line_and_fix(tmp_path: Path, content: bytes, fault: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=fault):
        read_object(tmp_path / "a.json", fix="copy it again")


def test_an_absent_document_is_named_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json: cannot be read \(No such file or directory\); give another"):
        read_json(tmp_path / "none.json", fix="give another")
    with pytest.raises(ValueError, match=r"none\.jsonl: cannot be read .*; run the step that makes it"):
        read_jsonl(tmp_path / "none.jsonl")


def test_bad_yaml_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: [1\nb: 2\n")
    with pytest.raises(ValueError, match=r"a\.yaml: not valid YAML: .*line 2") as fault:
        read_yaml(tmp_path / "a.yaml")
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{oops", r"a\.jsonl:2: not valid JSON at column 2 \(.*\); a story is one JSON object a line"),
        ("[]", r"a\.jsonl:2: a story is a JSON object, this is a list"),
        ('{"a": 3}', r"a\.jsonl:2: 'a' must be a text, got 3"),
    ],
)
def test_a_fault_in_a_record_names_its_line(tmp_path: Path, line: str, fault: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"a": "x"}}\n{line}\n')
    with pytest.raises(ValueError, match=fault):
        read_records(tmp_path / "a.jsonl", lambda record: text_field(record, "a"), kind="story")


def test_records_by_key_refuse_what_is_ambiguous(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [{"idx": 1, "a": 2}, {"idx": 1, "a": 2}])
    assert read_keyed(path, key="idx") == {"1": {"idx": 1, "a": 2}}
    write_jsonl(path, [{"idx": 1, "a": 2}, {"idx": 1, "a": 3}])
    with pytest.raises(ValueError, match=r"record 2: idx '1' is already taken"):
        read_keyed(path, key="idx")
    with pytest.raises(ValueError, match=r"record 1: 'name' is missing"):
        read_keyed(path, key="name")


def test_text_without_a_file_names_no_line() -> None:
    with pytest.raises(ValueError, match=r"^not valid JSON at column 1"):
        parse_json("oops")
    with pytest.raises(ValueError, match=r"^the answer: not UTF-8 text"):
        parse_json(b'"\xff"', name="the answer")


def test_blame_goes_in_front_of_a_fault() -> None:
    with pytest.raises(ValueError, match=r"^row 3: too long$"), blamed_on("row 3"):
        raise ValueError("too long")


# --- the journal -----------------------------------------------------------------------------------------------


def test_journal_survives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "set" / "j.jsonl"
    Journal(path).add({"key": "a", "n": 1})
    with path.open("a") as handle:
        handle.write('{"key": "b", "n"')
    assert list(read_journal(path)) == ["a"]
    journal = Journal(path)
    assert journal.torn == '{"key": "b", "n"'
    assert "b" not in journal
    journal.add({"key": "b", "n": 2})
    journal.add({"key": "a", "n": 3})
    assert {key: row["n"] for key, row in read_journal(path).items()} == {"a": 3, "b": 2}


@pytest.mark.parametrize(
    ("line", "fault"), [("{oops", r"j\.jsonl:1: not valid JSON"), ('{"n": 1}', r"j\.jsonl:1: it has no 'key'")]
)
def test_a_journal_names_the_line_it_cannot_use(tmp_path: Path, line: str, fault: str) -> None:
    (tmp_path / "j.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=fault):
        Journal(tmp_path / "j.jsonl")
