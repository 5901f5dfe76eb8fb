"""`pacorl data`: what is shown before a download, hashes, refusals; no network is reached."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from huggingface_hub.hf_api import DatasetInfo
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.dataset.published import PINNED

COMMIT = "c" * 40
CONTENT = b"pairs of images"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
REPOSITORY = "X-GenGroup/ConsistencyRank-Bench"


def test_a_data_set_of_the_hub_is_described_and_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = DatasetInfo(id=REPOSITORY, sha=COMMIT, cardData={"license": "cc-by-4.0"})
    failures = [httpx2.ConnectError("the connection was lost")]

    def snapshot(source: str, *, revision: str, local_dir: Path, **_: object) -> None:
        assert (source, revision) == (REPOSITORY, COMMIT)
        if failures:
            raise failures.pop()
        (local_dir / "pairs.zip").write_bytes(CONTENT)

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda api, name, **_: info)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    command = ["data", "consistencyrank", "--out", str(tmp_path / "new")]
    assert f"{REPOSITORY} cannot be downloaded: the connection" in str(CliRunner().invoke(app, command).exception)
    assert not (tmp_path / "new").exists()
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    for shown in (REPOSITORY, "cc-by-4.0", COMMIT):
        assert shown in done.stdout
    assert (tmp_path / "new" / "pairs.zip").read_bytes() == CONTENT
    assert not list(tmp_path.glob("*.part"))


def test_records_of_github_are_pinned_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents: dict[str, bytes] = {}

    def answer(request: httpx2.Request) -> httpx2.Response:
        content = contents.get(request.url.path)
        return httpx2.Response(404 if content is None else 200, content=content)

    monkeypatch.setattr("huggingface_hub.get_session", lambda: httpx2.Client(transport=httpx2.MockTransport(answer)))
    names = ("train.jsonl", "test.jsonl")
    pinned = replace(PINNED, on_github={name: (f"folder/{name}", SHA256) for name in names})
    train, test = (f"/{PINNED.source}/{PINNED.revision}/folder/{name}" for name in names)

    contents[train] = CONTENT
    with pytest.raises(OSError, match=r"X-GenGroup/PaCo-RL cannot be downloaded: .*404"):
        pinned.download(tmp_path / "t2is")
    assert not (tmp_path / "t2is").exists()
    contents[test] = CONTENT
    pinned.download(tmp_path / "t2is")
    assert {path.name: path.read_bytes() for path in (tmp_path / "t2is").iterdir()} == dict.fromkeys(names, CONTENT)
    with pytest.raises(ValueError, match="is there already"):
        pinned.download(tmp_path / "t2is")
    contents[train] = b"other"
    with pytest.raises(ValueError, match="differs from its SHA-256"):
        pinned.download(tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()
