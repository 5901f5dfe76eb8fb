"""Makers of the tiny world: its checkpoints and its stories."""
