"""Predictions about the paper's claims, and their runs: `make claims`.

    python -m tools.claims                                    # the price table, every missing atom, the page
    python -m tools.claims --only alpha --minutes 20 --commit # atoms of one claim, each JSON committed alone
    python -m tools.claims --quick                            # one tiny atom per claim in a temporary folder
    python -m tools.claims render                             # the page alone, docs/claims.md

`claims/NAME.yaml` is a `Claim`, committed before its first run. An atom is one arm with one seed: a process on one
thread in a worktree of the claim's revision, with at most CPU_MINUTES. Its numbers go to
claims/results/NAME/ARM-SEED.json, with the claim's hash: a result of another version of the claim is refused. A failed
atom prints one line and runs again next time.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pacorl.core.ranking import Interval, bootstrap
from pacorl.io.documents import blamed_on, dump_json, read_json, read_yaml, typed
from pacorl.io.files import write_atomic

ROOT = Path(__file__).resolve().parents[1]
CLAIMS, RESULTS, PAGE = Path("claims"), Path("claims/results"), Path("docs/claims.md")
CPU_MINUTES = 15
"""Limit of an atom."""
PATIENCE = 4 * 3600
"""Seconds after which an atom that waits for ever is killed."""
NUMBER = r"(-?\d+(?:\.\d+)?)"
RULE = re.compile(rf"at least {NUMBER}|at most {NUMBER}|between {NUMBER} and {NUMBER}")

Name = Annotated[str, Field(pattern=r"^[\w.-]+$")]


class Prediction(BaseModel):
    """A figure of two arms, its predicted interval and the rule that decides."""

    model_config = ConfigDict(extra="forbid")
    text: str
    figure: Literal["difference", "ratio"]
    """Of the means of `arm` and `against`, over the seeds that both have."""
    metric: Name
    arm: Name
    against: Name
    interval: tuple[float, float]
    """Where the figure is expected."""
    rule: str = Field(pattern=f"^({RULE.pattern})$")
    """`at least X`, `at most X` or `between X and Y`: it holds if the figure's whole interval lies there."""

    @property
    def region(self) -> tuple[float, float]:
        """The figures that the rule accepts."""
        least, most, low, high = RULE.fullmatch(self.rule).groups()  # type: ignore[union-attr]  # as validated
        return float(least or low or "-inf"), float(most or high or "inf")


class Claim(BaseModel):
    """A claim of the paper with its arms, seeds and predictions."""

    model_config = ConfigDict(extra="forbid")
    name: Name
    title: str
    claim: str
    paper: str
    """The paper's figure."""
    revision: str = Field(pattern=r"^[0-9a-f]{40}$")
    """Commit whose code runs the atoms."""
    price: float = Field(gt=0, le=CPU_MINUTES)
    """CPU minutes of the dearest arm's atom."""
    command: str
    """Its words `{settings}`, `{seed}` and `{out}` are filled in."""
    result: str
    """JSON file that the command leaves in `{out}`."""
    metrics: dict[Name, str]
    """Metric → its keys in the JSON, joined by dots; a number is an index."""
    arms: dict[Name, str]
    """Arm → the command's settings."""
    seeds: tuple[int, ...] = Field(min_length=2)
    predictions: tuple[Prediction, ...] = Field(min_length=1)
    quick: str
    """Further settings that make an atom tiny."""
    needs: str = ""
    """Missing part without which the claim cannot run."""
    notes: str = ""
    """Likely reason of a miss, written after the runs. Not part of the hash."""

    @model_validator(mode="after")
    def _names_exist(self) -> Claim:
        for prediction in self.predictions:
            if prediction.metric not in self.metrics:
                raise ValueError(f"metric {prediction.metric} is not in metrics; there are {', '.join(self.metrics)}")
            for arm in (prediction.arm, prediction.against):
                if arm not in self.arms:
                    raise ValueError(f"arm {arm} is not in arms; there are {', '.join(self.arms)}")
        for word in ("{settings}", "{seed}", "{out}"):
            if word not in shlex.split(self.command):
                raise ValueError(f"command lacks the word {word}")
        return self

    @property
    def hash(self) -> str:
        """SHA-256 of the file's content without its notes."""
        return hashlib.sha256(self.model_dump_json(exclude={"notes"}).encode()).hexdigest()

    def argv(self, settings: str, seed: int, out: Path) -> list[str]:
        """Fill in the command."""
        words = []
        for word in shlex.split(self.command):
            if word == "{settings}":
                words += shlex.split(settings)
            else:
                words.append({"{seed}": str(seed), "{out}": str(out), "python": sys.executable}.get(word, word))
        return words


