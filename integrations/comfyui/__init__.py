"""ComfyUI nodes of `pacorl serve`: check a page, find the panel to draw again, rank candidates, save with a recipe.

Copy this folder into `ComfyUI/custom_nodes`. It needs Python's standard library, NumPy, Pillow and ComfyUI's own torch;
the judge runs in a process of its own, at the address that `address` returns. An IMAGE is a float tensor of shape
(images, height, width, 3) from 0 to 1, a MASK one of (masks, height, width).
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

Fields = dict[str, tuple[Any, ...]]

SERVER, KEY = "PACORL_SERVER", "PACORL_API_KEY"
"""Environment variables of the server's address and key."""
SECONDS = 600.0
"""Most seconds for an answer: a judge on a CPU takes minutes for a page."""
PIXELS = 2**24
"""Pixels of a request's images together; the server takes 64 MB of PNG."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
THEME = ("STRING", {"default": "", "tooltip": "What all panels are to share; empty asks in general."})
LEAST = ("FLOAT", {"default": 0.5, "min": 0.0, "max": 1.0, "step": 0.01, "tooltip": "Least P(Yes) of a panel."})
REFERENCES = ("IMAGE", {"tooltip": "Images of a character that every panel shows; by default the other panels."})
PAGE = ("IMAGE", {"tooltip": "One page, cut into rows and columns; or a batch of panels, with 1 row and 1 column."})
SIDE = ("INT", {"default": 2, "min": 1, "max": 16})
TEXTS = ("STRING", {"multiline": True, "default": "", "tooltip": "What each panel shows, a line each."})


# --- the server --------------------------------------------------------------------------------------------------


def address() -> str:
    """Return the server's address: the environment variable, else `server.txt` beside this file, else this machine.

    No node has it, since a workflow travels inside images, and could name a stranger's server.
    """
    file = Path(__file__).with_name("server.txt")
    text = os.environ.get(SERVER) or (file.read_text("utf-8") if file.is_file() else "") or "http://127.0.0.1:8000"
    text = text.strip().partition("#")[0].rstrip("/").removesuffix("/v1")
    return text if "://" in text else f"http://{text}"


def ask(images: Sequence[Image.Image], *, references: Sequence[Image.Image] = (), **fields: Any) -> dict[str, Any]:
    """Ask the server about images; each of them must show the character of the references, if there are any.

    Raises:
        RuntimeError: with its refusal, or if it does not answer.
    """
    url = f"{address()}/v1/consistency"
    pixels = PIXELS // (len(images) + len(references))
    fields["images"] = [data_url(image, pixels) for image in images]
    if references:
        fields["references"] = {"the character": [data_url(image, pixels) for image in references]}
    body = json.dumps(fields).encode()
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=SECONDS) as answer:
            document: dict[str, Any] = json.load(answer)
            return document
    except urllib.error.HTTPError as error:
        with error:
            text = error.read().decode("utf-8", "replace")
        if error.code == 401:
            raise RuntimeError(f"the judge at {url} asks for its key; set {KEY} before ComfyUI starts") from None
        try:
            text = json.loads(text)["detail"]
        except (ValueError, KeyError, TypeError):
            text = f"status {error.code}"
        raise RuntimeError(f"the judge at {url} refuses: {text}") from None
    except OSError as error:
        raise RuntimeError(f"no judge answers at {url} ({error}); start one with `pacorl serve JUDGE`") from None


def data_url(image: Image.Image, pixels: int) -> str:
    """Encode an image for a request, made smaller if it has more pixels."""
    share = (pixels / (image.width * image.height)) ** 0.5
    if share < 1:
        image = image.resize((int(image.width * share), int(image.height * share)), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


# --- images ------------------------------------------------------------------------------------------------------


def to_images(batch: Any) -> list[Image.Image]:
    """Convert a batch to images, rounded to 8 bits as in ComfyUI's own files."""
    pixels = (np.clip(batch.cpu().numpy(), 0, 1) * 255).round().astype(np.uint8)
    return [Image.fromarray(image) for image in pixels]


def to_batch(images: Sequence[Image.Image]) -> Any:
    """Convert RGB images of one size to a batch."""
    return torch.from_numpy(np.stack([np.asarray(image, np.float32) for image in images]) / 255)


def boxes(width: int, height: int, rows: int, columns: int) -> list[tuple[int, int, int, int]]:
    """List the (left, top, right, bottom) of the panels of a page, row by row, as pacorl cuts it."""
    wide, high = width // columns, height // rows
    corners = [(column * wide, row * high) for row in range(rows) for column in range(columns)]
    return [(left, top, left + wide, top + high) for left, top in corners]


