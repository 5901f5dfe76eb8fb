"""Parts of twins: tokenizers, encoders, the autoencoder and the judge."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pacorl.io.documents import parse_json, read_object, read_text
from pacorl.io.pretrained import model_of
from pacorl.tiny.world import set_prompts
from pacorl.types import Grid

if TYPE_CHECKING:
    from diffusers import AutoencoderKL
    from transformers import PreTrainedTokenizerBase

TINY = read_object(Path(__file__).with_name("twins.json"))
"""Configs of the twins' models, without vocabularies."""
TEXT_WIDTH: int = TINY["t5"]["d_model"]
PRIVATE_USE = 0xE000
"""First code point without assigned letters."""

CHAT_TEMPLATE = read_text(Path(__file__).with_name("chat_template.jinja")).rstrip("\n")
"""Qwen2.5-VL's own, without its tools and videos."""
THINKING_TEMPLATE = read_text(Path(__file__).with_name("chat_template_thinking.jinja")).rstrip("\n")
"""Qwen3.5's, likewise: with `enable_thinking` off, its answer begins after an empty thought."""
QWEN_SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip


NOISE = 2**20 - 1
"""Distinct random values of `random_weight`: an odd number, so that the rows of a matrix differ."""


def random_weight(name: str, like: Tensor) -> Tensor:
    """Draw a small random weight on the CPU: zero for a bias and an index, one for a norm's weight and a variance.

    Outputs stay finite at any depth. Values repeat, because drawing 12 billion of them takes minutes.

    Args:
        name: name of the weight in its model.
        like: a tensor of its shape and type, on any device.
    """
    if not like.is_floating_point() or name.endswith(("bias", "mean")):
        return torch.zeros(like.shape, dtype=like.dtype)
    if like.dim() <= 1:
        return torch.ones(like.shape, dtype=like.dtype)
    values = _noise(like.dtype)
    return values.repeat(-(-like.numel() // NOISE))[: like.numel()].view(like.shape)


@cache
def _noise(dtype: torch.dtype) -> Tensor:
    return torch.randn(NOISE, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)


def tiny_vae() -> AutoencoderKL:
    """Build a ×4 autoencoder of 8 latent channels; without attention, so that a panel's code depends only on it."""
    vae: AutoencoderKL = model_of(TINY["vae"])
    return vae


def image_text_processor(
    *, tokenizer: PreTrainedTokenizerBase, image_options: Mapping[str, Any], chat_template: str | None = None
) -> Any:
    """Assemble a judge's processor from its parts."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from pacorl.io.processor import ImageTextProcessor

    return ImageTextProcessor(
        image_processor=Qwen2VLImageProcessorPil(**image_options), tokenizer=tokenizer, chat_template=chat_template
    )


def tiny_judge(texts: Sequence[str], family: str = "qwen2_5_vl") -> tuple[Any, Any]:
    """Build a small Qwen2.5-VL, or Qwen3.5 (`qwen3_5`), and its processor, with a tokenizer trained on `texts`."""
    processor = image_text_processor(
        tokenizer=qwen_tokenizer_of(texts),
        image_options={"patch_size": 8, "merge_size": 2, "min_pixels": 32 * 32, "max_pixels": 32 * 32},
        chat_template=THINKING_TEMPLATE if family == "qwen3_5" else CHAT_TEMPLATE,
    )
    return tiny_qwen_vl(processor.tokenizer, family), processor


def tiny_qwen_vl(tokenizer: PreTrainedTokenizerBase, name: str = "qwen2_5_vl") -> Any:
    """Build a small Qwen2.5-VL with random weights, or another vision-language model of `TINY`."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in QWEN_SPECIAL_TOKENS}
    text_ids = {
        "vocab_size": len(tokenizer),
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    model = model_of(
        TINY[name],
        text_config={**TINY[name]["text_config"], **text_ids},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    # From the released models' generation_config.json: a config alone has no padding token.
    model.generation_config.pad_token_id = ids["<|endoftext|>"]
    model.generation_config.eos_token_id = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    return model


def tiny_clip(tokenizer: PreTrainedTokenizerBase, *, width: int = TEXT_WIDTH, **overrides: Any) -> Any:
    """Build a small CLIP text encoder."""
    return model_of(
        {**TINY["clip"], **overrides},
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def tiny_t5(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Build a small T5 encoder."""
    pad = tokenizer.pad_token_id
    model = model_of(
        TINY["t5"],
        vocab_size=len(tokenizer),
        pad_token_id=pad,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=pad,
    )
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.5)
    return model


def clip_tokenizer_of(texts: Sequence[str]) -> PreTrainedTokenizerBase:
    """Train CLIP's lower-case byte-level BPE on `texts`; 77 tokens, like the original."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    # CLIP's own splits: words, punctuation, bytes.
    splitters = [
        pre_tokenizers.WhitespaceSplit(),
        pre_tokenizers.Punctuation(),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    splitter = pre_tokenizers.Sequence(splitters)

    # The trainer's own `end_of_word_suffix` numbers a word's last letters in the order of a hash map, which changes in
    # every call. So a last letter is trained as a private character, replaced by the letter and the suffix below.
    marked = []
    for text in texts:
        normalized = unicodedata.normalize("NFC", text).lower()
        for word, _ in splitter.pre_tokenize_str(normalized):
            marked.append(word[:-1] + chr(ord(word[-1]) + PRIVATE_USE))
    trained = _byte_level_bpe(
        marked, pre_tokenizers.WhitespaceSplit(), vocab_size=800, special_tokens=["<|startoftext|>", "<|endoftext|>"]
    )
    # Back from the private characters to the letter and the suffix.
    suffixed = {PRIVATE_USE + code: f"{chr(code)}</w>" for code in range(0x200)}
    return CLIPTokenizer(
        vocab={token.translate(suffixed): number for token, number in trained["vocab"].items()},
        merges=[(first, second.translate(suffixed)) for first, second in trained["merges"]],
        model_max_length=77,
    )


def _byte_level_bpe(texts: Sequence[str], splitter: Any, **options: Any) -> dict[str, Any]:
    """Train a byte-level BPE on `texts` and return its vocabulary and merges; options belong to `BpeTrainer`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = splitter
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(texts, trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False, **options))
    model = parse_json(core.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}


def t5_tokenizer_of(texts: Sequence[str]) -> PreTrainedTokenizerBase:
    """Build T5's Unigram tokenizer with a piece for each word of `texts`, and single letters for the rest."""
    from transformers import T5TokenizerFast

    # A word's score is the logarithm of its frequency.
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
    words = []
    for word, count in sorted(counts.items()):
        words.append((f"▁{word}", math.log(count / counts.total())))

    # Letters must lose against any word that fits.
    letters = [("▁", -20.0), *((chr(code), -20.0) for code in range(33, 127))]
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return T5TokenizerFast(vocab=[*special, *letters, *words], extra_ids=0, model_max_length=512)


def qwen_tokenizer_of(texts: Sequence[str]) -> PreTrainedTokenizerBase:
    """Train Qwen2's byte-level BPE on `texts`; "Yes" and "No" are single tokens."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    tokenizer = Qwen2Tokenizer(
        **_byte_level_bpe(
            # Often enough that both words are merged before the vocabulary is full.
            [*texts, *["Yes. No. Yes No"] * max(1, len(texts) // 4)],
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            vocab_size=1200,
            min_frequency=2,
        ),
        unk_token=None,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(QWEN_SPECIAL_TOKENS)})
    return tokenizer


def vocabulary() -> list[str]:
    """Texts of the tiny world to make tokenizers of."""
    return [prompt.text for grid in (Grid(2, 2), Grid(3, 3)) for prompt in set_prompts("train", 288, grid=grid)]
