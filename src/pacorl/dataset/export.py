"""Rankings → files that others train and test on (`pacorl dataset export`).

    dataset_info.json, consistency_SPLIT.json   LLaMA-Factory's sharegpt form       `sharegpt`
    comparisons_SPLIT.jsonl                     the project's own                   `jsonl`
    data/SPLIT-00000-of-00001.parquet           Hugging Face datasets               `parquet`
    benchmark/                                  ConsistencyRank's layout, of `test` `consistency_rank`

The folder stands alone: images are linked into it, or copied if the file system has no links.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pacorl.core.questions import same_theme
from pacorl.dataset.folder import Answer, LabelledPair, collect_answers, read_answers, read_pairs, write_records
from pacorl.dataset.manifest import DatasetStep, Progress, silent
from pacorl.dataset.rules import label_pairs, mean_rankings, split_groups
from pacorl.io.documents import read_journal, read_jsonl, write_jsonl
from pacorl.io.files import claim_folder, digest, flush_all, inside, make_folder, replacing, write_atomic
from pacorl.records.comparisons import save_comparisons, save_sharegpt
from pacorl.types import Comparison

SHARES = {"train": 0.9, "test": 0.1}
ROWS_PER_GROUP = 100
"""So many rows of a parquet file are in memory at a time, images included; the hub's viewer likes this size too."""


class Export:
    """The pairs and rankings to be written, by split."""

    def __init__(self, folder: Path, out: Path, *, pairs: list[LabelledPair], answers: list[Answer]) -> None:
        self.folder, self.out, self.pairs, self.answers = folder, out, pairs, answers
        self.split_of: dict[str, str] = {}

    def assign_splits(self, shares: Mapping[str, float], *, seed: int) -> None:
        """Sends every group to a split; groups that share an image stay together.

        So do those that share a theme, unless their file of rankings says what a group is.
        """
        own_groups = {answer.group for answer in self.answers if answer.own_group}
        ties = [(pair.group, image) for pair in self.pairs for image in pair.images]
        # Candidates between the best and the worst are in no pair, but in the benchmark's rankings.
        ties += [(answer.group, image) for answer in self.answers for image in (answer.reference, *answer.candidates)]
        for pair in self.pairs:
            # A question without a theme is that of every group, and would tie all of them.
            names_theme = pair.question != same_theme("") and pair.question.startswith(same_theme("").partition('"')[0])
            if names_theme and pair.group not in own_groups:
                ties.append((pair.group, pair.question))
        self.split_of = split_groups(ties, shares=shares, seed=seed)
        empty = [name for name, share in shares.items() if share > 0 and name not in self.split_of.values()]
        if empty:
            raise ValueError(
                f"nothing is left for {', '.join(empty)}: all {len(self.split_of)} groups hang together by themes or "
                "images that they share; give rankings of more images or, if only their themes are shared, a 'group', "
                "or train on all (--test-share 0)"
            )

    def splits(self) -> Iterator[tuple[str, list[LabelledPair]]]:
        for name in sorted(set(self.split_of.values())):
            yield name, [pair for pair in self.pairs if self.split_of[pair.group] == name]

    def benchmark(self) -> tuple[list[Answer], int]:
        """One ranking of each instance of the test split, by mean rank; and how many are left out for ties."""
        return mean_rankings([answer for answer in self.answers if self.split_of.get(answer.group) == "test"])

    def comparisons(self, pairs: Sequence[LabelledPair]) -> list[Comparison]:
        """Pairs as a judge's training data, their images brought into the export, and on the disk."""
        comparisons = [
            Comparison(
                images=tuple(map(self.bring_image, pair.images)),
                question=pair.question,
                consistent=pair.consistent,
                reasons=pair.reasons,
                category=pair.category,
                group=pair.group,
            )
            for pair in pairs
        ]
        flush_all(self.out)  # one wait, before a file names them
        return comparisons

    def bring_image(self, name: str) -> Path:
        """Links an image into the export; returns its path there."""
        source, target = inside(self.folder, name), self.out / name
        if not source.is_file():
            path = self.folder / name
            raise ValueError(f"{path} is missing, and the export needs it; put it back or drop its rankings")
        link_or_copy(source, target)
        return target


def link_or_copy(source: Path, target: Path) -> None:
    """`target`, in a claimed folder, becomes the same file as `source`, or a copy; `flush_all` waits for the disk."""
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
    """One JSON per split and dataset_info.json, as LLaMA-Factory reads them."""
    comparisons = {f"consistency_{split}": export.comparisons(pairs) for split, pairs in export.splits()}
    return save_sharegpt(comparisons, export.out)


def write_comparisons(export: Export) -> list[Path]:
    """The project's JSONL: one `Comparison` a line, images relative to the file."""
    written = []
    for split, pairs in export.splits():
        written.append(export.out / f"comparisons_{split}.jsonl")
        save_comparisons(export.comparisons(pairs), written[-1])
    return written


