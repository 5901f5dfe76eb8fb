"""Prompts, configs and recipes: `pacorl prompts`, `data`, `config`, `recipes` and `init`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from typer import Argument, Exit, Option
from typer.core import TyperGroup

from pacorl.cli.shared import Commands, JsonOption, echo, print_json
from pacorl.config.options import LARGEST, SEEDS


class ConfigCommands(TyperGroup):
    """`pacorl config KEY` is `pacorl config show KEY`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_key = bool(args) and not args[0].startswith("-") and args[0] not in self.commands
        return super().parse_args(ctx, ["show", *args] if is_key else args)


prompts = Commands(name="prompts", no_args_is_help=True, help="Check and split files of prompts and edits.")
data = Commands(name="data", no_args_is_help=True, help="Published prompts, benchmarks and comparisons.")
config = Commands(
    name="config", cls=ConfigCommands, no_args_is_help=True, help="Configs of runs: `pacorl config KEY` explains a key."
)

SOURCE = Argument(help="A .jsonl or .txt of prompts or edits, or tiny:train|dev|test.")


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
    from pacorl.plan.init import write_config

    plan, steps = write_config(path, model=model, prompts=prompts, card=card, reward=reward, references=references)
    echo(plan)
    echo("\n".join(steps))


@prompts.command("check")
def check_prompts(
    source: str = SOURCE,
    against: list[str] = Option(..., help="Prompts that results are reported on; may be given several times."),
    as_json: bool = Option(False, "--json", help="One JSON object with every leak."),
) -> None:
    """List the prompts that are also in other files or benchmarks; exit code 1 if there are any."""
    from pacorl.records.leaks import find_leaks, leak_report
    from pacorl.records.prompts import prompts_from

    # Compare with every other file or benchmark.
    train = prompts_from(source)
    leaks = find_leaks(train, {name: prompts_from(name) for name in against})
    if as_json:
        rows = []
        for leak in leaks:
            rows.append(
                {
                    "prompt": leak.prompt.id,
                    "text": leak.prompt.text,
                    "in": leak.against,
                    "is": leak.other.id,
                    "why": leak.why,
                }
            )

        print_json({"prompts": len(train), "leaks": rows})
    else:
        echo(leak_report(leaks, total=len(train)) or f"none of {len(train)} prompts is in {', '.join(against)}")
    # A check in a pipeline fails on a leak without reading the text.
    raise Exit(1 if leaks else 0)


@prompts.command("split")
def split_prompts(
    source: str = SOURCE,
    *,
    out: Path = Option(..., help="A folder for train.jsonl and test.jsonl."),
    test: int = Option(128, min=1, max=LARGEST, help="About how many to hold out; related prompts stay together."),
    seed: int = Option(42, min=0, max=SEEDS, help="Of the draw."),
    keep_out: list[str] = Option([], "--keep-out", help="Benchmarks whose prompts go to neither side."),
) -> None:
    """Split prompts into training and test, benchmarks kept out of both."""
    from pacorl.io.files import check_new
    from pacorl.records.edits import save_edits
    from pacorl.records.leaks import split_prompts
    from pacorl.records.prompts import prompts_from, save_prompts

    # Both files are new: an earlier split may be in use.
    check_new(out / "train.jsonl", out / "test.jsonl", fix="name another folder with --out")
    # Benchmarks leave both sides before the draw, so that the test side has the requested size.
    benchmarks = {name: prompts_from(name) for name in keep_out}
    train, held_out, leaks = split_prompts(prompts_from(source), test=test, seed=seed, keep_out=benchmarks)
    for name, side in (("train", train), ("test", held_out)):
        # Edits have their own format: a record of a set has no source image.
        save = save_edits if any(prompt.sources for prompt in side) else save_prompts
        save(side, out / f"{name}.jsonl")
    echo(f"{out}: {len(train)} to train on, {len(held_out)} to test on, {len(leaks)} kept out")


@data.command("get")
def get_data(
    name: str = Argument(help="t2is, gedit, consistencyrank or paco-dataset."),
    *,
    out: Path = Option(None, help="A new folder; by default the one that the recipes and guides name."),
    dry_run: bool = Option(False, "--dry-run", help="Print source, licence, size and hashes alone."),
) -> None:
    """Download a published data set; its source, licence, commit and hashes are printed first."""
    from pacorl.dataset.published import FOLDERS, find_published
    from pacorl.io.files import check_writable

    published = find_published(name)
    echo("\n".join(published.describe()))
    if dry_run:
        return
    folder = out or Path(FOLDERS[name])
    check_writable(folder, folder=True)
    published.download(folder)
    echo(f"wrote {folder}")
    if name == "gedit":
        convert_data(folder)


@data.command("convert")
def convert_data(
    source: Path = Argument(help="The parquet files of GEdit-Bench, or a JSON of ShareGPT-4o-Image, unpacked."),
) -> None:
    """Convert a published collection of edits to the JSONL that prompts are read from, beside it."""
    from pacorl.dataset.convert import convert

    for path in convert(source):
        echo(f"wrote {path}")


@config.command("show")
def show_key(key: str = Argument(help="A key such as `sampling.tree`, or the end of one.")) -> None:
    """Show a key's meaning, its values and its default; for a section, of all its keys."""
    from pacorl.config.reference import matching

    echo("\n\n".join([str(entry) for entry in matching(key)]))


@config.command("schema")
def schema(
    run: Literal["train-policy", "train-reward", "train-character"] = Argument(
        "train-policy", help="The command that reads it."
    ),
) -> None:
    """Print the JSON schema of a run's config, which editors check YAML with."""
    from pacorl.config.reference import RUNS

    print_json(RUNS[run].model_json_schema())
