"""Selection of a model by its scores on validation cases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from collegium.core.tensors import Tensors
from collegium.runtime.state import Store
from collegium.tasks import ALL_CASES, CASES, NON_SCORE_KEYS, is_hidden

_NAME = "best"


def mean_row(rows: Sequence[Mapping[str, Any]], metric: str) -> list[dict[str, Any]]:
    """Return one row of scores that stands for all, without saying anything of a single case.

    Args:
        rows: scores by case; see `collegium.tasks.CaseScores`.
        metric: the metric by which models are selected; the row counts the cases that have it.

    Returns:
        The row, whose case and patient are `collegium.tasks.ALL_CASES`; nothing for no rows.
    """
    if not rows:
        return []
    scores = [name for name in rows[0] if name not in NON_SCORE_KEYS and not is_hidden(name)]
    defined = sum(row[metric] is not None for row in rows)
    means = {name: mean_defined([row[name] for row in rows]) for name in scores}
    return [{"case": ALL_CASES, "patient": ALL_CASES, CASES: defined, **means}]


def scores_of(rows: Iterable[Mapping[str, Any]], metric: str) -> list[float | None]:
    """Return a metric of every case; a row that stands for several counts as often.

    Args:
        rows: scores by case, or one row of `mean_row`.
        metric: the metric.
    """
    return [value for row in rows for value in [row[metric]] * row.get(CASES, 1)]


def mean_defined(values: Sequence[float | None]) -> float | None:
    """Return the mean of the defined values; None if there is none."""
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None


class BestModel:
    """The model with the highest mean validation score so far, in one file with that score.

    Args:
        root: folder of the file, which is ``best.state``.
    """

    def __init__(self, root: Path) -> None:
        self._store = Store(root)

    def clean(self) -> None:
        """Remove the rest of an interrupted write. See `Store.clean`."""
        self._store.clean()

    def offer(self, model: Tensors, values: Sequence[float | None], *, number: int) -> None:
        """Keep ``model`` if no model had a higher mean score so far.

        An undefined score never replaces a defined one; among undefined ones the newest model is
        kept. To compare, only the score is read from the file.

        Args:
            model: the model.
            values: its scores, the higher the better; None is undefined.
            number: the round of the model.
        """
        score = mean_defined(values)
        if self._store.path(_NAME).exists():
            best = self._store.outline(_NAME)["score"]
            if best is not None and (score is None or score <= best):
                return
        self._store.save(_NAME, {"round": number, "score": score, "model": model})

    def load(self) -> dict[str, Any] | None:
        """Return ``round``, ``score`` and ``model`` of the best model; None if there is none."""
        return dict(self._store.load(_NAME)) if self._store.path(_NAME).exists() else None
