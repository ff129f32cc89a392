"""Tables as papers print them (`method_table`), and what a hospital asks for (`joining_table`)."""

import html
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from collegium.benchmark.significance import (
    Interval,
    Outcome,
    disparity,
    higher_is_better,
    outcome,
    paired_difference,
    verdict,
    worst_site,
)
from collegium.results import Row

MINUS, DASH, PLUS_MINUS = "\u2212", "\u2013", "\u00b1"
AVERAGE, WORST, RANGE, SPREAD = "average", "worst site", "disparity", "site sd"
SUMMARIES = (AVERAGE, WORST, RANGE, SPREAD)
"""The columns after the sites. Disparity is the largest minus the smallest of the site means."""

_SPELLED = {
    name.lower(): name
    for name in (
        "APFL", "CFL", "Ditto", "FedADAGrad", "FedAdam", "FedALA", "FedAMP", "FedAvg", "FedAvgM",
        "FedBABU", "FedBN", "FedDG", "FedDyn", "FedFomo", "FedMTL", "FedNova", "FedPer", "FedProx",
        "FedRep", "FedRoD", "FedYogi", "FineTune", "FPFC", "GRACE", "HarmoFL", "IFCA",
        "LGFedAvg", "Local", "MOON", "PerFedAvg", "pFedMe", "pFedNet", "Pooled", "ResFIM",
        "SCAFFOLD", "SiloBN", "SuperFed",
    )
} | {"iopfl": "IOP-FL", "distance": "Distance-aware"}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A number of a table.

    Attributes:
        mean: Mean over seeds; None where undefined.
        sd: Sample standard deviation over seeds; None with fewer than two.
        rank: 1 for the best of the column, 2 for the second, 0 for the others.
        note: What else belongs in the cell, e.g. which site is the worst.
    """

    mean: float | None
    sd: float | None = None
    rank: int = 0
    note: str = ""


@dataclass(frozen=True)
class Method:
    """A row of a table: an algorithm, and which of its models was scored."""

    algorithm: str
    model: str
    cells: Mapping[str, Cell]

    @property
    def name(self) -> str:
        """The method as a reader calls it."""
        return method_name(self.algorithm, self.model)


@dataclass(frozen=True)
class MethodTable:
    """Methods by sites for one metric."""

    metric: str
    unit: str
    higher_is_better: bool
    sites: tuple[str, ...]
    methods: tuple[Method, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """The sites, then the summaries."""
        return self.sites + SUMMARIES


@dataclass(frozen=True)
class Comparison:
    """At one site: a method minus training alone, by patient."""

    site: str
    algorithm: str
    model: str
    local: float | None
    joined: float | None
    difference: Interval
    outcome: Outcome
    verdict: str

    @property
    def name(self) -> str:
        """The method as a reader calls it."""
        return method_name(self.algorithm, self.model)


@dataclass(frozen=True)
class JoiningTable:
    """Does joining help each site? Empty, with `missing` saying why, where nobody trained alone."""

    metric: str
    unit: str
    higher_is_better: bool
    comparisons: tuple[Comparison, ...]
    missing: str = ""


def method_name(algorithm: str, model: str) -> str:
    """Return e.g. "Ditto personal" for ``ditto`` and ``personal``; own labels stay as they are."""
    return f"{_SPELLED.get(algorithm, algorithm)} {model}".strip()


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
    """Return e.g. "[-0.012, +0.034]" with a typographic minus, or a dash where there is none."""
    if interval.low is None or interval.high is None:
        return DASH
    return (
        f"[{number(interval.low, unit, signed=True)}, {number(interval.high, unit, signed=True)}]"
    )


def final_scores(rows: Iterable[Row], metric: str | None = None) -> list[Row]:
    """Return the scores of single test cases, of one metric or of all."""
    return [
        row
        for row in rows
        if row.split == "test" and row.case and row.model and metric in (None, row.metric)
    ]


def _patient_mean(rows: Iterable[Row]) -> float | None:
    """Mean over patients of the mean over their cases; undefined scores are left out."""
    patients: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.value is not None:
            patients[row.patient].append(row.value)
    return fmean(fmean(values) for values in patients.values()) if patients else None


def method_table(rows: Iterable[Row], metric: str, order: Sequence[str] = ()) -> MethodTable:
    """Build the table of one metric from the final scores.

    A site's mean of a seed is the mean over patients of the mean over a patient's cases; a cell is
    mean and sample sd over seeds. A method without a score at a site where others have one has no
    average, worst site or disparity, for they would leave out its hardest site.

    Args:
        rows: Rows of results; others than scores of test cases are passed over.
        metric: Which metric.
        order: Labels of the algorithms in the order wanted; the others follow by name.

    Returns:
        The table, empty where no such score exists.
    """
    scores = final_scores(rows, metric)
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in scores:
        groups[row.algorithm, row.model].append(row)
    unit = scores[0].unit if scores else ""
    higher = higher_is_better(metric, unit)
    sites = tuple(sorted({row.site for row in scores}))
    means = {key: _site_means(group) for key, group in groups.items()}
    scored = [site for site in sites if any(_seeds(mean, site) for mean in means.values())]
    methods = [
        Method(*key, _cells(means[key], sites, scored, higher=higher))
        for key in sorted(groups, key=lambda key: _position(key, order))
    ]
    return MethodTable(metric, unit, higher, sites, _ranked(methods, unit, higher=higher))


def _position(key: tuple[str, str], order: Sequence[str]) -> tuple[int, str, str]:
    algorithm, model = key
    known = list(order).index(algorithm) if algorithm in order else len(order)
    return -1 if algorithm == "local" else known, algorithm, model


_SiteMeans = dict[int, dict[str, float | None]]  # seed -> site -> mean


def _site_means(rows: Iterable[Row]) -> _SiteMeans:
    groups: dict[int, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row.seed][row.site].append(row)
    return {
        seed: {site: _patient_mean(group) for site, group in by_site.items()}
        for seed, by_site in sorted(groups.items())
    }


def _seeds(means: _SiteMeans, site: str) -> list[float]:
    """The defined means of a site, one per seed."""
    values = (by_site.get(site) for by_site in means.values())
    return [value for value in values if value is not None]


def _cell(values: Sequence[float]) -> Cell:
    if not values:
        return Cell(None)
    return Cell(fmean(values), stdev(values) if len(values) > 1 else None)


def _cells(
    means: _SiteMeans, sites: Sequence[str], scored: Sequence[str], *, higher: bool
) -> dict[str, Cell]:
    cells = {site: _cell(_seeds(means, site)) for site in sites}
    overall = {site: cells[site].mean for site in scored}
    complete = bool(scored) and all(mean is not None for mean in overall.values())
    worst = worst_site(overall, higher_is_better=higher) if complete else None
    spread = disparity(overall) if complete else None
    averages = []
    for by_site in means.values():
        values = [value for site in scored if (value := by_site.get(site)) is not None]
        if len(values) == len(scored):
            averages.append(fmean(values))
    cells[AVERAGE] = _cell(averages if complete else [])
    cells[WORST] = replace(cells[worst[0]], note=worst[0]) if worst else Cell(None)
    cells[RANGE] = Cell(spread.range if spread else None)
    cells[SPREAD] = Cell(spread.sd if spread else None)
    return cells


def _ranked(methods: Sequence[Method], unit: str, *, higher: bool) -> tuple[Method, ...]:
    """Mark best and second of each column; what prints alike ranks alike."""
    ranks: dict[str, dict[float, int]] = {}
    for column in methods[0].cells if methods else ():
        ascending = column in (RANGE, SPREAD) or not higher
        values = [_rounded(method.cells[column], unit) for method in methods]
        defined = [value for value in values if value is not None]
        distinct = sorted(set(defined), reverse=not ascending)
        ranks[column] = dict(zip(distinct[:2], (1, 2), strict=False)) if len(defined) > 1 else {}
    return tuple(
        replace(method, cells={
            column: replace(cell, rank=ranks[column].get(_rounded(cell, unit) or 0.0, 0))
            if cell.mean is not None else cell
            for column, cell in method.cells.items()
        })
        for method in methods
    )  # fmt: skip


def _rounded(cell: Cell, unit: str) -> float | None:
    return None if cell.mean is None else round(cell.mean, 2 if unit else 3)


def cell_text(cell: Cell, unit: str = "") -> str:
    """Return e.g. "0.812 ± 0.010 (note)"."""
    text = number(cell.mean, unit)
    if cell.sd is not None:
        text += f" {PLUS_MINUS} {number(cell.sd, unit)}"
    return f"{text} ({cell.note})" if cell.note else text


def cell_html(cell: Cell, unit: str = "") -> str:
    """Return a ``<td>`` with everything escaped: the best in bold, the second underlined."""
    text = html.escape(number(cell.mean, unit))
    tag = {1: "strong", 2: "u"}.get(cell.rank)
    if tag:
        text = f"<{tag}>{text}</{tag}>"
    if cell.sd is not None:
        text += f' <span class="sd">{PLUS_MINUS} {number(cell.sd, unit)}</span>'
    if cell.note:
        text += f'<br><span class="note">{html.escape(cell.note)}</span>'
    return f"<td>{text}</td>"


def to_markdown(table: MethodTable) -> str:
    """Return the table in Markdown: the best in bold, the second underlined."""
    marks = {0: ("", ""), 1: ("**", "**"), 2: ("<u>", "</u>")}
    lines = [["method", *table.columns], ["---", *["---:"] * len(table.columns)]]
    for method in table.methods:
        cells = [method.cells[column] for column in table.columns]
        texts = [_markdown(cell_text(cell, table.unit)) for cell in cells]
        marked = [marks[cell.rank][0] + text + marks[cell.rank][1]
                  for cell, text in zip(cells, texts, strict=True)]  # fmt: skip
        lines.append([_markdown(method.name), *marked])
    lines[0] = [_markdown(text) for text in lines[0]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _markdown(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "\\|").replace("\n", " ")


def to_text(table: MethodTable) -> str:
    """Return the table for a terminal; ``*`` marks the best and ``+`` the second."""
    marks = {0: " ", 1: "*", 2: "+"}
    lines = [["method", *(f"{column} " for column in table.columns)]]
    for method in table.methods:
        cells = [method.cells[column] for column in table.columns]
        lines.append([method.name, *(cell_text(c, table.unit) + marks[c.rank] for c in cells)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        "  ".join([line[0].ljust(widths[0])]
                  + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)])
        for line in lines
    ]  # fmt: skip
    rule = "-" * len(texts[0])
    unit = f" ({table.unit})" if table.unit else ""
    legend = f"{table.metric}{unit}: mean {PLUS_MINUS} sd over seeds; * best, + second"
    return "\n".join([legend, rule, texts[0], rule, *texts[1:], rule]) + "\n"


def joining_table(
    rows: Iterable[Row],
    metric: str,
    order: Sequence[str] = (),
    *,
    local: str = "local",
    resamples: int = 2000,
    seed: int = 0,
) -> JoiningTable:
    """Compare every method with training alone, at every site, paired by case and seed.

    Args:
        rows: Rows of results.
        metric: Which metric.
        order: Labels of the algorithms in the order wanted; the others follow by name.
        local: Label of the algorithm that trains each site alone.
        resamples: Resamples of the bootstrap.
        seed: Names the generator of the bootstrap.

    Returns:
        The comparisons by site, then method.
    """
    scores = final_scores(rows, metric)
    unit = scores[0].unit if scores else ""
    higher = higher_is_better(metric, unit)
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in scores:
        groups[row.site, row.algorithm, row.model].append(row)
    alone = {
        site: group for model in ("global", "personal") for (site, algorithm, kind), group
        in groups.items() if algorithm == local and kind == model
    }  # fmt: skip
    if not alone:
        missing = (
            f"Nobody trained alone in this run: it holds no scores of an algorithm labelled "
            f"{local!r}, so whether joining helps cannot be said. Add it to the algorithms."
        )
        return JoiningTable(metric, unit, higher, (), missing)
    comparisons = []
    for key in sorted(groups, key=lambda key: (key[0], *_position(key[1:], order))):
        site, algorithm, _ = key
        if algorithm == local or site not in alone:
            continue
        difference = _compare(groups[key], alone[site], resamples=resamples, seed=seed)
        comparisons.append(Comparison(
            *key, _overall(alone[site]), _overall(groups[key]), difference,
            outcome(difference, higher_is_better=higher),
            verdict(difference, higher_is_better=higher),
        ))  # fmt: skip
    return JoiningTable(metric, unit, higher, tuple(comparisons))


def _overall(rows: Iterable[Row]) -> float | None:
    """Mean over seeds of a site's mean over patients."""
    means = [m for by_site in _site_means(rows).values() for m in by_site.values() if m is not None]
    return fmean(means) if means else None


def _compare(joined: Iterable[Row], alone: Iterable[Row], *, resamples: int, seed: int) -> Interval:
    """Pair the scores that both have of a case and seed."""
    reference = {(row.case, row.seed, row.fold): row.value for row in alone}
    pairs = [(row, reference[key]) for row in joined
             if (key := (row.case, row.seed, row.fold)) in reference]  # fmt: skip
    return paired_difference(
        [row.value for row, _ in pairs],
        [value for _, value in pairs],
        [row.patient for row, _ in pairs],
        resamples=resamples,
        seed=seed,
    )