def write_parquet(export: Export) -> list[Path]:
    """One parquet file per split, images inside, which `datasets.load_dataset(folder)` opens. Needs pyarrow."""
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError("parquet files need pyarrow; install it with `pip install 'pacorl[data]'`") from None
    schema, written = _parquet_schema(pa), []
    for split, pairs in export.splits():
        written.append(export.out / "data" / f"{split}-00000-of-00001.parquet")
        with replacing(written[-1]) as temporary, pq.ParquetWriter(temporary, schema) as writer:
            for start in range(0, len(pairs), ROWS_PER_GROUP):
                rows = []
                for pair in pairs[start : start + ROWS_PER_GROUP]:
                    images = [{"bytes": inside(export.folder, name).read_bytes(), "path": name} for name in pair.images]
                    row = {"image_1": images[0], "image_2": images[1], "consistent": pair.consistent}
                    rows.append(row | {name: getattr(pair, name) for name in PARQUET_TEXTS})
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return written


PARQUET_TEXTS = ("question", "reasons", "category", "group")


def _parquet_schema(pa: Any) -> Any:
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {
        "image_1": (image, {"_type": "Image"}),
        "image_2": (image, {"_type": "Image"}),
        "consistent": (pa.bool_(), {"dtype": "bool", "_type": "Value"}),
        **dict.fromkeys(PARQUET_TEXTS, (pa.string(), {"dtype": "string", "_type": "Value"})),
    }
    # `datasets` takes the columns' features from this key; without it an image would be a struct of bytes.
    features = {name: feature for name, (_, feature) in columns.items()}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return pa.schema([(name, kind) for name, (kind, _) in columns.items()], metadata=metadata)


def write_consistency_rank(export: Export) -> list[Path]:
    """ConsistencyRank's folder of the test split: one ranking per instance, by mean rank; tied ones are left out."""
    root = export.out / "benchmark"
    path = export.folder / "diverse.jsonl"
    criteria = {str(row.get("idx")): row.get("criteria", {}) for row in read_jsonl(path)} if path.is_file() else {}
    prompts: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    shown: dict[tuple[str, str], str] = {}
    rankings, _ = export.benchmark()
    folders = _benchmark_folders(rankings)
    for answer in rankings:
        folder = folders[answer.instance]
        texts = {"prompt": answer.theme, "criteria": answer.criteria or criteria.get(answer.group, {})}
        prompts[folder] = {"idx": folder, **texts}
        # Candidates in the order of their names: the order in which they are listed must not give the answer away.
        images = (answer.reference, *sorted(answer.candidates))
        names = {image: _shown_name(shown, folder, image) for image in images}
        for image, name in names.items():
            link_or_copy(export.bring_image(image), root / "images" / folder / name)
        reference, *candidates = names.values()
        row = {"folder": folder, "ref_image": reference, "comp_images": candidates}
        rows.append(row | {"rank_images": [names[image] for image in answer.candidates]})
    flush_all(root)
    write_jsonl(root / "prompt_data.jsonl", prompts.values())
    write_jsonl(root / "consistency_full_rank.jsonl", rows)
    return [root / "prompt_data.jsonl", root / "consistency_full_rank.jsonl"]


def _shown_name(shown: dict[tuple[str, str], str], folder: str, image: str) -> str:
    """An image's name in a folder of the benchmark; those of one name from several folders get their whole path."""
    name = Path(image).name
    if shown.setdefault((folder, name), image) != image:
        name = image.replace("/", "__")
        shown[folder, name] = image
    return name


def _benchmark_folders(rankings: Sequence[Answer]) -> dict[str, str]:
    """instance → its folder in the benchmark: its group's, or, for a group with several themes, one for each."""
    texts: dict[str, list[object]] = {}
    folders = {}
    for answer in rankings:
        group_texts = texts.setdefault(answer.group, [])
        text = (answer.theme, answer.criteria)
        if text not in group_texts:
            group_texts.append(text)
        number = group_texts.index(text) + 1
        folders[answer.instance] = answer.group if number == 1 else f"{answer.group}-{number}"
    return folders


FORMATS: dict[str, Callable[[Export], list[Path]]] = {
    "sharegpt": write_sharegpt,
    "jsonl": write_comparisons,
    "parquet": write_parquet,
    "consistency_rank": write_consistency_rank,
}


class LabelledData(NamedTuple):
    """The pairs and rankings of people and imports."""

    pairs: list[LabelledPair]
    answers: list[Answer]
    balance: dict[str, int]


