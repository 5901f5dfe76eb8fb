"""Panels written by a language model behind a server."""

from __future__ import annotations

import json

import pytest
from fake_server import chatting

from pacorl.generate.language_writers import open_writer
from pacorl.judge.chat import ChatError
from pacorl.records.panels import write_panels

TEXT = "Two images of one fox"
ANSWER = {
    "theme": "one fox",
    "panels": ["a fox that runs", "a fox that sleeps"],
}


def test_a_server_writes_the_panels_and_its_faults_are_sent_back():
    answers = [json.dumps({**ANSWER, "panels": ["a fox"]}), json.dumps(ANSWER)]
    with chatting(lambda messages, number: answers[number]).running() as server:
        draft = write_panels(TEXT, writer=open_writer(f"{server.url}#writer-1"))
    assert (draft.theme, draft.panels) == ("one fox", tuple(ANSWER["panels"]))
    assert [body["model"] for body in server.chats] == ["writer-1", "writer-1"]
    first, second = server.requests
    assert TEXT in first[0]["content"]
    assert "exactly 2 panels are needed, got 1" in second[-1]["content"]


def test_a_server_without_a_usable_answer_is_one_line():
    with (
        chatting(lambda messages, number: "I would rather not.").running() as server,
        pytest.raises(ChatError, match="3 answers in a row could not be used"),
    ):
        write_panels(TEXT, writer=open_writer(f"{server.url}#writer-1"))
