"""Models that score a run's images: their memory, and the FLOPs of the questions that rewards really ask.

Rewards are called with images of noise and a judge that records. Questions of one call share prefixes, whose tokens are
counted once, by the trees of `judge.sharing`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from pacorl.core.devices import best_dtype
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.processor import image_tokens
from pacorl.judge.judge import BATCH_TOKENS, JudgeSettings
from pacorl.judge.sharing import Node, prefix_forest
from pacorl.models.int8 import parameter_count, quantize_model, streamed_bytes, weight_bytes
from pacorl.models.policies.policy import Parts
from pacorl.plan import sources
from pacorl.plan.generators import model_on_meta
from pacorl.plan.ledger import META, measured
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

Calls = list[list[Question]]


@dataclass(frozen=True, slots=True)
class Scorer:
    """A judge or reward model: bytes of its weights and buffers, and a judge's work."""

    weights: int
    """On the device."""
    streamed: int
    """In main memory."""
    buffers: int
    """Peak of a forward, with the keys and values that it reads."""
    files: int
    flops: Sequence[float] = ()
    """Of each list of calls that it was measured with."""


@dataclass
class Recorder:
    """A judge that notes the questions of each call, and answers none."""

    calls: Calls = field(default_factory=list)

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
    # A call of training holds whole groups if a reward compares their samples.
    count = math.lcm(config.sampling.batch, config.group_size) if config.whole_groups else config.sampling.batch
    with TemporaryDirectory() as folder:
        prompt = prompts[0] if prompts else _assumed_prompt(config, Path(folder))
        train = _calls(config, "rewards.", [prompt] * count, sizes[0], trains=True)
        evaluated = _calls(config, "rewards.", [prompt] * EVALUATED, sizes[1])
        if not config.evaluation.judge:
            evaluated += _calls(config, "evaluation.", [prompt] * EVALUATED, sizes[1])
    assert config.judge is not None
    scorer = _judge(config.judge, configs, [train, evaluated])
    flops = (scorer.flops[0] / count, scorer.flops[1] / EVALUATED)
    return replace(scorer, flops=flops)


def _calls(config: PolicyConfig, key: str, prompts: list[Prompt], size: Size, *, trains: bool = False) -> Calls:
    """List the questions that the rewards below a key ask about an image of each prompt."""
    recorder = Recorder()
    images = _noise(size, len(prompts))
    for name, reward in sources.rewards_of(config, judge=recorder):
        if not name.startswith(key):
            continue
        if trains and isinstance(reward, Consistency) and reward.contrast:
            Contrast(reward, range(len(images)))(prompts, images)
        elif isinstance(reward, JudgedReward):
            reward(prompts, images)
    return recorder.calls


def pair_judge(settings: JudgeSettings, configs: Parts, *, size: Size, sets: bool) -> Scorer:
    """Measure the judge of generated candidates: sets of 2 × 2 of this size, or images."""
    grid, size = (Grid(2, 2), size) if sets else (Grid(1, 2), Size(size.height, 2 * size.width))
    recorder = Recorder()
    Consistency(recorder)([Prompt(0, THEME, THEME, grid)] * EVALUATED, _noise(size, EVALUATED))
    return _judge(settings, configs, [recorder.calls])


def clip_scorers(config: PolicyConfig, *, panels: int) -> Iterator[Scorer]:
    """Measure the encoders of rewards, for batches of images with so many panels."""
    # Rewards of one checkpoint share an encoder.
    encoders = {id(encoder): encoder for encoder in sources.clip_encoders(config).values()}
    count = min(CLIP_BATCH, config.sampling.batch * panels)
    for encoder in encoders.values():
        model: Any = model_on_meta(sources.clip_parts(encoder), dtype=getattr(torch, encoder.dtype))
        side = model.config.vision_config.image_size
        pixels = torch.empty(count, 3, side, side, device=META, dtype=model.dtype)
        peak = measured(lambda: model.vision_model(pixel_values=pixels)).peak  # noqa: B023 - runs at once
        yield Scorer(weight_bytes(model), 0, peak, weight_bytes(model))


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


