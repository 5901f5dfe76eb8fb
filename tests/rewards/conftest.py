"""Twenty images of four panels with texts, and a tiny random CLIP in the published layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pacorl.types import Grid, Prompt

WORDS = ("a", "red", "fox", "naps", "in", "the", "snow", "while", "blue", "boats", "pass", "under", "old", "bridges")


@pytest.fixture(scope="session")
def sheets() -> list[Image.Image]:
    """Structure, not noise alone: every image has its own gradient, so that no two are alike."""
    rng = np.random.default_rng(3)
    ramps = np.linspace(0, 255, 48)[None, :, None] * rng.random((20, 1, 1, 3))
    pixels = 0.6 * ramps + 0.4 * rng.integers(0, 256, (20, 40, 48, 3))
    return [Image.fromarray(sheet.astype(np.uint8)) for sheet in pixels]


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    rng = np.random.default_rng(4)
    texts = [[" ".join(rng.choice(WORDS, 3 + row % 5)) for _ in range(4)] for row in range(20)]
    return [Prompt(id=row, text=". ".join(four), grid=Grid(2, 2), panels=tuple(four)) for row, four in enumerate(texts)]


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random `CLIPModel` with tokenizer and processor, as the published checkpoints are laid out."""
    from tests.twins.parts import clip_tokenizer_of
    from transformers import CLIPConfig, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    folder = tmp_path_factory.mktemp("clip")
    tokenizer = clip_tokenizer_of([" ".join(WORDS)])
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    config = CLIPConfig(
        text_config={**text, "num_attention_heads": 2, "pad_token_id": tokenizer.pad_token_id, **ids},
        vision_config={**vision, "num_attention_heads": 2},
        projection_dim=24,
    )
    CLIPModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder
