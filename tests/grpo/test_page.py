"""The page that grows with the run."""

import logging
from pathlib import Path

import pytest
from tiny_runs import tiny_run, train_policy

from pacorl.report import page


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
