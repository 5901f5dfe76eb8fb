"""Tools around a run: plan, doctor, probe and verification."""
