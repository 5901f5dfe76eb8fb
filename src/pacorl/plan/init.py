"""A config of one's own: `pacorl init my.yaml --model flux --prompts mine.txt --card 24`.

Every setting that depends on prompts, model, reward and card is derived, and explained in half a line. Of the ways to
fit a card, the fastest whose plan fits is taken.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

from pacorl.config.base import validated
from pacorl.config.reward_section import RewardConfig
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.documents import parse_yaml
from pacorl.io.files import check_new, write_atomic
from pacorl.models.policies import POLICIES, kind_of
from pacorl.models.policies.policy import check_images
from pacorl.models.policies.spec import PolicySpec
from pacorl.plan.plan import CARD_MARGIN, Plan, plan_policy, size_text, with_checkpointing
from pacorl.records.characters import find_character
from pacorl.records.leaks import split_prompts
from pacorl.records.prompts import prompts_from, save_prompts
from pacorl.rewards import asks_judge
from pacorl.types import TINY, Prompt

CARD = re.compile(r"(?:([1-9]\d*)[x×])?([1-9]\d*)")
GROUP = 16
"""Samples of a prompt, the default."""
MOST_PROMPTS = 12
"""Prompts of an epoch at most on one card, and half of it for each of several: they divide into two updates of whole
batches."""
MOST_HELD_OUT = 16
"""Prompts of an evaluation at most: it is a fixed cost."""
SEEN = 20
"""Times that each prompt is seen, if that takes this many epochs."""
LEAST_EPOCHS, MOST_EPOCHS = 30, 100
COLUMN = 42
"""Column of the comments."""
JUDGE = "X-GenGroup/PaCo-Reward-7B"
SERVED_JUDGE = "http://127.0.0.1:8000/v1#PaCo-Reward-7B"
LARGE = 15 * 10**9
"""Parameters of a generator that samples one image a forward."""
FORMS = {
    "normal": "bf16",
    "low": "int8; generator and what scores take turns on the card",
    "lowest": "int8 in main memory, sent layer by layer",
}
"""`memory` → how it holds the models on a card; the fastest first."""


class Job(NamedTuple):
    """What is asked for."""

    path: Path
    """Of the config."""
    spec: PolicySpec
    checkpoint: str
    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    reward: str
    """Of a user's file; empty for the judge's."""
    cards: int
    gigabytes: int
    """Of a card."""

    @property
    def folder(self) -> Path:
        """Folder of the prompts, beside the config."""
        return self.path.with_name(f"{self.path.stem}-prompts")

    @property
    def rewards(self) -> list[dict[str, Any]]:
        """The rewards' section."""
        if self.reward:
            return [{"name": self.reward}]
        prompt = self.train[0]
        reference = [{"name": "reference", "weight": 0.5}] if prompt.references else []
        if prompt.sources:
            return [{"name": "edit_consistency"}, *reference]
        clip = {"name": "panel_clip_text", "weight": 0.3 if reference else 0.8, "args": {"dtype": "bfloat16"}}
        return [{"name": "consistency", "weight": 0.2}, *reference, clip]

    @property
    def asks_judge(self) -> bool:
        """Whether a reward is a judge's."""
        return any(asks_judge(validated(RewardConfig, reward), run=False) for reward in self.rewards)

    @property
    def is_served(self) -> bool:
        """Whether the first card serves the judge, and the others train."""
        return self.asks_judge and self.cards > 1

    @property
    def trainers(self) -> int:
        """Cards that train."""
        return self.cards - self.is_served


def write_config(
    path: Path, *, prompts: str, model: str = "flux", card: str = "24", reward: str = "", references: str = ""
) -> tuple[Plan, list[str]]:
    """Write a config, and its prompts into a folder beside it.

    The arguments are those of `pacorl init`; an empty reward is the judge's.

    Returns:
        The plan, and lines with the commands that follow.

    Raises:
        ValueError: Something does not fit together; the message names it and the fix. Nothing is written.
    """
    job = _read_job(path, model=model, prompts=prompts, card=card, reward=reward, references=references)
    check_new(job.folder, fix="name another file for the config")
    save_prompts(job.train, job.folder / "train.jsonl")
    save_prompts(job.held_out, job.folder / "test.jsonl")
    try:
        text, plan = _fitting(job)
    except ValueError:
        rmtree(job.folder)
        raise
    write_atomic(path, text)
    return plan, [
        f"wrote {path} and {job.folder}",
        *_training(job),
        f"measure: pacorl report runs/{path.stem}    # held-out prompts before and after, with intervals",
    ]


def _read_job(path: Path, *, model: str, prompts: str, card: str, reward: str, references: str) -> Job:
    """Read prompts and references, and hold prompts out for the evaluation."""
    size = CARD.fullmatch(card)
    if not size:
        raise ValueError(f"--card {card} is no size of a card: give its gigabytes, as 24, or 8x80 for eight of 80")
    spec = POLICIES[model if model in POLICIES else kind_of(model)]
    checkpoint = spec.published if model in POLICIES else model
    if checkpoint == TINY:
        raise ValueError("--model tiny has recipes of its own: `extends: tiny` in a file of yours")
    spec.check_trainable(checkpoint)

    # Prompts, each with the character.
    records = prompts_from(prompts, model=checkpoint)
    if references:
        hero = find_character(references)
        for number, prompt in enumerate(records):
            images = hero.images[: max(1, spec.policy.max_references - len(prompt.sources))]
            cast = (dataclasses.replace(hero, images=images),)
            records[number] = dataclasses.replace(prompt, characters=cast, references=images)
    for prompt in records:
        check_images(spec.policy, prompt, f"model.kind {spec.kind}")
        if prompt.grid.count == 1 and not prompt.sources and not reward:
            raise ValueError(
                f"{prompt.place} is one image, and consistency needs several: write a set, as 'Four pictures of a "
                "fox: asleep, in snow, in a boat, reading', or name a reward of yours with --reward file.py:NAME"
            )
    train, held_out, _ = split_prompts(records, test=min(MOST_HELD_OUT, math.ceil(len(records) / 8)))
    return Job(path, spec, checkpoint, train, held_out, reward, cards=int(size[1] or 1), gigabytes=int(size[2]))