def label(
    folder: Path,
    *,
    rule: str = "best_worst",
    question: str = "theme",
    dry_run: bool = False,
) -> LabelledData:
    """Labels pairs by the rankings: rankings.jsonl → pairs.jsonl, imported rankings and pairs included.

    Args:
        rule: how a ranking becomes votes, one of RULES.
        question: what the judge is asked, one of QUESTIONS.
    """
    answers = collect_answers(folder, dry_run=dry_run)
    imported_files = sorted(folder.glob("imported/*/*.jsonl"))
    if not answers and not imported_files:
        raise ValueError(
            f"{folder} has no rankings and nothing imported; rank with `pacorl dataset annotate` first, or bring yours "
            f"with `pacorl dataset import {folder} FILE.csv --kind rankings`"
        )
    answers += [answer for path in imported_files if path.name == "rankings.jsonl" for answer in read_answers(path)]
    pairs, balance = label_pairs(answers, rule=rule, question=question)
    imported = [pair for path in imported_files if path.name == "pairs.jsonl" for pair in read_pairs(path)]
    yes = sum(pair.consistent for pair in imported)
    counts = {**balance, "imported_yes": yes, "imported_no": len(imported) - yes}
    labelled = LabelledData([*pairs, *imported], answers, counts)
    if not dry_run:
        sources = [path for path in (folder / "rankings.jsonl", *imported_files) if path.is_file()]
        # A step of its own: `explain` and `export` both label, and the second must not rewrite the first one's file.
        step = DatasetStep(folder, "label", inputs=sources, options={"rule": rule, "question": question})
        if step.counts_if_done() is None:
            write_records(folder / "pairs.jsonl", labelled.pairs)
            step.finish(outputs=[folder / "pairs.jsonl"], counts=counts)
    return labelled


def export(
    folder: Path,
    *,
    out: Path | None = None,
    formats: Sequence[str] = ("sharegpt", "jsonl", "consistency_rank"),
    shares: Mapping[str, float] = SHARES,
    rule: str = "best_worst",
    question: str = "theme",
    seed: int = 0,
    dry_run: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Writes labelled pairs and a held-out benchmark in every format of `formats`.

    Args:
        shares: split → its share of the groups.
        rule, question: see `label`.

    Returns:
        Counts per split and the balance of the labels.
    """
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise ValueError(f"unknown formats {', '.join(unknown)}; there are {', '.join(FORMATS)}")
    labelled = label(folder, rule=rule, question=question, dry_run=dry_run)
    pairs = with_reasons(folder, labelled.pairs)
    bundle = Export(folder, out or folder / "export", pairs=pairs, answers=labelled.answers)
    bundle.assign_splits(shares, seed=seed)
    counts = {"balance": labelled.balance, "splits": {name: _split_counts(pairs) for name, pairs in bundle.splits()}}
    if "consistency_rank" in formats:
        ranked, tied = bundle.benchmark()
        counts["benchmark"] = {"rankings": len(ranked), "left out as tied": tied}
    if dry_run:
        return counts
    claim_folder(bundle.out)
    written = []
    for done, name in enumerate(formats, 1):
        written += FORMATS[name](bundle)
        progress(done, len(formats))
    sources = [folder / name for name in ("pairs.jsonl", "rankings.jsonl", "explanations.jsonl")]
    inputs = [path for path in sources if path.is_file()]
    options = {"formats": list(formats), "shares": dict(shares), "out": str(bundle.out)}
    step = DatasetStep(folder, "export", inputs=inputs, options=options, seed=seed)
    _remove_earlier(step.last().get("outputs", {}), bundle, written)
    return step.finish(outputs=written, counts=counts)


def _remove_earlier(outputs: Mapping[str, str], bundle: Export, written: Sequence[Path]) -> None:
    """Delete the files of an earlier export to the same folder, so that no old split lies beside the new ones.

    Args:
        outputs: path → SHA-256, as the manifest has them. A file that was changed since stays.
        bundle: what is exported.
        written: what is not deleted.
    """
    new = {path.resolve() for path in written}
    for name, sha256 in outputs.items():
        path = (bundle.folder / name).resolve()  # a manifest may be anybody's
        is_made_here = path.is_relative_to(bundle.out.resolve()) and path.is_file() and digest(path) == sha256
        if is_made_here and path not in new:
            path.unlink()


def with_reasons(folder: Path, pairs: Sequence[LabelledPair]) -> list[LabelledPair]:
    """The pairs with their reasons from explanations.jsonl, unless these argue for the other label."""
    rows = read_journal(folder / "explanations.jsonl").values()
    reasons = {(row["key"], row["consistent"]): row["reasons"] for row in rows if row["status"] == "explained"}
    return [replace(pair, reasons=reasons.get((pair.key, pair.consistent), pair.reasons)) for pair in pairs]


def _split_counts(pairs: Sequence[LabelledPair]) -> dict[str, Any]:
    labels = Counter(pair.consistent for pair in pairs)
    return {
        "groups": len({pair.group for pair in pairs}),
        "yes": labels[True],
        "no": labels[False],
        "with_reasons": sum(bool(pair.reasons) for pair in pairs),
    }
