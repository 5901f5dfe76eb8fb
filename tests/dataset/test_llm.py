"""The client of language models: an answer is to its question, or there is none."""

from __future__ import annotations

import json

import pytest

from pacorl.judge.http.chat import ChatError


@pytest.mark.parametrize("indices", [[1, 0], [0, 1], [1], []])
def test_an_answer_has_one_choice_of_index_0(indices, llm):
    choices = [{"index": index, "message": {"content": f"text {index}"}} for index in indices]
    _, model = llm(lambda messages, number: (200, json.dumps({"choices": choices}).encode()), retries=0)
    with pytest.raises(ChatError, match=f"an answer of {len(indices)} choices"):
        model.ask([{"role": "user", "content": "Say something."}])
