import pytest

from collegium.core.text import (
    did_you_mean,
    format_bytes,
    format_duration,
    with_formula,
    without_formula,
)


def test_the_closest_word_is_suggested_and_no_distant_one():
    assert did_you_mean("fedagv", ["fedavg", "ditto"]) == "; did you mean 'fedavg'?"
    assert did_you_mean("x", ["fedavg", "ditto"]) == ""


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_250_000, "1.2 MB"), (2_149_000, "2.1 MB"),
     (10**9, "1.0 GB"), (3.2e9, "3.2 GB"), (None, "\u2013")],
)  # fmt: skip
def test_sizes_are_decimal(count: float | None, text: str):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.4, "0 s"), (59.6, "60 s"), (119, "119 s"), (150, "2 min"), (7199, "120 min"),
     (7500, "2.1 h"), (9000, "2.5 h")],
)  # fmt: skip
def test_durations_are_in_seconds_minutes_or_hours(seconds: float, text: str):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    "cell",
    [
        "=1+1",
        "+cmd|' /C calc'!A0",
        "-2+3",
        "@SUM(A1)",
        "\t=1",
        "\r=1",
        "'=1",
        "''-x",
        "\uff1d1",
        "-x",
    ],
)
def test_formulas_get_an_apostrophe_that_can_be_taken_off(cell: str):
    assert without_formula(cell) == f"'{cell}"
    assert with_formula(f"'{cell}") == cell


@pytest.mark.parametrize(
    "cell", ["", "a", "-1.5", "+3", "-1e-05", "-.5", "-", "1-2", "a=b", "'a", "nan", " =1"]
)
def test_numbers_and_other_text_stay_as_they_are(cell: str):
    assert without_formula(cell) == with_formula(cell) == cell
