"""Panels written by language models: behind a server, and from a checkpoint."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from pacorl.generate.language_writers import load_writer, open_writer
from pacorl.generate.panels import write_panels
from pacorl.judge.http.chat import ChatError, ChatModel
from pacorl.judge.local import TINY_JUDGE

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
    draft = write_panels(TEXT, writer=url, model="writer-1")
    assert (draft.theme, draft.panels, draft.criteria) == ("one fox", tuple(ANSWER["panels"]), ANSWER["criteria"])
    assert [request["model"] for request in requests] == ["writer-1", "writer-1"]
    assert TEXT in requests[0]["messages"][0]["content"]
    assert "exactly 2 panels are needed, got 1" in requests[1]["messages"][-1]["content"]


def test_a_server_without_a_usable_answer_is_one_line(server):
    url, answers, _ = server
    answers += ["I would rather not."] * 3
    with pytest.raises(ChatError, match="3 answers in a row could not be used"):
        write_panels(TEXT, writer=url, model="writer-1")
    with pytest.raises(ValueError, match="needs a model's name; give one with --writer-model"):
        write_panels(TEXT, writer=url)


@pytest.fixture(scope="module")
def causal(tmp_path_factory) -> Path:
    """A random causal language model with the tiny judge's tokenizer."""
    folder = tmp_path_factory.mktemp("causal")
    tokenizer = AutoTokenizer.from_pretrained(TINY_JUDGE)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["causal", "vision"])
def test_a_checkpoint_writes_the_panels(kind, causal, monkeypatch):
    """The weights are random, so the tokens of an answer stand in for what they would say."""
    source = causal if kind == "causal" else TINY_JUDGE
    asked: list[str] = []

    def generate(model, input_ids, **options):
        assert options["do_sample"] is False
        tokenizer = AutoTokenizer.from_pretrained(source)
        asked.append(tokenizer.decode(input_ids[0]))
        answer = tokenizer(json.dumps(ANSWER), return_tensors="pt").input_ids
        return torch.cat([input_ids, answer], dim=1)

    monkeypatch.setattr("transformers.generation.GenerationMixin.generate", generate)
    draft = write_panels(TEXT, writer=str(source))
    assert draft.panels == tuple(ANSWER["panels"])
    assert TEXT in asked[0]


def test_a_checkpoint_is_loaded_once_for_many_requests(causal, monkeypatch):
    loads: list[str] = []
    monkeypatch.setattr(
        "pacorl.generate.language_writers.load_writer",
        lambda source: loads.append(source) or (lambda _: json.dumps(ANSWER)),
    )
    writer = open_writer(str(causal), ChatModel(""))
    assert [write_panels(TEXT, writer=writer).theme for _ in range(2)] == ["one fox", "one fox"]
    assert loads == [str(causal)]
    assert open_writer("template", ChatModel("")) == "template"


def test_a_random_checkpoint_has_no_answer(causal, monkeypatch):
    monkeypatch.setattr("pacorl.generate.language_writers.MAX_NEW_TOKENS", 4)
    assert isinstance(load_writer(str(causal))([{"role": "user", "content": "Say something."}]), str)
    with pytest.raises(ChatError, match="answers in a row could not be used"):
        write_panels(TEXT, writer=str(causal))


def test_a_checkpoint_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="there is no nowhere: name a folder"):
        write_panels(TEXT, writer="nowhere")
