"""`pacorl doctor CONFIG`: what ends a run is found before it, each thing with its severity and the exit code."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_server import FakeServer, Handler, completion
from tiny_runs import JPEG_SIZE
from typer.testing import CliRunner, Result

from pacorl.cli import app
from pacorl.config.base import load
from pacorl.config.recipes import recipe
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.lab import doctor
from pacorl.lab.doctor import Diagnosis, Finding, examine
from pacorl.lab.plan import sources
from pacorl.lab.plan.components import Row
from pacorl.lab.plan.plan import Plan

GIB = 2**30


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The quickstart's config as arguments, in a place where no other run listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    return [str(recipe()), f"out={tmp_path / 'run'}"]


def found(result: Result, severity: str) -> list[tuple[str, str]]:
    return [(row["topic"], row["text"]) for row in json.loads(result.stdout)["findings"] if row["severity"] == severity]


@pytest.mark.slow
def test_a_run_that_would_run_is_fine(tiny: list[str]) -> None:
    result = run(*tiny, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["severity"] == "fine"
    topics = {one["topic"] for one in document["findings"]}
    assert topics == {"versions", "ports", "data", "weights", "memory", "disk", "judge"}
    (answer,) = (one["text"] for one in document["findings"] if one["topic"] == "judge")
    assert "P(Yes)" in answer
    assert document["plan"]["peak_bytes"] > 0
    shown = run(*tiny, "--no-ask").stdout
    for part in ("transformer", "device, training", "ok    data", "not asked: --no-ask"):
        assert part in shown


@pytest.mark.slow
def test_absent_weights_and_a_silent_judge_are_errors(tiny: list[str], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = run(
        *tiny,
        "--json",
        "judge.backend=http",
        f"judge.checkpoint=http://127.0.0.1:{port}/v1",
        "judge.model=paco",
        f"adapter.start={tmp_path / 'none'}",
        "rewards=[{name: consistency}, {name: aesthetic, args: {head: none.pth, checkpoint: /none/clip}}]",
    )
    assert result.exit_code == 2
    errors = dict(found(result, "error"))
    assert f"nobody listens at 127.0.0.1:{port}: `pacorl serve CHECKPOINT --name paco --port {port}" in errors["judge"]
    texts = " ".join(text for topic, text in found(result, "error") if topic == "weights")
    for part in ("adapter.start", "rewards.aesthetic.args.checkpoint = /none/clip", "the published head: get it from"):
        assert part in texts
    assert not [text for topic, text in found(result, "fine") if topic == "weights"]


def test_a_reward_without_its_data_is_an_error_and_the_judge_is_asked_all_the_same(tiny: list[str]) -> None:
    result = run(*tiny, "--json", "rewards=[{name: edit_consistency}]")
    assert result.exit_code == 2
    ((topic, text),) = found(result, "error")
    assert topic == "config"
    assert "edit_consistency" in text
    assert [topic for topic, _ in found(result, "fine")][-1] == "judge"


@pytest.mark.slow
def test_a_reward_that_fails_on_an_image_is_an_error(tiny: list[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def broken(prompts, images):\n    raise RuntimeError('no such thing')\n")
    result = run(*tiny, "--json", f"rewards=[{{name: '{mine}:broken'}}, {{name: '{JPEG_SIZE}'}}]")
    assert result.exit_code == 2
    assert [(topic, "no such thing" in text) for topic, text in found(result, "error")] == [("rewards", True)]
    assert ("rewards", "jpeg_size scores a trial image") in found(result, "fine")


def no_judgement(handler: Handler, number: int) -> bool:
    handler.answer(completion({"model": "judge"}, 0.5))
    return True


@pytest.mark.slow
def test_a_judge_that_does_not_judge_deserves_a_look(tiny: list[str]) -> None:
    with FakeServer(behave=no_judgement).running() as server:
        named = ("judge.backend=http", f"judge.checkpoint={server.url}", "judge.model=judge")
        result = run(*tiny, "--json", *named)
        assert result.exit_code == 1, result.output
        (text,) = [text for topic, text in found(result, "warning") if topic == "judge"]
        assert "no more consistent" in text
        alone = run(server.url, "--model", "judge")
        assert alone.exit_code == 1
        assert "problem" in alone.stdout


@pytest.mark.slow
def test_a_port_in_use_and_a_folder_with_a_run_deserve_a_look(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "run" / "checkpoints" / "step-000002").mkdir(parents=True)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        monkeypatch.setenv("MASTER_PORT", str(busy.getsockname()[1]))
        result = run(*tiny, "--json", "--no-ask")
    assert result.exit_code == 1
    assert [topic for topic, _ in found(result, "warning")] == ["ports", "disk"]


# --- memory, disk, versions ------------------------------------------------------------------------------------


def planned(*rows: Row, card: int | None, absences: Sequence[sources.MissingFile] = ()) -> Plan:
    return Plan(rows, tuple(absences), (), "a card", card)


@pytest.mark.parametrize(
    ("needed", "card", "severity"),
    [(30, 80, "fine"), (75, 80, "warning"), (81, 80, "error"), (30, None, "error")],
)
def test_memory_is_held_against_the_card(
    needed: int, card: int | None, severity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row("transformer", needed * GIB, 12 * 10**9)
    found = planned(row, card=card and card * GIB)
    monkeypatch.setattr(doctor, "_main_memory", lambda: 512 * GIB)
    first, second = doctor._memory(found)
    assert (first.severity, second.severity) == (severity, "fine")


def test_main_memory_and_disk_are_held_against_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = (Row("images", 9 * GIB, place="host"), Row("checkpoints", 9 * GIB, place="disk"))
    monkeypatch.setattr(doctor, "_main_memory", lambda: 8 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=8 * GIB))
    _, host = doctor._memory(planned(*rows, card=80 * GIB))
    assert (host.severity, "9.0 GiB of 8.0 GiB main memory" in host.text) == ("error", True)
    _, host = doctor._memory(planned(Row("files", 9 * GIB, place="host", is_file=True), card=80 * GIB))
    assert (host.severity, "; 0 B without pages of the checkpoints' files" in host.text) == ("warning", True)
    disk = doctor._disk(load(PolicyConfig, recipe(), [f"out={tmp_path}"]), planned(*rows, card=80 * GIB))
    assert (disk.severity, "lower keep_checkpoints" in disk.text) == ("error", True)


def test_a_version_that_is_too_old_or_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch>=99", "nonesuch-library>=1", "wandb>=99; extra == 'trackers'", "pillow>=1"]
    monkeypatch.setattr(doctor, "requires", lambda name: wanted)
    faults = doctor._versions()
    assert [fault.severity for fault in faults] == ["error", "error"]
    assert "`pip install 'torch>=99'`" in faults[0].text
    assert "nonesuch-library is not installed" in faults[1].text


def test_a_source_tree_without_an_installation_is_examined_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "requires", absent)
    (finding,) = doctor._versions()
    assert (finding.severity, finding.topic) == ("warning", "versions")
    assert "runs from a source tree" in finding.text


@pytest.mark.parametrize(
    ("cuda", "driver", "severity"),
    [
        ("13.0", "570.86.15", "error"),
        ("13.0", "580.65.06", "fine"),
        ("13.2", "579.99", "error"),
        ("12.8", "520.61.05", "error"),
        ("12.8", "535.183.01", "warning"),
        ("12.8", "570.86.15", "fine"),
        ("12.6", "535.183.01", "fine"),
        ("13.0", "", None),
        (None, "570.86.15", None),
    ],
)
def test_the_driver_is_held_against_the_cuda_of_torch(cuda: str | None, driver: str, severity: str | None) -> None:
    findings = list(doctor._driver(cuda, driver))
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    if severity == "error":
        assert "update the driver to 5" in findings[0].text


def test_the_worst_finding_decides() -> None:
    fine, look, bad = (Finding(severity, "x", "y") for severity in ("fine", "warning", "error"))
    assert [Diagnosis(several, None).severity for several in ((), (fine,), (fine, look), (bad, look, fine))] == [
        *("fine", "fine", "warning", "error")
    ]


# --- what it is given ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("loss: {alpha: 0.1}\n", (), "trains a judge; check it with `pacorl train-reward"),
        ("epochs: 0\n", (), "epochs: Input should be greater than 0"),
        ("epochs: [\n", (), "not valid YAML"),
        ("epochs: 1\n", ("--model", "x"), "is a run's config, which names its judge"),
        ("judges: [{name: a, endpoints: ['http://127.0.0.1:1']}]\n", ("epochs=1",), "only a run's config takes"),
    ],
)
def test_what_cannot_be_examined_is_said(tmp_path: Path, text: str, arguments: tuple[str, ...], message: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    result = run(str(path), *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_an_examination_raises_nothing(tmp_path: Path) -> None:
    config = load(PolicyConfig, recipe(), [f"prompts.train={tmp_path / 'x.jsonl'}", f"out={tmp_path}"])
    (tmp_path / "x.jsonl").write_text("{oops\n")
    found = examine(config, ask=False)
    assert (found.severity, found.plan) == ("error", None)
    assert "x.jsonl:1" in next(one.text for one in found.findings if one.severity == "error")
