"""Rewards that CLIP measures: a panel against its text, panels against each other, PickScore, and aesthetics.

All take the model's own processor (its PIL backend) and fp32 unless told otherwise. Weights load on first use, and
rewards that name one checkpoint share it. Every distinct image and text is encoded once per call.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from pacorl.core.grid import split
from pacorl.rewards.consistency import check_panels
from pacorl.rewards.reward import RewardError
from pacorl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

CLIP_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
"""The weights that the released code loads through open_clip, as transformers reads them."""
CLIP_L = "openai/clip-vit-large-patch14"
PICK_SCORE = "yuvalkirstain/PickScore_v1"
AESTHETIC_HEAD = "sac+logos+ava1-l14-linearMSE.pth"
AESTHETIC_SOURCE = "https://github.com/christophschuhmann/improved-aesthetic-predictor"

T = TypeVar("T")
Dtype = Literal["float32", "bfloat16", "float16"]


class ClipEncoder:
    """A transformers `CLIPModel`: images and texts → unit vectors, fp32 on the CPU."""

    def __init__(
        self, checkpoint: str, *, processor: str = "", device: str | torch.device = "cpu", dtype: Dtype = "float32"
    ) -> None:
        self.checkpoint = checkpoint
        self.processor = processor or checkpoint
        self.device = device
        self.dtype = dtype
        self._loaded: tuple[Any, Any, Any] | None = None

    def load(self) -> tuple[Any, Any, Any]:
        """(model, image processor, tokenizer). Raises OSError if the checkpoint is not there."""
        if self._loaded is None:
            from transformers import CLIPModel, CLIPTokenizer
            from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

            model = CLIPModel.from_pretrained(self.checkpoint, dtype=getattr(torch, self.dtype))
            self._loaded = (
                model.eval().requires_grad_(False).to(self.device),
                CLIPImageProcessorPil.from_pretrained(self.processor),
                CLIPTokenizer.from_pretrained(self.processor),
            )
        return self._loaded

    @torch.inference_mode()
    def images(self, images: Sequence[Image], *, batch: int = 32) -> Tensor:
        """(B, C), each of length 1."""
        model, processor, _ = self.load()

        def encode(chunk: Sequence[Image]) -> Tensor:
            pixels = processor(images=[image.convert("RGB") for image in chunk], return_tensors="pt").pixel_values
            pooled = model.vision_model(pixel_values=pixels.to(model.device, model.dtype)).pooler_output
            return _unit(model.visual_projection(pooled))

        return _once_each(images, encode, key=id, batch=batch)

    @torch.inference_mode()
    def texts(self, texts: Sequence[str], *, batch: int = 64) -> Tensor:
        """(B, C), each of length 1; a text is cut at the model's 77 tokens."""
        model, _, tokenizer = self.load()
        length = model.config.text_config.max_position_embeddings

        def encode(chunk: Sequence[str]) -> Tensor:
            # Padded to full length, so that a text's vector does not depend on what stands beside it.
            tokens = tokenizer(
                list(chunk), padding="max_length", truncation=True, max_length=length, return_tensors="pt"
            )
            pooled = model.text_model(**tokens.to(model.device)).pooler_output
            return _unit(model.text_projection(pooled))

        return _once_each(texts, encode, key=lambda text: text, batch=batch)

    @property
    def logit_scale(self) -> float:
        return float(self.load()[0].logit_scale.float().exp())


_ENCODERS: WeakValueDictionary[tuple[str, ...], ClipEncoder] = WeakValueDictionary()


def clip_encoder(
    checkpoint: str, *, processor: str = "", device: str | torch.device = "cpu", dtype: Dtype = "float32"
) -> ClipEncoder:
    """The encoder of a checkpoint; the same one as long as somebody holds it."""
    key = (checkpoint, processor, str(device), dtype)
    encoder = _ENCODERS.get(key) or ClipEncoder(checkpoint, processor=processor, device=device, dtype=dtype)
    _ENCODERS[key] = encoder
    return encoder


class PanelClipText:
    """CLIP-T: the cosine of a panel and its own text, mean over panels (the paper's prompt reward for sets)."""

    def __init__(self, checkpoint: str = CLIP_H, dtype: Dtype = "float32", device: str | torch.device = "cpu") -> None:
        self.clip = clip_encoder(checkpoint, device=device, dtype=dtype)

    def load(self) -> None:
        self.clip.load()

    def check(self, prompts: Sequence[Prompt]) -> None:
        check_panels("panel_clip_text", prompts)

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        panels, counts = _panels(prompts, images)
        text_PC = self.clip.texts([text for prompt in prompts for text in prompt.panels])
        return [*_means((self.clip.images(panels) * text_PC).sum(1), counts)]


