"""A judge or reward service that goes away: it is retried, and a run that gives up resumes with the missing questions.

Runs are of the toy world, whose judge or reward is asked at a server of this process.
"""

from __future__ import annotations

import errno
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pending_runs
import pytest
import worlds
from fake_server import FakeServer, Handler
from safetensors.torch import load_file
from tiny_runs import metrics
from toy_world import toy_config, toy_world

from pacorl.core.sampler import Suffix
from pacorl.grpo import epoch, pending
from pacorl.grpo.checkpoint import SEAL
from pacorl.grpo.rollout import Draw, draw_samples
from pacorl.grpo.rows import Row
from pacorl.grpo.start import checkpoints
from pacorl.grpo.trainer import train_policy
from pacorl.io.documents import write_json
from pacorl.io.files import digests
from pacorl.io.outage import Answers, UnreachableError
from pacorl.judge.judge import Counters
from pacorl.runtime.processes import Runtime
from pacorl.types import Prompt, Rollout, Samples

pytestmark = pytest.mark.usefixtures("toy")

Whole = tuple[dict[str, Any], Counter[str]]
"""What a run leaves, and how often it has asked each question."""
SCORE = "/v1/score"
JUDGE_COUNTS = {f"judge/{field.name}" for field in fields(Counters)}
"""Metrics that a retried request changes."""


class LeavingServer:
    """A judge and a reward service that leaves a run in its second epoch, or in its last evaluation."""

    def __init__(self, way: str, *, after: str = "epoch-000001.png", answers: int = 15) -> None:
        """
        Args:
            way: how it is away: `refused`, a status, or `hangs`; `never` if it stays.
            after: the file of `samples/` that the run has written when its time comes.
            answers: how many it gives from then on before it goes.
        """
        self.way, self.after, self.answers = way, after, answers
        self.answered: Counter[str] = Counter()
        """How often each question was answered."""
        self.is_away, self.gone = False, threading.Event()
        self.run = Path()
        self._fake = FakeServer(behave=self._behave, posts={SCORE: self._score})
        self._left, self._lock, self._serving = 0, threading.Lock(), ExitStack()

    @contextmanager
    def serving(self, run: Path) -> Iterator[str]:
        """The URL that a run is given."""
        self.run = run
        self.come_back()
        with self._serving:
            yield self._fake.url

    def come_back(self) -> None:
        if not self._fake.port or self.way == "refused":
            self._serving.enter_context(self._fake.running())
        self._fake.port = int(self._fake.url.split(":")[2].split("/")[0])
        self.is_away = False

    def leave_again(self) -> None:
        """Go once more after as many answers."""
        self._left = 0
        self.gone.clear()

    def _leaves(self) -> bool:
        if self.way != "never" and not self.gone.is_set() and (self.run / "samples" / self.after).exists():
            self._left += 1
            if self._left > self.answers:
                self.is_away = True
                self.gone.set()
                if self.way == "refused":
                    self._serving.close()
        return self.is_away and self.way != "refused"

    def _behave(self, handler: Handler, number: int) -> bool:
        with self._lock:
            if not self._leaves():
                content = json.dumps(self._fake.chats[number - 1]["messages"])
                self.answered[hashlib.sha256(content.encode()).hexdigest()] += 1
                return False
        self._is_away_to(handler)
        return True

    def _score(self, handler: Handler, document: dict[str, Any]) -> None:
        with self._lock:
            away = self._leaves()
            if not away:
                self.answered.update(document["images"])
        if away:
            self._is_away_to(handler)
        else:
            handler.answer({"scores": [len(image) / 1000 for image in document["images"]]})

    def _is_away_to(self, handler: Handler) -> None:
        if self.way == "hangs":
            time.sleep(6)
            handler.close_connection = True
        else:
            handler.fail(int(self.way.replace("refused", "503")), "the model is loading")


def settings(url: str, *more: str, **judge: Any) -> list[str]:
    asked = {"backend": "http", "checkpoint": url, "model": "judge", "retries": 1, "timeout": 5, "concurrency": 4}
    return [f"judge={json.dumps({**asked, **judge})}", "epochs=2", *more]


def http_reward(url: str, *more: str, outage: float = 900) -> list[str]:
    args = {"url": f"{url.removesuffix('/v1')}{SCORE}", "batch": 1, "concurrency": 1, "tries": 1, "outage": outage}
    return ["judge=none", f"rewards=[{{name: http, args: {json.dumps(args)}}}]", "epochs=2", *more]


