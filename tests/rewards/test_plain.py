"""Rewards without weights: JPEG size, a service behind a URL, somebody's own file, DreamSim's package."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import combinations
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from scored import score
from tiny_runs import JPEG_SIZE

from pacorl.config.reward_section import RewardConfig
from pacorl.core.grid import split
from pacorl.io import outage
from pacorl.rewards import build_rewards, check_rewards
from pacorl.rewards.dream import DreamSim
from pacorl.rewards.http import HttpScorer
from pacorl.testing import check_reward
from pacorl.types import Prompt

# --- JPEG ------------------------------------------------------------------------------------------------------


def test_jpeg_size_is_the_file_s(tmp_path: Path, prompts: list[Prompt], sheets: list[Image.Image]) -> None:
    kilobytes = []
    for number, sheet in enumerate(sheets):
        path = tmp_path / f"{number}.jpg"
        sheet.save(path, quality=95)
        kilobytes.append(path.stat().st_size / 1000)
    configs = [RewardConfig(name=JPEG_SIZE), RewardConfig(name=JPEG_SIZE, label="large", args={"prefer": "large"})]
    built = build_rewards(configs, judge=None)
    assert built["jpeg_size"](prompts, sheets) == [-size for size in kilobytes]
    assert built["large"](prompts, sheets) == kilobytes
    check_reward(built["jpeg_size"], prompts, sheets)
    assert len(set(kilobytes)) > 5


# --- a service -------------------------------------------------------------------------------------------------

Answer = Callable[[dict[str, object]], tuple[int, bytes]]


class Service:
    """A scorer on a real socket that answers as told and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, object]] = []
        self.headers: list[str | None] = []
        self.answer: Answer = lambda asked: (200, json.dumps({"scores": mean_red(asked)}).encode())
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.asked.append(asked)
                service.headers.append(self.headers.get("Authorization"))
                status, body = service.answer(asked)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/score"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@contextmanager
