"""The node form's gradients are the sample form's: for every tree, twin, precision and number of processes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import worlds
from edit_twins import source_image
from node_gradients import DTYPES, PATHS, TREES, TWINS, World, node_gradients, sample_gradients, save_node_gradients

TOLERANCE = {"fp32": 1e-5, "fp64": 1e-12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the source of the edits."""
    folder = tmp_path_factory.mktemp("gradients")
    source_image(folder / "source.png", height=32, width=32)
    return folder


@cache
def save_two_processes(folder: Path, dtype: str) -> None:
    """Put the gradients of two processes into the folder."""
    worlds.run(save_node_gradients, folder, dtype, world=2)


@cache
def world(twin: str, dtype: str, folder: Path) -> World:
    return World(twin, dtype, folder)


@cache
def reference(twin: str, dtype: str, tree: str, folder: Path) -> dict[str, torch.Tensor]:
    return dict(sample_gradients(world(twin, dtype, folder), TREES[tree]))


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative, by norms."""
    return float((ours - theirs).norm() / theirs.norm())


# `test_update.py` compares the same gradients of the toy generator in every check. FLUX in fp64, held a million times
# tighter than fp32, stands for the rest, which is left to `make nightly`.
CASES = [
    pytest.param(twin, dtype, marks=pytest.mark.slow if (twin, dtype) == ("flux", "fp64") else pytest.mark.nightly)
    for twin in TWINS
    for dtype in DTYPES
]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("twin", "dtype"), CASES)
def test_one_process(folder: Path, twin: str, dtype: str, tree: str) -> None:
    ours = node_gradients(world(twin, dtype, folder), TREES[tree])
    for objective in PATHS:
        assert difference(ours[objective], reference(twin, dtype, tree, folder)[objective]) < TOLERANCE[dtype]


@pytest.mark.nightly
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("twin", "dtype"), CASES)
def test_two_processes(folder: Path, twin: str, dtype: str, tree: str) -> None:
    """Also of a node whose samples lie on both of them."""
    save_two_processes(folder, dtype)
    ours = torch.load(folder / f"{twin}-{dtype}-{tree}.pt", weights_only=True)
    for objective in PATHS:
        assert difference(ours[objective], reference(twin, dtype, tree, folder)[objective]) < TOLERANCE[dtype]
