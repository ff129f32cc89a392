"""Tables of a sweep: how the average over sites changes with a setting."""

import re
from collections.abc import Iterable, Sequence

from collegium.evaluation.cells import AVERAGE, Cell, ranked
from collegium.evaluation.results import Row
from collegium.evaluation.scores import Where, position
from collegium.evaluation.tables import Method, MethodTable, method_table

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")


def variations(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the settings that rows are of, numbers in their order: "clients-2", "clients-10".

    Args:
        rows: Rows of results.

    Returns:
        The names; "" stands for rows outside a sweep.
    """
    return tuple(sorted({row.variation for row in rows}, key=_natural))


def _natural(name: str) -> tuple[list[tuple[int, float, str]], str]:
    parts = [part for part in _NUMBER.split(name) if part]
    return [
        (0, float(part), "") if _NUMBER.fullmatch(part) else (1, 0.0, part) for part in parts
    ], name


def sweep_table(
    rows: Iterable[Row],
    metric: str,
    order: Sequence[str] = (),
    *,
    where: Where = "inside",
    settings: Sequence[str] = (),
) -> MethodTable:
    """Build the table of a sweep: rows methods, columns settings, cells the average over sites.

    The average is over the sites of the setting, of which a sweep over the number of clients has
    different ones, and mean and sd are over seeds as in `method_table`. So the columns of such a
    sweep are not averages over the same patients.

    Args:
        rows: Rows of results.
        metric: Which metric.
        order: Labels of the algorithms in the order wanted; the others follow by name.
        where: Scores of the sites inside, or of those outside.
        settings: The settings in the order wanted; by default all named ones, see `variations`.

    Returns:
        The table, without rows where no such score exists.
    """
    rows = list(rows)
    columns = tuple(settings) or tuple(name for name in variations(rows) if name)
    tables = {
        name: method_table(rows, metric, order, where=where, variation=name) for name in columns
    }
    averages = {
        (method.algorithm, method.model, name): method.cells[AVERAGE]
        for name, table in tables.items()
        for method in table.methods
    }
    keys = sorted({key[:2] for key in averages}, key=lambda key: position(key, order))
    unit = max((table.unit for table in tables.values()), default="")
    higher = all(table.higher_is_better for table in tables.values())
    cells = [{name: averages.get((*key, name), Cell(None)) for name in columns} for key in keys]
    methods = [
        Method(*key, row, where)
        for key, row in zip(keys, ranked(cells, unit, higher=higher), strict=True)
    ]
    return MethodTable(metric, unit, higher, (), tuple(methods), where, "", columns)
