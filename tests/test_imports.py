"""What a start of the package imports; the layers of packages are contracts of import-linter in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pacorl

HEAVY = ("torch", "pydantic", "numpy", "PIL", "diffusers", "transformers", "nicegui", "fastapi")
SHARDING = ("torch.distributed.fsdp", "torch.distributed.tensor")
"""They take a second of each start, and two processes or more alone need them."""


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        pytest.param("import pacorl; dir(pacorl)", HEAVY, id="package"),
        pytest.param("import typer, pacorl.cli; typer.main.get_command(pacorl.cli.app)", HEAVY, id="commands"),
        pytest.param("from pacorl import PolicyConfig, load_prompts", HEAVY[:1], id="config", marks=pytest.mark.slow),
        pytest.param(
            "import pacorl.grpo.trainer, pacorl.generate.generator, pacorl.judge.local",
            SHARDING,
            id="loops",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_start_imports_nothing_that_it_does_not_need(code: str, absent: tuple[str, ...]) -> None:
    code = f"import sys; {code}; print(*sorted(sys.modules.keys() & set({absent})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_lazy_exports_resolve() -> None:
    from pacorl.records.prompts import load_prompts

    assert pacorl.load_prompts is load_prompts
    assert {"Generator", "PolicyTrainer", *pacorl.__all__} <= set(dir(pacorl))
    with pytest.raises(AttributeError, match="no attribute 'load_promts'"):
        pacorl.load_promts  # noqa: B018
