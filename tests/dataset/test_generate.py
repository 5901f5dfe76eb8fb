from __future__ import annotations

import random
from io import BytesIO

import pytest
from PIL import Image

from pacorl.data.characters import Panel, draw_grid, redrawn
from pacorl.dataset.generate import generate
from pacorl.dataset.pair import pair
from pacorl.io.documents import read_jsonl
from pacorl.io.images import open_image, png_text


class Painter:
    """An unreliable painter of the tiny world; counts what it paints."""

    def __init__(self, stop_after: int = 10**9) -> None:
        self.painted, self.stop_after = 0, stop_after

    def __call__(self, prompts, seeds):
        if self.painted >= self.stop_after:
            raise KeyboardInterrupt
        self.painted += len(prompts)
        sets = [[Panel.parse(text) for text in prompt.panels] for prompt in prompts]
        return [
            draw_grid(redrawn(panels, chance=0.35, rng=random.Random(seed)), prompt.grid, 16)
            for prompt, panels, seed in zip(prompts, sets, seeds, strict=True)
        ]


@pytest.fixture
def folder(dataset):
    made = dataset(prompts=3, grids=1, paired=False)
    for path in (made / "grids").rglob("*.png"):
        path.unlink()
    (made / "grids.jsonl").unlink()
    return made


NAMED = {"generator": {"checkpoint": "drawn"}}


def pictures(folder):
    return {path.name + path.parent.name: path.read_bytes() for path in (folder / "grids").rglob("*.png")}


def pixels(folder):
    return {name: Image.open(BytesIO(data)).tobytes() for name, data in pictures(folder).items()}


def test_paints_everything_once(folder):
    painter = Painter()
    assert generate(folder, painter, grids=4, **NAMED) == {"grids": 12, "painted": 12, "missing": 0}
    assert len({row["seed"] for row in read_jsonl(folder / "grids.jsonl")}) == 12
    assert generate(folder, painter, grids=4, **NAMED)["painted"] == 0
    assert painter.painted == 12
    assert pair(folder)["instances"] == 3 * 48


