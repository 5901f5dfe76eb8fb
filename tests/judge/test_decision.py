"""A judge as a decision model of transformers: P(Yes) without pacorl."""

from __future__ import annotations

import gc
import itertools
import json
from pathlib import Path

import pytest
from ports import free_port
from transformers.cli.serve import Serve
from transformers.cli.serving.model_manager import ModelManager

from pacorl.core.questions import consistent, meets_criterion, same_theme
from pacorl.judge.decision import decision_template, save_decision
from pacorl.judge.http import HttpJudge
from pacorl.judge.local import LocalJudge
from pacorl.tiny.world import all_panels, draw
from pacorl.types import Question

SHIPPED = Path(__file__).parents[2] / "configs" / "reward" / "paco_reward_7b.decision.json"


IMAGES = [draw(panel, 32) for panel in all_panels()[::2700][:10]]
TEXTS = (consistent(), same_theme("a red hero"), meets_criterion("The same hat."))
QUESTIONS = [Question(pair, text) for pair in list(itertools.combinations(IMAGES, 2))[:34] for text in TEXTS]


@pytest.fixture(scope="module")
def judge() -> LocalJudge:
    return LocalJudge.from_pretrained("tiny")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its server leaves its loop open
def test_its_server_gives_pacorls_client_the_judges_p_yes(
    tmp_path: Path, judge: LocalJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `transformers serve FOLDER --decision-config FILE`; its own processor needs torchvision."""
    monkeypatch.setattr(ModelManager, "_load_processor", lambda *_, **__: judge.processor)
    judge.model.save_pretrained(tmp_path)
    save_decision(tmp_path, judge.processor)
    port = free_port()
    config = str(tmp_path / "decision.json")
    server = Serve(str(tmp_path), decision_config=config, device="cpu", port=port, non_blocking=True)
    try:
        # The server says that it is up before its socket listens.
        with HttpJudge.connect(f"http://127.0.0.1:{port}#{tmp_path}", startup=30.0) as client:
            served = [verdict.p_yes for verdict in client.verdicts(QUESTIONS)]
    finally:
        server.kill_server()
        del server
        gc.collect()
    here = [verdict.p_yes for question in QUESTIONS for verdict in judge.verdicts([question])]
    assert len(served) >= 100
    assert served == pytest.approx(here, abs=1e-6)


def test_the_released_judge_has_the_chat_turn_of_its_family() -> None:
    """The tiny judge has Qwen2.5-VL's template."""
    shipped = json.loads(SHIPPED.read_text("utf-8"))
    assert shipped["chat_template"] == decision_template(LocalJudge.from_pretrained("tiny").processor)
    assert shipped["labels"] == {"noul": ["Yes", "No"]}
