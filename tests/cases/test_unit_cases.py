"""The field case of units that differ between sites, and siblings of it."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from collegium import cli

FEDERATION = """
name: f
sites: {{{sites}}}
task: {{name: classification, classes: ["0", "1"]}}
table: {{label: label, numeric: [{column}], scale: federation}}
"""
RUN = "model: {name: logistic}\nrounds: 1\nalgorithms: [fedavg]\noutput: run\n"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def notes(column: str, **sites: Any) -> list[str]:
    """Write a table of one column for each site; return what `inspect` notes of the federation."""
    for name, values in sites.items():
        rows = [f"{value:.2f},{row % 2}" for row, value in enumerate(values)]
        Path(f"{name}.csv").write_text("\n".join([f"{column},label", *rows]) + "\n")
    tables = ", ".join(f"{name}: {{table: {name}.csv}}" for name in sites)
    Path("f.yaml").write_text(FEDERATION.format(sites=tables, column=column))
    told: list[str] = json.loads(call("inspect", "f.yaml", "--json").output)["notes"]
    return told


def drawn(seed: int, mean: float, deviation: float, count: int = 40) -> Any:
    return np.random.default_rng(seed).normal(mean, deviation, count)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_tab10_ranges_and_units_of_creatinine(
    folder: Path, values: dict[str, Any], place: Path
) -> None:
    us, eu, mix = values["sites"]
    found = json.loads(call("inspect", str(folder / "f.yaml"), "--json").output)
    ranges = {site["name"]: site["numbers"]["crea"] for site in found["sites"]}
    assert ranges[us] == {"known": 30, "least": 0.69, "median": 0.96, "greatest": 1.57}
    assert ranges[eu]["median"] == pytest.approx(100.045)
    assert (ranges[mix]["least"], ranges[mix]["greatest"]) == (0.72, 141.77)
    between, within = found["notes"]
    unit = f"(mg/dL and umol/L, a factor of {values['factor']}?)"
    assert between.startswith(f"crea: the median at {eu} is 104 times that at {us}, 100 and 0.96 ")
    assert within.startswith(f"crea: site {mix} holds two groups of values 89.4 times apart, ")
    assert unit in between
    assert unit in within
    text = call("inspect", str(folder / "f.yaml")).output
    assert ["crea", "us", "30", "0.69", "0.96", "1.57"] in [
        line.split() for line in text.split("\n")
    ]
    assert f"note: {between}" in text
    assert f"note: {within}" in text


def test_tab10_a_run_says_the_same_before_it_draws_splits(
    folder: Path, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(folder, place / "data", copy_function=shutil.copyfile)
    (place / "data" / "e.yaml").write_text(f"name: e\nfederation: f.yaml\n{RUN}")
    told = json.loads(call("inspect", "data/f.yaml", "--json").output)["notes"]
    (place / "run" / "splits").mkdir(parents=True)
    (place / "run" / "splits" / "eu.json").write_text("damaged")
    with caplog.at_level(logging.WARNING, "collegium"):
        assert call("run", "data/e.yaml").exit_code == 3
    assert [r.message for r in caplog.records if r.message.startswith("crea: ")] == told
    assert len(told) == 2


def test_tab10_sibling_temperature_in_fahrenheit(place: Path) -> None:
    (note,) = notes(
        "temp", a=drawn(0, 37.1, 0.6), b=drawn(1, 98.8, 1.1), c=drawn(2, 36.9, 0.5),
    )  # fmt: skip
    assert note.startswith("temp: the median at b is 2.67 times that at a, c, 98.9 and 37 (")
    assert "(degrees C and degrees F, a factor of 1.8 and 32 more?)" in note
    both = np.concatenate([drawn(0, 37.1, 0.6), drawn(1, 98.8, 1.1, 5)])
    (note,) = notes("temp", a=both, b=drawn(2, 36.9, 0.5))
    assert "temp: site a holds two groups of values" in note
    assert "40 rows around 37" in note


def test_tab10_sibling_height_in_metres(place: Path) -> None:
    (note,) = notes("height", a=drawn(0, 171, 9), b=drawn(1, 1.69, 0.1))
    assert note.startswith("height: the median at a is 10")
    assert "times that at b, 17" in note
    assert "(m and cm, a factor of 100?)" in note


def test_tab10_sibling_age_in_months_at_a_childrens_hospital(place: Path) -> None:
    adults, children = drawn(0, 61, 12), np.linspace(4, 200, 40)
    (note,) = notes("age", adults=adults, kids=children)
    assert note.startswith("age: more than 120 in 40% of the rows at kids (years and months, ")
    (note,) = notes("age", other=children / 12, kids=children)
    assert note.startswith("age: the median at kids is 12 times that at other, 102 and 8.5 (years ")
    assert notes("age", adults=adults, kids=children / 12, old=drawn(2, 80, 6)) == []


def test_tab10_sibling_an_unknown_quantity_in_a_unit_1000_times_as_large(place: Path) -> None:
    (note,) = notes("marker", a=drawn(0, 3.2, 0.4), b=drawn(1, 3200, 400))
    assert note.startswith("marker: the median at b is 10")
    assert "(another unit?)" in note
