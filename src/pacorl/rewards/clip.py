"""Rewards that CLIP measures: a panel against its text, and aesthetics.

All take the model's own processor (its PIL backend) and fp32 unless told otherwise. Weights load on first use, and
rewards that name one checkpoint share it. Every distinct text is encoded once per call.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from PIL.Image import Image
from torch import Tensor, nn

from pacorl.core.batches import in_batches
from pacorl.core.grid import split
from pacorl.io.pretrained import pretrained
from pacorl.io.terminal import excerpt
from pacorl.rewards.reward import PanelReward, PanelScores, RewardError, check_panels
from pacorl.types import Prompt

CLIP_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
"""The weights that the released code loads through open_clip, as transformers reads them."""
CLIP_L = "openai/clip-vit-large-patch14"
AESTHETIC_HEAD = "sac+logos+ava1-l14-linearMSE.pth"
AESTHETIC_LAYERS = (0, 2, 4, 6, 7)
"""Numbers of the head's linear layers, which follow each other without activations, as published."""
AESTHETIC_SOURCE = "https://github.com/christophschuhmann/improved-aesthetic-predictor"

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(eq=False)
class ClipEncoder:
    """A transformers `CLIPModel`: images and texts → unit vectors, fp32 on the CPU."""

    checkpoint: str
    device: str
    dtype: Dtype

    @cached_property
    def parts(self) -> tuple[Any, Any, Any]:
        """Model, image processor and tokenizer, loaded on first use. Raises OSError if the checkpoint is missing."""
        from transformers import CLIPModel, CLIPTokenizer
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        model = pretrained(CLIPModel, self.checkpoint, dtype=getattr(torch, self.dtype))
        return (
            model.eval().requires_grad_(False).to(self.device),
            pretrained(CLIPImageProcessorPil, self.checkpoint),
            pretrained(CLIPTokenizer, self.checkpoint),
        )

    @torch.inference_mode()
    def images(self, images: Sequence[Image]) -> Tensor:
        """Encode images to (B, C) unit vectors."""
        model, processor, _ = self.parts
        vectors = []
        for chunk in in_batches(images, 32):
            pixels = processor(images=[image.convert("RGB") for image in chunk], return_tensors="pt").pixel_values
            pooled = model.vision_model(pixel_values=pixels.to(model.device, model.dtype)).pooler_output
            vectors.append(_unit(model.visual_projection(pooled)))
        return torch.cat(vectors)

    @torch.inference_mode()
    def texts(self, texts: Sequence[str]) -> Tensor:
        """Encode texts, cut at the model's 77 tokens, to (B, C) unit vectors."""
        model, _, tokenizer = self.parts
        length = model.config.text_config.max_position_embeddings
        # Each distinct text once: prompts of a group repeat.
        row_of = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        vectors = []
        for chunk in in_batches(list(row_of), 64):
            # Padded to full length: else a text's vector would change with its neighbours' lengths, by some 7e-7.
            tokens = tokenizer(chunk, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
            pooled = model.text_model(**tokens.to(model.device)).pooler_output
            vectors.append(_unit(model.text_projection(pooled)))
        return torch.cat(vectors)[[row_of[text] for text in texts]]


# Weak: weights leave the memory together with the last reward that reads them.
_ENCODERS: WeakValueDictionary[tuple[str, ...], ClipEncoder] = WeakValueDictionary()


class ClipReward:
    """Base class of CLIP rewards."""

    def __init__(self, checkpoint: str = CLIP_H, dtype: Dtype = "float32", device: str | torch.device = "cpu") -> None:
        key = (checkpoint, str(device), dtype)
        self.clip = _ENCODERS.get(key) or ClipEncoder(*key)
        _ENCODERS[key] = self.clip

    def load(self) -> object:
        return self.clip.parts

    def models(self) -> list[nn.Module]:
        """Return the modules that run on the device."""
        return [self.clip.parts[0]]


class PanelClipText(ClipReward, PanelReward):
    """CLIP-T: the cosine of a panel and its own text, mean over panels (the paper's prompt reward for sets)."""

    def check(self, prompts: Sequence[Prompt]) -> None:
        check_panels("panel_clip_text", prompts)

    def panel_scores(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[PanelScores]:
        """Score each image, with the cosines of its panels as parts."""
        # All panels in one call: the encoders fill their batches.
        panels, counts = _panels(prompts, images)
        text_PC = self.clip.texts(list(chain(*(prompt.panels for prompt in prompts))))
        scores = []
        for cosine_P in (self.clip.images(panels) * text_PC).sum(1).split(counts):
            cosines = cosine_P.tolist()
            scores.append(PanelScores(fmean(cosines), [cosine / len(cosines) for cosine in cosines]))
        return scores


class Aesthetic(ClipReward):
    """LAION's aesthetic predictor v2 (1 to 10) over CLIP ViT-L/14, mean over panels.

    `head` is the published `.pth`, which exists in no other form and is read as plain tensors.
    """

    def __init__(
        self,
        checkpoint: str = CLIP_L,
        *,
        head: str = AESTHETIC_HEAD,
        dtype: Dtype = "float32",
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(checkpoint, dtype, device)
        self.head_path = Path(head)

    @cached_property
    def head(self) -> list[tuple[Tensor, Tensor]]:
        """Weight and bias of each layer. Raises RewardError if the file is absent or is no such head."""
        return load_aesthetic_head(self.head_path)

    def load(self) -> object:
        return self.head, super().load()

    def check(self, prompts: Sequence[Prompt]) -> None: ...

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        self.load()
        panels, counts = _panels(prompts, images)
        hidden_PC = self.clip.images(panels)
        for weight, bias in self.head:
            hidden_PC = nn.functional.linear(hidden_PC, weight, bias)
        return [fmean(score.tolist()) for score in hidden_PC[:, 0].split(counts)]


def load_aesthetic_head(path: Path) -> list[tuple[Tensor, Tensor]]:
    """Read the weight and bias of each layer of a head. Raises RewardError if the file is missing or is no head."""
    if not path.is_file():
        raise RewardError(
            f"rewards.aesthetic.args.head: {path} is no file; get {AESTHETIC_HEAD} from {AESTHETIC_SOURCE}"
        )
    try:
        # It is a pickle; without `weights_only` it could run code.
        state = torch.load(path, map_location="cpu", weights_only=True)
        layers = []
        for number in AESTHETIC_LAYERS:
            weight = state.pop(f"layers.{number}.weight")
            bias = state.pop(f"layers.{number}.bias")
            layers.append((weight.float(), bias.float()))
        if state:
            raise KeyError(*state)
        return layers
    except (pickle.UnpicklingError, EOFError, KeyError, RuntimeError, ValueError, AttributeError, TypeError) as error:
        raise RewardError(f"{path} is damaged, or has not the predictor's layers ({excerpt(str(error))})") from None


def _panels(prompts: Sequence[Prompt], images: Sequence[Image]) -> tuple[list[Image], list[int]]:
    """Split all images into panels, and count them per image."""
    panels: list[Image] = []
    counts = []
    for prompt, image in zip(prompts, images, strict=True):
        of_image = split(image, prompt.grid)
        panels += of_image
        counts.append(len(of_image))
    return panels, counts


def _unit(rows_BC: Tensor) -> Tensor:
    return nn.functional.normalize(rows_BC.float(), dim=-1).cpu()
