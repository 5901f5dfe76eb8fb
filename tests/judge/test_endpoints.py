from __future__ import annotations

from pathlib import Path

import pytest

from pacorl.config.base import ConfigError
from pacorl.judge.http.endpoints import api_url, load_endpoints, root_url

TWO = """
api_key_env: JUDGE_KEY
judges:
  - {name: base, checkpoint: q, endpoints: ["http://127.0.0.1:8000"]}
  - {name: paco, checkpoint: q, adapter: p, endpoints: ["http://127.0.0.1:8000/v1/", "http://b:1/v1"]}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "judges.yaml"
    path.write_text(text)
    return path


def test_endpoints_are_read(tmp_path: Path) -> None:
    document = load_endpoints(written(tmp_path, TWO))
    assert document.urls == ("http://127.0.0.1:8000/v1", "http://b:1/v1")
    assert [judge.name for judge in document.at("http://127.0.0.1:8000/v1")] == ["base", "paco"]
    assert document.named("paco").adapter == "p"


@pytest.mark.parametrize(
    ("name", "message"), [("", "none is named; choose one of base, paco"), ("x", "'x'; choose one")]
)
def test_a_judge_is_chosen_by_name(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_endpoints(written(tmp_path, TWO)).named(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("judges: []", "at least 1 item"),
        ("judges: [{name: a, endpoints: [localhost]}]", "'localhost' is not a URL"),
        ("judges: [{name: a, endpoints: ['http://me:secret@h']}]", "environment variable"),
        ("judges: [{name: a, endpoint: ['http://h']}]", r"did you mean 'judges\.0\.endpoints'"),
        ("judges: [{name: a, endpoints: ['http://h']}, {name: a, endpoints: ['http://i']}]", "twice"),
        (
            "judges: [{name: a, checkpoint: x, endpoints: ['http://h']}, {name: b, checkpoint: y, endpoints: ['http://h']}]",
            "give each its own endpoint",
        ),
    ],
)
def test_a_faulty_description_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_endpoints(written(tmp_path, text))


def test_a_password_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_endpoints(written(tmp_path, "judges: [{name: a, endpoints: ['http://me:secret@h']}]"))
    assert "secret" not in str(caught.value)


def test_urls_are_of_an_api() -> None:
    assert api_url("http://h:1") == api_url("http://h:1/v1/") == "http://h:1/v1"
    assert api_url("https://gateway/openai/v1") == "https://gateway/openai/v1"
    assert root_url("http://h:1/v1") == "http://h:1"
