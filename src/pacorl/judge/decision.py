"""A judge as a decision model of transformers: any program gets P(Yes) without pacorl.

    transformers serve runs/judge/merged                        # with the decision.json that was saved there
    transformers serve X-GenGroup/PaCo-Reward-7B --decision-config configs/reward/paco_reward_7b.decision.json

`POST /v1/systemone` then answers a question of type `noul` about the images of the state.
"""

import json
from pathlib import Path
from typing import Any

from pacorl.io.documents import write_json
from pacorl.judge.prompting import chat_text

CONFIG = "decision.json"
QUESTION = "\0"
"""Stands for a question while the checkpoint's own template is rendered."""


def decision_template(processor: Any) -> str:
    """Write a checkpoint's chat turn as a template of a decision: the images of the state, then the question."""
    text = {"type": "text", "text": QUESTION}
    before, after = chat_text(processor, [{"role": "user", "content": [text]}]).split(QUESTION)
    shown = chat_text(processor, [{"role": "user", "content": [{"type": "image"}, text]}])
    image = shown[len(before) : shown.index(QUESTION)]
    # As literals: Jinja would drop a template's last line break.
    items = "{% for part in state %}{{ " + json.dumps(image) + ' if part.type == "image" else part.text }}{% endfor %}'
    state = "{% if state is string %}{{ state }}{% else %}" + items + "{% endif %}"
    return "".join(
        ["{{ ", json.dumps(before), " }}", state, "{{ question.instructions }}{{ ", json.dumps(after), " }}"]
    )


def save_decision(folder: Path, processor: Any) -> None:
    """Write `decision.json`, which includes its template, into the folder of a judge's weights."""
    # Included, since a server given the file reads no separate template.
    document = {"labels": {"noul": ["Yes", "No"]}, "noul_options": ["true", "false"]}
    write_json(folder / CONFIG, document | {"chat_template": decision_template(processor)}, indent=1)
