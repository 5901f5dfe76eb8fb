"""Rankings → files for training and testing (`pacorl dataset export`).

    dataset_info.json, consistency_SPLIT.jsonl   conversations in LLaMA-Factory's sharegpt form
    benchmark/                                   ConsistencyRank's layout, of the test split

The folder is self-contained: images are linked into it, or copied if the file system has no links.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from pacorl.dataset.answer_log import collect_answers
from pacorl.dataset.folder import read_answers
from pacorl.dataset.manifest import DatasetStep
from pacorl.dataset.rules import (
    Split,
    alike_pairs,
    label_pairs,
    majority_rankings,
    pair_key,
    question_of,
    split_groups,
)
from pacorl.io.documents import JsonObject, read_journal
from pacorl.io.files import claim_folder, flush_all, inside, kept_digest, make_folder, text_digest, write_atomic
from pacorl.io.terminal import Progress, silent
from pacorl.records.comparisons import INFO, save_comparisons, save_info
from pacorl.records.consistency_rank import IMAGES, PROMPTS, RANKS, Ranked, save_ranked
from pacorl.records.rankings import Ranking
from pacorl.types import Comparison

TEST_SHARE = 0.1
BENCHMARK = "benchmark"
IMPORTED = "imported/*/rankings.jsonl"
FILES = ("consistency_train.jsonl", "consistency_test.jsonl", INFO, f"{BENCHMARK}/{PROMPTS}", f"{BENCHMARK}/{RANKS}")
"""All files that an export may have, images aside."""


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` in a claimed folder the same file as `source`, or a copy; `flush_all` waits for the disk."""
    if not source.is_file():
        raise ValueError(f"{source} is missing, and the export needs it; put it back or drop its rankings")
    if target.is_file() and target.samefile(source):
        return
    make_folder(target.parent, flush=False)
    # A hard link shares its content: writing through it would change the source, so an old target goes first.
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        write_atomic(target, source.read_bytes(), flush=False)


def label(folder: Path) -> tuple[list[Comparison], list[Ranking], dict[str, int]]:
    """Label pairs by a folder's own and its imported rankings.

    Returns:
        The pairs, whose images are named relative to the folder, the rankings, and counts of votes and labels.

    Raises:
        ValueError: there are no rankings, or no labels.
    """
    imported = list(chain.from_iterable(map(read_answers, sorted(folder.glob(IMPORTED)))))
    answers = collect_answers(folder)
    if imported:
        answers = pooled(folder, answers, imported)
    if not answers:
        raise ValueError(
            f"{folder} has no rankings and nothing imported; rank with `pacorl dataset annotate` first, or bring yours "
            "with --rankings FILE.csv"
        )
    pairs, balance = label_pairs(answers)
    if not pairs:
        raise ValueError(f"{folder} has {len(answers)} rankings and no pair with a majority; let one more person rank")
    return pairs, answers, balance


def pooled(
    folder: Path, own_rankings: Sequence[Ranking], imported: Sequence[Ranking], *, incoming: Mapping[str, Path] = {}
) -> list[Ranking]:
    """Join imported rankings to a folder's own: copies of an image have one name, and the same question one instance.

    Everybody may send a file with copies of the images. Their votes are about one pair, and a copy must not be in the
    other split. A person has one vote on a question: the page's before an imported one, and a repeated one counts once.

    Args:
        incoming: files of images that are not in the folder yet.

    Raises:
        ValueError: a person's imported rankings differ, or one has an image twice; it names the file and the line.
    """

    def question(answer: Ranking) -> tuple[str, str, frozenset[str]]:
        return question_of(answer), answer.reference, frozenset(answer.candidates)

    def named(image: str) -> str:
        return name_of.setdefault(kept_digest(incoming.get(image) or folder / image), image)

    # The folder's own rankings decide: the name of each image, the instance of each question, and each vote.
    name_of = {kept_digest(folder / image): image for answer in own_rankings for image in answer.images}
    first_of = {question(answer): answer for answer in own_rankings}
    on_page = {(question(answer), answer.annotator) for answer in own_rankings}
    voted: dict[object, Ranking] = {}
    for answer in imported:
        # A copy takes the name of the image that it equals.
        tiers = tuple(tuple(map(named, tier)) for tier in answer.tiers)
        renamed = replace(answer, reference=named(answer.reference), tiers=tiers)
        if len(set(renamed.images)) < len(renamed.images):
            raise ValueError(f"{answer.instance}: two of its images are the same; take one out")
        # The vote on the page replaces an imported one.
        vote = (question(renamed), answer.annotator)
        if vote in on_page:
            continue
        # One instance for one question: its votes are pooled, and its pairs stay in one split.
        first = first_of.setdefault(question(renamed), renamed)
        earlier = voted.setdefault(vote, replace(renamed, instance=first.instance, group=first.group))
        # Candidates of one tier are tied, in any order.
        if [*map(frozenset, earlier.tiers)] != [*map(frozenset, tiers)]:
            raise ValueError(
                f"{answer.instance}: another order than {answer.annotator} gave of the same candidates before; take "
                "one out, or name an 'annotator' in each if two people ranked"
            )
    return [*own_rankings, *voted.values()]


def ranking_files(folder: Path) -> list[Path]:
    """List the files that labels follow from."""
    return [*folder.glob("rankings.jsonl"), *sorted(folder.glob(IMPORTED))]


