"""A judge's opinion of the pairs that people are to rank (`pacorl dataset prior`): instances.jsonl → prior.jsonl.

Scores begin at it: people are then asked what the judge is in doubt of (uncertainty sampling; Lewis & Gale,
doi:10.1007/978-1-4471-2099-5_1), and it stands in for rankings that are not there yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pacorl.dataset.manifest import DatasetStep, Progress, silent
from pacorl.dataset.records import Answer, JudgedPair, read_instances, read_judged_pairs, write_records
from pacorl.dataset.rules import QUESTIONS
from pacorl.dataset.scores import Scores, pair_of
from pacorl.io.files import inside
from pacorl.io.images import open_image
from pacorl.score.reward import PacoReward
from pacorl.types import Question

PRIOR = "prior.jsonl"
BATCH = 256
"""Pairs between two steps of the progress bar."""


def judge_pairs(
    folder: Path,
    open_judge: Callable[[], PacoReward],
    *,
    name: str,
    question: str = "theme",
    dry_run: bool = False,
    progress: Progress = silent,
) -> dict[str, int]:
    """Asks the judge about every pair of instances.jsonl, and writes its P(Yes) to prior.jsonl.

    Args:
        open_judge: called if there is anything to ask; the judge is closed at the end.
        name: of the judge, for the manifest.
        question: what it is asked, one of QUESTIONS.

    Returns:
        How many pairs there are, and how many have no score.
    """
    source, text_of = folder / "instances.jsonl", dict[tuple[str, str], str]()
    for one in read_instances(source):
        text = QUESTIONS[question](Answer.to(one, one.candidates, annotator=name))
        for candidate in one.candidates:
            text_of.setdefault(pair_of(one.reference, candidate), text)
    step = DatasetStep(folder, "prior", inputs=[source], options={"judge": name, "question": question})
    counts = step.counts_if_done()
    if counts is not None or dry_run:
        return counts or {"pairs": len(text_of)}
    judged, pairs = list[JudgedPair](), list(text_of)
    with open_judge() as reward:
        for start in range(0, len(pairs), BATCH):
            batch = pairs[start : start + BATCH]
            images = [[open_image(inside(folder, image)) for image in pair] for pair in batch]
            asked = [Question(tuple(two), text_of[pair]) for two, pair in zip(images, batch, strict=True)]
            for pair, verdict in zip(batch, reward.judge.verdicts(asked), strict=True):
                judged += [JudgedPair(pair, verdict.p_yes)] if verdict.p_yes is not None else []
            progress(start + len(batch), len(pairs))
    write_records(folder / PRIOR, judged)
    return step.finish(outputs=[folder / PRIOR], counts={"pairs": len(pairs), "missing": len(pairs) - len(judged)})


def read_prior(folder: Path) -> dict[tuple[str, str], float]:
    """P(Yes) of each pair in a folder's prior.jsonl; empty if there is none."""
    path = folder / PRIOR
    return {pair_of(*pair.images): pair.p_yes for pair in read_judged_pairs(path)} if path.is_file() else {}


def judged_scores(folder: Path, answers: Sequence[Answer]) -> Scores:
    """The scores of rankings, which begin at the folder's prior if it has one, and then of all its instances."""
    p_yes = read_prior(folder)
    instances = folder / "instances.jsonl"
    return Scores(answers, questions=read_instances(instances) if p_yes and instances.is_file() else (), p_yes=p_yes)
