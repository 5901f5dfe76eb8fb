"""What every entry of JUDGES must do; a third backend is one file and one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Literal, get_args

import pytest
from fake_server import FakeServer
from PIL import Image

from pacorl.config.base import ConfigError, dump, load
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.documents import parse_yaml, read_object
from pacorl.judge import JUDGES, judge_from, open_judge
from pacorl.judge.judge import (
    BACKEND_KEYS,
    BackendOptions,
    InProcessOptions,
    JudgeSpec,
    RemoteJudge,
    close_judge,
    counts_of,
)
from pacorl.judge.local import LocalJudge
from pacorl.judge.paco_reward import PacoReward
from pacorl.judge.pairwise import ask_pairs
from pacorl.types import TINY, Question

SERVED: dict[str, dict[str, Any]] = {"http": {"model": "judge"}}
"""Options of the judges that a server stands behind."""


@pytest.fixture(params=list(JUDGES))
def options(request: pytest.FixtureRequest) -> Iterator[BackendOptions]:
    """A judge's smallest working options: the tiny twin, or a server that answers."""
    spec = JUDGES[request.param]
    with ExitStack() as stack:
        if spec.in_process:
            yield spec.options.model_validate({"checkpoint": "tiny", "dtype": "float32"})
        else:
            server = stack.enter_context(FakeServer().running())
            yield spec.options.model_validate({"checkpoint": server.url, **SERVED[request.param]})


def test_it_answers_every_question_and_keeps_equal_ones_alike(options: BackendOptions) -> None:
    judge = open_judge(options, device="cpu")
    red, blue = (Image.new("RGB", (32, 32), colour) for colour in ("red", "blue"))
    try:
        verdicts = judge.verdicts([Question((red, blue), "Same?"), Question((red.copy(), blue), "Same?")])
        (answers,) = ask_pairs(judge, [[red, blue, red]], [{"same": "Same?"}])
    finally:
        close_judge(judge)
    assert all(verdict.valid and 0 <= (verdict.p_yes or 0) <= 1 for verdict in verdicts)
    assert verdicts[0] == verdicts[1]
    assert list(answers) == [(0, 1), (0, 2), (1, 2)]
    assert answers[0, 1]["same"].p_yes == pytest.approx(verdicts[0].p_yes, abs=1e-6)


def test_a_judge_elsewhere_counts_and_closes(options: BackendOptions) -> None:
    judge = open_judge(options, device="cpu", processes=2)
    try:
        judge.verdicts([Question((Image.new("RGB", (32, 32)),), "Red?")])
        assert isinstance(judge, RemoteJudge) != JUDGES[options.backend].in_process
        assert counts_of(judge).get("requests", 0) == (0 if JUDGES[options.backend].in_process else 1)
    finally:
        close_judge(judge)


def test_a_person_names_it_in_one_word(options: BackendOptions) -> None:
    judge, name = judge_from(options.checkpoint, model=getattr(options, "model", ""))
    close_judge(judge)
    assert name == options.name
    opened = open_judge(options, device="cpu")
    close_judge(opened)
    assert type(judge) is type(opened)


@pytest.mark.parametrize("name", JUDGES)
def test_its_options_are_a_section_of_their_own(name: str) -> None:
    spec = JUDGES[name]
    assert get_args(spec.options.model_fields["backend"].annotation) == (name,)
    assert spec.options.model_fields["backend"].default == name
    assert issubclass(spec.options, InProcessOptions) == spec.in_process


@pytest.mark.parametrize("name", [name for name in JUDGES if JUDGES[name].in_process])
def test_a_judge_of_this_process_brings_what_a_plan_needs(name: str) -> None:
    spec = JUDGES[name]
    assert TINY in spec.embedded
    for folder in spec.embedded.values():
        assert (folder / "config.json").is_file()
    assert spec.bases
    for path in spec.bases.values():
        assert set(read_object(path)) == {"model", "processor"}


def test_a_config_of_the_run_is_read_back_as_it_was(options: BackendOptions) -> None:
    given = options.model_dump(exclude_defaults=True) | {"backend": options.backend}
    run = load(PolicyConfig, None, [f"judge={given}"])
    assert run.judge == options
    assert PolicyConfig.model_validate(parse_yaml(dump(run), name="config")).judge == options


@pytest.mark.parametrize("name", JUDGES)
def test_keys_of_other_backends_are_dropped(name: str) -> None:
    """A file that was written for one backend is often overridden to another."""
    written = {"api_key_env": "", "concurrency": 32, "startup": 180.0, "dtype": "bfloat16", "batch_tokens": 8192}
    address = {"checkpoint": "http://127.0.0.1:9/v1", "model": "m"} if name in SERVED else {"checkpoint": "tiny"}
    run = load(PolicyConfig, None, [f"judge={ {'backend': name, **written, **address} }"])
    assert run.judge is not None
    assert run.judge.backend == name
    assert not set(run.judge.model_dump()) & (BACKEND_KEYS - type(run.judge).model_fields.keys())


def test_an_adapter_of_a_served_judge_is_not_dropped() -> None:
    with pytest.raises(ConfigError, match="judge: adapter lora is a server's own affair"):
        load(PolicyConfig, None, ["judge={backend: http, checkpoint: 'http://h/v1', model: m, adapter: lora}"])


@pytest.mark.parametrize("name", JUDGES)
def test_an_unknown_key_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"judge\.chekpoint: unknown key, did you mean 'judge\.checkpoint'"):
        load(PolicyConfig, None, [f"judge={{backend: {name}, chekpoint: tiny, model: m, checkpoint: 'http://h/v1'}}"])


class CoinOptions(BackendOptions):
    """A judge that is a coin."""

    backend: Literal["coin"] = "coin"
    checkpoint: str = "coin"
    heads: float = 0.5


COIN = JudgeSpec(
    options=CoinOptions,
    open=lambda options, **place: LocalJudge.from_pretrained("tiny"),
    from_source=lambda source, **access: (LocalJudge.from_pretrained("tiny"), "a coin"),
    claims=lambda source: source == "coin",
)


def test_a_third_backend_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: Mapping[str, str] = JUDGES._homes | {"coin": f"{__name__}:COIN"}
    monkeypatch.setattr(JUDGES, "_homes", lines)
    run = load(PolicyConfig, None, ["judge={backend: coin, heads: 0.7}"])
    assert run.judge == CoinOptions(heads=0.7)
    assert isinstance(open_judge(run.judge, device="cpu"), LocalJudge)
    with PacoReward.from_pretrained("coin") as reward:
        assert reward.name == "a coin"
    with pytest.raises(ConfigError, match=r"judge\.heads"):
        load(PolicyConfig, None, ["judge={backend: coin, heads: many}"])
