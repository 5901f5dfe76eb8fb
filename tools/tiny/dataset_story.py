"""The whole method in small: `python -m tools.tiny dataset-story`.

    prompts → diversify → generate → pair → annotate → explain → export → train-reward → serve → train-policy

Every step calls the code of its command, with the committed tiny checkpoints. Annotators and the explaining model are
simulated by the oracle, with noise, behind the same HTTP APIs as real ones.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from fastapi import FastAPI

from pacorl.config.base import load
from pacorl.config.recipes import recipe
from pacorl.core.grid import parse_layout
from pacorl.core.ranking import Floats, Indices, bootstrap
from pacorl.dataset.diversify import diversify
from pacorl.dataset.explain import explain
from pacorl.dataset.export import export
from pacorl.dataset.grids import generate, image_source, pair
from pacorl.dataset.prompts import TINY, make_writer, read_taxonomy, write_all
from pacorl.dataset.selections import Goal
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import train_policy
from pacorl.io.documents import JsonObject, read_jsonl, write_json
from pacorl.io.images import open_image
from pacorl.io.quiet import quiet_loading
from pacorl.judge.http.chat import ChatModel
from pacorl.judge.http.http_judge import HttpJudge
from pacorl.judge.judge import Judge
from pacorl.judge.local import TINY_JUDGE, LocalJudge
from pacorl.judge_training.judge_config import JudgeConfig
from pacorl.judge_training.judge_trainer import JudgeTrainer
from pacorl.records.comparisons import load_comparisons
from pacorl.serve.builtin import create_app
from pacorl.studio.annotate.links import Sharing
from pacorl.studio.annotate.routes import make_app, prepare
from pacorl.studio.annotate.simulate import read_panel, shared_attributes, simulate
from pacorl.studio.annotate.store import Store
from pacorl.tiny.characters import IDENTITY, KEPT, Panel
from pacorl.types import Comparison, Question, Size
from tools.tiny.serving import serving_app

GRID_SIZE = Size(64, 64)
JUDGE = "home-made"
"""Name of the trained judge at its server."""
WRITTEN_PER_KEPT = 4
MEASURED = ("before", "after", "margin")


@dataclass(frozen=True, slots=True)
class Scale:
    """Size of the story."""

    prompts: int  # selected from four times as many
    grids: int  # per prompt
    judge_steps: int  # of 16 pairs
    people: tuple[str, ...] = ("ann", "ben", "cat")
    noise: float = 0.3  # standard deviation of a person's judgement, in attributes
    # People judge by colours alone, while the committed judge has learned that shape and hat count as much.
    attend: tuple[str, ...] = ("colour", "palette")
    explained: int = 100  # pairs, at most
    held_out: float = 0.35  # share of the prompts for testing the judge


def run_story(folder: Path, *, scale: Scale, seed: int) -> JsonObject:
    """Run the story in `folder`, write its summary.json and return the content.

    An interrupted story goes on from its last finished step.

    Raises:
        ValueError: if `folder` contains a finished story.
    """
    if (folder / "summary.json").exists():
        raise ValueError(f"{folder} holds a finished story; name another folder")
    # The models load in seconds, and their bars would hide the story.
    quiet_loading()

    # The dataset, and a judge trained on it.
    dataset = folder / "dataset"
    counts = make_dataset(dataset, scale=scale, seed=seed)
    merged = teach(dataset / "export", folder / "judge", steps=scale.judge_steps, seed=seed)

    # The judge on held-out pairs, and as a reward.
    with serving_app(create_app({JUDGE: LocalJudge.from_pretrained(merged)})) as url:
        held_out = load_comparisons(dataset / "export" / "comparisons_test.jsonl")
        served = HttpJudge.connect(f"{url}/v1", model=JUDGE)
        try:
            compared = compare(held_out, before=LocalJudge.from_pretrained(TINY_JUDGE), after=served)
        finally:
            served.close()
        intervals = []
        for name in MEASURED:
            interval = compared[name]
            intervals.append(f"{name} {interval['mean']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]")
        print("judge on held-out pairs:", ", ".join(intervals))
        epoch = reward(dataset / "diverse.jsonl", folder / "policy", url=f"{url}/v1", seed=seed)
    print(f"policy, an epoch: reward {epoch['reward']:.3f}, {epoch['missing']:.0%} of the scores missing")

    summary = {"scale": asdict(scale), "seed": seed, "dataset": counts, "judge": compared, "policy": epoch}
    write_json(folder / "summary.json", summary)
    return summary


def make_dataset(folder: Path, *, scale: Scale, seed: int) -> JsonObject:
    """Make the dataset from prompts to exported pairs; return each step's counts."""
    counts: JsonObject = {}

    def done(step: str, counted: JsonObject, *shown: str) -> None:
        counts[step] = dict(counted)
        print(f"{step}:", ", ".join(f"{name} {counted[name]}" for name in shown))

    # Prompts and images.
    written = scale.prompts * WRITTEN_PER_KEPT
    prompts = write_all(
        folder,
        make_writer("tiny", count=written, seed=seed, chat=None),
        subjects=read_taxonomy(TINY),
        count=written,
        grids=[parse_layout("2x2")],
        options={"writer": "tiny"},
        seed=seed,
    )
    done("prompts", prompts, "records")
    done("diversify", diversify(folder, goal=Goal(number=scale.prompts), seed=seed), "kept", "nearest")
    source = image_source("tiny", size=GRID_SIZE, steps=6, batch=12, seed=seed)
    done("generate", generate(folder, source, grids=scale.grids), "grids", "generated")

    # Labels and reasons.
    done("pair", pair(folder), "panels", "instances")
    done("annotate", annotate(folder, scale), *scale.people)
    with serving_app(narrator()) as url:
        model = ChatModel("narrator", base_url=f"{url}/v1")
        explained = explain(folder, model, limit=scale.explained)
    done("explain", explained, "explained", "contradicted", "failed")

    counts["export"] = export(folder, shares={"train": 1 - scale.held_out, "test": scale.held_out}, seed=seed)
    print("export:", ", ".join(f"{name} {count}" for name, count in counts["export"]["balance"].items()))
    return counts


