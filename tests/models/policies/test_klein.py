"""FLUX.2-klein: sizes of edits and sources, distilled checkpoints, and texts that are cut."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from edit_twins import klein_pipeline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from pacorl.models.policies.klein import KLEIN, KleinPolicy
from pacorl.types import Prompt, Size

TOKENS = 144


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return klein_pipeline()


@pytest.fixture(scope="module")
def klein(pipeline: Any) -> KleinPolicy:
    return over(pipeline)


def over(pipeline: Any, **options: Any) -> KleinPolicy:
    policy = KLEIN.over(pipeline, max_sequence_length=TOKENS, **options)
    assert isinstance(policy, KleinPolicy)
    return policy


def test_a_distilled_klein_generates_and_is_not_trained(tmp_path: Path) -> None:
    index = {"_class_name": "Flux2KleinPipeline", "is_distilled": True}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert KLEIN.check_source(str(tmp_path)) == str(tmp_path)
    with pytest.raises(ValueError, match=r"is distilled to few steps .* train black-forest-labs/FLUX\.2-klein-base-4B"):
        KLEIN.check_trainable(str(tmp_path))
    for name in ("black-forest-labs/FLUX.2-klein-9B", "black-forest-labs/flux.2-klein-9b"):
        with pytest.raises(ValueError, match=r"train black-forest-labs/FLUX\.2-klein-base-9B"):
            KLEIN.check_trainable(name)
    KLEIN.check_trainable(KLEIN.published)
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"is_distilled": False}))
    KLEIN.check_trainable(str(tmp_path))


SIDE = st.integers(64, 1500)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.tuples(SIDE, SIDE).filter(lambda sides: max(sides) <= 8 * min(sides)), min_size=1, max_size=4),
    size=st.builds(
        Size, st.integers(4, 96).map(lambda rows: 16 * rows), st.integers(4, 96).map(lambda cols: 16 * cols)
    ),
    edits=st.booleans(),
)
def test_sizes_of_sources_and_references_are_the_pipeline_s(
    klein: KleinPolicy, tmp_path: Path, shapes: list[tuple[int, int]], size: Size, edits: bool
) -> None:
    """The pipeline's rule for a source beyond 1024², at the area of the image; its root in floats may lose a pixel."""
    paths = []
    for number, (height, width) in enumerate(shapes):
        paths.append(tmp_path / f"{height}x{width}-{number}.png")
        Image.new("RGB", (width, height)).save(paths[-1], compress_level=0)
    prompt = Prompt(0, "A crown.", **{"sources" if edits else "references": tuple(paths)})
    asked, size = size, klein.size_of(prompt, size)
    assert size.height * size.width <= asked.height * asked.width, "beyond the memory that was planned"
    area = min(size.height * size.width, 1024 * 1024)
    expected = []
    for path in paths:
        image = Image.open(path)
        resized = klein.pipeline.image_processor._resize_to_target_area(image, area)
        exact = math.isqrt(area * image.width // image.height), math.isqrt(area * image.height // image.width)
        assert all(side - pixels in (0, 1) for side, pixels in zip(exact, resized.size, strict=True))
        token = klein.pipeline.vae_scale_factor * 2
        expected.append(Size(max(exact[1] // token, 1) * token, max(exact[0] // token, 1) * token))
    if edits and size.height * size.width <= 1024 * 1024:
        expected[0] = size

    shown = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(klein, "encode_image", lambda image, side: shown.append(side) or torch.zeros(1, 1, 1))
        ids = klein.encode_sources(prompt, size)["source_ids"][0]
    assert shown == expected
    grids = [klein.token_grid(side) for side in shown]
    assert len(ids) == sum(rows * cols for rows, cols in grids)
    for number, (rows, cols) in enumerate(grids, 1):
        of_image = ids[ids[:, 0] == 10 * number]
        assert (of_image[:, 1].max() + 1, of_image[:, 2].max() + 1, len(of_image)) == (rows, cols, rows * cols)
