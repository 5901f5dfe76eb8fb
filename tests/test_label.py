"""The pilot of docs/label.md runs as it stands, people included."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from annotators import simulate
from dataset_folder import AnnotationServer, free_port
from page_blocks import ROOT, blocks, run_command

from pacorl.dataset.folder import read_answers
from pacorl.records.comparisons import load_comparisons

PAGE = ROOT / "docs" / "label.md"


@pytest.mark.campaign
def test_the_pilot_leads_from_prompts_to_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before, *_ = blocks(PAGE, "bash")
    served, after, *_ = blocks(PAGE, "sh")
    for line in before.lines:
        run_command(shlex.split(line), monkeypatch)
    folder, *options = shlex.split(served.lines[0])[3:]
    with AnnotationServer(Path(folder), *options, port=free_port()) as links:
        url = links["ann"].partition("/join#")[0]
        simulate(url, {name: links[name].rpartition("#")[2] for name in ("ann", "ben")}, noise=0.1)
    for line in after.lines:
        run_command(shlex.split(line), monkeypatch)

    answers = read_answers(Path(folder, "rankings.jsonl"))
    assert len(answers) == 2 * 40
    assert len({answer.group for answer in answers}) == 16
    for split in ("train", "test"):
        assert load_comparisons(Path(folder, "export", f"comparisons_{split}.jsonl"))
