"""How much of a slow judge's time is hidden behind sampling: the policy loop's own epochs, with and without overlap.

    python benchmarks/overlap.py                  # judge 300 ms, generator 300 ms, 16 batches an epoch
    python benchmarks/overlap.py --judge 0.6 --rounds 3 --json

A judge behind HTTP answers every question after `--judge` seconds, and each batch takes `--generator` seconds to be
decoded; both wait without taking a core, as a vLLM server and a GPU would. Everything else is the real loop on the
tiny generator. Epochs with `judge.overlap` off and on alternate in one process. An epoch waits for the judge during
`seconds/reward`; hidden is the share of that wait that overlapping takes away. Exits with 1 below 80 %.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from pacorl.config import base as configs
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.quiet import quiet_loading

LEAST = 0.80
PROMPTS, GROUP = 2, 8


def main() -> int:
    options = arguments()
    quiet_loading()
    warnings.filterwarnings("ignore", message=".*model.max_sequence_length.*")
    torch.set_num_threads(1)
    waits: dict[bool, list[float]] = {False: [], True: []}
    wholes: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder, slow_server(options.judge) as url:
        training = prepared(Path(folder), url, options)
        for number in range(options.rounds + 1):
            for overlap in (False, True) if number % 2 else (True, False):
                started = time.perf_counter()
                line = with_overlap(training, wanted=overlap).run_epoch()
                if number:  # the first round warms up
                    waits[overlap].append(line["seconds/reward"])
                    wholes[overlap].append(time.perf_counter() - started)
        training.close()
    result = summary(waits, wholes)
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 0 if result["hidden"] >= LEAST else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge", type=float, default=0.3, help="seconds of an answer")
    parser.add_argument("--generator", type=float, default=0.3, help="seconds of a batch, beside the tiny model's own")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def prepared(folder: Path, url: str, options: argparse.Namespace) -> PolicyTrainer:
    """A run through the same door as any other; its decoder takes its time."""
    settings = {
        "out": folder / "run",
        "prompts_per_epoch": PROMPTS,
        "group_size": GROUP,
        "trackers": "[]",
        "save_every": 1000,
        "model.checkpoint": "tiny",
        "model.dtype": "float32",
        "model.max_sequence_length": 48,
        "model.gradient_checkpointing": "false",
        "adapter.rank": 4,
        "adapter.alpha": 8,
        "prompts.train": f"tiny:train:{PROMPTS}",
        "prompts.evaluation": "tiny:dev:1",
        "sampling.size": "[64,64]",
        "sampling.steps": 2,
        "sampling.batch": 1,
        "evaluation.size": "[64,64]",
        "judge.backend": "http",
        "judge.checkpoint": url,
        "judge.model": "slow",
        "rewards": "[{name: consistency}]",
        "optimizer.updates_per_epoch": 1,
    }
    training = PolicyTrainer(configs.load(PolicyConfig, None, [f"{key}={value}" for key, value in settings.items()]))
    decode = training.policy.decode

    def slowly(*args: Any, **named: Any) -> Any:
        time.sleep(options.generator)
        return decode(*args, **named)

    training.policy.decode = slowly  # type: ignore[method-assign]
    return training


def with_overlap(training: PolicyTrainer, *, wanted: bool) -> PolicyTrainer:
    judge = training.config.judge.model_copy(update={"overlap": wanted})
    training.config = training.config.model_copy(update={"judge": judge})
    return training


@contextmanager
def slow_server(seconds: float) -> Iterator[str]:
    """A judge on a free port that is slow and takes any number of questions at a time."""
    handler = type("Slow", (SlowJudge,), {"seconds": seconds})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


class SlowJudge(BaseHTTPRequestHandler):
    """One request."""

    seconds = 0.3
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None: ...

    def do_GET(self) -> None:
        known = self.path == "/v1/models"
        self.answer({"object": "list", "data": [{"id": "slow", "object": "model"}]}, status=200 if known else 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path != "/v1/chat/completions":
            self.answer({}, status=404)
            return
        time.sleep(self.seconds)
        p_yes = (1 + hash(body) % 98) / 100  # groups must differ, or nothing would be trained
        likely = [{"token": word, "logprob": math.log(p)} for word, p in (("Yes", p_yes), ("No", 1 - p_yes))]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "Yes"},
            "logprobs": {"content": [{**likely[0], "top_logprobs": likely}]},
        }
        self.answer({"model": "slow", "choices": [choice]})

    def answer(self, document: Any, *, status: int = 200) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def summary(waits: dict[bool, list[float]], wholes: dict[bool, list[float]]) -> dict[str, Any]:
    """Means over the rounds."""
    after, beside = statistics.fmean(waits[False]), statistics.fmean(waits[True])
    return {
        "rounds": len(waits[True]),
        "seconds waited for the judge": {"after sampling": round(after, 2), "beside sampling": round(beside, 2)},
        "seconds of an epoch": {
            "after sampling": round(statistics.fmean(wholes[False]), 2),
            "beside sampling": round(statistics.fmean(wholes[True]), 2),
        },
        "hidden": round(1 - beside / after, 3),
    }


def table(result: dict[str, Any]) -> str:
    lines = []
    for what in ("seconds waited for the judge", "seconds of an epoch"):
        shown = ", ".join(f"{value:.2f} {where}" for where, value in result[what].items())
        lines.append(f"{what}: {shown}")
    return "\n".join([*lines, f"hidden: {result['hidden']:.1%} (at least {LEAST:.0%})"])


if __name__ == "__main__":
    sys.exit(main())
