"""The field case of values beyond a limit of detection, and siblings of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from collegium import cli
from collegium.data.tables import Moments, TableConfig, encode, read_table
from collegium.errors import DataError


def inspect(folder: Path, *overrides: str) -> tuple[int, str]:
    done = CliRunner().invoke(
        cli.app, ["inspect", *(str(folder / o) for o in overrides[:1]), *overrides[1:]]
    )
    return done.exit_code, " ".join(done.output.split())


def test_tab11_the_refusal_counts_them_and_offers_a_rule(
    folder: Path, values: dict[str, Any]
) -> None:
    code, words = inspect(folder, "f.yaml")
    below, above = len(values["crp"]["below"]), len(values["bili"]["above"])
    assert code == 3
    assert (
        "problem: site a: a.csv, row 1: column crp holds a value below a limit, not a number (in "
        f"all crp {below} below, bili {above} above); set table.censored to limit or half: "
    ) in words
    assert "table.missing" not in words


@pytest.mark.parametrize(("rule", "share"), [("limit", 1), ("half", 0.5)])
def test_tab11_the_limit_or_half_of_it_with_a_feature_that_tells_them(
    folder: Path, values: dict[str, Any], rule: Any, share: float
) -> None:
    code, words = inspect(folder, "f.yaml", f"federation.table.censored={rule}")
    assert code == 0
    assert "crp holds values beyond a limit in 2 of 4 rows; the limit or half of it stands" in words
    for indicators in (False, True):
        config = TableConfig("label", ("crp", "bili"), indicators=indicators, censored=rule)
        table = read_table(folder / "a.csv", config)
        first, last = (limit * share for limit in values["crp"]["below"])
        (highest,) = values["bili"]["above"]
        assert table.numbers.tolist() == [[first, 1.2], [12.1, highest], [3.4, 0.8], [last, 1.1]]
        rows = encode(table, config, Moments.of(table.numbers).scaling())
        assert rows.shape == (4, config.features)
        assert rows[:, -2:].tolist() == [[1, 0], [0, 1], [0, 0], [1, 0]]
        assert config.groups == ([[0, 2, 4], [1, 3, 5]] if indicators else [[0, 2], [1, 3]])


def test_tab11_those_that_are_declared_missing_are_told_of(folder: Path) -> None:
    code, words = inspect(folder, "g.yaml")
    assert code == 0
    assert "crp holds values beyond a limit in 2 of 4 rows, which table.missing makes miss" in words
    assert "they become the mean" in words


def refusal(folder: Path, *cells: str, **settings: Any) -> str:
    (folder / "t.csv").write_text("x;y\n" + "".join(f"{cell};0\n" for cell in cells), "utf-8")
    with pytest.raises(DataError) as error:
        read_table(folder / "t.csv", TableConfig("y", ("x",), **settings))
    assert "table.missing" not in str(error.value)
    return str(error.value)


def test_tab11_sibling_grades_of_a_strip(tmp_path: Path) -> None:
    for rule in ("refuse", "half"):
        text = refusal(tmp_path, "1.5", "neg", "+", "++", censored=rule)
        assert text.startswith(
            "t.csv, row 2: column x holds a grade such as neg or +, not a number"
        )
        assert "name the column in table.categorical" in text
    grades = TableConfig("y", (), {"x": ("-", "neg", "+", "++")})
    (tmp_path / "t.csv").write_text("x;y\n-;0\nneg;0\n++;1\n+;1\n?;0\n", "utf-8")
    table = read_table(tmp_path / "t.csv", grades)
    assert table.codes[:, 0].tolist() == [0, 1, 3, 2, 4]
    assert table.missing == {"x": 1}


@pytest.mark.parametrize("cell", ["12.3 mg/L", "5 %", "<0.5 mg/L"])
def test_tab11_sibling_units_in_cells(tmp_path: Path, cell: str) -> None:
    text = refusal(tmp_path, "3", "4", cell, censored="limit")
    assert text.startswith("t.csv, row 3: column x holds a ")
    assert "unit" in text
    assert cell not in text


def test_tab11_sibling_other_signs_decimal_commas_and_words(tmp_path: Path) -> None:
    cells = ["<= 5", "\u22645", ">= 0,5", "below 0,5", "<-2", "2,5", "?"]
    (tmp_path / "t.csv").write_text("x;y\n" + "".join(f"{c};0\n" for c in cells), "utf-8")
    table = read_table(tmp_path / "t.csv", TableConfig("y", ("x",), censored="half"))
    np.testing.assert_array_equal(table.numbers[:, 0], [2.5, 2.5, 0.5, 0.25, -2, 2.5, np.nan])
    assert table.censored[:, 0].tolist() == [True] * 5 + [False] * 2
    assert "(in all x 1 above, x 4 below)" in refusal(tmp_path, *cells)
    assert "a limit that is no number" in refusal(tmp_path, "1", "<LOD", censored="half")
