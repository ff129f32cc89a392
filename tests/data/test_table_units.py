"""Which numeric columns look as if their units differed, and which do not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collegium.data.table_units import unit_notes
from collegium.data.tables import TableConfig, read_table


def notes(folder: Path, column: str, **sites: Any) -> list[str]:
    for name, values in sites.items():
        (folder / f"{name}.csv").write_text("\n".join([column, *map(str, values)]))
    config = TableConfig("y", (column,))
    tables = {n: read_table(folder / f"{n}.csv", config, labelled=False) for n in sites}
    return unit_notes(tables, config.numeric)


def sample(seed: int, middle: float, sigma: float, count: int = 60) -> list[float]:
    """Log-normal values, as laboratories have them."""
    values = middle * np.exp(sigma * np.random.default_rng(seed).normal(size=count))
    return [round(float(value), 4) for value in values]


@pytest.mark.parametrize(
    ("column", "low", "factor", "units"),
    [
        ("Serum_Creatinine", 0.9, 88.4, "mg/dL and umol/L"),
        ("fasting glucose", 5.4, 18, "mmol/L and mg/dL"),
        ("HDL", 1.3, 38.67, "mmol/L and mg/dL"),
        ("TG", 1.5, 88.57, "mmol/L and mg/dL"),
        ("bilirubin", 0.8, 17.1, "mg/dL and umol/L"),
        ("urea", 5.0, 2.8, "urea in mmol/L and BUN in mg/dL"),
        ("lab_hb", 13.5, 10, "g/dL and g/L"),
        ("weight", 74, 2.2046, "kg and lb"),
        ("age", 6, 12, "years and months"),
    ],
)
def test_the_units_of_known_quantities_are_named(
    tmp_path: Path, column: str, low: float, factor: float, units: str
) -> None:
    (note,) = notes(
        tmp_path, column, a=sample(0, low, 0.15), b=sample(1, low * factor, 0.15),
        c=sample(2, low * 1.1, 0.15),
    )  # fmt: skip
    assert note.startswith(f"{column}: the median at b is ")
    assert "times that at a, c, " in note
    assert f"({units}, a factor of {factor:g}?)" in note


@pytest.mark.parametrize(
    ("column", "sites"),
    [
        ("crp", {"a": sample(0, 3, 1.2), "b": sample(1, 9, 1.2)}),
        ("troponin", {"a": [*sample(0, 0.02, 0.5), *sample(1, 4, 1.2)]}),
        ("ferritin", {"a": sample(0, 10, 2.5), "b": sample(1, 120, 2.5)}),
        ("marker", {"a": sample(0, 3, 0.1), "b": sample(1, 12, 0.1)}),
        ("creatinine", {"a": sample(0, 3, 3.3, 400)}),
        ("code", {"a": [1] * 20 + [100] * 20}),
        ("oldpeak", {"a": [0] * 40 + [1.5, 2, 2.5] * 5, "b": [0] * 9}),
        ("weight", {"a": sample(0, 74, 0.2), "b": sample(1, 96, 0.2)}),
        ("psa", {"a": sample(0, 4, 1.0, 400)}),
        ("x", {"a": np.linspace(1, 300, 60), "b": [5, 6]}),
        ("base_excess", {"a": [-3, -1, 0, 2, 40], "b": [-2, 1, 3, 4, 5]}),
        ("temp", {"a": [36.1, 36.8, 37.0, 38.9], "b": [35, 36, 41, 36.6]}),
    ],
)
def test_patients_that_differ_are_no_unit(
    tmp_path: Path, column: str, sites: dict[str, Any]
) -> None:
    assert notes(tmp_path, column, **sites) == []


@pytest.mark.slow
def test_the_four_hospitals_of_heart_disease_are_not_flagged(shared_data: Path) -> None:
    columns = ("age", "trestbps", "chol", "thalach", "oldpeak", "ca", "thal", "cp", "slope")
    for zero in ((), ("chol", "trestbps")):
        config = TableConfig("num", columns, zero_is_missing=zero)
        files = sorted((shared_data / "heart").glob("*.csv"))
        tables = {file.stem: read_table(file, config) for file in files}
        assert len(tables) == 4
        assert unit_notes(tables, columns) == []
