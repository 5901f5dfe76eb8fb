"""Models that score a run's images: their memory, and the questions that rewards really ask.

Rewards are called with images of noise and a judge that records. Questions of one call share prefixes, so that their
tokens are counted, and batched, by the trees of `judge.sharing`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from pacorl.judge.sharing import Node, batches, prefix_forest
from pacorl.models.int8 import parameter_count, quantize_model, streamed_bytes, weight_bytes
from pacorl.models.policies.policy import Parts
from pacorl.plan import sources
from pacorl.plan.generators import model_on_meta
from pacorl.plan.ledger import META, measured
from pacorl.rewards.consistency import Consistency, Contrast, JudgedReward
from pacorl.types import Character, Grid, Prompt, Question, Size, Verdict

HEAD_TOKENS = 15
"""Tokens of the chat template before the first image."""
TAIL_TOKENS = 6
"""Tokens of the chat template after the text."""
TOKEN = re.compile(r"\w+|[^\w\s]")
"""About a token of a question's text: a word or a sign."""
THEME = "A small red fox who runs a lighthouse by the northern sea, painted in soft watercolour on cream paper."
"""Theme of absent prompts."""
CLIP_BATCH = 32
"""Images per forward of a CLIP."""
EVALUATED = 8
"""Images of an evaluation's call that are planned: they fill the judge's batches."""
SERVED = JudgeSettings()
"""A judge at a server, whose memory is not the run's."""

Calls = list[list[Question]]


@dataclass(frozen=True, slots=True)
class Scorer:
    """A judge or reward model: bytes of its weights and buffers, and a judge's work."""

    name: str
    parameters: int
    weights: int
    """On the device."""
    streamed: int
    """In main memory."""
    buffers: int
    """Peak of a forward, with the keys and values that it reads."""
    files: int
    image_flops: float = 0.0
    """Of the questions about a training image."""
    evaluated_flops: float = 0.0
    """Of the questions about an image of an evaluation."""


@dataclass
class Recorder:
    """A judge that notes the questions of each call, and answers none."""

    calls: Calls = field(default_factory=list)

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        self.calls.append(list(questions))
        return [Verdict(None, "planned")] * len(questions)

    def explain(self, question: Question) -> str:
        return ""


def judges_of(
    config: PolicyConfig, judges: Sequence[sources.Checkpoint], *, prompts: Sequence[Prompt], sizes: Sequence[Size]
) -> list[Scorer | None]:
    """Measure the judge of a run and that of its evaluation; None if there is none.

    Args:
        config: the run.
        judges: the checkpoints of both.
        prompts: of training, the first of which stands for all; without them a set of 2 × 2, or an edit.
        sizes: of the training images and of the evaluation's.
    """
    # A call of training holds whole groups if a reward compares their samples.
    batch = math.lcm(config.sampling.batch, config.group_size) if config.whole_groups else config.sampling.batch
    with TemporaryDirectory() as folder:
        prompt = prompts[0] if prompts else _assumed_prompt(config, Path(folder))

        def asked(key: str, number: int, images: int) -> Calls:
            judge = Recorder()
            shown = ([prompt] * images, _noise(sizes[number], images))
            for name, reward in sources.rewards_of(config, judge=judge):
                if not name.startswith(key):
                    continue
                if isinstance(reward, Consistency) and reward.contrast and number == 0:
                    Contrast(reward, range(images))(*shown)
                elif isinstance(reward, JudgedReward):
                    reward(*shown)
            return judge.calls

        train = asked("rewards.", 0, batch)
        evaluated, held_out = asked("rewards.", 1, EVALUATED), asked("evaluation.", 1, EVALUATED)
    own = config.evaluation.judge_settings
    calls: tuple[tuple[list[Any], list[Any]], ...] = (
        (train, evaluated if own else evaluated + held_out),
        ([], held_out),
    )
    found: list[Scorer | None] = []
    for name, settings, checkpoint, (of_batch, of_evaluation) in zip(
        ("judge", "evaluation's judge"), (config.judge, own), judges, calls, strict=True
    ):
        scorer = None
        if settings:
            parts = checkpoint.configs or sources.published_judge(settings.name)[1]
            scorer = _judge(name, settings, parts, of_batch, of_evaluation, batch=batch)
        found.append(scorer)
    return found


def pair_judge(settings: JudgeSettings, configs: Parts, *, size: Size, sets: bool) -> Scorer:
    """Measure the judge of generated candidates: sets of 2 × 2 of this size, or images."""
    grid, size = (Grid(2, 2), size) if sets else (Grid(1, 2), Size(size.height, 2 * size.width))
    judge = Recorder()
    prompt = Prompt(0, THEME, THEME, grid)
    Consistency(judge)([prompt] * EVALUATED, _noise(size, EVALUATED))
    return _judge("judge", settings, configs, judge.calls, [], batch=EVALUATED)


