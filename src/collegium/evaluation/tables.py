"""Tables as papers print them (`method_table`), and what a hospital asks for (`joining_table`)."""

import html
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from collegium.evaluation.cells import SUMMARIES, Cell, method_cells, ranked
from collegium.evaluation.paired import Comparing, JoiningTable, compare, group_scores
from collegium.evaluation.results import Row
from collegium.evaluation.scores import (
    ADAPTERS,
    SPLITS,
    MethodKey,
    Where,
    position,
    rarest_class,
    seed_values,
    site_means,
    unit_of,
)
from collegium.evaluation.significance import Interval, higher_is_better

MINUS, DASH, PLUS_MINUS = "\u2212", "\u2013", "\u00b1"

_SPELLED = {
    name.lower(): name
    for name in (
        "APFL", "CFL", "Ditto", "FedADAGrad", "FedAdam", "FedALA", "FedAMP", "FedAvg", "FedAvgM",
        "FedBABU", "FedBN", "FedDG", "FedDyn", "FedFomo", "FedMTL", "FedNova", "FedPer", "FedProx",
        "FedRep", "FedRoD", "FedYogi", "FineTune", "FPFC", "GRACE", "HarmoFL", "IFCA",
        "LGFedAvg", "Local", "MOON", "PerFedAvg", "pFedMe", "pFedNet", "Pooled", "ResFIM",
        "SCAFFOLD", "SiloBN", "SuperFed", "TTT",
    )
} | {"iopfl": "IOP-FL", "distance": "Distance-aware"}  # fmt: skip


@dataclass(frozen=True)
class Method:
    """A row of a table.

    Attributes:
        algorithm: Label of the algorithm.
        model: Which of its models was scored; outside, the label of the adapter.
        cells: The cells by column.
        where: Whether the scores are of sites inside or outside.
    """

    algorithm: str
    model: str
    cells: Mapping[str, Cell]
    where: Where = "inside"

    @property
    def name(self) -> str:
        """The method as a reader calls it."""
        return scored_name(self.algorithm, self.model, self.where)


