"""A server in a process of its own that receives its worst request while others ask for /health."""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from qa.attack.machine import Moment

ROOT = Path(__file__).parents[2]
PATIENCE = 120
"""Seconds after which an answer is missing."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a request cost, and what became of others meanwhile."""

    status: int
    answer: bytes
    cpu_seconds: float
    """Of the server's process."""
    bytes_more: int
    """Of the most memory that the server's process ever had."""
    healthy: int
    """Answers of /health between the first byte of the request and the last of its answer."""
    slowest: float
    """Seconds of the slowest answer of /health, as on a machine with nothing else to do (`Moment.waited`)."""


@dataclass(slots=True)
class Server:
    """A running server of the project."""

    process: subprocess.Popen[str]
    port: int

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        """Send a request; (status, answer)."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)) as connection:
            with suppress(BrokenPipeError, ConnectionResetError):  # a server need not read what it refuses
                connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def while_others_ask(self, path: str, body: bytes, headers: dict[str, str]) -> Seen:
        """Send a request while another thread polls /health."""
        cpu, peak, others = self.cpu_seconds(), self.peak_bytes(), Others(self)
        with others:
            status, answer = self.post(path, body, headers)
        return Seen(
            status=status,
            answer=answer,
            cpu_seconds=self.cpu_seconds() - cpu,
            bytes_more=self.peak_bytes() - peak,
            healthy=len(others.seconds),
            slowest=max(others.seconds),
        )

    def now(self) -> Moment:
        """What this server and the machine have used up."""
        return Moment.of(self.process.pid)

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def peak_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) * 1024


@dataclass(slots=True)
class Others:
    """Callers of /health, one after the other, while the block runs and once more."""

    server: Server
    seconds: list[float] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __enter__(self) -> None:
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _ask(self) -> None:
        while True:
            start, last = self.server.now(), self._ended.is_set()
            with closing(http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE)) as connection:
                connection.request("GET", "/health")
                assert connection.getresponse().status == 200
            self.seconds.append(self.server.now().waited(start))
            if last:
                return
            self._ended.wait(0.02)


@contextmanager
def running(name: str) -> Iterator[Server]:
    """Start a server of `qa.attack.serving`."""
    paths = [str(ROOT / part) for part in (".", "src", "tests/helpers", "tests/toy")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "qa.attack.serving", name]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            yield Server(process, int(process.stdout.readline().rpartition(":")[2]))
        finally:
            process.kill()
