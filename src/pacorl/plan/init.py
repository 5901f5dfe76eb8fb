"""A config of one's own: `pacorl init my.yaml --model flux --prompts mine.txt --card 24`.

Every setting that depends on prompts, model, reward and card is derived, and explained in half a line. Of the ways to
fit a card, the fastest whose plan fits is taken.
"""

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

from pacorl.config.base import load, read_config, validated
from pacorl.config.reward_section import RewardConfig
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.documents import blamed_on
from pacorl.io.files import check_new, write_atomic
from pacorl.models.policies import POLICIES, kind_of
from pacorl.models.policies.policy import check_images
from pacorl.models.policies.spec import PolicySpec
from pacorl.plan.plan import CARD_MARGIN, Plan, plan_training, size_text
from pacorl.plan.sources import rewards_of
from pacorl.records.characters import find_character
from pacorl.records.leaks import split_prompts
from pacorl.records.prompts import kinds_of, load_prompts, save_prompts
from pacorl.report.html import render
from pacorl.rewards import asks_judge
from pacorl.types import TINY, Prompt

CARD = re.compile(r"(?:([1-9]\d*)x)?([1-9]\d*)")
"""Cards, if there are several, and the gigabytes of each."""
MOST_PROMPTS = 12
"""Prompts of an epoch at most, and half of it for each of several processes: they divide into two updates of whole
batches."""
MOST_HELD_OUT = 16
"""Prompts of an evaluation at most: it is a fixed cost."""
EVALUATION_IMAGES = 16
"""Images of an evaluation at least: of few prompts each is generated from several noises."""
SEEN = 20
"""Times that each prompt is seen, if that takes this many epochs."""
LEAST_EPOCHS = 30
MOST_EPOCHS = 100
JUDGE = "X-GenGroup/PaCo-Reward-7B"
SERVED_JUDGE = "http://127.0.0.1:8000/v1#PaCo-Reward-7B"
PUBLISHED_ROWS = {
    "flux": ("t2is data/T2IS-Bench --aesthetics", "0.490 → 0.576"),
    "kontext": ("gedit GEdit-Bench/en.jsonl", "5.956 → 6.469"),
    "qwen_edit": ("gedit GEdit-Bench/en.jsonl", "7.223 → 7.325"),
}
"""Benchmark of a kind of generator, and the paper's average before and after (arXiv 2512.04784, Tab. 3 and 4)."""
LARGE = 15 * 10**9
"""Parameters from which a generator samples one image per forward."""


class Form(NamedTuple):
    """A way to fit a card."""

    memory: str
    gradient_checkpointing: bool
    text: str
    """Description of how models are held."""


FORMS = (
    Form("normal", False, "bf16"),
    Form("normal", True, "bf16"),
    Form("low", True, "int8; generator and what scores take turns on the card"),
    Form("lowest", True, "int8 in main memory, sent layer by layer"),
)
"""The fastest first."""


class Job(NamedTuple):
    """Training that a user requests."""

    path: Path
    """Path of the config."""
    spec: PolicySpec
    checkpoint: str
    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    read_as: str
    """Report on the prompts that were read, with their lines in the user's own file."""
    rewards: Sequence[dict[str, Any]]
    asks_judge: bool
    """Whether a reward is a judge's."""
    cards: int
    gigabytes: int
    """Memory of a card."""

    @property
    def folder(self) -> Path:
        """Folder of the prompts, next to the config."""
        return self.path.with_name(f"{self.path.stem}-prompts")

    @property
    def is_served(self) -> bool:
        """Whether the first card serves the judge, and the others train."""
        return self.asks_judge and self.cards > 1

    @property
    def processes(self) -> int:
        """Number of cards that train."""
        return self.cards - self.is_served


def write_config(job: Job) -> tuple[Plan, str]:
    """Write a config, and its prompts into a folder next to it, in the fastest form whose plan fits the card.

    Returns:
        The plan, and the commands that follow.

    Raises:
        ValueError: The model does not fit a card of this size, and nothing is written.
    """
    check_new(job.folder, fix="name another file for the config")
    try:
        save_prompts(job.train, job.folder / "train.jsonl")
        save_prompts(job.held_out, job.folder / "test.jsonl")
        plan = _write_fitting(job)
    except BaseException:
        rmtree(job.folder, ignore_errors=True)
        job.path.unlink(missing_ok=True)
        raise
    absences = plan.absences
    if job.is_served:
        # Its server is started by the first of the commands that follow.
        absences = [absence for absence in absences if absence.key != "judge.checkpoint"]
    plan = dataclasses.replace(plan, absences=absences, facts={**plan.facts, "read_as": job.read_as})
    row = None if job.checkpoint == TINY else PUBLISHED_ROWS.get(job.spec.kind)
    memory = read_config(job.path).get("memory")
    return plan, render("init_next.txt", job=job, judge=JUDGE, row=row, memory=memory)


