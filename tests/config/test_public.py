"""Keys in configs are recognised by name and by form, and nothing else is."""

from __future__ import annotations

import hashlib
import random
import string
from pathlib import Path
from typing import Any

import pytest

from pacorl.config.public import MASK, find_secret, public
from pacorl.io.documents import read_yaml

ROOT = Path(__file__).parents[2]
LETTERS = string.ascii_letters + string.digits


def made_up(count: int, letters: str = LETTERS) -> str:
    """Letters of no key: drawn here, so that no scanner of repositories finds one in this file."""
    return "".join(random.Random(count).choices(letters, k=count))


HEX = made_up(40, "0123456789abcdef")
HEADERS = ("X-Api-Key", "Authorization")
FORMS = {
    "OpenAI": "sk-" + made_up(48),
    "Hugging Face": "hf_" + made_up(34),
    "GitHub, personal": "gh" + "p_" + made_up(36),
    "AWS": "AK" + "IA" + made_up(16, string.ascii_uppercase + string.digits),
    "JWT": "ey" + "JhbGciOiJIUzI1NiJ9." + "ey" + "JzdWIiOiIxMjM0In0." + made_up(43),
    "Bearer": "Bearer " + made_up(30),
    "private key": "-----BEGIN OPENSSH PRIVATE " + "KEY-----",
    "password in an address": "https://me:" + "pass@host.example/v1",
    "key in an address": "https://host.example/v1?api_" + "key=" + made_up(12),
}
HARMLESS = {
    "SHA-256": f"key: {hashlib.sha256(b'x').hexdigest()}",
    "commit": f"revision: {HEX}",
    "adapter": "X-GenGroup/PaCo-FLUX.1-dev-Lora",
    "path": "/home/somebody/runs/flux-task-ablation-0.3/checkpoints/step-000120",
    "address": "http://127.0.0.1:8000/v1?model=judge&size=512",
    "Bearer": "the bearer of news, Bearer authentication, a Bearer token",
    "prompt": "A risk-adjusted disk-shaped desk-mounted fox @ home; monkey: banana, key=value, password",
    "variable": "api_key_env: OPENAI_API_KEY",
}


@pytest.mark.parametrize("name", FORMS)
def test_a_key_is_found_by_its_form(name: str) -> None:
    text = f'{{"a": "before {FORMS[name]} after"}}\n'
    assert find_secret(text)
    assert public({"args": {"x": [text]}}) == {"args": {"x": [MASK]}}


def test_what_is_no_key_is_left() -> None:
    assert public(HARMLESS) == HARMLESS
    for path in ROOT.glob("configs/**/*.yaml"):
        document = read_yaml(path)
        assert public(document) == document, path


@pytest.mark.parametrize(
    ("document", "shown"),
    [
        ({"api_key": "abc"}, {"api_key": MASK}),
        ({"apiKey": "abc", "accessToken": "abc"}, {"apiKey": MASK, "accessToken": MASK}),
        ({"headers": {"X-Api-Key": "abc", "Authorization": "x"}}, {"headers": dict.fromkeys(HEADERS, MASK)}),
        ({"password": 1234, "token": ["a", "b"]}, {"password": MASK, "token": MASK}),
        ({"password": None, "token": ""}, {"password": None, "token": ""}),
        ({"key_env": "MY_KEY", "monkey": "x", "tokens": 3}, {"key_env": "MY_KEY", "monkey": "x", "tokens": 3}),
    ],
)  # fmt: skip
def test_a_key_is_known_by_its_name(document: Any, shown: Any) -> None:
    assert public(document) == shown
