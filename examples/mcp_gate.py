"""The gate as tools for an agent, by the Model Context Protocol over stdio (docs/judge.md).

pip install mcp
python examples/mcp_gate.py FOLDER JUDGE
"""

import sys
from pathlib import Path
from typing import Any

from pacorl import PacoReward
from pacorl.gate.check import check_set
from pacorl.io.files import inside
from pacorl.io.images import open_image


class Gate:
    """The tools; their docstrings are what an agent reads. A fault is an answer, so that the agent can mend it."""

    def __init__(self, folder: Path, reward: PacoReward) -> None:
        self.folder = folder
        self.reward = reward

    def check(self, images: list[str], least: float = 0.5) -> dict[str, Any]:
        """Check whether all images, two or more files of the folder, show the same, and name the odd one out."""
        try:
            opened = [open_image(inside(self.folder, name)) for name in images]
            return check_set(self.reward.judge, opened, names=images, least=least).to_dict()
        except (ValueError, OSError, RuntimeError) as fault:
            return {"error": str(fault)}

    def rank(self, reference: str, candidates: list[str]) -> dict[str, Any]:
        """Rank candidates, files of the folder, by how well they fit a reference image, best first."""
        try:
            scores = self.reward.score_set(
                [inside(self.folder, each) for each in (reference, *candidates)], ranking=True
            )
            return {"ranked": [{"image": candidates[p.second - 1], "p_yes": p.p_yes} for p in scores.ranked]}
        except (ValueError, OSError, RuntimeError) as fault:
            return {"error": str(fault)}


if __name__ == "__main__":
    try:
        from mcp.server.mcpserver import MCPServer
    except ModuleNotFoundError:
        sys.exit("this example needs mcp: pip install mcp")

    with PacoReward.from_pretrained(sys.argv[2]) as judge:
        gate, server = Gate(Path(sys.argv[1]).resolve(), judge), MCPServer("pacorl")
        server.add_tool(gate.check)
        server.add_tool(gate.rank)
        server.run("stdio")
