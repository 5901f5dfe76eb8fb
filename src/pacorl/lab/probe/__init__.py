"""What a run would learn from, measured before it is run: `pacorl probe CONFIG` (docs/probe.md)."""
