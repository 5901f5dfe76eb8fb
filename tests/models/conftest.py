"""Random tiny models: the real classes, weights that no test depends on."""

import pytest
from edit_twins import flux_policy

from pacorl.models.policies.flux import FluxPolicy


@pytest.fixture(scope="session")
def flux() -> FluxPolicy:
    """A tiny FLUX whose output depends on everything."""
    return flux_policy()
