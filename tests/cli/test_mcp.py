"""The tools over stdio, called by the protocol's own client, which has only their schemas."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import pytest
from mcp import Client, StdioServerParameters, stdio_client

from pacorl.io.images import png_bytes
from pacorl.tiny.characters import draw, set_of, with_another

SERVER = "from pacorl.cli.mcp import main; main()"
IMAGES = ["1.png", "2.png", "3.png", "4.png"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A character, three sound panels and a wrong one; beside the root, an image and a link to it."""
    drawn = set_of(("red", "round", "crown", "night"), 4, random.Random(1))
    root = tmp_path / "root"
    (root / "characters" / "hero").mkdir(parents=True)
    (root / "characters" / "hero" / "card.yaml").write_text("description: a red round hero\n")
    draw(drawn[0], 64).save(root / "characters" / "hero" / "1.png")
    shown = [*drawn[:3], with_another(drawn[3], "hat", random.Random(0))]
    for name, text, panel in zip(IMAGES, drawn, shown, strict=True):
        recipe = {"Software": "pacorl 0.1.0", "panel": text.text, "seed": "5"}
        (root / name).write_bytes(png_bytes(draw(panel, 64), recipe))
    draw(drawn[0], 64).save(tmp_path / "secret.png")
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "characters" / "thief").mkdir()
    (root / "characters" / "thief" / "card.yaml").write_text("description: a thief\n")
    (root / "characters" / "thief" / "1.png").symlink_to(tmp_path / "secret.png")
    return root


@pytest.mark.slow
def test_the_page_s_client_checks_files(root: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "judge.md").read_text("utf-8")
    (script,) = re.findall(r'```python title="client.py"\n(.*?)```', page, re.DOTALL)
    program = tmp_path / "pacorl-mcp"
    program.write_text(f"#!{sys.executable}\n{SERVER}\n")
    program.chmod(0o755)
    script = script.replace('"pacorl-mcp"', repr(str(program)))
    result = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert result.stdout == "True\n", result.stderr


@pytest.mark.slow
def test_an_agent_lists_the_tools_and_calls_them_by_their_schemas(root: Path) -> None:
    anyio.run(_use_tools, root)


async def _use_tools(root: Path) -> None:
    server = StdioServerParameters(command=sys.executable, args=["-c", SERVER, "--root", str(root)])
    async with Client(stdio_client(server)) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {"check", "odd_one_out", "rank", "repair"}
        assert all("Args:" in str(tool.description) for tool in tools.values())

        async def call(name: str, **arguments: Any) -> Any:
            jsonschema.validate(arguments, tools[name].input_schema)
            answer = await client.call_tool(name, arguments)
            assert not answer.is_error, answer.content
            return answer.structured_content

        async def fault(name: str, **arguments: Any) -> str:
            answer = await client.call_tool(name, arguments)
            assert answer.is_error
            (content,) = answer.content
            assert "\n" not in content.text
            return str(content.text)

        # Answers.
        checked = await call("check", images=IMAGES, least=0.5, characters=["hero"])
        assert (checked["judge"], checked["passed"], checked["odd_one_out"]) == ("tiny", False, "4.png")
        assert (await call("check", images=[str(root / name) for name in IMAGES[:3]], least=0.5))["passed"]
        assert (await call("odd_one_out", images=IMAGES))["lowest_panel"]["image"] == "4.png"
        ranked = await call("rank", reference="1.png", candidates=IMAGES[1:])
        assert ranked["ranked"][-1]["image"] == "4.png", ranked["ranked"]
        assert ranked["calibrated"] is False
        repaired = await call("repair", images=IMAGES, out="repaired", least=0.5, characters=["hero"], tries=12)
        assert repaired["passed"]
        assert repaired["panels"] == [f"repaired/panel-{number}.png" for number in range(1, 5)]
        assert str(root) not in str(repaired)
        assert {path.name for path in (root / "repaired").glob("panel-*.png")} == {
            f"panel-{n}.png" for n in range(1, 5)
        }

        # Faults.
        for name in ("../secret.png", "/etc/passwd", "link.png"):
            assert "leads out of" in await fault("odd_one_out", images=["1.png", name])
        assert "No such file" in await fault("rank", reference="1.png", candidates=["http://127.0.0.1/1.png"])
        assert "leads out of" in await fault("check", images=IMAGES, least=0.5, characters=["thief"])
        assert "leads out of" in await fault("check", images=IMAGES, least=0.5, criteria=["../secret.json"])
        assert "leads out of" in await fault("repair", images=IMAGES, least=0.5, out="../out")
        assert "name a new folder with out" in await fault("repair", images=IMAGES, least=0.5, out="repaired")
        wrong = await fault("check", images="1.png", least="many")
        assert wrong.startswith("Error executing tool check: images: 'str' instances are not allowed")
        assert "; least: Input should be a valid number" in wrong
        assert "http" not in wrong
        assert "300 entries; give at most 256" in await fault("odd_one_out", images=["1.png"] * 300)
        assert "tries=10000; give at most 100" in await fault(
            "repair", images=IMAGES, least=0.5, out="new", tries=10_000
        )
        assert "no threshold" in await fault("check", images=IMAGES)
        assert "1.png beside a drawn figure" in await fault("check", images=IMAGES, least=0)
        assert "less than or equal to 1" in await fault("check", images=IMAGES, least=2)
        assert tools["check"].input_schema["properties"]["least"]["anyOf"][0]["maximum"] == 1
        assert "nothing to be compared with" in await fault("check", images=IMAGES[:1], least=0.5)
