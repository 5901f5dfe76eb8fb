"""A LoRA of one character from a person's own images, by supervised flow matching."""