def answering(raw: bytes, *, drip: bool = False) -> Iterator[str]:
    """A server that sends these bytes to whoever asks, and hangs up, or drips for a minute."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.request.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    while self.request.recv(2**20):
                        pass
                self.request.settimeout(5)
                self.request.sendall(raw)
                for _ in range(1200 if drip else 0):
                    self.request.sendall(b" ")
                    time.sleep(0.05)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/score"
        server.shutdown()


def mean_red(asked: dict[str, object]) -> list[float]:
    images = [Image.open(io.BytesIO(base64.b64decode(text))) for text in asked["images"]]  # type: ignore[attr-defined]
    return [float(np.asarray(image)[..., 0].mean()) for image in images]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(outage, "BACKOFF_SECONDS", 0.01)
    started = Service()
    yield started
    started.server.shutdown()
    started.server.server_close()


def test_a_service_scores(service: Service, prompts: list[Prompt], sheets: list[Image.Image]) -> None:
    expected = [float(np.asarray(sheet)[..., 0].mean()) for sheet in sheets]
    assert HttpScorer(service.url, batch=8)(prompts, sheets) == expected
    assert sorted(len(asked["images"]) for asked in service.asked) == [4, 8, 8]  # type: ignore[arg-type]
    assert HttpScorer(service.url, batch=3)(prompts[::-1], sheets[::-1])[::-1] == expected
    shown = service.asked[-1]["prompts"][-1]  # type: ignore[index]
    assert set(shown) == {"id", "text", "theme", "grid", "panels", "criteria"}
    check_reward(HttpScorer(service.url, batch=8), prompts, sheets)


def test_sources_and_key_are_sent(
    service: Service, tmp_path: Path, sheets: list[Image.Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    sheets[0].save(tmp_path / "source.png")
    sheets[1].save(tmp_path / "fox.png")
    prompt = Prompt(id=0, text="edit", sources=(tmp_path / "source.png",), references=(tmp_path / "fox.png",))
    reward = HttpScorer(service.url, key_env="SCORER_KEY")
    with pytest.raises(ValueError, match="SCORER_KEY is not set"):
        reward.load()
    monkeypatch.setenv("SCORER_KEY", "secret")
    reward([prompt], sheets[:1])
    sent = base64.b64decode(service.asked[0]["sources"][0][0])  # type: ignore[index]
    assert sent == (tmp_path / "source.png").read_bytes()
    shown = base64.b64decode(service.asked[0]["references"][0][0])  # type: ignore[index]
    assert shown == (tmp_path / "fox.png").read_bytes()
    assert service.headers == ["Bearer secret"]


def test_what_fails_for_a_while_is_tried_again(service: Service, sheets: list[Image.Image]) -> None:
    good = service.answer
    service.answer = lambda asked: good(asked) if len(service.asked) > 2 else (503, b"busy")
    assert HttpScorer(service.url)([Prompt(id=0, text="a")], sheets[:1]) == [
        float(np.asarray(sheets[0])[..., 0].mean())
    ]
    assert len(service.asked) == 3


def test_what_fails_for_good_is_missing(service: Service, sheets: list[Image.Image]) -> None:
    service.answer = lambda asked: (500, b"")
    reward = HttpScorer(service.url, tries=3)
    table = score({"mine": reward}, [Prompt(id=0, text="a")], sheets[:1])
    assert not table.valid_RB.any()
    assert len(service.asked) == 3
    assert "HTTP 500" in reward.last_error


WIRE_FAULTS = {
    "no JSON": b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>",
    "deep JSON": b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100_000,
    "a large body": b"HTTP/1.1 200 OK\r\nContent-Length: 1048577\r\n\r\n" + b" " * 1_048_577,
    "nothing": b"",
}


@pytest.mark.parametrize("name", WIRE_FAULTS)
def test_no_fault_of_the_wire_ends_a_run(name: str, sheets: list[Image.Image]) -> None:
    with answering(WIRE_FAULTS[name]) as url:
        reward = HttpScorer(url, tries=1, timeout=5)
        assert reward([Prompt(id=0, text="a")], sheets[:1]) == [None]
    assert reward.last_error.startswith(f"{url}: ")
    assert len(reward.last_error) < 500


def test_a_redirect_is_refused_and_the_key_stays_here(
    service: Service, sheets: list[Image.Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCORER_KEY", "secret")
    redirect = f"HTTP/1.1 302 Found\r\nLocation: {service.url}?token=x\r\nContent-Length: 0\r\n\r\n".encode()
    with (
        answering(redirect) as url,
        pytest.raises(ValueError, match=r"HTTP 302; redirects are not followed, name ") as told,
    ):
        HttpScorer(url, key_env="SCORER_KEY")([Prompt(id=7, text="a fox")], sheets[:1])
    assert service.asked == []
    assert "token=x" not in str(told.value)


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"9" * 400])
def test_what_is_no_number_in_json_is_missing(service: Service, sheets: list[Image.Image], number: bytes) -> None:
    service.answer = lambda asked: (200, b'{"scores": [' + number + b"]}")
    reward = HttpScorer(service.url, tries=2)
    assert reward([Prompt(id=7, text="a fox")], sheets[:1]) == [None]
    assert "not JSON" in reward.last_error


@pytest.mark.parametrize("value", [10**400, True, "0.5"])
def test_a_score_is_a_number(value: object, sheets: list[Image.Image]) -> None:
    with pytest.raises(ValueError, match="a score is a finite number"):
        score({"mine": lambda prompts, images: [value]}, [Prompt(id=7, text="a fox")], sheets[:1])  # type: ignore[dict-item]


def test_one_deadline_holds_for_a_body_that_drips(sheets: list[Image.Image]) -> None:
    start = time.monotonic()
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n", drip=True) as url:
        reward = HttpScorer(url, tries=1, timeout=0.3)
        assert reward([Prompt(id=0, text="a")], sheets[:1]) == [None]
    assert "no answer within 0.3 s" in reward.last_error
    assert time.monotonic() - start < 45  # the body takes a minute


def test_a_null_is_missing(service: Service, sheets: list[Image.Image]) -> None:
    service.answer = lambda asked: (200, b'{"scores": [null]}')
    assert HttpScorer(service.url)([Prompt(id=0, text="a")], sheets[:1]) == [None]


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b'{"scores": [1, 2]}', r"answered 2 scores for 1 images \(prompt 7, 'a fox'\)"),
        (200, b'{"scores": 3}', 'answered no {"scores": .*} for 1 images'),
        (200, b'{"scores": [true]}', "reward 'mine' returned True for prompt 7"),
        (200, b'{"scores": ["0.5"]}', "reward 'mine' returned '0.5' for prompt 7"),
        (200, b'{"scores": ["good"]}', "reward 'mine' returned 'good' for prompt 7"),
        (404, b"no such route", "refused prompt 7, 'a fox': HTTP 404 no such route"),
    ],
)
def test_what_no_retry_mends_names_the_record(
    service: Service, sheets: list[Image.Image], status: int, body: bytes, message: str
) -> None:
    service.answer = lambda asked: (status, body)
    with pytest.raises(ValueError, match=message):
        score({"mine": HttpScorer(service.url)}, [Prompt(id=7, text="a fox")], sheets[:1])
    assert len(service.asked) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, r"rewards\.http\.args: 'url' is missing"),
        ({"url": "scorer:80"}, r"url: 'scorer:80' is not a URL such as"),
        ({"url": "http://me:secret@host/"}, "at host may hold a password or a key; leave the user"),
        ({"url": "http://sk-secret@host/"}, "at host may hold a password or a key"),
        ({"url": "http://host/score?token=secret"}, "at host may hold a password or a key"),
        ({"url": "http://host/", "tries": 0}, "args.tries must be above 0, got 0"),
        ({"url": "http://host/", "batch": "many"}, r"args\.batch: .*integer.* \(got 'many'\)"),
        ({"url": "http://host/", "retries": 3}, "unknown argument 'retries'; it takes url, batch"),
    ],
)
def test_arguments_are_checked_before_anything(args: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rewards([RewardConfig(name="http", args=args)])


# --- one's own file --------------------------------------------------------------------------------------------

OWN = """
import numpy as np

