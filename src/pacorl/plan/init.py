"""A config of one's own: `pacorl init my.yaml --model flux --prompts mine.txt --card 24`.

Every setting that depends on prompts, model, reward and card is derived, and explained in half a line. Of the ways to
fit a card, the fastest whose plan fits is taken.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

from pacorl.config.base import load, validated
from pacorl.config.reward_section import RewardConfig
from pacorl.grpo.builders import with_credit
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.files import check_new, write_atomic
from pacorl.models.policies import POLICIES, kind_of
from pacorl.models.policies.policy import check_images
from pacorl.models.policies.spec import PolicySpec
from pacorl.plan.plan import CARD_MARGIN, Plan, plan_policy, size_text
from pacorl.records.characters import find_character
from pacorl.records.leaks import split_prompts
from pacorl.records.prompts import prompts_from, save_prompts
from pacorl.rewards import asks_judge
from pacorl.types import TINY, Prompt

CARD = re.compile(r"(?:(\d+)[x×])?(\d+)")
MOST_HELD_OUT = 16
"""Prompts of an evaluation at most: it is a fixed cost."""
SEEN = 20
"""Times that each prompt is seen, if that takes this many epochs."""
LEAST_EPOCHS, MOST_EPOCHS = 30, 100
JUDGE = "X-GenGroup/PaCo-Reward-7B"
JUDGE_BYTES = 17 * 10**9
LARGE = 15 * 10**9
"""Parameters of a generator that samples one image a forward."""
COLUMN = 42
"""Column of the comments."""

Settings = dict[str, tuple[Any, str]]
"""Dotted key → its value and the reason."""


@dataclass(frozen=True, slots=True)
class Form:
    """A way to hold the models on a card."""

    memory: str
    checkpointing: bool
    bytes: int
    """Of a parameter on the card."""
    why: str
    is_reduced: bool = False
    """Whether the adapter and the evaluation's images are smaller, too."""


FORMS = (
    Form("normal", False, 2, "bf16, and no activation is computed twice"),
    Form("normal", True, 2, "bf16; activations are computed again in the backward"),
    Form("low", True, 1, "int8; generator and what scores take turns on the card"),
    Form("lowest", True, 0, "int8 in main memory, sent layer by layer"),
    Form("lowest", True, 0, "int8 in main memory, sent layer by layer", is_reduced=True),
)


@dataclass(frozen=True, slots=True)
class Job:
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

    @property
    def folder(self) -> Path:
        """Folder of the prompts, beside the config."""
        return self.path.with_name(f"{self.path.stem}-prompts")

    @property
    def edits(self) -> bool:
        """Whether an image is edited."""
        return bool(self.train[0].sources)

    @property
    def rewards(self) -> list[dict[str, Any]]:
        """The rewards' section."""
        if self.reward:
            return [{"name": self.reward}]
        has_references = any(prompt.references for prompt in self.train)
        reference = [{"name": "reference", "weight": 0.5}] if has_references else []
        if self.edits:
            return [{"name": "edit_consistency"}, *reference]
        clip = {"name": "panel_clip_text", "weight": 0.3 if has_references else 0.8, "args": {"dtype": "bfloat16"}}
        return [{"name": "consistency", "weight": 0.2}, *reference, clip]


