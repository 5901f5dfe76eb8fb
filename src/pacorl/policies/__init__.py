"""Generators behind one seam."""
