"""The scores of each site's personal model at every site, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from collegium.evaluation.results import read_rows, results_frame
from collegium.evaluation.scores import final_scores, site_means, unit_of, variations
from collegium.evaluation.tables import MethodTable, table_of_means

if TYPE_CHECKING:
    import pandas as pd

CROSS_SITE_FILE = "cross-site.jsonl"
"""The name of the file of these scores in the output folder of a run."""

NOTE = (
    "A row is the personal model of one site, a column the test cases of one site; a site's own "
    "model at home stands where both have its name."
)
"""The note below these tables."""


def model_of(site: str) -> str:
    """Return the column `model` of the personal model of a site."""
    return f"personal of {site}"


def read_cross_site(output: Path) -> pd.DataFrame:
    """Read the scores of a run; no rows if there are none.

    Args:
        output: The output folder of a run.

    Raises:
        StorageError: The file is damaged.
    """
    path = output / CROSS_SITE_FILE
    return read_rows([path]) if path.exists() else results_frame([])


def cross_site_tables(scores: pd.DataFrame, order: Sequence[str] = ()) -> list[MethodTable]:
    """Return the tables of all metrics and settings: rows models, columns sites.

    Args:
        scores: The scores, see `read_cross_site`.
        order: Labels of the algorithms in the order wanted; the others follow by name.
    """
    tables = []
    for metric in dict.fromkeys(final_scores(scores)["metric"]):
        for name in variations(scores):
            own = final_scores(scores, metric, variation=name)
            table = table_of_means(site_means(own), metric, unit_of(own), order)
            tables.append(replace(table, variation=name, notes=(NOTE,)))
    return [table for table in tables if table.methods]