def write_config(
    path: Path, *, prompts: str, model: str = "flux", card: str = "24", reward: str = "", references: str = ""
) -> tuple[Plan, list[str]]:
    """Write a config, and its prompts into a folder beside it.

    Args:
        path: of the new config.
        prompts: a file of sentences, sets or edits.
        model: a kind of generator, or a checkpoint.
        card: gigabytes of the card, as 24, or of several as 8x80.
        reward: `file.py:NAME` in place of the judge's; empty for those.
        references: a character's folder for all prompts; empty for none.

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
        settings, config, plan = _fitting(job)
    except ValueError:
        rmtree(job.folder)
        raise
    write_atomic(path, _text(job, settings))
    return plan, [f"wrote {path} and {job.folder}", *_next_steps(path, config)]


def _read_job(path: Path, *, model: str, prompts: str, card: str, reward: str, references: str) -> Job:
    """Read prompts and references, and hold prompts out for the evaluation."""
    sizes = CARD.fullmatch(card)
    if not sizes:
        raise ValueError(f"--card {card} is no size of a card: give its gigabytes, as 24, or 8x80 for eight of 80")
    kind = model if model in POLICIES else kind_of(model)
    spec = POLICIES[kind]
    checkpoint = spec.published if model in POLICIES else model
    if checkpoint == TINY:
        raise ValueError("--model tiny has recipes of its own: `extends: tiny` in a file of yours")
    spec.check_trainable(checkpoint)

    # Prompts, each with the character.
    found = prompts_from(prompts, model=checkpoint)
    if references:
        hero = find_character(references)
        most = spec.policy.max_references
        if not most:
            kinds = ", ".join(name for name, other in POLICIES.items() if other.policy.max_references)
            raise ValueError(f"--references {references}: model {kind} takes no reference images; {kinds} do")
        with_hero = []
        for prompt in found:
            images = hero.images[: most - len(prompt.sources)]
            cast = (dataclasses.replace(hero, images=images),)
            with_hero.append(dataclasses.replace(prompt, characters=cast, references=images))
        found = with_hero
    for prompt in found:
        check_images(spec.policy, prompt, f"model.kind {kind}")
    lonely = [prompt for prompt in found if prompt.grid.count == 1 and not prompt.sources]
    if lonely and not reward:
        raise ValueError(
            f"{lonely[0].place} is one image, and consistency needs several: write a set, as 'Four pictures of a fox: "
            "asleep, in snow, in a boat, reading', or name a reward of yours with --reward file.py:NAME"
        )
    train, held_out, _ = split_prompts(found, test=min(MOST_HELD_OUT, math.ceil(len(found) / 8)))
    return Job(path, spec, checkpoint, train, held_out, reward, int(sizes[1] or 1), int(sizes[2]))


def _fitting(job: Job) -> tuple[Settings, PolicyConfig, Plan]:
    """Find the fastest form whose plan fits the card."""
    room = job.gigabytes * 2**30 - CARD_MARGIN
    plan = None
    for form in FORMS:
        settings = _settings(job, form)
        config = _config(settings)
        # What cannot fit by its weights alone is not planned.
        judge = config.judge and not config.judge.remote and not config.in_turns
        if job.spec.parameters * form.bytes + JUDGE_BYTES * bool(judge) > room:
            continue
        plan = plan_policy(config)
        if plan.peak_bytes <= room:
            name, size = f"a card of {job.gigabytes} GB", job.gigabytes * 2**30
            return settings, config, dataclasses.replace(plan, device=name, device_bytes=size)
    assert plan
    raise ValueError(
        f"--card {job.gigabytes}: {job.checkpoint} needs {size_text(plan.peak_bytes + CARD_MARGIN)}; take a smaller "
        "--model, such as klein, or a larger card"
    )


def _settings(job: Job, form: Form) -> Settings:
    """Derive every setting that is no default, with its reason."""
    spec, is_small = job.spec, form.memory != "normal"
    settings: Settings = {"out": (f"runs/{job.path.stem}", "log, page, checkpoints and the LoRA")}

    # Cards, and what an epoch draws. With 16 samples a prompt, as many prompts for each card divide into two updates of
    # whole batches.
    asks = any(asks_judge(validated(RewardConfig, reward), run=False) for reward in job.rewards)
    is_served = asks and job.cards > 1
    trainers = max(1, job.cards - is_served)
    prompts = trainers * min(math.ceil(len(job.train) / trainers), 12 if trainers == 1 else 6)
    epochs = min(MOST_EPOCHS, max(LEAST_EPOCHS, math.ceil(SEEN * len(job.train) / prompts)))
    settings["epochs"] = (epochs, f"each prompt is seen {epochs * prompts / len(job.train):.0f} times")
    settings["prompts_per_epoch"] = (prompts, f"with 16 samples each {16 * prompts} images")
    if trainers > 1:
        settings["processes"] = (trainers, "cards that train" + ", and one more for the judge" * is_served)

    # The generator.
    if is_small:
        settings["memory"] = (form.memory, form.why)
    model: dict[str, Any] = {"kind": spec.kind}
    if job.checkpoint != spec.published:
        model["checkpoint"] = job.checkpoint
    if spec.kind == "kontext":
        model["guidance_scale"] = 2.5
    model |= {"gradient_checkpointing": form.checkpointing}
    # Compiled steps are sampled as they are trained, for which the smallest cards have no room.
    model |= {} if form.memory == "lowest" else {"compile": "blocks"}
    settings["model"] = (model, form.why if form.memory == "lowest" else "compiled blocks take 0.7 of the time")

    if form.is_reduced:
        settings["adapter"] = ({"rank": 16, "alpha": 32}, "a quarter of the paper's, for this card")

    # Prompts, sampling and evaluation.
    settings["prompts.train"] = (str(job.folder / "train.jsonl"), f"{len(job.train)} prompts")
    settings["prompts.evaluation"] = (str(job.folder / "test.jsonl"), "held out, with all of their text or image")
    settings["prompts.evaluation_limit"] = (len(job.held_out), "all of them")
    size = ([384, 384], "an area, in the source's shape") if job.edits else ([512, 512], "trained small, judged large")
    settings["sampling.size"] = size
    batch = (8 if is_small else 4) if spec.parameters < LARGE else (4 if is_small else 1)
    settings["sampling.batch"] = (2 if form.is_reduced else batch, "images a forward, at most")
    if is_small:
        settings["sampling.tree"] = ({"seeds": 2}, "samples of a group share their first steps")
        settings["sampling.suffix"] = ({"solver": "ab2", "steps": 4}, "second order after the noise: fewer forwards")
        evaluation = {"every": 20} | ({"size": [512, 512]} if form.is_reduced else {})
        settings["evaluation"] = (evaluation, "epochs, since an evaluation is a fixed cost")

    # Rewards, and the credit and clip range that follow.
    judge = {"checkpoint": "http://127.0.0.1:8000/v1#PaCo-Reward-7B" if is_served else JUDGE}
    settings["judge"] = (judge if asks else "none", "a server on its own card" if is_served else "")
    settings["rewards"] = (job.rewards, "")
    advantages: dict[str, Any] = {"aggregate": "weighted_sum"} if len(job.rewards) == 1 else {}
    settings["advantages"] = (advantages, "")
    config, why = with_credit(_config(settings), {}, job.train, run=False)
    settings["advantages"] = (advantages | {"credit": config.advantages.credit}, why.partition(": ")[2])
    settings["objective"] = ({"clip_range": config.objective.model_dump()["clip_range"]}, "fits this credit")
    return settings


# --- the file --------------------------------------------------------------------------------------------------


def _config(settings: Settings) -> PolicyConfig:
    return load(PolicyConfig, None, [f"{key}={_flow(value)}" for key, (value, _) in settings.items()])


def _text(job: Job, settings: Settings) -> str:
    """Format settings as YAML, each with its reason."""
    cards = f"{job.cards} cards" if job.cards > 1 else "one card"
    lines = [
        f"# {job.checkpoint} on {cards} of {job.gigabytes} GB. Settings left out have the paper's values.",
        f"# `pacorl config KEY` explains a key, `pacorl train-policy {job.path} --dry-run` plans the run again.",
    ]
    within = ""
    for key, (value, why) in settings.items():
        section, _, name = key.rpartition(".")
        if section not in ("", within):
            lines.append(f"{section}:")
        within = section
        line = f"{'  ' * bool(section)}{name}: {'' if isinstance(value, list) and name == 'rewards' else _flow(value)}"
        lines.append(f"{line:<{COLUMN}} # {why}" if why else line.rstrip())
        lines += [f"  - {_flow(reward)}" for reward in value] if name == "rewards" else []
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """Format a value as YAML in one line."""
    match value:
        case dict():
            return "{" + ", ".join(f"{key}: {_flow(entry)}" for key, entry in value.items()) + "}"
        case list():
            return f"[{', '.join(map(_flow, value))}]"
        case str() if not re.fullmatch(r"[A-Za-z][\w./-]*", value):
            return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _next_steps(path: Path, config: PolicyConfig) -> Iterator[str]:
    """List the commands that train and that measure the result."""
    train = f"pacorl train-policy {path} --resume auto"
    if config.judge and config.judge.remote:
        yield f"serve: CUDA_VISIBLE_DEVICES=0 pacorl serve {JUDGE} --backend vllm"
    if config.processes > 1:
        first = int(bool(config.judge and config.judge.remote))
        cards = ",".join(map(str, range(first, first + config.processes)))
        train = (
            f"CUDA_VISIBLE_DEVICES={cards} torchrun --standalone --nproc_per_node {config.processes} -m pacorl.cli "
            f"train-policy {path} --resume auto"
        )
    yield f"train: {train}"
    yield f"measure: pacorl report {config.out}    # held-out prompts before and after, with intervals"
