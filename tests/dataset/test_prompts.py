"""Records of a taxonomy, by a language model or the tiny world."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from pacorl.dataset.folder import read_prompts
from pacorl.dataset.prompts import PAPER, TINY, llm_writer, orders, read_taxonomy, tiny_writer, write_all
from pacorl.io.documents import read_jsonl
from pacorl.types import Grid

SQUARE = Grid(2, 2)
SUBJECTS = read_taxonomy(PAPER)


def reply(messages, theme):
    """An answer to a request: as many panels, and its dimensions."""
    text = messages[0]["content"]
    count = int(re.search(r"set of (\d+) images", text)[1])
    dimensions = re.search(r"must keep: ([\w, ]+)\.", text)[1].split(", ")
    return {
        "theme": theme,
        "shared": "The same small red fox in a watercolour style",
        "panels": [f"The fox waits at station number {n}" for n in range(count)],
        "criteria": {name: {"Looks": "The fox has the same fur in all images."} for name in dimensions},
    }


def obedient(messages, number):
    return "Here you are:\n```json\n" + json.dumps(reply(messages, f"Theme number {number}.")) + "\n```"


def run(folder, writer, count=12, subjects=SUBJECTS, grid=SQUARE, **options):
    return write_all(folder, writer, orders(subjects, count=count, grid=grid), options={}, **options)


def test_orders_are_balanced():
    found = orders(SUBJECTS, count=2000, grid=SQUARE)
    by_category = Counter(one.subject.category for one in found)
    assert max(by_category.values()) - min(by_category.values()) <= 1
    for category in by_category:
        by_name = Counter(one.subject.name for one in found if one.subject.category == category)
        assert max(by_name.values()) - min(by_name.values()) <= 1
    assert len({one.key for one in found}) == 2000


def test_llm_writes_everything_and_a_second_call_asks_nothing(tmp_path, llm):
    server, model = llm(obedient)
    layout = Grid(3, 4)
    counts = run(tmp_path, llm_writer(model), workers=4, grid=layout)
    assert counts["records"] == 12
    records = read_prompts(tmp_path / "prompts.jsonl")
    assert [record.idx for record in records] == [f"{n:04d}" for n in range(12)]
    for record in records:
        prompt = record.prompt
        assert prompt.grid == layout
        assert list(prompt.panels) == [f"The fox waits at station number {n}" for n in range(prompt.grid.count)]
        assert "layout. The same small red fox in a watercolour style. [" in prompt.text
        assert prompt.theme.startswith("Theme number")
        assert prompt.criteria
    assert run(tmp_path, llm_writer(model), grid=layout) == counts
    assert len(server.requests) == 12


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"criteria": {}}, "criteria must be given for exactly"),
        ({"panels": ["It says. NOTE: this is no tag"] * 4}, "panel tag"),
        ({"theme": ""}, "used: theme"),
    ],
)
def test_unusable_answers_are_asked_for_again_with_their_fault(tmp_path, llm, change, fault):
    def clumsy(messages, number):
        if len(messages) > 1:
            return obedient(messages, number)
        return json.dumps(reply(messages, "A fox.") | change)

    server, model = llm(clumsy)
    assert run(tmp_path, llm_writer(model), count=3)["records"] == 3
    assert sum(fault in messages[-1]["content"] for messages in server.requests) == 3


def test_themes_are_told_and_not_repeated(tmp_path, llm):
    # Every one of them twice.
    server, model = llm(lambda messages, number: json.dumps(reply(messages, f"Theme {number // 2} of all.")))
    assert run(tmp_path, llm_writer(model), count=6, subjects=SUBJECTS[:1], workers=1)["records"] == 6
    themes = {row["theme"] for row in read_jsonl(tmp_path / "prompts.jsonl")}
    assert len(themes) == 6
    assert all(theme in server.requests[-1][0]["content"] for theme in sorted(themes)[:5])


def test_the_tiny_writer_needs_no_network_and_the_oracle_reads_it(tmp_path):
    from pacorl.tiny.words import asked_in

    writer = tiny_writer(count=10, grid=Grid(1, 3))
    counts = run(tmp_path, writer, count=10, subjects=read_taxonomy(TINY), grid=Grid(1, 3))
    assert counts["records"] == 10
    for record in read_prompts(tmp_path / "prompts.jsonl"):
        assert len(asked_in(record.prompt)) == record.prompt.grid.count
