"""LoRA adapters: adding, fusing, copying, and every file format they come in."""
