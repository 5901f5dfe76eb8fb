"""`pacorl data`: what is shown before a download, hashes, refusals; the hub and GitHub are servers on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from pacorl.dataset import published
from pacorl.dataset.published import FOLDERS, PINNED

COMMIT = "c" * 40
CONTENT = b"pairs of images"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
CARD = b"---\nlicense: cc-by-4.0\n---\n"
REPOSITORY = "X-GenGroup/ConsistencyRank-Bench"


class Files(BaseHTTPRequestHandler):
    """Serve a mapping of paths, with the headers of the hub."""

    contents: Mapping[str, bytes] = {}

    def do_GET(self) -> None:
        content = self.contents.get(self.path.partition("?")[0])
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.send_header("ETag", f'"{hashlib.sha256(content or b"").hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content or b"")

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None:
        """Keep quiet."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a server of `Files`."""
    monkeypatch.setattr(Files, "contents", {})
    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as running:
        Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def data(name: str, folder: Path, hub: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own: the hub's address is read at import."""
    env = {**os.environ, "HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "pacorl", "data", name, *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=100)


def hub_contents(content: bytes) -> dict[str, bytes]:
    siblings = [
        {"rfilename": "README.md", "size": len(CARD)},
        {"rfilename": "pairs.zip", "size": len(CONTENT), "lfs": {"sha256": SHA256, "size": 15, "pointerSize": 9}},
    ]
    info = {"id": REPOSITORY, "sha": COMMIT, "siblings": siblings, "cardData": {"license": "cc-by-4.0"}}
    tree = [
        {"type": "file", "path": "README.md", "size": len(CARD), "oid": "1" * 40},
        {"type": "file", "path": "pairs.zip", "size": len(content), "oid": "2" * 40},
    ]
    api = f"/api/datasets/{REPOSITORY}"
    return {
        api: json.dumps(info).encode(),
        f"{api}/revision/{COMMIT}": json.dumps(info).encode(),
        f"{api}/tree/{COMMIT}": json.dumps(tree).encode(),
        f"/datasets/{REPOSITORY}/resolve/{COMMIT}/README.md": CARD,
        f"/datasets/{REPOSITORY}/resolve/{COMMIT}/pairs.zip": content,
    }


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_described_downloaded_and_compared(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Files, "contents", hub_contents(CONTENT))
    done = data("consistencyrank", tmp_path, server)
    assert done.returncode == 0, done.stderr
    for shown in (REPOSITORY, "cc-by-4.0", COMMIT, f"{SHA256}  pairs.zip"):
        assert shown in done.stdout
    assert (tmp_path / FOLDERS["consistencyrank"] / "pairs.zip").read_bytes() == CONTENT

    monkeypatch.setattr(Files, "contents", hub_contents(b"other than it was"))
    damaged = data("consistencyrank", tmp_path, server, "--out", "new")
    assert damaged.returncode == 1
    assert not (tmp_path / "new").exists()

    monkeypatch.setattr(Files, "contents", hub_contents(CONTENT))
    assert data("consistencyrank", tmp_path, server, "--out", "new").returncode == 0
    assert (tmp_path / "new" / "pairs.zip").read_bytes() == CONTENT
    assert not list(tmp_path.glob("*.part"))


def test_records_of_github_are_pinned_and_compared(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "GITHUB", server)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    names = ("train.jsonl", "test.jsonl")
    pinned = replace(PINNED, sha256=dict.fromkeys(names, SHA256), on_github={name: f"folder/{name}" for name in names})
    train, test = (f"/{PINNED.source}/{PINNED.revision}/folder/{name}" for name in names)

    monkeypatch.setattr(Files, "contents", {train: CONTENT})
    with pytest.raises(OSError, match=r"X-GenGroup/PaCo-RL cannot be downloaded: .*404"):
        pinned.download(tmp_path / "t2is")
    assert not (tmp_path / "t2is").exists()
    monkeypatch.setattr(Files, "contents", {train: CONTENT, test: CONTENT})
    pinned.download(tmp_path / "t2is")
    assert {path.name: path.read_bytes() for path in (tmp_path / "t2is").iterdir()} == dict.fromkeys(names, CONTENT)
    with pytest.raises(ValueError, match="is there already"):
        pinned.download(tmp_path / "t2is")
    monkeypatch.setattr(Files, "contents", {train: b"other", test: CONTENT})
    with pytest.raises(ValueError, match="differs from its SHA-256"):
        pinned.download(tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()
    assert [path.name for path in tmp_path.glob(".damaged-*.part/*")] == ["test.jsonl"]
