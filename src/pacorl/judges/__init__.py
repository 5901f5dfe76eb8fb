"""Judges of image pairs behind one seam."""
