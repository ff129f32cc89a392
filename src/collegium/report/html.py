"""Write the report of a run: one page that answers, first of all, whom joining helps."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from collegium.benchmark import tables
from collegium.benchmark.paired import Comparison, JoiningTable
from collegium.benchmark.significance import MINIMUM_PATIENTS, higher_is_better
from collegium.benchmark.tables import MethodTable
from collegium.errors import DataError
from collegium.report import plots
from collegium.report.ledgers import Summary, ledger_rows, ledger_summaries
from collegium.report.overlays import Overlay, embed, read_overlays
from collegium.results import Row, read_table
from collegium.state import write_atomically

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


@dataclass(frozen=True)
class Run:
    """All that a report is made from.

    Attributes:
        info: The content of ``run.json``.
        rows: The rows of results.
        order: Labels of the algorithms: the one that trains alone first, then as configured.
        local: Label of the algorithm that trains each site alone.
        metric: The headline metric, the one that selects models on validation.
        pooled: Labels of algorithms that put all data in one place, a bound that nobody can join.
    """

    info: Mapping[str, Any]
    rows: Sequence[Row]
    order: tuple[str, ...]
    local: str
    metric: str
    pooled: frozenset[str] = frozenset()

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration of the experiment, empty where unknown."""
        config = self.info.get("config", {})
        return config if isinstance(config, dict) else {}

    @property
    def sites(self) -> list[str]:
        """The sites with results, by name."""
        return sorted({row.site for row in self.rows})


def write_report(
    output: Path, federation_overlays: Callable[[Path], Iterable[Overlay]] | None = None
) -> Path:
    """Write ``report.html`` into the output folder of a run, finished or not.

    Args:
        output: The folder, with ``run.json``, the results and the cells.
        federation_overlays: Returns the pictures to show for the folder; without it those that
            the run stored. ``lambda output: ()`` leaves patients' images out of the page.

    Returns:
        The path of the page.

    Raises:
        DataError: There are no results, or a file cannot be read.
        StorageError: The page cannot be written.
    """
    run = read_run(output)
    overlays = list((federation_overlays or read_overlays)(output))
    page = render(run, overlays, ledger_summaries(output))
    path = output / "report.html"
    write_atomically(path, page.encode())
    return path


def read_run(output: Path) -> Run:
    """Read what a run left in its output folder.

    Args:
        output: The folder.

    Returns:
        The run.

    Raises:
        DataError: There are no results, or a file cannot be read.
    """
    path = output / "run.json"
    try:
        info = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        config = {**info.get("config", {})}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise DataError(
            f"{path}: the description of the run cannot be read ({error}); "
            "restore the file, or remove it to make a report without it."
        ) from error
    rows = read_table(output)
    if not rows:
        raise DataError(f"{output}: no results to report yet; run the experiment first.")
    local = _local_label(config)
    order = _order([local, *_labels(config)], rows)
    pooled = frozenset(
        label
        for entry, label in zip(_algorithms(config), _labels(config), strict=True)
        if entry.get("name") == "pooled"
    )
    return Run(info, rows, order, local, _headline_metric(rows), pooled)


