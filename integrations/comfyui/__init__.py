"""ComfyUI nodes: generate sets, judge, check and repair them, rank candidates, split and join grids, load a LoRA.

Copy or link this folder into `ComfyUI/custom_nodes/pacorl`, and install pacorl into ComfyUI's Python. An IMAGE is a
float tensor of shape (images, height, width, channels) from 0 to 1.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from einops import rearrange
from PIL import Image, ImageOps
from torch import Tensor

if TYPE_CHECKING:
    from pacorl import Generator, PacoReward
    from pacorl.gate.check import Check
    from pacorl.gate.scores import Scores

Fields = dict[str, tuple[Any, ...]]

JUDGE = "PACO_JUDGE"
GENERATOR = "PACO_GENERATOR"
THEME = ("STRING", {"default": "", "tooltip": "What all images are to share; empty asks in general."})
LEAST = ("FLOAT", {"default": 0.5, "min": 0.0, "max": 1.0, "step": 0.01, "tooltip": "Least P(same) of an image."})
REFERENCES = ("IMAGE", {"tooltip": "Images of a character that every image shows; by default the other images."})
ROWS = ("INT", {"default": 2, "min": 1, "max": 16})
HOSTS_FILE = "pacorl_hosts.txt"
"""Allowed hosts of judges, one a line, in ComfyUI's user directory, which no workflow can write."""


class Node:
    """Base of all nodes of this pack."""

    CATEGORY = "pacorl"
    FUNCTION = "run"
    REQUIRED: ClassVar[Fields] = {}
    """Name → type and options of each field that has to be set or connected."""
    OPTIONAL: ClassVar[Fields] = {}
    """The same of further fields."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Fields]:  # noqa: N802
        """Return the node's fields."""
        return {"required": cls.REQUIRED, "optional": cls.OPTIONAL}


class LoadJudge(Node):
    """A judge: a checkpoint's folder or hub name, a LoRA of one, a server's URL, or `tiny`."""

    RETURN_TYPES = (JUDGE,)
    RETURN_NAMES = ("judge",)
    REQUIRED: ClassVar[Fields] = {"source": ("STRING", {"default": "X-GenGroup/PaCo-Reward-7B"})}
    OPTIONAL: ClassVar[Fields] = {"model": ("STRING", {"default": ""})}

    def run(self, source: str, model: str = "") -> tuple[PacoReward]:
        """Load the judge; `model` is its name at a server, whose host has to be allowed."""
        from pacorl import PacoReward

        check_hosts(source)
        # ComfyUI executes in inference mode, whose tensors are unusable in later calls outside of it.
        with torch.inference_mode(False):
            return (PacoReward.from_pretrained(source, model=model),)


class ScorePair(Node):
    """P(Yes) of two images, each the first of its batch."""

    RETURN_TYPES = ("FLOAT",)
    RETURN_NAMES = ("p_yes",)
    REQUIRED: ClassVar[Fields] = {"judge": (JUDGE,), "first": ("IMAGE",), "second": ("IMAGE",), "theme": THEME}

    def run(self, judge: PacoReward, first: Tensor, second: Tensor, theme: str) -> tuple[float]:
        """Score the pair; raises RuntimeError with the judge's reason if there is no score."""
        return (judge.score(to_images(first)[0], to_images(second)[0], theme=theme),)


class ScoreSet(Node):
    """The mean P(Yes) over all pairs of a batch, the odd image (from 1; 0 of two), and everything as JSON."""

    RETURN_TYPES = ("FLOAT", "INT", "STRING")
    RETURN_NAMES = ("mean", "odd_one_out", "json")
    REQUIRED: ClassVar[Fields] = {"judge": (JUDGE,), "images": ("IMAGE",), "theme": THEME}

    def run(self, judge: PacoReward, images: Tensor, theme: str) -> tuple[float, int, str]:
        """Score every pair."""
        scores = judge.score_set(to_images(images), theme=theme)
        odd = scores.odd_one_out
        return _mean(scores), odd.image + 1 if odd else 0, json.dumps(scores.to_dict())


