"""Whether the hub can be asked is known in seconds, and said with what to do."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
import pytest
from hub_cache import snapshot_in
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects

from pacorl.io.files import write_atomic
from pacorl.io.hub import OF_MODEL, OF_PIPELINE, check_checkpoint, checkpoint_digest


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not offline, at a port that nobody listens on, with an empty cache."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    huggingface_hub.close_session()  # its client remembers whether it was made offline


def test_a_hub_without_network_is_one_line_in_seconds() -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"^nobody/model is not on this machine.*`hf download nobody/model`") as error:
        check_checkpoint("nobody/model", "config.json")
    assert time.monotonic() - started < 60  # the library's tries take minutes
    assert "\n" not in str(error.value)


def test_what_lies_in_the_cache_is_used_without_asking_for_each_file(tmp_path: Path) -> None:
    write_atomic(snapshot_in(tmp_path / "cache", "nobody/model") / "config.json", "{}")
    check_checkpoint("nobody/model", "adapter_config.json", "config.json")
    assert constants.HF_HUB_OFFLINE is True


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^some/folder .*config\.json and no other\.json;"):
        check_checkpoint("some/folder", "config.json", "other.json")
    (tmp_path / "some" / "folder" / "other.json").write_text("{}")
    check_checkpoint("some/folder", "config.json", "other.json")
    for source in ("absent", "some/where/deep", "http://server/v1"):
        with pytest.raises(ValueError, match=f"^there is no {source}: "):
            check_checkpoint(source, "config.json")


def test_a_checkpoint_is_its_weights_and_what_else_decides_its_answers(tmp_path: Path) -> None:
    digests = [checkpoint_digest(str(tmp_path))]
    for name in ("model.safetensors", "chat_template.jinja", "model.safetensors", "README.md"):
        (tmp_path / name).write_text(f"{name} {len(digests)}")
        digests.append(checkpoint_digest(str(tmp_path)))
    assert digests[0] == ""
    assert len(set(digests[:4])) == 4
    assert digests[4] == digests[3]


def test_every_loader_asks_first() -> None:
    from pacorl import Generator, LocalJudge
    from pacorl.judge_training.tuning import source_of
    from pacorl.models.lora import read_lora

    for load in (Generator.from_pretrained, LocalJudge.from_pretrained, read_lora, source_of):
        with pytest.raises(ValueError, match="nobody/model is not on this machine"):
            load("nobody/model")


def test_a_download_fetches_what_is_read() -> None:
    """Repositories have weights again in single files, and CLIP's in other formats."""

    def fetched(options: Sequence[str], files: Sequence[str]) -> set[str]:
        chosen: dict[str, list[str]] = {"--include": [], "--exclude": []}
        for option, pattern in zip(options[::2], options[1::2], strict=True):
            chosen[option].append(pattern.strip("'"))
        return set(filter_repo_objects(files, allow_patterns=chosen["--include"], ignore_patterns=chosen["--exclude"]))

    parts = {"model_index.json", "vae/config.json", "transformer/a-1-of-3.safetensors", "tokenizer_2/spiece.model"}
    single = ["flux1-dev.safetensors", "ae.safetensors", "text_encoders/clip_g.safetensors"]
    assert fetched(OF_PIPELINE, [*parts, *single]) == parts
    model = {"config.json", "merges.txt", "vocab.json", "model.safetensors"}
    others = ["open_clip_pytorch_model.bin", "open_clip_model.safetensors", "tf_model.h5"]
    assert fetched(OF_MODEL, [*model, *others]) == model
