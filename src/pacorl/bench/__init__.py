"""The field's benchmarks, computed as published: `pacorl benchmark NAME DATA`.

`table` lists them and says what an entry brings, `suite` is the seam between items and tables, `run` runs any of them.
`consistency_rank` and `edit_reward_bench` measure judges, `t2is` and `gedit` generators; published.json holds the
paper's rows.
"""
