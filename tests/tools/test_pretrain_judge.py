"""How the tiny judge's second lesson is made: faulty panels, true and balanced examples, and its resumed training."""

import random
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from tools.tiny import pretrain_judge
from tools.tiny.defects import DEFECTS, MIXES, OF_THE_PROP, SIZES, Defect, Mixed, draw_defects, draw_mixed, worn
from tools.tiny.judge_report import Drawings
from tools.tiny.negatives import draw_negatives
from tools.tiny.pretrain_judge import ImageBank, TrainingExample, described, second_examples

from pacorl.core import questions
from pacorl.judge.local import TINY_JUDGE
from pacorl.models.policies.flux import TINY_FLUX
from pacorl.tiny.characters import CANVAS, KEPT, VALUES, Oracle, Panel, all_panels, draw, panels_of, split_of

PANEL = Panel("red", "round", "cap", "day", "waving", "ball")


@pytest.fixture(scope="module")
def vae() -> AutoencoderKL:
    return AutoencoderKL.from_pretrained(TINY_FLUX / "vae", torch_dtype=torch.float32)


@pytest.fixture(scope="module")
def faulty(vae: AutoencoderKL) -> list[Mixed | Defect]:
    rng = random.Random(0)
    return [*draw_mixed(30, split="dev", rng=rng, vae=vae), *draw_defects(60, split="dev", rng=rng, vae=vae)]


def test_faulty_panels_come_in_every_size_and_from_their_split(faulty: list[Mixed | Defect]) -> None:
    assert {each.image.width for each in faulty} == set(SIZES)
    assert {split_of(each.panel) for each in faulty} == {"dev"}
    assert Counter(each.name for each in faulty if isinstance(each, Defect)) == dict.fromkeys(DEFECTS, 6)
    assert all(each.other != each.panel.palette for each in faulty if isinstance(each, Mixed))


@pytest.mark.parametrize("mix", dict.fromkeys(MIXES))
def test_a_mix_changes_the_palette_alone_and_not_all_of_it(mix: Callable[..., object]) -> None:
    other = Panel("red", "round", "cap", "candy", "waving", "ball")
    first, second = draw(PANEL, CANVAS), draw(other, CANVAS)
    mixed, a, b = (np.asarray(image, dtype=int) for image in (mix(first, second, random.Random(0)), first, second))
    background = (a != b).any(-1)
    changed = (mixed != a).any(-1)
    assert not (changed & ~background).any()
    assert changed.any()
    assert (mixed != b).any(-1)[background].any()


@pytest.mark.parametrize("name", DEFECTS)
def test_damage_is_seen_and_names_what_it_spoils(name: str) -> None:
    seen = []
    for seed in range(8):
        rng = random.Random(seed)
        panel = rng.choice(all_panels())
        before, after = np.asarray(draw(panel, CANVAS), dtype=int), np.asarray(DEFECTS[name](panel, rng), dtype=int)
        hero = (before != np.asarray(draw(panel, CANVAS, without="hero"))).any(-1)
        changed = (before != after).any(-1)
        seen.append(changed.mean())
        # A missing prop does not touch the hero, and every other fault but a second prop does.
        if name == "no prop":
            assert not (changed & hero).any()
        elif name not in OF_THE_PROP:
            assert (changed & hero).any() or name == "two heroes"
    assert float(np.median(seen)) > 0.005


@pytest.mark.slow
def test_a_worn_panel_is_still_recognised() -> None:
    rng = random.Random(0)
    panels = rng.sample(all_panels(), 40)
    assert Oracle().read([worn(draw(panel, 64), rng) for panel in panels]) == panels


def shown_of(bank: Drawings, panels: dict[int, Panel]) -> None:
    """Remember the panel of every drawing of a bank."""
    of = bank.of

    def remembered(panel: Panel, rng: random.Random) -> int:
        index = of(panel, rng)
        panels[index] = panel
        return index

    bank.of = remembered  # type: ignore[method-assign]


