"""The bins of reliability diagrams, of every model at every site whose cases' scores are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from collegium.evaluation.scores import METHOD, SPLITS, final_scores
from collegium.tasks import PROBABILITY, TRUE_CLASS
from collegium.tasks.metrics.calibration import BINS, reliability

if TYPE_CHECKING:
    from collegium.evaluation.pairs import Array

TRAINING = ["variation", "site", *METHOD, "seed", "fold"]
"""The columns that identify a model at a site."""


def reliability_table(
    results: pd.DataFrame, *, bins: int = BINS, classes: Sequence[str] = ()
) -> pd.DataFrame:
    """Return the bins of the reliability diagrams of a run, from the probabilities of test cases.

    Sites that keep the scores of their cases have none: a bin can hold a single patient. Nor has
    an adapter that scores several models, whose probabilities are no single ones.

    Args:
        results: The table of results.
        bins: How many bins divide 0 to 1, as in the expected calibration error.
        classes: The names of the classes; empty if unknown, which gives their numbers.

    Returns:
        A row for each bin that holds a case: the columns of `TRAINING`; where, "inside" or
        "outside"; class, the second of two and each of more; and the attributes of
        `collegium.tasks.metrics.calibration.ReliabilityBin`.
    """
    rows = [
        {"where": where, **about, "class": classes[c] if c < len(classes) else str(c), **found}
        for where in SPLITS
        for about, scores in _models(final_scores(results, where=where, hidden=True))
        for c, found in _bins(scores, bins)
    ]
    columns = ["low", "high", "cases", "share", "confidence", "observed"]
    return pd.DataFrame(rows, columns=["where", *TRAINING, "class", *columns])


def _models(scores: pd.DataFrame) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    """Return whose they are, and by case the patient, class and probabilities, of each model."""
    hidden = scores[scores["metric"].str.fullmatch(rf"{TRUE_CLASS}|{PROBABILITY}\d+")]
    groups: Any = hidden.groupby(TRAINING)
    found = []
    for key, rows in groups:
        table = rows.pivot(index=["case", "patient"], columns="metric", values="value")
        if TRUE_CLASS in table and f"{PROBABILITY}1" in table:
            found.append((dict(zip(TRAINING, key, strict=True)), table))
    return found


def _bins(scores: pd.DataFrame, bins: int) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the bins of each class that is looked at."""
    labels: Array = scores[TRUE_CLASS].to_numpy()
    patients = scores.index.get_level_values("patient").tolist()
    count = sum(str(name).startswith(PROBABILITY) for name in scores)
    return [
        (c, asdict(found))
        for c in (range(count) if count > 2 else [1])
        for found in reliability(
            scores[f"{PROBABILITY}{c}"].to_numpy(np.float64), labels == c, patients, bins=bins
        )
    ]