def _algorithms(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [entry for entry in config.get("algorithms", ()) if isinstance(entry, dict)]


def _labels(config: Mapping[str, Any]) -> list[str]:
    return [str(entry.get("label") or entry.get("name")) for entry in _algorithms(config)]


def _local_label(config: Mapping[str, Any]) -> str:
    pairs = zip(_algorithms(config), _labels(config), strict=True)
    return next((label for entry, label in pairs if entry.get("name") == "local"), "local")


def _order(wanted: Sequence[str], rows: Iterable[Row]) -> tuple[str, ...]:
    present = {row.algorithm for row in rows}
    known = [label for label in dict.fromkeys(wanted) if label in present]
    return (*known, *sorted(present.difference(known)))


def _headline_metric(rows: Sequence[Row]) -> str:
    for split in ("val", "test"):
        for row in rows:
            if row.split == split and row.model and row.metric != "loss":
                return row.metric
    return "loss"


def render(
    run: Run,
    overlays: Sequence[Overlay],
    ledgers: Mapping[str, Mapping[str, Summary]],
) -> str:
    """Return the page.

    Args:
        run: What was run.
        overlays: The pictures.
        ledgers: Label of the algorithm -> site -> summary of its ledger.

    Returns:
        HTML that refers to nothing outside itself.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        number=tables.number,
        interval=tables.interval_text,
        size=plots.size,
        title=plots.title,
        cell=lambda cell, unit: Markup(tables.cell_html(cell, unit)),
        svg=lambda interval, reach: Markup(plots.interval_svg(interval, reach)),
    )
    joining = tables.joining_table(run.rows, run.metric, run.order, local=run.local)
    figures = draw_figures(run)
    template = files("collegium.report").joinpath("template.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        run=run,
        facts=_facts(run),
        joining=joining,
        reach=plots.reach(comparison.difference for comparison in joining.comparisons),
        answers=answers(run, joining),
        minimum_patients=MINIMUM_PATIENTS,
        tables=_method_tables(run),
        figures=figures,
        scripts=Markup(get_plotlyjs()) if figures else "",
        figure_data={name: Markup(_figure_json(figure)) for name, figure in figures.items()},
        traffic=plots.count_traffic(run.rows, run.order),
        overlays=_overlay_groups(overlays, answers(run, joining)),
        undefined=undefined_scores(run.rows),
        scored=len(tables.final_scores(run.rows)),
        ledgers=ledger_rows(ledgers, run.order),
        config_text=json.dumps(run.config, indent=2, ensure_ascii=False, default=str),
        versions=_versions(run.info),
    )


def _facts(run: Run) -> dict[str, Any]:
    """The numbers of the first paragraph, and what is not finished."""
    scores = tables.final_scores(run.rows)
    seeds = sorted({row.seed for row in run.rows})
    planned = run.config.get("seeds") or seeds
    finished = {(row.algorithm, row.seed) for row in scores}
    labels = _labels(run.config) or run.order
    return {
        "name": str(run.config.get("name") or run.rows[0].experiment),
        "rounds": run.config.get("rounds") or max(row.round for row in run.rows),
        "seeds": seeds,
        "sites": {
            site: {
                "patients": len({row.patient for row in scores if row.site == site}),
                "cases": len({(row.case, row.fold) for row in scores if row.site == site}),
            }
            for site in run.sites
        },
        "unfinished": [
            f"{tables.method_name(label, '')}, seed {seed}"
            for label in labels
            for seed in planned
            if (label, seed) not in finished
        ],
    }


def select_on_validation(run: Run) -> dict[str, tuple[str, str]]:
    """Choose for each site the method that did best on the site's own validation cases.

    The test scores have no say, so that what they then tell of the chosen method is fair.

    Args:
        run: What was run.

    Returns:
        Site -> (algorithm, model), without training alone and without pooling the data, which
        nobody can join.
    """
    curves: dict[tuple[str, str, str], dict[int, list[float]]]
    curves = defaultdict(lambda: defaultdict(list))
    units = set()
    for row in run.rows:
        wanted = row.split == "val" and row.metric == run.metric
        joined = row.algorithm not in (run.local, *run.pooled)
        if wanted and joined and row.value is not None:
            curves[row.site, row.algorithm, row.model][row.seed].append(row.value)
            units.add(row.unit)
    higher = all(higher_is_better(run.metric, unit) for unit in units)
    best: dict[str, tuple[float, tuple[str, str]]] = {}
    for (site, *method), seeds in curves.items():
        value = fmean((max if higher else min)(values) for values in seeds.values())
        value = value if higher else -value
        if site not in best or value > best[site][0]:
            best[site] = value, (method[0], method[1])
    return {site: method for site, (_, method) in best.items()}


def answers(run: Run, joining: JoiningTable) -> dict[str, dict[str, Any]]:
    """Answer for each site: does joining help?

    Args:
        run: What was run.
        joining: The comparisons with training alone.

    Returns:
        Site -> chosen comparison (None without validation scores) and how many methods help,
        hurt, or neither.
    """
    chosen = select_on_validation(run)
    by_site: dict[str, list[Comparison]] = defaultdict(list)
    for comparison in joining.comparisons:
        by_site[comparison.site].append(comparison)
    return {
        site: {
            "chosen": next(
                (c for c in comparisons if (c.algorithm, c.model) == chosen.get(site)), None
            ),
            "counts": {
                word: sum(c.outcome == word for c in comparisons if c.algorithm not in run.pooled)
                for word in ("helps", "hurts", "cannot tell")
            },
            "methods": comparisons,
            "joinable": sum(c.algorithm not in run.pooled for c in comparisons),
        }
        for site, comparisons in by_site.items()
    }


def _method_tables(run: Run) -> list[MethodTable]:
    """The headline metric's table first, then those of the other metrics."""
    metrics = dict.fromkeys([run.metric, *(r.metric for r in tables.final_scores(run.rows))])
    found = [tables.method_table(run.rows, metric, run.order) for metric in metrics]
    return [table for table in found if table.methods]


def draw_figures(run: Run) -> "dict[str, Figure]":
    """Draw the charts of a run; those without data are left out.

    Args:
        run: What was run.

    Returns:
        Name -> figure.
    """
    drawn = {
        "validation": plots.learning_curves(run.rows, run.metric, "val", run.order),
        "loss": plots.learning_curves(run.rows, "loss", "train", run.order),
        "traffic": plots.traffic(plots.count_traffic(run.rows, run.order)),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _figure_json(figure: "Figure") -> str:
    """JSON that cannot end the script element it stands in."""
    text: str = figure.to_json()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def undefined_scores(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Count the undefined scores per metric, method and site, where there are any.

    Args:
        rows: Rows of results.

    Returns:
        Entries with metric, name, site, undefined, scores.
    """
    counts: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for row in tables.final_scores(rows):
        key = row.metric, tables.method_name(row.algorithm, row.model), row.site
        counts[key][0] += row.value is None
        counts[key][1] += 1
    return [
        {"metric": key[0], "name": key[1], "site": key[2], "undefined": count, "scores": scores}
        for key, (count, scores) in sorted(counts.items())
        if count
    ]


def _overlay_groups(
    overlays: Iterable[Overlay], answered: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Site -> methods with their pictures, the method of the site's answer first."""
    groups: dict[str, dict[tuple[str, str], list[dict[str, Any]]]]
    groups = defaultdict(lambda: defaultdict(list))
    for overlay in overlays:
        picture = {"overlay": overlay, "source": embed(overlay.file)}
        groups[overlay.site][overlay.algorithm, overlay.model].append(picture)
    shown: dict[str, list[dict[str, Any]]] = {}
    for site, methods in sorted(groups.items()):
        chosen = answered.get(site, {}).get("chosen")
        first = [(chosen.algorithm, chosen.model)] if chosen else []
        keys = dict.fromkeys([key for key in first if key in methods] + sorted(methods))
        shown[site] = [{"name": tables.method_name(*k), "pictures": methods[k]} for k in keys]
    return shown


def _versions(info: Mapping[str, Any]) -> dict[str, str]:
    versions = info.get("versions", {})
    entries = dict(versions) if isinstance(versions, dict) else {}
    others = {key: value for key, value in info.items() if isinstance(value, str | int | float)}
    return {key: str(value) for key, value in {**others, **entries}.items()}
