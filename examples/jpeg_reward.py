"""Size as a JPEG, the usual first check of a training loop (DDPO, arXiv 2305.13301): a reward without a model.

pacorl train-policy tiny judge=none 'evaluation.rewards=[]' 'rewards=[{name: "examples/jpeg_reward.py:jpeg_size"}]'
"""

import io
from typing import Literal


def jpeg_size(prompts, images, *, prefer: Literal["small", "large"] = "small", quality: int = 95):
    """Kilobytes of each image as a JPEG, negative if small files are preferred."""
    sign = -1 if prefer == "small" else 1
    scores = []
    for image in images:
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, "JPEG", quality=quality)
        scores.append(sign * buffer.tell() / 1000)
    return scores