def annotate(folder: Path, scale: Scale) -> dict[str, int]:
    """Rank everything through the page's API with simulated people; return the number of rankings by person."""
    with Store(folder / "annotations.db") as store:
        # A resumed story must renew the links: only digests of the first ones are stored.
        links = prepare(store, folder, scale.people, sharing=Sharing(controls=4), renew=store.people())
        tokens = {name: links[name].rpartition("#")[2] for name in scale.people}
        with serving_app(make_app(folder, store)) as url:
            simulate(url, tokens, noise=scale.noise, attend=scale.attend)
        return {name: store.progress(name)["ranked"] for name in scale.people}


def narrator() -> FastAPI:
    """Create the API of a simulated vision-language model, which gives reasons about two images."""
    app = FastAPI(openapi_url=None)

    @app.post("/v1/chat/completions")
    def chat(request: JsonObject) -> JsonObject:
        # It recognises both panels, as a person would.
        *images, question = request["messages"][0]["content"]
        panels = []
        for image in images:
            encoded = image["image_url"]["url"].partition(",")[2]
            panels.append(read_panel(base64.b64decode(encoded)))
        text = json.dumps(reasons(*panels, label="the answer is Yes" in question["text"]))
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        return {"id": "0", "object": "chat.completion", "created": 0, "model": request["model"], "choices": [choice]}

    return app


def reasons(first: Panel, second: Panel, *, label: bool) -> dict[str, str]:
    """Give reasons for the label. If all attributes or none are shared, the images override the label."""

    def compared(name: str) -> str:
        a = getattr(first, name)
        b = getattr(second, name)
        return f"Both show {a}." if a == b else f"The {name} differs: {a} and {b}."

    # If the images contradict the label, a real model argues for the images, and `explain` must flag the pair.
    shared = shared_attributes(first, second)
    yes = label
    if shared in (0, len(KEPT)):
        yes = shared > 0
    return {
        "answer": "Yes" if yes else "No",
        "style": compared("palette"),
        "identity": " ".join(compared(name) for name in IDENTITY),
        "logic": f"{first.pose}, {first.prop}; {second.pose}, {second.prop}.",
    }


