"""The content of every page of the report, gathered from the table of results and the files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from collegium.evaluation.comparisons import Comparison, ComparisonTable
from collegium.evaluation.cross_site import cross_site_tables
from collegium.evaluation.report import plots
from collegium.evaluation.report.answers import (
    AdaptingAnswer,
    JoiningAnswer,
    answer_outside,
    answer_sites,
)
from collegium.evaluation.report.ledgers import LedgerSummary, ledger_rows
from collegium.evaluation.report.pictures import EmbeddedPicture, Overlay, PictureSheet
from collegium.evaluation.report.reading import RunOutput
from collegium.evaluation.report.routing import AdaptationSummary, gather_adaptations
from collegium.evaluation.scores import METHOD, WHERES, Where, final_scores, method_name, rows_of
from collegium.evaluation.selection import RoundsTable, rounds_table
from collegium.evaluation.tables import MethodTable, method_table, sweep_table
from collegium.evaluation.timing import TimeTable, time_table
from collegium.evaluation.traffic import count_traffic
from collegium.evaluation.validation import selected_tables, validation_tables
from collegium.evaluation.wording import title
from collegium.tasks import ALL_CASES, CASES

if TYPE_CHECKING:
    import pandas as pd


PicturesByMethod = dict[str, list[EmbeddedPicture]]
"""Name of the method -> its pictures."""

SitePictures = Mapping[tuple[str, Where], PicturesByMethod]
"""A site, and whether its pictures are those of a site inside -> the pictures."""

NO_SCORES: Mapping[str, Any] = MappingProxyType({"columns": (), "rows": ()})
"""The scores of a site that has none, see `_site_scores`."""


@dataclass(frozen=True)
class CurvePanels:
    """Charts of one metric, a panel per site in one frame, and the legend that they share.

    Attributes:
        name: What is drawn.
        panels: Site -> lines.
        frame: The limits of all panels.
        legend: A line of each look.
    """

    name: str
    panels: Mapping[str, Sequence[plots.ChartLine]]
    frame: plots.Limits
    legend: Sequence[plots.ChartLine]

    def of(self, site: str) -> CurvePanels:
        """Return the charts of one site, in a frame of its own."""
        return make_panels(self.name, {site: self.panels[site]})


@dataclass(frozen=True)
class ReportContent:
    """Everything that the templates show; pages without content are left out.

    Attributes:
        run: The content of the run's output folder.
        joining: Every method against training alone.
        answers: The answer to each site.
        tables: By "inside" and "outside", a table for each metric, the headline metric first.
        sweeps: The tables of a sweep.
        validation: The table of validation scores: of a sweep that of all settings.
        selected: The tables of what validation cases choose.
        cross_site: The tables of personal models at every site, if they were scored there.
        adapting: Adapters against none, at all sites outside.
        adapting_answers: The answer to each site outside: does adapting help?
        timing: Time against quality, at all sites outside.
        sites: The content of each site's page, see `_site_page`.
        curves: The charts of all sites.
        rounds: The rounds that were selected.
        traffic: What all sites sent and received, see `count_traffic`.
        ledgers: By site the summaries of its ledgers.
        adaptations: All adaptations.
        unfinished: What has no scores yet.
        undefined: Scores that are undefined, by metric, method and site.
        scored: By "inside" and "outside", how many scores there are.
        sheet: The style sheet of the pictures.
        left_out: How many pictures found no room.
    """

    run: RunOutput
    joining: ComparisonTable
    answers: Mapping[str, JoiningAnswer]
    tables: Mapping[Where, Sequence[MethodTable]]
    sweeps: Sequence[MethodTable]
    validation: Sequence[MethodTable]
    selected: Sequence[MethodTable]
    cross_site: Sequence[MethodTable]
    adapting: ComparisonTable
    adapting_answers: Sequence[AdaptingAnswer]
    timing: TimeTable
    sites: Sequence[Mapping[str, Any]]
    curves: Sequence[CurvePanels]
    rounds: RoundsTable
    traffic: Sequence[Any]
    ledgers: Mapping[str, Sequence[Mapping[str, Any]]]
    adaptations: Sequence[AdaptationSummary]
    unfinished: Sequence[str]
    undefined: Sequence[Mapping[str, Any]]
    scored: Mapping[Where, int]
    sheet: str
    left_out: int


def gather_content(
    run: RunOutput,
    overlays: Sequence[Overlay],
    ledgers: Mapping[str, Mapping[str, LedgerSummary]],
) -> ReportContent:
    """Gather the content of the report.

    Args:
        run: The content of the run's output folder.
        overlays: The pictures to show.
        ledgers: Label of the algorithm -> site -> summary of its ledgers.
    """
    results, metric, order, setting = run.results, run.metric, run.order, run.setting
    joining = run.compared.joining(metric, setting)
    adapting = run.compared.adapting(metric, setting)
    sheet, answers = PictureSheet(), answer_sites(joining, run.labels.pooled)
    pictures, left_out = embed_pictures(overlays, answers, sheet)
    content = ReportContent(
        run=run,
        joining=joining,
        answers=answers,
        tables={where: _method_tables(run, where) for where in WHERES},
        sweeps=_sweeps(run),
        validation=validation_tables(run.all_results, run.order, run.settings)[-1:],
        selected=selected_tables(run.all_results, run.order, run.labels.pooled),
        cross_site=_cross_site(run),
        adapting=adapting,
        adapting_answers=answer_outside(adapting),
        timing=time_table(results, run.accounts, metric, order, variation=setting),
        sites=(),
        curves=_curves(run),
        rounds=rounds_table(results, order),
        traffic=rows_of(count_traffic(results, order)),
        ledgers=ledger_rows(ledgers, order),
        adaptations=gather_adaptations(run.accounts, order),
        unfinished=_unfinished(run),
        undefined=undefined_scores(results),
        scored={where: len(final_scores(results, where=where)) for where in WHERES},
        sheet=sheet.css,
        left_out=left_out,
    )
    own, ids = SiteParts.of(content), site_ids(run.sites)
    pages = [_site_page(content, own, site, ids[site], pictures) for site in run.sites]
    return replace(content, sites=pages)


@dataclass(frozen=True, eq=False)
class SiteParts:
    """The content divided by site once, so that a page does not search that of all others.

    Attributes:
        rows: Site -> its rows of the table of results.
        scores: By "inside" and "outside": site -> its scores, see `_site_scores`.
        traffic: Site -> what it sent and received, see `count_traffic`.
        nothing: The table of results without rows.
    """

    rows: Mapping[str, pd.DataFrame]
    scores: Mapping[Where, Mapping[str, Mapping[str, Any]]]
    traffic: Mapping[str, Sequence[Any]]
    nothing: pd.DataFrame

    @classmethod
    def of(cls, content: ReportContent) -> SiteParts:
        """Divide the content of a report."""
        results = content.run.results
        traffic: dict[str, list[Any]] = {}
        for row in rows_of(count_traffic(results, content.run.order, by=("site",))):
            traffic.setdefault(row.site, []).append(row)
        return cls(
            {str(site): rows for site, rows in results.groupby("site", sort=False)},
            {where: _site_scores(content.tables[where]) for where in WHERES},
            traffic,
            results.iloc[:0],
        )


def _withheld(results: pd.DataFrame, scored: pd.DataFrame) -> int:
    """Return of how many cases a site sent the mean of their scores only."""
    means = scored[scored["case"] == ALL_CASES]
    counts = results[(results["metric"] == CASES) & results["split"].isin(means["split"])]
    return int(counts["value"].max()) if len(counts) else 0


def _site_page(
    content: ReportContent, parts: SiteParts, site: str, page: str, pictures: SitePictures
) -> dict[str, Any]:
    """Return the content of the page of one site.

    Where it is by "inside" and "outside": ``tested``, how many patients and cases were scored;
    ``withheld``, how many cases have scores that stay at the site; ``scores``; and ``pictures`` by
    method, inside the method of its answer first, or, if none of it were drawn, another model of
    the same algorithm. ``answer`` says whether joining helps it, None if nobody trained alone.
    ``privacy`` is epsilon by algorithm.
    """
    own = parts.rows.get(site, parts.nothing)
    scored = {where: final_scores(own, where=where) for where in WHERES}
    tested = {where: found[found["case"] != ALL_CASES] for where, found in scored.items()}
    return {
        "name": site,
        "id": page,
        # a case that several folds test counts once
        "tested": {w: (s["patient"].nunique(), s["case"].nunique()) for w, s in tested.items()},
        "withheld": {where: _withheld(own, scored[where]) for where in WHERES},
        "answer": content.answers.get(site),
        "scores": {where: parts.scores[where].get(site, NO_SCORES) for where in WHERES},
        "adapting": [c for c in content.adapting.by_site if c.verdict.site == site],
        "curves": [drawn.of(site) for drawn in content.curves if site in drawn.panels],
        "pictures": {where: pictures.get((site, where), {}) for where in WHERES},
        "traffic": parts.traffic.get(site, ()),
        "privacy": _epsilons(own),
        "ledger": content.ledgers.get(site, ()),
        "adaptations": [found for found in content.adaptations if found.site == site],
    }


def _epsilons(own: pd.DataFrame) -> list[dict[str, Any]]:
    """Return by algorithm what private training has cost a site, the most of all its trainings.

    Args:
        own: The rows of a site.
    """
    found = own[(own["metric"] == "epsilon") & (own["split"] == "train")]
    most = found.groupby("algorithm", sort=False, observed=True)["value"].max()
    return [{"name": method_name(str(label)), "epsilon": value} for label, value in most.items()]


def site_ids(sites: Sequence[str]) -> dict[str, str]:
    """Return an id for the page of each site: "site-" and its name, as far as an id can hold it."""
    ids: dict[str, str] = {}
    for site in sites:
        stem = "site-" + (re.sub(r"[^a-z0-9_]+", "-", site.lower()).strip("-") or "unnamed")
        number, name = 2, stem
        while name in ids.values():
            number, name = number + 1, f"{stem}-{number}"
        ids[site] = name
    return ids


def make_panels(name: str, panels: Mapping[str, Sequence[plots.ChartLine]]) -> CurvePanels:
    """Return the charts of some sites, in the frame that suits them all.

    Args:
        name: What is drawn.
        panels: Site -> lines.
    """
    every = [line for lines in panels.values() for line in lines]
    legend = {line.key: line for line in every}
    shown = [legend[key] for key in sorted(legend, key=lambda key: (legend[key].place, key))]
    return CurvePanels(name, panels, plots.limits(every), shown)


def _curves(run: RunOutput) -> list[CurvePanels]:
    validation = f"{title(run.metric)} on validation"
    wanted = ((validation, run.metric, "val"), ("Training loss", "loss", "train"))
    return [
        make_panels(name, panels)
        for name, metric, split in wanted
        if (panels := plots.learning_curves(run.results, metric, split, run.order))
    ]


def _method_tables(run: RunOutput, where: Where) -> list[MethodTable]:
    """Return the headline metric's table first, then those of the other metrics."""
    metrics = dict.fromkeys([run.metric, *final_scores(run.results, where=where)["metric"]])
    found = [
        method_table(run.results, metric, run.order, where=where, variation=run.setting)
        for metric in metrics
    ]
    return [table for table in found if table.methods]