class CheckSet(Node):
    """The gate of a batch: whether it passes, the odd image (from 1; 0 for none), and everything as JSON."""

    RETURN_TYPES = ("BOOLEAN", "INT", "STRING")
    RETURN_NAMES = ("passed", "odd_one_out", "json")
    REQUIRED: ClassVar[Fields] = {**ScoreSet.REQUIRED, "least": LEAST}
    OPTIONAL: ClassVar[Fields] = {"references": REFERENCES}

    def run(
        self, judge: PacoReward, images: Tensor, theme: str, least: float, references: Tensor | None = None
    ) -> tuple[bool, int, str]:
        """Check the batch; raises ControlError if the judge answers a control wrongly."""
        checked = _gate(judge, theme, least, references)(to_images(images))
        odd = checked.odd_one_out
        return checked.passed, 0 if odd is None else odd + 1, json.dumps(checked.to_dict())


class RepairSet(CheckSet):
    """A batch with redrawn images in place of failing ones, whether it passes, and the tries as JSON."""

    RETURN_TYPES = ("IMAGE", "BOOLEAN", "STRING")
    RETURN_NAMES = ("images", "passed", "json")
    REQUIRED: ClassVar[Fields] = {
        **CheckSet.REQUIRED,
        "redrawn": ("IMAGE", {"tooltip": "The same images in the same order, from other seeds."}),
    }

    def run(  # type: ignore[override]
        self,
        *,
        judge: PacoReward,
        images: Tensor,
        redrawn: Tensor,
        theme: str,
        least: float,
        references: Tensor | None = None,
    ) -> tuple[Tensor, bool, str]:
        """Replace the worst image until the batch passes; raises ValueError if the batches do not match."""
        from pacorl.generate.repair import repair_set

        # Redrawn images come in batches of the same order.
        count = len(images)
        if len(redrawn) % count or redrawn.shape[1:] != images.shape[1:]:
            raise ValueError(
                f"{len(redrawn)} redrawn images do not match {count} images; give whole batches of one size"
            )
        candidates = to_images(redrawn)
        # Each panel's own redrawn images, each of which is offered once.
        unused = [iter(range(panel, len(redrawn), count)) for panel in range(count)]

        def redraw(panel: int, number: int) -> tuple[Image.Image, dict[str, str]] | None:
            for candidate in unused[panel]:
                return candidates[candidate], {"candidate": str(candidate)}
            return None

        # The gate and the search are those of `pacorl repair`.
        gate = _gate(judge, theme, least, references)
        repair = repair_set(to_images(images), gate=gate, redraw=redraw, tries=len(redrawn))
        # A copy: ComfyUI caches the input for other nodes.
        result = images.clone()
        for panel, attempt in repair.replaced.items():
            result[panel] = redrawn[int(attempt.texts["candidate"])]
        return result, repair.after.passed, json.dumps(repair.to_dict())


class RankCandidates(Node):
    """The candidates that fit a reference best, best first, and their scores as JSON."""

    RETURN_TYPES = ("IMAGE", "STRING")
    RETURN_NAMES = ("best", "scores")
    REQUIRED: ClassVar[Fields] = {
        "judge": (JUDGE,),
        "reference": ("IMAGE",),
        "candidates": ("IMAGE",),
        "theme": THEME,
        "keep": ("INT", {"default": 1, "min": 1, "max": 4096, "tooltip": "How many of the best go on."}),
    }

    def run(
        self, judge: PacoReward, reference: Tensor, candidates: Tensor, theme: str, keep: int
    ) -> tuple[Tensor, str]:
        """Score the reference, the first of its batch, with each candidate."""
        scores = judge.rank([to_images(reference)[0], *to_images(candidates)], theme=theme)
        _mean(scores)  # raises if a score is missing
        order = [pair.second - 1 for pair in scores.ranked]
        ranked = [{"candidate": pair.second, "p_yes": pair.p_yes} for pair in scores.ranked]
        return candidates[order[:keep]], json.dumps(ranked)


class GridSplit(Node):
    """The panels of grid images, row by row."""

    RETURN_TYPES = ("IMAGE",)
    RETURN_NAMES = ("panels",)
    REQUIRED: ClassVar[Fields] = {"grid": ("IMAGE",), "rows": ROWS, "columns": ROWS}

    def run(self, grid: Tensor, rows: int, columns: int) -> tuple[Tensor]:
        """Cut grids into panels; raises ValueError if rows and columns do not divide the sides."""
        height, width = grid.shape[1:3]
        if height % rows or width % columns:
            raise ValueError(
                f"{height}x{width} pixels do not divide into {rows}x{columns} panels; resize the grid first"
            )
        return (rearrange(grid, "b (r h) (c w) k -> (b r c) h w k", r=rows, c=columns),)


