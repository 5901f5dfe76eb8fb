"""Thousands of hostile files, and what became of them. `make nightly` runs it.

    python -m qa.attack --share 0.1                a tenth of it, with inputs of today's own
    python -m qa.attack --seed 7                   the inputs of another seed
    python -m qa.attack --only documents/c.jsonl   one target; with :37 its input 37 alone

Exit code 1 if an input led to a traceback, a wrong or silent outcome, a hang, or a line without a file.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import chain

from qa.attack.harness import FAULTS, Tally, attack

SHOWN_FAULTS = 5
"""Of a target."""
INPUTS = {"documents": 420, "images": 1200, "weights": 240, "links": 24, "environment": 16}
"""Module of targets → inputs of each target, at share 1."""


def tallies(only: str, *, seed: int, share: float) -> Iterator[Tally]:
    """One after another: the inputs of one target fill a core."""
    name, _, number = only.partition(":")
    family, _, target = name.partition("/")
    for room, most in INPUTS.items():
        if family and room != family:
            continue
        for chosen in import_module(f"qa.attack.{room}").targets():  # only now: rooms import what they try
            if target in ("", chosen.name.partition("/")[2]):
                first, count = (int(number), 1) if number else (0, max(1, round(share * most)))
                yield attack(chosen, count, seed=seed, first=first)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m qa.attack", description="Hostile files, and what became of them.")
    today = int(time.strftime("%Y%m%d"))  # else the same inputs would be tried for years
    parser.add_argument("--seed", type=int, default=today, help="Of the inputs; today's date unless given.")
    parser.add_argument("--share", type=float, default=1.0, help="How many of them.")
    parser.add_argument("--only", nargs="+", default=[""], help="Families, FAMILY/TARGET, or FAMILY/TARGET:NUMBER.")
    options = parser.parse_args(arguments)
    all_kinds: Counter[str] = Counter()
    several = (tallies(only, seed=options.seed, share=options.share) for only in options.only)
    for tally in chain.from_iterable(several):
        all_kinds += tally.kinds
        print(f"{tally.name:<42}{tally.seconds:>8.1f} s  {dict(tally.kinds)}", flush=True)
        for fault in tally.faults[: None if ":" in options.only[0] else SHOWN_FAULTS]:
            print(f"    {tally.name}:{fault.number}  {fault.kind}  {fault.detail}", flush=True)
    print(f"seed {options.seed}, {all_kinds.total():,} inputs: {dict(all_kinds)}")
    return int(any(all_kinds[kind] for kind in FAULTS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