def content(run: Path) -> dict[str, Any]:
    """What a run leaves, without times, counts and addresses."""
    newest = checkpoints(run / "checkpoints")[-1]
    lines = [{k: v for k, v in line.items() if k not in JUDGE_COUNTS} for line in metrics(run) if "changes" not in line]
    weights = {
        f"{path.parent.name}/{path.stem}/{name}": value
        for path in [*newest.glob("*.safetensors"), *newest.glob("lora/*.safetensors")]
        for name, value in load_file(path).items()
    }
    return {
        "lines": lines,
        "weights": {name: value.tolist() for name, value in weights.items()},
        "samples": digests(run / "samples"),
        "files": sorted(path.name for path in run.iterdir()),
    }


def undisturbed(folder: Path, *more: str, make: Any = settings) -> Whole:
    """A run whose server stays."""
    server = LeavingServer("never")
    with server.serving(folder) as url:
        train_policy(toy_config(folder, *make(url, *more)))
    return content(folder), server.answered


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Counter[str]]:
    """`undisturbed`, of the settings that most tests share."""
    with toy_world():
        return undisturbed(tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.slow
def test_a_judge_that_comes_back_in_time_changes_nothing(
    tmp_path: Path, whole: Whole, caplog: pytest.LogCaptureFixture
) -> None:
    server = LeavingServer("refused")

    def back() -> None:
        server.gone.wait()
        time.sleep(2.5)
        server.come_back()

    with server.serving(tmp_path / "run") as url:
        returning = threading.Thread(target=back, daemon=True)
        returning.start()
        train_policy(toy_config(tmp_path / "run", *settings(url)))
        returning.join()
    assert content(tmp_path / "run") == whole[0]
    told = [record.getMessage() for record in caplog.records if record.name == "pacorl.io.outage"]
    assert len(told) == 2, told
    assert told[0].startswith(f"judge judge at {url} does not answer (no connection: Connection refused)")
    assert told[1].startswith(f"judge judge at {url} answers again after ")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["refused", "503", pytest.param("hangs", marks=pytest.mark.campaign)])
def test_a_run_that_gives_up_resumes_with_the_missing_questions(
    tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    assert resumed(tmp_path / "run", LeavingServer(way), whole, monkeypatch) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["sampling.sde_steps=[0,1]", "sampling.tree.seeds=1"],
        pytest.param(["judge.overlap=false"], marks=pytest.mark.campaign),
        pytest.param(["objective.name=awm"], marks=pytest.mark.campaign),
        pytest.param(["objective.name=diffusion_nft"], marks=pytest.mark.campaign),
    ],
)
def test_samples_of_every_kind_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]) -> None:
    expected = undisturbed(tmp_path / "whole", *more)
    assert resumed(tmp_path / "run", LeavingServer("503"), expected, monkeypatch, *more) == []


def resumed(
    run: Path, server: LeavingServer, whole: Whole, monkeypatch: pytest.MonkeyPatch, *more: str
) -> list[Suffix]:
    """The suffixes of all samples that are drawn again, of a run that has given up and is resumed.

    Asserts that it leaves and has asked what a run does that nothing disturbs.
    """
    expected, questions = whole
    drawn: list[Suffix] = []

    def noted(draw: Draw, *rest: Any) -> Iterator[Rollout]:
        drawn.append(draw.sampler.suffix)
        return draw_samples(draw, *rest)

    with server.serving(run) as url:
        with pytest.raises(UnreachableError) as given_up:
            train_policy(toy_config(run, *settings(url, *more, outage=1)))
        assert given_up.value.exit_code == 75
        message = str(given_up.value)
        assert message.startswith(f"judge judge at {url} has not answered for ")
        assert "--resume auto" in message
        assert message.endswith("saved after epoch 1, and the images and answers of the next are kept")
        assert "\n" not in message
        assert [line["kind"] for line in metrics(run)] == ["evaluation", "epoch"]
        assert sum(server.answered.values()) < sum(questions.values())
        server.come_back()
        with monkeypatch.context() as patch:
            patch.setattr(epoch, "draw_samples", noted)
            train_policy(toy_config(run, *settings(url, *more, outage=1)), resume="auto")
    assert server.answered == questions
    assert content(run) == expected
    return drawn


