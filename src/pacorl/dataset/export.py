"""Rankings → files for training and testing (`pacorl dataset export`).

    dataset_info.json, consistency_SPLIT.json   LLaMA-Factory's sharegpt form
    comparisons_SPLIT.jsonl                     the project's own
    benchmark/                                  ConsistencyRank's layout, of the test split

The folder is self-contained: images are linked into it, or copied if the file system has no links.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pacorl.dataset.answer_log import collect_answers
from pacorl.dataset.folder import read_answers
from pacorl.dataset.manifest import DatasetStep
from pacorl.dataset.rules import Split, label_pairs, mean_rankings, pair_agreement, pair_key, split_groups
from pacorl.io.documents import JsonObject, read_journal
from pacorl.io.files import claim_folder, flush_all, inside, make_folder, text_digest, write_atomic
from pacorl.io.terminal import Progress, silent
from pacorl.records.comparisons import INFO, save_comparisons, save_sharegpt
from pacorl.records.consistency_rank import IMAGES, PROMPTS, RANKS, Ranked, save_ranked
from pacorl.records.rankings import Ranking
from pacorl.types import Comparison

TEST_SHARE = 0.1
BENCHMARK = "benchmark"
FILES = (
    *("comparisons_train.jsonl", "comparisons_test.jsonl", "consistency_train.json", "consistency_test.json"),
    *(INFO, f"{BENCHMARK}/{PROMPTS}", f"{BENCHMARK}/{RANKS}"),
)
"""All files that an export may have, images aside."""


class Export:
    """The pairs and rankings to be written, by split."""

    def __init__(self, folder: Path, out: Path, *, pairs: Sequence[Comparison], answers: Sequence[Ranking]) -> None:
        self.folder = folder
        self.out = out
        self.pairs = pairs
        self.answers = answers
        self.split_of: dict[str, Split] = {}

    def assign_splits(self, test_share: float, *, seed: int) -> None:
        """Assign every group to a split; groups that share an image belong together.

        So do groups that share a theme, unless their file of rankings names its groups.
        """
        # Candidates between the best and the worst are in no pair, but in the benchmark's rankings.
        ties = []
        labelled = {pair.group for pair in self.pairs}
        for answer in self.answers:
            # A group whose votes are all tied would fill a split with nothing.
            if answer.group not in labelled:
                continue
            ties += [(answer.group, image) for image in (answer.reference, *answer.candidates)]
            if answer.theme and not answer.own_group:
                ties.append((answer.group, f"theme {answer.theme}"))

        # Split by components: groups with a common tie stay together.
        self.split_of = split_groups(ties, test_share=test_share, seed=seed)
        if 0 < test_share < 1 and len(set(self.split_of.values())) < 2:
            raise ValueError(
                f"nothing is left to test on: all {len(self.split_of)} groups hang together by themes or images that "
                "they share; give rankings of more images or, if only their themes are shared, a 'group', "
                "or train on all (--test-share 0)"
            )

    def splits(self) -> Iterator[tuple[str, list[Comparison]]]:
        for name in sorted(set(self.split_of.values())):
            yield name, [pair for pair in self.pairs if self.split_of[pair.group] == name]

    def benchmark(self) -> tuple[list[Ranking], int]:
        """One ranking per instance of the test split, by mean rank, and the number left out for ties."""
        tested = []
        for answer in self.answers:
            if self.split_of.get(answer.group) == "test":
                tested.append(answer)
        return mean_rankings(tested)

    def comparisons(self, pairs: Sequence[Comparison]) -> Iterator[Comparison]:
        """Yield pairs with their images in the export, after these are on the disk."""
        for image in dict.fromkeys(image for pair in pairs for image in pair.images):
            self.bring_image(image.as_posix())
        flush_all()  # one wait, before a file names them
        for pair in pairs:
            yield replace(pair, images=tuple(self.out / image for image in pair.images))

    def bring_image(self, name: str) -> Path:
        """Link an image into the export; return its path there."""
        source = inside(self.folder, name)
        target = self.out / name
        if not source.is_file():
            missing = self.folder / name
            raise ValueError(f"{missing} is missing, and the export needs it; put it back or drop its rankings")
        link_or_copy(source, target)
        return target


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` in a claimed folder the same file as `source`, or a copy; `flush_all` waits for the disk."""
    if target.is_file() and target.samefile(source):
        return
    make_folder(target.parent, flush=False)
    # A hard link shares its content: writing through it would change the source, so an old target goes first.
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        write_atomic(target, source.read_bytes(), flush=False)


def write_sharegpt(export: Export) -> list[Path]:
    """Write one JSON per split and dataset_info.json, in LLaMA-Factory's form."""
    comparisons = {}
    for split, pairs in export.splits():
        comparisons[f"consistency_{split}"] = export.comparisons(pairs)
    return save_sharegpt(comparisons, export.out)


def write_comparisons(export: Export) -> list[Path]:
    """Write the project's JSONL: one `Comparison` a line, images relative to the file."""
    written = []
    for split, pairs in export.splits():
        written.append(export.out / f"comparisons_{split}.jsonl")
        save_comparisons(export.comparisons(pairs), written[-1])
    return written


