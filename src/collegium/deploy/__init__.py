"""Trained models applied to new cases: as they are, or adapted to a hospital outside."""

from collegium.deploy.adapting import adapt_folder
from collegium.deploy.bundles import export_bundle
from collegium.deploy.models import Choice, OpenedModels, open_model, open_models
from collegium.deploy.predicting import predict_folder

__all__ = [
    "Choice",
    "OpenedModels",
    "adapt_folder",
    "export_bundle",
    "open_model",
    "open_models",
    "predict_folder",
]
