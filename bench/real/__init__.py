"""Measurements on model files of the size that people run."""