def redness(prompts, images, *, gain: float = 1.0):
    return [gain * float(np.asarray(image)[..., 0].mean()) for image in images]

class Picky:
    def __init__(self, judge, words: list[str], device="cpu"):
        self.judge, self.words, self.device = judge, words, device

    def check(self, prompts):
        for prompt in prompts:
            if not prompt.theme:
                raise ValueError(f"prompt {prompt.id} has no theme")

    def __call__(self, prompts, images):
        return [1 / (len(prompt.text) - 5) for prompt in prompts]

def short(prompts, images):
    return [1.0]

def sure(prompts, images):
    return [float("nan") for _ in images]
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def build(name: str, **args: object) -> dict[str, object]:
    config = RewardConfig(name=name, args=args)
    check_rewards([config])
    return dict(build_rewards([config], judge="the judge"))  # type: ignore[arg-type]


def test_a_function_of_one_s_own(own: Path, prompts: list[Prompt], sheets: list[Image.Image]) -> None:
    built = build(f"{own}:redness", gain=2)
    expected = [2 * float(np.asarray(sheet)[..., 0].mean()) for sheet in sheets]
    assert list(built) == ["redness"]
    assert built["redness"](prompts, sheets) == expected  # type: ignore[operator]
    assert built["redness"](prompts[3:5], sheets[3:5]) == expected[3:5]  # type: ignore[operator]


def test_a_class_of_one_s_own_is_given_the_judge(own: Path) -> None:
    reward = build(f"{own}:Picky", words=["a"])["Picky"].reward  # type: ignore[attr-defined]
    assert (reward.judge, reward.words, reward.device) == ("the judge", ["a"], "cpu")


def test_its_faults_name_line_and_record(own: Path, sheets: list[Image.Image]) -> None:
    picky = build(f"{own}:Picky", words=["a"])
    with pytest.raises(
        ValueError, match="Picky', line 14: ValueError while checking the prompts: prompt 3 has no theme"
    ):
        picky["Picky"].check([Prompt(id=3, text="a")])  # type: ignore[attr-defined]
    batch = [Prompt(id=1, text="long enough"), Prompt(id=2, text="seven")]
    with pytest.raises(ValueError, match="line 17: ZeroDivisionError on prompt 2, 'seven'"):
        score(picky, batch, sheets[:2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'short' returned 1 scores for 2 images \(prompts 1, 2"):
        score(build(f"{own}:short"), batch, sheets[:2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'sure' returned nan for prompt 1, 'long enough'"):
        score(build(f"{own}:sure"), batch, sheets[:2])  # type: ignore[arg-type]


# --- DreamSim --------------------------------------------------------------------------------------------------


def test_dreamsim_is_called_as_its_readme_says(
    prompts: list[Prompt], sheets: list[Image.Image], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in of the documented calls: `model, preprocess = dreamsim(…)`, an image to (1, 3, 224, 224) in [0, 1],
    `model(first, second)` to a distance; like the package it makes one folder for its weights, and not its parents.
    """
    asked: list[dict[str, object]] = []

    def dreamsim(pretrained: bool = True, device: str = "cuda", cache_dir: str = "./models", **more: object) -> object:
        Path(cache_dir).mkdir()
        asked.append({"pretrained": pretrained, "device": device, **more})
        return distance, preprocess

    def preprocess(picture: Image.Image) -> torch.Tensor:
        pixels = np.asarray(picture.convert("RGB").resize((224, 224)), dtype=np.float32) / 255
        return torch.from_numpy(pixels).permute(2, 0, 1)[None]

    def distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        assert first.shape == second.shape == (1, 3, 224, 224)
        return (first - second).abs().mean((1, 2, 3))

    monkeypatch.setitem(sys.modules, "dreamsim", SimpleNamespace(dreamsim=dreamsim))  # type: ignore[arg-type]
    reward = DreamSim(variant="dino_vitb16", cache=str(tmp_path / "new" / "folders"), device="cpu")
    found = reward(prompts, sheets)
    expected = [
        fmean(1 - float(distance(preprocess(a), preprocess(b))) for a, b in combinations(split(sheet, prompt.grid), 2))
        for prompt, sheet in zip(prompts, sheets, strict=True)
    ]
    assert found == pytest.approx(expected, abs=1e-6)
    check_reward(reward, prompts, sheets)
    assert asked == [{"pretrained": True, "device": "cpu", "dreamsim_type": "dino_vitb16"}], "loaded once"