def write_consistency_rank(export: Export) -> list[Path]:
    """Write ConsistencyRank's folder of the test split: one ranking per instance, by mean rank; ties are left out."""
    rankings, _ = export.benchmark()
    if not rankings:
        return []
    root = export.out / BENCHMARK
    items = []
    for ranking in rankings:
        # One folder per group and question, since a folder has one prompt.
        folder = f"{ranking.group}-{text_digest(f'{ranking.theme} {ranking.criteria}')[:8]}"
        names = {}
        for image in (ranking.reference, *ranking.candidates):
            names[image] = image.replace("/", "__")
            link_or_copy(export.bring_image(image), root / IMAGES / folder / names[image])
        best_first = [names[image] for image in ranking.candidates]
        items.append(
            Ranked(
                folder=folder,
                reference=names[ranking.reference],
                # By name: the order of the list must not reveal the answer.
                candidates=sorted(best_first),
                best_first=best_first,
                prompt=ranking.theme,
                criteria=ranking.criteria,
            )
        )

    # One wait for all images, before the lists name them.
    flush_all()
    return save_ranked(items, root)


WRITERS = (write_sharegpt, write_comparisons, write_consistency_rank)


class Labelled(NamedTuple):
    """Pairs, and the rankings that they follow from."""

    pairs: list[Comparison]
    """Images are named relative to the dataset's folder."""
    answers: list[Ranking]
    balance: dict[str, int]


def label(folder: Path, *, dry_run: bool = False) -> Labelled:
    """Label pairs by a folder's own rankings and the imported ones.

    Raises:
        ValueError: there are none.
    """
    answers = collect_answers(folder, dry_run=dry_run)
    for path in _imported(folder):
        answers += read_answers(path)
    if not answers:
        raise ValueError(
            f"{folder} has no rankings and nothing imported; rank with `pacorl dataset annotate` first, or bring yours "
            "with --rankings FILE.csv"
        )
    pairs, balance = label_pairs(answers)
    return Labelled(pairs, answers, balance)


def ranking_files(folder: Path) -> list[Path]:
    """List the files that labels follow from."""
    own = folder / "rankings.jsonl"
    return [*([own] if own.is_file() else []), *_imported(folder)]


def _imported(folder: Path) -> list[Path]:
    return sorted(folder.glob("imported/*/rankings.jsonl"))


def export(
    folder: Path,
    *,
    out: Path | None = None,
    test_share: float = TEST_SHARE,
    seed: int = 0,
    dry_run: bool = False,
    progress: Progress = silent,
) -> JsonObject:
    """Write labelled pairs and a held-out benchmark.

    Args:
        test_share: share of the groups that is held out.

    Returns:
        Counts per split and of the labels, and people's agreement.
    """
    # Label the pairs and split the groups.
    labelled = label(folder, dry_run=dry_run)
    pairs = with_reasons(folder, labelled.pairs)
    bundle = Export(folder, out or folder / "export", pairs=pairs, answers=labelled.answers)
    bundle.assign_splits(test_share, seed=seed)

    # Count: all that a dry run does.
    splits: dict[str, JsonObject] = {}
    for name, split in bundle.splits():
        splits[name] = {
            "groups": len({pair.group for pair in split}),
            "yes": sum(pair.consistent for pair in split),
            "no": sum(not pair.consistent for pair in split),
            "with_reasons": sum(bool(pair.reasons) for pair in split),
        }
    ranked, tied = bundle.benchmark()
    counts: JsonObject = {"balance": labelled.balance, "splits": splits}
    counts["benchmark"] = {"rankings": len(ranked), "left out as tied": tied}
    if agreement := pair_agreement(labelled.answers):
        counts["agreement"] = agreement.document()
    if dry_run:
        return counts

    # Write every format, then delete files of an earlier export: no old split may stay beside the new ones.
    claim_folder(bundle.out)
    written = []
    for done, write in enumerate(WRITERS, 1):
        written += write(bundle)
        progress(done, len(WRITERS))
    for name in FILES:
        if bundle.out / name not in written:
            (bundle.out / name).unlink(missing_ok=True)
    # The manifest lists the inputs, so that a later export can be compared.
    explanations = folder / "explanations.jsonl"
    inputs = [*ranking_files(folder), *([explanations] if explanations.is_file() else [])]
    options = {"test_share": test_share, "out": str(bundle.out)}
    step = DatasetStep(folder, "export", inputs=inputs, options=options, seed=seed)
    return step.finish(outputs=written, counts=counts)


def with_reasons(folder: Path, pairs: Sequence[Comparison]) -> list[Comparison]:
    """Add the reasons of explanations.jsonl to pairs with the same label, which may have changed since."""
    reasons = {}
    for row in read_journal(folder / "explanations.jsonl").values():
        if row["status"] == "explained":
            reasons[row["key"], row["consistent"]] = row["reasons"]
    explained = []
    for pair in pairs:
        text = reasons.get((pair_key(pair), pair.consistent))
        explained.append(replace(pair, reasons=text) if text else pair)
    return explained
