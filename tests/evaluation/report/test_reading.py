import json
from typing import Any

import pytest

from collegium.errors import DataError
from collegium.evaluation.report.reading import read_assessment, read_run_output
from collegium.evaluation.results import results_frame, write_results


def test_the_one_that_trains_alone_is_known_by_its_name_in_the_configuration(tmp_path, make_run):
    make_run(tmp_path, overlays=False)
    path = tmp_path / "run.json"
    info = json.loads(path.read_text())
    info["config"]["algorithms"] = [{"name": "fedavg"}, {"name": "local", "label": "ditto"}]
    path.write_text(json.dumps(info))
    run = read_run_output(tmp_path)
    assert run.labels.local == "ditto"
    assert run.order == ("ditto", "fedavg", "fedbn", "local", "my own")


def test_of_a_sweep_the_rows_of_the_first_configured_setting_are_reported(tmp_path):
    rows = [
        {
            "experiment": "e",
            "algorithm": "fedavg",
            "seed": 0,
            "round": 1,
            "site": site,
            "split": "train",
            "metric": "loss",
            "value": 1.0,
            "variation": variation,
        }
        for site, variation in (("A", "k-10"), ("B", "k-2"), ("C", "k-3"))
    ]
    write_results(results_frame(rows), tmp_path)
    assert read_run_output(tmp_path).settings == ("k-2", "k-3", "k-10")
    (tmp_path / "run.json").write_text('{"config": {"variations": {"k-10": {}, "k-1": {}}}}')
    run = read_run_output(tmp_path)
    assert (run.setting, run.settings, run.sites) == ("k-10", ("k-10", "k-2", "k-3"), ["A"])
    assert run.sweep is not None
    assert len(run.sweep) == 3


@pytest.mark.parametrize("text", ["{", "[3]", '{"config": 3}'])
def test_a_damaged_description_is_named(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(DataError, match=r"run\.json: .*restore the file, or remove it"):
        read_run_output(tmp_path)


def test_an_assessment_is_found_in_either_place(tmp_path):
    assert read_assessment(tmp_path) is None
    content: dict[str, Any] = {"sites": [], "findings": {}, "verdict": {}}
    (tmp_path / "assessment.json").write_text(json.dumps(content))
    assert read_assessment(tmp_path) == content
    (tmp_path / "assessment").mkdir()
    (tmp_path / "assessment" / "assessment.json").write_text('{"sites": []}')
    with pytest.raises(DataError, match="this is no assessment; assess again"):
        read_assessment(tmp_path)
