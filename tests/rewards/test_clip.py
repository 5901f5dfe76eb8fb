"""Rewards by CLIP against transformers' own forward, image by image; batch and order change nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPModel, CLIPProcessor, CLIPTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from pacorl.core.grid import split
from pacorl.rewards.clip import Aesthetic, PanelClipText
from pacorl.rewards.reward import Reward
from pacorl.testing import check_reward
from pacorl.types import Grid, Prompt


class Reference:
    """`CLIPModel.forward` on one image and one text at a time, through `CLIPProcessor`."""

    def __init__(self, folder: Path) -> None:
        self.model = CLIPModel.from_pretrained(folder).eval()
        self.processor = CLIPProcessor(
            image_processor=CLIPImageProcessorPil.from_pretrained(folder),
            tokenizer=CLIPTokenizer.from_pretrained(folder),
        )

    @torch.no_grad()
    def __call__(self, image: Image.Image, text: str = "a") -> tuple[float, torch.Tensor]:
        """(logit, unit image vector)"""
        output = self.model(**self.processor(images=image, text=text, truncation=True, return_tensors="pt"))
        return float(output.logits_per_image), output.image_embeds[0]


@pytest.fixture(scope="module")
def reference(tiny_clip: Path) -> Reference:
    return Reference(tiny_clip)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random aesthetic head under the published file's names."""
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("head") / "linearMSE.pth"
    sizes = [24, 1024, 128, 64, 16, 1]
    tensors = {}
    for number, wide, narrow in zip((0, 2, 4, 6, 7), sizes[:-1], sizes[1:], strict=True):
        tensors |= {
            f"layers.{number}.weight": torch.randn(narrow, wide) / wide**0.5,
            f"layers.{number}.bias": torch.randn(narrow),
        }
    torch.save(tensors, path)
    return path


def close(found: Sequence[float | None], expected: Sequence[float]) -> None:
    assert len(found) == 20
    assert found == pytest.approx(expected, abs=1e-5)
    assert np.std(expected) > 1e-4, "all images score alike, so nothing is shown"


def test_clip_t(tiny_clip: Path, reference: Reference, prompts: list[Prompt], sheets: list[Image.Image]) -> None:
    scale = float(reference.model.logit_scale.detach().exp())
    expected = [
        fmean(reference(panel, text)[0] / scale for panel, text in zip(split(sheet, p.grid), p.panels, strict=True))
        for p, sheet in zip(prompts, sheets, strict=True)
    ]
    close(PanelClipText(str(tiny_clip))(prompts, sheets), expected)


def test_parts_are_shares_of_the_mean(tiny_clip: Path, prompts: list[Prompt], sheets: list[Image.Image]) -> None:
    for found in PanelClipText(str(tiny_clip)).panel_scores(prompts, sheets):
        assert found.score == pytest.approx(sum(part or 0.0 for part in found.part_P or ()))


def test_aesthetic(
    tiny_clip: Path, head: Path, reference: Reference, prompts: list[Prompt], sheets: list[Image.Image]
) -> None:
    tensors = torch.load(head, weights_only=True)

    def by_hand(image: Image.Image) -> float:
        row = reference(image)[1]
        for number in (0, 2, 4, 6, 7):
            row = tensors[f"layers.{number}.weight"] @ row + tensors[f"layers.{number}.bias"]
        return float(row)

    panels = [fmean(by_hand(panel) for panel in split(sheet, Grid(2, 2))) for sheet in sheets]
    close(Aesthetic(str(tiny_clip), head=str(head))(prompts, sheets), panels)


@pytest.mark.parametrize("kind", ["panel_clip_text", "aesthetic"])
def test_batch_and_order_change_nothing(
    kind: str, tiny_clip: Path, head: Path, prompts: list[Prompt], sheets: list[Image.Image]
) -> None:
    makers: dict[str, Callable[[], Reward]] = {
        "panel_clip_text": lambda: PanelClipText(str(tiny_clip)),
        "aesthetic": lambda: Aesthetic(str(tiny_clip), head=str(head)),
    }
    check_reward(makers[kind](), prompts, sheets)


def test_a_long_text_is_cut_as_the_model_cuts_it(
    tiny_clip: Path, reference: Reference, sheets: list[Image.Image]
) -> None:
    prompt = Prompt(id=0, text="", panels=("fox boats " * 100,))
    scale = float(reference.model.logit_scale.detach().exp())
    assert PanelClipText(str(tiny_clip))([prompt], sheets[:1]) == [
        pytest.approx(reference(sheets[0], prompt.panels[0])[0] / scale, abs=1e-5)
    ]


def test_a_head_that_runs_code_or_has_more_layers_is_refused(tiny_clip: Path, head: Path, tmp_path: Path) -> None:
    torch.save({"layers.0.weight": tmp_path}, tmp_path / "code.pth")  # a Path is no tensor
    torch.save(torch.load(head, weights_only=True) | {"layers.9.bias": torch.zeros(1)}, tmp_path / "more.pth")
    for name in ("code.pth", "more.pth"):
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            Aesthetic(str(tiny_clip), head=str(tmp_path / name)).load()


def test_a_repeated_text_is_encoded_once_and_handed_back_to_each(tiny_clip: Path) -> None:
    encoder = PanelClipText(str(tiny_clip)).clip
    encoded: list[int] = []
    words = ["fox", "boat", "fox", "tree", "boat"]
    expected = torch.cat([encoder.texts([word]) for word in words])
    encoder.parts[0].text_model.register_forward_hook(lambda *call: encoded.append(len(call[2].pooler_output)))
    assert torch.allclose(encoder.texts(words), expected, atol=1e-5)
    assert not torch.allclose(expected[0], expected[1], atol=1e-3)
    assert encoded == [3]
