"""Commands of training: `pacorl train-policy`, `train-character`, `train-reward`, `quickstart`, `report`, `publish`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from typer import Argument, Option

from pacorl.cli.shared import CARD, check_card, echo, end_with
from pacorl.runtime.stopping import EX_TEMPFAIL

if TYPE_CHECKING:
    from pacorl.grpo.policy_config import PolicyConfig

QUICKSTART = Path("runs/quickstart")
OVERRIDES = Argument(None, help="Changes, as section.key=value.")

RESUME = Option("", help="auto: go on from the newest checkpoint of the run's folder, or start if there is none.")

DRY_RUN = Option(
    False,
    "--dry-run",
    help="Check the config and print its requirements. Exit code 2: something is absent or does not fit.",
)
AS_JSON = Option(False, "--json", help="With --dry-run: print the plan as JSON.")


def train_policy(
    config: Path = Argument(help="A YAML file, or a recipe of `pacorl recipes`, such as tiny."),
    overrides: list[str] = OVERRIDES,
    *,
    resume: Literal["", "auto"] = RESUME,
    dry_run: bool = DRY_RUN,
    card: int = CARD,
    as_json: bool = AS_JSON,
) -> None:
    """Train a generator with PaCo-GRPO."""
    from pacorl.config.base import load
    from pacorl.grpo.policy_config import PolicyConfig

    check_card(card, dry_run=dry_run)
    run = load(PolicyConfig, config, overrides or [])
    if dry_run:
        from pacorl.plan.plan import plan_training

        end_with(plan_training(run, card=card), as_json=as_json)
    # Check the run before the imports, which take seconds.
    exit_on_sigterm()
    check_run(run, resume=bool(resume))
    from pacorl.grpo.trainer import PolicyTrainer
    from pacorl.report.page import keep_page
    from pacorl.runtime.cores import use_cores
    from pacorl.runtime.processes import destroy_process_group

    use_cores()

    # Train.
    _echo_start(run.adapter.start)
    trainer = PolicyTrainer(run, resume=bool(resume), listeners=[keep_page])
    folder = trainer.train().folder
    del trainer  # its transformer holds the process group
    # Only the main process prints.
    if destroy_process_group():
        echo_page(folder)


def echo_page(run: Path) -> None:
    """Write a finished run's page; print its measures before and after, its path, and the command that comes next."""
    from pacorl.report.folder import read_run
    from pacorl.report.page import next_command, write_report
    from pacorl.report.results import verdict_of

    page, read = write_report(run), read_run(run)
    following = next_command(read)
    echo("\n".join([*verdict_of(read), f"done: {page}"]))
    if following:
        echo(f"next: {following}")


def _echo_start(source: str) -> None:
    """Describe the LoRA that a training begins with, once for all processes."""
    if source and os.environ.get("RANK", "0") == "0":
        from pacorl.models.lora import read_lora

        echo(f"LoRA {source}: {read_lora(source).facts}")


def exit_on_sigterm() -> None:
    """Exit on a SIGTERM during loading with the exit code for a restart; the training's own handlers, later, save.

    No exception ends the process, which the loading code could catch.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EX_TEMPFAIL))


def watch_stdin() -> None:
    """Send a SIGTERM to this process when its standard input ends."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def check_run(run: PolicyConfig, *, resume: bool) -> None:
    """Check a run's folder, rewards, prompts and models before the imports of the training, which take seconds.

    Raises:
        ValueError: if a checkpoint or adapter is missing or does not fit, a reward has a fault, or the folder contains
            a run.
        OSError: if the folder cannot be written.
    """
    from pacorl.io.files import check_start, check_writable
    from pacorl.judge import check_judge
    from pacorl.rewards import asks_judge, check_rewards
    from pacorl.types import Size

    check_writable(run.out, folder=True)
    check_start(run.out, resume=resume)
    check_rewards(run.rewards)
    check_rewards(run.evaluation.rewards, key="evaluation.rewards")

    # Generator, prompts and judge.
    run.generator.check_trainable(run.model.checkpoint)
    for size in (run.sampling.size, run.evaluation.size):
        run.generator.check_source(run.model.checkpoint, adapters=[run.adapter.start], size=Size(*size))
    # An unused judge is never loaded, so it may be absent.
    if run.judge and any(map(asks_judge, run.rewards)):
        check_judge(run.judge.checkpoint)


