"""Models that score a run's images: their memory, and the questions that rewards really ask.

Rewards are called with images of noise and a judge that records. Questions of one call share prefixes, so that their
tokens are counted, and batched, by the trees of `judge.sharing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from pacorl.core.devices import NONE
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.processor import image_tokens
from pacorl.judge.judge import BATCH_TOKENS, JudgeSettings
from pacorl.judge.sharing import Node, batches, prefix_forest
from pacorl.models.int8 import parameter_count, quantize_model, streamed_bytes, weight_bytes
from pacorl.models.policies.policy import Parts
from pacorl.plan import sources
from pacorl.plan.generators import META, model_on_meta
from pacorl.plan.ledger import measured
from pacorl.rewards.consistency import JudgedReward
from pacorl.types import Character, Grid, Prompt, Question, Size, Verdict

HEAD_TOKENS = 15
"""Tokens of the chat template before the first image."""
TEXT_TOKENS = 113
"""Tokens of a question after its images: a theme of a few sentences, and the template's rest."""
CLIP_BATCH = 32
"""Images per forward of a CLIP."""
EVALUATED = 8
"""Images of an evaluation's call that are planned: they fill the judge's batches."""
SERVED = JudgeSettings()
"""A judge at a server, whose memory is not the run's."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """A judge or reward model of this process; sizes in bytes."""

    name: str
    parameters: int
    weights: int
    """On the device."""
    streamed: int
    """Weights that stay in main memory."""
    buffers: int
    files: int
    note: str


@dataclass
class Recorder:
    """A judge that notes the questions of each call, and answers none."""

    calls: list[list[Question]] = field(default_factory=list)

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        self.calls.append(list(questions))
        return [Verdict(None, "planned")] * len(questions)

    def explain(self, question: Question) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Judging:
    """Work of a judge on the images of a run."""

    parameters: int = 0
    weights: int = 0
    """On the device."""
    streamed: int = 0
    """Weights that stay in main memory."""
    peak: int = 0
    """Largest buffers of a forward, with the keys and values that it reads."""
    questions: int = 0
    """Questions about a training image."""
    image_flops: float = 0.0
    """FLOPs of the questions about a training image."""
    evaluated_flops: float = 0.0
    """FLOPs of the questions about an image of an evaluation."""
    forwards: float = 0.0
    """Forwards per training image, each of which sends the streamed weights."""


def asked(config: PolicyConfig, prompt: Prompt, size: Size, *, images: int, held_out: bool) -> list[list[Question]]:
    """List the questions of each call about some images of a prompt.

    Args:
        config: the run.
        prompt: of all the images.
        size: of the images.
        images: number of images in a call.
        held_out: whether the rewards of the evaluation are asked, or those of the run.
    """
    judge = Recorder()
    rng = np.random.default_rng(0)
    noise = [Image.fromarray(rng.integers(0, 256, (size.height, size.width, 3), np.uint8)) for _ in range(images)]
    for key, reward in sources.rewards_of(config, judge=judge):
        if isinstance(reward, JudgedReward) and key.startswith("evaluation.") == held_out:
            reward([prompt] * images, noise)
    return judge.calls


def judging(
    config: PolicyConfig,
    options: JudgeSettings | None,
    configs: Parts,
    *,
    prompts: Sequence[Prompt],
    size: Size,
    evaluation_size: Size,
    held_out: bool = False,
) -> Judging:
    """Count and measure the questions of a run to one of its judges.

    Args:
        config: the run.
        options: of the judge.
        configs: the judge's `model` and `processor`.
        prompts: of training, the first of which stands for all; without them a set of 2 × 2, or an edit.
        size: of the training images.
        evaluation_size: of an evaluation's images.
        held_out: whether it is the evaluation's judge, which is asked of training images nothing.
    """
    if options is None:
        return Judging()
    with TemporaryDirectory() as folder:
        prompt = prompts[0] if prompts else assumed_prompt(config, Path(folder))
        batch = config.sampling.batch
        train = [] if held_out else asked(config, prompt, size, images=batch, held_out=False)
        evaluated = [] if held_out else asked(config, prompt, evaluation_size, images=EVALUATED, held_out=False)
        if held_out or not config.evaluation.judge:
            evaluated += asked(config, prompt, evaluation_size, images=EVALUATED, held_out=True)
    # Each pair in both orders shares nothing with itself.
    orders = 1 + options.symmetric
    form = SERVED if options.remote else options
    model: Any = model_on_meta(configs["model"], dtype=getattr(torch, form.dtype))
    tower = parameter_count(model.model.visual) * model.config.vision_config.spatial_merge_size**2
    quantize_model(model, form.quantize, device=META, stream=form.stream)

    peak, per_token = 0, 0.0
    counts = []
    for calls in (train, evaluated):
        language = seen = forwards = 0
        for call in calls:
            forest = prefix_forest([symbols_of(question, configs["processor"]) for question in call])
            walked = list(forwards_of(forest, tokens=BATCH_TOKENS))
            forwards += len(walked)
            language += sum(forward.tokens for forward in walked)
            seen += sum(distinct_images(call, configs["processor"]).values())
            largest = max(walked, key=attrgetter("rows_tokens"))
            measured_peak, measured_flops = language_forward(model, largest)
            peak = max(peak, measured_peak)
            per_token = measured_flops / largest.rows_tokens
        counts.append((language * per_token + seen * 2 * tower, forwards))
    return Judging(
        parameter_count(model),
        weight_bytes(model),
        streamed_bytes(model),
        peak,
        questions=orders * sum(map(len, train)) // batch,
        image_flops=orders * counts[0][0] / batch,
        evaluated_flops=orders * counts[1][0] / EVALUATED,
        forwards=orders * counts[0][1] / batch,
    )


def assumed_prompt(config: PolicyConfig, folder: Path) -> Prompt:
    """Return a prompt in place of absent ones: an edit of an image in `folder`, or a set with a character."""
    path = folder / "source.png"
    Image.new("RGB", config.sampling.size, "white").save(path)
    if sources.planned_images(config):
        return Prompt(0, "Change it.", sources=(path,))
    panels = tuple(f"the hero in scene {number}" for number in range(4))
    return Prompt(0, "Four scenes.", "A hero.", Grid(2, 2), panels, characters=(Character("", "", (path,)),))


# --- tokens ----------------------------------------------------------------------------------------------------


def symbols_of(question: Question, processor: Mapping[str, Any]) -> NDArray[np.int64]:
    """List symbols of a question's tokens, equal where questions share them."""
    symbols = list(range(HEAD_TOKENS))
    for image in question.images:
        first = hash(image.tobytes()) % 2**40 * 2**20
        symbols += range(first, first + _tokens(image, processor))
    first = hash(question.text) % 2**40 * 2**20
    return np.array([*symbols, *range(first, first + TEXT_TOKENS)], np.int64)


