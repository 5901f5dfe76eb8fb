"""How the tiny editor and the judge of edits are made: teacher, examples, and a few steps of the training."""

import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch
from tools.tiny.pretrain import (
    COUNTS,
    PIXELS,
    STATE,
    EditPhase,
    Stage,
    draw_edits,
    pretrain_kontext,
    pretrain_nine,
    pretrain_references,
    pretrain_steady,
    seeded,
    taught_edits,
    tile,
)
from tools.tiny.pretrain_judge import edit_examples

from pacorl.core import questions
from pacorl.io.images import upright_size
from pacorl.models.lora.adapters import load_lora
from pacorl.models.policies.flux import TINY_FLUX
from pacorl.models.policies.kontext import TINY_KONTEXT
from pacorl.records.prompts import load_prompts
from pacorl.tiny.characters import EDITS, INSTRUCTIONS, VALUES, Panel, all_panels, split_of
from pacorl.types import Grid, Size

PANELS = all_panels()


NUMBER = {panel: number for number, panel in enumerate(PANELS)}


class Numbers:
    """A bank of images that are known by number alone; negatives lie behind the panels."""

    panels = PANELS

    def of(self, panel: Panel, rng: random.Random) -> int:
        return NUMBER[panel]

    def of_negative(self, rng: random.Random) -> int:
        return len(PANELS)


@pytest.mark.slow
def test_the_world_s_edits_are_drawn_for_every_split(tmp_path: Path) -> None:
    files = draw_edits(tmp_path)
    assert [path.name for path in files] == ["train.jsonl", "dev.jsonl", "test.jsonl"]
    for path in files:
        prompts = load_prompts(path)
        assert len(prompts) == COUNTS[path.stem]  # type: ignore[index]
        assert {upright_size(prompt.sources[0]) for prompt in prompts} == {Size(PIXELS, PIXELS)}
        assert {prompt.text for prompt in prompts} <= set(INSTRUCTIONS)


@pytest.mark.parametrize(("spoil", "ignore"), [(0.0, 0.0), (0.2, 0.1)])
def test_the_teacher_errs_as_often_as_it_is_told(spoil: float, ignore: float) -> None:
    example = EditPhase(steps=1, spoil=spoil, ignore=ignore)
    drawn = list(islice(taught_edits(random.Random(0), example), 4000))
    followed = sum(getattr(seen, edit.attribute) == edit.value for edit, seen in drawn) / len(drawn)
    differing = [getattr(seen, name) != getattr(edit.before, name) for edit, seen in drawn for name in edit.others]
    assert followed == pytest.approx(1 - ignore, abs=0.02)
    # A redrawn attribute keeps its value by chance: of 3 to 6 values, about 1 in 4.
    assert sum(differing) / len(differing) == pytest.approx(0.75 * spoil, abs=0.02)
    assert {split_of(edit.before) for edit, _ in drawn} == {"train"}


def test_the_judge_s_lessons_are_true_and_balanced() -> None:
    stream = edit_examples(Numbers(), split="dev", rng=random.Random(0), captions=0.0)  # type: ignore[arg-type]
    counts: Counter[tuple[bool, bool]] = Counter()
    texts = {EDITS[name].format(value): (name, value) for name in EDITS for value in VALUES[name]}
    for example in islice(stream, 3000):
        instruction = example.question.split("Instruction: '")[1].split("'. ")[0]
        name, value = texts[instruction]
        asks_kept = example.question == questions.edit_kept(instruction)
        assert asks_kept or example.question == questions.edit_followed(instruction)
        first, second = example.images
        if second == len(PANELS):
            assert not example.yes
            continue
        before, seen = PANELS[first], PANELS[second]
        kept = all(getattr(before, other) == getattr(seen, other) for other in VALUES if other != name)
        assert example.yes == (kept if asks_kept else getattr(seen, name) == value), example
        counts[asks_kept, example.yes] += 1
    for asks_kept in (True, False):
        yes, no = counts[asks_kept, True], counts[asks_kept, False]
        assert 0.4 < yes / (yes + no) < 0.6