class GridJoin(Node):
    """Grid images of panels that all have one size, row by row."""

    RETURN_TYPES = ("IMAGE",)
    RETURN_NAMES = ("grid",)
    REQUIRED: ClassVar[Fields] = {"panels": ("IMAGE",), "rows": ROWS, "columns": ROWS}

    def run(self, panels: Tensor, rows: int, columns: int) -> tuple[Tensor]:
        """Join panels to grids; raises ValueError if the last grid is incomplete."""
        if len(panels) % (rows * columns):
            raise ValueError(f"{len(panels)} panels do not fill grids of {rows}x{columns}")
        return (rearrange(panels, "(b r c) h w k -> b (r h) (c w) k", r=rows, c=columns),)


class LoadCharacter(Node):
    """A character's reference images, of the first one's size, its looks in words, and its folder."""

    RETURN_TYPES = ("IMAGE", "STRING", "STRING")
    RETURN_NAMES = ("references", "description", "folder")
    REQUIRED: ClassVar[Fields] = {"folder": ("STRING", {"default": "characters/hero"})}

    def run(self, folder: str) -> tuple[Tensor, str, str]:
        """Read the folder's images and card.yaml; raises ValueError if there is no character in it."""
        from pacorl.io.images import as_rgb, open_image
        from pacorl.records.characters import find_character

        character = find_character(folder)
        images = []
        for path in character.images:
            images.append(as_rgb(open_image(path), str(path)))
        return from_images([ImageOps.pad(image, images[0].size) for image in images]), character.text, folder


class LoadGenerator(Node):
    """A generator of sets: a diffusers folder, a hub name or `tiny`, perhaps with a run's adapter."""

    RETURN_TYPES = (GENERATOR,)
    RETURN_NAMES = ("generator",)
    REQUIRED: ClassVar[Fields] = {"model": ("STRING", {"default": "black-forest-labs/FLUX.1-dev"})}
    OPTIONAL: ClassVar[Fields] = {
        "adapter": ("STRING", {"default": ""}),
        "memory": (["normal", "low", "lowest"], {"tooltip": "low: int8 blocks; lowest: blocks stay in main memory."}),
    }

    def run(self, model: str, adapter: str = "", memory: str = "normal") -> tuple[Generator]:
        """Load the generator."""
        from pacorl import Generator

        # As for a judge: tensors of inference mode are unusable outside of it.
        with torch.inference_mode(False):
            return (Generator.from_pretrained(model, adapter=adapter, memory=memory),)


class GenerateSet(Node):
    """The images of a set from one sentence that asks for several, perhaps with a character's folder."""

    RETURN_TYPES = ("IMAGE", "STRING")
    RETURN_NAMES = ("images", "panels")
    REQUIRED: ClassVar[Fields] = {
        "generator": (GENERATOR,),
        "text": ("STRING", {"multiline": True, "default": "Generate four images of the same dentist at work."}),
        "seed": ("INT", {"default": 0, "min": 0, "max": 2**53 - 1}),
        "steps": ("INT", {"default": 0, "min": 0, "max": 1000, "tooltip": "0: as published for the model."}),
    }
    OPTIONAL: ClassVar[Fields] = {
        "character": ("STRING", {"default": "", "tooltip": "A folder, or its name in characters/."})
    }

    def run(self, generator: Generator, text: str, seed: int, steps: int, character: str = "") -> tuple[Tensor, str]:
        """Generate the set, and return its images and their texts, one a line.

        Raises:
            ValueError: if the text asks for no set, with a hint.
        """
        from pacorl.core.grid import split
        from pacorl.generate.storyboard import board_prompt, storyboard_of
        from pacorl.records.characters import find_character
        from pacorl.records.panels import write_panels

        board = storyboard_of(write_panels(text), [find_character(character)] if character else [])
        prompt = board_prompt(board, generator.model, max_references=generator.policy.max_references)
        with torch.inference_mode(False):
            (grid,) = generator.sample([prompt], seed, steps=steps or None)
        return from_images(split(grid, prompt.grid)), "\n".join(board.scenes)


