"""How many of the project's functions an epoch calls: a reader has to hold them in mind."""

from pathlib import Path

import pytest
from qa.epoch_calls import functions_of_an_epoch


@pytest.mark.slow
def test_an_epoch_calls_no_more_functions_than_today(tmp_path: Path) -> None:
    called = functions_of_an_epoch(tmp_path)
    assert "run_epoch" in called["grpo/epoch.py"]
    assert sum(len(names) for names in called.values()) <= 245
    assert len(called) <= 52
