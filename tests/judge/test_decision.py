"""A judge as a decision model of transformers: P(Yes) without pacorl."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from transformers.decision import DecisionConfig
from transformers.pipelines import DecisionPipeline

from pacorl.core.questions import consistent, meets_criterion, same_theme
from pacorl.judge.decision import decision_template, save_decision
from pacorl.judge.local import LocalJudge
from pacorl.tiny.world import all_panels, draw
from pacorl.types import Question

SHIPPED = Path(__file__).parents[2] / "configs" / "reward" / "paco_reward_7b.decision.json"


@pytest.mark.slow
@pytest.mark.parametrize("as_file", [True, False])
def test_transformers_gives_the_judges_p_yes(tmp_path: Path, as_file: bool) -> None:
    """By the file, as `transformers serve --decision-config` is given it, and by the folder that it serves."""
    judge = LocalJudge.from_pretrained("tiny", share=False)  # one question a forward, as there
    save_decision(tmp_path, judge.processor)
    read = DecisionConfig.from_file if as_file else DecisionConfig.from_pretrained
    decide = DecisionPipeline(
        model=judge.model,
        tokenizer=judge.processor.tokenizer,
        processor=judge.processor,
        decision_config=read(str(tmp_path / "decision.json" if as_file else tmp_path)),
    )
    images = [draw(panel, 32) for panel in all_panels()[::2700][:10]]
    texts = (consistent(), same_theme("a red hero"), meets_criterion("The same hat."))
    pairs = itertools.islice(itertools.combinations(images, 2), 34)
    questions = [Question(pair, text) for pair in pairs for text in texts]
    assert len(questions) >= 100
    for question in questions:
        (verdict,) = judge.verdicts([question])
        assets = {"image-1": question.images[0], "image-2": question.images[1]}
        asked = {"same": {"type": "noul", "instructions": question.text}}
        answer = decide({"state": "image-1image-2", "questions": asked, "assets": assets})
        assert answer["same"]["noul"] == pytest.approx(verdict.p_yes, abs=1e-7)


def test_the_released_judge_has_the_chat_turn_of_its_family() -> None:
    """The tiny judge has Qwen2.5-VL's template."""
    shipped = json.loads(SHIPPED.read_text("utf-8"))
    assert shipped["chat_template"] == decision_template(LocalJudge.from_pretrained("tiny").processor)
    assert shipped["labels"] == {"noul": ["Yes", "No"]}
