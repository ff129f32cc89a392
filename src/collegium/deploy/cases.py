"""Cases that a model is applied to, and what is written of its predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from collegium.core.dataset import Dataset
from collegium.core.randomness import ambient
from collegium.data.cache import PreparedCase, prepare
from collegium.data.columns import SUFFIXES
from collegium.data.federation import task_of_site, wording_of
from collegium.data.federation_config import site_channels
from collegium.data.formats import write_mask
from collegium.data.sampling import ImageDataset
from collegium.data.site import Case
from collegium.data.table_site import rows_to_predict
from collegium.data.tables import read_table
from collegium.data.unlabelled import is_file_name, list_images
from collegium.deploy.models import OpenedModels
from collegium.errors import ConfigError, DataError
from collegium.experiment.federation import cache_folder

_SIDE = 128
"""Of the images by which a network is asked, a multiple of what networks divide sizes by."""

_KINDS = {2: "picture", 3: "volume"}
"""What images are called by their number of spatial axes."""


@dataclass(frozen=True)
class Cases:
    """The cases to predict; all of them have a label, or none has.

    Attributes:
        names: Names of the cases.
        data: The cases as the network gets them.
        files: The cases as found; None if they get no masks.
    """

    names: Sequence[str]
    data: Dataset
    files: Sequence[Case] | None = None

    @property
    def labelled(self) -> bool:
        """Whether the predictions can be scored."""
        if self.files is None:
            return "label" in self.data.example(0).batch
        return self.files[0].label is not None


def open_cases(opened: OpenedModels, place: Path, labels: Path | None, *, site: str = "") -> Cases:
    """Find and prepare the cases that models are applied to.

    Args:
        opened: The models.
        place: Images as `collegium.data.unlabelled.list_images` finds them, or a table if the
            models learnt from tables.
        labels: A folder of masks.
        site: The site whose own model it is, which expects the site's channels and labels.

    Raises:
        ConfigError: Labels are given where none can be, or tables and images are mixed up.
        DataError: A case cannot be used.
    """
    federation, task = opened.config.federation, opened.config.federation.task
    masks = task.name == "segmentation"
    if labels is not None and not masks:
        raise ConfigError("a folder of labels scores segmentations only; leave it out")
    if federation.table is not None:
        if place.suffix.lower() not in SUFFIXES:
            raise ConfigError(
                f"{place}: the model learnt from tables; name a table ({', '.join(SUFFIXES)})"
            )
        words = wording_of(federation, site)
        table = read_table(place, federation.table, labelled=False, wording=words)
        rows = rows_to_predict(table, federation.table, task, opened.scaling)
        return Cases(table.cases, rows)
    cases, problems = list_images(place, labels, masks=masks)
    if problems:
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise DataError(f"{problems[0]}{more}")
    if site in federation.sites:
        task, own = task_of_site(federation, site), site_channels(federation, site)
        cases = [replace(case, channels=case.channels or own) for case in cases]
    prepared = [prepare(case, federation.image, task, cache_folder()) for case in cases]
    _check_images(prepared, opened)
    names = [case.case for case in cases]
    return Cases(names, ImageDataset(prepared, federation.sampling), cases if masks else None)


def _check_images(prepared: Sequence[PreparedCase], opened: OpenedModels) -> None:
    """Refuse images with other axes or channels than those that the models were trained on."""
    sampling = opened.config.federation.sampling
    slices = 2 * sampling.neighbours + 1
    with ambient(0, "cases"):
        network = opened.network().eval().to("meta")
    said = opened.config.model.params.get("in_channels")
    found = {
        (image.shape[0], min(len(image.shape[1:]), len(sampling.crop or image.shape))): image.case
        for image in reversed(prepared)  # volumes are cut into slices where the crop has two axes
    }
    for (channels, axes), case in found.items():
        wanted, of = _wanted(network, said or channels * slices, axes)
        if axes != of:
            raise DataError(
                f"case {case}: its image is a {_KINDS[axes]}, and the models were trained on "
                f"{_KINDS[of]}s; give {_KINDS[of]}s, or choose models that learnt from "
                f"{_KINDS[axes]}s"
            )
        wanted = said or wanted
        if channels * slices != wanted:
            raise DataError(
                f"case {case}: its image has {channels} channels, and the models were trained on "
                f"{wanted // slices}; export it as the others were, or leave it out"
            )


def _wanted(network: nn.Module, channels: int, axes: int) -> tuple[int, int]:
    """Return how many channels and spatial axes a network on the device "meta" takes.

    It is asked whether it takes so many, or as many as one of its convolutions. Where it does not
    tell, it is taken to take so many.
    """
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    layers = [module for module in network.modules() if isinstance(module, kinds)]
    others = dict.fromkeys((layer.in_channels, len(layer.kernel_size)) for layer in layers)
    asked = [(channels, axes), *((channels, of) for of in _KINDS), *others]
    # A layer takes an image without the axis of the batch too: no batch is as many as its channels.
    batch = next(n for n in count(1) if all(n != of for of, _ in others))
    fits = (pair for pair in asked if pair[1] in _KINDS and _takes(network, batch, *pair))
    return next(fits, (channels, axes))


def _takes(network: nn.Module, batch: int, channels: int, axes: int) -> bool:
    try:
        with torch.no_grad():
            network(torch.empty(batch, channels, *[_SIDE] * axes, device="meta"))
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
        whole = np.moveaxis(whole, -1, prepared.slice_axis)
    return write_mask(whole, case.images[0], folder, case.case, classes=classes, series=case.series)
