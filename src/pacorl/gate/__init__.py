"""The gate: scores of sets of images, a verdict after controls, and a judge's calibration."""
