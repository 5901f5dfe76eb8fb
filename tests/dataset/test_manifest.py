from __future__ import annotations

from pacorl.dataset.manifest import DatasetStep
from pacorl.io.files import write_atomic


def step(folder, **options):
    return DatasetStep(folder, "demo", inputs=[folder / "in.txt"], options=options, seed=1)


def test_other_options_inputs_or_outputs_are_work(tmp_path):
    write_atomic(tmp_path / "in.txt", "in")
    write_atomic(tmp_path / "out.txt", "out")
    step(tmp_path, size=(1, 2)).finish(outputs=[tmp_path / "out.txt"], counts={"rows": 3})
    assert step(tmp_path, size=(1, 2)).counts_if_done() == {"rows": 3}
    assert step(tmp_path, size=(1, 3)).counts_if_done() is None
    for name, content in (("out.txt", "out"), ("in.txt", "in")):
        write_atomic(tmp_path / name, "changed")
        assert step(tmp_path, size=(1, 2)).counts_if_done() is None
        write_atomic(tmp_path / name, content)
