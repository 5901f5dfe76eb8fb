"""Judges of random weights, of every family, P(Yes) as plain transformers computes it, and judges behind a server."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from app_server import serving_app
from PIL import Image
from tests.twins.parts import CHAT_TEMPLATE, QWEN_SPECIAL_TOKENS, image_text_processor, qwen_tokenizer_of, vocabulary
from torch import Tensor
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen2VLConfig, Qwen3_5Config, Qwen3VLConfig

from pacorl.core import questions
from pacorl.io.processor import ImageTextProcessor
from pacorl.judge.local import LocalJudge
from pacorl.serve.server import create_app
from pacorl.tiny.world import all_panels, draw
from pacorl.types import Question

PATCH = 8


def draw_lora(model: Any, *, std: float = 0.2) -> Any:
    """The model with the B matrices of PEFT's adapter drawn, so that it changes the answers."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=std)
    return model


def processor_of_any_size() -> ImageTextProcessor:
    """Images keep their shape: 16 pixels make a token."""
    return image_text_processor(
        tokenizer=qwen_tokenizer_of(vocabulary()),
        image_options={"patch_size": PATCH, "merge_size": 2, "min_pixels": 16 * 16, "max_pixels": 128 * 128},
        chat_template=CHAT_TEMPLATE,
    )


def build(family: str, processor: ImageTextProcessor, *, seed: int = 0, **sizes: int) -> Any:
    """A model of a family with random weights; `sizes`: width, layers, heads, vision_width, vision_layers."""
    width, heads = sizes.get("width", 64), sizes.get("heads", 4)
    ids = {token: processor.tokenizer.convert_tokens_to_ids(token) for token in QWEN_SPECIAL_TOKENS}
    half = width // heads // 2
    text = {
        "vocab_size": len(processor.tokenizer),
        "hidden_size": width,
        "intermediate_size": sizes.get("mlp", 3 * width),
        "num_hidden_layers": sizes.get("layers", 3),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": width // heads,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8],
            "mrope_interleaved": True,
        },
        "pad_token_id": ids["<|endoftext|>"],
        "initializer_range": 0.1,
    }
    tower = {"depth": sizes.get("vision_layers", 3), "num_heads": 4, "patch_size": PATCH, "initializer_range": 0.1}
    inner = sizes.get("vision_width", 32)
    kinds = {
        "qwen2_vl": (Qwen2VLConfig, tower | {"embed_dim": inner, "hidden_size": width, "mlp_ratio": 2}),
        "qwen2_5_vl": (
            Qwen2_5_VLConfig,
            tower
            | {"hidden_size": inner, "intermediate_size": sizes.get("vision_mlp", 2 * inner), "out_hidden_size": width}
            | {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]},
        ),
        "qwen3_vl": (
            Qwen3VLConfig,
            tower
            | {"hidden_size": inner, "intermediate_size": 2 * inner, "out_hidden_size": width}
            | {"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 64},
        ),
        "qwen3_5": (
            Qwen3_5Config,
            tower
            | {"hidden_size": inner, "intermediate_size": 2 * inner, "out_hidden_size": width}
            | {"num_position_embeddings": 64},
        ),
    }
    kind, vision = kinds[family]
    if family == "qwen3_5":  # three of four layers are recurrent, and a quarter of a head is turned by its position
        text |= {"num_hidden_layers": sizes.get("layers", 4), "head_dim": 4 * width // heads}
        text |= {f"linear_{part}_head_dim": 16 for part in ("key", "value")}
        text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "initializer_range": 0.2}
    config = kind(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # as drawn, a recurrent layer forgets a token within the next one
            parameter.data -= 6
    model.generation_config.pad_token_id = ids["<|endoftext|>"]
    model.generation_config.eos_token_id = ids["<|im_end|>"]
    return model.eval()


def panels(
    count: int, *, seed: int = 0, sizes: Sequence[tuple[int, int]] = ((32, 32), (64, 64), (48, 80))
) -> list[Image.Image]:
    """Drawn characters of several sizes and shapes."""
    rng = random.Random(seed)
    drawn = [draw(rng.choice(all_panels()), 64) for _ in range(count)]
    return [image.resize(sizes[number % len(sizes)]) for number, image in enumerate(drawn)]


def pairs(count: int, *, seed: int = 0) -> list[Question]:
    """Questions of several lengths about pairs that share images."""
    rng, images = random.Random(seed), panels(12, seed=seed)
    texts = [
        questions.consistent(),
        questions.same_theme("a red round hero"),
        questions.meets_criterion("The same hat in all images."),
        questions.meets_criterion("The same crown and the same palette in all images, night or sunset."),
    ]
    return [Question(tuple(rng.sample(images, 2)), rng.choice(texts)) for _ in range(count)]


@torch.no_grad()
def plain_logits(model: Any, processor: ImageTextProcessor, question: Question) -> Tensor:
    """(V,) logits of the first answer token: one question through processor and model, as a model card shows it."""
    content = [*({"type": "image"} for _ in question.images), {"type": "text", "text": question.text}]
    turns = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=[text], images=list(question.images), return_tensors="pt").to(model.device)
    return Tensor(model(**inputs).logits[0, -1])


def plain_p_yes(model: Any, processor: ImageTextProcessor, question: Question) -> float:
    """softmax over the ids of "Yes" and "No" alone."""
    logits = plain_logits(model, processor, question)
    yes, no = (processor.tokenizer.convert_tokens_to_ids(word) for word in ("Yes", "No"))
    return float(torch.stack([logits[yes], logits[no]]).softmax(0)[0])


def serving(judges: Mapping[str, LocalJudge], **options: Any) -> AbstractContextManager[str]:
    """The server over one judge by its name, on a free port; its root URL."""
    ((name, judge),) = judges.items()
    return serving_app(create_app(name, judge, **options))


def by_grey(question: Question) -> float:
    """How alike the greys of two images are; a question with "blind" is always answered Yes."""
    if "blind" in question.text:
        return 1.0
    first, second = (float(np.asarray(image.convert("L")).mean()) for image in question.images)
    return 1 - min(1.0, abs(first - second) / 100)


def grey(*shades: int) -> list[Image.Image]:
    return [Image.new("RGB", (16, 16), (shade, shade, shade)) for shade in shades]
