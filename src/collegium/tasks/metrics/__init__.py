"""Metrics of predictions, case by case."""
