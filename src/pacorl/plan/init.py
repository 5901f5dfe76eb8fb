"""A config of one's own: `pacorl init my.yaml --model flux --prompts mine.txt --card 24`.

Every setting that depends on prompts, model, reward and card is derived, and explained in half a line. Of the ways to
fit a card, the fastest whose plan fits is taken.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

from pacorl.config.base import validated
from pacorl.config.reward_section import RewardConfig
from pacorl.grpo.builders import with_credit
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.files import check_new, check_writable, write_atomic
from pacorl.models.policies import POLICIES, kind_of
from pacorl.models.policies.policy import check_images
from pacorl.models.policies.spec import PolicySpec
from pacorl.plan.plan import CARD_MARGIN, Plan, plan_policy, size_text
from pacorl.records.characters import find_character
from pacorl.records.edits import save_edits
from pacorl.records.leaks import split_prompts
from pacorl.records.prompts import prompts_from, save_prompts
from pacorl.rewards import asks_judge
from pacorl.types import TINY, Prompt

CARD = re.compile(r"(?:(\d+)[x×])?(\d+)")
MOST_HELD_OUT = 16
"""Prompts of an evaluation at most: it is a fixed cost."""
SEEN = 20
"""Times that each prompt is seen, within `EPOCHS`."""
EPOCHS = (30, 100)
JUDGE_BYTES = 17 * 10**9
LARGE = 15 * 10**9
"""Parameters of a generator that samples one image a forward."""
COLUMN = 42
"""Column of the comments."""


@dataclass(frozen=True, slots=True)
class Form:
    """A way to hold the models on a card."""

    memory: str
    checkpointing: bool
    bytes: int
    """Of a parameter on the card."""
    why: str


FORMS = (
    Form("normal", False, 2, "bf16, and no activation is computed twice"),
    Form("normal", True, 2, "bf16; activations are computed again in the backward"),
    Form("low", True, 1, "int8; generator and what scores take turns on the card"),
    Form("lowest", True, 0, "int8 in main memory, sent layer by layer"),
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
    check_writable(path)
    job = _read_job(path, model=model, prompts=prompts, card=card, reward=reward, references=references)
    check_new(path, job.folder, fix="name another file")
    save = save_edits if job.edits else save_prompts
    save(job.train, job.folder / "train.jsonl")
    save(job.held_out, job.folder / "test.jsonl")
    try:
        config, plan, form = _fitting(job)
    except ValueError:
        rmtree(job.folder)
        raise
    write_atomic(path, _text(job, config, form))
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


def _fitting(job: Job) -> tuple[PolicyConfig, Plan, Form]:
    """Find the fastest form whose plan fits the card."""
    plan = None
    for form in FORMS:
        # What cannot fit by its weights alone is not planned.
        config = validated(PolicyConfig, _document(job, form))
        judge = config.judge and not config.judge.remote and form.memory == "normal"
        weights = job.spec.parameters * form.bytes + JUDGE_BYTES * bool(judge) + CARD_MARGIN
        if weights > job.gigabytes * 2**30:
            continue
        plan = plan_policy(config)
        if plan.peak_bytes + CARD_MARGIN <= job.gigabytes * 2**30:
            card = {"device": f"a card of {job.gigabytes} GB", "device_bytes": job.gigabytes * 2**30}
            return config, dataclasses.replace(plan, **card), form
    assert plan
    raise ValueError(
        f"--card {job.gigabytes}: {job.checkpoint} needs {size_text(plan.peak_bytes + CARD_MARGIN)}; take a smaller "
        "--model, such as klein, or a larger card"
    )


def _document(job: Job, form: Form) -> dict[str, Any]:
    """Build the config's document."""
    spec = job.spec
    rewards = job.rewards
    asks = any(asks_judge(validated(RewardConfig, reward), run=False) for reward in rewards)
    elsewhere = asks and job.cards > 1
    trainers = max(1, job.cards - elsewhere)
    # With 16 samples a prompt, as many prompts for each card divide into two updates of whole batches.
    per_card = min(math.ceil(len(job.train) / trainers), 12 if trainers == 1 else 6)
    per_epoch = per_card * trainers
    least, most = EPOCHS
    is_small = form.memory != "normal"
    model: dict[str, Any] = {"kind": spec.kind}
    if job.checkpoint != spec.published:
        model["checkpoint"] = job.checkpoint
    if spec.kind == "kontext":
        model["guidance_scale"] = 2.5
    model |= {"gradient_checkpointing": form.checkpointing, "compile": "none" if form.memory == "lowest" else "blocks"}
    sampling: dict[str, Any] = {"size": [384, 384] if job.edits else [512, 512]}
    sampling["batch"] = (8 if is_small else 4) if spec.parameters < LARGE else (4 if is_small else 1)
    if is_small:
        sampling |= {"tree": {"seeds": 2}, "suffix": {"solver": "ab2", "steps": 4}}
    judge = "http://127.0.0.1:8000/v1#PaCo-Reward-7B" if elsewhere else "X-GenGroup/PaCo-Reward-7B"
    document: dict[str, Any] = {
        "out": f"runs/{job.path.stem}",
        "epochs": min(most, max(least, math.ceil(SEEN * len(job.train) / per_epoch))),
        "prompts_per_epoch": per_epoch,
        "processes": trainers,
        "memory": form.memory,
        "model": model,
        "prompts": {
            "train": str(job.folder / "train.jsonl"),
            "evaluation": str(job.folder / "test.jsonl"),
            "evaluation_limit": len(job.held_out),
        },
        "sampling": sampling,
        "judge": {"checkpoint": judge} if asks else "none",
        "rewards": rewards,
    }
    if is_small:
        document["evaluation"] = {"every": 20}
    if len(rewards) == 1:
        document["advantages"] = {"aggregate": "weighted_sum"}
    config, _ = with_credit(validated(PolicyConfig, document), {}, job.train, run=False)
    document.setdefault("advantages", {})["credit"] = config.advantages.credit
    document["objective"] = {"clip_range": config.objective.model_dump()["clip_range"]}
    return document


