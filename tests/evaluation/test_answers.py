"""One answer on every road: tables, report, terminal and JSON say the same words."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from collegium.cli import app
from collegium.evaluation.answers import answer_lines
from collegium.evaluation.comparisons import joining_table
from collegium.evaluation.report.html import write_report
from collegium.evaluation.results import results_frame, write_rows
from collegium.evaluation.verdicts import Verdict, from_record
from collegium.evaluation.writing import run_answers, write_tables


@pytest.fixture
def run(tmp_path: Path, scores: Any, outside: Any) -> tuple[Path, Any]:
    """Three trainings at four sites: one gains, one loses, one too little, one of four patients."""
    rng, rows = np.random.default_rng(6), []
    sites = {"basel": (0.1, 9), "kyoto": (-0.1, 9), "leeds": (0.001, 9), "quito": (0.1, 4)}
    for site, (gain, count) in sites.items():
        patients = rng.normal(0.6, 0.05, count)
        for seed in range(3):
            for name, model, mean in (("local", "personal", 0.0), ("fedavg", "global", gain)):
                values = patients + mean + rng.normal(0, 0.002, count)
                rows += scores(name, model, site, values, seed=seed)
                last = {**rows[-1], "split": "val", "case": "", "patient": "", "value": mean}
                rows.append(last)
    for seed in range(3):
        plain = rng.normal(0.5, 0.05, 8)
        rows += outside("fedavg", "none", "A", plain, seed=seed)
        rows += outside("fedavg", "tent", "A", plain + rng.normal(0.08, 0.005, 8), seed=seed)
    write_rows(tmp_path / "fedavg" / "seed-0" / "rows.jsonl", results_frame(rows))
    config = {"algorithms": [{"name": "local"}, {"name": "fedavg"}]}
    (tmp_path / "run.json").write_text(json.dumps({"config": config}))
    return tmp_path, rows


def test_tables_report_terminal_and_json_say_the_same(run: tuple[Path, Any]) -> None:
    folder, _ = run
    *files, verdicts = write_tables(folder)
    entries = json.loads(verdicts.read_text(encoding="utf-8"))
    found = {
        (e["verdict"]["site"], e["verdict"]["question"]): from_record(Verdict, e["verdict"])
        for e in entries
        if not e["over_sites"]
    }
    assert {place: v.answer for place, v in found.items()} == {
        ("basel", "joining"): "yes", ("kyoto", "joining"): "no",
        ("leeds", "joining"): "no relevant difference", ("quito", "joining"): "cannot tell",
        ("A", "adapting"): "yes",
    }  # fmt: skip
    said = CliRunner().invoke(app, ["tables", str(folder)]).output
    page = write_report(folder).read_text(encoding="utf-8")
    texts = {path.name: path.read_text(encoding="utf-8") for path in files}
    for (site, question), verdict in found.items():
        entry = next(e for e in entries if e["verdict"]["site"] == site)
        assert (entry["answer"], entry["sentence"]) == (verdict.answer, verdict.sentence)
        assert re.search(rf"(?m)^{site}: {verdict.answer}\. .*{re.escape(verdict.sentence)}$", said)
        assert verdict.sentence in page
        assert f">{verdict.answer.capitalize()}</span>" in page
        stem = f"dice-{question}"
        assert re.search(rf"(?m)^{site} .* {verdict.answer}$", texts[f"{stem}.txt"])
        assert f"| {verdict.answer} | {verdict.sentence} |" in texts[f"{stem}.md"]
        assert re.search(rf"(?m)^    {site} & .* & {verdict.answer} ", texts[f"{stem}.tex"])
        assert re.search(rf"(?m)^{site},.*,{verdict.answer},", texts[f"{stem}.csv"])
    assert said.splitlines()[-1] == str(folder / "tables")


def test_the_terminal_asks_and_answers_with_numbers(run: tuple[Path, Any]) -> None:
    folder, _ = run
    lines = run_answers(folder)
    assert lines[0] == "Does joining help this site?"
    assert re.match(
        r"basel: yes\. FedAvg global, Dice 0\.\d{3} alone, 0\.\d{3} joined, difference \+0\.\d{3} "
        r"\[\+0\.\d{3}, \+0\.\d{3}\]\. Joining helps here relevantly: ",
        lines[1],
    )
    assert lines[5] == "Does adapting help this hospital?"
    assert len(lines) == 7


def test_the_smallest_relevant_difference_of_the_run_counts_everywhere(
    run: tuple[Path, Any],
) -> None:
    folder, _ = run
    info = json.loads((folder / "run.json").read_text())
    info["config"]["report"] = {"relevant": {"dice": 0.5}}
    (folder / "run.json").write_text(json.dumps(info))
    verdicts = json.loads(write_tables(folder)[-1].read_text(encoding="utf-8"))
    assert {e["verdict"]["relevant"] for e in verdicts} == {0.5}
    assert "basel: no relevant difference." in "\n".join(run_answers(folder))
    assert "smaller than 0.5 (" in write_report(folder).read_text(encoding="utf-8")


def test_without_validation_no_method_is_chosen(joined_rows: Any) -> None:
    lines = answer_lines(joining_table(results_frame(joined_rows), "dice"))
    assert lines[1:] == ["A: no method was chosen, for no score on validation is defined there."]
