"""Models that score a run's images: their memory, and the work of the questions that rewards really ask."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image

from pacorl.core.devices import best_dtype
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.processor import image_tokens
from pacorl.judge.judge import BATCH_TOKENS, JudgeSettings
from pacorl.models.int8 import parameter_count, quantize_model, streamed_bytes, weight_bytes
from pacorl.models.policies.policy import Parts
from pacorl.plan import sources
from pacorl.plan.generators import model_on_meta
from pacorl.plan.ledger import META, measured
from pacorl.plan.peaks import Scorer, language_pass
from pacorl.rewards.consistency import Consistency, Contrast, JudgedReward
from pacorl.types import Character, Grid, Prompt, Question, Size, Verdict

ROWS = 16
"""Questions in a full batch of a judge."""
SHARED = 0.6
"""Share of a batch's tokens that are prefixes of further questions, so that their keys and values are kept."""
TEMPLATE_TOKENS = 6
"""Tokens of the chat template after the text."""
TOKEN = re.compile(r"\w+|[^\w\s]")
"""About a token of a question's text: a word or a sign."""
THEME = "A small red fox who runs a lighthouse by the northern sea, painted in soft watercolour on cream paper."
"""Theme of absent prompts."""
CLIP_BATCH = 32
"""Images per forward of a CLIP."""


def judge_scorer(settings: JudgeSettings, configs: Parts) -> Scorer:
    """Measure a judge with a full batch."""
    model: Any = model_on_meta(configs["model"], dtype=getattr(torch, best_dtype(settings.checkpoint, "cuda")))
    files = parameter_count(model) * model.dtype.itemsize
    # Each patch of the vision tower is a quarter of a token.
    per_visual_token = 2 * parameter_count(model.model.visual) * model.config.vision_config.spatial_merge_size**2
    quantize_model(model, settings.quantize, device=META, stream=settings.stream)

    language = model.model.language_model
    length = BATCH_TOKENS // ROWS
    positions = torch.zeros(3, ROWS, length, device=META, dtype=torch.long)
    ledger = language_pass(language, ROWS, length, position_ids=positions, use_cache=False)
    shape = language.config
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    cache_bytes = 2 * shape.num_hidden_layers * shape.num_key_value_heads * width * model.dtype.itemsize
    return Scorer(
        weight_bytes(model),
        ledger.peak + round(SHARED * BATCH_TOKENS * cache_bytes),
        files,
        streamed_bytes(model),
        ledger.flops / BATCH_TOKENS,
        per_visual_token,
    )


def clip_scorers(config: PolicyConfig, prompts: Sequence[Prompt]) -> Iterator[Scorer]:
    """Measure the encoders of rewards, on the panels of a batch; rewards of one checkpoint share an encoder."""
    panels = prompts[0].grid.count if prompts else 4
    for encoder in sources.clip_encoders(config):
        model: Any = model_on_meta(sources.CLIP_PARTS["model"], dtype=getattr(torch, encoder.dtype))
        side = model.config.vision_config.image_size
        images = min(CLIP_BATCH, config.sampling.batch * panels)
        pixels = torch.empty(images, 3, side, side, device=META, dtype=model.dtype)
        peak = measured(lambda: model.vision_model(pixel_values=pixels)).peak  # noqa: B023 - runs at once
        yield Scorer(weight_bytes(model), peak, files=weight_bytes(model))


# --- questions -------------------------------------------------------------------------------------------------


class Recorder:
    """A judge that counts the tokens of each call's questions, and answers none; a common prefix is read once."""

    def __init__(self, processor: Mapping[str, Any]) -> None:
        self.processor = processor
        self.read = 0
        """Tokens of the language model, those of common prefixes once."""
        self.visual = 0
        """Tokens of distinct images."""

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        visual: dict[bytes, int] = {}
        read: dict[tuple[str | bytes, ...], int] = {}
        for question in questions:
            prefix: tuple[bytes, ...] = ()
            for image in question.images:
                content = image.tobytes()
                prefix += (content,)
                visual[content] = read[prefix] = image_tokens(Size(image.height, image.width), self.processor)
            read[*prefix, question.text] = len(TOKEN.findall(question.text)) + TEMPLATE_TOKENS
        self.visual += sum(visual.values())
        self.read += sum(read.values())
        return [Verdict(None, "planned")] * len(questions)

    def explain(self, question: Question) -> str:
        return ""


def judging_flops(config: PolicyConfig, scorer: Scorer, configs: Parts, prompts: Sequence[Prompt]) -> float:
    """Count the FLOPs of the questions about a training image: rewards are called with images of noise.

    Args:
        configs: of the judge.
        prompts: of training, the first of which stands for all; without them a set of 2 × 2, or an edit.
    """
    # A call holds whole groups if a reward compares their samples.
    count = math.lcm(config.sampling.batch, config.group_size) if config.whole_groups else config.sampling.batch
    noise = np.random.default_rng(0).integers(0, 256, (1 + count, *config.sampling.size, 3), np.uint8)
    shown, *images = [Image.fromarray(pixels) for pixels in noise]
    recorder = Recorder(configs["processor"])
    with TemporaryDirectory() as folder:
        source = Path(folder, "source.png")
        shown.save(source)
        hero = Character("", "", (source,))
        prompt = Prompt(0, THEME, THEME, Grid(2, 2), ("the hero in a scene",) * 4, characters=(hero,))
        if sources.planned_images(config):
            prompt = Prompt(0, "Change it.", sources=(source,))
        repeated = [*prompts[:1], prompt][:1] * count
        for reward in sources.rewards_of(config.rewards, judge=recorder).values():
            if isinstance(reward, Consistency) and reward.contrast:
                Contrast(reward, range(count))(repeated, images)
            elif isinstance(reward, JudgedReward):
                reward(repeated, images)
    return (scorer.per_token * recorder.read + scorer.per_visual_token * recorder.visual) / count
