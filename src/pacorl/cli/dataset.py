"""`pacorl dataset …`: from prompts to the training pairs of a judge, one step at a time.

Every step works on one folder, says with --dry-run what it would do, and may be run again at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import typer

from pacorl.cli.output import print_json, progress

Number = TypeVar("Number", int, float)

app = typer.Typer(name="dataset", help="Make a dataset of consistency judgements.", no_args_is_help=True)

FOLDER = typer.Argument(help="The dataset's folder.")
DRY_RUN = typer.Option(False, "--dry-run", help="Say what it would do and cost, and change nothing.")
AS_JSON = typer.Option(False, "--json", help="Print the result as JSON.")
SEED = typer.Option(0, help="Of everything that is drawn.")


@app.command()
def prompts(
    folder: Path = FOLDER,
    *,
    count: int = typer.Option(2000, help="How many records."),
    writer: str = typer.Option("llm", help="llm, or tiny for the tiny world (no network)."),
    model: str = typer.Option("", help="The language model's name at its server."),
    endpoint: str = typer.Option("", help="Base URL of an OpenAI-compatible API; empty for the client's default."),
    key_env: str = typer.Option("OPENAI_API_KEY", help="The environment variable that holds the key."),
    taxonomy: Path = typer.Option(None, help="A YAML of your own; see dataset/taxonomy.yaml."),
    layouts: str = typer.Option("2x2", help="Layouts that take turns, separated by commas."),
    price: str = typer.Option("0/0", help="Per million prompt/completion tokens, for the cost."),
    workers: int = typer.Option(8, help="Requests at a time."),
    seed: int = SEED,
    dry_run: bool = DRY_RUN,
    as_json: bool = AS_JSON,
) -> None:
    """Write prompts, balanced over a taxonomy."""
    from pacorl.core.grid import parse_layout
    from pacorl.dataset.prompts import TOKENS_PER_RECORD, make_writer, write_all
    from pacorl.dataset.taxonomy import PAPER, TINY, read_taxonomy

    path = taxonomy or (TINY if writer == "tiny" else PAPER)
    options = {"writer": writer, "model": model, "taxonomy": path.read_text(encoding="utf-8")}
    prices, asked = two(price, "--price", float), None if dry_run else chat(model, endpoint, key_env)
    write = make_writer(writer, count=count, seed=seed, chat=asked)
    with progress("writing") as advance:
        counts = write_all(
            folder,
            write,
            subjects=read_taxonomy(path),
            count=count,
            grids=[parse_layout(layout) for layout in names(layouts)],
            options=options,
            seed=seed,
            workers=workers,
            tokens=(0, 0) if writer == "tiny" else TOKENS_PER_RECORD,
            price=prices,
            dry_run=dry_run,
            progress=advance,
        )
    if asked and asked.usage.calls:
        counts = {**counts, "usage": {**asked.usage.as_dict(), "cost": asked.usage.cost(prices)}}
    tell(counts, as_json=as_json, dry_run=dry_run)
    if counts.get("failed"):
        raise ValueError(
            f"{len(counts['failed'])} records could not be written; run the command again to try them again"
        )


@app.command()
def diversify(
    folder: Path = FOLDER,
    *,
    number: int = typer.Option(None, help="Keep so many prompts."),
    distance: float = typer.Option(None, help="Or keep them at least so far apart (1 − cosine)."),
    method: str = typer.Option("independent_set", help="independent_set, farthest_point or facility_location."),
    embed: str = typer.Option("tfidf", help="tfidf, letters, words, or transformers:CHECKPOINT."),
    per_category: bool = typer.Option(False, "--per-category", help="Give every category an equal share."),
    seed: int = SEED,
    dry_run: bool = DRY_RUN,
    as_json: bool = AS_JSON,
) -> None:
    """Keep prompts that differ."""
    from pacorl.dataset.diversify import Goal
    from pacorl.dataset.diversify_step import diversify as run

    goal = Goal(number=number, distance=distance)
    with progress("thinning") as advance:
        counts = run(
            folder,
            goal=goal,
            method=method,
            embed=embed,
            per_category=per_category,
            seed=seed,
            dry_run=dry_run,
            progress=advance,
        )
    tell(counts, as_json=as_json, dry_run=dry_run)


@app.command("compare-diversity")
def compare_diversity(
    files: list[Path] = typer.Argument(help="T2IS JSONL files, taken together."),
    *,
    number: int = typer.Option(100, help="How many prompts are chosen."),
    embeds: str = typer.Option("tfidf,letters", help="Embeddings; each selects, and each measures."),
    measures: str = typer.Option("words", help="Embeddings that measure and never select."),
    draws: int = typer.Option(100, help="Random choices to compare with."),
    seed: int = SEED,
    as_json: bool = AS_JSON,
) -> None:
    """Compare every selection with random choices of the same size, also in an embedding that did not select."""
    from dataclasses import asdict

    from pacorl.dataset.diversify_step import compare, table
    from pacorl.dataset.records import read_prompts

    records = [record for path in files for record in read_prompts(path)]
    rows = compare(records, number=number, embeds=names(embeds), measures=names(measures), draws=draws, seed=seed)
    if as_json:
        tell({"prompts": len(records), "rows": [asdict(row) for row in rows]}, as_json=True)
        return
    print(f"{number} of {len(records)} prompts; distances are 1 − cosine; random: mean (best) of {draws} draws\n")
    print(table(rows))


@app.command()
def generate(
    folder: Path = FOLDER,
    *,
    checkpoint: str = typer.Option("black-forest-labs/FLUX.1-dev", help="A folder, a hub name, or tiny."),
    adapter: str = typer.Option("", help="A LoRA: a folder or file in PEFT or diffusers form, or a hub name."),
    grids: int = typer.Option(4, help="Grids per prompt."),
    size: str = typer.Option("", help="HEIGHTxWIDTH of a grid; empty for the records' own."),
    steps: int = typer.Option(20, help="Sampling steps."),
    guidance_scale: float = typer.Option(None, min=0, help="Guidance scale; the model's own default."),
    max_sequence_length: int = typer.Option(None, help="Text tokens per prompt; the model's own default."),
    dtype: str = typer.Option("", help="float32 or bfloat16; bfloat16 unless the checkpoint is tiny."),
    batch: int = typer.Option(4, help="Grids at a time."),
    shard: str = typer.Option("0/1", help="INDEX/COUNT: this process's share, from 0."),
    prompts: str = typer.Option("diverse.jsonl", help="The prompts file inside the folder."),
    seed: int = SEED,
    dry_run: bool = DRY_RUN,
    as_json: bool = AS_JSON,
) -> None:
    """Generate grids of every prompt, going on where an earlier call stopped."""
    from pacorl.dataset.generate import generate as run
    from pacorl.dataset.generate import image_source
    from pacorl.engine.image_queue import Shard
    from pacorl.types import Size

    source = image_source(
        checkpoint, adapter=adapter, size=Size.parse(size) if size else None, steps=steps,
        guidance_scale=guidance_scale, max_sequence_length=max_sequence_length, dtype=dtype, batch=batch, seed=seed,
    )  # fmt: skip
    with progress("generating") as advance:
        counts = run(
            folder,
            source,
            grids=grids,
            prompts=prompts,
            shard=Shard.parse(shard),
            dry_run=dry_run,
            progress=advance,
        )
    tell(counts, as_json=as_json, dry_run=dry_run)


@app.command()
def pair(
    folder: Path = FOLDER,
    *,
    prompts: str = typer.Option("diverse.jsonl", help="The prompts file inside the folder."),
    dry_run: bool = DRY_RUN,
    as_json: bool = AS_JSON,
) -> None:
    """Cut the grids and combine their sub-figures into questions for people."""
    from pacorl.dataset.pair import pair as run

    with progress("cutting") as advance:
        counts = run(folder, prompts=prompts, dry_run=dry_run, progress=advance)
    tell(counts, as_json=as_json, dry_run=dry_run)


@app.command()
def annotate(
    folder: Path = FOLDER,
    *,
    annotators: str = typer.Option("", help="Names, separated by commas; those known already keep their links."),
    overlap: float = typer.Option(None, help="Share of the instances that several people rank.  [default: 0.1]"),
    judges: int = typer.Option(None, help="How many people each of those gets.  [default: 3]"),
    controls: int = typer.Option(None, help="Hidden control questions, made from the data.  [default: 40]"),
    control_every: int = typer.Option(None, help="One control question among so many.  [default: 20]"),
    host: str = typer.Option("127.0.0.1", help="Where to listen; another address opens the page to the network."),
    port: int = typer.Option(8765),
    days: float = typer.Option(30, help="How long a link is good for."),
    renew: str = typer.Option("", help="Make new links for these names ('admin' for the administrator)."),
    seed: int = typer.Option(None, help="Of the shares and the control questions.  [default: 0]"),
    dry_run: bool = DRY_RUN,
    as_json: bool = AS_JSON,
) -> None:
    """Serve the page on which people rank candidates.

    How the work is shared is remembered with the database: without these options a later start changes nothing.
    """
    from pacorl.annotate import launch
    from pacorl.annotate.assign import Sharing

    wishes: dict[str, Any] = {
        "overlap": overlap,
        "judges": judges,
        "controls": controls,
        "control_every": control_every,
        "seed": seed,
    }
    given = {name: value for name, value in wishes.items() if value is not None}
    sharing, people = Sharing(**given) if given else None, names(annotators)
    if dry_run:
        tell(launch.plan(folder, people, sharing=sharing), as_json=as_json, dry_run=True)
        return
    launch.serve(folder, people, sharing=sharing, host=host, port=port, days=days, renew=names(renew), announce=say)


def say(line: str) -> None:
    """Prints at once, whoever reads."""
    print(line, flush=True)


@app.command()
def simulate(
    url: str = typer.Argument(help="Where the page is served."),
    links: list[str] = typer.Argument(help="NAME=TOKEN or NAME=LINK of each simulated annotator."),
    noise: float = typer.Option(0.5, help="Standard deviation of their judgement, in attributes."),
    attend: str = typer.Option("colour,shape,hat,palette", help="The attributes that they look at."),
    as_json: bool = AS_JSON,
) -> None:
    """Rehearse with annotators of the tiny world: the oracle with noise, through the page's own API."""
    from pacorl.annotate.simulate import simulate as run

    tokens = {name: link.rpartition("/")[2] for name, _, link in (one.partition("=") for one in links)}
    tell(dict(run(url, tokens, noise=noise, attend=names(attend))), as_json=as_json)


