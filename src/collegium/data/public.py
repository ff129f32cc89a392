"""Data that the server holds, opened as one dataset."""

import logging
from pathlib import Path

from collegium.core.dataset import ConcatDataset, Dataset, UnlabelledDataset
from collegium.data.cache import prepare
from collegium.data.federation_config import FederationConfig, expand_root
from collegium.data.sampling import ImageDataset
from collegium.data.table_site import rows_to_predict
from collegium.data.tables import read_table
from collegium.data.unlabelled import list_images
from collegium.errors import DataError

logger = logging.getLogger(__name__)


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
    words = "without" if isinstance(data, UnlabelledDataset) else "with"
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
    return data if known else UnlabelledDataset(data)  # decoded masks would be zeros
