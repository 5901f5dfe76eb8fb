"""Keys in configs are recognised by name and by form, and nothing else is."""

from __future__ import annotations

import hashlib
import random
import string
from pathlib import Path
from typing import Any

import pytest

from pacorl.config.public import MASK, public
from pacorl.io.documents import read_yaml

ROOT = Path(__file__).parents[2]


def made_up(count: int) -> str:
    """Letters of no key: drawn here, so that no scanner of repositories finds one in this file."""
    return "".join(random.Random(count).choices(string.ascii_letters + string.digits, k=count))


FORMS = [
    "sk-" + made_up(48),
    "gh" + "p_" + made_up(36),
    "ey" + "JhbGciOiJIUzI1NiJ9." + "ey" + "JzdWIiOiIxMjM0In0." + made_up(43),
    "Bearer " + made_up(30),
    "https://me:" + "pass@host.example/v1",
    "https://host.example/v1?api_" + "key=" + made_up(12),
]
HARMLESS = {
    "SHA-256": f"key: {hashlib.sha256(b'x').hexdigest()}",
    "path": "/home/somebody/runs/flux-task-ablation-0.3/checkpoints/step-000120",
    "address": "http://127.0.0.1:8000/v1?model=judge&size=512",
    "prompt": "A risk-adjusted disk-shaped fox, a Bearer token @ home; monkey: banana, key=value, password",
    "key_env": "MY_KEY",
    "tokens": 3,
    "password": None,
}


@pytest.mark.parametrize("key", FORMS)
def test_a_key_is_found_by_its_form(key: str) -> None:
    text = f'{{"a": "before {key} after"}}\n'
    assert public({"args": {"x": [text]}}) == {"args": {"x": [MASK]}}


def test_what_is_no_key_is_left() -> None:
    for document in (HARMLESS, *map(read_yaml, ROOT.glob("configs/**/*.yaml"))):
        assert public(document) == document


@pytest.mark.parametrize("name", ["api_key", "accessToken", "X-Api-Key", "Authorization", "password"])
def test_a_key_is_known_by_its_name(name: str) -> None:
    value: Any = 1234 if name == "password" else "abc"
    assert public({"headers": {name: value}}) == {"headers": {name: MASK}}