@app.command()
def explain(
    folder: Path = FOLDER,
    *,
    model: str = typer.Option("", help="The vision-language model's name at its server."),
    endpoint: str = typer.Option("", help="Base URL of an OpenAI-compatible API; empty for the client's default."),
    key_env: str = typer.Option("OPENAI_API_KEY", help="The environment variable that holds the key."),
    rule: str = typer.Option("best_worst", help="How rankings become pairs: best_worst or halves."),
    question: str = typer.Option("theme", help="What the judge is asked: theme, criteria, or plain."),
    price: str = typer.Option("0/0", help="Per million prompt/completion tokens."),
    limit: int = typer.Option(None, help="At most so many pairs."),
    workers: int = typer.Option(8, help="Requests at a time."),
    dry_run: bool = DRY_RUN,
    as_json: bool = AS_JSON,
) -> None:
    """Write reasons for the labelled pairs."""
    from pacorl.dataset.explain import explain as run

    prices = two(price, "--price", float)
    with progress("explaining") as advance:
        counts = run(
            folder,
            chat(model, endpoint, key_env),
            rule=rule,
            question=question,
            price=prices,
            limit=limit,
            workers=workers,
            dry_run=dry_run,
            progress=advance,
        )
    tell(counts, as_json=as_json, dry_run=dry_run)


