from __future__ import annotations

import pytest

from pacorl.dataset.manifest import DatasetStep
from pacorl.io.files import write_atomic


def step(folder, **options):
    return DatasetStep(folder, "demo", inputs=[folder / "in.txt"], options=options, seed=1)


@pytest.fixture
def finished(tmp_path):
    write_atomic(tmp_path / "in.txt", "in")
    write_atomic(tmp_path / "out.txt", "out")
    step(tmp_path, size=(1, 2)).finish(outputs=[tmp_path / "out.txt"], counts={"rows": 3})
    return tmp_path


def test_a_finished_step_says_so(finished):
    assert step(finished, size=(1, 2)).counts_if_done() == {"rows": 3}


def test_other_options_inputs_or_outputs_are_work(finished):
    assert step(finished, size=(1, 3)).counts_if_done() is None
    write_atomic(finished / "out.txt", "tampered")
    assert step(finished, size=(1, 2)).counts_if_done() is None
    write_atomic(finished / "out.txt", "out")
    write_atomic(finished / "in.txt", "changed")
    assert step(finished, size=(1, 2)).counts_if_done() is None
