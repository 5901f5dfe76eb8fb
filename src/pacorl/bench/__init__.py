"""The field's benchmarks, computed as published: `pacorl benchmark …`.

`judging` measures judges (ConsistencyRank, EditReward-Bench), `generation` measures generators (T2IS-Bench,
GEdit-Bench); `suite` is the seam and runs them, `published` holds the paper's rows.
"""
