"""PaCo-Dataset: from prompts to training pairs of the judge, one resumable step at a time.

A dataset is a folder; every step reads the files of earlier steps and adds its own:

    prompts.jsonl      T2IS records                                  `prompts`
    diverse.jsonl      the selected records                          `diversify`
    grids/             GROUP/NUMBER.png                               `generate`
    images/            GROUP/SEED_POSITION.png, in instances.jsonl   `pair`
    answers.jsonl      events of the annotators, one a line          `annotate`
    rankings.jsonl     the valid answers                             `export`
    explanations.jsonl reasons                                       `explain`
    manifests/         inputs, options, versions, seed and outputs of each step
"""