def _sweeps(run: RunOutput) -> list[MethodTable]:
    if run.sweep is None:
        return []
    found = [
        sweep_table(run.sweep, run.metric, run.order, where=where, settings=run.settings)
        for where in WHERES
    ]
    return [table for table in found if table.methods]


def _cross_site(run: RunOutput) -> list[MethodTable]:
    """Return the tables of the headline metric in the setting that is shown."""
    tables = cross_site_tables(run.cross_site, run.order)
    return [t for t in tables if (t.metric, t.variation) == (run.metric, run.setting)]


def _site_scores(tables: Sequence[MethodTable]) -> dict[str, dict[str, Any]]:
    """Return the scores of each site, of all metrics that have some there.

    ``columns`` holds metric, unit and whether higher is better, None if neither is; ``rows`` the
    name of each method and a cell for each column, None if it has no score.
    """
    columns: dict[str, list[tuple[str, str, bool | None]]] = {}
    found: dict[str, list[dict[str, Any]]] = {}
    for table in tables:
        cells: dict[str, dict[str, Any]] = {site: {} for site in table.sites}
        for cell in rows_of(table.cells):
            if cell.column in cells:
                cells[cell.column][cell.method] = cell
        for site, own in cells.items():
            higher = table.higher_is_better if table.ranked else None
            column = table.metric, table.unit, higher
            columns.setdefault(site, []).append(column)
            found.setdefault(site, []).append(own)
    return {
        site: {
            "columns": columns[site],
            "rows": [
                (name, [cells.get(name) for cells in own]) for name in dict.fromkeys(chain(*own))
            ],
        }
        for site, own in found.items()
    }