@pytest.mark.slow
def test_a_reward_service_is_waited_for_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, questions = undisturbed(tmp_path / "whole", make=http_reward)
    server, run = LeavingServer("refused", after="evaluation-000000.jsonl"), tmp_path / "run"
    with server.serving(run) as url:
        with pytest.raises(UnreachableError, match=r"reward service http://\S+ has not answered for .* --resume auto"):
            train_policy(toy_config(run, *http_reward(url, outage=1)))
        with pytest.raises(UnreachableError, match="reward service"):
            train_policy(toy_config(run, *http_reward(url, outage=1)), resume="auto")
        server.come_back()
        train_policy(toy_config(run, *http_reward(url, outage=1)), resume="auto")
    trials = server.answered - questions
    assert sum(trials.values()) <= 2, "only the trial image of another start is scored again"
    assert content(run) == expected


def stopped(run: Path, url: str, server: LeavingServer) -> None:
    """A run that has given up in its second epoch, and whose server is back."""
    with pytest.raises(UnreachableError):
        train_policy(toy_config(run, *settings(url, outage=0.5)))
    server.come_back()


@pytest.mark.slow
def test_an_evaluation_asks_only_the_missing_questions_too(tmp_path: Path, whole: Whole) -> None:
    expected, questions = whole
    server, run = LeavingServer("503", after="epoch-000002.png"), tmp_path / "run"
    with server.serving(run) as url:
        toy = toy_config(run, *settings(url, outage=0.5), "save_every=2")
        with pytest.raises(UnreachableError, match="saved after epoch 2, and the answers since are kept"):
            train_policy(toy)
        server.come_back()
        train_policy(toy, resume="auto")
    assert server.answered == questions
    left = content(run)
    assert (left["lines"], left["samples"]) == (expected["lines"], expected["samples"])


class AnswerKeeper:
    """A service that keeps its answers."""

    answers = Answers()

    def keep_answers(self, answers: Answers) -> None:
        self.answers = answers


def test_answers_survive_any_number_of_stops(tmp_path: Path) -> None:
    checkpoint, run = tmp_path / "checkpoint", tmp_path / "run"
    for folder in (checkpoint, run):
        folder.mkdir()
    write_json(checkpoint / "state.json", {SEAL: "of this checkpoint"})
    expected: dict[str, float | None] = {}
    for stop in range(3):
        service = AnswerKeeper()
        epoch = pending.PendingEpoch(run, Runtime(), {"judge": service})
        epoch.open(checkpoint, same_config=True)
        assert service.answers.known == expected
        service.answers.given[f"question {stop}"] = expected[f"question {stop}"] = stop / 4
        epoch.keep(checkpoint)


@pytest.mark.slow
def test_a_second_outage_loses_nothing_either(tmp_path: Path, whole: Whole) -> None:
    server, run = LeavingServer("503"), tmp_path / "run"
    with server.serving(run) as url:
        stopped(run, url, server)
        server.leave_again()
        with pytest.raises(UnreachableError):
            train_policy(toy_config(run, *settings(url, outage=0.5)), resume="auto")
        server.come_back()
        train_policy(toy_config(run, *settings(url)), resume="auto")
    assert server.answered == whole[1]
    assert content(run) == whole[0]


@pytest.mark.parametrize(
    ("harm", "note"),
    [
        pytest.param(
            "a byte", "update-00001.safetensors is damaged: it is not what was written", marks=pytest.mark.slow
        ),
        pytest.param("a file", "update-00001.safetensors is missing", marks=pytest.mark.campaign),
        pytest.param("the mark", "pending.json", marks=pytest.mark.campaign),
        pytest.param(
            "another checkpoint", "is not of the checkpoint that the run goes on from", marks=pytest.mark.campaign
        ),
    ],
)
def test_what_does_not_fit_is_sampled_again_with_a_note(
    tmp_path: Path, whole: Whole, caplog: pytest.LogCaptureFixture, harm: str, note: str
) -> None:
    server, run = LeavingServer("503"), tmp_path / "run"
    with server.serving(run) as url:
        stopped(run, url, server)
        samples = run / "pending" / "rank-00000-update-00001.safetensors"
        if harm == "a byte":
            *start, last = samples.read_bytes()
            samples.write_bytes(bytes([*start, last ^ 1]))
        elif harm == "a file":
            samples.unlink()
        elif harm == "the mark":
            (run / "pending" / "pending.json").write_text("{")
        else:
            mark = run / "pending" / "pending.json"
            mark.write_text(json.dumps(json.loads(mark.read_text()) | {"sha256": "0"}))
        train_policy(toy_config(run, *settings(url)), resume="auto")
    assert content(run) == whole[0]
    assert [r.getMessage() for r in caplog.records if note in r.getMessage() and "sampled and judged again" in r.msg]


