"""The command `python -m research.claims`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import research.claims
from research.claims.claim import read_claims
from research.claims.render import render
from research.claims.runs import prices, run_missing, run_quick


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=research.claims.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", nargs="?", choices=["run", "render"], default="run")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these claims alone")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="CPU minutes to spend at most")
    parser.add_argument("--quick", action="store_true", help="one tiny run per claim; nothing is kept")
    options = parser.parse_args(words)
    try:
        claims = read_claims(only=options.only)
        if options.action == "render":
            print(render(claims))
            return 0
        if options.quick:
            return min(1, run_quick(claims))
        print(prices(claims), flush=True)
        return min(1, run_missing(claims, minutes=options.minutes))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
