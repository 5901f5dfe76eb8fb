"""`pacorl benchmark …`: the field's measures of judges and of generators, beside the paper's rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pacorl.cli.dataset import progress

if TYPE_CHECKING:
    from pacorl.bench.build import Painter, Running
    from pacorl.bench.suite import Outcome

INCOMPLETE = 3
"""Exit code where items have no judgement, or were left out with --skip-bad."""

app = typer.Typer(name="benchmark", help="Measure judges and generators as the field does.", no_args_is_help=True)

OUT = typer.Option(None, help="The folder of this run; runs/bench/NAME if left out.")
JUDGE = typer.Option("tiny", help="A checkpoint folder, hub name, server's URL or endpoints YAML.")
JUDGE_MODEL = typer.Option("", help="The judge's name at a server.")
JUDGE_ADAPTER = typer.Option("", help="A PEFT adapter on the judge's checkpoint.")
KEY_ENV = typer.Option("", help="The environment variable that holds the judge server's key.")
LIMIT = typer.Option(None, min=1, help="At most so many items, evenly spread over the data.")
BATCH = typer.Option(16, min=1, help="Items per call of the judge.")
SHARD = typer.Option("", help="This process's share, e.g. 0/4; under torchrun its rank.")
TRAINED = typer.Option(None, help="A run's folder: is what it was trained on among the items?")
SKIP_BAD = typer.Option(False, "--skip-bad", help="Leave out items whose data cannot be used; exit with code 3.")
NAME = typer.Option("", help="What the tables call this run.")
AS_JSON = typer.Option(False, "--json", help="Print JSON.")


@app.command("consistency-rank")
def consistency_rank(
    data: Path = typer.Argument(help="The folder of ConsistencyRank-Bench."),
    *,
    out: Path = OUT,
    scorer: str = typer.Option("judge", help="judge, clip-i, dreamsim, or any other reward of pairs."),
    scorer_arg: list[str] = typer.Option([], help="name=value for that reward; may be repeated."),
    scores: Path = typer.Option(None, help="A JSONL of scores instead of a scorer."),
    wording: str = typer.Option("reasons", help="What a judge is asked: reasons, word, or criteria."),
    judge: str = JUDGE,
    judge_model: str = JUDGE_MODEL,
    judge_adapter: str = JUDGE_ADAPTER,
    api_key_env: str = KEY_ENV,
    limit: int = LIMIT,
    batch: int = BATCH,
    shard: str = SHARD,
    trained: Path = TRAINED,
    skip_bad: bool = SKIP_BAD,
    name: str = NAME,
    as_json: bool = AS_JSON,
) -> None:
    """Does a scorer rank sub-figures as people do?"""
    from contextlib import nullcontext

    from pacorl.bench import build as benchmarks
    from pacorl.bench.consistency_rank import ConsistencyRank, read_rank_data

    words = _one_of(wording, "--wording", ("reasons", "word", "criteria"))
    held = read_rank_data(data, limit=limit, skip_bad=skip_bad)
    asks = scorer == "judge" and not scores
    opened: Any = (
        benchmarks.opened_judge(judge, model=judge_model, adapter=judge_adapter, api_key_env=api_key_env)
        if asks
        else nullcontext()
    )
    called = name or (_judge_name(judge, judge_model, judge_adapter) if asks else str(scores or scorer))
    running = _running(
        "consistency-rank",
        out,
        name=called,
        batch=batch,
        shard=shard,
        trained=trained,
        adapter=judge_adapter,
        skip_bad=skip_bad,
    )
    with opened as reward:
        used = benchmarks.pair_scorer(scorer, args=scorer_arg, scores=scores, judge=reward, wording=words)
        _finish(_start(running, ConsistencyRank(held, used)), note=getattr(reward, "note", ""), as_json=as_json)


@app.command("edit-reward-bench")
def edit_reward_bench(
    data: Path = typer.Argument(help="EditScore/EditReward-Bench: a folder of parquet files, or a JSONL."),
    *,
    out: Path = OUT,
    judge: str = JUDGE,
    judge_model: str = JUDGE_MODEL,
    judge_adapter: str = JUDGE_ADAPTER,
    api_key_env: str = KEY_ENV,
    limit: int = LIMIT,
    batch: int = BATCH,
    shard: str = SHARD,
    trained: Path = TRAINED,
    skip_bad: bool = SKIP_BAD,
    name: str = NAME,
    as_json: bool = AS_JSON,
) -> None:
    """Does a judge prefer the edit that people prefer?"""
    from pacorl.bench import build as benchmarks
    from pacorl.bench.edit_reward_bench import EditRewardBench, read_edit_data

    held = read_edit_data(data, limit=limit, skip_bad=skip_bad)
    called = name or _judge_name(judge, judge_model, judge_adapter)
    running = _running(
        "edit-reward-bench",
        out,
        name=called,
        batch=batch,
        shard=shard,
        trained=trained,
        adapter=judge_adapter,
        skip_bad=skip_bad,
    )
    with benchmarks.opened_judge(
        judge, model=judge_model, adapter=judge_adapter, api_key_env=api_key_env, variants=True
    ) as reward:
        bench = EditRewardBench(held, reward.judge, judge_name=reward.name)
        _finish(_start(running, bench), note=reward.note, as_json=as_json)


MODEL = typer.Option("", help="A diffusers folder, a hub name, or tiny: who paints.")
KIND = typer.Option("", help="The policy that runs the model; found out from it if left out.")
ADAPTER = typer.Option("", help="A LoRA in PEFT or diffusers form: folder, file or hub name.")
IMAGES = typer.Option(None, help="A folder of finished pictures; nothing is painted then.")
SIZE = typer.Option("", help="HEIGHTxWIDTH of a sheet or an edit; the model's and the record's own if left out.")
STEPS = typer.Option(None, min=1, help="Denoising steps; the model's own default.")
GUIDANCE = typer.Option(None, min=0, help="Guidance scale; the model's own default.")
SEED = typer.Option(0, help="Of the pictures.")
PAINT_BATCH = typer.Option(4, min=1, help="Pictures per forward.")


@app.command("t2is")
def t2is(
    data: Path = typer.Argument(help="The folder of T2IS-Bench: its three JSON files."),
    *,
    out: Path = OUT,
    model: str = MODEL,
    kind: str = KIND,
    adapter: str = ADAPTER,
    images: Path = IMAGES,
    prompts: Path = typer.Option(None, help="T2IS records to paint from, by their original_idx."),
    size: str = SIZE,
    panel_size: int = typer.Option(512, min=1, help="Side of a panel, where neither --size nor a record says one."),
    steps: int = STEPS,
    guidance: float = GUIDANCE,
    seed: int = SEED,
    paint_batch: int = PAINT_BATCH,
    paint_only: bool = typer.Option(False, "--paint-only", help="Paint this share and judge nothing."),
    judge: str = JUDGE,
    judge_model: str = JUDGE_MODEL,
    judge_adapter: str = JUDGE_ADAPTER,
    api_key_env: str = KEY_ENV,
    alignment: str = typer.Option("judge", help="Prompt alignment by: judge, none, a scorer's URL, or a reward."),
    alignment_arg: list[str] = typer.Option([], help="name=value for that reward; may be repeated."),
    aesthetics: str = typer.Option("", help="A reward of single pictures, e.g. aesthetic; none if left out."),
    aesthetics_arg: list[str] = typer.Option([], help="name=value for that reward; may be repeated."),
    aesthetics_scale: float = typer.Option(1.0, help="Brings its scores to 0..1; LAION's predictor: 0.1."),
    limit: int = LIMIT,
    shard: str = SHARD,
    trained: Path = TRAINED,
    skip_bad: bool = SKIP_BAD,
    name: str = NAME,
    as_json: bool = AS_JSON,
) -> None:
    """Paint sets, then measure alignment, consistency and aesthetics."""
    from pacorl.bench import build as benchmarks
    from pacorl.bench.t2is import T2isBench, paint_sets, prompts_by_case, read_cases, set_jobs

    held = read_cases(data, limit=limit, skip_bad=skip_bad)
    painter = benchmarks.Painter(model, kind, adapter, _size(size), steps, guidance, seed, paint_batch, panel_size)
    called = name or _painter_name(painter, images)
    running = _running(
        "t2is", out, name=called, batch=1, shard=shard, trained=trained, adapter=adapter, skip_bad=skip_bad
    )
    if not images:
        studio, records = painter.studio(edit=False), prompts_by_case(prompts) if prompts else {}
        jobs = set_jobs(held.cases, painter.prompt_of(records))
        with _painting() as advance:
            paint_sets(jobs, running.out, studio, shard=running.shard, progress=advance)
    if paint_only:
        return
    with benchmarks.opened_judge(judge, model=judge_model, adapter=judge_adapter, api_key_env=api_key_env) as reward:
        bench = T2isBench(
            held,
            images or running.out / "images",
            judge=reward.judge,
            judge_name=reward.name,
            alignment=benchmarks.text_scorer(alignment, args=alignment_arg, judge=reward),
            aesthetics=benchmarks.aesthetics_named(aesthetics, args=aesthetics_arg, scale=aesthetics_scale),
            made_by={"images": str(images)} if images else painter.describe(),
        )
        _finish(_start(running, bench), note=reward.note, as_json=as_json)


@app.command("gedit")
def gedit(
    data: Path = typer.Argument(help="GEdit-Bench: a folder of parquet files, or a JSONL."),
    *,
    out: Path = OUT,
    model: str = MODEL,
    kind: str = KIND,
    adapter: str = ADAPTER,
    images: Path = IMAGES,
    size: str = SIZE,
    steps: int = STEPS,
    guidance: float = GUIDANCE,
    seed: int = SEED,
    paint_batch: int = PAINT_BATCH,
    paint_only: bool = typer.Option(False, "--paint-only", help="Paint this share and rate nothing."),
    language: str = typer.Option("", help="en or cn; both if left out."),
    rubric: Path = typer.Option(None, help="A YAML with semantics, quality and scale; ours if left out."),
    judge: str = typer.Option("", help="The rater: a server's URL, endpoints YAML, checkpoint folder or hub name."),
    judge_model: str = JUDGE_MODEL,
    judge_adapter: str = JUDGE_ADAPTER,
    api_key_env: str = KEY_ENV,
    workers: int = typer.Option(8, min=1, help="Ratings at a time, of a rater at a server."),
    limit: int = LIMIT,
    batch: int = BATCH,
    shard: str = SHARD,
    trained: Path = TRAINED,
    skip_bad: bool = SKIP_BAD,
    name: str = NAME,
    as_json: bool = AS_JSON,
) -> None:
    """Paint edits, then have them rated by a rubric."""
    from pacorl.bench import build as benchmarks
    from pacorl.bench.gedit import LANGUAGES, GeditBench, paint_edits, read_edits
    from pacorl.bench.rating import RUBRIC, read_rubric

    if not judge and not paint_only:
        raise ValueError("name who rates the edits with --judge, e.g. https://api.openai.com/v1, and --judge-model")
    spoken = [_one_of(language, "--language", LANGUAGES)] if language else LANGUAGES
    held, rules = read_edits(data, languages=spoken, limit=limit, skip_bad=skip_bad), read_rubric(rubric or RUBRIC)
    painter = benchmarks.Painter(model, kind, adapter, _size(size), steps, guidance, seed, paint_batch)
    called = name or _painter_name(painter, images)
    running = _running(
        "gedit", out, name=called, batch=batch, shard=shard, trained=trained, adapter=adapter, skip_bad=skip_bad
    )
    if not images:
        studio = painter.studio(edit=True)
        with _painting() as advance:
            paint_edits(held, running.out, studio, shard=running.shard, progress=advance)
    if paint_only:
        return
    with benchmarks.opened_judge(judge, model=judge_model, adapter=judge_adapter, api_key_env=api_key_env) as reward:
        bench = GeditBench(
            held,
            images or running.out,
            judge=reward.judge,
            judge_name=reward.name,
            rubric=rules,
            made_by={"images": str(images)} if images else painter.describe(),
            workers=workers if judge_model or judge.endswith((".yaml", ".yml")) else 1,
        )
        _finish(_start(running, bench), note=reward.note, as_json=as_json)


# --- common ------------------------------------------------------------------------------------------------------


def _running(
    kind: str,
    out: Path | None,
    *,
    name: str,
    batch: int,
    shard: str,
    trained: Path | None,
    adapter: str,
    skip_bad: bool,
) -> Running:
    from pacorl.bench.build import Running, shard_of
    from pacorl.engine.threads import use_cores
    from pacorl.io.quiet import quiet_loading

    quiet_loading()
    use_cores()
    return Running(
        out=out or Path("runs") / "bench" / kind,
        name=name,
        batch=batch,
        shard=shard_of(shard),
        trained=trained,
        adapter=adapter,
        skip_bad=skip_bad,
        notice=lambda text: typer.echo(text, err=True),
    )


def _start(running: Running, bench: Any) -> Outcome:
    from dataclasses import replace

    with progress("judging") as advance:
        return replace(running, progress=advance).start(bench)


@contextmanager
def _painting() -> Iterator[Any]:
    with progress("painting") as advance:
        yield advance


def _finish(outcome: Outcome, *, note: str, as_json: bool) -> None:
    """Prints the tables, and where they lie; ends with a code of its own where items are lacking."""
    import json

    from pacorl.bench.suite import remarks_of, summary
    from pacorl.bench.tables import markdown

    if as_json:
        typer.echo(json.dumps(summary(outcome) | {"note": note}, indent=2, ensure_ascii=False))
    else:
        typer.echo("\n\n".join([*(markdown(table) for table in outcome.tables), *remarks_of(outcome)]))
    for line in filter(None, [note, f"tables: {outcome.folder / 'table.html'}"]):
        typer.echo(line, err=True)
    if outcome.missing or outcome.skipped:
        raise typer.Exit(INCOMPLETE)


def _one_of(value: str, option: str, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise ValueError(f"{option} {value!r} is none of {', '.join(allowed)}")
    return value


def _size(text: str) -> Any:
    from pacorl.core.grid import parse_layout
    from pacorl.types import Size

    sides = parse_layout(text) if text else None
    return Size(sides.rows, sides.cols) if sides else None


def _judge_name(judge: str, model: str, adapter: str) -> str:
    return model or (f"{judge} + {adapter}" if adapter else judge)


def _painter_name(painter: Painter, images: Path | None) -> str:
    return str(images) if images else _judge_name(painter.model, "", painter.adapter)
