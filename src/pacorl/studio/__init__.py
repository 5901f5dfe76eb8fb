"""A local page to make, judge and compare sets (`pacorl studio`).

jobs             one job at a time, with progress and cancelling
models           the generators and the judge, uploads, and the work of the jobs
model_choice     models that can be chosen: licence, memory, download
history          the sets that were made, on the disk
characters       pictures of a character, and the training of its LoRA
trainer_process  the one process that trains
server           the HTTP API and the page
"""
