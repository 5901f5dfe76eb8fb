"""research/locality.py: the toy generator reads each token alone, so that its panels are local."""

from __future__ import annotations

from pathlib import Path

import pytest
from research.locality import changes_of
from toy_world import toy_config, toy_world

from pacorl.grpo.rollout import Trunk


@pytest.mark.parametrize(
    ("settings", "stochastic"),
    [
        (["objective.name=grpo_clip"], True),
        (["objective.name=diffusion_nft", "sampling.tree={}"], False),
        (["objective.name=diffusion_nft", "sampling.tree={seeds: 2}"], False),
        (["objective.name=diffusion_nft", "sampling.tree={seeds: 1}"], True),
    ],
)
def test_new_noise_of_a_panel_changes_its_own_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], stochastic: bool
) -> None:
    """The step's noise is redrawn if all samples of a group share their initial noise, else that."""
    drawn = []
    grow = Trunk.grow
    monkeypatch.setattr(Trunk, "grow", lambda trunk: drawn.append(trunk.draw.sampler.stochastic) or grow(trunk))
    with toy_world():
        changes = changes_of(toy_config(tmp_path / "run", *settings), groups=1, children=4)
    assert set(drawn) == {stochastic}
    own, rest = zip(*changes, strict=True)
    assert max(map(abs, own)) > 0
    assert rest == pytest.approx([0] * len(changes), abs=1e-9)
