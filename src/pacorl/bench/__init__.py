"""The field's benchmarks, computed as published: `pacorl benchmark NAME DATA`.

`benchmarks` has the table of entries, `suite` their base class and tables, and `running` the loop.
`consistency_rank` and `edit_reward_bench` measure judges, `t2is` and `gedit` generators; published.json holds the
paper's rows.
"""
