"""`pacorl dataset …`: from prompts to the training pairs of a judge, one step at a time.

Every step works on one folder, and may be run again at any time.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Argument, Exit, Option

from pacorl.cli.shared import Commands, echo, needing, progress
from pacorl.config.options import (
    INCOMPLETE,
    LARGEST,
    SEEDS,
    GeneratorOptions,
    JudgeOptions,
    UsageError,
    inherited,
    option,
)
from pacorl.types import TINY

if TYPE_CHECKING:
    from pacorl.io.documents import JsonObject
    from pacorl.judge.chat import ChatModel


app = Commands(name="dataset", help="Make a dataset of consistency judgements.", no_args_is_help=True)

FOLDER = Argument(help="The dataset's folder.")
RANKINGS = Option([], help="Rankings of your own, a .csv or .jsonl, beside FOLDER's; may be repeated.")
SEED = Option(0, min=0, max=SEEDS, help="Of everything that is drawn.")
MODEL = "URL#MODEL of an OpenAI-compatible API, or a model's name at OPENAI_BASE_URL or OpenAI (key: OPENAI_API_KEY)"
REQUESTS = 8
"""Requests to a language model at a time."""


def following(step: str, folder: Path) -> str:
    """Write the command of a step."""
    return f"dataset {step} {shlex.quote(str(folder))}"


def run(activity: str, step: Callable[..., JsonObject], *inputs: Any, then: str, **options: Any) -> None:
    """Run a step under a progress bar, and print its counts and the next command."""
    with progress(activity) as advance:
        counts = step(*inputs, **options, progress=advance)
    show(counts, then)


def show(counts: JsonObject, following: str) -> None:
    """Print a line for each count, and the next command."""
    for label, count in _flat(counts):
        echo(f"{label:<28} {f'{count:.4f}' if isinstance(count, float) else count}")
    echo(f"next: pacorl {following}")


def finish(counts: JsonObject, following: str) -> None:
    """Show the counts of a step that asks a language model; the same command tries failed requests again, by exit 3."""
    failed = counts.get("failed")
    show(counts, shlex.join(sys.argv[1:]) if failed else following)
    if failed:
        raise Exit(INCOMPLETE)


def chat_model(source: str) -> ChatModel:
    """Connect to the language model of `--model`. Raises UsageError if none is named."""
    from pacorl.judge.chat import ChatModel

    if source in ("", TINY):
        raise UsageError(f"--model {source!r} is no language model; give one, such as http://127.0.0.1:8000/v1#MODEL")
    return ChatModel.at(source)


@dataclass(frozen=True, kw_only=True)
class GridGeneratorOptions(GeneratorOptions):
    """The generator of the grids."""

    model: str = inherited(GeneratorOptions, "model", default="", help="Folder, hub name or tiny; else FLUX.1-dev.")
    steps: int = inherited(GeneratorOptions, "steps", default=20, help="Denoising steps.")
    memory: str = inherited(JudgeOptions, "memory")
    batch: int = option(4, "Grids at a time.", min=1, max=LARGEST)


@app.command()
def prompts(
    folder: Path = FOLDER,
    *,
    count: int = Option(2000, min=1, max=LARGEST, help="How many records."),
    taxonomy: Path | None = Option(None, help="A YAML of your own: category → kind → [Style, Identity, Logic]."),
    layout: str = Option("2x2", help="Rows and columns of a set's panels."),
    seed: int = SEED,
    model: str = Option("", help=f"{MODEL}; tiny writes prompts of the tiny world."),
) -> None:
    """Write prompts, balanced over a taxonomy; exit code 3 if some could not be written."""
    from pacorl.core.grid import parse_layout
    from pacorl.dataset import prompts as written
    from pacorl.io.documents import read_text

    writer = "tiny" if model == TINY else "llm"
    chat = chat_model(model) if writer == "llm" else None
    options: JsonObject = {"writer": writer, "model": chat.model if chat else ""}
    # The tiny world has a vocabulary of its own, and thus a taxonomy.
    path = taxonomy or (written.TINY if writer == "tiny" else written.PAPER)
    options["taxonomy"] = read_text(path)
    grid = parse_layout(layout)
    options["layout"] = str(grid)
    with progress("writing") as advance:
        counts = written.write_all(
            folder,
            written.llm_writer(chat) if chat else written.tiny_writer(count=count, grid=grid, seed=seed),
            written.orders(written.read_taxonomy(path), count=count, grid=grid),
            options=options,
            seed=seed,
            workers=REQUESTS if chat else 1,
            progress=advance,
        )
    # The paper keeps 708 of 2,000.
    finish(counts, f"{following('diversify', folder)} --number {counts['records'] // 3 or 1}")


@app.command()
def diversify(
    folder: Path = FOLDER,
    *,
    number: int = Option(..., min=1, max=LARGEST, help="Select so many prompts."),
    seed: int = SEED,
) -> None:
    """Select prompts that differ."""
    from pacorl.dataset.diversify import diversify as select

    then = following("generate", folder)
    tiny = _options(folder, "prompts").get("writer") == TINY
    run("selecting", select, folder, number=number, seed=seed, then=f"{then} --model tiny" if tiny else then)


@app.command()
def generate(
    folder: Path = FOLDER,
    *,
    grids: int = Option(4, min=1, max=1000, help="Grids per prompt."),
    generator: GridGeneratorOptions,
) -> None:
    """Generate grids of every prompt, going on where an earlier call stopped."""
    from pacorl.dataset import grids as module
    from pacorl.generate.image_queue import Shard, image_source
    from pacorl.models.policies import POLICIES

    model = generator.model or POLICIES.default_options().checkpoint
    source = image_source(replace(generator, model=model), memory=generator.memory, batch=generator.batch)
    shard = Shard.of_process()
    run("generating", module.generate, folder, source, grids=grids, shard=shard, then=following("pair", folder))


@app.command()
def pair(
    folder: Path = FOLDER,
    *,
    limit: int | None = Option(None, min=1, max=LARGEST, help="Questions at most, evenly spread; 20 for a pilot."),
) -> None:
    """Cut the grids, and combine them into questions for people."""
    from pacorl.dataset.grids import pair as cut

    then = f"{following('annotate', folder)} --annotators ann,ben"
    # In the tiny world a control's foreign image may show the same hero.
    run("cutting", cut, folder, limit=limit, then=f"{then} --no-controls" if _is_tiny(folder) else then)


@app.command()
def annotate(
    folder: Path = FOLDER,
    *,
    annotators: str = Option("", help="Names, separated by commas; earlier people with answers stay."),
    adjudicators: str = Option("", help="Names of people who settle what others disagree on."),
    host: str = Option("127.0.0.1", help="Where to listen; another address opens the page to the network."),
    port: int = Option(8765, min=0, max=65_535, help="0 for any free one."),
    public_url: str = Option("", help="The address in the links, such as a proxy's https://rank.example.org."),
    people: int = Option(2, min=1, max=LARGEST, help="How many people rank each question."),
    controls: bool = Option(True, help="Ask hidden control questions, made from the data."),
) -> None:
    """Serve the page on which people rank candidates, and print everybody's link."""
    # The page's libraries are an extra, whose absence is a line with the fix.
    with needing("data", what="the annotation page"):
        from pacorl.annotate import server

    people_of_roles = []
    for names in (annotators, adjudicators):
        people_of_roles.append([name.strip() for name in names.split(",") if name.strip()])
    server.serve(
        folder,
        *people_of_roles,
        people=people,
        controls=controls,
        host=host,
        port=port,
        public_url=public_url,
        announce=echo,
    )


