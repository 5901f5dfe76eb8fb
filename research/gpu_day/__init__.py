"""One day with a GPU: what FLUX.1-dev and its 7B judge take on the card that is here, in the form that recipes run.

    export PYTHONPATH=src                                   # an installation is not needed
    python -m research.gpu_day --out day.jsonl              # 9 minutes, the most valuable parts first
    python -m research.gpu_day --out day.jsonl --resume     # 9 more with the parts that are left; 20 in all on an H200
    python -m research.gpu_day --tiny --slice 30            # all of it on tiny shapes, on the CPU if there is no card

Every part is a process with a time limit, and its records are appended to the JSONL file and synced as they are made,
so an error, a hang or a kill costs one part. All weights are random; what is measured is the project's own code.
"""
