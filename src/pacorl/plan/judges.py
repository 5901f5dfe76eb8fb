"""Models that score a run's images: their memory, and the FLOPs of the questions that rewards really ask.

Rewards are called with images of noise and a judge that records. Questions of one call share prefixes, whose tokens are
counted once.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from pacorl.core.devices import best_dtype
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.processor import image_tokens
from pacorl.judge.judge import BATCH_TOKENS, JudgeSettings
from pacorl.judge.sharing import WORTH_SHARING
from pacorl.models.int8 import parameter_count, quantize_model, streamed_bytes, weight_bytes
from pacorl.models.policies.policy import Parts
from pacorl.plan import sources
from pacorl.plan.generators import model_on_meta
from pacorl.plan.ledger import META, MemoryLedger, measured
from pacorl.rewards.consistency import Consistency, Contrast, JudgedReward
from pacorl.types import Character, Grid, Prompt, Question, Size, Verdict

TEMPLATE_TOKENS = (15, 6)
"""Tokens of the chat template before the first image, and after the text."""
TOKEN = re.compile(r"\w+|[^\w\s]")
"""About a token of a question's text: a word or a sign."""
THEME = "A small red fox who runs a lighthouse by the northern sea, painted in soft watercolour on cream paper."
"""Theme of absent prompts."""
CLIP_BATCH = 32
"""Images per forward of a CLIP."""
EVALUATED = 8
"""Images of an evaluation's call that are planned: they fill the judge's batches."""

Calls = Sequence[Sequence[Question]]


@dataclass(frozen=True, slots=True)
class Scorer:
    """A judge or reward model: bytes of its weights and buffers, and a judge's work."""

    weights: int
    """On the device."""
    buffers: int
    """Peak of a forward, with the keys and values that it reads."""
    files: int
    streamed: int = 0
    """Weights in main memory."""
    flops: Sequence[float] = ()
    """Of each list of calls that it was measured with."""


@dataclass
class Recorder:
    """A judge that notes the questions of each call, and answers none."""

    calls: list[Sequence[Question]] = field(default_factory=list)

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        self.calls.append(list(questions))
        return [Verdict(None, "planned")] * len(questions)

    def explain(self, question: Question) -> str:
        return ""


def run_judge(config: PolicyConfig, configs: Parts, *, prompts: Sequence[Prompt], sizes: Sequence[Size]) -> Scorer:
    """Measure the judge of a run: FLOPs of the questions about a training image, and about one of an evaluation.

    Args:
        configs: of the judge.
        prompts: of training, the first of which stands for all; without them a set of 2 × 2, or an edit.
        sizes: of the training images and of the evaluation's.
    """
    assert config.judge is not None
    # A call of training holds whole groups if a reward compares their samples.
    count = math.lcm(config.sampling.batch, config.group_size) if config.whole_groups else config.sampling.batch
    train, evaluation = Recorder(), Recorder()
    with TemporaryDirectory() as folder:
        prompt = prompts[0] if prompts else _assumed_prompt(config, Path(folder))
        _ask(train, config, [prompt] * count, sizes[0], trains=True)
        _ask(evaluation, config, [prompt] * EVALUATED, sizes[1])
    scorer = measure_judge(config.judge, configs, [train.calls, evaluation.calls])
    return replace(scorer, flops=(scorer.flops[0] / count, scorer.flops[1] / EVALUATED))


def _ask(recorder: Recorder, config: PolicyConfig, prompts: list[Prompt], size: Size, *, trains: bool = False) -> None:
    """Call the rewards of a run, and in an evaluation its measures, with an image of each prompt."""
    images = _noise(size, len(prompts))
    for key, reward in sources.rewards_of(config, judge=recorder):
        if key.startswith("evaluation.") and (trains or config.evaluation.judge):
            continue  # a judge of its own answers the measures
        if trains and isinstance(reward, Consistency) and reward.contrast:
            Contrast(reward, range(len(images)))(prompts, images)
        elif isinstance(reward, JudgedReward):
            reward(prompts, images)


def candidates_judge(settings: JudgeSettings, configs: Parts, *, size: Size) -> Scorer:
    """Measure the judge of generated candidates, sets of 2 × 2 of this size."""
    recorder = Recorder()
    Consistency(recorder)([Prompt(0, THEME, THEME, Grid(2, 2))] * EVALUATED, _noise(size, EVALUATED))
    return measure_judge(settings, configs, [recorder.calls])


def clip_scorers(config: PolicyConfig, *, panels: int) -> Iterator[Scorer]:
    """Measure the encoders of rewards, for batches of images with so many panels."""
    # Rewards of one checkpoint share an encoder.
    encoders = {id(encoder): encoder for encoder in sources.clip_encoders(config).values()}
    count = min(CLIP_BATCH, config.sampling.batch * panels)
    for encoder in encoders.values():
        model: Any = model_on_meta(sources.CLIP_CONFIG, dtype=getattr(torch, encoder.dtype))
        side = model.config.vision_config.image_size
        pixels = torch.empty(count, 3, side, side, device=META, dtype=model.dtype)
        peak = measured(lambda: model.vision_model(pixel_values=pixels)).peak  # noqa: B023 - runs at once
        yield Scorer(weight_bytes(model), peak, files=weight_bytes(model))


