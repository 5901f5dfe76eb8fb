"""PaCo-Dataset: from prompts to training pairs of the judge, one resumable step at a time.

A dataset is a folder; every step reads what earlier steps left there and adds its own:

    prompts.jsonl      T2IS records                                  `prompts`
    diverse.jsonl      those that were kept                          `diversify`
    grids/             GROUP/SEED.png, listed in grids.jsonl         `generate`
    images/            GROUP/SEED_POSITION.png, in instances.jsonl   `pair`
    annotations.db     who ranked what                               `annotate`
    rankings.jsonl     the answers, pairs.jsonl the labelled pairs   `export`
    explanations.jsonl reasons                                       `explain`
    manifests/         what each step read, with which options, versions and seed, and what it wrote
"""
