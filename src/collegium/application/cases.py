"""Cases that a model is applied to, and what is written of its predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from collegium.application.models import Handed
from collegium.data.cache import PreparedCase
from collegium.data.dataset import Example
from collegium.data.formats import write_mask
from collegium.data.site import Case
from collegium.data.unlabelled import is_file_name
from collegium.errors import DataError
from collegium.outcome import plane_of
from collegium.randomness import ambient
from collegium.report.account import Picture
from collegium.report.overlays import draw_overlay

_SIDE = 128
"""Of the images by which a network is asked, a multiple of what networks divide sizes by."""


def check_channels(prepared: Sequence[PreparedCase], handed: Handed) -> None:
    """Refuse images that the network cannot take, before it meets them.

    Raises:
        DataError: An image has other channels than those that the model was trained on.
    """
    said = handed.config.model.params.get("in_channels")
    slices = 2 * handed.config.federation.sampling.neighbours + 1
    found = {case.shape[0]: case.case for case in reversed(prepared)}
    for channels, case in found.items():
        wanted = _wanted(handed, channels * slices) if said is None else said
        if channels * slices != wanted:
            raise DataError(
                f"case {case}: its image has {channels} channels, and the models were trained on "
                f"{wanted // slices}; export it as the others were, or leave it out"
            )


def _wanted(handed: Handed, channels: int) -> int:
    """Give how many channels a network takes: so many, or as many as one of its convolutions.

    It is asked without computing anything. Where it does not tell, it is taken to take so many.
    """
    with ambient(0, "channels"):
        network = handed.network().eval().to("meta")
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    convolutions = [module for module in network.modules() if isinstance(module, kinds)]
    others = {module.in_channels: len(module.kernel_size) for module in convolutions}
    axes = next(iter(others.values()), 2)
    if _takes(network, channels, axes):
        return channels
    return next((n for n, axes in others.items() if _takes(network, n, axes)), channels)


def _takes(network: nn.Module, channels: int, axes: int) -> bool:
    try:
        with torch.no_grad():
            network(torch.empty(1, channels, *[_SIDE] * axes, device="meta"))
    except Exception:  # whatever a network of the user's own raises
        return False
    return True


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

    Raises:
        DataError: No file can be called as the case.
        StorageError: The file cannot be written.
    """
    if not is_file_name(case.case):
        raise DataError(f"{case}: no file can be called as it; give it an id without / and \\")
    labels = prediction.cpu().numpy()
    volume = len(prepared.shape) == 4
    whole = np.moveaxis(labels, 0, -1) if volume and labels.ndim == 3 else labels[0]
    if volume:
        whole = np.moveaxis(whole, -1, prepared.across)
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
