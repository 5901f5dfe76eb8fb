"""Words in images as a reward: is the text that a panel's description quotes legible on the panel?

pip install rapidocr onnxruntime
pacorl train-policy CONFIG 'rewards=[{name: "examples/ocr_reward.py:Ocr"}]'
"""

from statistics import fmean

import numpy as np

from pacorl.core.grid import QUOTED, split


class Ocr:
    """Legibility of quoted texts: 1 − edits/length per text, mean over the panels with a quotation.

    Edits are the least number of letters to insert, delete or change so that the quoted text occurs in the recognised
    text. Case, spaces and punctuation are ignored. RapidOCR's models read Chinese and English.
    """

    def load(self):
        from rapidocr import RapidOCR

        self.engine = RapidOCR(params={"Global.log_level": "error"})

    def check(self, prompts):
        for prompt in prompts:
            if not any(map(quoted, prompt.panels or (prompt.text,))):
                raise ValueError(f'{prompt.place} quotes no text to be read, as in: a sign that says "Open"')

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
                shares.append(fmean(1 - edits_to_substring(word, seen) / len(word) for word in words))
        return fmean(shares)

    def read(self, panel):
        # The engine takes BGR.
        pixels = np.asarray(panel.convert("RGB"))[..., ::-1]
        return plain(" ".join(self.engine(pixels).txts or ()))


def quoted(text):
    """Find the texts in quotation marks, reduced to letters and digits."""
    quotations = [plain("".join(groups)) for groups in QUOTED.findall(text)]
    return [words for words in quotations if words]


def plain(text):
    return "".join(letter for letter in text.casefold() if letter.isalnum())


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