def _fitting(job: Job) -> tuple[str, Plan]:
    """Find the fastest form of the weights whose plan fits the card; return its text and plan."""
    card_bytes = job.gigabytes * 2**30
    for memory in FORMS:
        text = _text(job, memory)
        config = validated(PolicyConfig, parse_yaml(text, name=str(job.path)))
        # As the smallest card runs it, whatever card this machine has.
        plan = plan_policy(with_checkpointing(config, on=True))
        if plan.peak_bytes + CARD_MARGIN <= card_bytes:
            name = f"a card of {job.gigabytes} GB"
            return text, dataclasses.replace(plan, device=name, device_bytes=card_bytes, main_bytes=None)
    raise ValueError(
        f"--card {job.gigabytes}: {job.checkpoint} needs {size_text(plan.peak_bytes + CARD_MARGIN)}; take a smaller "
        "--model, such as klein, or a larger card"
    )


def _text(job: Job, memory: str) -> str:
    """Write the YAML for a form of the weights: every setting that is no default, with its reason."""
    spec, is_small = job.spec, memory != "normal"
    most = MOST_PROMPTS if job.trainers == 1 else MOST_PROMPTS // 2
    prompts = job.trainers * min(most, math.ceil(len(job.train) / job.trainers))
    epochs = min(MOST_EPOCHS, max(LEAST_EPOCHS, math.ceil(SEEN * len(job.train) / prompts)))
    rows = [
        (f"# {job.checkpoint} on {job.cards} × {job.gigabytes} GB. Settings left out have the paper's values.", ""),
        (f"# `pacorl config KEY` explains a key, `pacorl train-policy {job.path} --dry-run` plans the run again.", ""),
        (f"out: {_yaml(f'runs/{job.path.stem}')}", "log, page, checkpoints and the LoRA"),
        (f"epochs: {epochs}", f"each prompt is seen {epochs * prompts / len(job.train):.0f} times"),
        (f"prompts_per_epoch: {prompts}", f"with {GROUP} samples each {GROUP * prompts} images"),
        (f"memory: {memory}", FORMS[memory]),
    ]
    if job.cards > 1:
        why = "cards that train" + ", and one more for the judge" * job.is_served
        rows.append((f"processes: {job.trainers}", why))

    # The generator. Compiled steps are sampled as they are trained, for which the smallest cards have no room.
    rows += [("model:", ""), (f"  kind: {spec.kind}", "")]
    if job.checkpoint != spec.published:
        rows.append((f"  checkpoint: {_yaml(job.checkpoint)}", ""))
    if spec.kind == "kontext":
        rows.append(("  guidance_scale: 2.5", "as its pipeline's example"))
    rows.append(("  gradient_checkpointing: auto", "off if the run fits the card without: time, not the result"))
    if memory != "lowest":
        rows.append(("  compile: blocks", "takes 0.7 of the time"))

    # Prompts, sampling and evaluation.
    size = ("[512, 512]", "judged at 1024")
    if job.train[0].sources:
        size = ("[384, 384]", "an area, in the source's shape")
    batch = 4 if is_small else 1
    if spec.parameters < LARGE:
        batch = 8 if is_small else 4
    rows += [
        ("prompts:", ""),
        (f"  train: {_yaml(str(job.folder / 'train.jsonl'))}", f"{len(job.train)} prompts"),
        (f"  evaluation: {_yaml(str(job.folder / 'test.jsonl'))}", "held out, with all of their text or image"),
        ("sampling:", ""),
        (f"  size: {size[0]}", size[1]),
        (f"  batch: {batch}", "images a forward, at most"),
    ]
    if is_small:
        rows.append(("  tree: {seeds: 2}", "samples of a group share their first steps"))
        rows.append(("  suffix: {solver: ab2, steps: 4}", "second order after the noise: fewer forwards"))
        rows.append(("evaluation: {every: 20}", "epochs, since an evaluation is a fixed cost"))

    # Rewards; credit and clip range follow from them when the run starts.
    judge = {"checkpoint": SERVED_JUDGE if job.is_served else JUDGE}
    rows.append((f"judge: {_yaml(judge) if job.asks_judge else 'none'}", ""))
    if len(job.rewards) == 1:
        rows.append(("advantages: {aggregate: weighted_sum}", "one reward needs no log-taming"))
    rows.append(("rewards:", "credit and clip range follow from them"))
    rows += [(f"  - {_yaml(reward)}", "") for reward in job.rewards]
    return "".join(f"{f'{text:<{COLUMN}} # {why}' if why else text}\n" for text, why in rows)


def _training(job: Job) -> list[str]:
    """List the commands that serve the judge and train."""
    train = f"train-policy {job.path} --resume auto"
    if job.cards == 1:
        return [f"train: pacorl {train}"]
    cards = ",".join(map(str, range(job.is_served, job.cards)))
    torchrun = f"torchrun --standalone --nproc_per_node {job.trainers} -m pacorl.cli {train}"
    serve = [f"serve: CUDA_VISIBLE_DEVICES=0 pacorl serve {JUDGE} --backend vllm"] if job.is_served else []
    return [*serve, f"train: CUDA_VISIBLE_DEVICES={cards} {torchrun}"]


def _yaml(value: Any) -> str:
    """Format a value in one line; JSON is YAML."""
    return json.dumps(value, ensure_ascii=False)
