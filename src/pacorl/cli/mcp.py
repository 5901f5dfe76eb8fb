"""`pacorl-mcp`: the gate as tools for agents, by the Model Context Protocol over stdio."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pacorl import __version__, cli
from pacorl.cli.check import CheckJudge
from pacorl.cli.generate import load_generator
from pacorl.cli.repair import RepairGenerator, RepairOptions, redraw_panels
from pacorl.cli.shared import Commands, echo_errors, fault_line, needing
from pacorl.config.options import JudgeOptions, inherited, option

if TYPE_CHECKING:
    from pacorl.generate.generator import Generator
    from pacorl.judge.paco_reward import PacoReward
    from pacorl.judge.scores import Scores

MOST_ENTRIES = 256
"""Of a list among an agent's arguments."""
MOST_TRIES = 100
"""Of a repair."""


class Share:
    """Bounds of a number in a tool's schema; pydantic, which is imported later, calls the method."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        return {**handler(source), "ge": 0, "le": 1}


Least = Annotated[float, Share()] | None

app = Commands(pretty_exceptions_enable=False, add_completion=False)


@dataclass(frozen=True, kw_only=True)
class ToolJudge(JudgeOptions):
    """The judge of all tools."""

    calibration: Path | None = inherited(CheckJudge, "calibration")


@dataclass(frozen=True, kw_only=True)
class ToolFiles:
    """The files that tools may read and write."""

    panel: ClassVar[str] = "Files"

    root: Path = option(Path(), "The folder of all images, characters and results; other files are refused.")


@app.command()
def tools(*, judge: ToolJudge, generator: RepairGenerator, files: ToolFiles) -> None:
    """Serve the tools check, odd_one_out, rank and repair over stdio."""
    from pydantic import ValidationError

    from pacorl.io.quiet import quiet_loading
    from pacorl.judge import check_judge
    from pacorl.judge.calibration import read_calibration
    from pacorl.judge.paco_reward import PacoReward
    from pacorl.runtime.cores import use_cores

    # The protocol's library is an extra.
    with needing("mcp", what="pacorl-mcp"):
        from mcp.server.mcpserver import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError

    class ToolServer(MCPServer):
        """A server whose tool errors have one line; pydantic's about invalid arguments have several."""

        # The library's text of a fault has several lines, and agents get one.
        async def call_tool(self, name: str, *arguments: Any) -> Any:
            try:
                return await super().call_tool(name, *arguments)
            except ToolError as error:
                text = str(error)
                if isinstance(error.__cause__, ValidationError):
                    faults = [
                        f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.__cause__.errors()
                    ]
                    text = f"Error executing tool {name}: {'; '.join(faults)}"
                raise type(error)(" ".join(text.split())) from error.__cause__

    # All arguments, before a judge is loaded.
    if not files.root.is_dir():
        raise ValueError(f"--root {files.root} is no folder; name the folder of the images")
    read_calibration(judge.calibration or "")
    check_judge(judge.judge, adapter=judge.judge_adapter)
    # Loading bars would fill the log of the agent.
    quiet_loading()
    use_cores()

    # Serve until the agent closes the pipe.
    access = {**judge.judge_access, "calibration": judge.calibration or ""}
    with PacoReward.from_pretrained(judge.judge, **access) as reward:
        echo_errors(reward.note)
        toolbox = Toolbox(files.root.resolve(), reward, generator, judge.calibration)
        server = ToolServer("pacorl", version=__version__, log_level="WARNING")
        # Errors of a tool are an answer to the agent, and must not end the server.
        for tool in (toolbox.check, toolbox.odd_one_out, toolbox.rank, toolbox.repair):
            server.add_tool(toolbox.guarded(tool))
        server.run("stdio")


def main() -> None:
    """Run the command line of `pacorl-mcp`."""
    cli.run(app, "pacorl-mcp")


