"""Runs of claims: their prices, and their processes with the code of a claim's revision."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from pacorl.io.documents import read_json
from research.claims.claim import CLAIMS, CPU_MINUTES, ROOT, Claim, Result, Results, read_results, results_of

PATIENCE = 4 * 3600
"""Seconds after which a hanging atom is killed."""


def price_of(claim: Claim, results: Results) -> float:
    """CPU minutes of a run: the file's price, or the mean of the finished runs if they took longer."""
    measured = fmean(result.seconds for result in results.values()) / 60 if results else 0.0
    return max(claim.price, measured)


def prices(claims: Sequence[Claim]) -> str:
    """Tabulate the runs of each claim and the CPU minutes that are left."""
    lines = [f"{'claim':16} {'arms':>5} {'seeds':>5} {'done':>9} {'each':>6} {'left, CPU min':>14}"]
    for claim in claims:
        results = read_results(claim)
        count, price = len(claim.arms) * len(claim.seeds), price_of(claim, results)
        left = "cannot run" if claim.needs else f"{(count - len(results)) * price:.0f}"
        done = f"{len(results)}/{count}"
        lines.append(f"{claim.name:16} {len(claim.arms):5} {len(claim.seeds):5} {done:>9} {price:6.1f} {left:>14}")
    return "\n".join(lines)


def run_missing(claims: Sequence[Claim], *, minutes: float) -> int:
    """Run the missing runs while their prices fit into `minutes` of CPU time, and return how many failed."""
    failed, spent = 0, 0.0
    for claim in claims:
        results = read_results(claim)
        missing = [(arm, seed) for seed in claim.seeds for arm in claim.arms if (arm, seed) not in results]
        price = price_of(claim, results)
        if claim.needs or not missing or spent + price > minutes:
            continue
        if git("status", "--porcelain", "--", str(CLAIMS / f"{claim.name}.yaml")):
            raise ValueError(f"{claim.name}.yaml is not committed: predictions precede runs; commit it first")

        # With the pinned code: results of one claim are results of one revision.
        with worktree(claim.revision) as tree:
            for arm, seed in missing:
                if spent + price > minutes:
                    break
                before = cpu_seconds()
                failed += not run_one(claim, arm, seed, tree)
                spent += (cpu_seconds() - before) / 60
    return failed


def run_one(claim: Claim, arm: str, seed: int, tree: Path, *, further: str = "", keep: bool = True) -> bool:
    """Run one arm with one seed, append its line to the results, and print it. Returns whether it succeeded."""
    try:
        result = run_atom(claim, arm, seed, tree, further=further)
    except ValueError as error:
        print(f"{claim.name} {arm}, seed {seed}: failed: {error}", flush=True)
        return False
    if keep:
        with open(results_of(claim), "a", encoding="utf-8") as lines:
            lines.write(json.dumps(result.model_dump(), ensure_ascii=False) + "\n")
    values = "  ".join(f"{name} {value:.3f}" for name, value in result.metrics.items())
    print(f"{claim.name} {arm}, seed {seed}: {values}  {result.seconds:.0f} CPU s", flush=True)
    return True


def run_quick(claims: Sequence[Claim]) -> int:
    """Run one tiny atom per claim with its pinned code, and return how many failed."""
    failed = 0
    for claim in (claim for claim in claims if not claim.needs):
        with worktree(claim.revision) as tree:
            arm = next(iter(claim.arms))
            failed += not run_one(claim, arm, claim.seeds[0], tree, further=claim.quick, keep=False)
    return failed


def run_atom(claim: Claim, arm: str, seed: int, tree: Path, *, further: str = "") -> Result:
    """Run one arm with one seed and the code of `tree`.

    Raises:
        ValueError: if the command fails, exceeds its time, or leaves no such metric.
    """
    # One thread and no network: figures must not depend on the cores of a machine.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{tree / 'src'}:{tree}"}
    before = cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        words = claim.argv(f"{claim.arms[arm]} {further}", seed, Path(folder))
        # The shell's limit counts CPU time, which waiting for other processes does not use up.
        limited = ["sh", "-c", f'ulimit -t {60 * CPU_MINUTES} && exec "$@"', "atom", *words]
        try:
            done = subprocess.run(
                limited, cwd=tree, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"killed after {PATIENCE} s") from None
        # The command's fault in one line, else its metrics.
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            raise ValueError(f"killed, as after {CPU_MINUTES} CPU minutes")
        if done.returncode:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            raise ValueError(f"exit {done.returncode}: {last}")
        document = read_json(Path(folder) / claim.result)
        metrics = {}
        for name, keys in claim.metrics.items():
            metrics[name] = value_at(document, keys)

    return Result(
        arm=arm,
        seed=seed,
        claim=claim.hash,
        revision=claim.revision,
        seconds=round(cpu_seconds() - before, 1),
        machine=machine(),
        metrics=metrics,
    )


def value_at(document: Any, keys: str) -> float:
    """Look a number up by its dotted keys. Raises ValueError."""
    value = document
    for key in keys.split("."):
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"the result has no {keys}") from None
    # NaN would make every mean of the page NaN.
    if not isinstance(value, (int, float)) or not np.isfinite(value):
        raise ValueError(f"{keys} is {value!r}, not a finite number")
    return float(value)


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """Check the revision out below build/, and remove it at the end."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="claims-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder) / "tree"
        git("worktree", "add", "-q", "--detach", str(tree), revision)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def git(*words: str) -> str:
    """Run git. Raises ValueError with git's last line."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"git {words[0]}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
    return done.stdout.strip()


def cpu_seconds() -> float:
    """CPU seconds of all finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def machine() -> str:
    """Describe the machine by what changes the last digits of a figure: cores, instruction set, torch's version."""
    import torch

    from pacorl.runtime.cores import available_cores

    return (
        f"{available_cores()} cores, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__.split('+')[0]}"
    )
