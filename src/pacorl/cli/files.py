"""Prompts, configs and recipes: `pacorl prompts`, `data`, `config`, `recipes` and `init`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from typer import Argument, Exit, Option

from pacorl.cli.shared import JsonOption, echo, print_json
from pacorl.config.options import LARGEST, SEEDS, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pacorl.types import Prompt


def recipes(*, output: JsonOption) -> None:
    """List the recipes by the card that they need."""
    from pacorl.config.recipes import read_header, recipe, recipe_command, recipe_names

    rows = []
    for name in recipe_names():
        # A recipe's purpose and hardware are in the comment at its top.
        card, purpose = read_header(recipe(name))
        rows.append({"name": name, "card": card, "command": recipe_command(name), "purpose": purpose})
    if output.as_json:
        print_json({"recipes": rows})
        return
    width = max(len(row["name"]) for row in rows)
    for card in dict.fromkeys(row["card"] for row in rows):
        echo(card)
        for row in rows:
            if row["card"] == card:
                echo(f"  {row['name']:{width}}  {row['purpose']}")
    echo(
        "`pacorl train-policy NAME --dry-run` plans a run; `pacorl init my.yaml --prompts FILE` writes one of your own"
    )


def init(
    path: Path = Argument(help="The new file, such as my.yaml."),
    *,
    prompts: str = Option(..., help="Your prompts: sentences that ask for sets (.txt), sets or edits (.jsonl)."),
    model: str = Option("flux", help="A kind of generator, such as klein, or a checkpoint."),
    card: str = Option("24", help="Gigabytes of the card, as 24, or of several as 8x80."),
    reward: str = Option("", help="Your own reward, file.py:NAME, in place of the judge's."),
    references: str = Option("", help="A folder of a character's images that every prompt shows."),
) -> None:
    """Write a config for your prompts, model and card, each setting explained, and print its plan."""
    from pacorl.io.files import check_new, check_writable

    # Before the imports of a plan, which take seconds.
    check_new(path, fix="name another file")
    check_writable(path)
    from pacorl.plan.init import write_config

    plan, steps = write_config(path, model=model, prompts=prompts, card=card, reward=reward, references=references)
    echo(plan)
    echo("\n".join(steps))


def prompts(
    source: str = Argument(help="A .jsonl or .txt of prompts or edits, or tiny:train|dev|test."),
    *,
    against: list[str] = Option([], help="Prompts that results are reported on; may be given several times."),
    out: Path = Option(None, help="A folder for train.jsonl and test.jsonl, without the prompts of --against."),
    test: int = Option(128, min=1, max=LARGEST, help="About how many to hold out; related prompts stay together."),
    seed: int = Option(42, min=0, max=SEEDS, help="Of the draw."),
    as_json: bool = Option(False, "--json", help="One JSON object with every leak."),
) -> None:
    """List the prompts that are also in other files or benchmarks (exit code 1), or split them with --out."""
    from pacorl.io.files import check_new
    from pacorl.records.leaks import find_leaks, leak_report
    from pacorl.records.prompts import prompts_from

    benchmarks = {name: prompts_from(name) for name in against}
    if out:
        # Both files are new: an earlier split may be in use.
        check_new(out / "train.jsonl", out / "test.jsonl", fix="name another folder with --out")
        _split(prompts_from(source), benchmarks, out, test=test, seed=seed)
        return
    if not against:
        raise UsageError("give --against with files to compare with, or --out with a folder for a split")
    rows = prompts_from(source)
    leaks = find_leaks(rows, benchmarks)
    if as_json:
        found = []
        for leak in leaks:
            own = {"prompt": leak.prompt.id, "text": leak.prompt.text}
            found.append(own | {"in": leak.against, "is": leak.other.id, "why": leak.why})
        print_json({"prompts": len(rows), "leaks": found})
    else:
        echo(leak_report(leaks, total=len(rows)) or f"none of {len(rows)} prompts is in {', '.join(against)}")
    # A check in a pipeline fails on a leak without reading the text.
    raise Exit(1 if leaks else 0)


def _split(
    rows: Sequence[Prompt], benchmarks: Mapping[str, Sequence[Prompt]], out: Path, *, test: int, seed: int
) -> None:
    from pacorl.records.edits import save_edits
    from pacorl.records.leaks import split_prompts
    from pacorl.records.prompts import save_prompts

    # Benchmarks leave both sides before the draw, so that the test side has the requested size.
    train, held_out, leaks = split_prompts(rows, test=test, seed=seed, keep_out=benchmarks)
    for name, side in (("train", train), ("test", held_out)):
        # Edits have their own format: a record of a set has no source image.
        save = save_edits if any(prompt.sources for prompt in side) else save_prompts
        save(side, out / f"{name}.jsonl")
    echo(f"{out}: {len(train)} to train on, {len(held_out)} to test on, {len(leaks)} kept out")


def data(
    source: str = Argument(help="t2is, gedit, consistencyrank or paco-dataset; or a file or folder to convert."),
    *,
    out: Path = Option(None, help="A new folder; by default the one that the recipes and guides name."),
    dry_run: bool = Option(False, "--dry-run", help="Print source, licence, size and hashes alone."),
) -> None:
    """Download a published data set, or convert a collection of edits that you have to JSONL.

    A download's source, licence, commit and hashes are printed first. The parquet files of GEdit-Bench and a JSON of
    ShareGPT-4o-Image, unpacked, are converted.
    """
    from pacorl.dataset.published import FOLDERS, find_published
    from pacorl.io.files import check_writable

    if Path(source).exists():
        _convert(Path(source))
        return
    published = find_published(source)
    echo("\n".join(published.describe()))
    if dry_run:
        return
    folder = out or Path(FOLDERS[source])
    check_writable(folder, folder=True)
    published.download(folder)
    echo(f"wrote {folder}")
    if source == "gedit":
        _convert(folder)


def _convert(source: Path) -> None:
    from pacorl.dataset.convert import convert

    for path in convert(source):
        echo(f"wrote {path}")


def config(
    key: str = Argument("", help="A key such as `sampling.tree`, or the end of one."),
    *,
    schema: Literal["train-policy", "train-reward", "train-character"] | None = Option(
        None, help="Print the JSON schema of this command's config, which editors check YAML with."
    ),
) -> None:
    """Show a key's meaning, its values and its default; for a section, of all its keys."""
    from pacorl.config.reference import RUNS, matching

    if bool(key) == bool(schema):
        raise UsageError("give a key, or --schema with a command")
    if schema:
        print_json(RUNS[schema].model_json_schema())
    else:
        echo("\n\n".join([str(entry) for entry in matching(key)]))
