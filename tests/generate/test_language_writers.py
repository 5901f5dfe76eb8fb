"""Panels written by a language model behind a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pacorl.generate.language_writers import open_writer
from pacorl.judge.chat import ChatError
from pacorl.records.panels import write_panels

TEXT = "Two images of one fox"
ANSWER = {
    "theme": "one fox",
    "panels": ["a fox that runs", "a fox that sleeps"],
    "criteria": {"Identity": {"Fur": "The same fur."}},
}


@pytest.fixture
def server() -> Iterator[tuple[str, list[str], list[dict]]]:
    """URL, the answers that it will give in turn, and the requests that it got."""
    answers: list[str] = []
    requests: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            message = {"role": "assistant", "content": answers.pop(0)}
            body = json.dumps({"choices": [{"index": 0, "message": message}]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    served = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}/v1", answers, requests
    served.shutdown()
    served.server_close()
    thread.join()


def test_a_server_writes_the_panels_and_its_faults_are_sent_back(server):
    url, answers, requests = server
    answers += [json.dumps({**ANSWER, "panels": ["a fox"]}), json.dumps(ANSWER)]
    draft = write_panels(TEXT, writer=open_writer(f"{url}#writer-1"))
    assert (draft.theme, draft.panels, draft.criteria) == ("one fox", tuple(ANSWER["panels"]), ANSWER["criteria"])
    assert [request["model"] for request in requests] == ["writer-1", "writer-1"]
    assert TEXT in requests[0]["messages"][0]["content"]
    assert "exactly 2 panels are needed, got 1" in requests[1]["messages"][-1]["content"]


def test_a_server_without_a_usable_answer_is_one_line(server):
    url, answers, _ = server
    answers += ["I would rather not."] * 3
    with pytest.raises(ChatError, match="3 answers in a row could not be used"):
        write_panels(TEXT, writer=open_writer(f"{url}#writer-1"))