def _noise(size: Size, images: int) -> list[Image.Image]:
    """Draw images of which no two panels are equal."""
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (size.height, size.width, 3), np.uint8)) for _ in range(images)]


def _assumed_prompt(config: PolicyConfig, folder: Path) -> Prompt:
    """Return a prompt in place of absent ones: an edit of an image in `folder`, or a set with a character."""
    path = folder / "source.png"
    Image.new("RGB", config.sampling.size, "white").save(path)
    if sources.planned_images(config):
        return Prompt(0, "Change it.", sources=(path,))
    panels = tuple(f"the hero in scene {number}" for number in range(4))
    return Prompt(0, THEME, THEME, Grid(2, 2), panels, characters=(Character("", "", (path,)),))


# --- a judge's forwards ----------------------------------------------------------------------------------------


class CallTokens(NamedTuple):
    """Tokens of the questions of a call."""

    longest: int = 1
    """Of a question."""
    read: int = 1
    """Of all questions, common prefixes once."""
    shared: int = 0
    """Of the common prefixes, whose keys and values the rest of the questions reads."""
    visual: int = 0
    """Of all distinct images."""


def measure_judge(settings: JudgeSettings, configs: Parts, work: Sequence[Calls]) -> Scorer:
    """Measure a judge's largest forward, and count the FLOPs of lists of calls."""
    model: Any = model_on_meta(configs["model"], dtype=getattr(torch, best_dtype(settings.checkpoint, "cuda")))
    files = parameter_count(model) * model.dtype.itemsize
    # Each patch of the vision tower is a quarter of a token.
    per_visual_token = 2 * parameter_count(model.model.visual) * model.config.vision_config.spatial_merge_size**2
    quantize_model(model, settings.quantize, device=META, stream=settings.stream)

    # The largest forward.
    counted = [[_tokens_of(call, configs["processor"]) for call in calls] for calls in work]
    calls = list(chain(*counted)) or [CallTokens()]
    longest = max(call.longest for call in calls)
    rows = max(1, min(BATCH_TOKENS, max(call.read for call in calls)) // longest)
    ledger = _language_pass(model, rows, longest)
    cached = min(BATCH_TOKENS, max(call.shared for call in calls))
    buffers = ledger.peak + cached * _kept_bytes(model.model.language_model)

    # The work. Each pair in both orders shares nothing with itself.
    per_token = ledger.flops / (rows * longest)
    flops = []
    for of_list in counted:
        once = sum(per_visual_token * call.visual + per_token * call.read for call in of_list)
        flops.append(once * (1 + settings.symmetric))
    return Scorer(weight_bytes(model), buffers, files, streamed_bytes(model), flops)


def _language_pass(model: Any, rows: int, tokens: int) -> MemoryLedger:
    """Measure the language model, the largest part of a judge, on rows of tokens."""
    language = model.model.language_model
    positions = torch.zeros(3, rows, tokens, device=META, dtype=torch.long)
    embedded = torch.empty(rows, tokens, language.config.hidden_size, device=META, dtype=model.dtype)
    return measured(lambda: language(inputs_embeds=embedded, position_ids=positions, use_cache=False))


def _tokens_of(call: Sequence[Question], processor: Mapping[str, Any]) -> CallTokens:
    """Count the tokens of a call. A question is the template's head, its images, and its text."""
    head, tail = TEMPLATE_TOKENS
    tokens: dict[str | bytes, int] = {"": head}
    # Prefix → number of questions that begin with it.
    beginnings: Counter[tuple[str | bytes, ...]] = Counter()
    longest = 0
    for question in call:
        prefix: tuple[str | bytes, ...] = ("",)
        beginnings[prefix] += 1
        for image in question.images:
            prefix += (image.tobytes(),)
            tokens[prefix[-1]] = image_tokens(Size(image.height, image.width), processor)
            beginnings[prefix] += 1
        prefix += (question.text,)
        tokens[question.text] = len(TOKEN.findall(question.text)) + tail
        beginnings[prefix] += 1
        longest = max(longest, sum(tokens[part] for part in prefix))

    # The last part of a prefix is read once if that is worth a pass.
    read = shared = 0
    for prefix, number in beginnings.items():
        count = tokens[prefix[-1]]
        if (number - 1) * count >= WORTH_SHARING:
            read += count
            shared += count
        else:
            read += count * number
    visual = sum(count for part, count in tokens.items() if isinstance(part, bytes))
    return CallTokens(longest, read, shared, visual)


def _kept_bytes(language: Any) -> int:
    """Compute the bytes of a token's keys and values."""
    config = language.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * width * language.dtype.itemsize)
