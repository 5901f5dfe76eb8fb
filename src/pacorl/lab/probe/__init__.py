"""Shares of a reward's variance that a run can learn from: `pacorl probe CONFIG` (docs/probe.md)."""
