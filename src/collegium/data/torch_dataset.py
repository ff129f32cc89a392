"""Reads datasets of PyTorch as a site's data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import data

from collegium.core.dataset import Batch, Dataset, Example, join
from collegium.core.randomness import ambient
from collegium.errors import DataError


class TorchDataset:
    """A dataset of PyTorch as one split of a site.

    An item is a pair of image and label, or a mapping with ``image`` and ``label`` and, optionally,
    ``mask`` (the field of view), ``case`` and ``patient``. Images are ``(C, *spatial)`` or
    ``(features,)``, labels a class, a number or a label map ``(*spatial)`` or ``(1, *spatial)``.
    Random transforms of the dataset may use torch's global generator, which is seeded around every
    item, so that an item depends on its own name alone; a whole case (`example`) is always drawn
    with the same seed.

    Args:
        dataset: a map-style dataset, which has a length and an item for every index.
    """

    def __init__(self, dataset: data.Dataset[Any]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def batch(self, indices: Sequence[int], rngs: Sequence[torch.Generator]) -> Batch:
        """Return some items as a batch.

        Args:
            indices: which items.
            rngs: one generator for each, from which its random transforms are seeded.

        Raises:
            DataError: an item has another form, or their shapes differ.
        """
        samples = []
        for index, rng in zip(indices, rngs, strict=True):
            seed = int(torch.randint(2**62, (), generator=rng))
            samples.append(self._item(index, seed)[0])
        return join(samples)

    def example(self, index: int) -> Example:
        """Return one whole case.

        Raises:
            DataError: the item has another form.
        """
        sample, names = self._item(index, 0)
        case = str(names.get("case", index))
        return Example(case, str(names.get("patient", case)), sample, None)

    def _item(self, index: int, seed: int) -> tuple[Batch, Mapping[str, Any]]:
        """Return an item as a batch of one, and what it is called."""
        with ambient(seed, "item", index):
            item = self._dataset[index]
        if not isinstance(item, Mapping):
            if not isinstance(item, Sequence) or len(item) != 2:
                raise DataError(
                    f"item {index} of a dataset is a {type(item).__name__}; let it be a pair of "
                    f"image and label, or a mapping with the keys image and label"
                )
            item = {"image": item[0], "label": item[1]}
        if not {"image", "label"} <= item.keys():
            raise DataError(
                f"item {index} of a dataset has the keys {', '.join(map(str, item))}; let it have "
                f"image and label"
            )
        image = torch.as_tensor(item["image"]).float()
        sample = {"image": image, "label": _label(item["label"], image)}
        if "mask" in item:
            sample["mask"] = _without_channel(torch.as_tensor(item["mask"]), image).bool()
        return {key: value[None] for key, value in sample.items()}, item


def _label(label: Any, image: Tensor) -> Tensor:
    """Return a label as torch's losses take it: whole numbers as int64, others as float32."""
    found = _without_channel(torch.as_tensor(label), image)
    return found.float() if found.is_floating_point() else found.long()


def _without_channel(found: Tensor, image: Tensor) -> Tensor:
    """Return a map ``(1, *spatial)`` without its channel axis; anything else as it is."""
    is_map = image.ndim > 1 and found.ndim == image.ndim and len(found) == 1
    return found[0] if is_map else found


def as_dataset(found: Dataset | data.Dataset[Any]) -> Dataset:
    """Return a split of a site: a `Dataset` as it is, a dataset of PyTorch as a `TorchDataset`."""
    return found if hasattr(found, "example") else TorchDataset(found)  # type: ignore[return-value]