def distinct_images(call: Sequence[Question], processor: Mapping[str, Any]) -> dict[bytes, int]:
    """Map the images of a call to their tokens, each once."""
    return {image.tobytes(): _tokens(image, processor) for question in call for image in question.images}


def _tokens(image: Image.Image, processor: Mapping[str, Any]) -> int:
    return image_tokens(Size(image.height, image.width), processor)


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward over nodes of a prefix tree, padded to the longest."""

    rows: int
    longest: int
    tokens: int
    """Without padding."""
    kept: int
    """Tokens of the levels above whose keys and values are in memory."""

    @property
    def rows_tokens(self) -> int:
        return self.rows * self.longest


def forwards_of(nodes: Sequence[Node], *, tokens: int, above: int = 0, kept: int = 0) -> Iterator[Forward]:
    """List the forwards of a forest as the judge makes them, a level below the other.

    Args:
        nodes: of one level.
        tokens: most tokens of a forward.
        above: tokens before these nodes, padding included.
        kept: tokens in the caches of the levels above.
    """
    for batch in batches(nodes, tokens=tokens):
        longest = max(map(len, batch))
        yield Forward(len(batch), longest, sum(map(len, batch)), kept)
        children = [child for node in batch for child in node.children]
        if children:
            own = len(batch) * (above + longest)
            yield from forwards_of(children, tokens=tokens, above=above + longest, kept=kept + own)


def language_forward(model: Any, forward: Forward) -> tuple[int, float]:
    """Measure a forward of the language model, the largest part of a judge: its peak in bytes, and its FLOPs."""
    language = model.model.language_model
    config = language.config
    shape = (forward.rows, forward.longest)
    positions = torch.zeros(3, *shape, device=META, dtype=torch.long)
    embedded = torch.empty(*shape, config.hidden_size, device=META, dtype=model.dtype)
    ledger = measured(lambda: language(inputs_embeds=embedded, position_ids=positions, use_cache=False))
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kept = 2 * config.num_hidden_layers * config.num_key_value_heads * width * model.dtype.itemsize
    return ledger.peak + forward.kept * kept, ledger.flops


# --- models of this process ------------------------------------------------------------------------------------


def scorer_of(name: str, options: JudgeSettings, work: Judging) -> Scorer:
    """Describe a judge of this process."""
    return Scorer(
        name,
        work.parameters,
        work.weights,
        work.streamed,
        work.peak,
        files=work.parameters * getattr(torch, options.dtype).itemsize,
        note=options.dtype if options.quantize == NONE else f"{options.quantize} blocks",
    )


def pair_judge(options: JudgeSettings, configs: Parts, *, panel: Size) -> Scorer:
    """Measure a judge that fills its batches with questions about two panels each, as of candidates of a set."""
    model: Any = model_on_meta(configs["model"], dtype=getattr(torch, options.dtype))
    quantize_model(model, options.quantize, device=META, stream=options.stream)
    pair = HEAD_TOKENS + 2 * image_tokens(panel, configs["processor"]) + TEXT_TOKENS
    rows = max(1, BATCH_TOKENS // pair)
    peak, _ = language_forward(model, Forward(rows, pair, rows * pair, kept=0))
    work = Judging(parameter_count(model), weight_bytes(model), streamed_bytes(model), peak)
    return scorer_of("judge", options, work)


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
        yield Scorer(
            f"CLIP of {key.split('.')[-3]}", parameter_count(model), size, 0, peak, files=size, note=encoder.dtype
        )
