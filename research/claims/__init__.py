"""Predictions about the paper's claims, and their runs.

    python -m research.claims                              # prices, and every missing run
    python -m research.claims --only alpha --minutes 20    # runs of one claim, as many as fit
    python -m research.claims --quick                      # one tiny run per claim; nothing is kept
    python -m research.claims render                       # predictions, figures and verdicts as Markdown, to stdout

`NAME.yaml` is a `Claim`, committed before its first run. A run is one arm with one seed: a process on one thread in a
worktree of the claim's revision, with at most CPU_MINUTES. Its line goes to results/NAME.jsonl, with the claim's hash:
a line of another version of the claim is refused. A failed run prints one line and is tried again next time.
"""
