"""Write the report of a run: one file that answers, first of all, whom joining helps.

It opens without a network. Its pages are sections, of which a script shows one at a time; without
the script, and in print, all of them stand one after the other.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from collegium.core.files import write_atomically
from collegium.evaluation.answers import numbers_text
from collegium.evaluation.comparisons import Comparison
from collegium.evaluation.figures.data import Figure
from collegium.evaluation.figures.inline import inline_svg
from collegium.evaluation.figures.registry import list_figures
from collegium.evaluation.figures.source import FigureSource
from collegium.evaluation.intervals import PATIENTS
from collegium.evaluation.report import plots
from collegium.evaluation.report.answers import MOST_ANSWERS, count_outcomes
from collegium.evaluation.report.attacks import AttackFindings, read_attacks
from collegium.evaluation.report.ledgers import LedgerSummary, ledger_summaries
from collegium.evaluation.report.pages import ReportContent, gather_content
from collegium.evaluation.report.pictures import Overlay, read_overlays
from collegium.evaluation.report.reading import RunOutput, read_run_output
from collegium.evaluation.report.rendering import Drawings, Filters, render_page
from collegium.evaluation.report.timing import time_chart
from collegium.evaluation.wording import interval_text, p_value

PAGE = "report.html"


def write_report(output: Path, *, pictures: bool = True) -> Path:
    """Write ``report.html`` into the output folder of a run, finished or not.

    Args:
        output: The folder, with ``run.json``, the results and the jobs.
        pictures: Whether the page holds patients' images, under pseudonyms.

    Returns:
        The path of the page.

    Raises:
        DataError: There are no results, or a file cannot be read.
        CheckpointError: The state of a server is damaged.
        StorageError: The page cannot be written.
    """
    run = read_run_output(output)
    overlays = read_overlays(output, run.setting) if pictures else []
    figures = [f for f in list_figures(FigureSource.read(output)) if f.in_report]
    attacks = read_attacks(output, pictures=pictures)
    page = render(
        run, overlays, ledger_summaries(output), figures, attacks=attacks, output=str(output)
    )
    path = output / PAGE
    write_atomically(path, page.encode())
    return path


def render(
    run: RunOutput,
    overlays: Sequence[Overlay],
    ledgers: Mapping[str, Mapping[str, LedgerSummary]],
    figures: Sequence[Figure] = (),
    *,
    attacks: Sequence[AttackFindings] = (),
    output: str = "",
) -> str:
    """Return the page.

    Args:
        run: The content of the run's output folder.
        overlays: The pictures.
        ledgers: Label of the algorithm -> site -> summary of its ledgers.
        figures: The figures, in the order wanted.
        attacks: What attacks have found.
        output: The output folder, for the commands that reproduce the run.

    Returns:
        HTML that refers to nothing outside itself.
    """
    import yaml

    report = gather_content(run, overlays, ledgers)
    config = without_places(dict(run.config))
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100)
    content = {
        "report": report,
        "run": run,
        "pages": list_pages(report, figures, attacks),
        "figures": figures,
        "attacks": attacks,
        "minimum_patients": PATIENTS,
        "most_answers": MOST_ANSWERS,
        "configuration": text,
        "saved": f"data:application/yaml;base64,{base64.b64encode(text.encode()).decode()}",
        "versions": _versions(run.info),
        "commands": _commands(run, output),
    }
    filters: Filters = {
        "interval": lambda v: interval_text(v.low, v.high, v.unit),
        "pvalue": p_value,
        "reach": _reach,
        "numbers": numbers_text,
        "outcomes": count_outcomes,
    }
    drawings: Drawings = {
        "svg": lambda v, reach: plots.interval_svg(v.difference, v.low, v.high, reach),
        "times": time_chart,
        "drawn": inline_svg,
    }
    return render_page("report.html.j2", content, filters=filters, drawings=drawings)


def list_pages(
    content: ReportContent,
    figures: Sequence[Figure] = (),
    attacks: Sequence[AttackFindings] = (),
) -> list[dict[str, str]]:
    """Return the pages that have content, in order: id, title, and site of a site's page.

    Args:
        content: The content of the report.
        figures: The figures of the run.
        attacks: What attacks have found.
    """
    run = content.run
    sites = [(page["id"], page["name"]) for page in content.sites]
    wanted: list[tuple[str, str, Any]] = [
        ("overview", "Overview", True),
        ("results", "Results", True),
        *((page, name, True) for page, name in sites),
        ("outside", "Hospitals outside", content.tables["outside"]),
        ("distances", "How sites differ", run.assessment or run.distances),
        ("curves", "Learning curves", content.curves),
        ("figures", "Figures", figures),
        ("routing", "Routing", [found for found in content.adaptations if found.routes]),
        ("cases", "Cases", [page for page in content.sites if any(page["pictures"].values())]),
        ("traffic", "Bytes and time", content.traffic),
        ("ledger", "What left each site", content.ledgers or attacks),
        ("reproduce", "How to reproduce", True),
    ]
    names = dict(sites)
    return [
        {"id": page, "title": title, "site": names.get(page, "")}
        for page, title, shown in wanted
        if shown
    ]


def without_places(value: Any) -> Any:
    """Return a configuration whose absolute paths say no more of a machine than their last name.

    A page is sent to others, whom the folders of this machine, and the names in them, do not
    concern. Relative paths, and addresses of servers, stay.

    Args:
        value: A configuration as plain data, or a part of it.
    """
    if isinstance(value, Mapping):
        return {key: without_places(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_places(inner) for inner in value]
    if isinstance(value, str) and "://" not in value.replace(":///", ""):
        return _ABSOLUTE.sub(r"\1path/to/", value)
    return value


_ABSOLUTE = re.compile(r"(^|[a-z]{2}:)(?:[A-Za-z]:)?[/\\]+(?:[^/\\]+[/\\]+)*(?=[^/\\])")
"""The folders of an absolute path, as it is or in a URI such as file:///data/runs."""


def _reach(comparisons: Iterable[Comparison]) -> float:
    verdicts = [found.verdict for found in comparisons]
    return plots.reach(end for v in verdicts for end in (v.difference, v.low, v.high))


def _versions(info: Mapping[str, Any]) -> dict[str, str]:
    """Return versions and machine, the other content of ``run.json``."""
    found = {**info.get("versions", {}), **info.get("machine", {})}
    if digest := info.get("digest"):
        found["digest of the configuration"] = digest
    return {key: str(value) for key, value in found.items()}


def _commands(run: RunOutput, output: str) -> list[tuple[str, str]]:
    """Return the commands that make the run and this page again, and what each does."""
    versions = run.info.get("versions", {}).items()
    pins = [f"{name}=={version}" for name, version in versions if name not in _OWN]
    folder = shlex.quote(without_places(str(run.config.get("output") or output or "OUTPUT")))
    found = [("collegium run experiment.yaml", "trains, tests and writes this page")]
    if pins:
        pinned = f"python -m pip install {' '.join(map(shlex.quote, pins))}"
        found.insert(0, (pinned, "the packages that results depend on"))
    if run.assessment is not None:
        found.append(("collegium assess experiment.yaml", "reports how the sites differ"))
    found.append((f"collegium tables {folder}", "writes the tables as text, LaTeX and CSV"))
    found.append((f"collegium figures {folder}", "writes the figures as SVG and PDF"))
    found.append((f"collegium report {folder}", "writes this page again"))
    return found


_OWN = ("collegium", "python")
"""Entries of the versions that are no packages of a registry."""