def embed_pictures(
    overlays: Iterable[Overlay], answers: Mapping[str, JoiningAnswer], sheet: PictureSheet
) -> tuple[dict[tuple[str, Where], PicturesByMethod], int]:
    """Embed pictures, a method of each site in turn, the method of the site's answer first.

    A job draws one of its models; if that is not the answer's, it comes first all the same. A site
    that is both inside and outside has a turn for each.

    Args:
        overlays: The pictures, in the order wanted.
        answers: The answers of the sites.
        sheet: The style sheet that holds them.

    Returns:
        Site and where -> method -> pictures; and how many found no room.
    """
    groups: dict[tuple[str, Where], dict[str, list[Overlay]]]
    groups = defaultdict(lambda: defaultdict(list))
    for overlay in overlays:
        groups[overlay.site, overlay.where][overlay.name].append(overlay)
    ordered: dict[tuple[str, Where], list[list[Overlay]]] = {}
    for (site, where), methods in sorted(groups.items()):
        first = _first(methods, answers[site].chosen if site in answers else None)
        ordered[site, where] = [methods[name] for name in sorted(methods, key=first.__ne__)]
    shown: dict[tuple[str, Where], PicturesByMethod] = {place: {} for place in ordered}
    left_out = 0
    turns = zip_longest(*ordered.values(), fillvalue=())  # each a method of every site
    for overlay in chain(*chain(*turns)):
        if picture := sheet.add(overlay):
            shown[overlay.site, overlay.where].setdefault(overlay.name, []).append(picture)
        else:
            left_out += 1
    return shown, left_out


