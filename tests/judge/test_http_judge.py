from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from threading import Barrier, Event
from typing import Any

import pytest
from fake_server import FakeServer, Handler, chat_answer, p_of_images
from PIL import Image

from pacorl.io.images import ImageError
from pacorl.io.net import ServiceFault, ServiceRefusedError, UnreachableError
from pacorl.judge import judge_from
from pacorl.judge.http import HttpJudge, read_p_yes
from pacorl.judge.judge import is_address, split_address
from pacorl.types import Question

RED, BLUE, GREEN = (Image.new("RGB", (8, 6), colour) for colour in ("red", "blue", "green"))
QUESTIONS = [
    Question((a, b), text) for a, b in ((RED, BLUE), (RED, GREEN), (BLUE, GREEN)) for text in ("Same?", "Alike?")
]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.01)
    limits(monkeypatch, ANSWER_SECONDS=5.0, RETRIES=2)


def limits(monkeypatch: pytest.MonkeyPatch, **values: float) -> None:
    """Set constants of judges over HTTP."""
    for name, value in values.items():
        monkeypatch.setattr(f"pacorl.judge.http.{name}", value)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer().running() as fake:
        yield fake


def judge_of(server: FakeServer, **options: Any) -> HttpJudge:
    return HttpJudge.connect(f"{server.url}#judge", **options)


def truth(question: Question) -> float:
    return p_of_images(list(question.images), question.text)


def assert_all_right(judge: HttpJudge) -> None:
    verdicts = judge.verdicts(QUESTIONS)
    assert [verdict.p_yes for verdict in verdicts] == pytest.approx(
        [truth(question) for question in QUESTIONS], abs=1e-12
    )


# --- a server that behaves -------------------------------------------------------------------------------------