@pytest.mark.slow
def test_another_config_does_not_take_what_was_sampled_with_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, run = LeavingServer("503"), tmp_path / "run"
    with server.serving(run) as url:
        stopped(run, url, server)
        train_policy(toy_config(run, *settings(url, "sampling.noise_level=0.5")), resume="auto", allow_changes=True)
    assert "is of another config; the epoch is sampled and judged again" in caplog.text
    assert not (run / "pending").exists()


@pytest.mark.slow
def test_a_full_disk_costs_the_images_and_not_the_state(
    tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    server, run = LeavingServer("503"), tmp_path / "run"
    with server.serving(run) as url:
        with monkeypatch.context() as patch:
            patch.setattr(pending, "save_file", full)
            with pytest.raises(UnreachableError, match="and nothing of the next is kept"):
                train_policy(toy_config(run, *settings(url, outage=0.5)))
        assert not list(run.glob("*pending*"))
        server.come_back()
        train_policy(toy_config(run, *settings(url)), resume="auto")
    assert content(run) == whole[0]


@pytest.mark.slow
def test_a_judge_that_answers_wrongly_is_no_outage(tmp_path: Path) -> None:
    server = LeavingServer("500")
    with server.serving(tmp_path / "run") as url, pytest.raises(ValueError, match=r"advantages.max_missing is 20%"):
        train_policy(toy_config(tmp_path / "run", *settings(url, retries=0)))
    assert not (tmp_path / "run" / "pending").exists()


@pytest.mark.slow
def test_only_a_run_that_was_answered_before_is_to_be_started_again(tmp_path: Path) -> None:
    """A new run with a wrong address ends with exit code 1: it would fail for ever."""
    server, run = LeavingServer("refused"), tmp_path / "run"
    with server.serving(run) as url:
        with pytest.raises(UnreachableError):
            train_policy(toy_config(run, *settings(url, outage=0.5)))
        again = settings(url, outage=0.5, startup=0)
        with pytest.raises(UnreachableError, match=r"no judge at \S+: no connection: .* --resume auto") as resumed:
            train_policy(toy_config(run, *again), resume="auto")
        assert (run / "pending").exists(), "another try finds it"
        with pytest.raises(ConnectionError, match="no judge at") as new:
            train_policy(toy_config(tmp_path / "new", *again))
    assert (resumed.value.exit_code, getattr(new.value, "exit_code", 1)) == (75, 1)


@pytest.mark.parametrize(("numbers", "fits"), [([0, 1, 2, 3], True), ([0, 9, 2, 3], False), ([0, 1, 2, 9], False)])
def test_samples_are_taken_if_those_of_every_update_are_of_the_epoch_s_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: list[int], fits: bool
) -> None:
    drawn = iter([[0, 1], [2, 3]])
    monkeypatch.setattr(pending, "load_file", lambda path: {})
    monkeypatch.setattr(
        pending,
        "unpacked",
        lambda *_: Samples([SimpleNamespace(row_B=next(drawn))]),  # type: ignore[list-item]
    )
    kept = pending.PendingEpoch(tmp_path, Runtime(), {})
    kept._mark = {"complete": True, "processes": 1}
    rows = [Row(Prompt(0, ""), number) for number in numbers]
    assert (kept.recall([rows[:2], rows[2:]]) is not None) == fits


@pytest.mark.campaign
def test_ranks_keep_their_samples_and_share_the_answers(tmp_path: Path, whole: Whole) -> None:
    """Another number of processes samples again, and asks nothing twice."""
    expected, questions = whole
    for world in (2, 1):
        server, run = LeavingServer("503"), tmp_path / f"run-{world}"
        with server.serving(run) as url:
            words = [*settings(url, outage=1), f"out={run}"]
            both = worlds.start(pending_runs.train, words, "", world=2)
            for process in both:
                process.join(120)
            assert [process.exitcode for process in both] == [75, 75]
            assert len(list((run / "pending").glob("rank-*"))) == 4
            server.come_back()
            worlds.run(pending_runs.train, words, "auto", world=world)
        assert server.answered == questions
        left = content(run)
        assert (left["lines"], left["samples"]) == (expected["lines"], expected["samples"])
