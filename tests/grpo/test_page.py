"""The page that grows with the run."""

import logging
from pathlib import Path

import pytest
from tiny_runs import tiny_run, train_policy

from pacorl.report import page
from pacorl.report.page import write_report


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_the_page_grows_with_the_run(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three epochs, evaluated before and after: pages at 0, at every second epoch, and at the end."""
    seen: list[str] = []

    def spy(run: Path) -> Path:
        path = write_report(run)
        seen.append(path.read_text())
        assert not list(run.glob("report.html.*")), "written aside and renamed"
        return path

    monkeypatch.setattr(page, "write_report", spy)
    monkeypatch.setattr(page, "SHOWN_EVERY", 2)
    config = tiny_run([*small, "epochs=3"])
    train_policy(config)
    assert len(seen) == 3
    start, middle, end = seen
    assert "Generated so far" in start
    assert "--resume auto" in start, "the command that goes on"
    assert "Reward of training samples" in middle
    assert "Reward of training samples" not in start
    assert "Drag the handle" in end
    assert len(start) < len(middle) < len(end)


@pytest.mark.usefixtures("toy")
def test_a_page_that_cannot_be_built_does_not_end_the_run(
    small: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(run: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page, "write_report", full)
    with caplog.at_level(logging.WARNING):
        out = train_policy(tiny_run(small))
    assert sum("report.html was not built" in message for message in caplog.messages) == 2
    assert (out / "adapter" / "adapter_model.safetensors").exists()
