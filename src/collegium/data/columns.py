"""The columns of a table's file as text: CSV as spreadsheets write it, and Parquet."""

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from collegium.errors import DataError

SUFFIXES = (".csv", ".tsv", ".txt", ".parquet")
"""Suffixes of the tables that can be read."""


def read_columns(path: Path) -> tuple[dict[str, list[str]], str]:
    """Read every column of a table as text, and the separator of its cells ("" for Parquet).

    Ids stay as they are written, so that 0007 keeps its zeros. A byte order mark, a first line
    ``sep=;`` and quoted cells are understood; empty lines are skipped.

    Raises:
        DataError: The file cannot be read or is empty, or its rows do not fit its columns.
    """
    name = path.name
    try:
        if path.suffix.lower() == ".parquet":
            header, rows, separator = *_read_parquet(path), ""
        else:
            header, rows, separator = _read_text(path)
    except FileNotFoundError as error:
        raise DataError(f"{name}: there is no such table; correct the path") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8 text; save it as 'CSV UTF-8'") from error
    except (OSError, ValueError, csv.Error) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(f"{name} is not a readable table ({reason}); export it again") from error
    header, rows = _without_nameless(header, rows)
    if not header:
        raise DataError(f"{name} is empty; write a line of columns, and one for each case")
    twice = [column for column in header if header.count(column) > 1]
    if twice:
        raise DataError(f"{name} has two columns {twice[0]!r}; rename or remove one")
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise DataError(
                f"{name}, row {number}: {len(row)} cells for {len(header)} columns; put quotes "
                f"around cells that hold a {separator!r}, or export the table again"
            )
    cells = zip(*rows, strict=True) if rows else ([] for _ in header)
    return {column: [*values] for column, values in zip(header, cells, strict=True)}, separator


def _read_text(path: Path) -> tuple[list[str], list[list[str]], str]:
    """Return the column names, the rows and the separator of a CSV file."""
    text = path.read_text("utf-8-sig")
    stated = re.match(r"sep=(.)\n", text)
    if stated:
        text = text[stated.end() :]
    head = re.sub(r'"[^"]*"', "", text.lstrip().partition("\n")[0])
    separator = stated[1] if stated else max(",;\t", key=head.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    rows = [[cell.strip() for cell in row] for row in reader]
    header, *rows = [row for row in rows if any(row)] or [[]]
    return header, rows, separator


def _read_parquet(path: Path) -> tuple[list[str], list[list[str]]]:
    """Return the column names and the rows of a Parquet file."""
    import pandas

    frame = pandas.read_parquet(path)
    if any(name is not None for name in frame.index.names):
        frame = frame.reset_index()
    cells = np.where(frame.notna(), frame.astype(object), "")
    rows = [[_text(cell) for cell in row] for row in cells.tolist()]
    return [str(column).strip() for column in frame.columns], rows


def _text(cell: object) -> str:
    """Return a cell as text, whole numbers without a decimal point."""
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return str(cell).strip()


def _without_nameless(
    header: Sequence[str], rows: Sequence[list[str]]
) -> tuple[list[str], list[list[str]]]:
    """Drop the columns after the last named one, as some exports end every line with separators."""
    count = max((place for place, name in enumerate(header, 1) if name), default=0)
    return [*header[:count]], [row if any(row[count:]) else row[:count] for row in rows]
