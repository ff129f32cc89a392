"""Measurements of a federation: its data before training, and its features during it."""
