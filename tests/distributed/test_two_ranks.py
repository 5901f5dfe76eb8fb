"""What two ranks must not mix up, in the toy world: on two processes."""

from __future__ import annotations

import json
from pathlib import Path

import toy_ranks
import worlds
from recorded import recorded_epochs
from tiny_runs import metrics
from toy_world import toy_config, toy_world

from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.files import digests


def test_two_ranks_stop_together_and_see_the_scores_of_both(tmp_path: Path) -> None:
    worlds.run(toy_ranks.stop_and_train, tmp_path, world=2)
    zero, one = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert [met.get("stop") for met in (zero, one)] == ["told to stop"] * 2
    assert zero["native threads"] == one["native threads"] == []
    with toy_world(), recorded_epochs() as epochs:
        alone = toy_config(tmp_path / "alone", *toy_ranks.EPOCH)
        PolicyTrainer(alone, rewards={"drawing": toy_ranks.brightness}).train()
    two, one_rank = (metrics(tmp_path / name, "evaluation")[0] for name in ("run", "alone"))
    assert two == one_rank, "the start is equal, so its evaluation is"
    two_files, files = (digests(tmp_path / name / "samples") for name in ("run", "alone"))
    assert two_files.keys() == files.keys()
    for name in files:
        assert two_files[name] == files[name] or not name.startswith("evaluation-000000"), name
    # Scores, samples and advantages of all rows, to the bit.
    assert zero["epochs"] == one["epochs"] == json.loads(json.dumps(epochs))