def test_equal_questions_are_asked_once_and_equal_images_encoded_once(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their pixels: a second reward asks about panels that it cut for itself."""
    saved = []
    save = Image.Image.save
    monkeypatch.setattr(Image.Image, "save", lambda image, *a, **b: saved.append(image) or save(image, *a, **b))
    again = [Question(tuple(image.copy() for image in question.images), question.text) for question in QUESTIONS]
    with judge_of(server) as judge:
        verdicts = judge.verdicts([*QUESTIONS, *again])
    assert verdicts[: len(QUESTIONS)] == verdicts[len(QUESTIONS) :]
    assert (len(saved), len(server.chats)) == (3, len(QUESTIONS))


def test_images_are_sent_as_the_judge_of_this_process_sees_them(server: FakeServer) -> None:
    clear, white = Image.new("RGBA", (8, 6), (255, 0, 0, 0)), Image.new("RGB", (8, 6), "white")
    with judge_of(server) as judge:
        verdict = judge.verdicts([Question((clear, BLUE), "Same?")])[0]
        assert verdict.p_yes == pytest.approx(p_of_images([white, BLUE], "Same?"), abs=1e-12)
        with pytest.raises(ImageError, match=r"image 2 of 'Same\?': 1x1 is too small"):
            judge.verdicts([*QUESTIONS, Question((RED, Image.new("RGB", (1, 1))), "Same?")])
        assert_all_right(judge)


def test_concurrency_is_bounded_over_all_ranks(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = Barrier(2)

    def wait(handler: Handler, number: int) -> bool:
        pairs.wait(30)  # for a second request under way, however slow the machine is
        time.sleep(0.03)  # for a third, which must not come
        return False

    server.behave = wait
    limits(monkeypatch, CONCURRENCY=8, ANSWER_SECONDS=60)
    with judge_of(server, processes=4) as judge:
        judge.verdicts([Question((RED, BLUE), str(number)) for number in range(12)])
    assert server.busiest == 2


def test_every_spelling_of_one_token_is_asked_for(server: FakeServer) -> None:
    """A spelling that is not listed would be left out of the sum."""
    server.tokens = {"Yes": [7], "yes": [70, 71], "YES": [72], "No": [9], "no": [90], "N": [91]}
    with judge_of(server, variants=True) as judge:
        assert_all_right(judge)
    assert sorted(server.chats[-1]["logprob_token_ids"]) == [7, 9, 72, 90, 91]


def refuses_the_switch(handler: Handler, number: int) -> bool:
    """As OpenAI's own service."""
    return "chat_template_kwargs" in handler.fake.chats[number - 1] and handler.fail(400, "unknown field") is None


@pytest.mark.parametrize(("ids", "switches"), [([7, 9], True), (None, True), (None, False)])
def test_keys_of_vllm_are_sent_where_the_server_takes_them(
    server: FakeServer, ids: list[int] | None, switches: bool
) -> None:
    """A model that thinks first is no judge, so that all but a server that refuses the switch are told not to."""
    server.tokens = server.tokens if ids else None
    if not switches:
        server.behave = refuses_the_switch
    with judge_of(server) as judge:
        assert_all_right(judge)
    chat = server.chats[-1]
    assert chat.get("logprob_token_ids") == ids
    # At the model's own temperature: a server may report log-probabilities after its own changes to them.
    assert (chat["temperature"], chat["top_p"], chat["max_tokens"], chat["top_logprobs"]) == (1, 1, 1, 20)
    assert chat.get("repetition_penalty") == (1 if ids else None)
    assert chat.get("chat_template_kwargs") == ({"enable_thinking": False} if switches else None)


def test_reasons_are_text(server: FakeServer) -> None:
    server.behave = lambda handler, number: handler.answer(chat_answer([(" Yes. Same hat. ", -0.1)])) is None
    with judge_of(server) as judge:
        assert judge.explain(QUESTIONS[0]) == "Yes. Same hat."
    assert server.chats[0]["max_tokens"] == 512


def test_close_abandons_what_runs(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    limits(monkeypatch, ANSWER_SECONDS=60)
    asked, closed = Event(), Event()
    server.behave = lambda handler, number: asked.set() or closed.wait(60)
    judge = judge_of(server)
    with ThreadPoolExecutor() as pool:
        answers = pool.submit(judge.verdicts, QUESTIONS)
        assert asked.wait(60)
        judge.close()
        closed.set()
        assert isinstance(answers.exception(30), CancelledError)
    with pytest.raises(RuntimeError, match=re.escape(judge.url)):
        judge.verdicts(QUESTIONS)


# --- a server that does not ------------------------------------------------------------------------------------

TRUNCATED = b'{"model": "judge", "choices": [{"logprobs"'
NO_LOGPROBS = {"model": "judge", "choices": [{"message": {"content": "Yes"}, "logprobs": None}]}
WIRE_FAULTS: dict[str, Callable[[Handler], None]] = {
    "503 with a date": lambda handler: handler.fail(503, Retry_After="Fri, 21 Nov 2025 07:28:00 GMT"),
    "truncated body": lambda handler: handler.send(TRUNCATED, length=500) or setattr(handler, "close_connection", True),
    "too slow": lambda handler: time.sleep(5),
}
OTHERS: dict[str, Callable[[Handler], None]] = {
    "400": lambda handler: handler.fail(400, "too long"),
    "no JSON": lambda handler: handler.send(b"<html>Bad gateway</html>"),
    "missing logprobs": lambda handler: handler.answer(NO_LOGPROBS),
    "NaN": lambda handler: handler.answer(chat_answer([("Yes", math.nan), ("No", -1.0)])),
}
"""Refusals of this request, and answers of another form, which another try would not change."""
FAULTS = WIRE_FAULTS | OTHERS


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if "slow" in name else ()) for name in names]


def patience(name: str) -> float:
    return 3.0 if "slow" in name else 30.0


def faulty(fault: Callable[[Handler], None], *, until: float) -> Callable[[Handler, int], bool]:
    def behave(handler: Handler, number: int) -> bool:
        if number <= until:
            fault(handler)
        return number <= until

    return behave


