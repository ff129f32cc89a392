"""From the rows of a site's table to a `Site`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from collegium.core.dataset import TensorDataset
from collegium.core.lazy import torch
from collegium.data.discovery import SPLIT_NAMES
from collegium.data.settings import TaskConfig
from collegium.data.site import Case, EgressPolicy, Site
from collegium.data.splits import SPLITS
from collegium.data.tables import (
    MISSING,
    Scaling,
    Table,
    TableConfig,
    describe_columns,
    encode,
)
from collegium.errors import DataError

logger = logging.getLogger(__name__)


def table_cases(site: str, table: Table) -> list[Case]:
    """Return the rows of a table as cases.

    Args:
        site: The site's name.
        table: Its rows.

    Raises:
        DataError: A row has an unknown split.
    """
    words = table.splits or [""] * len(table.cases)
    splits = [SPLIT_NAMES.get(word.lower()) for word in words]
    if None in splits and any(words):
        row = splits.index(None) + 1
        raise DataError(f"site {site}, row {row}: the split is unknown: write train, val or test")
    return [
        Case(site, case, patient, (), None, split=split, target=target, stated=table.stated)
        for case, patient, split, target in zip(
            table.cases, table.patients, splits, table.targets, strict=True
        )
    ]


def open_table_site(
    name: str,
    table: Table,
    splits: Mapping[str, str],
    settings: tuple[TableConfig, TaskConfig],
    policy: EgressPolicy,
    *,
    unlabelled: Collection[str] = (),
) -> Site:
    """Build a site from its table.

    Args:
        name: The site.
        table: Its rows.
        splits: The split of every case that has a class.
        settings: The columns and the classes.
        policy: What may leave the site.
        unlabelled: The cases without a class that are kept apart.

    Raises:
        DataError: A row has no class or an unknown one, or there is no training row to scale by.
    """
    config, task = settings
    targets = _classes(table, task, f"site {name}, ", splits)
    of_split = np.array([splits.get(case, "") for case in table.cases])
    check_training_rows(name, of_split, config)
    scaling = _scaling(table, config, of_split == "train")
    rows = encode(table, config, scaling)
    for note in table.notes:
        logger.info("site %s: %s", name, note)
    datasets = []
    for split in SPLITS:
        chosen = np.flatnonzero(of_split == split)
        arrays = {"image": rows[chosen], "label": targets[chosen]}
        inputs = {key: torch.from_numpy(values) for key, values in arrays.items()}
        ids = [[names[index] for index in chosen] for names in (table.patients, table.cases)]
        datasets.append(TensorDataset(inputs, *ids))
    train_set, val_set, test_set = datasets
    own = scaling if config.scale == "site" else None
    chosen = np.flatnonzero([case in unlabelled for case in table.cases])
    ids = [[names[index] for index in chosen] for names in (table.patients, table.cases)]
    apart = TensorDataset({"image": torch.from_numpy(rows[chosen])}, *ids)
    return Site(name, train_set, val_set, test_set, policy, own, unlabelled=apart)


def check_training_rows(name: str, splits: Collection[str], config: TableConfig) -> None:
    """Check that a site has training rows if its numbers are scaled by them.

    Args:
        name: The site.
        splits: The splits of its rows.
        config: The columns.

    Raises:
        DataError: It has none.
    """
    if config.scale == "site" and "train" not in splits:
        raise DataError(
            f"site {name} has no training cases to scale its numbers by; add some, or set "
            f"table.scale to federation"
        )


def rows_to_predict(
    table: Table, config: TableConfig, task: TaskConfig, scaling: Scaling | None = None
) -> TensorDataset:
    """Return the rows of a table as a dataset for prediction, with their classes if all have one.

    Args:
        table: The rows.
        config: The columns.
        task: The classes.
        scaling: The scaling that the site uses, if sites scale by themselves; None: by the mean and
            the standard deviation, or the range, of these rows.

    Raises:
        DataError: All rows have a class, and one is unknown; or there is a single row, which has
            neither a standard deviation nor a range to be scaled by.
    """
    if config.scale == "site" and config.numeric and scaling is None:
        by = "mean and deviation" if config.scale_by == "deviation" else "range"
        if len(table.cases) == 1:
            raise DataError(
                f"the table holds one row, which cannot be scaled by its own {by}: "
                "predict with a site's own model (--site), which knows the site's, or add rows"
            )
        logger.warning(
            "%d rows are scaled by their own %s, so that the prediction for one "
            "depends on the others; a site's own model (--site) knows the site's",
            len(table.cases),
            by,
        )
    if config.scale != "site" or scaling is None:
        scaling = _scaling(table, config, np.ones(len(table.cases), bool))
    rows = encode(table, config, scaling)
    inputs = {"image": torch.from_numpy(rows)}
    if all(task.find_class(w) is not None or w.lower() not in MISSING for w in table.targets):
        inputs["label"] = torch.from_numpy(_classes(table, task, "", table.cases))
    return TensorDataset(inputs, table.patients, table.cases)


def _classes(
    table: Table, task: TaskConfig, where: str, cases: Collection[str]
) -> NDArray[np.int64]:
    """Return the class of every row that is among the cases, and -1 for others."""
    words = enumerate(zip(table.cases, table.targets, strict=True), start=1)
    return np.array([
        task.class_of(word, f"{where}row {row}", row=True) if case in cases else -1
        for row, (case, word) in words
    ])  # fmt: skip


def _scaling(table: Table, config: TableConfig, train: NDArray[np.bool_]) -> Scaling | None:
    """Return a site's scaling of its numbers; None if the sites determine one together."""
    if config.scale == "federation":
        return None
    if config.scale == "none":
        width = len(config.numeric)
        return Scaling(np.zeros(width), np.ones(width))
    return describe_columns(table.numbers[train], config).scaling()
