"""The columns of a table's file as text: CSV as spreadsheets write it, and Parquet."""

import csv
import io
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from collegium.errors import DataError

SUFFIXES = (".csv", ".tsv", ".txt", ".parquet")
"""Suffixes of the tables that can be read."""


@dataclass(frozen=True)
class SiteWording:
    """The names of columns, and the words, that a site's table writes otherwise than the others.

    Attributes:
        columns: The site's own name of a column, by its name in the federation.
        coding: By column (its name in the federation), from a cell as written to the word of the
            federation; an empty one stands for a missing value.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    coding: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def translate(self, name: str, columns: Mapping[str, list[str]]) -> dict[str, list[str]]:
        """Return the columns of a table in the words of the federation.

        Args:
            name: The table, for messages.
            columns: Its columns, as `read_columns` returns them.

        Raises:
            DataError: It has no column of one of the site's names, or also one of the federation's.
        """
        for common, own in self.columns.items():
            if own not in columns or (common in columns and common not in self.columns.values()):
                problem = "has no column" if own not in columns else f"has a column {common} beside"
                raise DataError(
                    f"{name} {problem} {own}, which the site's columns say is {common}; correct "
                    f"columns at the site"
                )
        common_names = {own: common for common, own in self.columns.items()}
        renamed = {common_names.get(column, column): cells for column, cells in columns.items()}
        return {
            column: [translate_word(cell, self.coding.get(column, {})) for cell in cells]
            for column, cells in renamed.items()
        }


AS_ELSEWHERE = SiteWording()
"""That of a site which writes what the federation does."""


def translate_word(written: str, coding: Mapping[str, str]) -> str:
    """Return what a written word is by a coding; 3.0 that is not in it counts as 3.

    Args:
        written: The word.
        coding: From words as written to others; a word that is in neither form stays.
    """
    return coding.get(written, coding.get(plain_code(written), written))


def plain_code(cell: str) -> str:
    """Return 3 for codes such as 3.0 or 3,0, as exports write whole numbers."""
    return re.split(r"[.,]", cell)[0] if re.fullmatch(r"-?\d+[.,]0+", cell) else cell


def read_columns(path: Path) -> tuple[dict[str, list[str]], str]:
    """Read every column of a table as text, and the separator of its cells ("" for Parquet).

    Ids stay as they are written, so that 0007 keeps its zeros, but for the form of Unicode, which
    is that of `nfc`. A byte order mark, a first line
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
    header, rows = _without_nameless([*map(nfc, header)], rows)
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
    columns = zip(header, cells, strict=True)
    return {column: [*map(nfc, values)] for column, values in columns}, separator


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


def nfc(text: str) -> str:
    """Return a text with every letter and its accents as one character, where there is one.

    Args:
        text: A name or a cell, which one site may write with accents of their own.
    """
    return unicodedata.normalize("NFC", text)


def spelling_key(name: str) -> str:
    """Return what names that are spelt alike have in common.

    Upper and lower case, forms of Unicode, and spaces, `_`, `-` and backslashes between letters and
    digits do not count.

    Args:
        name: The name of a channel, class, column or category.
    """
    text = unicodedata.normalize("NFKC", name).casefold().strip()
    return re.sub(r"(?<=\w)[\s_\\-]+(?=\w)|_", "", text)
