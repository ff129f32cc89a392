"""Assess a federation, and write what was found as numbers and as a page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from collegium import __version__
from collegium.core.files import write_atomically
from collegium.core.text import format_bytes
from collegium.data.federation_config import sites_of
from collegium.diagnostics.assessment.findings import find
from collegium.diagnostics.assessment.survey import FOLDER, Assessment, RemoteSites, survey_sites
from collegium.diagnostics.assessment.verdict import GEOMETRIES, judge
from collegium.evaluation.report.assessment import short
from collegium.evaluation.report.rendering import render_page
from collegium.experiment.config.experiment import ExperimentConfig
from collegium.heterogeneity.survey import PARTS


def overview(data: Mapping[str, Any]) -> tuple[list[dict[str, str]], list[str]]:
    """Return a row per site, and what was found in sentences, for a terminal.

    Args:
        data: the content of ``assessment.json``.
    """
    findings, verdict = data["findings"], data["verdict"]
    rows = []
    for site in data["sites"]:
        entry = data["exchanged"][site]
        row = {"site": site, "cases": str(findings["cases"].get(site, ""))}
        for geometry in findings["geometries"]:
            place = geometry["sites"].index(site) if site in geometry["sites"] else None
            total = "" if place is None else short(sum(geometry["matrix"][place]))
            mark = " (farthest)" if site == geometry["most_distant"] else ""
            row[f"distances: {GEOMETRIES[geometry['key']]}"] = total + mark
        row["left the site"] = format_bytes(entry["bytes_up"])
        row["withheld"] = "failed" if entry["failed"] else ", ".join(entry["withheld"])
        rows.append(row)
    failures = [
        f"{site} could not answer: {entry['failed']}"
        for site, entry in data["exchanged"].items()
        if entry["failed"]
    ]
    advice = [f"{entry['sure']}: {entry['text']}" for entry in verdict["advice"]]
    notes = [f"note: {note}" for note in findings["notes"]]
    return rows, [*failures, *notes, f"{verdict['headline']} {verdict['why']}".strip(), *advice]


def assess(
    config: ExperimentConfig,
    survey: Assessment | None = None,
    remote: RemoteSites | None = None,
) -> Path:
    """Ask all sites, find out how different they are, and write ``assessment.json`` and the page.

    Args:
        config: the experiment; nothing of it is trained.
        survey: what the sites are asked, and how.
        remote: the sites, if they are not on this machine.

    Returns:
        The folder with both files, ``assessment`` in the experiment's output folder.

    Raises:
        CollegiumError: the configuration or a site's files are unusable, or the disk is full.
    """
    survey = survey or Assessment()
    replies, exchanged = survey_sites(config, survey, remote)
    questions, sites = survey.questions(), sites_of(config.federation)
    findings = find(replies, questions, config.federation.task.classes, config.seeds[0])
    data: dict[str, Any] = {
        "collegium": __version__,
        "federation": config.federation.name,
        "seed": config.seeds[0],
        "asked": {
            **survey.hyperparameters(),
            "parts": {p: PARTS[p].description for p in questions.parts},
        },
        "sites": sites,
        "exchanged": exchanged,
        "findings": asdict(findings),
        "verdict": asdict(judge(findings, sites)),
    }
    folder = Path(config.output) / FOLDER
    write_atomically(folder / "assessment.json", json.dumps(data, indent=1).encode())
    page = render_page("assessment.html.j2", data)
    write_atomically(folder / "assessment.html", page.encode())
    return folder
