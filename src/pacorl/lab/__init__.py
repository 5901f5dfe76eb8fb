"""Tools around a run: plan and doctor."""