def teach(data: Path, out: Path, *, steps: int, seed: int) -> Path:
    """Train the committed judge on an export like configs/reward/tiny.yaml; return the merged checkpoint."""
    config = JudgeConfig.model_validate(
        {
            "out": out,
            "seed": seed,
            "epochs": 100,
            "max_steps": steps,
            "merge": True,
            "trackers": [],
            "model": {"checkpoint": "tiny", "dtype": "float32", "gradient_checkpointing": False},
            "tuning": {"rank": 8, "alpha": 16},
            "loss": {"alpha": 0.9},  # paper: 0.1; so few steps must go to the decision
            "data": {"train": [str(data / "comparisons_train.jsonl")], "evaluation": [], "workers": 0},
            "optimizer": {"lr": 2e-3, "batch": 16, "micro_batch": 16},
        }
    )
    # An interrupted story goes on behind the finished training.
    if not (out / "merged").is_dir():
        JudgeTrainer(config, resume=True).train()
    return out / "merged"


def compare(comparisons: Sequence[Comparison], *, before: Judge, after: Judge) -> JsonObject:
    """Compare the decision accuracy of two judges, with 95 % intervals bootstrapped over prompts."""
    right_2N = np.stack([_right(judge, comparisons) for judge in (before, after)])

    def figures(rows: Indices) -> Floats:
        accuracy_before, accuracy_after = right_2N[:, rows].mean(1)
        return np.array([accuracy_before, accuracy_after, accuracy_after - accuracy_before])

    # Pairs of one prompt share its grids, so that the bootstrap draws whole prompts.
    groups = [comparison.group for comparison in comparisons]
    compared: JsonObject = {"pairs": len(comparisons), "prompts": len(set(groups))}
    for name, interval in zip(MEASURED, bootstrap(groups, figures, fewest=2), strict=True):
        compared[name] = {"mean": interval.mean, "low": interval.low, "high": interval.high, "groups": interval.groups}
    return compared


def _right(judge: Judge, comparisons: Sequence[Comparison]) -> Floats:
    """Return (N,): 1 if the judge agrees with the label, otherwise 0."""
    # Ask each pair as the data does.
    questions = []
    for compared in comparisons:
        questions.append(Question(tuple(open_image(path) for path in compared.images), compared.question))

    # An unanswered pair would change which pairs are compared.
    right = []
    errors = []
    for verdict, compared in zip(judge.verdicts(questions), comparisons, strict=True):
        if verdict.p_yes is None:
            errors.append(verdict.error)
        else:
            right.append((verdict.p_yes > 0.5) == compared.consistent)
    if errors:
        failed = f"{len(errors)} of {len(questions)} held-out pairs were not judged"
        raise ValueError(f"{failed}, the first because: {errors[0]}")
    return np.array(right, dtype=float)


def reward(prompts: Path, out: Path, *, url: str, seed: int) -> dict[str, float]:
    """Train for one epoch of the quickstart's recipe on the dataset's own prompts, with a judge behind HTTP."""
    # Only seconds of training: it tests the connection to the judge, not the effect of its rewards.
    overrides = [
        f"out={out}", f"seed={seed}", "epochs=1", "trackers=[]",
        f"prompts.train={prompts}", "prompts.evaluation=tiny:test", "prompts.evaluation_limit=2",
        "prompts_per_epoch=2", "group_size=6", "sampling.batch=6", "evaluation.size=[64, 64]", "evaluation.batch=2",
        "judge.backend=http", f"judge.checkpoint={url}", f"judge.model={JUDGE}",
        "rewards=[{name: consistency, args: {temperature: 4}}]",
    ]  # fmt: skip
    train_policy(load(PolicyConfig, recipe(), overrides), resume="auto")
    epochs = []
    for line in read_jsonl(out / "metrics.jsonl"):
        if line["kind"] == "epoch":
            epochs.append(line)
    return {"reward": epochs[0]["reward/consistency/mean"], "missing": epochs[0]["samples/missing"]}