def clip_scorers(config: PolicyConfig, *, panels: int) -> Iterator[Scorer]:
    """Measure the encoders of rewards, for batches of images with so many panels."""
    # Rewards of one checkpoint share an encoder, which is named after the last of them.
    encoders = {id(encoder): (key, encoder) for key, encoder in sources.clip_encoders(config).items()}
    count = min(CLIP_BATCH, config.sampling.batch * panels)
    for key, encoder in encoders.values():
        model: Any = model_on_meta(sources.clip_parts(encoder), dtype=getattr(torch, encoder.dtype))
        side = model.config.vision_config.image_size
        pixels = torch.empty(count, 3, side, side, device=META, dtype=model.dtype)
        peak = measured(lambda: model.vision_model(pixel_values=pixels)).peak  # noqa: B023 - runs at once
        size = weight_bytes(model)
        yield Scorer(f"CLIP of {key.split('.')[-3]}", parameter_count(model), size, 0, peak, size)


def _judge(name: str, settings: JudgeSettings, configs: Parts, train: Calls, evaluated: Calls, *, batch: int) -> Scorer:
    """Measure a judge's forwards for the calls about a batch and about `EVALUATED` images."""
    form = SERVED if settings.remote else settings
    model: Any = model_on_meta(configs["model"], dtype=getattr(torch, best_dtype(form.checkpoint, "cuda")))
    # Each patch of the vision tower is a quarter of a token.
    per_visual_token = 2 * parameter_count(model.model.visual) * model.config.vision_config.spatial_merge_size**2
    files = parameter_count(model) * model.dtype.itemsize
    quantize_model(model, form.quantize, device=META, stream=form.stream)

    # Each pair in both orders shares nothing with itself.
    orders = 1 + settings.symmetric
    peak = 0
    flops = [0.0, 0.0]
    for number, call in [*((0, call) for call in train), *((1, call) for call in evaluated)]:
        tokens = {image.tobytes(): _tokens(image, configs) for question in call for image in question.images}
        numbers = {image: number for number, image in enumerate(tokens)}
        forest = prefix_forest([_symbols(question, numbers, tokens) for question in call])
        walked = list(_forwards(forest))
        largest = max(walked, key=lambda forward: forward.rows * forward.longest)
        forward_peak, per_token = _language_forward(model, largest)
        peak = max(peak, forward_peak)
        language = sum(forward.tokens for forward in walked) * per_token
        flops[number] += orders * (language + sum(tokens.values()) * per_visual_token)
    return Scorer(
        name,
        parameter_count(model),
        weight_bytes(model),
        streamed_bytes(model),
        peak,
        files,
        image_flops=flops[0] / batch,
        evaluated_flops=flops[1] / EVALUATED,
    )


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


# --- tokens ----------------------------------------------------------------------------------------------------


def _tokens(image: Image.Image, configs: Parts) -> int:
    return image_tokens(Size(image.height, image.width), configs["processor"])


def _symbols(question: Question, numbers: Mapping[bytes, int], tokens: Mapping[bytes, int]) -> Any:
    """List symbols of a question's tokens, equal where questions share them."""
    symbols = list(range(HEAD_TOKENS))
    for image in question.images:
        first = (1 + numbers[image.tobytes()]) << 20
        symbols += range(first, first + tokens[image.tobytes()])
    first = -(1 + abs(hash(question.text)) % 2**40 << 20)
    return np.array([*symbols, *range(first, first + len(TOKEN.findall(question.text)) + TAIL_TOKENS)], np.int64)


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward over nodes of a prefix tree, padded to the longest."""

    rows: int
    longest: int
    tokens: int
    """Without padding."""
    kept: int
    """Tokens of the levels above whose keys and values are in memory."""


def _forwards(nodes: Sequence[Node], *, above: int = 0, kept: int = 0) -> Iterator[Forward]:
    """List the forwards of a forest as the judge makes them, a level below the other.

    Args:
        nodes: of one level.
        above: tokens before these nodes, padding included.
        kept: tokens in the caches of the levels above.
    """
    for batch in batches(nodes, tokens=BATCH_TOKENS):
        longest = max(map(len, batch))
        yield Forward(len(batch), longest, sum(map(len, batch)), kept)
        children = [child for node in batch for child in node.children]
        if children:
            yield from _forwards(children, above=above + longest, kept=kept + len(batch) * (above + longest))


def _language_forward(model: Any, forward: Forward) -> tuple[int, float]:
    """Measure a forward of the language model, the largest part of a judge: its peak in bytes, and FLOPs a token."""
    language = model.model.language_model
    config = language.config
    shape = (forward.rows, forward.longest)
    positions = torch.zeros(3, *shape, device=META, dtype=torch.long)
    embedded = torch.empty(*shape, config.hidden_size, device=META, dtype=model.dtype)
    ledger = measured(lambda: language(inputs_embeds=embedded, position_ids=positions, use_cache=False))
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kept = 2 * config.num_hidden_layers * config.num_key_value_heads * width * model.dtype.itemsize
    return ledger.peak + forward.kept * kept, ledger.flops / (forward.rows * forward.longest)