class Result(BaseModel):
    """One finished atom."""

    model_config = ConfigDict(extra="forbid")
    claim: str
    """Hash of the claim."""
    revision: str
    seconds: float
    """CPU seconds of its process."""
    machine: str
    metrics: dict[str, float]


def read_claims(root: Path = ROOT, only: Sequence[str] = ()) -> list[Claim]:
    """Read the claims in the order of their names.

    Raises:
        ValueError: if a file is not valid, or `only` names an absent claim.
    """
    claims = []
    for path in sorted((root / CLAIMS).glob("*.yaml")):
        with blamed_on(path):
            claims.append(typed({"name": path.stem, **read_yaml(path)}, Claim))
    names = [claim.name for claim in claims]
    absent = set(only) - set(names)
    if absent:
        raise ValueError(f"--only {', '.join(sorted(absent))}: no such claim; there are {', '.join(names)}")
    return [claim for claim in claims if not only or claim.name in only]


def path_of(claim: Claim, arm: str, seed: int) -> Path:
    """Return the result's file, relative to the repository."""
    return RESULTS / claim.name / f"{arm}-{seed}.json"


def read_results(claim: Claim, root: Path = ROOT) -> dict[tuple[str, int], Result]:
    """Read the finished atoms, by arm and seed.

    Raises:
        ValueError: if a result is not valid, or stale: of another version of the claim.
    """
    results = {}
    for seed in claim.seeds:
        for arm in claim.arms:
            path = path_of(claim, arm, seed)
            if not (root / path).exists():
                continue
            with blamed_on(path):
                result = typed(read_json(root / path), Result)
            if result.claim != claim.hash:
                raise ValueError(
                    f"{path} is stale: {CLAIMS / claim.name}.yaml has changed since; delete it to run again"
                )
            results[arm, seed] = result
    return results


# --- running ---------------------------------------------------------------------------------------------------


def price_of(claim: Claim, results: Mapping[tuple[str, int], Result]) -> float:
    """CPU minutes of an atom: the file's price, or the mean of the finished atoms if they took longer."""
    measured = fmean(result.seconds for result in results.values()) / 60 if results else 0.0
    return max(claim.price, measured)


def prices(claims: Sequence[Claim], root: Path = ROOT) -> str:
    """Tabulate the atoms of each claim and the CPU minutes that are left."""
    lines = [f"{'claim':12} {'arms':>5} {'seeds':>5} {'done':>9} {'each':>6} {'left, CPU min':>14}"]
    for claim in claims:
        results = read_results(claim, root)
        atoms = len(claim.arms) * len(claim.seeds)
        price = price_of(claim, results)
        left = "cannot run" if claim.needs else f"{(atoms - len(results)) * price:.0f}"
        done = f"{len(results)}/{atoms}"
        lines.append(f"{claim.name:12} {len(claim.arms):5} {len(claim.seeds):5} {done:>9} {price:6.1f} {left:>14}")
    return "\n".join(lines)


def run_missing(claims: Sequence[Claim], *, minutes: float, commit: bool, root: Path = ROOT) -> int:
    """Run the missing atoms while their prices fit into `minutes` of CPU time, and return how many failed."""
    failed, spent = 0, 0.0
    for claim in claims:
        results = read_results(claim, root)
        missing = [(arm, seed) for seed in claim.seeds for arm in claim.arms if (arm, seed) not in results]
        price = price_of(claim, results)
        if claim.needs or not missing or spent + price > minutes:
            continue
        if git(root, "status", "--porcelain", "--", f"{CLAIMS / claim.name}.yaml"):
            raise ValueError(f"{CLAIMS / claim.name}.yaml is not committed: predictions precede runs; commit it first")

        with worktree(claim.revision, root) as tree:
            for arm, seed in missing:
                if spent + price > minutes:
                    break
                before = cpu_seconds()
                try:
                    result = run_atom(claim, arm, seed, tree)
                except ValueError as error:
                    failed += 1
                    print(f"{claim.name} {arm}, seed {seed}: failed: {error}", flush=True)
                else:
                    save(claim, arm, seed, result, commit=commit, root=root)
                spent += (cpu_seconds() - before) / 60
    return failed