@app.command()
def explain(
    folder: Path = FOLDER,
    *,
    rankings: list[Path] = RANKINGS,
    limit: int | None = Option(None, min=1, max=LARGEST, help="At most so many pairs."),
    model: str = Option("", help=f"{MODEL}."),
) -> None:
    """Write reasons for the labelled pairs, by a model that sees images; exit code 3 if some have none."""
    from pacorl.dataset.explain import explain as write

    chat = chat_model(model)
    with progress("explaining") as advance:
        counts = write(folder, chat, rankings=rankings, limit=limit, workers=REQUESTS, progress=advance)
    then = following("export", folder)
    for source in rankings:
        then += f" --rankings {shlex.quote(str(source))}"
    finish(counts, then)


@app.command()
def export(
    folder: Path = FOLDER,
    *,
    rankings: list[Path] = RANKINGS,
    out: Path | None = Option(None, help="Where to write; FOLDER/export unless named."),
    test_share: float = Option(0.1, min=0, max=1, help="Share of the prompts that is held out."),
    seed: int = SEED,
) -> None:
    """Turn rankings into training pairs, held-out pairs and a benchmark."""
    from pacorl.dataset.export import export as write

    with progress("exporting") as advance:
        counts = write(folder, rankings=rankings, out=out, test_share=test_share, seed=seed, progress=advance)
    files = dict.fromkeys(("train", "test"), "")
    for split in counts["splits"]:
        files[split] = shlex.quote(str((out or folder / "export") / f"consistency_{split}.jsonl"))
    recipe = "tiny" if _is_tiny(folder) else "paco_reward_7b"
    following = f"train-reward reward/{recipe} data.train=[{files['train']}] data.evaluation=[{files['test']}]"
    if not files["train"]:
        following = f"calibrate JUDGE {files['test']}"
    show(counts, following)


def _is_tiny(folder: Path) -> bool:
    """Whether the tiny generator made a dataset's images."""
    generator = _options(folder, "generate").get("generator", {})
    return bool(generator.get("checkpoint") == TINY)


def _options(folder: Path, step: str) -> JsonObject:
    """Options of a finished step; none if it was not run."""
    from pacorl.dataset.manifest import DatasetStep

    last = DatasetStep(folder, step).last()
    options: JsonObject = last.plan["options"] if last else {}
    return options


def _flat(counts: JsonObject, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, count in counts.items():
        label = f"{prefix}{name.replace('_', ' ')}"
        if isinstance(count, dict):
            yield from _flat(count, prefix=f"{label}: ")
        else:
            yield label, count
