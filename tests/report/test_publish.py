"""Model cards from a run's own files."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from pacorl.cli import app
from pacorl.report.publish import upload_command, write_card


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "dentist"
    (folder / "adapter").mkdir(parents=True)
    config = {
        "out": "/home/somebody/runs/dentist",
        "seed": 3,
        "model": {"checkpoint": "black-forest-labs/FLUX.1-dev", "guidance": 3.5},
        "prompts": {"train": "/home/somebody/data/train.jsonl"},
        "judge": {"checkpoint": "http://10.0.0.5:8000/v1", "model": "PaCo-Reward-7B"},
        "rewards": [{"name": "http", "weight": 0.5, "args": {"api_key": "sk-live-key", "headers": ["Bearer XYZ"]}}],
        "trainer": {"hub_token": "hf_abcdefgh"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    before, after = ({"consistency": {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}} for mean in (0.4, 0.6))
    (folder / "summary.json").write_text(json.dumps({"before": before, "after": after}))
    (folder / "metrics.jsonl").write_text('{"kind": "evaluation", "epoch": 0}\n')
    return folder


def test_a_card_holds_data_figures_licence_and_use(run: Path) -> None:
    text = (write_card(run) / "README.md").read_text()
    header = yaml.safe_load(text.split("---")[1])
    assert header["license_name"] == "flux-1-dev-non-commercial-license"
    assert header["base_model"] == "black-forest-labs/FLUX.1-dev"
    assert "| consistency | 0.400 (0.300 to 0.500) | 0.600 (0.500 to 0.700) | – |" in text
    assert "Trained on: `train.jsonl`." in text
    (command,) = re.findall(r"^pacorl (.+)$", text, re.MULTILINE)
    name, *words = shlex.split(command)
    parsed = typer.main.get_command(app).commands[name].make_context(name, words).params
    assert (parsed["model"], parsed["adapter"]) == ("black-forest-labs/FLUX.1-dev", "OWNER/dentist")
    (code,) = re.findall(r"```python\n(.+?)```", text, re.DOTALL)
    compile(code, "card", "exec")


@pytest.mark.parametrize(
    "section",
    [{}, {"prompts": {"train": "hf_abcdefghij.jsonl"}}, {"model": {"checkpoint": "https://host/x?token=abcdef"}}],
)
def test_a_card_shows_no_secret_and_nothing_of_the_machine(run: Path, section: dict[str, Any]) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text()) | section
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    text = (write_card(run) / "README.md").read_text()
    for private in ("/home", "SECRET_KEY", "10.0.0.5", "sk-live", "Bearer", "hf_", "me:pass", "abcdef"):
        assert private not in text


def test_an_unknown_base_has_no_licence_and_a_card_that_is_there_stays(run: Path) -> None:
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("black-forest-labs/FLUX.1-dev", "my/model"))
    card = write_card(run) / "README.md"
    assert "license" not in yaml.safe_load(card.read_text().split("---")[1])
    card.write_text("My own words.\n")
    write_card(run)
    assert card.read_text() == "My own words.\n"


def test_the_command_uploads_the_adapter_and_its_card_and_nothing_else(run: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors", "notes.txt", "optimizer.pt", ".env"):
        (run / "adapter" / name).write_text("mine")
    words = shlex.split(upload_command(write_card(run)))
    assert words[words.index("--include") + 1 :: 2] == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