def _first(methods: Mapping[str, Sequence[Overlay]], chosen: Comparison | None) -> str:
    """Return the method of an answer if it has pictures, else another model of its algorithm."""
    if chosen is None or chosen.verdict.method in methods:
        return chosen.verdict.method if chosen else ""
    own = (name for name, (o, *_) in methods.items() if o.algorithm == chosen.algorithm)
    return next(own, "")


def _unfinished(run: RunOutput) -> list[str]:
    """Return the jobs without scores, of the setting that is shown, and settings without any."""
    jobs = final_scores(run.results)[["algorithm", "seed", "fold", "part"]].drop_duplicates()
    finished = {tuple(job) for job in rows_of(jobs)}
    federation, protocol = run.config.get("federation"), str(run.config.get("protocol"))
    sites, parts = [""], [0]
    if isinstance(federation, dict):
        if protocol.startswith("leave-one-site-out"):
            sites = sorted(set(federation.get("sites", ())) - set(federation.get("outside", ())))
        if protocol.endswith("cross-validation"):
            parts = [*range(1, 1 + federation["splits"]["folds"])]
    missing = [
        ", ".join(
            [method_name(label), f"seed {seed}"]
            + [f"without {site}"] * bool(site)
            + [f"fold {part}"] * bool(part)
        )
        for label in run.labels.configured or run.order
        for seed in run.config.get("seeds") or run.seeds
        for fold, site in enumerate(sites)
        for part in parts
        if (label, seed, fold, part) not in finished
    ]
    settings = run.config.get("variations") or ()
    return missing + [f"setting {name}" for name in settings if name not in run.settings]


def undefined_scores(results: pd.DataFrame) -> list[dict[str, Any]]:
    """Count the undefined scores per metric, method and site, if there are any.

    Args:
        results: The table of results.

    Returns:
        Entries with metric, name, site, undefined, scores.
    """
    entries = []
    for where in WHERES:
        groups = final_scores(results, where=where).groupby(["metric", *METHOD, "site"])["value"]
        for row in rows_of(groups.agg(scores="size", defined="count").reset_index()):
            if row.defined < row.scores:
                name = method_name(row.algorithm, row.model, where)
                undefined = row.scores - row.defined
                about = {"metric": row.metric, "name": name, "site": row.site}
                entries.append({**about, "undefined": undefined, "scores": row.scores})
    return sorted(entries, key=lambda entry: (entry["metric"], entry["name"], entry["site"]))
