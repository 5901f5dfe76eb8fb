"""Generators, adapters and packed weights."""
