"""Cases that a model is applied to, and what is written of its predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from collegium.config import ExperimentConfig
from collegium.data.cache import PreparedCase
from collegium.data.dataset import Example
from collegium.data.formats import write_mask
from collegium.data.site import Case
from collegium.errors import DataError
from collegium.outcome import plane_of
from collegium.report.account import Picture
from collegium.report.overlays import draw_overlay


def check_channels(prepared: Sequence[PreparedCase], config: ExperimentConfig) -> None:
    """Refuse images that the network cannot take, before it meets them.

    Raises:
        DataError: An image has other channels than those that the model was trained on.
    """
    wanted = config.model.params.get("in_channels")
    for case in prepared:
        if wanted is not None and case.shape[0] != wanted:
            raise DataError(
                f"case {case.case}: its image has {case.shape[0]} channels, and the models were "
                f"trained on {wanted}; export it as the others were, or leave it out"
            )


def write_prediction(
    case: Case, prepared: PreparedCase, prediction: Tensor, folder: Path, classes: tuple[str, ...]
) -> Path:
    """Write the mask of a case on the grid of its image.

    Args:
        case: The case, with its files.
        prepared: The same case as the network gets it.
        prediction: Classes (1, *spatial), or (slices, rows, columns) of a volume in slices.
        folder: Where to write.
        classes: Names of the classes.

    Returns:
        The path.
    """
    labels = prediction.cpu().numpy()
    sliced = len(prepared.shape) == 4 and labels.ndim == 3
    whole = np.moveaxis(labels, 0, -1) if sliced else labels[0]
    return write_mask(whole, case.images[0], folder, case.case, classes=classes, series=case.series)


def draw_case(
    caption: str,
    example: Example,
    prediction: Tensor,
    scores: Mapping[str, float | None],
    metric: str,
) -> Picture:
    """Draw a plane of a case, with its score in the caption where it has one."""
    drawn = draw_overlay(*plane_of(example, prediction))
    if scores:
        value = scores.get(metric)
        caption += f": {metric} {'undefined' if value is None else f'{value:.3f}'}"
    return Picture(caption, drawn)
