"""Verification of a finished run, from its files and by recomputation."""
