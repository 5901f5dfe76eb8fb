"""Contracts of the tables' entries, as checks for new entries, in this package and outside.

    from pacorl.testing import check_objective

    def test_my_objective():
        check_objective(MINE)

Each check raises AssertionError with the fault. They need no test framework, no weights and no network.
"""

from __future__ import annotations

from pacorl.testing.benchmarks import check_benchmark
from pacorl.testing.objectives import check_objective
from pacorl.testing.policies import check_policy, check_spec
from pacorl.testing.rewards import check_reward

__all__ = ["check_benchmark", "check_objective", "check_policy", "check_reward", "check_spec"]
