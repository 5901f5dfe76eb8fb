"""Rankings → files that others train and test on (`pacorl dataset export`).

    dataset_info.json, consistency_SPLIT.json   LLaMA-Factory's sharegpt form       `sharegpt`
    comparisons_SPLIT.jsonl                     the project's own                   `jsonl`
    data/SPLIT-00000-of-00001.parquet           Hugging Face datasets               `parquet`
    benchmark/                                  ConsistencyRank's layout, of `test` `consistency_rank`

The folder stands alone: pictures are linked into it (copied where the file system cannot).
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from pacorl.core.questions import same_theme
from pacorl.curate.manifest import Step
from pacorl.curate.records import Answer, LabelledPair, read_answers, read_pairs, write_pairs
from pacorl.curate.rules import label_pairs, mean_rankings, split_groups
from pacorl.data.files import inside, read_jsonl, write_atomic, write_jsonl

SHARES = {"train": 0.9, "test": 0.1}


class Export:
    """What is written: pairs and rankings, by split."""

    def __init__(self, folder: Path, out: Path, *, pairs: list[LabelledPair], answers: list[Answer]) -> None:
        self.folder, self.out, self.pairs, self.answers = folder, out, pairs, answers
        self.split_of: dict[str, str] = {}

    def deal(self, shares: Mapping[str, float], *, seed: int) -> None:
        """Sends every group to a split; groups that share a theme or a picture stay together."""
        asked = ((pair.group, pair.question) for pair in self.pairs if _names_a_theme(pair.question))
        shown = ((pair.group, image) for pair in self.pairs for image in pair.images)
        ranked = ((answer.group, answer.reference) for answer in self.answers)
        self.split_of = split_groups(chain(asked, shown, ranked), shares=shares, seed=seed)

    def splits(self) -> Iterator[tuple[str, list[LabelledPair]]]:
        for name in sorted(set(self.split_of.values())):
            yield name, [pair for pair in self.pairs if self.split_of[pair.group] == name]

    def picture(self, name: str) -> str:
        """Brings a picture into the export; returns its path there."""
        source, target = inside(self.folder, name), self.out / name
        if not source.is_file():
            raise ValueError(
                f"{self.folder / name} is missing, and the export needs it; put it back or drop its rankings"
            )
        link_or_copy(source, target)
        return name


def _names_a_theme(question: str) -> bool:
    return question != same_theme("") and question.startswith(same_theme("").partition('"')[0])


def link_or_copy(source: Path, target: Path) -> None:
    """`target` becomes the same file as `source`, or a copy of it."""
    if target.is_file() and target.samefile(source):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def answer_text(pair: LabelledPair) -> str:
    """What the judge is taught to say: the label first, then the reasons."""
    return f"{'Yes' if pair.consistent else 'No'}. {pair.reasons}".strip()


def write_sharegpt(export: Export) -> list[Path]:
    """One JSON per split and dataset_info.json, as LLaMA-Factory reads them."""
    written, info = [], {}
    for split, pairs in export.splits():
        path = export.out / f"consistency_{split}.json"
        write_atomic(path, json.dumps([_sharegpt(pair, export) for pair in pairs], ensure_ascii=False, indent=1))
        written.append(path)
        info[f"consistency_{split}"] = {
            "file_name": path.name,
            "formatting": "sharegpt",
            "columns": {"messages": "messages", "images": "images"},
            "tags": {
                "role_tag": "role",
                "content_tag": "content",
                "user_tag": "user",
                "assistant_tag": "assistant",
            },
        }
    write_atomic(export.out / "dataset_info.json", json.dumps(info, indent=2) + "\n")
    return [*written, export.out / "dataset_info.json"]


def _sharegpt(pair: LabelledPair, export: Export) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": "<image>" * len(pair.images) + pair.question},
            {"role": "assistant", "content": answer_text(pair)},
        ],
        "images": [export.picture(name) for name in pair.images],
    }


def write_comparisons(export: Export) -> list[Path]:
    """The project's JSONL: one `Comparison` a line, pictures relative to the file."""
    written = []
    for split, pairs in export.splits():
        rows = [
            {
                "images": [export.picture(name) for name in pair.images],
                "question": pair.question,
                "consistent": pair.consistent,
                "reasons": pair.reasons,
                "category": pair.category,
                "group": pair.group,
            }
            for pair in pairs
        ]
        written.append(export.out / f"comparisons_{split}.jsonl")
        write_jsonl(written[-1], rows)
    return written


def write_parquet(export: Export) -> list[Path]:
    """One parquet file per split, pictures inside, which `datasets.load_dataset(folder)` opens. Needs pyarrow."""
    from pacorl.curate.parquet import write_pairs_parquet

    written = []
    for split, pairs in export.splits():
        written.append(export.out / "data" / f"{split}-00000-of-00001.parquet")
        write_pairs_parquet(written[-1], pairs, root=export.folder)
    return written