def test_the_second_lesson_is_true(faulty: list[Mixed | Defect]) -> None:
    """Pairs and texts of sound panels are checked by their attributes, and no faulty panel is called consistent."""
    bank = Drawings((16,), negatives=[draw(PANEL, 16)], faulty=faulty)
    panels: dict[int, Panel] = {}
    shown_of(bank, panels)
    stream = second_examples(bank, split="dev", rng=random.Random(0), captions=0.0)  # type: ignore[arg-type]
    counts: Counter[tuple[int, bool]] = Counter()
    for example in islice(stream, 900):
        counts[len(example.images), example.yes] += 1
        drawn = [panels.get(image) for image in example.images]
        if example.question == questions.same_pose() and None not in drawn:
            first, second = drawn
            assert example.yes == ((first.pose, first.prop) == (second.pose, second.prop))  # type: ignore[union-attr]
        elif is_plain(example):
            assert example.yes == (None not in drawn and drawn[0].kept == drawn[1].kept), example  # type: ignore[union-attr]
        elif len(drawn) == 1 and drawn[0] and example.words:
            values = {getattr(drawn[0], name) for name in VALUES}
            assert all(fits == (value in values) for value, fits in example.words), example
            assert example.yes == all(fits for _, fits in example.words), example
    for images in (1, 2):
        yes, no = counts[images, True], counts[images, False]
        assert 0.35 < yes / (yes + no) < 0.55


def is_plain(example: TrainingExample) -> bool:
    return len(example.images) == 2 and "style, logic and identity" in example.question


def test_a_description_names_what_it_is_asked_for() -> None:
    texts = {described(PANEL, KEPT, random.Random(seed)) for seed in range(9)}
    assert texts == {"red round hero, cap, day", "a red round hero, cap, day"}
    assert described(PANEL, ["pose", "prop"], random.Random(0)) == "waving, ball"
    assert described(PANEL, [], random.Random(0)).endswith("hero")


@pytest.mark.slow
def test_the_bank_prepares_images_as_the_processor_does(
    vae: AutoencoderKL, faulty: list[Mixed | Defect], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = panels_of("dev")[:8]
    monkeypatch.setattr(pretrain_judge.characters, "all_panels", lambda: few)
    negatives = draw_negatives(3, seed=0, vae=vae)
    _, processor, bank = pretrain_judge._begin(
        TINY_JUDGE, partial(ImageBank, vae=vae, negatives=negatives, sizes=(24,), faulty=faulty), second_examples
    )
    images = [draw(few[3], 24), negatives[1], faulty[5].image]
    expected = processor.image_processor(images=images, return_tensors="pt")["pixel_values"]
    indices = [3, 2 * len(few) + 1, bank.of_faulty(faulty[5])]
    torch.testing.assert_close(bank.pixel_values(indices), expected, rtol=0, atol=1e-6)


@pytest.mark.campaign
def test_an_interrupted_training_goes_on_bit_for_bit(
    tmp_path: Path, vae: AutoencoderKL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrain_judge, "draw_negatives", lambda *args, **options: [draw(PANEL, 16).rotate(90)])
    monkeypatch.setattr(pretrain_judge, "panel_pixels", cache(pretrain_judge.panel_pixels))
    for name, value in {"SIZES": (16,), "LEGIBLE": (), "BATCH": 4, "SAVED_EVERY": 2}.items():
        monkeypatch.setattr(pretrain_judge, name, value)
    train = partial(pretrain_judge.pretrain_judge, vae=vae, teach=second_examples, start=TINY_JUDGE, faulty=20)
    train = partial(train, share=1, steps=4, lr=1e-3)
    train(tmp_path / "whole")

    class Interrupted(Exception):
        pass

    save = pretrain_judge.Stage.save

    def interrupted(*arguments: Any, **options: Any) -> None:
        save(*arguments, **options)
        raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(pretrain_judge.Stage, "save", interrupted)
        with pytest.raises(Interrupted):
            train(tmp_path / "parts")
    train(tmp_path / "parts", resume=True)
    whole, parts = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts
    assert not (tmp_path / "parts" / "state.pt").exists()
