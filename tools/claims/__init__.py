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