def export(
    folder: Path,
    *,
    out: Path | None = None,
    test_share: float = TEST_SHARE,
    seed: int = 0,
    progress: Progress = silent,
) -> JsonObject:
    """Write labelled pairs, some of them held out, and a benchmark of the held-out rankings.

    Args:
        test_share: share of the groups that is held out.

    Returns:
        Counts per split and of the labels, and people's agreement.
    """
    # Label the pairs and split the groups.
    pairs, answers, balance = label(folder)
    pairs = with_reasons(folder, pairs)
    split_of = splits(pairs, answers, test_share=test_share, seed=seed)
    by_split: dict[Split, list[Comparison]] = {}
    for split in sorted(set(split_of.values())):
        by_split[split] = [pair for pair in pairs if split_of[pair.group] == split]
    # The benchmark is of held-out groups: a judge has not learned their pairs.
    held_out = [answer for answer in answers if split_of.get(answer.group) == "test"]
    ranked = benchmark(held_out)

    # Count.
    left_out = len({answer.instance for answer in held_out}) - len(ranked)
    counts: JsonObject = {"balance": balance, "splits": {}, "benchmark_rankings": len(ranked)}
    if left_out:
        counts["benchmark_left_out_tied"] = left_out
    for split, members in by_split.items():
        counts["splits"][split] = {
            "groups": len({pair.group for pair in members}),
            "yes": sum(pair.consistent for pair in members),
            "no": sum(not pair.consistent for pair in members),
            "with_reasons": sum(bool(pair.reasons) for pair in members),
        }
    counts |= people_counts(answers)

    # Link the images, and wait for the disk once before a file names them.
    out = out or folder / "export"
    claim_folder(out)
    images = {out / image: image.as_posix() for pair in pairs for image in pair.images}
    for item in ranked:
        shown = out / BENCHMARK / IMAGES / item.folder
        images |= {shown / image: image for image in (item.ref_image, *item.comp_images)}
    for done, (target, image) in enumerate(images.items(), 1):
        link_or_copy(inside(folder, image), target)
        progress(done, len(images))
    flush_all()

    # Write the pairs and the benchmark, then delete files of an earlier export: no old split may stay.
    written = []
    for split, members in by_split.items():
        # One at a time: an export may have a million pairs.
        placed = (replace(pair, images=tuple(map(out.joinpath, pair.images))) for pair in members)
        written.append(out / f"consistency_{split}.jsonl")
        save_comparisons(placed, written[-1])
    written.append(save_info(written, out))
    if ranked:
        written += save_ranked(ranked, out / BENCHMARK)
    for name in FILES:
        if out / name not in written:
            (out / name).unlink(missing_ok=True)
    # The manifest lists the inputs, so that a later export can be compared.
    inputs = [*ranking_files(folder), *folder.glob("explanations.jsonl")]
    options = {"test_share": test_share, "out": str(out)}
    step = DatasetStep(folder, "export", inputs=inputs, options=options, seed=seed)
    return step.finish(outputs=written, counts=counts)


def people_counts(answers: Sequence[Ranking]) -> JsonObject:
    """Count how often each person orders two images as others do; nothing if no two people ranked a question."""
    shares = {person: f"{alike} of {compared} pairs" for person, (alike, compared) in alike_pairs(answers).items()}
    return {"alike": shares} if shares else {}


def benchmark(answers: Sequence[Ranking]) -> list[Ranked]:
    """Turn rankings into ConsistencyRank's items, one of each instance that has an order without ties."""
    return [
        Ranked(
            # A folder has one prompt and one set of criteria.
            folder=text_digest(f"{ranking.group} {ranking.theme} {ranking.criteria}")[:16],
            ref_image=ranking.reference,
            # By name: the order of the list must not reveal the answer.
            comp_images=sorted(ranking.candidates),
            rank_images=list(ranking.candidates),
            category=ranking.category,
            prompt=ranking.theme,
            criteria=ranking.criteria,
        )
        for ranking in majority_rankings(answers)
    ]


def splits(
    pairs: Sequence[Comparison], answers: Sequence[Ranking], *, test_share: float, seed: int
) -> dict[str, Split]:
    """Assign every group of the pairs to a split; groups that share an image belong together.

    So do groups that share a theme, unless their file of rankings names its groups.
    """
    ties = []
    labelled = {pair.group for pair in pairs}
    for answer in answers:
        # A group whose votes are all tied has no pairs, and would fill a split with nothing.
        if answer.group not in labelled:
            continue
        # Candidates between the best and the worst are in no pair, but in the benchmark.
        ties += [(answer.group, image) for image in answer.images]
        if answer.theme and not answer.own_group:
            ties.append((answer.group, f"theme {answer.theme}"))
    split_of = split_groups(ties, test_share=test_share, seed=seed)
    if 0 < test_share < 1 and len(set(split_of.values())) < 2:
        raise ValueError(
            f"nothing is left to test on: all {len(split_of)} groups hang together by themes or images that they "
            "share; give rankings of more images or, if only their themes are shared, a 'group', or train on all "
            "(--test-share 0)"
        )
    return split_of


def with_reasons(folder: Path, pairs: Sequence[Comparison]) -> list[Comparison]:
    """Add the reasons of explanations.jsonl to pairs with the same label, which may have changed since."""
    reasons = {}
    for row in read_journal(folder / "explanations.jsonl").values():
        if row["status"] == "explained":
            reasons[row["key"], row["consistent"]] = row["reasons"]
    explained = []
    for pair in pairs:
        text = reasons.get((pair_key(pair), pair.consistent))
        explained.append(replace(pair, reasons=text or pair.reasons))
    return explained
