"""What two ranks must not mix up, in the toy world: on two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import toy_ranks
import worlds
from toy_world import toy_config, toy_world

from pacorl.grpo.ledger import read_ledger
from pacorl.grpo.start import checkpoints
from pacorl.grpo.trainer import PolicyTrainer


def test_two_ranks_stop_together_keep_their_generators_and_see_the_scores_of_both(tmp_path: Path) -> None:
    worlds.run(toy_ranks.draw_and_resume, tmp_path, world=2)
    zero, one = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert [met.get("stop") for met in (zero, one)] == ["told to stop"] * 2
    assert [met["credit"] for met in (zero, one)] == ["panel"] * 2
    assert zero["drawn"] != one["drawn"], "the test's reward draws by rank"
    (checkpoint,) = checkpoints(tmp_path / "run" / "checkpoints")
    assert json.loads((checkpoint / "generators.json").read_text()) == [zero["drawn"], one["drawn"]]
    assert [met["restored"] for met in (zero, one)] == [zero["drawn"], one["drawn"]]
    with toy_world():
        alone = toy_config(tmp_path / "alone", *toy_ranks.EPOCH)
        PolicyTrainer(alone, rewards={"drawing": toy_ranks.brightness}).train()
    before, after = (records(tmp_path / name, "evaluation") for name in ("run", "alone"))
    assert before[0] == after[0], "the start is equal, so its evaluation is"
    assert before[1]["files"].keys() == after[1]["files"].keys()
    (two,), (one_rank,) = (records(tmp_path / name, "epoch") for name in ("run", "alone"))
    assert two["scores"] == one_rank["scores"]
    for quantity in ("samples", "scores", "advantages"):
        assert two["hashes"][quantity] == one_rank["hashes"][quantity]


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_ledger(run) if record["kind"] == kind]
