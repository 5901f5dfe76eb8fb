"""PaCo-GRPO: reinforcement learning of generators from consistency rewards."""