@app.command()
def export(
    folder: Path = FOLDER,
    *,
    out: Path = typer.Option(None, help="Where to write; FOLDER/export unless named."),
    formats: str = typer.Option("sharegpt,jsonl,consistency_rank", help="Also: parquet."),
    rule: str = typer.Option("best_worst", help="How rankings become pairs: best_worst or halves."),
    question: str = typer.Option("theme", help="What the judge is asked: theme, criteria, or plain."),
    test_share: float = typer.Option(0.1, help="Share of the prompts that is held out."),
    seed: int = SEED,
    dry_run: bool = DRY_RUN,
    as_json: bool = AS_JSON,
) -> None:
    """Turn rankings into training pairs and a held-out benchmark."""
    from pacorl.dataset.export import export as run

    shares = {"train": 1 - test_share, "test": test_share}
    with progress("exporting") as advance:
        counts = run(
            folder,
            out=out,
            formats=names(formats),
            shares=shares,
            rule=rule,
            question=question,
            seed=seed,
            dry_run=dry_run,
            progress=advance,
        )
    tell(counts, as_json=as_json, dry_run=dry_run)


@app.command("import")
def import_(
    folder: Path = FOLDER,
    source: Path = typer.Argument(help="A folder that was published, unpacked; or your rankings, a .csv or .jsonl."),
    *,
    kind: str = typer.Option(
        ..., help="rankings (your own), sharegpt (PaCo-Dataset), consistency_rank, or sharegpt_4o_image."
    ),
    name: str = typer.Option("", help="What it is called here; the source's name unless given."),
    dry_run: bool = DRY_RUN,
    as_json: bool = AS_JSON,
) -> None:
    """Bring in rankings of your own, or what others published."""
    from pacorl.dataset.importing import import_folder

    with progress("importing") as advance:
        counts = import_folder(folder, source, kind=kind, name=name, dry_run=dry_run, progress=advance)
    tell(counts, as_json=as_json, dry_run=dry_run)


def chat(model: str, endpoint: str, key_env: str) -> Any:
    """The model that a command asks."""
    from pacorl.dataset.llm import ChatModel

    return ChatModel(model, base_url=endpoint or None, key_variable=key_env)


def tell(counts: dict[str, Any], *, as_json: bool, dry_run: bool = False) -> None:
    """Prints a result: JSON for programs, a line for each value for people."""
    if dry_run:
        typer.echo("dry run: nothing was written", err=True)
    if as_json:
        print_json(counts)
        return
    for name, value in _lines(counts):
        print(f"{name:<28} {value:.4f}" if isinstance(value, float) else f"{name:<28} {value}")


def _lines(counts: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in counts.items():
        label = f"{prefix}{name.replace('_', ' ')}"
        if isinstance(value, dict):
            yield from _lines(value, prefix=f"{label}: ")
        else:
            yield label, value


def two(text: str, option: str, kind: type[Number]) -> tuple[Number, Number]:
    """Two numbers with a slash between them. Raises ValueError that names the option."""
    try:
        first, second = (kind(part) for part in text.split("/"))
    except ValueError:
        raise ValueError(f"{option} {text!r} is not two numbers with a slash between them, such as 0/4") from None
    return first, second


def names(text: str) -> list[str]:
    """A list from text that is separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]
