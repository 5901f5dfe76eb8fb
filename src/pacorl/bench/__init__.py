"""The field's benchmarks, computed as published: `pacorl benchmark NAME DATA`.

`table` lists them and says what an entry brings, `run` runs any of them, `suite` is the seam between items and tables.
`consistency_rank` and `edit_reward_bench` measure judges, `t2is` and `gedit` generators; `published` holds the paper's
rows.
"""
