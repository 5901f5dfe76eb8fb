"""Recipes: the configs that ship with the package, by name.

    recipe("flux_t2is_24gb")

A recipe of another training than PaCo-GRPO has its folder in its name: `reward/tiny` trains a judge, `character/tiny`
a character's LoRA. Each file begins with a comment `# CARD: PURPOSE.`.
"""

import re
from pathlib import Path

from pacorl.io.terminal import did_you_mean

YAML = (".yaml", ".yml")
"""Endings of a config's file."""
FOLDERS = ("character", "reward")
"""Recipes of train-character and of train-reward; those outside these folders are train-policy's."""


def recipe(name: str = "tiny") -> Path:
    """Return the file of a recipe."""
    return _folder() / f"{name}.yaml"


def recipe_names() -> list[str]:
    """List the recipes, generators first."""
    folder = _folder()
    files = sorted(folder.glob("*.yaml"))
    for name in FOLDERS:
        files += sorted(folder.glob(f"{name}/*.yaml"))
    return [file.relative_to(folder).with_suffix("").as_posix() for file in files]


def config_file(source: str | Path) -> Path:
    """Find the file of a config named by a path or by a recipe; a file wins over a recipe of its name.

    Raises:
        ValueError: there is neither; the message suggests a recipe.
    """
    # A recipe has no suffix, so a name with one is a file.
    source = Path(source)
    name = source.as_posix()
    if source.suffix in YAML or source.is_file():
        return source
    if name in recipe_names():
        return recipe(name)

    hint = f"{did_you_mean(name, recipe_names())} `pacorl recipes` lists them".strip()
    raise ValueError(f"{name}: there is no such file and no recipe of that name; {hint}")


def read_header(path: Path) -> tuple[str, str]:
    """Read a recipe's leading comment: its card, and the first sentence about its purpose."""
    comment = re.match(r"(?:#.*\S.*\n)*", path.read_text("utf-8"))
    assert comment is not None, "no line matches too"
    card, _, purpose = " ".join(comment[0].replace("#", " ").split()).partition(": ")
    return card, purpose.partition(". ")[0].removesuffix(".")


def _folder() -> Path:
    """Find the recipes: inside the package in a wheel, next to src/ in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    if inside.is_dir():
        return inside
    return package.parents[1] / "configs"