def panels_of(page: Any, rows: int, columns: int) -> list[Image.Image]:
    """Cut the one page, or return the panels of a batch. Raises ValueError for a batch of pages."""
    images = to_images(page)
    if rows * columns == 1:
        return images
    if len(images) > 1:
        raise ValueError(f"{len(images)} pages; give one page, or a batch of panels with 1 row and 1 column")
    return [images[0].crop(box) for box in boxes(*images[0].size, rows, columns)]


def verdict(page: Any, rows: int, columns: int, *, theme: str, least: float, references: Any) -> tuple[int, str]:
    """Return the number of the panel that fails most, from 1, or 0 if all pass; and the verdict as JSON."""
    character = [] if references is None else to_images(references)
    document = ask(panels_of(page, rows, columns), references=character, theme=theme, least=least)
    scores = {}
    for number, panel in enumerate(document["panels"], 1):
        if not panel["passed"]:
            scores[number] = -1.0 if panel["score"] is None else panel["score"]
    return min(scores, key=scores.__getitem__, default=0), json.dumps(document)


# --- nodes -------------------------------------------------------------------------------------------------------


class LoadCharacter:
    """A character's reference images, of the first one's size, its looks in words, and its name."""

    CATEGORY, FUNCTION = "pacorl", "run"
    RETURN_TYPES = ("IMAGE", "STRING", "STRING")
    RETURN_NAMES = ("references", "description", "name")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Fields]:  # noqa: N802
        return {"required": {"folder": ("STRING", {"default": "characters/hero"})}}

    @classmethod
    def IS_CHANGED(cls, folder: str) -> str:  # noqa: N802
        """Return a digest of the folder, by which ComfyUI reads it again after a change."""
        digest = hashlib.sha256()
        for path in sorted(Path(folder).glob("*")):
            if path.name == "card.yaml" or path.suffix.lower() in SUFFIXES:
                digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()

    def run(self, folder: str) -> tuple[Any, str, str]:
        """Read the folder's images and card.yaml. Raises ValueError if there is no character in it."""
        card = Path(folder) / "card.yaml"
        if not card.is_file():
            raise ValueError(
                f"{Path(folder).resolve()} is no character: it has no card.yaml; give the folder's full path"
            )
        images = []
        for path in sorted(Path(folder).iterdir(), key=natural):
            if path.suffix.lower() in SUFFIXES:
                with Image.open(path) as image:
                    images.append(ImageOps.exif_transpose(image).convert("RGB"))
        if not images:
            raise ValueError(f"{folder} has no PNG, JPEG or WebP")
        batch = to_batch([ImageOps.pad(image, images[0].size) for image in images])
        return batch, looks(card.read_text("utf-8")), Path(folder).name


def natural(path: Path) -> tuple[list[int], str]:
    """Sort key of files: by the numbers in their names, then by name."""
    return [int(number) for number in re.findall(r"\d+", path.name)], path.name


def looks(card: str) -> str:
    """Read the description of a card.yaml, and the looks to keep, on one line or on a line each."""
    description = re.search(r"^description:\s*(.+)$", card, re.MULTILINE)
    kept = re.search(r"^keep:(.*\n?(?:[ \t].*\n?)*)", card, re.MULTILINE)
    texts = [description[1].strip(" \"'") if description else ""]
    if kept:
        texts += [text.strip(" \"'") for text in re.findall(r"\w+:\s*([^,}\n]+)", kept[1])]
    return ", ".join(filter(None, texts))


class CheckPage:
    """Whether the panels of a page show the same, the number of the worst one (0 for none), and the verdict as JSON."""

    CATEGORY, FUNCTION = "pacorl", "run"
    RETURN_TYPES = ("BOOLEAN", "INT", "STRING")
    RETURN_NAMES = ("passed", "number", "verdict")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Fields]:  # noqa: N802
        required: Fields = {"page": PAGE, "rows": SIDE, "columns": SIDE, "theme": THEME, "least": LEAST}
        return {"required": required, "optional": {"references": REFERENCES}}

    def run(
        self, *, page: Any, rows: int, columns: int, theme: str, least: float, references: Any = None
    ) -> tuple[bool, int, str]:
        """Check the page. Raises RuntimeError if no judge answers, or it answers a control wrongly."""
        number, document = verdict(page, rows, columns, theme=theme, least=least, references=references)
        return number == 0, number, document


