"""LoRA adapters: adding, copying, and every file format they come in."""

ADAPTER = "default"
"""PEFT's name of a model's only adapter."""