def train_character(
    folder: str = Argument(help="A folder with 3 images or more and a card.yaml, or its name in characters/."),
    overrides: list[str] = OVERRIDES,
    *,
    config: Path = Option("character/tiny", help="A YAML file, or a recipe of `pacorl recipes`."),
    resume: Literal["", "auto"] = RESUME,
    dry_run: bool = DRY_RUN,
    card: int = CARD,
    as_json: bool = AS_JSON,
    stop_with_stdin: bool = Option(
        False, "--stop-with-stdin", help="Stop as by SIGTERM when standard input ends, with the parent process."
    ),
) -> None:
    """Train a LoRA of one character on your own images."""
    from pacorl.character_training.character_config import CharacterConfig
    from pacorl.config.base import load

    # The config, with the character of the command line.
    check_card(card, dry_run=dry_run)
    run = load(CharacterConfig, config, [f"character={folder}", *(overrides or [])])
    if dry_run:
        from pacorl.plan.characters import plan_character

        end_with(plan_character(run, card=card), as_json=as_json)
    # Before anything slow: the parent may end while this process still imports.
    if stop_with_stdin:
        watch_stdin()

    # Before the imports, which take seconds.
    exit_on_sigterm()
    from pacorl.character_training.character_trainer import CharacterTrainer
    from pacorl.runtime.cores import use_cores

    use_cores()
    _echo_start(run.adapter.start)
    trainer = CharacterTrainer(run, resume=bool(resume))
    result = trainer.train()

    echo(f"done: {result.folder / 'report.html'}\nLoRA: {result.adapter}")


def train_reward(
    config: Path = Argument(help="A YAML file, or a recipe of `pacorl recipes`, such as reward/tiny."),
    overrides: list[str] = OVERRIDES,
    *,
    resume: Literal["", "auto"] = RESUME,
) -> None:
    """Train a judge on comparisons; `pacorl dataset export --rankings` converts your own rankings."""
    from pacorl.config.base import load
    from pacorl.io.files import check_writable
    from pacorl.judge import check_judge
    from pacorl.judge_training.judge_config import JudgeConfig
    from pacorl.models.lora import adapter_file
    from pacorl.records.comparisons import check_source

    run = load(JudgeConfig, config, overrides or [])

    # Check the run before the imports, which take seconds.
    check_writable(run.out, folder=True)
    check_judge(run.model.checkpoint)
    if run.tuning.start:
        adapter_file(run.tuning.start)
    for source in (*run.data.train, *run.data.evaluation):
        check_source(source)

    # transformers is imported now, which takes seconds.
    from transformers.utils.logging import disable_progress_bar

    from pacorl.runtime.cores import use_cores

    use_cores()
    disable_progress_bar()  # of loading weights; training has its own

    # Train; the trainer imports the heavy libraries.
    from pacorl.judge_training.judge_trainer import JudgeTrainer
    from pacorl.runtime.processes import destroy_process_group

    folder = JudgeTrainer(run, resume=bool(resume)).train()
    # Of several processes the main one has written the summary.
    if destroy_process_group():
        echo_page(folder)


def quickstart(
    overrides: list[str] = Argument(None, help="Changes to the recipe `quickstart`, as section.key=value."),
) -> None:
    """Run the whole method on this machine, with judge, generator, RL and a page, in minutes and without downloads."""
    from pacorl.config.base import load
    from pacorl.config.recipes import recipe
    from pacorl.grpo.policy_config import PolicyConfig
    from pacorl.grpo.start import check_unfinished, free_folder

    # A finished run stays: the next one gets a numbered folder.
    config = load(PolicyConfig, recipe("quickstart"), [f"out={free_folder(QUICKSTART)}", *(overrides or [])])
    check_unfinished(config.out)
    # A second start goes on where the first was stopped.
    check_run(config, resume=True)

    # torch is imported only now, after every check.
    from pacorl.quickstart import run_quickstart
    from pacorl.runtime.cores import use_cores

    use_cores()
    # Train judge and generator, and print the verdict.
    page, verdict = run_quickstart(config, say=echo)
    following = f"pacorl studio --adapter {config.out / 'adapter'} --open"
    echo("\n".join([*verdict, f"page: {page}", f"next, in a browser: {following}"]))


def report(runs: list[Path] = Argument(help="A run's folder; two or more for a comparison.")) -> None:
    """Write a run's page again; compare two runs, or two settings over seeds, on a page in their folder.

    Runs whose configs differ in their seed alone have one setting. Differences are paired by seed.
    """
    from pacorl.io.files import check_made
    from pacorl.report.compare import write_comparison
    from pacorl.report.folder import read_run
    from pacorl.report.page import write_report
    from pacorl.report.results import verdict_of

    if len(runs) == 1:
        check_made(runs[0] / "report.html")
        page, lines = write_report(runs[0]), verdict_of(read_run(runs[0]))
    else:
        page, lines = write_comparison(runs)
    echo("\n".join([*lines, f"page: {page}"]))


def publish(run: Path = Argument(help="A finished run's folder.")) -> None:
    """Write a run's model card, and print the command that uploads it with the adapter."""
    from pacorl.report.publish import upload_command, write_card

    folder = write_card(run)
    echo(f"card: {folder / 'README.md'}")
    echo(f"next: {upload_command(folder)}")
