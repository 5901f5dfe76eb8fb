"""The command `python -m tools.claims`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import tools.claims
from pacorl.io.files import write_atomic
from tools.claims.atoms import prices, run_missing, run_quick
from tools.claims.claim import ROOT, read_claims
from tools.claims.page import PAGE, render


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=tools.claims.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", nargs="?", choices=["run", "render"], default="run")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these claims alone")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="CPU minutes to spend at most")
    parser.add_argument("--quick", action="store_true", help="one tiny atom per claim in a temporary folder")
    parser.add_argument("--commit", action="store_true", help="commit each result alone")
    options = parser.parse_args(words)

    # The page alone, the quick trial, or the missing runs.
    try:
        claims = read_claims(only=options.only)
        if options.action == "render":
            write_atomic(ROOT / PAGE, render(read_claims()))
            return 0
        if options.quick:
            return min(1, run_quick(claims))
        # The prices first, then whatever is missing and fits, then the page.
        print(prices(claims), flush=True)
        failed = run_missing(claims, minutes=options.minutes, commit=options.commit)
        write_atomic(ROOT / PAGE, render(read_claims()))
        return min(1, failed)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
