from __future__ import annotations

import json
from collections import Counter
from unittest.mock import Mock

import pytest
from dataset_folder import draw_unreliably

from pacorl.config.options import GeneratorOptions
from pacorl.core.grid import split
from pacorl.dataset.folder import PromptRecord, read_instances, read_prompts
from pacorl.dataset.grids import generate, instances_of, pair, panel_path
from pacorl.dataset.manifest import DatasetStep
from pacorl.generate.image_queue import ImageSource, image_source
from pacorl.io.documents import write_jsonl
from pacorl.io.files import write_atomic
from pacorl.io.images import open_image, png_texts
from pacorl.types import Grid, Prompt, Size


def source(draw=draw_unreliably, *, checkpoint="drawn"):
    return ImageSource(lambda: draw, {"checkpoint": checkpoint}, batch=4)


@pytest.fixture
def folder(dataset):
    made = dataset(prompts=3, grids=1, paired=False)
    for path in (made / "grids").rglob("*.png"):
        path.unlink()
    return made


def images(folder):
    return {path.name + path.parent.name: path.read_bytes() for path in (folder / "grids").rglob("*.png")}


def test_generates_everything_once_with_seeds_and_recipes_that_stay_to_the_byte(folder):
    """Another recipe would have every grid of a dataset generated again."""
    draw = Mock(side_effect=draw_unreliably)
    assert generate(folder, source(draw), grids=4) == {"grids": 12, "generated": 12, "missing": 0}
    recipes = {png_texts(path)["pacorl recipe"] for path in folder.glob("grids/*/*.png")}
    text = read_prompts(folder / "diverse.jsonl")[0].prompt.text
    assert len({json.loads(recipe)["seed"] for recipe in recipes}) == 12
    assert f'{{"generator": {{"checkpoint": "drawn"}}, "prompt": "{text}", "seed": 39529684342150259}}' in recipes
    assert generate(folder, source(draw), grids=4)["generated"] == 0
    assert draw.call_count == 3, "batches of four"


def test_a_recipe_has_every_option_that_changes_the_images(folder):
    def recipe(model: str, *, memory: str = "normal", **options) -> dict:
        return dict(image_source(GeneratorOptions(model=model, **options), memory=memory).generator)

    assert recipe("tiny", size=Size(64, 64), steps=6) == {
        "checkpoint": "tiny", "steps": 6, "guidance_scale": 3.5, "max_sequence_length": 48,
        "dtype": "float32", "size": "64x64",
    }  # fmt: skip
    assert recipe("some/flux")["max_sequence_length"] == 512
    loras = [recipe("tiny", adapter=name).get("adapter") for name in ("none", "consistent", "collapsed")]
    assert loras[0] is None
    assert len(set(loras)) == 3
    guided = recipe("some/flux", options=["true_cfg_scale=2.0", "negative_prompt=null"])
    assert guided["true_cfg_scale"] == 2.0, "every option that changes the images belongs to the recipe"
    assert "negative_prompt" not in guided
    packed = [recipe("tiny", memory=memory).get("quantize") for memory in ("normal", "low", "lowest")]
    assert packed == [None, "int8", "int8"], "streaming changes no bit"


def test_the_tiny_generator_refuses_another_layout_before_it_is_loaded(folder):
    text = "A 1x2 grid layout of a hero. [LEFT]: It sleeps. [RIGHT]: It runs."
    write_jsonl(folder / "diverse.jsonl", [{"idx": "0000", "prompt": text, "layout": "1x2"}])
    with pytest.raises(ValueError, match=r"diverse.jsonl, prompt 0000: .*makes sets of 4 panels as 2x2.* 1x2"):
        generate(folder, source(checkpoint="tiny"))
    assert not list((folder / "grids").rglob("*.png"))


# --- cut and combined ----------------------------------------------------------------------------------------


def test_every_panel_is_compared_with_those_at_each_other_position():
    """With the paper's arithmetic: 708 prompts of four grids are 33,984 questions."""
    instances = list(instances_of(PromptRecord("a", Prompt(id=0, text="A set.", grid=Grid(2, 2)), {}), grids=4))
    assert 708 * len({one.id for one in instances}) == 708 * len(instances) == 33_984
    for one in instances:
        grid, position = one.id.split(":")[1].split("_")
        other = one.id.split(":")[2]
        assert other != position
        assert one.reference == f"images/a/{grid}_{position}.png"
        assert one.candidates == tuple(f"images/a/{x}_{other}.png" for x in range(4))


def test_pair_cuts_what_split_cuts(dataset):
    folder = dataset(prompts=2, grids=3)
    panels = split(open_image(folder / "grids/0001/2.png"), Grid(2, 2))
    for position, panel in enumerate(panels):
        assert open_image(folder / panel_path("0001", 2, position)).tobytes() == panel.tobytes()


def test_a_pilot_spreads_its_questions_over_all_prompts(dataset):
    folder = dataset(prompts=4, grids=2)
    every = read_instances(folder / "instances.jsonl")
    assert pair(folder, limit=10)["instances"] == 10
    pilot = read_instances(folder / "instances.jsonl")
    assert {one.id for one in pilot} < {one.id for one in every}
    counts = Counter(one.group for one in pilot)
    assert sorted(counts.values()) == [2, 2, 3, 3]
    # Not the same question of each prompt.
    assert len({one.id.partition(":")[2] for one in pilot}) > 4


def test_pair_is_idempotent_and_repairs_a_lost_panel(dataset):
    folder = dataset(prompts=1, grids=2)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    counts = pair(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before
    lost = folder / "images/0000/1_2.png"
    lost.unlink()
    assert pair(folder) == counts
    assert lost.is_file()


def test_a_changed_grid_or_a_prompt_without_grids_is_named(dataset):
    folder = dataset(prompts=2, grids=2, paired=False)
    write_atomic(folder / "grids/0000/1.png", b"not an image")
    with pytest.raises(ValueError, match=r"grids/0000/1\.png is not the image that was generated"):
        pair(folder)
    DatasetStep(folder, "generate").finish(
        outputs=[folder / "grids/0000/0.png", folder / "grids/0000/1.png"], counts={}
    )
    with pytest.raises(ValueError, match="0001"):
        pair(folder)
    (folder / "manifests" / "generate.json").unlink()
    with pytest.raises(ValueError, match="pacorl dataset generate"):
        pair(folder)
