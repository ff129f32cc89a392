"""Tracking of experiments in MLflow, an optional extra; nothing is imported before it is used."""

from collegium.experiment.tracking.tracker import Tracker as Tracker
