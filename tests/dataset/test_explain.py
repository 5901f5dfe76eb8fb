from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from pacorl.cli.dataset import app
from pacorl.dataset.explain import explain
from pacorl.dataset.export import export, label
from pacorl.dataset.folder import read_answers, read_instances, write_records
from pacorl.dataset.rules import pair_key
from pacorl.io.documents import read_jsonl
from pacorl.io.net import ServiceRefusedError
from pacorl.records.rankings import Ranking


@pytest.fixture
def ranked(dataset):
    folder = dataset(prompts=2, grids=2)
    answers = [
        Ranking(one.id, "ann", one.group, one.reference, one.candidates, one.theme)
        for one in read_instances(folder / "instances.jsonl")[:12]
    ]
    write_records(folder / "rankings.jsonl", answers)
    return folder


def say(answer):
    return json.dumps({"answer": answer, **dict.fromkeys(("style", "identity", "logic"), "Both show the same hat.")})


def told(messages):
    """The label that a request names."""
    return "Yes" if "the answer is Yes" in messages[0]["content"][-1]["text"] else "No"


def test_every_pair_gets_reasons_that_reach_the_export(ranked, llm):
    server, model = llm(lambda messages, number: say(told(messages)))
    counts = explain(ranked, model)
    pairs = label(ranked).pairs
    assert counts["explained"] == len(pairs) == len(server.requests)
    assert [part["type"] for part in server.requests[0][0]["content"]] == ["image_url", "image_url", "text"]
    export(ranked, test_share=0.0)
    rows = read_jsonl(ranked / "export/consistency_train.jsonl")
    assert len(rows) == len(pairs)
    assert all(row["messages"][1]["content"].endswith("Logic: Both show the same hat.") for row in rows)
    assert {row["messages"][1]["content"].split(".")[0] for row in rows} == {"Yes", "No"}
    assert explain(ranked, model)["explained"] == len(server.requests) == len(pairs)

    # Two more people see it the other way round: each pair needs reasons for the other label.
    answers = read_answers(ranked / "rankings.jsonl")
    others = [replace(one, annotator=name, tiers=one.tiers[::-1]) for one in answers for name in ("bob", "eve")]
    write_records(ranked / "rankings.jsonl", [*answers, *others])
    assert explain(ranked, model)["explained"] == len(server.requests) - len(pairs) == len(pairs)
    export(ranked, test_share=0.0)
    for row in read_jsonl(ranked / "export/consistency_train.jsonl"):
        assert row["messages"][1]["content"].endswith("Logic: Both show the same hat.")


def test_contradictions_are_flagged_and_left_out(ranked, llm):
    server, model = llm(lambda messages, number: say("Yes"))
    counts = explain(ranked, model, workers=1)
    pairs = {pair_key(pair): pair for pair in label(ranked).pairs}
    no = sum(not pair.consistent for pair in pairs.values())
    assert (counts["explained"], counts["contradicted"]) == (len(pairs) - no, no)
    assert len(server.requests) == len(pairs)
    flagged = [row for row in read_jsonl(ranked / "explanations.jsonl") if row["status"] == "contradicted"]
    assert {pairs[row["key"]].consistent for row in flagged} == {False}
    assert all(row["images"] == [str(path) for path in pairs[row["key"]].images] for row in flagged)
    splits = export(ranked, test_share=0.0)["splits"]
    assert splits["train"]["with_reasons"] == len(pairs) - no


def test_failed_pairs_are_an_exit_code_and_a_fault_behind_an_address_as_of_a_judge(ranked, llm):
    server, _ = llm(lambda messages, number: "I would rather not.")
    for model, code, named in ((f"{server.url.removesuffix('/v1')}#seer", 3, "3 answers"), (server.url, 1, server.url)):
        ended = CliRunner().invoke(app, ["explain", str(ranked), "--model", model, "--limit", "2"])
        assert ended.exit_code == code
        assert named in f"{ended.output}{ended.exception}"
    writing = ["prompts", str(ranked / "new"), "--model", f"{server.url}#seer", "--count", "1"]
    assert CliRunner().invoke(app, writing).exit_code == 3
    assert {chat["model"] for chat in server.chats} == {"seer"}


def test_a_wrong_model_name_stops_at_once(ranked, llm):
    server, model = llm(lambda messages, number: (404, b'{"error": {"message": "no such model"}}'))
    with pytest.raises(ServiceRefusedError, match="no such model"):
        explain(ranked, model, workers=1)
    assert len(server.requests) <= 2
