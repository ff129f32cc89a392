import csv
import hashlib
import json
import math

import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from collegium.errors import DataError, StorageError
from collegium.evaluation.results import (
    COLUMNS,
    labels_of,
    read_description,
    read_results,
    read_rows,
    results_frame,
    write_results,
    write_rows,
)


def row(**changes):
    about = {
        "experiment": "e", "algorithm": "fedavg", "seed": 0, "round": 3, "site": "A",
        "case": "c001", "patient": "p001", "split": "test", "model": "global",
        "metric": "dice", "value": 0.1 + 0.2,
    }  # fmt: skip
    return {**about, **changes}


AWKWARD = [
    row(), row(case="c002", value=None), row(site='Zürich, "Süd"\n2', seconds=1.5),
    row(case="NA", site="nan", value=1e-17, unit="mm", bytes_up=2**40),
    row(case="=1+1", site="-2+3", patient="'@x", unit="-5", value=-0.5),
]  # fmt: skip
"""Rows with what a reader may take for something else."""


def test_columns_are_those_of_the_tidy_table_in_order():
    expected = (
        "experiment algorithm seed fold part variation round site case patient split model metric "
        "value unit bytes_up bytes_down seconds"
    )
    assert expected.split() == list(COLUMNS)
    frame = results_frame([row()])
    assert list(frame.columns) == list(COLUMNS)
    kinds = {"str": pd.api.types.is_string_dtype, "int64": pd.api.types.is_integer_dtype,
             "float64": pd.api.types.is_float_dtype}  # fmt: skip
    assert all(kinds[kind](frame[name]) for name, kind in COLUMNS.items())
    assert results_frame([]).dtypes.equals(frame.dtypes)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_a_value_that_is_no_number_is_undefined(value):
    assert results_frame([row(value=value)])["value"].isna().all()


def test_a_row_with_other_columns_is_refused():
    with pytest.raises(ValueError, match="unknown or missing columns: colour"):
        results_frame([row(colour="red")])
    with pytest.raises(ValueError, match="unknown or missing columns: site"):
        results_frame([{name: value for name, value in row().items() if name != "site"}])


def test_written_rows_come_back_equal_and_in_order(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    results = results_frame(AWKWARD)
    write_rows(path, results)
    assert_frame_equal(read_rows([path]), results, check_exact=True)
    assert len(path.read_text(encoding="utf-8").splitlines()) == len(AWKWARD) + 1


def test_a_measurement_made_twice_counts_once_and_the_later_one_wins(tmp_path):
    first = results_frame([row(value=0.1), row(case="c002", value=0.5)])
    write_rows(tmp_path / "a.jsonl", first)
    write_rows(tmp_path / "b.jsonl", results_frame([row(value=0.2)]))
    found = read_rows([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert [(r.case, r.value) for r in found.itertuples()] == [("c001", 0.2), ("c002", 0.5)]


@pytest.mark.parametrize("number", [1, 2])
def test_a_damaged_line_is_named(tmp_path, number):
    path = tmp_path / "rows.jsonl"
    write_rows(path, results_frame([row(), row(case="c002")]))
    lines = path.read_text().splitlines()[:-1]  # without their digest
    lines[number - 1] = lines[number - 1][:20]
    path.write_text("\n".join(lines))
    with pytest.raises(StorageError, match=rf"rows\.jsonl, line {number}: this is not a row"):
        read_rows([path])


def test_a_file_that_is_absent_or_cannot_be_written_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"gone\.jsonl: the rows could not be read"):
        read_rows([tmp_path / "gone.jsonl"])
    (tmp_path / "file").write_text("")
    results = results_frame([row()])
    with pytest.raises(StorageError, match=r"rows\.jsonl: a file stands in the place of a folder"):
        write_rows(tmp_path / "file" / "rows.jsonl", results)
    with pytest.raises(StorageError, match=r"results\.csv: a file stands in the place of a folder"):
        write_results(results, tmp_path / "file")


def test_both_tables_keep_undefined_rows_and_exact_numbers(tmp_path):
    rows = [row(), row(case="c002", value=None, bytes_up=2**40)]
    paths = write_results(results_frame(rows), tmp_path)
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
    names = ["results.csv", "results.parquet", "results.sha256"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for line in (tmp_path / "results.sha256").read_text().splitlines():  # as sha256sum writes it
        digest, name = line.split("  ")
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest


def test_the_table_is_read_from_parquet_then_csv_then_the_rows_of_the_jobs(tmp_path):
    results = results_frame(AWKWARD)
    write_rows(tmp_path / "fedavg" / "seed-0" / "rows.jsonl", results)
    assert_frame_equal(read_results(tmp_path), results, check_exact=True)
    write_results(results, tmp_path)
    (tmp_path / "fedavg" / "seed-0" / "rows.jsonl").unlink()
    assert_frame_equal(read_results(tmp_path), results, check_exact=True)
    (tmp_path / "results.parquet").unlink()
    assert_frame_equal(read_results(tmp_path), results, check_exact=True)


def test_no_text_of_the_csv_is_a_formula_and_numbers_stay_numbers(tmp_path):
    csv_file, _ = write_results(results_frame(AWKWARD[-1:]), tmp_path)
    (written,) = csv.DictReader(csv_file.read_text().splitlines())
    found = [written[name] for name in ("case", "site", "patient", "unit", "value")]
    assert found == ["'=1+1", "'-2+3", "''@x", "-5", "-0.5"]


def test_a_table_from_before_there_were_variations_is_read_without_one(tmp_path):
    rows = [row(), row(case="c002", variation="tau=0.5")]
    paths = write_results(results_frame(rows), tmp_path)
    old = pd.read_parquet(paths[1]).drop(columns="variation")
    (tmp_path / "results.sha256").unlink()
    old.to_parquet(paths[1])
    old.to_csv(paths[0], index=False)
    without = results_frame([row(), row(case="c002")])
    assert_frame_equal(read_results(tmp_path), without)
    paths[1].unlink()
    assert_frame_equal(read_results(tmp_path), without)


def test_no_results_are_no_rows(tmp_path):
    assert read_results(tmp_path).empty


@pytest.mark.parametrize("name", ["results.parquet", "results.csv"])
def test_a_file_that_is_no_table_is_named(tmp_path, name):
    (tmp_path / name).write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=f"{name}: this is not a table of results"):
        read_results(tmp_path)


def test_lines_are_plain_json(tmp_path):
    write_rows(tmp_path / "rows.jsonl", results_frame([row(value=math.nan)]))
    line, seal = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert [*seal] == ["sha256"]
    assert list(line) == list(COLUMNS)
    assert line["value"] is None


def test_labels_are_local_first_then_as_configured_then_the_others_by_name(tmp_path):
    assert read_description(tmp_path) == {}
    algorithms = [{"name": "fedavg"}, {"name": "local", "label": "on our own"},
                  {"name": "pooled", "label": "all"}, {"name": "moon"}]  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps({"config": {"algorithms": algorithms}}))
    labels = ["zzz", "fedavg", "aaa", "all", "on our own"]
    results = results_frame([row(algorithm=label) for label in labels])
    found = labels_of(read_description(tmp_path), results)
    assert found.order == ("on our own", "fedavg", "all", "aaa", "zzz")
    assert (found.local, found.pooled) == ("on our own", frozenset({"all"}))
    assert found.configured == ("fedavg", "on our own", "all", "moon")
