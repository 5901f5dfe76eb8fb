"""Scoring the consistency of images: `pacorl score` and `PacoReward`."""
