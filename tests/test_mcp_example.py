"""The tools of examples/mcp_gate.py, called without a server."""

from __future__ import annotations

import random
from pathlib import Path

from examples.mcp_gate import Gate
from tiny_sets import set_of

from pacorl import PacoReward
from pacorl.tiny.world import draw, with_another

IMAGES = ["1.png", "2.png", "3.png", "4.png"]


def test_an_agent_s_tools_check_and_rank_files_of_their_folder_alone(tmp_path: Path) -> None:
    panels = set_of(("red", "round", "crown", "night"), 4, random.Random(1))
    folder = tmp_path / "comic"
    folder.mkdir()
    for name, panel in zip(IMAGES, [*panels[:3], with_another(panels[3], "hat", random.Random(0))], strict=True):
        draw(panel, 64).save(folder / name)
    draw(panels[0], 64).save(tmp_path / "secret.png")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")

    with PacoReward.from_pretrained("tiny") as reward:
        gate = Gate(folder, reward)
        checked = gate.check(IMAGES)
        assert (checked["passed"], checked["odd_one_out"]) == (False, "4.png")
        assert gate.check(IMAGES[:3])["passed"]
        ranked = gate.rank("1.png", IMAGES[1:])["ranked"]
        assert {entry["image"] for entry in ranked} == {*IMAGES[1:]}
        assert ranked[-1]["image"] == "4.png"
        for name in ("../secret.png", "/etc/passwd", "link.png"):
            assert "leads out of" in gate.check(["1.png", name])["error"]
            assert "leads out of" in gate.rank("1.png", [name])["error"]
        assert "none.png" in gate.check(["1.png", "none.png"])["error"]
