"""Stands in for `vllm serve`: a worker process of its own, /health on the asked port, and the asked trouble.

python fake_vllm.py TROUBLE FOLDER serve CHECKPOINT … --host H --port P
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Health(BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


def main(trouble: str, folder: Path, arguments: list[str]) -> None:
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    port = int(arguments[arguments.index("--port") + 1])
    note = {"pids": [os.getpid(), worker.pid], "arguments": arguments, "environment": dict(os.environ)}
    aside = folder / f"{port}.new"
    aside.write_text(json.dumps(note))
    aside.rename(folder / f"{port}.json")
    if trouble == "dies":
        sys.exit(3)
    if trouble == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if trouble == "never-healthy":
        signal.pause()
    HTTPServer((arguments[arguments.index("--host") + 1], port), Health).serve_forever(0.05)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
