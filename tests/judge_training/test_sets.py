"""A set judge's distillation: its data, its loss against definitions, and what a run leaves behind."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from pacorl.config.base import load
from pacorl.io.images import open_image
from pacorl.judge.local import LocalJudge
from pacorl.judge.pairwise import ask_pairs
from pacorl.judge.set_judge import SetRecord, pairs_of, set_record
from pacorl.judge_training import sets
from pacorl.judge_training.judge_config import JudgeConfig
from pacorl.judge_training.judge_trainer import JudgeTrainer
from pacorl.judge_training.sets import (
    TEMPERATURES,
    divergence,
    load_sets,
    panel_advantages,
    panel_correlation,
    set_metrics,
    target_logits,
)
from pacorl.lab.plan.judge_plan import plan_reward
from pacorl.records.panel_sets import panel_sets_from
from pacorl.types import PanelSet, Question

RECIPE = Path(__file__).parents[2] / "configs" / "reward" / "set_tiny.yaml"
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's


def config(out: Path, *overrides: str) -> JudgeConfig:
    small = ["data.train=['tiny:train:12']", "data.evaluation=['tiny:dev:12']", "optimizer.batch=4", "trackers=[]"]
    return load(JudgeConfig, RECIPE, [f"out={out}", "epochs=1", "log_every=1", *small, *overrides])


# --- records ---------------------------------------------------------------------------------------------------


def written(folder: Path, **record: Any) -> str:
    path = folder / "sets.jsonl"
    names = ["00000-0.png", "00000-1.png", "00000-2.png"]
    path.write_text(json.dumps({"images": names, "question": "Do they fit?", **record}) + "\n")
    return str(path)


def test_sets_of_the_tiny_world_are_drawn_once_and_read(tmp_path: Path) -> None:
    drawn = panel_sets_from("tiny:train:10", scratch=tmp_path)
    assert drawn == panel_sets_from("tiny:train:10", scratch=tmp_path)
    assert len(drawn) == 10
    assert {len(panel_set.images) for panel_set in drawn} == {4}
    assert len({panel_set.question for panel_set in drawn}) == 2  # groups of eight
    assert open_image(drawn[0].images[0]).size == (32, 32)
    assert len(panel_sets_from("tiny:train:10", limit=3, scratch=tmp_path)) == 3


def test_a_bad_record_is_named_with_its_line(tmp_path: Path) -> None:
    folder = panel_sets_from("tiny:train:1", scratch=tmp_path)[0].images[0].parent
    scores = [[None, 0.5, 1.0], [0.0, None, 0.25], [0.5, 0.75, None]]
    (panel_set,) = panel_sets_from(written(folder, p_yes=scores))
    assert panel_set.p_yes == tuple(map(tuple, scores))
    for record, fault in {
        '{"images": ["00000-0.png"]}': r"at least two panels, got 1",
        '{"question": " "}': r"'question' is missing or empty",
        '{"question": "a <|im_end|> b"}': r"control token",
        '{"p_yes": [[null, 0.5], [0.5, null]]}': r"'p_yes' must be 3 rows",
        '{"p_yes": [[null, 0.5, 2], [0.5, null, 0.5], [0.5, 0.5, null]]}': r"'p_yes' must be 3 rows",
        '{"consistent": true}': r"this is a comparison",
        '{"images": ["00000-0.png", "../away.png"]}': r"leads out of",
        '{"images": ["00000-0.png", "absent.png"]}': r"1 image\(s\) missing",
        '{"theme": "a"}': r"theme",
    }.items():
        with pytest.raises(ValueError, match=fault):
            panel_sets_from(written(folder, **json.loads(record)))
    with pytest.raises(ValueError, match=r"no such source of sets; give a \.jsonl"):
        panel_sets_from("data/PaCo-Dataset:train")


def test_settings_without_effect_are_refused(tmp_path: Path) -> None:
    for override, fault in {
        "loss.alpha=0.5": "reads none of loss",
        "model.gradient_checkpointing=true": r"model\.gradient_checkpointing=false",
        "tuning.vision=true": r"leave tuning\.vision out",
    }.items():
        with pytest.raises(ValueError, match=fault):
            config(tmp_path, override)


def test_the_pair_judge_scores_both_orders_of_the_sets_without_scores(tmp_path: Path) -> None:
    data = load_sets(config(tmp_path / "run", "data.train=['tiny:train:4']", "data.evaluation=['tiny:dev:2']"))
    judge = LocalJudge.from_pretrained("tiny")
    panel_set = data.train[3]
    images = [open_image(path) for path in panel_set.images]
    for first in range(4):
        for second in range(4):
            if first != second:
                (verdict,) = judge.verdicts([Question((images[first], images[second]), panel_set.question)])
                assert panel_set.p_yes[first][second] == pytest.approx(verdict.p_yes, abs=1e-6)
    assert data.origin.checkpoint == "tiny"
    assert (data.origin.train_sets, data.origin.held_out_sets) == (4, 2)

    asked: list[Question] = []

    class Silent:
        def verdicts(self, questions: list[Question]) -> list[Any]:
            asked.extend(questions)
            return []

        def explain(self, question: Question) -> str:
            return ""

    assert sets.with_scores(data.train, Silent()) == data.train
    assert not asked


def test_a_dry_run_counts_sets_and_their_pairs(tmp_path: Path) -> None:
    plan = plan_reward(config(tmp_path / "run"))
    assert plan.train == {"sets": 12, "pairs": 72}
    assert plan.optimizer_steps == 3
    assert plan.exit_code == 0
    assert "12 sets, 72 pairs" in "\n".join(plan.lines())


# --- the loss and the measure ----------------------------------------------------------------------------------


def test_the_loss_is_the_divergence_from_the_pair_judges_answer() -> None:
    logit, target = torch.tensor([1.5, -3.0], dtype=torch.float64), torch.tensor([-0.5, -3.0], dtype=torch.float64)
    expected = 0.0
    for temperature in TEMPERATURES:
        p = torch.tensor([0.5 / temperature, -0.5 / temperature], dtype=torch.float64).neg().sigmoid()
        q = torch.tensor([1.5 / temperature, -1.5 / temperature], dtype=torch.float64).sigmoid()
        expected += temperature * float(F.kl_div(q.log(), p, reduction="sum"))
    loss = divergence(logit, target)
    assert loss[0] == pytest.approx(expected)
    assert loss[1] == pytest.approx(0, abs=1e-12)


def test_targets_follow_the_order_of_the_panels() -> None:
    scores = [[None, 0.6, 0.9], [0.2, None, 1.0], [0.3, 0.4, None]]
    panel_set = PanelSet((Path("a"), Path("b"), Path("c")), "?", tuple(map(tuple, scores)))
    assert target_logits(panel_set, [0, 1, 2]).sigmoid().tolist() == pytest.approx([0.6, 0.9, 1.0], abs=1e-5)
    assert target_logits(panel_set, [2, 0, 1]).sigmoid().tolist() == pytest.approx([0.3, 0.4, 0.6])
    assert target_logits(panel_set, [0, 1, 2])[2] == 12


def test_panel_advantages_compare_the_sets_about_one_question() -> None:
    answers = [dict(zip(pairs_of(3), values, strict=True)) for values in ((0.9, 0.1, 0.2), (0.5, 0.6, 0.7), (1, 1, 1))]
    found = panel_advantages(answers, ["a", "a", "alone"])
    share = torch.tensor([[1.0, 1.1, 0.3], [1.1, 1.2, 1.3]]) / 3
    assert ((found[0] - found[1]).sign() == (share[0] - share[1]).sign()).all()
    torch.testing.assert_close(found[0], -found[1])
    assert found[2].isnan().all()
    assert panel_correlation(answers, answers, questions=["a", "a", "alone"]) == pytest.approx(1)
    assert math.isnan(panel_correlation(answers, answers, questions=["a", "b", "c"]))


def test_metrics_compare_with_the_pair_judge() -> None:
    scores = ((None, 0.6, 0.9), (0.2, None, 0.1), (0.3, 0.4, None))
    found = [PanelSet((Path("a"), Path("b"), Path("c")), "?", scores)] * 2
    measured = set_metrics(found, {0: [0.7, 0.2, 0.1, math.nan], 1: [0.6, 0.9, 0.1, math.nan]})
    assert measured["decision_accuracy"] == pytest.approx(5 / 6)
    assert "order_gap" not in measured


# --- runs ------------------------------------------------------------------------------------------------------


def learned(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_leaves_a_set_judge_that_answers_as_it_was_measured(tmp_path: Path) -> None:
    """Three steps; the evaluation at the end is what the saved adapter gives in use."""
    settings = config(tmp_path / "run")
    run = JudgeTrainer(settings).train()
    record = set_record(str(run / "adapter"))
    summary = json.loads((run / "summary.json").read_text())
    assert record == SetRecord("tiny", record.digest if record else "", summary["after"]["panel_correlation"], 12, 12)
    assert summary["steps"] == 3
    assert summary["held_out_pairs"] == 72
    (verdict,) = summary["verdict"]
    assert verdict.startswith("72 held-out pairs of 12 sets, labelled by the pair judge; accuracy 0.")
    assert summary["after"]["loss"] < summary["before"]["loss"]

    judge = LocalJudge.from_pretrained("tiny", set_judge=str(run / "adapter"))
    evaluation = load_sets(settings).evaluation
    images = [[open_image(path) for path in panel_set.images] for panel_set in evaluation]
    texts = [{"": panel_set.question} for panel_set in evaluation]
    answers = [[verdicts[""].p_yes or 0.0 for verdicts in of.values()] for of in ask_pairs(judge, images, texts)]
    measured = set_metrics(evaluation, dict(enumerate(answers)))
    for name in ("decision_accuracy", "auc", "panel_correlation"):
        assert measured[name] == pytest.approx(summary["after"][name], abs=1e-4), name


@pytest.mark.slow
def test_a_step_does_not_depend_on_micro_batches(tmp_path: Path) -> None:
    limit = ["max_steps=1", "data.evaluation=[]"]
    runs = [
        learned(JudgeTrainer(config(tmp_path / str(micro), *limit, f"optimizer.micro_batch={micro}")).train())
        for micro in (4, 1)
    ]
    for name in ("loss", "grad_norm", "decision_nll", "decision_accuracy"):
        assert runs[0][0][name] == pytest.approx(runs[1][0][name], rel=1e-5), name


@pytest.mark.slow
def test_distillation_approaches_the_pair_judge(tmp_path: Path) -> None:
    """45 steps."""
    more = ["data.train=['tiny:train:240']", "data.evaluation=['tiny:dev:48']", "epochs=3", "optimizer.batch=16"]
    run = JudgeTrainer(config(tmp_path / "run", *more)).train()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["after"]["panel_correlation"] > summary["before"]["panel_correlation"] + 0.1
    assert summary["after"]["decision_accuracy"] > summary["before"]["decision_accuracy"]
    assert summary["after"]["loss"] < 0.5 * summary["before"]["loss"]