def _write_fitting(job: Job) -> Plan:
    """Write the config in one form after the other until its plan fits, and return the plan."""
    is_tiny = job.checkpoint == TINY
    for form in FORMS:
        write_atomic(job.path, _text(job, form))
        plan = plan_training(load(PolicyConfig, job.path), card=0 if is_tiny else job.gigabytes)
        needed = plan.peak_bytes + CARD_MARGIN
        if is_tiny or needed <= job.gigabytes * 2**30:
            return plan
    raise ValueError(
        f"--card {job.gigabytes}: {job.checkpoint} needs {size_text(needed)}; take a smaller --model, such as klein, "
        "or a larger card"
    )


def read_job(path: Path, *, model: str, prompts: str, card: str, reward: str, references: str) -> Job:
    """Read prompts and references, and hold prompts out for the evaluation.

    Same arguments as `pacorl init`; an empty reward selects the judge's.

    Raises:
        ValueError: Something does not fit together; the message names it and the fix.
    """
    size = CARD.fullmatch(card)
    if not size:
        raise ValueError(f"--card {card} is no size of a card: give its gigabytes, as 24, or 8x80 for eight of 80")
    if model == TINY or "/" in model or Path(model).is_dir():
        spec, checkpoint = POLICIES[kind_of(model)], model
    else:
        spec = POLICIES.named(model)
        checkpoint = spec.published

    # Prompts, each with the character.
    records = load_prompts(prompts, model=checkpoint)
    if references:
        hero = find_character(references)
        for number, prompt in enumerate(records):
            # A model takes a limited number of images per prompt, sources included.
            images = hero.images[: max(1, spec.policy.max_references - len(prompt.sources))]
            cast = (dataclasses.replace(hero, images=images),)
            records[number] = dataclasses.replace(prompt, characters=cast, references=images)
    # The requested reward, or else the judge's that fit the prompts.
    rewards = [{"name": reward}]
    if not reward:
        rewards = read_config(Path(TINY))["rewards"] if model == TINY else _judged(records[0])
    configs = [validated(RewardConfig, entry) for entry in rewards]
    # Fail before a file is written if the model or a reward cannot use a prompt.
    for prompt in records:
        check_images(spec.policy, prompt, f"model.kind {spec.kind}")
    with blamed_on("--reward" if reward else "without --reward FILE:NAME"):
        for function in rewards_of(configs).values():
            function.check(records)
    train, held_out = split_prompts(records, test=min(MOST_HELD_OUT, math.ceil(len(records) / 4)))
    asking = any(map(asks_judge, configs))
    cards = 1 if model == TINY else int(size[1] or 1)
    return Job(path, spec, checkpoint, train, held_out, kinds_of(records), rewards, asking, cards, int(size[2]))


def _judged(prompt: Prompt) -> list[dict[str, Any]]:
    """Choose the rewards of a judge for prompts like this one."""
    reference = [{"name": "reference", "weight": 0.5}] if prompt.references else []
    if prompt.sources:
        return [{"name": "edit_consistency"}, *reference]
    clip = {"name": "panel_clip_text", "weight": 0.3 if reference else 0.8, "args": {"dtype": "bfloat16"}}
    return [{"name": "consistency", "weight": 0.2}, *reference, clip]


def _text(job: Job, form: Form) -> str:
    """Write the YAML for a form of the weights: every setting that is no default, with its reason."""
    count = len(job.train)
    most = MOST_PROMPTS // 2 if job.processes > 1 else MOST_PROMPTS
    prompts = job.processes * min(most, math.ceil(count / job.processes))
    batch, batch_of_large = (4, 1) if form.memory == "normal" else (8, 4)
    template = "init_tiny.yaml" if job.checkpoint == TINY else "init.yaml"
    return render(
        template,
        job=job,
        epochs=min(MOST_EPOCHS, max(LEAST_EPOCHS, math.ceil(SEEN * count / prompts))),
        prompts=prompts,
        samples_per_prompt=math.ceil(EVALUATION_IMAGES / len(job.held_out)),
        form=form,
        quoted=repr,
        batch=batch_of_large if job.spec.parameters >= LARGE else batch,
        judge=JUDGE,
        served_judge=SERVED_JUDGE,
        rewards=[json.dumps(reward, ensure_ascii=False) for reward in job.rewards],
    )
