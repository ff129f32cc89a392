import csv
import json
import math

import pytest

from collegium.errors import DataError, StorageError
from collegium.evaluation.results import (
    COLUMNS,
    Row,
    append_rows,
    read_rows,
    read_table,
    write_table,
)


def row(**changes) -> Row:
    about = {
        "experiment": "e", "algorithm": "fedavg", "seed": 0, "round": 3, "site": "A",
        "case": "c001", "patient": "p001", "split": "test", "model": "global",
        "metric": "dice", "value": 0.1 + 0.2,
    }  # fmt: skip
    return Row(**{**about, **changes})


def test_columns_are_those_of_the_tidy_table_in_order():
    expected = (
        "experiment algorithm seed fold variation round site case patient split model metric value "
        "unit bytes_up bytes_down seconds"
    )
    assert expected.split() == list(COLUMNS)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_a_value_that_is_no_number_is_undefined(value):
    assert row(value=value).value is None


def test_appended_rows_come_back_equal_and_in_order(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    rows = [row(), row(case="c002", value=None), row(site='Zürich, "Süd"\n2', seconds=1.5)]
    append_rows(path, rows[:1])
    append_rows(path, rows[1:])
    assert read_rows([path]) == rows
    assert len(path.read_text(encoding="utf-8").splitlines()) == 3


def test_appending_nothing_makes_no_file(tmp_path):
    append_rows(tmp_path / "rows.jsonl", [])
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize("lost", [1, 2, 40])
def test_a_truncated_last_line_is_left_out_and_the_next_row_is_whole(tmp_path, lost):
    path = tmp_path / "rows.jsonl"
    append_rows(path, [row(), row(case="c002")])
    whole = path.read_bytes()
    path.write_bytes(whole[:-lost])
    kept = 2 if lost == 1 else 1  # without its line end the last line is still a row
    assert len(read_rows([path])) == kept
    append_rows(path, [row(case="c003")])
    cases = [r.case for r in read_rows([path])]
    assert cases == (["c001", "c002", "c003"] if lost == 1 else ["c001", "c003"])


def test_a_measurement_made_twice_counts_once_and_the_later_one_wins(tmp_path):
    append_rows(tmp_path / "a.jsonl", [row(value=0.1), row(case="c002", value=0.5)])
    append_rows(tmp_path / "b.jsonl", [row(value=0.2)])
    found = read_rows([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert [(r.case, r.value) for r in found] == [("c001", 0.2), ("c002", 0.5)]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_rows(path, [row(), row(case="c002")])
    lines = path.read_text().splitlines()
    path.write_text(f"{lines[0][:20]}\n{lines[1]}\n")
    with pytest.raises(StorageError, match=r"rows\.jsonl, line 1: this is not a row"):
        read_rows([path])


def test_a_file_that_is_absent_or_cannot_be_written_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"gone\.jsonl: the rows could not be read"):
        read_rows([tmp_path / "gone.jsonl"])
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"rows\.jsonl: the rows could not be written"):
        append_rows(tmp_path / "file" / "rows.jsonl", [row()])
    with pytest.raises(StorageError, match=r"results\.csv: a file stands in the place of a folder"):
        write_table([row()], tmp_path / "file")


def test_both_tables_keep_undefined_rows_and_exact_numbers(tmp_path):
    import pandas as pd

    rows = [row(), row(case="c002", value=None, bytes_up=2**40)]
    paths = write_table(rows, tmp_path)
    assert [path.name for path in paths] == ["results.csv", "results.parquet"]
    with paths[0].open(newline="") as file:
        records = list(csv.DictReader(file))
    assert list(records[0]) == list(COLUMNS)
    assert records[0]["value"] == "0.30000000000000004"
    assert records[1]["value"] == ""
    frame = pd.read_parquet(paths[1])
    assert list(frame.columns) == list(COLUMNS)
    assert frame["value"].tolist()[0] == 0.1 + 0.2
    assert frame["value"].isna().tolist() == [False, True]
    assert frame["bytes_up"].tolist() == [0, 2**40]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.csv", "results.parquet"]


def test_the_table_is_read_from_parquet_then_csv_then_the_rows_of_the_cells(tmp_path):
    rows = [row(), row(case="c002", value=None, unit="mm"), row(site='a,\n"b"', seconds=2.25)]
    append_rows(tmp_path / "fedavg" / "seed-0" / "rows.jsonl", rows)
    assert read_table(tmp_path) == rows
    write_table(rows, tmp_path)
    (tmp_path / "fedavg" / "seed-0" / "rows.jsonl").unlink()
    assert read_table(tmp_path) == rows
    (tmp_path / "results.parquet").unlink()
    assert read_table(tmp_path) == rows


def test_a_table_from_before_there_were_variations_is_read_without_one(tmp_path):
    import pandas as pd

    rows = [row(), row(case="c002", variation="tau=0.5")]
    paths = write_table(rows, tmp_path)
    old = pd.read_parquet(paths[1]).drop(columns="variation")
    old.to_parquet(paths[1])
    old.to_csv(paths[0], index=False)
    without = [row(), row(case="c002")]
    assert read_table(tmp_path) == without
    paths[1].unlink()
    assert read_table(tmp_path) == without


def test_no_results_are_no_rows(tmp_path):
    assert read_table(tmp_path) == []


@pytest.mark.parametrize("name", ["results.parquet", "results.csv"])
def test_a_file_that_is_no_table_is_named(tmp_path, name):
    (tmp_path / name).write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=f"{name}: this is not a table of results"):
        read_table(tmp_path)


def test_lines_are_plain_json(tmp_path):
    append_rows(tmp_path / "rows.jsonl", [row(value=math.nan)])
    line = json.loads((tmp_path / "rows.jsonl").read_text())
    assert list(line) == list(COLUMNS)
    assert line["value"] is None
