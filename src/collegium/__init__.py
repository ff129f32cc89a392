"""Hospitals train models together, and each ends up with one that is good for its own patients."""

__version__ = "0.1.0"
