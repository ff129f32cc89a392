"""What each page of the report says, gathered from the rows, the files and the tables."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from collegium.evaluation.cells import Cell
from collegium.evaluation.comparisons import adapting_table
from collegium.evaluation.paired import Comparison, ComparisonTable, JoiningTable
from collegium.evaluation.report import plots
from collegium.evaluation.report.answers import AdaptingAnswer, Answer, answer_outside, answer_sites
from collegium.evaluation.report.ledgers import Summary, ledger_rows
from collegium.evaluation.report.pictures import Overlay, Picture, Sheet
from collegium.evaluation.report.reading import Run
from collegium.evaluation.report.routing import Adaptation, gather_adaptations
from collegium.evaluation.report.traffic import Traffic, count_traffic
from collegium.evaluation.scores import Where
from collegium.evaluation.sweeps import sweep_table
from collegium.evaluation.tables import (
    MethodTable,
    final_scores,
    joining_table,
    method_name,
    method_table,
    scored_name,
)
from collegium.evaluation.timing import TimeTable, time_table

WHERES: tuple[Where, Where] = ("inside", "outside")

Groups = dict[str, list[Picture]]
"""Name of the method -> its pictures."""

Lane = tuple[str, Where]
"""A site, and whether its pictures are those of a site inside."""


@dataclass(frozen=True)
class Curves:
    """Charts of one metric, a panel per site in one frame, and the legend that they share.

    Attributes:
        name: What is drawn.
        panels: Site -> lines.
        frame: The limits of all panels.
        legend: A line of each look.
    """

    name: str
    panels: Mapping[str, Sequence[plots.Series]]
    frame: plots.Limits
    legend: Sequence[plots.Series]

    def of(self, site: str) -> "Curves":
        """Return the charts of one site, in a frame of its own."""
        return draw_curves(self.name, {site: self.panels[site]} if site in self.panels else {})


@dataclass(frozen=True)
class Scores:
    """The scores of one site: a row for each method, a column for each metric.

    Attributes:
        columns: Metric, its unit, and whether higher is better.
        rows: Name of the method, and a cell for each column, None where it has no score.
    """

    columns: Sequence[tuple[str, str, bool]]
    rows: Sequence[tuple[str, Sequence[Cell | None]]]


@dataclass(frozen=True)
class SitePage:
    """The page of one site.

    Attributes:
        name: The site.
        id: The id of its page.
        tested: By "inside" and "outside", how many patients and cases were scored.
        answer: Whether joining helps it; None where nobody trained alone.
        scores: By "inside" and "outside", all its scores.
        adapting: Of a site outside, adapters against none.
        curves: Its charts.
        pictures: By "inside" and "outside", its pictures by method; inside, the method of its
            answer first, or, where none of it were drawn, another model of the same algorithm.
        traffic: What it sent and received.
        ledger: What its ledgers say.
        adaptations: What adapters did there.
    """

    name: str
    id: str
    tested: Mapping[Where, tuple[int, int]]
    answer: Answer | None
    scores: Mapping[Where, Scores]
    adapting: Sequence[Comparison]
    curves: Sequence[Curves]
    pictures: Mapping[Where, Groups]
    traffic: Sequence[Traffic]
    ledger: Sequence[Mapping[str, Any]]
    adaptations: Sequence[Adaptation]


@dataclass(frozen=True)
class Report:
    """Everything that the templates show; pages without content are left out.

    Attributes:
        run: What was run.
        joining: Every method against training alone.
        answers: The answer to each site.
        tables: By "inside" and "outside", a table for each metric, the headline metric first.
        sweeps: The tables of a sweep.
        adapting: Adapters against none, at all sites outside.
        adapting_answers: The answer to each site outside: does adapting help?
        timing: Time against quality, at all sites outside.
        sites: A page for each site.
        curves: The charts of all sites.
        traffic: What all sites sent and received.
        ledgers: By site what its ledgers say.
        adaptations: What adapters did.
        unfinished: What has no scores yet.
        undefined: Scores that are undefined, by metric, method and site.
        scored: By "inside" and "outside", how many scores there are.
        sheet: The style sheet of the pictures.
        left_out: How many pictures found no room.
    """

    run: Run
    joining: JoiningTable
    answers: Mapping[str, Answer]
    tables: Mapping[Where, Sequence[MethodTable]]
    sweeps: Sequence[MethodTable]
    adapting: ComparisonTable
    adapting_answers: Sequence[AdaptingAnswer]
    timing: TimeTable
    sites: Sequence[SitePage]
    curves: Sequence[Curves]
    traffic: Sequence[Traffic]
    ledgers: Mapping[str, Sequence[Mapping[str, Any]]]
    adaptations: Sequence[Adaptation]
    unfinished: Sequence[str]
    undefined: Sequence[Mapping[str, Any]]
    scored: Mapping[Where, int]
    sheet: str
    left_out: int


def gather(
    run: Run, overlays: Sequence[Overlay], ledgers: Mapping[str, Mapping[str, Summary]]
) -> Report:
    """Gather the report.

    Args:
        run: What was run.
        overlays: The pictures to show.
        ledgers: Label of the algorithm -> site -> summary of its ledgers.
    """
    joining = joining_table(run.rows, run.metric, run.order, local=run.local, variation=run.setting)
    sheet, answers = Sheet(), answer_sites(run, joining)
    pictures, left_out = gather_pictures(overlays, answers, sheet)
    adapting = adapting_table(run.rows, run.metric, run.order, variation=run.setting)
    report = Report(
        run=run,
        joining=joining,
        answers=answers,
        tables={where: _method_tables(run, where) for where in WHERES},
        sweeps=_sweeps(run),
        adapting=adapting,
        adapting_answers=answer_outside(adapting),
        timing=time_table(run.rows, run.accounts, run.metric, run.order, variation=run.setting),
        sites=(),
        curves=_curves(run),
        traffic=count_traffic(run.rows, run.order),
        ledgers=ledger_rows(ledgers, run.order),
        adaptations=gather_adaptations(run.accounts, run.order),
        unfinished=_unfinished(run),
        undefined=undefined_scores(run),
        scored={where: len(final_scores(run.rows, where=where)) for where in WHERES},
        sheet=sheet.css,
        left_out=left_out,
    )
    ids = site_ids(run.sites)
    pages = [_site_page(report, site, ids[site], pictures) for site in run.sites]
    return replace(report, sites=pages)


def _site_page(report: Report, site: str, page: str, pictures: Mapping[Lane, Groups]) -> SitePage:
    run = report.run
    return SitePage(
        name=site,
        id=page,
        tested={where: _tested(run, site, where) for where in WHERES},
        answer=report.answers.get(site),
        scores={where: _site_scores(report.tables[where], site) for where in WHERES},
        adapting=[found for found in report.adapting.comparisons if found.site == site],
        curves=[own for drawn in report.curves if (own := drawn.of(site)).panels],
        pictures={where: pictures.get((site, where), {}) for where in WHERES},
        traffic=count_traffic([row for row in run.rows if row.site == site], run.order),
        ledger=report.ledgers.get(site, ()),
        adaptations=[found for found in report.adaptations if found.site == site],
    )


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


def draw_curves(name: str, panels: Mapping[str, Sequence[plots.Series]]) -> Curves:
    """Return the charts of some sites, with common axes.

    Args:
        name: what is drawn.
        panels: the lines, by site.
    """
    every = [line for lines in panels.values() for line in lines]
    legend = {line.key: line for line in every}
    shown = [legend[key] for key in sorted(legend, key=lambda key: (legend[key].place, key))]
    return Curves(name, panels, plots.limits(every), shown)


def _curves(run: Run) -> list[Curves]:
    metric = f"{plots.title(run.metric)} on validation"
    wanted = ((metric, run.metric, "val"), ("Training loss", "loss", "train"))
    found = [
        draw_curves(name, plots.learning_curves(run.rows, metric, split, run.order))
        for name, metric, split in wanted
    ]
    return [curves for curves in found if curves.panels]


def _method_tables(run: Run, where: Where) -> list[MethodTable]:
    """The headline metric's table first, then those of the other metrics."""
    scores = final_scores(run.rows, where=where)
    metrics = dict.fromkeys([run.metric, *(row.metric for row in scores)])
    found = [
        method_table(scores, metric, run.order, where=where, variation=run.setting)
        for metric in metrics
    ]
    return [table for table in found if table.methods]