@dataclass(frozen=True)
class MethodTable:
    """Methods by sites, or by the settings of a sweep, for one metric.

    Attributes:
        metric: What was measured.
        unit: Its unit.
        higher_is_better: False for distances and losses.
        sites: The sites with scores; none in the table of a sweep.
        methods: The rows.
        where: Whether the sites are inside or outside.
        variation: The setting of the sweep that the scores are of; empty outside a sweep.
        variations: The columns of the table of a sweep; empty in a table of sites.
    """

    metric: str
    unit: str
    higher_is_better: bool
    sites: tuple[str, ...]
    methods: tuple[Method, ...]
    where: Where = "inside"
    variation: str = ""
    variations: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The sites, then the summaries; of a sweep the settings."""
        return self.variations or self.sites + SUMMARIES


def method_name(algorithm: str, model: str) -> str:
    """Return e.g. "Ditto personal" for ``ditto`` and ``personal``; own labels stay as they are.

    Args:
        algorithm: the algorithm's label.
        model: the kind of model.
    """
    return f"{_SPELLED.get(algorithm, algorithm)} {model}".strip()


def scored_name(algorithm: str, model: str, where: Where) -> str:
    """Return the name of a row: inside as `method_name`, outside e.g. "FedAvg + Tent".

    Args:
        algorithm: Label of the algorithm.
        model: Which of its models was scored; outside, the label of the adapter, of which "none"
            adds nothing to the name.
        where: Whether the scores are of sites inside or outside.
    """
    if where == "inside":
        return method_name(algorithm, model)
    adapter = ADAPTERS.get(model, model)
    return " + ".join([method_name(algorithm, ""), *([adapter] if adapter else [])])


def number(value: float | None, unit: str = "", *, signed: bool = False) -> str:
    """Return a number with sensible digits: three decimals, two where it has a unit.

    Args:
        value: The number; None becomes a dash.
        unit: Its unit.
        signed: Whether to write a plus sign too.

    Returns:
        The text. A signed number keeps its sign where it rounds to zero.
    """
    if value is None:
        return DASH
    text = f"{value:{'+' if signed else ''}.{2 if unit else 3}f}"
    if not text.strip("+-0.") and not (signed and value):
        text = text.lstrip("+-")
    return text.replace("-", MINUS)


def interval_text(interval: Interval, unit: str = "") -> str:
    """Return an interval as text, e.g. "[-0.012, +0.034]" with a typographic minus, or a dash.

    Args:
        interval: the interval.
        unit: the unit of the metric.
    """
    if interval.low is None or interval.high is None:
        return DASH
    return (
        f"[{number(interval.low, unit, signed=True)}, {number(interval.high, unit, signed=True)}]"
    )


def final_scores(
    rows: Iterable[Row],
    metric: str | None = None,
    *,
    where: Where = "inside",
    variation: str | None = None,
) -> list[Row]:
    """Return the scores of single test cases.

    Args:
        rows: Rows of results.
        metric: Of one metric; None of all.
        where: Of sites inside or outside.
        variation: Of one setting of a sweep, "" for those outside a sweep; None of all.
    """
    split = SPLITS[where]
    return [
        row
        for row in rows
        if row.split == split
        and row.case
        and row.model
        and metric in (None, row.metric)
        and variation in (None, row.variation)
    ]


def method_table(
    rows: Iterable[Row],
    metric: str,
    order: Sequence[str] = (),
    *,
    where: Where = "inside",
    variation: str = "",
) -> MethodTable:
    """Build the table of one metric from the final scores.

    A site's mean of a seed is the mean over patients of the mean over a patient's cases; a cell is
    mean and sample sd over seeds. A method without a score at a site where others have one has no
    average, worst site or disparity, for they would leave out its hardest site. Outside, a method
    is an algorithm with an adapter, and each site is scored by the models of the folds that it took
    no part in; of several folds the scores of a case are averaged, as they are inside.

    Args:
        rows: Rows of results; others than scores of test cases are passed over.
        metric: Which metric.
        order: Labels of the algorithms in the order wanted; the others follow by name.
        where: Scores of the sites inside, or of those outside.
        variation: The setting of a sweep; scores of different settings never share a table.

    Returns:
        The table, empty where no such score exists.
    """
    scores = final_scores(rows, metric, where=where, variation=variation)
    groups: dict[MethodKey, list[Row]] = defaultdict(list)
    for row in scores:
        groups[row.algorithm, row.model].append(row)
    unit = unit_of(scores)
    higher = higher_is_better(metric, unit)
    sites = tuple(sorted({row.site for row in scores}))
    keys = sorted(groups, key=lambda key: position(key, order))
    means = [site_means(groups[key]) for key in keys]
    scored = [site for site in sites if any(seed_values(mean, site) for mean in means)]
    cells = ranked(
        [method_cells(mean, sites, scored, higher=higher) for mean in means], unit, higher=higher
    )
    methods = tuple(Method(*key, row, where) for key, row in zip(keys, cells, strict=True))
    return MethodTable(metric, unit, higher, sites, methods, where, variation)


def cell_html(cell: Cell, unit: str = "") -> str:
    """Return a ``<td>`` with everything escaped: the best in bold, the second underlined.

    Args:
        cell: the cell.
        unit: the unit of the metric.
    """
    text = html.escape(number(cell.mean, unit))
    tag = {1: "strong", 2: "u"}.get(cell.rank)
    if tag:
        text = f"<{tag}>{text}</{tag}>"
    if cell.sd is not None:
        text += f' <span class="sd">{PLUS_MINUS} {number(cell.sd, unit)}</span>'
    if cell.note:
        text += f'<br><span class="note">{html.escape(cell.note)}</span>'
    return f"<td>{text}</td>"


def joining_table(
    rows: Iterable[Row],
    metric: str,
    order: Sequence[str] = (),
    *,
    local: str = "local",
    variation: str = "",
    resamples: int = 2000,
    seed: int = 0,
) -> JoiningTable:
    """Compare every method with training alone, at every site, paired by case, seed and fold.

    Args:
        rows: Rows of results.
        metric: Which metric.
        order: Labels of the algorithms in the order wanted; the others follow by name.
        local: Label of the algorithm that trains each site alone.
        variation: The setting of a sweep.
        resamples: Resamples of the bootstrap.
        seed: Names the generator of the bootstrap.

    Returns:
        The comparisons by site, then method.
    """
    rows = list(rows)
    scores = final_scores(rows, metric, variation=variation)
    unit, rarest = unit_of(scores), rarest_class(rows, metric, variation=variation)
    how = Comparing(higher_is_better(metric, unit), method_name, resamples, seed, rarest)
    groups = group_scores(scores)
    alone = {**groups.get((local, "global"), {}), **groups.get((local, "personal"), {})}
    if not alone:
        missing = (
            f"Nobody trained alone in this run: it holds no scores of an algorithm labelled "
            f"{local!r}, so whether joining helps cannot be said. Add it to the algorithms."
        )
        return JoiningTable(metric, unit, how.higher_is_better, (), missing, variation=variation)
    others = {key: group for key, group in groups.items() if key[0] != local}
    comparisons, pooled = compare(others, alone, order, how)
    return JoiningTable(
        metric,
        unit,
        how.higher_is_better,
        tuple(comparisons),
        pooled=tuple(pooled),
        variation=variation,
    )