@pytest.mark.campaign
def test_a_few_steps_train_the_transformer_and_nothing_that_flux_shares(tmp_path: Path) -> None:
    from diffusers import FluxKontextPipeline, FluxPipeline

    pretrain_kontext(tmp_path / "kontext", start=TINY_FLUX, share=1 / 600)
    lines = [json.loads(line) for line in (tmp_path / "kontext" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 1]  # a line per phase
    made = FluxKontextPipeline.from_pretrained(tmp_path / "kontext")
    flux = FluxPipeline.from_pretrained(TINY_FLUX)
    for component in ("vae", "text_encoder", "text_encoder_2", "transformer"):
        trained, shared = getattr(made, component).state_dict(), getattr(flux, component).state_dict()
        assert trained.keys() == shared.keys()
        same = all(torch.equal(trained[name], shared[name]) for name in trained)
        assert same == (component != "transformer"), component


@pytest.mark.campaign
def test_a_few_steps_of_references_train_the_transformer_alone(tmp_path: Path) -> None:
    from diffusers import FluxKontextPipeline

    pretrain_references(tmp_path / "kontext", start=TINY_KONTEXT, share=1 / 250)
    lines = [json.loads(line) for line in (tmp_path / "kontext" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [5, 1]  # a line per phase
    assert not (tmp_path / "kontext" / STATE).exists()
    made = FluxKontextPipeline.from_pretrained(tmp_path / "kontext")
    start = FluxKontextPipeline.from_pretrained(TINY_KONTEXT)
    for component in ("vae", "text_encoder", "text_encoder_2", "transformer"):
        trained, shared = getattr(made, component).state_dict(), getattr(start, component).state_dict()
        same = all(torch.equal(trained[name], shared[name]) for name in trained)
        assert same == (component != "transformer"), component


def test_panels_are_tiled_row_by_row() -> None:
    panels_BPCHW = torch.arange(6.0)[None, :, None, None, None].expand(1, 6, 1, 2, 1)
    rows = [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
    assert tile(panels_BPCHW, Grid(2, 3)).tolist() == [[rows]]


@pytest.mark.campaign
def test_a_few_steps_of_nine_panels_make_a_generator_of_the_same_form(tmp_path: Path) -> None:
    from diffusers import FluxPipeline

    pretrain_nine(tmp_path / "nine", start=TINY_FLUX, share=1 / 500)
    made, start = (FluxPipeline.from_pretrained(folder) for folder in (tmp_path / "nine", TINY_FLUX))
    made.transformer.load_state_dict(start.transformer.state_dict())  # the same layers
    assert "loss_96px" in (tmp_path / "nine" / "log.jsonl").read_text()


@pytest.mark.campaign
def test_a_few_steps_make_a_steady_editors_adapter(tmp_path: Path) -> None:
    from diffusers import FluxKontextPipeline

    pretrain_steady(tmp_path / "steady", start=TINY_KONTEXT, share=1 / 300)
    adapted = FluxKontextPipeline.from_pretrained(TINY_KONTEXT)
    load_lora(adapted.transformer, tmp_path / "steady")


def trained(folder: Path, *, stops: tuple[int, ...]) -> list[torch.Tensor]:
    """Train a line in two stages of six and four steps, stopped after some of them and started again."""
    log, ends = folder / "log.jsonl", iter((*stops, None))
    while True:
        end, total = next(ends), 0
        module = torch.nn.Linear(2, 1)
        torch.nn.init.ones_(module.weight)
        torch.nn.init.zeros_(module.bias)
        done = 0
        for steps in (6, 4):
            stage = Stage([module], lr=0.1, steps=steps, log=log, ema=0.9)
            stage.resume(folder / STATE, first=done)
            while stage.step < steps and total != end:
                seeded(done + stage.step)
                stage.update((module(torch.randn(8, 2)) - 1).square().mean())
                stage.save(folder / STATE, first=done)
                total += 1
            if stage.step < steps:
                break
            stage.use_average()
            done += steps
        else:
            return [weight.detach().clone() for weight in module.parameters()]


@pytest.mark.parametrize("stops", [(2,), (6,), (8,), (3, 5)])
def test_a_stopped_training_ends_at_the_same_weights(tmp_path: Path, stops: tuple[int, ...]) -> None:
    folders = [tmp_path / "whole", tmp_path / "stopped"]
    for folder in folders:
        folder.mkdir()
    whole = trained(folders[0], stops=())
    for first, second in zip(whole, trained(folders[1], stops=stops), strict=True):
        assert torch.equal(first, second)
