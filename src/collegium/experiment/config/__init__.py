"""Experiment files: their settings, how they are read, and what they name."""
