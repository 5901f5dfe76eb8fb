"""One day with a GPU: what FLUX.1-dev and its 7B judge take on the card that is here.

    python -m research.gpu_day --out day.jsonl                  # 9 minutes, in order of value per second
    python -m research.gpu_day --resume day.jsonl               # 9 more with the parts that are left; 25 in all
    python -m research.gpu_day --slice 25 --out day.jsonl       # all at once
    python -m research.gpu_day --depth 4+8                      # a card of 12 GB: costs per block, extrapolated
    python -m research.gpu_day --parts full form-bf16           # these parts alone
    python -m research.gpu_day --tiny                           # all of it on a CPU, on the tiny shapes

It runs from the root of the source tree without an installation. Every part is a process with a time limit. A part's
records are appended to the JSONL file and synced to disk as they are made, so an error, a hang or a kill costs one
part.

All weights are random and of the published shapes. The measured functions are the project's own: `denoise`, `decode`,
`collect`, `update_policy` with its optimizer step, `LocalJudge.verdicts` and the command `pacorl train-policy`.
"""
