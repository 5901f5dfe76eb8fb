"""A judge that goes away: it is retried, and a run that gives up is saved and draws its epoch again.

Runs are of the toy world, whose judge is asked at a server of this process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Handler
from safetensors.torch import load_file
from tiny_runs import metrics, train_policy
from toy_world import toy_config, toy_world

from pacorl.grpo.start import checkpoints
from pacorl.io.files import digests
from pacorl.io.net import UnreachableError
from pacorl.judge import open_judge
from pacorl.judge.http import HttpJudge

pytestmark = [pytest.mark.usefixtures("toy"), pytest.mark.slow]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's own retries are over at once."""
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.01)


class LeavingServer:
    """A judge that leaves a run in its second epoch, or in its last evaluation."""

    def __init__(self, way: str, *, after: str = "epoch-000001.png", answers: int = 15) -> None:
        """
        Args:
            way: how it is away: `refused`, a status, or `hangs`; `never` if it stays.
            after: the file of `samples/` that the run has written when its time comes.
            answers: how many it gives from then on before it goes.
        """
        self.way, self.after, self.answers = way, after, answers
        self.is_away, self.gone = False, threading.Event()
        self.run = Path()
        self._fake = FakeServer(behave=self._behave)
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
                return False
        self._is_away_to(handler)
        return True

    def _is_away_to(self, handler: Handler) -> None:
        if self.way == "hangs":
            time.sleep(6)
            handler.close_connection = True
        else:
            handler.fail(int(self.way.replace("refused", "503")), "the model is loading")


def settings(url: str) -> list[str]:
    return [f"judge.checkpoint={url}#judge", "epochs=2"]


def content(run: Path) -> dict[str, Any]:
    """What a run leaves, without times, counts and addresses."""
    newest = checkpoints(run / "checkpoints")[-1]
    weights = {
        f"{path.parent.name}/{path.stem}/{name}": value
        for path in [*newest.glob("*.safetensors"), *newest.glob("lora/*.safetensors")]
        for name, value in load_file(path).items()
    }
    return {
        "lines": metrics(run),
        "weights": {name: value.tolist() for name, value in weights.items()},
        "samples": digests(run / "samples"),
        "files": sorted(path.name for path in run.iterdir()),
    }


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short limits of a judge's server."""
    for name, value in {"ANSWER_SECONDS": 5.0, "CONCURRENCY": 4}.items():
        monkeypatch.setattr(f"pacorl.judge.http.{name}", value)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage of a second ends a run."""
    monkeypatch.setattr(HttpJudge.wait_for_outages, "__defaults__", (1.0,))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with toy_world():
        run = tmp_path_factory.mktemp("whole") / "run"
        with LeavingServer("never").serving(run) as url:
            train_policy(toy_config(run, *settings(url)))
    return content(run)


def test_a_judge_that_comes_back_in_time_changes_nothing(
    tmp_path: Path, whole: dict[str, Any], caplog: pytest.LogCaptureFixture
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
    assert content(tmp_path / "run") == whole
    (told,) = [record.getMessage() for record in caplog.records if record.name == "pacorl.judge.http"]
    assert url in told
    assert "Connection refused" in told


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("way", ["refused", "503", pytest.param("hangs", marks=pytest.mark.nightly)])
def test_a_run_that_gives_up_is_saved_and_resumed_as_if_undisturbed(
    tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A new run with a wrong address ends with exit code 1: it would fail for ever."""
    server, run = LeavingServer(way), tmp_path / "run"
    with server.serving(run) as url:
        with pytest.raises(UnreachableError) as given_up:
            train_policy(toy_config(run, *settings(url)))
        assert given_up.value.exit_code == 75
        message = str(given_up.value)
        assert message.startswith(f"judge judge at {url} has not answered for ")
        assert "--resume auto" in message
        assert "stopped after epoch 1, and saved" in message
        assert [line["kind"] for line in metrics(run)] == ["evaluation", "epoch"]
        if way == "refused":
            with monkeypatch.context() as patch:
                patch.setitem(open_judge.__kwdefaults__, "startup", 0.0)
                with pytest.raises(UnreachableError, match=r"no judge at \S+: no connection") as resumed:
                    train_policy(toy_config(run, *settings(url)), resume=True)
                with pytest.raises(ConnectionError, match="no judge at") as new:
                    train_policy(toy_config(tmp_path / "new", *settings(url)))
            assert (resumed.value.exit_code, getattr(new.value, "exit_code", 1)) == (75, 1)
        server.come_back()
        train_policy(toy_config(run, *settings(url)), resume=True)
    assert content(run) == whole