def _sweeps(run: Run) -> list[MethodTable]:
    if not run.settings:
        return []
    found = [
        sweep_table(run.sweep, run.metric, run.order, where=where, settings=run.settings)
        for where in WHERES
    ]
    return [table for table in found if table.methods]


def _site_scores(tables: Sequence[MethodTable], site: str) -> Scores:
    """The scores of one site, of all metrics that have some there."""
    tables = [table for table in tables if site in table.sites]
    names = dict.fromkeys(method.name for table in tables for method in table.methods)
    columns = [(table.metric, table.unit, table.higher_is_better) for table in tables]
    found = [{method.name: method.cells[site] for method in t.methods} for t in tables]
    return Scores(columns, [(name, [cells.get(name) for cells in found]) for name in names])


def _tested(run: Run, site: str, where: Where) -> tuple[int, int]:
    """Patients and cases with scores; a case that several folds test counts once."""
    scores = [row for row in final_scores(run.rows, where=where) if row.site == site]
    return len({row.patient for row in scores}), len({row.case for row in scores})


def gather_pictures(
    overlays: Iterable[Overlay], answers: Mapping[str, Answer], sheet: Sheet
) -> tuple[dict[Lane, Groups], int]:
    """Take up pictures, a method of each site in its turn, the method of the site's answer first.

    A cell draws one of its models; where that is not the answer's, it comes first all the same.
    A site that is both inside and outside has a turn for each.

    Args:
        overlays: The pictures, in the order wanted.
        answers: The answers of the sites.
        sheet: Takes them up.

    Returns:
        Site and where -> method -> pictures; and how many found no room.
    """
    groups: dict[Lane, dict[str, list[Overlay]]] = defaultdict(lambda: defaultdict(list))
    for overlay in overlays:
        groups[overlay.site, overlay.where][overlay.name].append(overlay)
    ordered: dict[Lane, list[list[Overlay]]] = {}
    for (site, where), methods in sorted(groups.items()):
        first = _first(methods, answers[site].chosen if site in answers else None)
        ordered[site, where] = [methods[name] for name in sorted(methods, key=first.__ne__)]
    shown: dict[Lane, Groups] = {lane: {} for lane in ordered}
    left_out = 0
    for turn in zip_longest(*ordered.values(), fillvalue=()):
        for overlay in (overlay for method in turn for overlay in method):
            picture = sheet.add(overlay)
            if picture is None:
                left_out += 1
            else:
                methods_shown = shown[overlay.site, overlay.where]
                methods_shown.setdefault(overlay.name, []).append(picture)
    return shown, left_out


