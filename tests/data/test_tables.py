"""What the cells of a table mean, and how rows become numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from sklearn.preprocessing import MinMaxScaler

from collegium.data.tables import (
    Moments,
    Ranges,
    Scaling,
    Table,
    TableConfig,
    encode,
    read_table,
    vocabulary,
)
from collegium.errors import ConfigError, DataError


def read(folder: Path, text: str, **settings: Any) -> Table:
    (folder / "t.csv").write_text(text, "utf-8")
    return read_table(folder / "t.csv", TableConfig("y", **settings))


def test_columns_are_found_by_name_in_any_order(tmp_path: Path) -> None:
    table = read(tmp_path, "y,b,junk,a\n1,2,x,3\n0,4,y,5\n", numeric=("a", "b"))
    assert table.numbers.tolist() == [[3, 2], [5, 4]]
    assert table.targets == ("1", "0")
    assert table.cases == table.patients == ("1", "2")


def test_ids_stay_text(tmp_path: Path) -> None:
    text = "case,pat,a,y\n0007,01,1,0\n0042,1,2,0\n7,1,2,0\n"
    table = read(tmp_path, text, numeric=("a",), case="case", patient="pat")
    assert table.cases == ("0007", "0042", "7")
    assert table.patients == ("01", "1", "1")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (("a", "b", "a"), r"t\.csv, row 1: the id of the case occurs twice; correct column case"),
        (("a", "", "b"), "row 2: the id of the case is missing"),
    ],
)
def test_a_case_has_an_id_of_its_own(tmp_path: Path, ids: tuple[str, ...], message: str) -> None:
    text = "case,a,y\n" + "".join(f"{name},1,0\n" for name in ids)
    with pytest.raises(DataError, match=message):
        read(tmp_path, text, numeric=("a",), case="case")


def test_missing_words_are_those_everybody_writes_and_those_that_are_named(tmp_path: Path) -> None:
    words = ["", "?", "NA", "n/a", "NaN", "null", "None", "-", ".", "n.b.", "7"]
    text = "a,y\n" + "".join(f'"{word}",0\n' for word in words)
    table = read(tmp_path, text, numeric=("a",), missing=("N.B.",))
    assert np.isnan(table.numbers[:, 0]).tolist() == [True] * 10 + [False]
    assert table.missing == {"a": 10}


def test_commas_are_decimal_marks_where_they_separate_nothing(tmp_path: Path) -> None:
    table = read(tmp_path, "a;b;y\n0,9;-1,5e2;0\n2;?;1\n", numeric=("a", "b"))
    np.testing.assert_array_equal(table.numbers, [[0.9, -150], [2, np.nan]])


@pytest.mark.parametrize(
    "text",
    ['a,y\n"1,5",0\n2,1\n', "a;y\n1,5;0\n2.5;1\n", "a;y\n1.234,5;0\n"],
)
def test_an_unclear_decimal_mark_is_refused_with_the_options(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match=r"not clear; set table\.decimal to ',' or '\.'"):
        read(tmp_path, text, numeric=("a",))


@pytest.mark.parametrize(
    "cells",
    [["1,234", "12,500", "950"], ["1,234"], ["1.234", "950"], ["950", "2.100", "-1.050", "12"]],
)
def test_marks_that_may_be_between_thousands_are_refused(tmp_path: Path, cells: list[str]) -> None:
    text = "a;y\n" + "".join(f"{cell};0\n" for cell in cells)
    with pytest.raises(DataError, match="may hold a mark between thousands or before decimals, so"):
        read(tmp_path, text, numeric=("a",))
    mark = "," if "," in text else "."
    table = read(tmp_path, text, numeric=("a",), decimal=mark)
    assert table.numbers[:, 0].tolist() == [float(cell.replace(",", ".")) for cell in cells]


@pytest.mark.parametrize(
    "cells", [["1,234", "0,5"], ["0,912", "950"], ["1.234", "2.5", "950"], ["1.234", "3", "40"]]
)
def test_marks_that_are_before_decimals_somewhere_are_so_everywhere(
    tmp_path: Path, cells: list[str]
) -> None:
    table = read(tmp_path, "a;y\n" + "".join(f"{c};0\n" for c in cells), numeric=("a",))
    assert table.numbers[:, 0].tolist() == [float(cell.replace(",", ".")) for cell in cells]


def test_the_decimal_mark_that_is_set_decides(tmp_path: Path) -> None:
    assert read(tmp_path, 'a,y\n"1,5",0\n', numeric=("a",), decimal=",").numbers[0, 0] == 1.5
    with pytest.raises(DataError, match=r"row 1: column a holds no number \(the decimal mark is"):
        read(tmp_path, "a;y\n1,5;0\n", numeric=("a",), decimal=".")


def test_thousands_are_not_read_as_decimals(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 2: column a holds no number"):
        read(tmp_path, "a;y\n1,5;0\n1.234;1\n", numeric=("a",), decimal=",")
    with pytest.raises(DataError, match=r"row 1: column a holds no number"):
        read(tmp_path, "a,y\n1_234,0\n", numeric=("a",))


@pytest.mark.parametrize(
    ("cell", "message"), [("Meier", "holds no number"), ("inf", "is infinite")]
)
def test_a_bad_number_is_named_by_row_and_column_and_never_shown(
    tmp_path: Path, cell: str, message: str
) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, f"age,y\n50,0\n{cell},1\n", numeric=("age",))
    assert f"t.csv, row 2: column age {message}" in str(caught.value)
    assert cell not in str(caught.value).replace("infinite", "")


def test_zeros_are_missing_where_that_is_said(tmp_path: Path) -> None:
    table = read(tmp_path, "a,b,y\n0,0,0\n2,3,1\n", numeric=("a", "b"), zero_is_missing=("a",))
    np.testing.assert_array_equal(table.numbers, [[np.nan, 0], [2, 3]])


def test_a_column_of_zeros_is_missing_unless_they_are_true(tmp_path: Path) -> None:
    text = "a,b,y\n0,0,0\n?,0.0,1\n0,0,1\n"
    table = read(tmp_path, text, numeric=("a", "b"), zero_is_real=("b",))
    assert np.isnan(table.numbers[:, 0]).all()
    assert table.numbers[:, 1].tolist() == [0, 0, 0]
    assert table.notes == (
        "t.csv: a is 0 in every row and is taken as missing; name it in table.zero_is_real if the "
        "zeros are true",
        "t.csv: b is 0 in every row",
    )
    assert table.missing == {"a": 3, "b": 0}


def test_unknown_words_are_counted_and_become_the_last_category(tmp_path: Path) -> None:
    text = "s,y\nII,0\nV,0\n?,1\nV,0\nIX,1\n"
    table = read(tmp_path, text, categorical={"s": ("I", "II")})
    assert table.codes[:, 0].tolist() == [1, 2, 2, 2, 2]
    assert table.unknown == {"s": {"IX": 1, "V": 2}}
    assert table.missing == {"s": 1}
    assert table.notes == (
        "t.csv: s holds IX, V, which is not in its vocabulary, in 3 of 5 rows; taken as unknown",
    )


def test_codes_with_a_point_are_those_without(tmp_path: Path) -> None:
    text = 'thal,y\n3.0,0\n7,1\n"6,00",1\n6.5,0\n'
    table = read(tmp_path, text, categorical={"thal": ("3", "6", "7")})
    assert table.codes[:, 0].tolist() == [0, 2, 1, 3]
    kept = read(tmp_path, text, categorical={"thal": ("3.0", "7")})
    assert kept.codes[:, 0].tolist() == [0, 1, 2, 2]


def test_an_absent_column_is_refused_by_name_or_counts_as_missing(tmp_path: Path) -> None:
    columns: dict[str, Any] = {"numeric": ("a", "crp"), "categorical": {"s": ("x",)}}
    with pytest.raises(DataError, match=r"t\.csv has no column crp, s \(it has a, y\); add it"):
        read(tmp_path, "a,y\n1,0\n", **columns)
    table = read(tmp_path, "a,y\n1,0\n2,0\n", absent="missing", **columns)
    np.testing.assert_array_equal(table.numbers, [[1, np.nan], [2, np.nan]])
    assert table.codes.tolist() == [[1], [1]]
    assert table.missing == {"a": 0, "crp": 2, "s": 2}
    assert table.notes == tuple(
        f"t.csv has no column {name}; its values count as missing" for name in ("crp", "s")
    )


def test_labels_and_ids_are_never_taken_as_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no column id, y"):
        read(tmp_path, "a\n1\n", numeric=("a",), case="id", absent="missing")


def test_rows_to_predict_need_no_label_and_no_split(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a\n1\n2\n")
    config = TableConfig("y", ("a",), split="fold")
    table = read_table(tmp_path / "t.csv", config, labelled=False)
    assert (table.targets, table.splits) == (("", ""), None)


def test_a_table_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"t\.csv holds no rows"):
        read(tmp_path, "a,y\n", numeric=("a",))


def test_parquet_means_the_same(tmp_path: Path) -> None:
    columns: dict[str, Any] = {"numeric": ("a",), "categorical": {"s": ("1", "2")}, "case": "id"}
    table = read(tmp_path, "id,a,s,y\n01,1.5,2,0\n02,?,?,1\n", **columns)
    frame = pandas.DataFrame({"y": [0, 1], "s": [2.0, None], "a": [1.5, None], "id": ["01", "02"]})
    frame.to_parquet(tmp_path / "t.parquet")
    same = read_table(tmp_path / "t.parquet", TableConfig("y", **columns))
    exact = pandas.DataFrame({"y": [0, 1], "a": [1.234, 950.0]})
    exact.to_parquet(tmp_path / "exact.parquet")
    numbers = read_table(tmp_path / "exact.parquet", TableConfig("y", ("a",))).numbers
    assert numbers.tolist() == [[1.234], [950]]
    np.testing.assert_array_equal(same.numbers, table.numbers)
    np.testing.assert_array_equal(same.codes, table.codes)
    assert (same.cases, same.targets) == (table.cases, table.targets)


def test_a_vocabulary_is_of_all_sites_in_an_order_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("s,t\nII,10\nI,?\n")
    (tmp_path / "b.csv").write_text("t;u\n9,0;x\nzz;y\n")
    found = vocabulary([tmp_path / "a.csv", tmp_path / "b.csv"], ["s", "t"], ["zz"])
    assert found == {"s": ("I", "II"), "t": ("9", "10")}


def test_features_stand_in_the_order_of_the_configuration(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "numeric": ("a", "b"), "categorical": {"s": ("x", "z"), "t": ("1",)}, "indicators": True,
    }  # fmt: skip
    table = read(tmp_path, "t,s,b,a,y\n1,z,3,?,0\n8,q,4,5,1\n", **settings)
    config = TableConfig("y", **settings)
    rows = encode(table, config, Scaling(np.array([1.0, 2.0]), np.array([1.0, 10.0])))
    assert rows.tolist() == [
        [0, 10, 1, 0, 0, 1, 0, 1, 0],
        [4, 20, 0, 0, 0, 0, 1, 0, 1],
    ]
    assert rows.dtype == np.float32
    assert config.groups == [[0, 2], [1, 3], [4, 5, 6], [7, 8]]
    assert config.features == 9
    bare = encode(table, TableConfig("y", **{**settings, "indicators": False}), None)
    np.testing.assert_array_equal(bare[0, :2], np.array([np.nan, 3]))


numbers = arrays.arrays(
    np.float64, st.tuples(st.integers(1, 12), st.just(3)),
    elements=st.floats(-1000, 1000, width=32, allow_subnormal=False) | st.just(np.nan),
)  # fmt: skip


@given(numbers, st.lists(st.integers(0, 12), max_size=4))
def test_moments_of_any_cut_add_up_to_those_of_all_rows(
    rows: NDArray[np.float64], cuts: list[int]
) -> None:
    whole, *parts = (Moments.of(part) for part in (rows, *np.split(rows, sorted(cuts))))
    total = sum(parts[1:], parts[0])
    known = ~np.isnan(rows)
    np.testing.assert_array_equal(total.counts, known.sum(0))
    for moments in (whole, total):
        np.testing.assert_allclose(moments.sums, np.nansum(rows, 0), rtol=1e-9, atol=1e-6)
        np.testing.assert_allclose(moments.squares, np.nansum(rows**2, 0), rtol=1e-9, atol=1e-6)
    scaled = total.scaling()(rows)
    assert np.isfinite(scaled).all()
    assert (scaled[~known] == 0).all()
    for column in range(3):
        values = rows[known[:, column], column]
        if len(values) and values.std() > 1e-2:
            expected = (values - values.mean()) / values.std()
            np.testing.assert_allclose(scaled[known[:, column], column], expected, atol=1e-4)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e-9, -3.7e8])
def test_a_column_that_never_varies_becomes_0(value: float) -> None:
    rows = np.array([[value, 1.0], [value, np.nan], [value, 2.0]])
    scaling = Moments.of(rows).scaling()
    assert scaling(rows)[:, 0].tolist() == [0, 0, 0]
    assert scaling(rows)[:, 1] == pytest.approx([-1, 0, 1])
    empty = Moments.of(np.full((3, 1), np.nan)).scaling()
    assert empty(np.array([[5.0]])).tolist() == [[0.0]]


def test_numbers_scaled_by_their_range_by_hand() -> None:
    """The middle of 2 and 10 is 6, half their width 4; a column of 5 and one of nothing are 0."""
    train = np.array(
        [[2.0, 5.0, np.nan], [np.nan, 5.0, np.nan], [10.0, 5.0, np.nan], [4, 5, np.nan]]
    )
    scaling = Ranges.of(train).scaling()
    assert scaling(train)[:, 0].tolist() == [-1, 0, 1, -0.5]
    outside = np.array([[12.0, 7.0, 3.0], [-2.0, np.nan, np.nan]])
    assert scaling(outside).tolist() == [[1.5, 0, 0], [-2, 0, 0]]


@given(numbers, st.lists(st.integers(0, 12), max_size=4))
def test_ranges_of_any_cut_add_up_and_scale_as_scikit_learn_does(
    rows: NDArray[np.float64], cuts: list[int]
) -> None:
    whole, *parts = (Ranges.of(part) for part in (rows, *np.split(rows, sorted(cuts))))
    total = sum(parts[1:], parts[0])
    np.testing.assert_array_equal(total.smallest, whole.smallest)
    np.testing.assert_array_equal(total.largest, whole.largest)
    found = total.scaling()(rows)
    assert (abs(found) <= 1 + 1e-9).all()
    for column in range(3):
        values = rows[~np.isnan(rows[:, column]), column]
        if len(values) and np.ptp(values) > 1e-6:
            expected = MinMaxScaler((-1, 1)).fit_transform(values[:, None])[:, 0]
            known = ~np.isnan(rows[:, column])
            np.testing.assert_allclose(found[known, column], expected, atol=1e-7)
            assert (found[~known, column] == 0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label": "y", "numeric": ("a",), "scale": "none", "scale_by": "range"}, "scale is none"),
        ({"label": "a", "numeric": ("a",)}, "the column 'a' has two roles"),
        ({"label": "y"}, "no columns to learn from"),
        ({"label": "y", "numeric": ("a",), "zero_is_real": ("b",)}, "'b' is said to hold zeros"),
        ({"label": "y", "categorical": {"s": ()}}, "s names no category"),
    ],
)
def test_columns_that_contradict_each_other_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TableConfig(**settings)
