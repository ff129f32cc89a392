import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from collegium.cli import app
from collegium.errors import DataError
from collegium.evaluation.comparisons import joining_table
from collegium.evaluation.report.html import write_report
from collegium.evaluation.results import read_results, results_frame, write_results, write_rows
from collegium.evaluation.tables import method_table
from collegium.evaluation.writing import write_tables

GOLDEN = Path(__file__).parent / "golden"


def run_with(folder, rows, algorithms=("local", "fedavg", "ditto")):
    write_rows(folder / "fedavg" / "seed-0" / "rows.jsonl", results_frame(rows))
    config = {"algorithms": [{"name": name} for name in algorithms]}
    (folder / "run.json").write_text(json.dumps({"config": config}))


def records(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_table_of_a_run_is_written_in_every_form(tmp_path, three_methods, outside, cells_of):
    rows = three_methods + outside("fedavg", "none", "A", [0.5]) + outside(
        "fedavg", "tent", "A", [0.6]
    )  # fmt: skip
    run_with(tmp_path, rows)
    paths = write_tables(tmp_path)
    assert all(path.parent == tmp_path / "tables" for path in paths)
    assert sorted(path.name for path in paths) == [
        "dice-adapting.csv", "dice-adapting.md", "dice-adapting.tex", "dice-adapting.txt",
        "dice-joining.csv", "dice-joining.md", "dice-joining.tex", "dice-joining.txt",
        "dice-outside.csv", "dice-outside.md", "dice-outside.tex", "dice-outside.txt",
        "dice.csv", "dice.md", "dice.tex", "dice.txt", "verdicts.json",
    ]  # fmt: skip
    folder = tmp_path / "tables"
    fedavg = cells_of(method_table(results_frame(rows), "dice"))["FedAvg global"]["A"]
    written = [r for r in records(folder / "dice.csv") if r["method"] == "FedAvg global"]
    assert float(written[0]["mean"]) == fedavg.mean == pytest.approx(0.805)
    assert r"\textbf{0.805}" in (folder / "dice.tex").read_text()
    (adapting,) = records(folder / "dice-adapting.csv")
    assert float(adapting["difference"]) == pytest.approx(0.1)
    joined = joining_table(results_frame(rows), "dice").by_site
    assert len(records(folder / "dice-joining.csv")) == len(joined) + 2  # and the two over sites


def test_the_command_shows_the_comparisons_beside_the_tables(tmp_path, joined_rows):
    run_with(tmp_path, joined_rows)
    said = CliRunner().invoke(app, ["tables", str(tmp_path)]).output
    assert said.count("Does joining help this site? dice, higher is better") == 1
    (line,) = [text for text in said.splitlines() if text.startswith("A     Ditto personal")]
    assert line.split()[-9:] == ["8", "1", "<", "0.001", "<", "0.001", "no,", "this", "model"]


def test_the_results_of_a_finished_run_are_read_and_its_order_kept(tmp_path, three_methods):
    run_with(tmp_path, [], ("fedavg", "ditto", "local"))
    write_results(results_frame(three_methods), tmp_path)
    write_tables(tmp_path)
    methods = [r["method"] for r in records(tmp_path / "tables" / "dice.csv")]
    assert list(dict.fromkeys(methods)) == ["Local personal", "FedAvg global", "Ditto personal"]


def test_who_trains_alone_is_known_by_its_name_in_the_configuration(tmp_path, three_methods):
    rows = [
        {**row, "algorithm": "on our own"} if row["algorithm"] == "local" else row
        for row in three_methods
    ]
    run_with(tmp_path, rows)
    write_tables(tmp_path)
    assert "Nobody trained alone" in (tmp_path / "tables" / "dice-joining.md").read_text()
    algorithms = [{"name": "local", "label": "on our own"}, {"name": "fedavg"}]
    (tmp_path / "run.json").write_text(json.dumps({"config": {"algorithms": algorithms}}))
    write_tables(tmp_path)
    found = records(tmp_path / "tables" / "dice-joining.csv")
    assert [r["method"] for r in found][:2] == ["FedAvg global", "Ditto personal"]


def test_settings_of_a_sweep_have_their_own_files_and_one_together(tmp_path, scores, outside):
    rows = []
    for name in ("tau=0.5", "tau=0.9", "a/b", "a:b"):
        rows += scores("fedavg", "global", "A", [0.5], variation=name)
        rows += outside("fedavg", "none", "A", [0.25], variation=name)
    run_with(tmp_path, rows)
    names = {path.name for path in write_tables(tmp_path)}
    assert len(names) == 4 * 2 * (4 + 4) + 2 * 4 + 1
    assert names >= {
        "dice-tau=0.5.md", "dice-outside-tau=0.9.tex", "dice-tau=0.5-joining.md",
        "dice-tau=0.9-adapting.csv", "dice-sweep.csv", "dice-outside-sweep.txt",
        "dice-a_b.md", "dice-a_b_2.md",
    }  # fmt: skip
    adapting = (tmp_path / "tables" / "dice-tau=0.9-adapting.txt").read_text()
    assert adapting.startswith("Does adapting help this hospital? dice, tau=0.9, higher is better")
    sweep = records(tmp_path / "tables" / "dice-outside-sweep.csv")
    assert [(r["column"], r["mean"]) for r in sweep] == [
        ("a/b", "0.25"), ("a:b", "0.25"), ("tau=0.5", "0.25"), ("tau=0.9", "0.25"),
    ]  # fmt: skip


def test_an_algorithm_without_a_global_model_is_not_told_to_add_no_adapter(
    tmp_path, scores, outside
):
    rows = scores("fedbn", "personal", "A", [0.5]) + outside("fedbn", "ensemble", "B", [0.25])
    rows += scores("ditto", "global", "A", [0.5]) + outside("ditto", "tent", "B", [0.25])
    run_with(tmp_path, rows, ("ditto", "fedbn"))
    write_tables(tmp_path)
    for extension in ("md", "txt"):
        said = (tmp_path / "tables" / f"dice-adapting.{extension}").read_text()
        assert "an adapter of Ditto, so whether adapting helps cannot be said there. Add" in said
        assert "No global model comes from FedBN, so there is nothing unadapted to comp" in said


def test_a_run_without_scores_of_cases_has_no_tables(tmp_path, scores):
    with pytest.raises(DataError, match="no scores of test cases"):
        write_tables(tmp_path)
    run_with(tmp_path, scores("fedavg", "global", "A", [0.5], split="val"))
    with pytest.raises(DataError, match="no scores of test cases"):
        write_tables(tmp_path)


@pytest.mark.parametrize("text", ["{", '{"config": {"algorithms": [{}]}}', '{"config": 3}'])
def test_a_description_that_cannot_be_read_is_named(tmp_path, three_methods, text):
    run_with(tmp_path, three_methods)
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(DataError, match=r"run\.json: the description of the run cannot be read"):
        write_tables(tmp_path)


def test_writing_again_gives_the_same_bytes(tmp_path, three_methods):
    run_with(tmp_path, three_methods)
    first = {path: path.read_bytes() for path in write_tables(tmp_path)}
    assert {path: path.read_bytes() for path in write_tables(tmp_path)} == first


@pytest.mark.parametrize("extension", ["txt", "md", "tex", "csv"])
def test_tables_are_those_of_an_earlier_implementation_to_the_last_digit(tmp_path, extension):
    """The golden tables were written by dictionaries and `csv`, before results were a frame.

    Those of comparisons hold the verdicts of docs/statistics.md, whose numbers
    `test_comparisons.py` computes otherwise.

    Seeds, folds, settings, sites outside with their times, undefined scores, patients with two
    cases, methods that lack a site, and names that have to be escaped.
    """
    run = shutil.copytree(GOLDEN / "run", tmp_path / "run")
    paths = [path for path in write_tables(run) if path.suffix == f".{extension}"]
    paths = [path for path in paths if not re.search(r"-validation|-selected", path.name)]
    texts = [f"=== {path.name} ===\n{path.read_text(encoding='utf-8')}" for path in paths]
    expected = (GOLDEN / f"tables.{extension}").read_text(encoding="utf-8")
    assert [line.rstrip() for line in "\n".join(texts).split("\n")] == expected.split("\n")


def test_results_are_written_as_an_earlier_implementation_did(tmp_path):
    """It had no cross-validation, and so no number of a part."""
    csv_path, _ = write_results(read_results(GOLDEN / "run"), tmp_path)
    text = csv_path.read_text(encoding="utf-8")
    assert ",fold,part,variation," in text
    rows = [",".join([*line[:4], *line[5:]]) for line in (r.split(",") for r in text.splitlines())]
    assert {line.split(",")[4] for line in text.splitlines()[1:]} == {"0"}
    assert rows == (GOLDEN / "run" / "results.csv").read_text(encoding="utf-8").splitlines()


def test_tables_terminal_and_report_agree_where_a_class_is_rare(tmp_path, scores):
    """As at a hospital with two healthy patients of 37: it cannot be told from so few."""
    metric, rng = "balanced_accuracy", np.random.default_rng(3)
    rows = []
    for algorithm, model, right in (("local", "personal", 0.4), ("fedavg", "global", 0.95)):
        for site, healthy in (("zurich", 2), ("basel", 12)):
            truth = (np.arange(37) >= healthy).astype(float)
            values = (rng.random(37) < right).astype(float)
            for name in (metric, "accuracy"):
                rows += scores(algorithm, model, site, values, metric=name)
            rows += scores(algorithm, model, site, truth, metric="_class")
            about = {**rows[-1], "case": "", "patient": "", "metric": metric}
            rows.append({**about, "split": "val", "value": right})
    run_with(tmp_path, rows, ("local", "fedavg"))
    write_tables(tmp_path)
    answers = {
        c.verdict.site: c.verdict for c in joining_table(results_frame(rows), metric).comparisons
    }
    assert {site: v.outcome for site, v in answers.items()} == {
        "basel": "better", "zurich": "cannot tell", "average": "cannot tell",
    }  # fmt: skip
    found = records(tmp_path / "tables" / f"{metric}-joining.csv")
    assert {r["site"]: r["outcome"] for r in found} == {s: v.outcome for s, v in answers.items()}
    said = CliRunner().invoke(app, ["tables", str(tmp_path)]).output
    words = r"yes, this model|cannot tell"
    shown = dict(re.findall(rf"^(basel|zurich|average) .* ({words})$", said, re.MULTILINE))
    assert shown == {site: v.answer for site, v in answers.items()}
    for extension in ("md", "tex"):
        text = (tmp_path / "tables" / f"{metric}-joining.{extension}").read_text(encoding="utf-8")
        assert len(re.findall(r"(?m)^.*zurich.*cannot tell", text)) == 1
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert answers["zurich"].sentence in page
    assert answers["basel"].sentence in page
    assert "1 better, 0 worse, 1 cannot tell" in page