def _first(methods: Mapping[str, Sequence[Overlay]], chosen: Comparison | None) -> str:
    """The method of an answer among those with pictures, else another model of its algorithm."""
    if chosen is None or chosen.name in methods:
        return chosen.name if chosen else ""
    own = (name for name, (o, *_) in methods.items() if o.algorithm == chosen.algorithm)
    return next(own, "")


def _unfinished(run: Run) -> list[str]:
    """Cells without scores, of the setting that is shown; and settings without any."""
    finished = {(row.algorithm, row.seed, row.fold) for row in final_scores(run.rows)}
    federation = run.config.get("federation")
    sites: Sequence[str] = ()
    if run.config.get("protocol") == "leave-one-site-out" and isinstance(federation, dict):
        sites = sorted(set(federation.get("sites", ())) - set(federation.get("outside", ())))
    missing = [
        f"{method_name(label, '')}, seed {seed}" + (f", without {sites[fold]}" if sites else "")
        for label in run.labels or run.order
        for seed in run.config.get("seeds") or run.seeds
        for fold in range(max(1, len(sites)))
        if (label, seed, fold) not in finished
    ]
    settings = run.config.get("variations") or ()
    return missing + [f"setting {name}" for name in settings if name not in run.settings]


def undefined_scores(run: Run) -> list[dict[str, Any]]:
    """Count the undefined scores per metric, method and site, where there are any.

    Args:
        run: What was run.

    Returns:
        Entries with metric, name, site, undefined, scores.
    """
    counts: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for where in WHERES:
        for row in final_scores(run.rows, where=where):
            key = row.metric, scored_name(row.algorithm, row.model, where), row.site
            counts[key][0] += row.value is None
            counts[key][1] += 1
    return [
        {"metric": key[0], "name": key[1], "site": key[2], "undefined": count, "scores": scores}
        for key, (count, scores) in sorted(counts.items())
        if count
    ]
