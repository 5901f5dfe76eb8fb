"""Words in images as a reward: does each panel bear the text that its description quotes?

pip install rapidocr onnxruntime
pacorl train-policy my.yaml 'rewards=[{name: consistency}, {name: "examples/ocr_reward.py:Ocr"}]'
"""

from statistics import fmean

import numpy as np

from pacorl.core.grid import QUOTED, split


class Ocr:
    """Legibility of quoted texts: 1 − edits/length per text, mean over the panels with a quotation.

    `edits` is the least number of letters to insert, delete or change so that the expected text occurs in the
    recognised text. Case, spaces, punctuation and other text are ignored. RapidOCR's models read Chinese and English.
    """

    def __init__(self):
        self.read = None

    def load(self):
        """Open RapidOCR."""
        from rapidocr import RapidOCR

        engine = RapidOCR(params={"Global.log_level": "error"})
        # The engine takes BGR.
        self.read = lambda image: " ".join(engine(np.asarray(image.convert("RGB"))[..., ::-1]).txts or ())

    def check(self, prompts):
        for prompt in prompts:
            if not any(map(quoted, prompt.panels or (prompt.text,))):
                raise ValueError(
                    f'{prompt.place} quotes no text, as in: a sign that says "Open" ({prompt.text[:60]!r})'
                )

    def __call__(self, prompts, images):
        return [self.score(prompt, image) for prompt, image in zip(prompts, images, strict=True)]

    def score(self, prompt, image):
        # A set without texts of panels is read as one image.
        panels = split(image, prompt.grid) if prompt.panels else [image]
        shares = []
        for panel, text in zip(panels, prompt.panels or (prompt.text,), strict=True):
            words = quoted(text)
            if words:
                seen = self.read(panel)
                shares.append(fmean(share_read(word, seen) for word in words))
        return fmean(shares)


def quoted(text):
    """Find the texts in quotation marks that contain a letter or digit."""
    quotations = ["".join(groups) for groups in QUOTED.findall(text)]
    return [words for words in quotations if plain(words)]


def share_read(text, read):
    """1 − (edits to the nearest piece of `read`) / length of `text`, both reduced to letters and digits."""
    target = plain(text)
    return 1.0 - edits_to_substring(target, plain(read)) / len(target)


def edits_to_substring(target, text):
    """Compute the least edit distance of `target` to any substring of `text` (Sellers 1980)."""
    costs = [0] * (len(text) + 1)  # zeros: the substring may begin anywhere
    for row, letter in enumerate(target, start=1):
        diagonal, costs[0] = costs[0], row
        for column, other in enumerate(text, start=1):
            changed = diagonal + (letter != other)
            diagonal = costs[column]
            costs[column] = min(changed, costs[column] + 1, costs[column - 1] + 1)
    return min(costs)  # and end anywhere


def plain(text):
    return "".join(letter for letter in text.casefold() if letter.isalnum())
