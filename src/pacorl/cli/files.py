"""Configs, recipes and data: `pacorl recipes`, `init`, `config` and `data`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typer import Argument, Option

from pacorl.cli.shared import echo, echo_errors
from pacorl.config.options import LARGEST

if TYPE_CHECKING:
    from collections.abc import Sequence


def recipes() -> None:
    """List the recipes by the card that they need."""
    from pacorl.config.recipes import read_header, recipe, recipe_names

    # A recipe's purpose and hardware are in the comment at its top.
    rows: dict[str, list[str]] = {}
    for name in recipe_names():
        card, purpose = read_header(recipe(name))
        rows.setdefault(card, []).append(f"  {name:23}  {purpose}")
    # The smallest first.
    for card in sorted(rows, key=lambda card: (card.startswith("Eight"), card.casefold())):
        echo("\n".join([card, *rows[card]]))
    plan_command, init_command = "pacorl train-policy NAME --dry-run", "pacorl init my.yaml --prompts FILE"
    echo(f"`{plan_command}` plans a run; `{init_command}` writes one of your own")


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
    from pacorl.plan.init import read_job, write_config

    job = read_job(path, model=model, prompts=prompts, card=card, reward=reward, references=references)
    echo_errors(f"planning {model}, which takes up to a minute")
    plan, steps = write_config(job)
    echo(plan)
    echo(steps)


def data(
    source: str = Argument(
        help="t2is, the prompts of the paper's runs; a file or folder to convert; or with --test, prompts."
    ),
    *,
    out: Path = Option(None, help="A new folder; by default the one that the recipes and guides name."),
    test: int = Option(0, min=0, max=LARGEST, help="Split prompts: hold out about so many, related ones together."),
    against: list[str] = Option([], help="With --test: prompts for neither side, as of a benchmark; may be repeated."),
) -> None:
    """Download the T2IS prompts, convert edits that you have to JSONL, or split prompts into train and test.

    Parquet files, as of GEdit-Bench, and the JSON of ShareGPT-4o-Image, unpacked, become JSONL.
    """
    if test:
        _split(source, out or Path("data") / Path(source.partition(":")[0]).stem, test=test, against=against)
    elif source == "t2is":
        from pacorl.dataset.published import ABOUT, download_t2is
        from pacorl.io.files import check_writable

        echo(ABOUT)
        folder = out or Path("data/t2is")
        check_writable(folder, folder=True)
        download_t2is(folder)
        echo(f"wrote {folder}")
    else:
        from pacorl.dataset.convert import convert

        for path in convert(Path(source)):
            echo(f"wrote {path}")


def _split(source: str, out: Path, *, test: int, against: Sequence[str]) -> None:
    from pacorl.io.files import check_new
    from pacorl.records.leaks import split_prompts
    from pacorl.records.prompts import kinds_of, load_prompts, save_prompts

    # Both files are new: an earlier split may be in use.
    check_new(out / "train.jsonl", out / "test.jsonl", fix="name another folder with --out")
    prompts = load_prompts(source)
    keep_out = []
    for name in against:
        keep_out += load_prompts(name)
    train, held_out = split_prompts(prompts, test=test, keep_out=keep_out)
    kept_out = len(prompts) - len(train) - len(held_out)
    for name, side in (("train", train), ("test", held_out)):
        save_prompts(side, out / f"{name}.jsonl")
    echo(f"{out}: {len(train)} to train on, {len(held_out)} to test on, {kept_out} kept out")
    echo(f"read as: {kinds_of(prompts)}")


def config(key: str = Argument("", help="A key such as `sampling.tree`, or a part of one.")) -> None:
    """Show the meaning, values and default of a key, or of all keys of a section; without a key, list the sections."""
    from pacorl.config.reference import RUNS, matching

    texts = [f"{command}: {', '.join(model.model_fields)}" for command, model in RUNS.items()]
    if key:
        texts = matching(key)
    if any(text.partition(":")[0].endswith("rewards.args") for text in texts):
        from pacorl.rewards import arguments

        texts.append("\n".join(["args of each reward, with their defaults:", *arguments()]))
    echo("\n\n".join(texts))
