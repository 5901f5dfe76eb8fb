"""Training a judge (PaCo-Reward)."""
