"""What the cells of numeric columns hold."""

import pytest

from collegium.data.cells import Limit, limit_of, parse_number, what_is_wrong


@pytest.mark.parametrize(
    ("cell", "side", "text"),
    [
        ("<0.5", "below", "0.5"),
        ("< 0,5", "below", "0,5"),
        ("<= 5", "below", "5"),
        ("=<5", "below", "5"),
        ("\u22645", "below", "5"),
        ("\uff1c5", "below", "5"),
        ("&lt;5", "below", "5"),
        ("below 0.5", "below", "0.5"),
        ("Less than 3", "below", "3"),
        (">30", "above", "30"),
        (">= 30", "above", "30"),
        ("\u226530", "above", "30"),
        ("over 30", "above", "30"),
        ("<0.5 mg/L", "below", "0.5 mg/l"),
        ("<10\u00b3", "below", "10\u00b3"),
        ("<LOD", "below", ""),
        ("BLQ", "below", ""),
        ("below detection limit", "below", ""),
    ],
)
def test_limits_are_read_however_they_are_written(cell: str, side: str, text: str) -> None:
    assert limit_of(cell) == Limit(side, text)


@pytest.mark.parametrize("cell", ["0.5", "-3", "neg", "underweight", "overall", "a<5", ""])
def test_other_cells_are_no_limits(cell: str) -> None:
    assert limit_of(cell) is None


@pytest.mark.parametrize(
    ("cell", "kind"),
    [
        ("neg", "a grade"), ("Negativ", "a grade"), ("+", "a grade"), ("++", "a grade"),
        ("(+)", "a grade"), ("2+", "a grade"), ("trace", "a grade"),
        ("12.3 mg/L", "a unit"), ("5 %", "a unit"), ("5%", "a unit"), ("36.8\u00b0C", "a unit"),
        ("12.3*", "a unit"), ("4.1 H", "a unit"), ("5 10^9/L", "a unit"),
        ("05. Jan", "a date"), ("Jan 05", "a date"), ("5-Mar", "a date"), ("M\u00e4r 99", "a date"),
        ("2024-05-01", "a date or a time"), ("05.01.2024", "a date or a time"),
        ("1/5/2024", "a date or a time"), ("1/5", "a date or a time"),
        ("2024-05-01 00:00:00", "a date or a time"), ("12:30", "a date or a time"),
        ("#DIV/0!", "an error of a spreadsheet"), ("#N/A", "an error of a spreadsheet"),
        ("=A1/B1", "a formula"),
        ("1 234", "a mark between thousands"), ("1'234.5", "a mark between thousands"),
        ("1,234", "no number (the decimal mark is '.'"),
        ("1.234.567", "no number (the decimal mark is '.'"),
    ],
)  # fmt: skip
def test_what_stands_instead_of_a_number_is_told_by_kind_and_never_made_missing(
    cell: str, kind: str
) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_number(cell, ".")
    kind = {"a unit": "a number with a unit"}.get(kind, kind)
    sentence = what_is_wrong(cell, ".")
    assert sentence.startswith(f"holds {kind}")
    assert "table.missing" not in sentence
    assert cell not in sentence.replace("neg or +", "")


@pytest.mark.parametrize("cell", ["Meier", "not done", "x"])
def test_another_word_may_be_declared_missing_only_if_nothing_was_measured(cell: str) -> None:
    assert "only if it says that nothing was measured" in what_is_wrong(cell, ".")


@pytest.mark.parametrize(
    ("cell", "mark", "number"),
    [("-1.5e3", ".", -1500), ("-1,5", ",", -1.5), ("1e5", ",", 1e5), ("+7", ".", 7)],
)
def test_numbers_are_read_with_their_mark(cell: str, mark: str, number: float) -> None:
    assert parse_number(cell, mark) == number
