"""FLUX.1-Kontext: what an edit's size means."""

import math
from pathlib import Path

import pytest
import torch
from edit_twins import edit, kontext_pipeline, source_image
from PIL import Image
from tests.twins import tiny_flux

from pacorl.models.policies.kontext import KONTEXT, KontextPolicy
from pacorl.tiny.characters import vocabulary
from pacorl.types import Prompt, Size


@pytest.fixture(scope="module")
def kontext() -> KontextPolicy:
    return KONTEXT.over(
        kontext_pipeline(), guidance_scale=2.5, max_sequence_length=48, true_cfg_scale=3.0, negative_prompt="night"
    )


@pytest.mark.parametrize(("height", "width"), [(64, 64), (480, 640), (640, 480), (300, 700), (1080, 1920)])
def test_a_size_is_an_area_in_the_source_s_shape(
    kontext: KontextPolicy, tmp_path: Path, height: int, width: int
) -> None:
    path = source_image(tmp_path / "source.png", height=height, width=width)
    size = kontext.size_of(edit(path), Size(512, 512))
    assert size.height % kontext.token_pixels == size.width % kontext.token_pixels == 0
    assert math.isclose(size.height * size.width, 512 * 512, rel_tol=0.05)
    assert math.isclose(size.width / size.height, width / height, rel_tol=0.12)


def test_a_photo_s_orientation_counts(kontext: KontextPolicy, tmp_path: Path) -> None:
    path = tmp_path / "phone.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    Image.new("RGB", (150, 100), "red").save(path, exif=exif)
    size = kontext.size_of(edit(path), Size(512, 512))
    assert size.height > size.width


def test_what_cannot_be_generated_is_refused(kontext: KontextPolicy, tmp_path: Path) -> None:
    strip = source_image(tmp_path / "strip.png", height=40, width=200)
    with pytest.raises(ValueError, match=r"strip\.png is 40x200, and the nearest shape .* is 672x1568"):
        kontext.size_of(edit(strip), Size(512, 512))
    with pytest.raises(ValueError, match=r"prompt 7 \('a cat'\) has none"):
        kontext.size_of(Prompt(7, "a cat"), Size(512, 512))
    with pytest.raises(ValueError, match=r"has 2 sources, and model.kind kontext takes 1"):
        kontext.size_of(Prompt(7, "a cat", sources=(strip, strip)), Size(512, 512))
    with pytest.raises(ValueError, match="smaller than one token; give at least 8x8"):
        kontext.check_size(Size(4, 4))


def test_flux_weights_are_no_kontext(kontext: KontextPolicy, tmp_path: Path) -> None:
    """The released recipe loads FLUX.1-dev here: one architecture, so nothing else would notice."""
    tiny_flux(vocabulary()).save_pretrained(tmp_path / "flux")
    with pytest.raises(ValueError, match=r"is a FluxPipeline, and this model\.kind needs a FluxKontextPipeline"):
        KONTEXT.from_pretrained(tmp_path / "flux")
    kontext.pipeline.save_pretrained(tmp_path / "kontext")
    loaded = KONTEXT.from_pretrained(tmp_path / "kontext", max_sequence_length=48)
    saved = kontext.transformer.state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in loaded.transformer.state_dict().items())
