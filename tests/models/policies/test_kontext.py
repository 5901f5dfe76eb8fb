"""FLUX.1-Kontext: what an edit's size means."""

import math
from pathlib import Path

import pytest
import torch
from edit_twins import edit, kontext_pipeline, source_image
from safetensors.torch import save_file

from pacorl.models.policies import kind_of
from pacorl.models.policies.kontext import KONTEXT, KontextPolicy
from pacorl.models.policies.spec import PolicySpec
from pacorl.types import Size


@pytest.fixture(scope="module")
def kontext() -> KontextPolicy:
    return KONTEXT.over(
        kontext_pipeline(), guidance_scale=2.5, max_sequence_length=48, true_cfg_scale=3.0, negative_prompt="night"
    )


@pytest.mark.parametrize(("height", "width"), [(64, 64), (700, 300), (1080, 1920)])
def test_a_size_is_an_area_in_the_source_s_shape(
    kontext: KontextPolicy, tmp_path: Path, height: int, width: int
) -> None:
    path = source_image(tmp_path / "source.png", height=height, width=width)
    size = kontext.size_of(edit(path), Size(512, 512))
    assert size.height % kontext.token_pixels == size.width % kontext.token_pixels == 0
    assert math.isclose(size.height * size.width, 512 * 512, rel_tol=0.05)
    assert math.isclose(size.width / size.height, width / height, rel_tol=0.12)


@pytest.mark.parametrize(("height", "width"), [(100, 300), (300, 100)])
def test_a_source_longer_than_every_shape_is_refused(
    kontext: KontextPolicy, tmp_path: Path, height: int, width: int
) -> None:
    path = source_image(tmp_path / "source.png", height=height, width=width)
    with pytest.raises(ValueError, match=f"{path} is {height}x{width}"):
        kontext.size_of(edit(path), Size(512, 512))


def test_a_single_file_as_comfyui_has_it_is_the_transformer_beside_the_published_parts(
    kontext: KontextPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kontext.pipeline.save_pretrained(tmp_path / "published")
    monkeypatch.setattr(PolicySpec, "published", str(tmp_path / "published"))
    file = tmp_path / "flux1-dev-kontext_fp8.safetensors"
    changed = {name: value.to(torch.float8_e4m3fn) for name, value in kontext.transformer.state_dict().items()}
    save_file(changed, file)
    assert kind_of(str(file)) == "kontext"
    loaded = KONTEXT.load(KONTEXT.options_for(str(file), dtype="float32", max_sequence_length=48))
    for name, value in loaded.transformer.state_dict().items():
        assert torch.equal(value, changed[name].float())

    save_file(changed | {"double_blocks.0.scale_weight": torch.ones(1)}, file)
    with pytest.raises(ValueError, match=r"kontext_fp8\.safetensors has scaled fp8 weights"):
        KONTEXT.load(KONTEXT.options_for(str(file), dtype="float32"))