# --- the file --------------------------------------------------------------------------------------------------


def _text(job: Job, config: PolicyConfig, form: Form) -> str:
    """Format a config as YAML, a comment beside each setting."""
    document = _document(job, form)
    if config.processes == 1:
        del document["processes"]
    if form.memory == "normal":
        del document["memory"]
    card = f"{job.cards} cards" if job.cards > 1 else "one card"
    lines = [
        f"# {job.checkpoint} on {card} of {job.gigabytes} GB, {len(job.train)} prompts. What is left out has the "
        "paper's value:",
        f"# `pacorl config KEY` explains a key, `pacorl train-policy {job.path} --dry-run` plans the run again.",
    ]
    comments = _comments(job, config, form)

    def add(line: str, key: str) -> None:
        lines.append(f"{line:<{COLUMN}} # {comments[key]}" if key in comments else line)

    for key, value in document.items():
        if key == "rewards":
            add("rewards:", key)
            lines += [f"  - {_flow(reward)}" for reward in value]
        elif key in ("prompts", "sampling"):
            add(f"{key}:", key)
            for name, entry in value.items():
                add(f"  {name}: {_flow(entry)}", f"{key}.{name}")
        else:
            add(f"{key}: {_flow(value)}", key)
    return "\n".join(lines) + "\n"


def _comments(job: Job, config: PolicyConfig, form: Form) -> Mapping[str, str]:
    """Explain each setting."""
    seen = config.epochs * config.prompts_per_epoch / len(job.train)
    samples = config.prompts_per_epoch * config.group_size
    credit = "a reward without scores of panels: a set learns as a whole"
    if config.advantages.credit == "panel":
        credit = "every reward has scores of panels: each panel learns its own"
    rewards = "consistent pairs, and panels that show their texts"
    if job.reward or job.edits:
        rewards = "yours" if job.reward else "what should stay is kept, the instruction is followed"
        credit = "an edit is one image" if job.edits else credit
    return {
        "out": "log, page, checkpoints and the LoRA",
        "epochs": f"each prompt is seen {seen:.0f} times",
        "prompts_per_epoch": f"with 16 samples each {samples} images",
        "processes": f"cards that train; {'one more is the judge' if job.cards > config.processes else 'all of them'}",
        "memory": form.why,
        "model": "compiled blocks take 0.7 of the time" if config.model.compile != "none" else form.why,
        "prompts.evaluation": f"{len(job.held_out)} held out, with all that shares their text or image",
        "prompts.evaluation_limit": "all of them, at 1024 × 1024",
        "sampling.size": "an area, in the source's shape" if job.edits else "trained small, judged large",
        "sampling.batch": "images a forward, at most",
        "sampling.tree": "samples of a group share their first steps",
        "sampling.suffix": "second order after the noise: fewer forwards",
        "evaluation": "epochs between evaluations",
        "judge": "a server on a card of its own" if config.judge and config.judge.remote else "in this process",
        "rewards": rewards,
        "advantages": credit,
        "objective": "the clip range that fits this credit",
    }


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
        yield "serve: CUDA_VISIBLE_DEVICES=0 pacorl serve X-GenGroup/PaCo-Reward-7B --backend vllm"
    if config.processes > 1:
        first = int(bool(config.judge and config.judge.remote))
        cards = ",".join(map(str, range(first, first + config.processes)))
        train = (
            f"CUDA_VISIBLE_DEVICES={cards} torchrun --standalone --nproc_per_node {config.processes} -m pacorl.cli "
            f"train-policy {path} --resume auto"
        )
    yield f"train: {train}"
    yield f"measure: pacorl report {config.out}    # held-out prompts before and after, with intervals"
