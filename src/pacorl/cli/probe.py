"""`pacorl probe`: what a run would learn from, before it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

import typer

from pacorl.cli.shared import echo_errors, print_json, progress
from pacorl.cli.train import check_run
from pacorl.config.options import LARGEST, STRONGEST, amount, option
from pacorl.types import Size

Value = TypeVar("Value")


def listed(parse: Callable[[str], Value], example: str) -> Callable[[str], tuple[Value, ...]]:
    """A parser of values between commas."""

    def values(text: str) -> tuple[Value, ...]:
        try:
            return tuple(parse(word.strip()) for word in text.split(","))
        except ValueError:
            raise ValueError(f"{text!r} is no list such as {example}") from None

    return values


@dataclass(frozen=True, kw_only=True)
class ProbeFlags:
    """What `pacorl probe` can be told."""

    epochs: float = option(1.0, "The budget, in epochs of the config.", least=0, most=STRONGEST)
    samples: int | None = option(None, "The budget in samples, in place of --epochs.", least=1, most=LARGEST)
    steps: tuple[int, ...] | None = option(
        None, "Stochastic steps to compare, e.g. 0,1,3; all by default.", parse=listed(int, "0,1,3")
    )
    noise_levels: tuple[float, ...] | None = option(
        None, "Noise levels to compare, e.g. 0.5,0.9.", parse=listed(amount, "0.5,0.9")
    )
    sizes: tuple[Size, ...] | None = option(
        None, "Training sizes to compare, e.g. 256x256,384x384.", parse=listed(Size.parse, "256x256,384x384")
    )
    temperatures: tuple[float, ...] | None = option(
        None, "Temperatures of the judged rewards to compare; they cost nothing.", parse=listed(amount, "1,2,4")
    )
    judge_repeats: tuple[str, ...] | None = option(
        None,
        "How the judge reads each image once more: again, turned or resized, several with commas, or none; by default "
        "turned for sets.",
        parse=lambda text: () if text == "none" else listed(str, "turned,resized")(text),
    )
    out: Path | None = option(None, "A folder for probe.json and probe.svg.")
    as_json: bool = option(False, "Print JSON.", flags=("--json",))


def probe(
    config: Path = typer.Argument(help="A YAML file, such as configs/tiny.yaml."),
    overrides: list[str] = typer.Argument(None, help="Changes, as section.key=value."),
    *,
    flags: ProbeFlags,
) -> None:
    """Say which step, noise level, size and temperature carry the signal, at the price of about one epoch."""
    from pacorl.config.base import load
    from pacorl.config.policy_run import PolicyConfig
    from pacorl.engine.cores import use_cores
    from pacorl.io.documents import write_json
    from pacorl.io.files import check_writable, claim_folder, write_atomic
    from pacorl.io.quiet import quiet_loading
    from pacorl.judges import check_temperature
    from pacorl.probe.design import ProbeOptions

    run = load(PolicyConfig, config, overrides or [])
    for temperature in flags.temperatures or ():
        check_temperature(temperature, key="--temperatures")
    if flags.out:
        check_writable(flags.out, folder=True)
        claim_folder(flags.out)
    check_run(run)
    use_cores()
    quiet_loading()
    from pacorl.probe import show
    from pacorl.probe.run import probe as run_probe

    options = ProbeOptions(**{field.name: getattr(flags, field.name) for field in fields(ProbeOptions)})
    with progress("drawing", shown=not flags.as_json) as advance:
        findings = run_probe(run, options, advance=advance)
    document = show.to_dict(findings)
    print_json(document) if flags.as_json else show.print_findings(findings)
    if flags.out:
        write_json(flags.out / "probe.json", document)
        write_atomic(flags.out / "probe.svg", show.plot(findings))
        echo_errors(f"plot: {flags.out / 'probe.svg'}")
