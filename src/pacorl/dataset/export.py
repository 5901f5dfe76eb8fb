"""Rankings → files for training and testing (`pacorl dataset export`).

    dataset_info.json, consistency_SPLIT.jsonl   conversations in LLaMA-Factory's sharegpt form
    benchmark/                                   ConsistencyRank's layout, of the test split

The folder is self-contained: images are linked into it, or copied if the file system has no links.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pacorl.core.batches import components, grouped
from pacorl.core.ranking import too_few
from pacorl.dataset.importing import joined_rankings
from pacorl.dataset.rules import Split, alike_pairs, label_pairs, majority_rankings, pair_key, split_groups
from pacorl.io.documents import JsonObject, read_journal
from pacorl.io.files import claim_folder, flush_all, make_folder, sweep, text_digest, write_atomic
from pacorl.io.terminal import Progress, silent
from pacorl.records.comparisons import INFO, save_comparisons, save_info
from pacorl.records.consistency_rank import IMAGES, PROMPTS, RANKS, Ranked, save_ranked
from pacorl.records.rankings import Ranking
from pacorl.types import Comparison

logger = logging.getLogger(__name__)

TEST_SHARE = 0.1
BENCHMARK = "benchmark"
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


class Labels(NamedTuple):
    """Labelled pairs and their sources."""

    pairs: list[Comparison]
    """Images are named as in `file_of`."""
    answers: list[Ranking]
    counts: dict[str, int]
    """Counts of votes and labels."""
    file_of: dict[str, Path]
    """Name → file of each image."""


def label(folder: Path, rankings: Sequence[Path] = ()) -> Labels:
    """Label pairs by a folder's own rankings and those of files.

    Raises:
        ValueError: there are no rankings, or no labels.
    """
    answers, file_of = joined_rankings(folder, rankings)
    if not answers:
        raise ValueError(
            f"{folder} has no rankings; rank with `pacorl dataset annotate` first, or bring yours with "
            "--rankings FILE.csv"
        )
    pairs, counts = label_pairs(answers)
    if not pairs:
        raise ValueError(f"{folder} has {len(answers)} rankings and no pair with a majority; let one more person rank")
    return Labels(pairs, answers, counts, file_of)


def export(
    folder: Path,
    *,
    rankings: Sequence[Path] = (),
    out: Path | None = None,
    test_share: float = TEST_SHARE,
    seed: int = 0,
    progress: Progress = silent,
) -> JsonObject:
    """Write labelled pairs, some of them held out, and a benchmark of the held-out rankings.

    Args:
        rankings: files of further rankings.
        test_share: share of the groups that is held out.

    Returns:
        Counts per split and of the labels, and people's agreement.
    """
    # Label the pairs and split the groups.
    labels = label(folder, rankings)
    answers = labels.answers
    pairs = with_reasons(folder, labels.pairs)
    split_of, family_of = splits(pairs, answers, test_share=test_share, seed=seed)
    # Groups that hang together are one: an interval over them would count what is no independent trial.
    by_split = grouped((split_of[pair.group], replace(pair, group=family_of[pair.group])) for pair in pairs)
    # The benchmark is of held-out groups: a judge has not learned their pairs.
    held_out = [answer for answer in answers if split_of.get(answer.group) == "test"]
    ranked = benchmark(held_out, family_of)

    # Count.
    counts: JsonObject = {"balance": labels.counts, "splits": {}, "benchmark_rankings": len(ranked)}
    for split, members in sorted(by_split.items()):
        yes = sum(pair.consistent for pair in members)
        counts["splits"][split] = {
            "groups": len({pair.group for pair in members}),
            "yes": yes,
            "no": len(members) - yes,
            "with_reasons": sum(bool(pair.reasons) for pair in members),
        }
    # How often each person orders two images as others do.
    counts["alike"] = {}
    for person, (alike, compared) in alike_pairs(answers).items():
        counts["alike"][person] = f"{alike} of {compared} pairs"

    # Link the images, and wait for the disk once before a file names them.
    out = out or folder / "export"
    claim_folder(out)
    images = {out / image: image.as_posix() for pair in pairs for image in pair.images}
    for item in ranked:
        shown = out / BENCHMARK / IMAGES / item.folder
        images |= {shown / image: image for image in (item.ref_image, *item.comp_images)}
    for done, (target, image) in enumerate(images.items(), 1):
        link_or_copy(labels.file_of[image], target)
        progress(done, len(images))
    flush_all()

    # Write the pairs and the benchmark, then delete files of an earlier export: no old split may stay.
    written = []
    for split, members in sorted(by_split.items()):
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
    sweep(out)
    return counts


def benchmark(answers: Sequence[Ranking], family_of: Mapping[str, str]) -> list[Ranked]:
    """Turn rankings into ConsistencyRank's items, one of each instance that has an order without ties."""
    items = []
    for ranking in majority_rankings(answers):
        item = Ranked(
            # A folder has one prompt and one set of criteria.
            folder=text_digest(f"{ranking.group} {ranking.theme} {ranking.criteria}")[:16],
            ref_image=ranking.reference,
            # By name: the order of the list must not reveal the answer.
            comp_images=sorted(ranking.candidates),
            rank_images=list(ranking.candidates),
            category=ranking.category,
            prompt=ranking.theme,
            criteria=ranking.criteria,
            family=family_of[ranking.group],
        )
        items.append(item)
    return items


def splits(
    pairs: Sequence[Comparison], answers: Sequence[Ranking], *, test_share: float, seed: int
) -> tuple[dict[str, Split], dict[str, str]]:
    """Assign every group of the pairs to a split, and to the first of the groups that it hangs together with.

    Groups that share an image belong together. So do groups that share a theme, unless their file of rankings names its
    groups.
    """
    ties = []
    labelled = {pair.group for pair in pairs}
    for answer in answers:
        # A group whose votes are all tied has no pairs, and would fill a split with nothing.
        if answer.group not in labelled:
            continue
        # Candidates between the best and the worst are in no pair, but in the benchmark.
        for image in answer.images:
            ties.append((answer.group, image))
        if answer.theme and not answer.own_group:
            ties.append((answer.group, f"theme {answer.theme}"))
    family_of: dict[str, str] = {}
    for groups in components(ties):
        family_of |= dict.fromkeys(groups, min(groups))
    split_of = split_groups(family_of.items(), test_share=test_share, seed=seed)
    if 0 < test_share < 1 and len(set(split_of.values())) < 2:
        raise ValueError(
            f"nothing is left to test on: all {len(split_of)} groups hang together by themes or images that they "
            "share; give rankings of more images or, if only their themes are shared, a 'group', or train on all "
            "(--test-share 0)"
        )
    tested = [family_of[pair.group] for pair in pairs if split_of[pair.group] == "test"]
    few = too_few(len(tested), len(set(tested)))
    if tested and few:
        logger.warning("%s, with --test-share or further rankings", few)
    return split_of, family_of


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
