"""Data that the server holds, opened as one dataset."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from collegium.core.dataset import Batch, ConcatDataset, Dataset, Example
from collegium.data.cache import prepare
from collegium.data.federation import FederationConfig, expand_root
from collegium.data.sampling import ImageDataset
from collegium.data.table_site import rows_to_predict
from collegium.data.tables import read_table
from collegium.data.unlabelled import list_images
from collegium.errors import DataError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class WithoutLabels:
    """Cases whose samples hold no labels; the decoder gives an image without a mask one of zeros.

    Args:
        data: the cases.
    """

    def __init__(self, data: Dataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, indices: Sequence[int], rngs: Sequence[torch.Generator]) -> Batch:
        """Return samples. See `Dataset.batch`."""
        return _without_label(self._data.batch(indices, rngs))

    def example(self, index: int) -> Example:
        """Return one whole case."""
        found = self._data.example(index)
        return replace(found, batch=_without_label(found.batch))


def _without_label(batch: Batch) -> Batch:
    return {key: tensor for key, tensor in batch.items() if key != "label"}


def open_public(config: FederationConfig, cache: Path) -> Dataset | None:
    """Return the server's public data; None if the federation has none.

    The cases have labels if all of them have one, and none otherwise. They are not split, as
    nothing is scored on them. Where they are elsewhere the dataset is empty.

    Args:
        config: The federation.
        cache: The folder for prepared cases.

    Raises:
        DataError: A file is unusable; the sentence says that it is of the public data.
        StorageError: The cache cannot be written.
    """
    public = config.public
    if public is None:
        return None
    if public.remote:
        return ConcatDataset([])
    try:
        if public.table is not None:
            assert config.table is not None, "checked by FederationConfig"
            path = expand_root(config.root) / public.table
            table = read_table(path, config.table, labelled=False)
            return rows_to_predict(table, config.table, config.task)
        data = _open_images(config, cache)
    except DataError as error:
        raise DataError(f"federation.public: {error}") from error
    words = "without" if isinstance(data, WithoutLabels) else "with"
    logger.info("public: %d cases %s labels", len(data), words)
    return data


def _open_images(config: FederationConfig, cache: Path) -> Dataset:
    root, public = expand_root(config.root), config.public
    assert public is not None
    labels = None if public.labels is None else root / public.labels
    masks = config.task.name == "segmentation"
    cases, problems = list_images(root / str(public.images), labels, masks=masks)
    if problems:
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise DataError(f"{problems[0]}{more}")
    prepared = [prepare(case, config.image, config.task, cache) for case in cases]
    data = ImageDataset(prepared, config.sampling)
    known = all((case.label if masks else case.target) is not None for case in cases)
    return data if known else WithoutLabels(data)