def write_consistency_rank(export: Export) -> list[Path]:
    """ConsistencyRank's folder of the test split: one ranking per instance, by mean rank; tied ones are left out."""
    root = export.out / "benchmark"
    held_out = [answer for answer in export.answers if export.split_of.get(answer.group) == "test"]
    rankings, _ = mean_rankings(held_out)
    prompts = {answer.group: answer for answer in rankings}
    criteria = _criteria(export.folder)
    write_jsonl(
        root / "prompt_data.jsonl",
        [{"idx": group, "prompt": one.theme, "criteria": criteria.get(group, {})} for group, one in prompts.items()],
    )
    rows = []
    for answer in rankings:
        # Candidates in the order of their names: the order in which they are listed must not give the answer away.
        names = {
            name: _benchmark_picture(export, root, answer.group, name)
            for name in (answer.reference, *sorted(answer.candidates))
        }
        rows.append(
            {
                "folder": answer.group,
                "ref_image": names[answer.reference],
                "comp_images": [names[name] for name in sorted(answer.candidates)],
                "rank_images": [names[name] for name in answer.candidates],
            }
        )
    write_jsonl(root / "consistency_full_rank.jsonl", rows)
    return [root / "prompt_data.jsonl", root / "consistency_full_rank.jsonl"]


def _benchmark_picture(export: Export, root: Path, group: str, name: str) -> str:
    export.picture(name)
    link_or_copy(export.out / name, root / "images" / group / Path(name).name)
    return Path(name).name


def _criteria(folder: Path) -> dict[str, Any]:
    path = folder / "diverse.jsonl"
    return {str(row.get("idx")): row.get("criteria", {}) for row in read_jsonl(path)} if path.is_file() else {}


FORMATS: dict[str, Callable[[Export], list[Path]]] = {
    "sharegpt": write_sharegpt,
    "jsonl": write_comparisons,
    "parquet": write_parquet,
    "consistency_rank": write_consistency_rank,
}


def label(folder: Path, *, rule: str = "best_worst", question: str = "theme") -> dict[str, Any]:
    """rankings.jsonl → pairs.jsonl, imported rankings and pairs included; returns the balance.

    Control questions never become pairs: their answers are known beforehand.
    """
    sources = [
        path for path in (folder / "rankings.jsonl", *sorted(folder.glob("imported/*/*.jsonl"))) if path.is_file()
    ]
    if not sources:
        raise ValueError(
            f"{folder} has no rankings.jsonl and nothing imported; rank with `pacorl dataset annotate` first"
        )
    step = Step(folder, "label", inputs=sources, options={"rule": rule, "question": question})
    known = step.counts_if_done()
    if known is not None:
        return known
    answers = [one for path in sources if path.name == "rankings.jsonl" for one in read_answers(path)]
    pairs, balance = label_pairs(answers, rule=rule, question=question)
    imported = [one for path in sources if path.name == "pairs.jsonl" for one in read_pairs(path)]
    yes = sum(pair.consistent for pair in imported)
    write_pairs(folder / "pairs.jsonl", [*pairs, *imported])
    counts = {**balance.as_dict(), "imported_yes": yes, "imported_no": len(imported) - yes}
    return step.finish(outputs=[folder / "pairs.jsonl"], counts=counts)


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
) -> dict[str, Any]:
    """Writes every format of `formats`; returns counts per split and the balance of the labels.

    Raises ValueError for unknown formats, no rankings, or pictures that are gone.
    """
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise ValueError(f"unknown formats {', '.join(unknown)}; there are {', '.join(FORMATS)}")
    balance = label(folder, rule=rule, question=question)
    rankings = [*folder.glob("rankings.jsonl"), *sorted(folder.glob("imported/*/rankings.jsonl"))]
    bundle = Export(
        folder,
        out or folder / "export",
        pairs=with_reasons(folder, read_pairs(folder / "pairs.jsonl")),
        answers=[one for path in rankings for one in read_answers(path)],
    )
    bundle.deal(shares, seed=seed)
    counts = {"balance": balance, "splits": {name: _split_counts(pairs) for name, pairs in bundle.splits()}}
    if dry_run:
        return counts
    written = [path for name in formats for path in FORMATS[name](bundle)]
    step = Step(
        folder,
        "export",
        inputs=[folder / "pairs.jsonl"],
        options={"formats": list(formats), "shares": dict(shares), "out": str(bundle.out)},
        seed=seed,
    )
    return step.finish(outputs=written, counts=counts)


def with_reasons(folder: Path, pairs: Sequence[LabelledPair]) -> list[LabelledPair]:
    """The pairs with the reasons of explanations.jsonl, where they have some that do not contradict the label."""
    path = folder / "explanations.jsonl"
    rows = {row["key"]: row for row in read_jsonl(path)} if path.is_file() else {}
    reasons = {key: row["reasons"] for key, row in rows.items() if row["status"] == "explained"}
    labels = {key: row["consistent"] for key, row in rows.items()}
    return [
        replace(pair, reasons=reasons[pair.key])
        if pair.key in reasons and labels[pair.key] == pair.consistent
        else pair
        for pair in pairs
    ]


def _split_counts(pairs: Sequence[LabelledPair]) -> dict[str, Any]:
    labels = Counter(pair.consistent for pair in pairs)
    return {
        "groups": len({pair.group for pair in pairs}),
        "yes": labels[True],
        "no": labels[False],
        "with_reasons": sum(bool(pair.reasons) for pair in pairs),
    }