class LoadLora(Node):
    """A model with a LoRA of any form on it: a run's `adapter`, a folder, a file, or ORG/NAME on the hub."""

    RETURN_TYPES = ("MODEL",)
    REQUIRED: ClassVar[Fields] = {
        "model": ("MODEL",),
        "source": ("STRING", {"default": "X-GenGroup/PaCo-FLUX.1-dev-Lora"}),
        "strength": ("FLOAT", {"default": 1.0, "min": -10.0, "max": 10.0, "step": 0.01}),
    }

    def run(self, model: Any, source: str, strength: float) -> tuple[Any]:
        """Convert the LoRA to the only form with a scale that ComfyUI reads right, and load it there."""
        import comfy.sd
        import comfy.utils

        from pacorl.models.lora import DIFFUSERS_WEIGHTS, read_lora, write_lora

        with tempfile.TemporaryDirectory() as folder:
            write_lora(Path(folder), read_lora(source))
            weights = comfy.utils.load_torch_file(f"{folder}/{DIFFUSERS_WEIGHTS}", safe_load=True)
        return (comfy.sd.load_lora_for_models(model, None, weights, strength, 0)[0],)


def check_hosts(source: str) -> None:
    """Refuse a judge on a host that is neither this machine nor listed in HOSTS_FILE.

    Untrusted images may contain a workflow, whose judge would receive the user's images.

    Raises:
        ValueError: a host is not allowed; the message names the file and the line to add.
    """
    from urllib.parse import urlsplit

    from pacorl.io.net import is_loopback
    from pacorl.io.terminal import printable
    from pacorl.judge.judge import is_address, split_address

    if not is_address(source):
        return
    for url in split_address(source)[0]:
        host = urlsplit(url).hostname or ""
        if not is_loopback(host) and host not in allowed_hosts():
            raise ValueError(
                f"the judge is at {printable(host)}, and images are not sent to a new host unasked; "
                f"to allow it, add the line {printable(host)} to {hosts_file()}"
            )


def allowed_hosts() -> set[str]:
    """Read the hosts of HOSTS_FILE; empty without the file."""
    from pacorl.io.documents import read_text

    lines = read_text(hosts_file()).splitlines() if hosts_file().is_file() else []
    return {line.strip().lower() for line in lines}


def hosts_file() -> Path:
    """Locate HOSTS_FILE in the user directory of this ComfyUI."""
    import folder_paths  # ComfyUI's own

    return Path(folder_paths.get_user_directory()) / HOSTS_FILE


def to_images(batch: Tensor) -> list[Image.Image]:
    """Convert a batch to images, rounded to 8 bits as in ComfyUI's own files."""
    # On the CPU, where PIL reads it.
    pixels = (batch.clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
    return [Image.fromarray(image) for image in pixels]


def from_images(images: Sequence[Image.Image]) -> Tensor:
    """Convert RGB images of one size to a batch."""
    return torch.stack([torch.from_numpy(np.array(image)) for image in images]) / 255


def _gate(
    judge: PacoReward, theme: str, least: float, references: Tensor | None
) -> Callable[[Sequence[Image.Image]], Check]:
    from pacorl.gate.check import check_set
    from pacorl.gate.score_set import questions_about

    characters = [] if references is None else [("the references", to_images(references))]
    return partial(check_set, judge.judge, least=least, characters=characters, questions=questions_about(theme))


def _mean(scores: Scores) -> float:
    if scores.missing or scores.mean is None:
        raise RuntimeError(f"{len(scores.missing)} pairs have no score, the first because: {scores.missing[0].error}")
    return scores.mean


NODES: dict[str, type[Node]] = {
    "Load judge": LoadJudge,
    "Load character": LoadCharacter,
    "Load generator": LoadGenerator,
    "Generate set": GenerateSet,
    "Score pair": ScorePair,
    "Score set": ScoreSet,
    "Check set": CheckSet,
    "Repair set": RepairSet,
    "Rank candidates": RankCandidates,
    "Grid split": GridSplit,
    "Grid join": GridJoin,
    "Load LoRA of any form": LoadLora,
}
NODE_CLASS_MAPPINGS = {f"Paco{node.__name__}": node for node in NODES.values()}
NODE_DISPLAY_NAME_MAPPINGS = {f"Paco{node.__name__}": f"{title} (pacorl)" for title, node in NODES.items()}