class PanelClipImage:
    """CLIP-I: the cosine of two panels, mean over pairs: how alike they look, duplicates included."""

    def __init__(self, checkpoint: str = CLIP_H, dtype: Dtype = "float32", device: str | torch.device = "cpu") -> None:
        self.clip = clip_encoder(checkpoint, device=device, dtype=dtype)

    def load(self) -> None:
        self.clip.load()

    def check(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            if prompt.grid.count < 2:
                raise ValueError(f"prompt {prompt.id} is a {prompt.grid} grid, and panel_clip_image needs two panels")

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        panels, counts = _panels(prompts, images)
        return [_mean_cosine(image_PC) for image_PC in self.clip.images(panels).split(counts)]


class PickScore:
    """PickScore v1 (arXiv 2305.01569): scaled cosine of the whole image and the prompt, over `divide_by`.

    The released code divides by 26, which brings it near 1. With `panels`, each panel is scored against its own text.
    """

    def __init__(
        self,
        checkpoint: str = PICK_SCORE,
        *,
        processor: str = "",
        divide_by: float = 26.0,
        panels: bool = False,
        dtype: Dtype = "float32",
        device: str | torch.device = "cpu",
    ) -> None:
        if not divide_by > 0:
            raise ValueError(f"rewards.pick_score.args.divide_by must be above 0, got {divide_by}")
        published = CLIP_H if checkpoint == PICK_SCORE else ""  # the model card names CLIP-H's processor
        self.clip = clip_encoder(checkpoint, processor=processor or published, device=device, dtype=dtype)
        self.divide_by = divide_by
        self.panels = panels

    def load(self) -> None:
        self.clip.load()

    def check(self, prompts: Sequence[Prompt]) -> None:
        if self.panels:
            check_panels("pick_score with panels", prompts)

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        panels, counts = _panels(prompts, images, whole=not self.panels)
        texts = [text for prompt in prompts for text in (prompt.panels if self.panels else (prompt.text,))]
        cosines = _means((self.clip.images(panels) * self.clip.texts(texts)).sum(1), counts)
        return [self.clip.logit_scale * cosine / self.divide_by for cosine in cosines]


class Aesthetic:
    """LAION's aesthetic predictor v2 (1 to 10) over CLIP ViT-L/14, mean over panels, or of the whole image.

    `head` is a file: the published `.pth`, which exists in no other form and is read as plain tensors, or the same
    tensors as safetensors.
    """

    def __init__(
        self,
        checkpoint: str = CLIP_L,
        *,
        head: str = AESTHETIC_HEAD,
        panels: bool = True,
        dtype: Dtype = "float32",
        device: str | torch.device = "cpu",
    ) -> None:
        self.clip = clip_encoder(checkpoint, device=device, dtype=dtype)
        self.head_path = Path(head)
        self.panels = panels
        self._head: nn.Module | None = None

    def load(self) -> nn.Module:
        """Its head. Raises RewardError if the file is absent or is no such head."""
        if self._head is None:
            self._head = load_aesthetic_head(self.head_path)
            self.clip.load()
        return self._head

    def check(self, prompts: Sequence[Prompt]) -> None: ...

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        head = self.load()
        panels, counts = _panels(prompts, images, whole=not self.panels)
        return [*_means(head(self.clip.images(panels))[:, 0], counts)]


def aesthetic_head(width: int) -> nn.Sequential:
    """The published head, which is linear throughout; dropouts keep the layers' published numbers."""
    sizes = (width, 1024, 128, 64, 16, 1)
    first, second, third, fourth, last = (nn.Linear(a, b) for a, b in pairwise(sizes))
    return nn.Sequential(first, nn.Dropout(0.2), second, nn.Dropout(0.2), third, nn.Dropout(0.1), fourth, last).eval()


def load_aesthetic_head(path: Path) -> nn.Module:
    """Reads a head of any width. Raises RewardError if there is none, or the tensors are of something else."""
    if not path.is_file():
        raise RewardError(
            f"rewards.aesthetic.args.head: {path} is no file; get {AESTHETIC_HEAD} from {AESTHETIC_SOURCE}"
        )
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        state = load_file(path)
    else:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            raise RewardError(f"{path} holds more than tensors, and is not read: it could run code") from None
    state = {name.removeprefix("layers."): tensor.float() for name, tensor in state.items()}
    try:
        head = aesthetic_head(state["0.weight"].shape[1])
        head.load_state_dict(state)
    except (KeyError, RuntimeError) as error:
        raise RewardError(f"{path} does not hold the aesthetic predictor's layers: {error}") from None
    return head.requires_grad_(False)


def _panels(
    prompts: Sequence[Prompt], images: Sequence[Image], *, whole: bool = False
) -> tuple[list[Image], list[int]]:
    """The panels of all images, and how many each has; the `whole` images instead if wished."""
    panels = [[image] if whole else split(image, prompt.grid) for prompt, image in zip(prompts, images, strict=True)]
    return [panel for image_panels in panels for panel in image_panels], [
        prompt.grid.count if not whole else 1 for prompt in prompts
    ]


def _means(value_P: Tensor, counts: list[int]) -> list[float]:
    """The mean over each image's panels."""
    return [fmean(value.tolist()) for value in value_P.split(counts)]


def _unit(rows_BC: Tensor) -> Tensor:
    return nn.functional.normalize(rows_BC.float(), dim=-1).cpu()


def _mean_cosine(rows_PC: Tensor) -> float:
    cosine = (rows_PC @ rows_PC.T).tolist()
    return fmean(cosine[i][j] for i, j in combinations(range(len(rows_PC)), 2))


def _once_each(
    items: Sequence[T], encode: Callable[[Sequence[T]], Tensor], *, key: Callable[[T], Any], batch: int
) -> Tensor:
    """Encodes each distinct item once, in batches, and hands the rows back in order."""
    distinct = {key(item): item for item in items}
    row_of = {name: row for row, name in enumerate(distinct)}
    first_of_batch = range(0, len(distinct), batch)
    rows = torch.cat([encode(list(distinct.values())[start : start + batch]) for start in first_of_batch])
    return rows[[row_of[key(item)] for item in items]]
