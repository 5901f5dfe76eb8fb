"""FLUX.1-Kontext: what an edit's size means."""

import math
from pathlib import Path

import pytest
from edit_twins import edit, kontext_pipeline, source_image
from PIL import Image

from pacorl.models.policies.kontext import KONTEXT, KontextPolicy
from pacorl.types import Size


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
