"""Every shipped experiment: terminal, tables, JSON, report and tracking show one verdict.

Nothing is trained; each job has scores as it would have them, at random.
"""

import html
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collegium.core.payloads import GLOBAL, OTHER_GLOBAL, PERSONAL
from collegium.data.federation_config import sites_of
from collegium.data.phantoms import make_federation
from collegium.evaluation.report.html import write_report
from collegium.evaluation.results import ROWS_FILE, SELECTION, results_frame, write_rows
from collegium.evaluation.verdicts import Verdict, from_record
from collegium.evaluation.writing import run_answers, write_tables
from collegium.experiment.config.building import adapters_of, build_algorithm, task_of
from collegium.experiment.config.experiment import ExperimentConfig, load_config, to_dict
from collegium.experiment.grid import Job, jobs_of
from collegium.experiment.tracking.content import page_for_a_server
from collegium.tasks import EVENTS, SET_METRICS

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml"))
QUICK = {"demo", "heart", "vessel", "vessel-outside-ttt"}
"""The experiments that are held to it in the quick tests."""

PATIENTS = (4, 9, 12)
"""Test patients of the sites in turn, of which the first has too few."""


def scored(config: ExperimentConfig, rng: Any, truth: Any, level: float) -> dict[str, Any]:
    """The scores of the cases of a site by metric, with what those of a set are made of."""
    metric = task_of(config).metric
    if metric not in {*SET_METRICS, "accuracy"}:
        return {metric: np.clip(level + rng.normal(0, 0.02, truth.size), 0, 1)}
    chance = np.clip(0.5 + (truth - 0.5) * level + rng.normal(0, 0.3, truth.size), 0, 1)
    right = ((chance > 0.5) == truth).astype(float)
    found = {"accuracy": right, metric: right, "_class": truth, "_p0": 1 - chance, "_p1": chance}
    return {**dict.fromkeys(SET_METRICS, right), **found}


def rows_of_job(job: Job, rng: Any) -> Iterator[dict[str, Any]]:
    """The rows of a finished job."""
    config, method = job.config, build_algorithm(job.algorithm)
    about = {"experiment": config.name, "algorithm": job.algorithm.label, "seed": job.seed,
             "fold": job.fold, "variation": job.variation}  # fmt: skip
    kinds = [GLOBAL, OTHER_GLOBAL[config.selection.by]] if method.has_global else []
    kinds += [PERSONAL] if method.has_personal or not kinds else []
    metric, last = task_of(config).metric, 12
    for place, site in enumerate(sorted(sites_of(config.federation))):
        truth = (np.arange(PATIENTS[place % 3]) % 2).astype(float)
        for kind in kinds:
            level = 0.45 + 0.1 * (kind == PERSONAL) + 0.05 * (place % 2)
            own = {**about, "site": site, "model": kind}
            for number in range(1, last + 1):
                value = level + 0.01 * number
                if kind != OTHER_GLOBAL[config.selection.by]:
                    yield {**own, "round": number, "split": "val", "metric": metric, "value": value}
            few = {"split": SELECTION, "metric": EVENTS, "value": place}
            yield {**own, "round": last, **few}
            for name, values in scored(config, rng, truth, level).items():
                for case, value in enumerate(values):
                    named = {"case": f"c{case:02}", "patient": f"p{case:02}", "split": "test"}
                    yield {**own, "round": last, **named, "metric": name, "value": value}
    outside = [job.left_out] if job.left_out else config.federation.outside
    for site in outside:
        for adapter in adapters_of(config, job.algorithm):
            for case, value in enumerate(0.5 + rng.normal(0, 0.02, 9)):
                named = {"case": f"o{case:02}", "patient": f"o{case:02}", "split": "outside"}
                yield {**about, "site": site, "model": adapter.label, "round": last, **named,
                       "metric": metric, "value": value}  # fmt: skip


def adapts(run: ExperimentConfig) -> bool:
    """Whether an algorithm's models are scored outside with an adapter and without."""
    labels = [[a.label for a in adapters_of(run, algorithm)] for algorithm in run.algorithms]
    return any("none" in those and len(those) > 1 for those in labels)


@pytest.fixture
def run(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExperimentConfig:
    monkeypatch.setenv("COLLEGIUM_DATA", str(tmp_path))
    path = Path(shutil.copytree(ROOT / "configs", tmp_path / "configs")) / request.param
    make_federation(tmp_path / "demo-data", 4, cases=4, size=32)
    config = load_config(path, [f"output={tmp_path / 'run'}"])
    rng = np.random.default_rng(3)
    for job in jobs_of(config):
        write_rows(job.folder / ROWS_FILE, results_frame(rows_of_job(job, rng)))
    about = {"config": to_dict(config)}
    (tmp_path / "run" / "run.json").write_text(json.dumps(about))
    return config


def test_every_shipped_experiment_is_among_them() -> None:
    assert {"heart", "vessel", "hippocampus", "tau"} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem in QUICK else pytest.mark.slow)
        for path in CONFIGS
    ],
    indirect=True,
)
def test_terminal_tables_json_report_and_tracking_say_the_same(run: ExperimentConfig) -> None:
    folder, metric = Path(run.output), task_of(run).metric
    *files, verdicts = write_tables(folder)
    texts = {path.name: path.read_text(encoding="utf-8") for path in files}
    lines = run_answers(folder)
    pages = [write_report(folder).read_text(encoding="utf-8"), page_for_a_server(folder, run)]
    entries = json.loads(verdicts.read_text(encoding="utf-8"))
    shown = next(iter(run.variations), "")
    answered = 0
    for entry in entries:
        verdict = from_record(Verdict, entry["verdict"])
        assert (entry["answer"], entry["sentence"]) == (verdict.answer, verdict.sentence)
        setting = f"-{entry['variation']}" if entry["variation"] else ""
        stem = re.sub(r"[^\w.=+-]+", "_", f"{verdict.metric}{setting}-{verdict.question}")
        sentence = re.sub(r"([\\`*_<>|\[\]])", "", verdict.sentence)
        marked = re.sub(r"([\\`*_<>|\[\]])", "", html.unescape(texts[f"{stem}.md"]))
        assert sentence in marked
        assert f"{verdict.site}," in texts[f"{stem}.csv"]
        assert verdict.answer in texts[f"{stem}.txt"]
        if verdict.metric != metric or entry["over_sites"]:
            continue
        if entry["chosen"] or verdict.question == "adapting":
            answered += 1
            said = [line for line in lines if line.endswith(verdict.sentence)]
            assert any(line.startswith(f"{verdict.site}: {verdict.answer}. ") for line in said)
            if entry["variation"] == shown:
                for page in pages:  # of many adapted methods a page counts the answers
                    assert f">{verdict.answer.capitalize()}</span>" in page
                    assert entry["chosen"] <= (verdict.sentence in html.unescape(page))
    alone = any(algorithm.name == "local" for algorithm in run.algorithms)
    assert answered > 0 or not (alone or adapts(run))
    notes = [line for line in lines if "The round of each model is" in line]
    assert bool(notes) == alone
    assert all(note in html.unescape(page) for note in notes for page in pages)