def test_an_interrupted_run_goes_on_and_ends_the_same(folder, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        generate(folder, Painter(stop_after=4), grids=4, batch=2, **NAMED)
    assert not (folder / "grids.jsonl").exists()
    painter = Painter()
    assert generate(folder, painter, grids=4, **NAMED)["painted"] == 8
    halted = pictures(folder)
    for path in (folder / "grids").rglob("*.png"):
        path.unlink()
    generate(folder, Painter(), grids=4, batch=5, **NAMED)
    assert pictures(folder) == halted


def test_another_recipe_is_painted_anew(folder):
    generate(folder, Painter(), grids=2, **NAMED)
    painter = Painter()
    generate(folder, painter, grids=2, generator={"checkpoint": "other"})
    assert painter.painted == 6
    assert "other" in png_text(folder / "grids/0000/0.png", "pacorl recipe")


def test_a_broken_picture_is_painted_anew(folder):
    generate(folder, Painter(), grids=2, **NAMED)
    whole = (folder / "grids/0001/1.png").read_bytes()
    (folder / "grids/0001/1.png").write_bytes(whole[: len(whole) // 2])
    assert generate(folder, Painter(), grids=2, **NAMED)["painted"] == 1
    assert (folder / "grids/0001/1.png").read_bytes() == whole


def test_shards_share_the_work_and_paint_the_same(folder):
    generate(folder, Painter(), grids=4, **NAMED)
    alone, listed = pictures(folder), (folder / "grids.jsonl").read_bytes()
    for path in [*(folder / "grids").rglob("*.png"), folder / "grids.jsonl"]:
        path.unlink()
    first = generate(folder, Painter(), grids=4, shard=(0, 2), **NAMED)
    assert first == {"grids": 12, "painted": 6, "missing": 6}
    assert not (folder / "grids.jsonl").exists()
    assert generate(folder, Painter(), grids=4, shard=(1, 2), **NAMED)["missing"] == 0
    assert pictures(folder) == alone
    assert (folder / "grids.jsonl").read_bytes() == listed


def test_dry_run_paints_nothing(folder):
    assert generate(folder, None, grids=4, dry_run=True, **NAMED) == {"grids": 12, "to_paint": 12}
    assert not (folder / "grids.jsonl").exists()


def test_impossible_shards(folder):
    with pytest.raises(ValueError, match="shards count from 0 to 1"):
        generate(folder, Painter(), shard=(2, 2), **NAMED)


def test_the_tiny_generator_paints_what_the_oracle_reads(folder):
    from pacorl.core.grid import parse_layout, split
    from pacorl.data.characters import Oracle
    from pacorl.dataset.painter import policy_painter
    from pacorl.types import Size

    paint, named = policy_painter("tiny", size=Size(64, 64), steps=6, dtype="float32")
    assert generate(folder, paint, generator=named, grids=2)["painted"] == 6
    sheets = [open_image(path) for path in (folder / "grids").rglob("*.png")]
    panels = [panel for sheet in sheets for panel in split(sheet, parse_layout("2x2"))]
    assert len(panels) == 24
    assert sum(seen is not None for seen in Oracle().read(panels)) >= 20


def test_a_policy_paints(folder):
    """A random FLUX of the tiny kind through the engine's loop, base and with an adapter."""
    import torch

    from pacorl.data.characters import vocabulary
    from pacorl.dataset.painter import policy_painter
    from pacorl.lora.adapters import adapter_state, add_lora
    from pacorl.lora.formats import save_lora
    from pacorl.policies.flux import FluxPolicy
    from pacorl.twins import tiny_flux
    from pacorl.types import Size

    torch.manual_seed(0)
    checkpoint, adapter = folder / "flux", folder / "adapter"
    pipeline = tiny_flux(vocabulary())
    torch.nn.init.normal_(pipeline.transformer.proj_out.weight, std=0.1)
    pipeline.save_pretrained(checkpoint)
    policy = FluxPolicy(pipeline, guidance=3.5, max_sequence_length=64)
    targets = ["proj_out"]
    add_lora(policy.transformer, rank=2, alpha=4, targets=targets)
    state = {name: torch.randn_like(value) for name, value in adapter_state(policy.transformer).items()}
    save_lora(adapter, state, rank=2, alpha=4, targets=targets)

    options = {"size": Size(32, 32), "steps": 2, "dtype": "float32"}
    paint, named = policy_painter(str(checkpoint), **options)
    assert generate(folder, paint, generator=named, grids=2)["missing"] == 0
    base = pixels(folder)
    paint, named = policy_painter(str(checkpoint), adapter=str(adapter), **options)
    assert generate(folder, paint, generator=named, grids=2)["painted"] == 6
    tuned = pixels(folder)
    assert all(base[name] != tuned[name] for name in base)
    diffusers = adapter / "pytorch_lora_weights.safetensors"
    paint, named = policy_painter(str(checkpoint), adapter=str(diffusers), **options)
    assert generate(folder, paint, generator=named, grids=2)["painted"] == 6, "another file, another generator"
    assert pixels(folder) == tuned


def test_every_kind_of_policy_paints(tmp_path):
    """Qwen-Image-Edit has no distilled guidance and no text length to be told."""
    from edit_twins import edit, picture, qwen_pipeline

    from pacorl.dataset.painter import policy_painter
    from pacorl.types import Size

    qwen_pipeline().save_pretrained(tmp_path / "qwen")
    prompt = edit(picture(tmp_path / "source.png", height=64, width=64))
    options = {"kind": "qwen_edit", "size": Size(64, 64), "steps": 2, "dtype": "float32"}
    paint, named = policy_painter(str(tmp_path / "qwen"), **options)
    assert "guidance" not in named
    assert "max_sequence_length" not in named
    (image,) = paint([prompt], [0])
    assert image.size == (64, 64)
    hasty, _ = policy_painter(str(tmp_path / "qwen"), **{**options, "steps": 1})
    with pytest.raises(ValueError, match=r"1 sampling step is too few.* at least 2 steps"):
        hasty([prompt], [0])
    with pytest.raises(ValueError, match=r"qwen_edit has no distilled guidance.*leave guidance out"):
        policy_painter(str(tmp_path / "qwen"), guidance=2.5, **options)