def run_quick(claims: Sequence[Claim], root: Path = ROOT) -> int:
    """Run one tiny atom per claim with the code that is here, and return how many failed."""
    failed = 0
    for claim in claims:
        if claim.needs:
            continue
        arm = next(iter(claim.arms))
        try:
            result = run_atom(claim, arm, claim.seeds[0], root, further=claim.quick)
        except ValueError as error:
            failed += 1
            print(f"{claim.name}: failed: {error}", flush=True)
        else:
            print(f"{claim.name}: a tiny atom took {result.seconds:.0f} CPU s", flush=True)
    return failed


def run_atom(claim: Claim, arm: str, seed: int, tree: Path, *, further: str = "") -> Result:
    """Run one atom with the code of `tree`.

    Raises:
        ValueError: if the command fails, exceeds its time, or leaves no such metric.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{tree / 'src'}:{tree}"}
    before = cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        words = claim.argv(f"{claim.arms[arm]} {further}", seed, Path(folder))
        limited = ["sh", "-c", f'ulimit -t {60 * CPU_MINUTES} && exec "$@"', "atom", *words]
        try:
            done = subprocess.run(
                limited, cwd=tree, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"killed after {PATIENCE} s") from None
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            raise ValueError(f"killed, as after {CPU_MINUTES} CPU minutes")
        if done.returncode:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            raise ValueError(f"exit {done.returncode}: {last}")
        document = read_json(Path(folder) / claim.result)
        metrics = {name: value_at(document, keys) for name, keys in claim.metrics.items()}

    seconds = round(cpu_seconds() - before, 1)
    return Result(claim=claim.hash, revision=claim.revision, seconds=seconds, machine=machine(), metrics=metrics)


def value_at(document: Any, keys: str) -> float:
    """Look a number up by its dotted keys. Raises ValueError."""
    value = document
    for key in keys.split("."):
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"the result has no {keys}") from None
    if not isinstance(value, (int, float)) or not np.isfinite(value):
        raise ValueError(f"{keys} is {value!r}, not a finite number")
    return float(value)


def save(claim: Claim, arm: str, seed: int, result: Result, *, commit: bool, root: Path) -> None:
    """Write a result, print its line and commit it alone."""
    path = path_of(claim, arm, seed)
    (root / path.parent).mkdir(parents=True, exist_ok=True)
    write_atomic(root / path, dump_json(result.model_dump()) + "\n")
    values = "  ".join(f"{name} {value:.3f}" for name, value in result.metrics.items())
    print(f"{claim.name} {arm}, seed {seed}: {values}  {result.seconds:.0f} CPU s", flush=True)
    if commit:
        git(root, "add", "--", str(path))
        git(root, "commit", "-q", "-m", f"Claim {claim.name}: {arm}, seed {seed}", "--", str(path))


@contextmanager
def worktree(revision: str, root: Path) -> Iterator[Path]:
    """Check the revision out below build/, and remove it at the end."""
    (root / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root / "build", prefix="claims-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder) / "tree"
        git(root, "worktree", "add", "-q", "--detach", str(tree), revision)
        try:
            yield tree
        finally:
            git(root, "worktree", "remove", "--force", str(tree))


def git(root: Path, *words: str) -> str:
    """Run git. Raises ValueError with git's last line."""
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"git {words[0]}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
    return done.stdout.strip()


def cpu_seconds() -> float:
    """CPU seconds of all finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def machine() -> str:
    """Describe the machine by its cores and instruction set, by which figures differ in their last digits."""
    import torch

    from pacorl.runtime.cores import available_cores

    return f"{available_cores()} cores, {torch.backends.cpu.get_cpu_capability()}"


# --- the page --------------------------------------------------------------------------------------------------

INTRODUCTION = """# Claims

The paper's claims ([arXiv:2512.04784](https://arxiv.org/abs/2512.04784)), asked in the [tiny world](tiny.md). Each
prediction was committed before its first run, with the rule that decides. `claims/*.yaml` contains them, with the arms,
seeds and commands, and `claims/results` one JSON per run.

A figure compares two arms over the seeds that both have. Brackets are a 95 % bootstrap interval over seeds. A
prediction *holds* if the whole interval satisfies its rule and *does not hold* if the interval lies outside. It is
*undecided* if the interval has both, or as long as seeds are missing.