def check_lengths(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for a list that is too long, or too many tries: an agent's arguments are untrusted input."""
    for name, value in arguments.items():
        if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > MOST_ENTRIES:
            raise ValueError(f"{name} has {len(value)} entries; give at most {MOST_ENTRIES} in one call")
    if arguments.get("tries", 1) > MOST_TRIES:
        raise ValueError(f"tries={arguments['tries']}; give at most {MOST_TRIES}")


class Toolbox:
    """The tools. Their docstrings are the descriptions that agents read."""

    def __init__(self, root: Path, reward: PacoReward, options: RepairGenerator, calibration: Path | None) -> None:
        self.root = root
        self.reward = reward
        self._options = options
        self._calibration = calibration
        self._lock = Lock()

    @cached_property
    def _generator(self) -> Generator:
        """The generator, loaded by the first repair."""
        return load_generator(self._options, memory="normal", edits=False)

    def guarded(self, tool: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Wrap a tool: one call at a time, and a fault of the input becomes a tool error."""
        from mcp.server.mcpserver.exceptions import ToolError

        @wraps(tool)
        def call(**arguments: Any) -> dict[str, Any]:
            try:
                check_lengths(arguments)
                # The server calls tools on several threads, and a model answers one call at a time.
                with self._lock:
                    answer = {"judge": self.reward.name, "note": self.reward.note} | tool(**arguments)
                    return dict(self._relative(answer))
            except (ValueError, OSError, RuntimeError) as error:
                # An agent has arguments and no flags, and paths below the root.
                line = fault_line(error).replace(" --", " ").replace(f"{self.root}/", "")
                raise ToolError(line) from None

        return call

    def check(
        self,
        *,
        images: Sequence[str],
        least: Least = None,
        characters: Sequence[str] = (),
        theme: str = "",
        criteria: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Check whether all images show the same, after three controls, and name the odd one out.

        Args:
            images: Files below the root, two or more; one is enough with a character.
            least: Least P(same) of an image, from 0 to 1, e.g. 0.5; by default the calibration's.
            characters: Names or folders of characters. One is in every image; of several, an image shows those that
                its recipe of `pacorl generate` names, else all.
            theme: What all images are to share.
            criteria: Further questions, each in words.
        """
        from pacorl.judge.score_set import open_images

        # Files below the root only: an agent's arguments are untrusted input.
        files, opened, _ = open_images(self._files(images))
        ask = self._asked(least, characters, theme, criteria)
        gate = ask.gate(files, panels=len(opened), calibration=self._calibration, folder=self.root, name="least")
        document: dict[str, Any] = gate(self.reward.judge, opened, names=images).to_dict()
        return document

    def odd_one_out(self, *, images: Sequence[str], theme: str = "") -> dict[str, Any]:
        """Score every pair of images, and name the image that fits the others least.

        Args:
            images: Files below the root, three or more.
            theme: What all images are to share.
        """
        return self._scores(images, theme).to_dict()

    def rank(self, *, reference: str, candidates: Sequence[str], theme: str = "") -> dict[str, Any]:
        """Rank candidates by how well they fit a reference image, best first.

        Args:
            reference: A file below the root.
            candidates: Files below the root.
            theme: What all images are to share.
        """
        scores = self._scores([reference, *candidates], theme, ranking=True)
        ranked = [{"image": scores.names[pair.second], "p_yes": pair.p_yes} for pair in scores.ranked]
        missing = {scores.names[pair.second]: pair.error for pair in scores.missing}
        return {"ranked": ranked, "missing": missing, "calibrated": scores.calibrated}

    def repair(
        self,
        *,
        images: Sequence[str],
        out: str,
        least: Least = None,
        characters: Sequence[str] = (),
        theme: str = "",
        criteria: Sequence[str] = (),
        texts: Sequence[str] = (),
        tries: int = 4,
    ) -> dict[str, Any]:
        """Redraw the worst image until the set passes `check`, or the tries are spent; the originals stay.

        Args:
            images: Files below the root.
            out: A new folder below the root for every try, the repaired set and a page.
            least: Least P(same) of an image, from 0 to 1, e.g. 0.5; by default the calibration's.
            characters: Names or folders of characters, as for `check`; new images are drawn from theirs.
            theme: What all images are to share.
            criteria: Further questions, each in words.
            texts: What each image shows, in order; by default the recipes of `pacorl generate` in the files.
            tries: Redrawn images at most.
        """
        from pacorl.judge.score_set import open_images

        # The options of `pacorl repair`, with paths below the root.
        files, opened, _ = open_images(self._files(images))
        ask = replace(self._asked(least, characters, theme, criteria), text=list(texts))
        gate = ask.gate(files, panels=len(opened), calibration=self._calibration, folder=self.root, name="least")
        # A panel without a text is drawn from the recipe in its PNG.
        options = self._options
        prompts = ask.prompts(files, options.model, kind=options.kind, folder=self.root)
        # The generator is loaded by the first repair, since most agents only check.
        _, document = redraw_panels(
            files,
            opened,
            prompts,
            gate=gate,
            model=self._generator,
            options=options.sized(opened),
            reward=self.reward,
            tries=tries,
            out=self._path(out),
        )
        return document

    def _scores(self, images: Sequence[str], theme: str, *, ranking: bool = False) -> Scores:
        from pacorl.judge.score_set import open_images, questions_about, score_set

        _, opened, _ = open_images(self._files(images))
        return score_set(self.reward.judge, opened, names=images, questions=questions_about(theme), ranking=ranking)

    def _asked(
        self, least: float | None, characters: Sequence[str], theme: str, criteria: Sequence[str]
    ) -> RepairOptions:
        """Resolve the arguments that `check` and `repair` share."""
        from pacorl.records.characters import FOLDER

        # A character's folder is read later; its images must be below the root too.
        for name in characters:
            for folder in (self._path(name), self._path(f"{FOLDER}/{name}")):
                self._files([str(path) for path in folder.glob("*")])
        # A criterion may be a file.
        texts = []
        for text in criteria:
            texts.append(str(self._path(text)) if text.endswith(".json") else text)
        return RepairOptions(character=list(characters), theme=theme, criteria=texts, least=least)

    def _relative(self, value: Any) -> Any:
        """Write paths of an answer relative to the root, as an agent gives them."""
        if isinstance(value, dict):
            return {self._relative(key): self._relative(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [self._relative(entry) for entry in value]
        return value.removeprefix(f"{self.root}/") if isinstance(value, str) else value

    def _files(self, names: Sequence[str]) -> list[str]:
        return [str(self._path(name)) for name in names]

    def _path(self, name: str) -> Path:
        """Resolve a path below the root. Raises ValueError for any other."""
        from pacorl.io.files import inside

        return inside(self.root, os.path.relpath(name, self.root) if os.path.isabs(name) else name)
