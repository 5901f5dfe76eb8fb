"""`pacorl data t2is`: hashes and refusals; no network is reached."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx2
import pytest
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.dataset import published

CONTENT = b"records"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def test_records_of_github_are_pinned_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents: dict[str, bytes] = {}

    def answer(request: httpx2.Request) -> httpx2.Response:
        content = contents.get(request.url.path)
        return httpx2.Response(404 if content is None else 200, content=content)

    monkeypatch.setattr("huggingface_hub.get_session", lambda: httpx2.Client(transport=httpx2.MockTransport(answer)))
    names = ("train.jsonl", "test.jsonl")
    monkeypatch.setattr(published, "FILES", {name: (f"folder/{name}", SHA256) for name in names})
    train, test = (f"/{published.SOURCE}/{published.REVISION}/folder/{name}" for name in names)

    contents[train] = CONTENT
    with pytest.raises(OSError, match=r"test\.jsonl cannot be downloaded: .*404"):
        published.download_t2is(tmp_path / "t2is")
    assert not (tmp_path / "t2is").exists()
    contents[test] = CONTENT
    done = CliRunner().invoke(app, ["data", "t2is", "--out", str(tmp_path / "t2is")], catch_exceptions=False)
    assert published.REVISION in done.stdout
    assert {path.name: path.read_bytes() for path in (tmp_path / "t2is").iterdir()} == dict.fromkeys(names, CONTENT)
    with pytest.raises(ValueError, match="is there already"):
        published.download_t2is(tmp_path / "t2is")
    contents[train] = b"other"
    with pytest.raises(ValueError, match="differs from its SHA-256"):
        published.download_t2is(tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()
