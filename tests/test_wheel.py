"""The wheel and the sdist work alone: built here, installed into a fresh environment, run outside the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from tiny_runs import SMALL_QUICKSTART

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, check=True, capture_output=True
    )
    return folder


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `pacorl` of an environment that has the wheel, and of this one the dependencies alone.

    What is installed here stands behind the environment's own packages, and the path of the editable install is not
    read: nothing of the checkout can be imported.
    """
    home = tmp_path_factory.mktemp("alone")
    venv.create(home, with_pip=False)
    (own,) = home.glob("lib/python*/site-packages")
    # A path in a .pth file joins sys.path, and that folder's own .pth files are left unread.
    (own / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    (wheel,) = dist.glob("*.whl")
    python = home / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True)
    return home / "bin" / "pacorl"


def run(pacorl: Path, *words: str | Path, cwd: Path) -> str:
    """Outside the checkout, without its paths."""
    env = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run([pacorl, *words], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
def test_the_wheel_runs_alone(installed: Path, tmp_path: Path) -> None:
    where = [installed.with_name("python"), "-c", "import pacorl; print(pacorl.__file__)"]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    origin = subprocess.run(where, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
    assert Path(origin.strip()).is_relative_to(installed.parents[1]), (
        "the environment's own package, not the checkout's"
    )
    assert "flux_t2is_24gb" in run(installed, "recipes", cwd=tmp_path)
    plan = json.loads(run(installed, "train-policy", "tiny", "--dry-run", "--json", cwd=tmp_path))
    assert plan["absences"] == []
    run(installed, "quickstart", *SMALL_QUICKSTART, cwd=tmp_path)
    assert (tmp_path / "runs/quickstart/before-after.png").is_file()
    images = sorted((tmp_path / "runs/quickstart/samples").rglob("*.png"))
    scores = json.loads(run(installed, "score", images[0], "--grid", "2x2", "--json", "--judge", "tiny", cwd=tmp_path))
    assert scores["judge"] == "tiny"


@pytest.mark.slow
def test_the_wheel_holds_what_the_package_reads_and_no_more(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "src/pacorl", "configs"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    expected = {name.removeprefix("src/") if name.startswith("src/") else f"pacorl/{name}" for name in tracked}
    assert {name for name in names if ".dist-info/" not in name} == expected


@pytest.mark.nightly
def test_the_sdist_holds_what_its_makefile_and_tests_read(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        top = {Path(name).parts[1] for name in archive.getnames()}
    assert {"src", "tests", "configs", "docs", "examples", "Makefile", "mkdocs.yml", "constraints.txt"} <= top
    assert {"README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md", "PKG-INFO"} <= top