```sh
make claims                                      # every missing run, after a table of prices
make claims ARGS="--only alpha --minutes 20"     # what fits into 20 CPU minutes
python -m tools.claims render                    # this page
```
"""


def render(claims: Sequence[Claim], root: Path = ROOT) -> str:
    """Render the page from the claims and their results."""
    parts = [INTRODUCTION]
    for claim in claims:
        results = read_results(claim, root)
        parts += [f"## {claim.title}\n", paragraph(claim.claim), paragraph(f"The paper: {claim.paper}")]
        parts.append(predictions_table(claim, results))
        if results:
            parts.append(arms_table(claim, results))
        if claim.needs:
            parts.append(paragraph(f"It cannot run yet: {claim.needs}"))
        if claim.notes:
            parts.append(paragraph(claim.notes))
    return "\n".join(parts)


def paragraph(text: str) -> str:
    """Wrap a text to the width of the other pages."""
    return fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def predictions_table(claim: Claim, results: Mapping[tuple[str, int], Result]) -> str:
    """Tabulate the predictions, their figures and verdicts."""
    lines = ["| Prediction | Predicted | Rule | Figure | Seeds | Verdict |", "|---|---|---|---|---|---|"]
    for prediction in claim.predictions:
        figure, count = figure_of(prediction, claim, results)
        low, high = prediction.interval
        words = verdict(prediction, figure, count, len(claim.seeds))
        lines.append(
            f"| {prediction.text} | {low:g} to {high:g} | {prediction.figure} {prediction.rule} | {cell(figure)} "
            f"| {count} of {len(claim.seeds)} | {words} |"
        )
    return "\n".join(lines) + "\n"


def arms_table(claim: Claim, results: Mapping[tuple[str, int], Result]) -> str:
    """Tabulate the mean of each metric by arm."""
    lines = [f"| Arm | n | {' | '.join(claim.metrics)} | CPU s |", "|---|---|" + "---|" * (len(claim.metrics) + 1)]
    for arm in claim.arms:
        of_arm = [results[arm, seed] for seed in claim.seeds if (arm, seed) in results]
        if not of_arm:
            continue
        cells = [cell(mean_of([result.metrics[name] for result in of_arm])) for name in claim.metrics]
        seconds = fmean(result.seconds for result in of_arm)
        lines.append(f"| {arm} | {len(of_arm)} | {' | '.join(cells)} | {seconds:.0f} |")
    return "\n".join(lines) + "\n"


def figure_of(
    prediction: Prediction, claim: Claim, results: Mapping[tuple[str, int], Result]
) -> tuple[Interval | None, int]:
    """Compare the two arms over their common seeds. Returns the figure, None without such seeds, and their count."""
    arm, against = prediction.arm, prediction.against
    seeds = [seed for seed in claim.seeds if (arm, seed) in results and (against, seed) in results]
    if not seeds:
        return None, 0
    sides = np.array([[results[side, seed].metrics[prediction.metric] for seed in seeds] for side in (arm, against)])

    def compare(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        first, second = sides[:, rows].mean(1)
        return np.array([first / second if prediction.figure == "ratio" else first - second])

    return bootstrap(seeds, compare)[0], len(seeds)


def mean_of(values: Sequence[float]) -> Interval:
    """Average over seeds."""
    column = np.array(values)
    return bootstrap(range(len(values)), lambda rows: np.array([column[rows].mean()]))[0]


def verdict(prediction: Prediction, figure: Interval | None, count: int, seeds: int) -> str:
    """Apply the rule, once every seed has run."""
    if figure is None:
        return "not run yet"
    if count < seeds or figure.low is None or figure.high is None:
        return "undecided"
    low, high = prediction.region
    if low <= figure.low and figure.high <= high:
        return "**holds**"
    if figure.high < low or high < figure.low:
        return "**does not hold**"
    return "undecided"


def cell(figure: Interval | None) -> str:
    """Format a figure with its interval."""
    if figure is None:
        return "–"
    if figure.low is None or figure.high is None:
        return f"{figure.mean:.3f}"
    return f"{figure.mean:.3f} ({figure.low:.3f} to {figure.high:.3f})"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=["run", "render"], default="run")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these claims alone")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="CPU minutes to spend at most")
    parser.add_argument("--quick", action="store_true", help="one tiny atom per claim in a temporary folder")
    parser.add_argument("--commit", action="store_true", help="commit each result alone")
    options = parser.parse_args(words)
    try:
        claims = read_claims(only=options.only)
        if options.action == "render":
            write_atomic(ROOT / PAGE, render(read_claims()))
            return 0
        if options.quick:
            return min(1, run_quick(claims))
        print(prices(claims), flush=True)
        failed = run_missing(claims, minutes=options.minutes, commit=options.commit)
        write_atomic(ROOT / PAGE, render(read_claims()))
        return min(1, failed)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
