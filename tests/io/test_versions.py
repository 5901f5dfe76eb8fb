"""The command that adds an extra of pacorl is one that works for this installation."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

from pacorl.io.versions import install_command


class Installed:
    def __init__(self, noted: str | None) -> None:
        self.noted = noted

    def read_text(self, name: str) -> str | None:
        return self.noted if name == "direct_url.json" else None


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'pacorl[serve]'"),
        ({"url": "file:///a%20b/pacorl", "dir_info": {"editable": True}}, "pip install -e '/a b/pacorl[serve]'"),
        ({"url": "file:///pacorl", "dir_info": {}}, "pip install '/pacorl[serve]'"),
        ({"url": "file:///dist/p.whl", "archive_info": {}}, "pip install '/dist/p.whl[serve]'"),
        ({"url": "https://example.org/p.whl", "archive_info": {}}, "pip install 'pacorl[serve]'"),
    ],
)
def test_an_extra_is_installed_from_where_pacorl_came(
    origin: dict[str, object] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = json.dumps(origin) if origin else None
    monkeypatch.setattr("pacorl.io.versions.distribution", lambda name: Installed(noted))
    assert install_command("serve") == command


def test_without_an_installation_the_source_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("pacorl.io.versions.distribution", missing)
    assert install_command("serve") == "pip install -e '.[serve]', in the folder of pacorl's source"
