"""Files of tables as people have them: separators, marks, quotes, Parquet, and damage."""

from pathlib import Path

import pandas
import pytest

from collegium.data.columns import read_columns
from collegium.errors import DataError


def write(folder: Path, text: str, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("mark", [",", ";", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_separator_is_that_of_the_header(tmp_path: Path, mark: str, end: str) -> None:
    lines = [["id", "age", "word"], ["0007", " 54", "a b"], ["x", "", "é"]]
    path = write(tmp_path, end.join(mark.join(line) for line in lines) + end)
    assert read_columns(path) == (
        {"id": ["0007", "x"], "age": ["54", ""], "word": ["a b", "é"]},
        mark,
    )


def test_a_mark_at_the_start_is_no_part_of_the_first_name(tmp_path: Path) -> None:
    columns, _ = read_columns(write(tmp_path, "\ufeffpatient_id,age\n0007,54\n"))
    assert columns == {"patient_id": ["0007"], "age": ["54"]}


def test_a_line_that_names_the_separator_is_believed(tmp_path: Path) -> None:
    path = write(tmp_path, "\ufeffsep=;\r\na,b;c\r\n1;2\r\n")
    assert read_columns(path) == ({"a,b": ["1"], "c": ["2"]}, ";")


def test_quotes_hold_separators_and_line_ends(tmp_path: Path) -> None:
    path = write(tmp_path, '"a,b,c";d\n"x;y";"two\nlines"\n')
    assert read_columns(path) == ({"a,b,c": ["x;y"], "d": ["two\nlines"]}, ";")


def test_empty_lines_and_separators_at_the_end_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, "a;b;;\n\n1;2;;\n;;;\n3;4;;\n\n")
    assert read_columns(path)[0] == {"a": ["1", "3"], "b": ["2", "4"]}


def test_words_for_missing_values_stay_text(tmp_path: Path) -> None:
    path = write(tmp_path, "a,b\nNA,nan\n?,1\n")
    assert read_columns(path)[0] == {"a": ["NA", "?"], "b": ["nan", "1"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n1,5,0\n", r"t\.csv, row 2: 3 cells for 2 columns; put quotes around"),
        ("a,b\n1,2,3\n4,5,6\n", "row 1: 3 cells for 2 columns"),
        ("a,b\n1,2\n1\n", "row 2: 1 cells for 2 columns"),
        ("a,b,a\n1,2,3\n", "has two columns 'a'; rename"),
        ("", r"^t\.csv is empty; write a line of columns"),
        (";;\n\n", r"^t\.csv is empty; write a line of columns"),
        ('a,b\n1,"2\n3,4\n', r"not a readable table \(unexpected end of data\)"),
    ],
)
def test_rows_that_do_not_fit_their_columns_are_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read_columns(write(tmp_path, text))


def test_other_encodings_and_files_that_are_not_there_are_said(tmp_path: Path) -> None:
    (tmp_path / "latin.csv").write_bytes("größe\n1\n".encode("latin-1"))
    (tmp_path / "wide.csv").write_bytes("a\n1\n".encode("utf-16"))
    for name in ("latin.csv", "wide.csv"):
        with pytest.raises(DataError, match=rf"{name} is not UTF-8 text; save it as 'CSV UTF-8'"):
            read_columns(tmp_path / name)
    with pytest.raises(DataError, match=r"x\.csv: there is no such table"):
        read_columns(tmp_path / "x.csv")
    with pytest.raises(DataError, match=r"x\.parquet is not a readable table"):
        read_columns(write(tmp_path, "no", "x.parquet"))


def test_parquet_reads_as_the_same_text(tmp_path: Path) -> None:
    frame = pandas.DataFrame(
        {
            "id": ["0007", "0042", None],
            "age": pandas.array([54, None, 47], "Int64"),
            "code": [3.0, float("nan"), 7.0],
            "crea": [1.5, 0.25, float("nan")],
        }
    )
    frame.to_parquet(tmp_path / "t.parquet")
    columns, separator = read_columns(tmp_path / "t.parquet")
    assert columns == {
        "id": ["0007", "0042", ""], "age": ["54", "", "47"], "code": ["3", "", "7"],
        "crea": ["1.5", "0.25", ""],
    }  # fmt: skip
    assert separator == ""


def test_a_named_index_of_parquet_is_a_column(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"age": [1, 2]}, index=pandas.Index(["01", "02"], name="id"))
    frame.to_parquet(tmp_path / "t.parquet")
    assert read_columns(tmp_path / "t.parquet")[0] == {"id": ["01", "02"], "age": ["1", "2"]}
