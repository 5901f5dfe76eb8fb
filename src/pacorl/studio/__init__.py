"""A local page to make, judge and compare sets (`pacorl studio`).

jobs     one job at a time, with progress and cancelling
models   the generator and the judge, uploads, and the work of the jobs
history  the sets that were made, on the disk
taste    a person's rankings as the reward of a run
server   the HTTP API and the page
"""
