"""What a run would need, and whether it would run here."""