@pytest.mark.parametrize("name", marked(WIRE_FAULTS))
def test_a_fault_that_passes_leaves_no_trace_but_a_retry(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    limits(monkeypatch, ANSWER_SECONDS=patience(name))
    server.behave = faulty(FAULTS[name], until=1)
    with judge_of(server) as judge:
        verdict = judge.verdicts(QUESTIONS[:1])[0]
        assert verdict.p_yes == pytest.approx(truth(QUESTIONS[0]), abs=1e-12)
        assert len(server.chats) == 2


@pytest.mark.parametrize("name", marked(FAULTS))
def test_a_fault_that_stays_makes_the_verdict_missing(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    limits(monkeypatch, ANSWER_SECONDS=patience(name), RETRIES=1)
    server.behave = faulty(FAULTS[name], until=math.inf)
    with judge_of(server) as judge:
        verdict = judge.verdicts(QUESTIONS[:1])[0]
        assert verdict.p_yes is None
        assert verdict.error
        assert len(server.chats) == 1 + (name in WIRE_FAULTS)


def test_a_judge_that_hangs_is_asked_once_a_question(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With six retries, 30 questions would be asked 210 times."""
    server.behave = lambda handler, number: time.sleep(1) is None
    questions = [Question((RED, BLUE), str(number)) for number in range(30)]
    limits(monkeypatch, ANSWER_SECONDS=0.2, RETRIES=6, CONCURRENCY=4)
    with judge_of(server) as judge:
        verdicts = judge.verdicts(questions)
    assert len(server.chats) < 70
    assert all(verdict.p_yes is None for verdict in verdicts)
    assert "no answer within 0.2 s" in verdicts[-1].error


def test_an_absent_judge_makes_the_verdict_missing() -> None:
    with FakeServer().running() as gone:
        pass
    with HttpJudge(f"{gone.url}#judge") as judge:
        assert "no connection" in judge.verdicts(QUESTIONS[:1])[0].error


def test_a_wrong_model_name_fails_at_once_with_the_served_names(server: FakeServer) -> None:
    server.served = ("PaCo-Reward-7B", "base")
    with pytest.raises(ServiceRefusedError, match=r"no model 'judge'; it serves PaCo-Reward-7B, base"):
        judge_of(server)
    assert not server.chats


def test_the_only_model_needs_no_name(server: FakeServer) -> None:
    with HttpJudge.connect(server.url) as judge:
        assert judge.model == "judge"
        assert_all_right(judge)
    server.served = ("one", "two")
    with pytest.raises(ServiceRefusedError, match="serves one, two; name one as URL#MODEL"):
        HttpJudge.connect(server.url)
    server.served = ("judge", "two")
    judge, name = judge_from(f"{server.url}#judge")
    assert name == "judge"
    judge.close()


@pytest.mark.parametrize(("status", "fix"), [(404, "check the address"), (413, "give smaller ones")])
def test_a_fault_of_the_request_is_not_asked_again(status: int, fix: str, server: FakeServer) -> None:
    server.behave = lambda handler, number: handler.fail(status, "this is why") is None
    with judge_of(server) as judge:
        fault = rf"{server.url}/chat/completions: HTTP {status} this is why; .*{fix}"
        with pytest.raises(ServiceRefusedError, match=fault):
            judge.verdicts(QUESTIONS[:1])
        assert len(server.chats) == 1


def test_a_redirect_is_not_followed(server: FakeServer) -> None:
    with FakeServer().running() as other:
        moved = {"Location": f"{other.url}/chat/completions"}
        server.behave = lambda handler, number: handler.answer({}, status=307, headers=moved) is None
        with judge_of(server) as judge, pytest.raises(ServiceRefusedError, match=server.url):
            judge.verdicts(QUESTIONS[:1])
    assert other.chats == []


# --- addresses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "url", "model"),
    [
        ("http://h:1", "http://h:1/v1", ""),
        ("http://h:1/v1/#paco", "http://h:1/v1", "paco"),
        ("localhost:8000", "http://localhost:8000/v1", ""),
        ("http://b/openai/v1#org/paco", "http://b/openai/v1", "org/paco"),
    ],
)
def test_an_address_is_a_url_and_a_model(source: str, url: str, model: str) -> None:
    assert is_address(source)
    assert split_address(source) == (url, model)
    assert not any(map(is_address, ("tiny", "X-GenGroup/PaCo-Reward-7B", "runs/judge", "/srv/judge:v2")))


def test_a_password_is_not_shown() -> None:
    with pytest.raises(ValueError, match="environment variable") as caught:
        split_address("http://me:secret@h")
    assert "secret" not in str(caught.value)


def test_this_machine_is_asked_around_the_proxy(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with judge_of(server) as judge:
        assert_all_right(judge)
    with pytest.raises(UnreachableError, match=r"no connection: .*refused"):
        HttpJudge.connect("http://judge.invalid:8000#judge")


def test_a_word_of_several_tokens_is_refused(server: FakeServer) -> None:
    server.tokens = {"Yes": [7]}
    with pytest.raises(ServiceRefusedError, match="'No' is not a single token"):
        judge_of(server)


# --- keys ------------------------------------------------------------------------------------------------------


def test_the_key_comes_from_the_environment_and_a_refused_one_is_not_shown(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = "very-secret"
    monkeypatch.setenv("PACORL_API_KEY", "very-secret")
    with judge_of(server) as judge:
        assert_all_right(judge)
    server.key = "another"
    with pytest.raises(ServiceRefusedError, match="into PACORL_API_KEY") as caught:
        judge_of(server)
    assert "very-secret" not in str(caught.value)
    assert "Bearer ***" in str(caught.value)


def test_a_key_for_other_services_stays_here(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "for-others")
    sent = set()
    server.behave = lambda handler, number: sent.add(handler.headers["Authorization"])  # type: ignore[func-returns-value]
    with judge_of(server) as judge:
        assert_all_right(judge)
    assert sent == {None}


# --- reading ---------------------------------------------------------------------------------------------------


def test_tokens_that_spell_the_same_are_added_up() -> None:
    entries = [("Yes", math.log(0.3)), ("No", math.log(0.2)), ("Yes", math.log(0.1)), ("No", math.log(0.15))]
    entries.append(entries[0])  # which is repeated, and counts once
    assert read_p_yes(chat_answer(entries)) == pytest.approx(0.4 / 0.75)


@pytest.mark.parametrize(
    ("entries", "likeliest"),
    [
        ([("Maybe", -0.1), ("Yes", -9999.0), ("No", -9999.0)], "Maybe"),  # vLLM's floor
        ([("<think>", -0.0001), (" Yes", -9.5)], "<think>"),
    ],
)
def test_neither_word_listed_is_missing(entries: list[tuple[str, float]], likeliest: str) -> None:
    with pytest.raises(ServiceFault, match=likeliest):
        read_p_yes(chat_answer(entries))


@pytest.mark.parametrize(
    "entries", [[("Maybe", 0.0), ("Yes", -9999.0), ("No", -9999.0)], [("Yes", 0.0), ("#", -9999.0)], [("Yes", 0.0)]]
)
def test_log_probabilities_of_a_greedy_sampler_are_refused(entries: list[tuple[str, float]]) -> None:
    with pytest.raises(ServiceRefusedError, match="--logprobs-mode raw_logprobs"):
        read_p_yes(chat_answer(entries))


def test_one_word_listed_is_enough_where_the_other_cannot_matter() -> None:
    assert read_p_yes(chat_answer([("No", -0.01), ("Maybe", -6.0), ("So", -12.0)])) == 0.0
    assert read_p_yes(chat_answer([("Yes", 0.0), ("No", -21.0)])) == pytest.approx(1.0)  # sure, and no greedy sampler
    with pytest.raises(ServiceFault, match="listed Yes and not No"):
        read_p_yes(chat_answer([("Maybe", -0.7), ("Yes", -1.0), ("So", -2.0)]))


def test_the_sampled_token_bounds_nothing() -> None:
    answer = chat_answer([("Yes", -0.7), ("Maybe", -1.0)])
    first = answer["choices"][0]["logprobs"]["content"][0]
    first["token"], first["logprob"] = "Rare", -30.0
    first["top_logprobs"].append({"token": "Rare", "logprob": -30.0})
    with pytest.raises(ServiceFault):
        read_p_yes(answer)


def test_names_by_id_are_read_by_id() -> None:
    answer = chat_answer([("token_id:7", math.log(0.6)), ("token_id:9", math.log(0.2)), ("token_id:70", math.log(0.1))])
    assert read_p_yes(answer, ids=((7,), (9,))) == pytest.approx(0.75)
