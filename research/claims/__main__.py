"""Runs of claims, and their tables.

python -m research.claims run curve --arm contrast --seed 1       # one run; its evaluations are kept
python -m research.claims run curve --arm contrast --seed 0 --trial epochs=4 optimizer.lr=1e-3
python -m research.claims render curve
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from research.claims.claim import claim_names, read_claim
from research.claims.render import render


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("claim", choices=claim_names())
    run.add_argument("--arm", required=True)
    run.add_argument("--seed", type=int, required=True)
    run.add_argument("--out", type=Path, help="the run's folder; runs/claims/CLAIM-ARM-SEED by default")
    run.add_argument("--trial", nargs="*", metavar="KEY=VALUE", help="further settings; no results are kept")
    tables = commands.add_parser("render")
    tables.add_argument("claim", nargs="*", help="all by default")
    options = parser.parse_args()
    try:
        if options.command == "render":
            print("\n".join(render(read_claim(name)) for name in options.claim or claim_names()))
            return 0
        from research.claims.runs import run as run_arm

        claim = read_claim(options.claim)
        if options.arm not in claim.arms:
            raise ValueError(f"there is no arm {options.arm}; there are {', '.join(claim.arms)}")
        out = options.out or Path("runs/claims") / f"{claim.name}-{options.arm}-{options.seed}"
        trial = options.trial is not None
        run_arm(claim, options.arm, options.seed, out, more=options.trial or (), keep=not trial)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