class RepairPage:
    """The page with the number and the mask of the panel to draw again (0 and an empty mask if all pass)."""

    CATEGORY, FUNCTION = "pacorl", "run"
    RETURN_TYPES = ("IMAGE", "MASK", "INT", "STRING")
    RETURN_NAMES = ("page", "mask", "number", "verdict")
    INPUT_TYPES = CheckPage.INPUT_TYPES

    def run(
        self, *, page: Any, rows: int, columns: int, theme: str, least: float, references: Any = None
    ) -> tuple[Any, Any, int, str]:
        """Check the page, and mask its worst panel; of a batch of panels, that panel whole."""
        number, document = verdict(page, rows, columns, theme=theme, least=least, references=references)
        count, height, width = page.shape[:3]
        mask = torch.zeros(count, height, width)
        if number and rows * columns == 1:
            mask[number - 1] = 1
        elif number:
            left, top, right, bottom = boxes(width, height, rows, columns)[number - 1]
            mask[0, top:bottom, left:right] = 1
        return page, mask, number, document


class Rank:
    """The candidates that fit a reference best, best first, and their scores as JSON."""

    CATEGORY, FUNCTION = "pacorl", "run"
    RETURN_TYPES = ("IMAGE", "STRING")
    RETURN_NAMES = ("best", "scores")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Fields]:  # noqa: N802
        keep = ("INT", {"default": 1, "min": 1, "max": 64, "tooltip": "How many of the best go on."})
        return {"required": {"reference": ("IMAGE",), "candidates": ("IMAGE",), "theme": THEME, "keep": keep}}

    def run(self, reference: Any, candidates: Any, theme: str, keep: int) -> tuple[Any, str]:
        """Score the reference, the first of its batch, with each candidate. Raises RuntimeError for a missing score."""
        images = [to_images(reference)[0], *to_images(candidates)]
        document = ask(images, theme=theme, ranking=True)
        ranked = []
        for number, pair in enumerate(document["pairs"]):
            if pair["p_yes"] is None:
                raise RuntimeError(f"candidate {number + 1} has no score: {pair.get('error')}")
            ranked.append({"candidate": number + 1, "p_yes": pair["p_yes"]})
        ranked.sort(key=lambda entry: -entry["p_yes"])
        return candidates[[entry["candidate"] - 1 for entry in ranked[:keep]]], json.dumps(ranked)


class SavePage:
    """Saves a page with its workflow and a recipe, which `pacorl check` and `pacorl generate --from` read."""

    CATEGORY, FUNCTION = "pacorl", "run"
    OUTPUT_NODE = True
    RETURN_TYPES = ()

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Fields]:  # noqa: N802
        prefix = ("STRING", {"default": "page"})
        required: Fields = {"page": ("IMAGE",), "rows": SIDE, "columns": SIDE, "panels": TEXTS, "theme": THEME}
        return {
            "required": {**required, "filename_prefix": prefix},
            "optional": {"verdict": ("STRING", {"forceInput": True})},
            "hidden": {"prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"},
        }

    def run(
        self,
        *,
        page: Any,
        rows: int,
        columns: int,
        panels: str,
        theme: str,
        filename_prefix: str,
        verdict: str = "",
        prompt: Any = None,
        extra_pnginfo: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Write the page into ComfyUI's output folder. Raises ValueError if the texts do not match the panels."""
        import folder_paths  # ComfyUI's own

        texts = [text.strip() for text in panels.splitlines() if text.strip()]
        if texts and len(texts) != rows * columns:
            raise ValueError(f"{len(texts)} lines for {rows * columns} panels; write a line for each")
        chunks = {"Software": "pacorl in ComfyUI", "layout": f"{rows}x{columns}", "panels": json.dumps(texts)}
        chunks |= {"theme": theme, "verdict": verdict}
        chunks |= {"prompt": json.dumps(prompt)} if prompt is not None else {}
        chunks |= {name: json.dumps(value) for name, value in (extra_pnginfo or {}).items()}
        info = PngInfo()
        for name, text in chunks.items():
            info.add_text(name, text)

        width, height = page.shape[2], page.shape[1]
        output = folder_paths.get_output_directory()
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(filename_prefix, output, width, height)
        saved = []
        for number, image in enumerate(to_images(page), counter):
            file = f"{name}_{number:05}_.png"
            image.save(Path(folder) / file, pnginfo=info)
            saved.append({"filename": file, "subfolder": subfolder, "type": "output"})
        return {"ui": {"images": saved}}


NODE_CLASS_MAPPINGS = {
    "PacoLoadCharacter": LoadCharacter,
    "PacoCheckPage": CheckPage,
    "PacoRank": Rank,
    "PacoRepairPage": RepairPage,
    "PacoSavePage": SavePage,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "PacoLoadCharacter": "Load Character (pacorl)",
    "PacoCheckPage": "Check Page (pacorl)",
    "PacoRank": "Rank (pacorl)",
    "PacoRepairPage": "Repair Page (pacorl)",
    "PacoSavePage": "Save Page with Recipe (pacorl)",
}