def _judge(settings: JudgeSettings, configs: Parts, work: Sequence[Calls]) -> Scorer:
    """Measure a judge's largest forward, and count the work of lists of calls."""
    model: Any = model_on_meta(configs["model"], dtype=getattr(torch, best_dtype(settings.checkpoint, "cuda")))
    files = parameter_count(model) * model.dtype.itemsize
    # Each patch of the vision tower is a quarter of a token.
    per_visual_token = 2 * parameter_count(model.model.visual) * model.config.vision_config.spatial_merge_size**2
    quantize_model(model, settings.quantize, device=META, stream=settings.stream)

    # Tokens of each question, and of each call with common prefixes once.
    symbols = [[[_symbols(question, configs) for question in call] for call in calls] for calls in work]
    forests = [[prefix_forest(call) for call in calls] for calls in symbols]
    shared = [list(map(_tokens_below, calls)) for calls in forests]
    longest = max((len(symbol) for calls in symbols for call in calls for symbol in call), default=1)
    rows = max(1, min(BATCH_TOKENS, max(chain.from_iterable(shared), default=0)) // longest)
    ledger = measured(_language_pass(model, (rows, longest)))
    per_token = ledger.flops / (rows * longest)
    # Keys and values of the prefixes, which the rest of a question reads.
    kept = max((_tokens_kept(forest) for calls in forests for forest in calls), default=0)
    buffers = ledger.peak + min(BATCH_TOKENS, kept) * _kept_bytes(model.model.language_model)

    flops = []
    for calls, tokens in zip(work, shared, strict=True):
        visual = 0
        for call in calls:
            images = {image.tobytes(): image for question in call for image in question.images}
            visual += sum(_image_tokens(image, configs) for image in images.values())
        # Each pair in both orders shares nothing with itself.
        flops.append((1 + settings.symmetric) * (per_visual_token * visual + per_token * sum(tokens)))
    return Scorer(weight_bytes(model), streamed_bytes(model), buffers, files, flops)


def _language_pass(model: Any, shape: tuple[int, int]) -> Callable[[], Any]:
    """Prepare a pass of the language model, the largest part of a judge, over rows of tokens."""
    language = model.model.language_model
    positions = torch.zeros(3, *shape, device=META, dtype=torch.long)
    embedded = torch.empty(*shape, language.config.hidden_size, device=META, dtype=model.dtype)
    return partial(language, inputs_embeds=embedded, position_ids=positions, use_cache=False)


def _image_tokens(image: Image.Image, configs: Parts) -> int:
    return image_tokens(Size(image.height, image.width), configs["processor"])


def _symbols(question: Question, configs: Parts) -> NDArray[np.int64]:
    """List symbols of a question's tokens, equal where questions share them."""
    head, tail = TEMPLATE_TOKENS
    runs: list[tuple[str | bytes, int]] = [("", head)]
    runs += [(image.tobytes(), _image_tokens(image, configs)) for image in question.images]
    runs.append((question.text, len(TOKEN.findall(question.text)) + tail))
    return np.concatenate([(hash(content) % 2**40 << 20) + np.arange(length) for content, length in runs])


def _tokens_below(nodes: Sequence[Node]) -> int:
    """Count the tokens of prefix trees."""
    return sum(len(node) + _tokens_below(node.children) for node in nodes)


def _tokens_kept(nodes: Sequence[Node]) -> int:
    """Count the tokens of prefixes that questions share."""
    return sum(len(node) + _tokens_kept(node.children) for node in nodes if node.children)


def _kept_bytes(language: Any) -> int:
    """Compute the bytes of a token's keys and values."""
    config = language.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * width * language.dtype.itemsize)
