"""Tables of clinical data: read as text, understood by name, turned into numbers."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from collegium.data.columns import read_columns
from collegium.data.decoded import listed
from collegium.errors import ConfigError, DataError

UNKNOWN = "unknown"
"""The category of values that are missing or not in the vocabulary."""

MISSING = ("", "?", "na", "n/a", "nan", "null", "none", "-", ".")
"""What a cell without a value holds, in lower case."""

Array = NDArray[np.float64]
Columns = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class TableConfig:
    """What the columns of a table are, the same for all sites.

    Columns are found by name, in any order; others are left alone.

    Attributes:
        label: The column that holds the class.
        numeric: Columns of numbers.
        categorical: Columns of words or codes, each with its vocabulary. Whatever else a site
            writes counts as `UNKNOWN`.
        case: The column with the case's id; None: the row's number.
        patient: The column with the patient's id; None: every case is a patient of its own.
        split: The column with the split ("train", "val", "test"); None: splits are drawn.
        missing: Further words for a missing value.
        zero_is_missing: Numeric columns in which 0 stands for a missing value. A numeric column
            that is 0 in every row of a site is taken so anyway.
        zero_is_real: Numeric columns in which it never does.
        absent: What a site without one of the columns is: "refuse" an error, "missing" a site where
            the values are missing.
        indicators: Whether each numeric column gets a second one that is 1 where it is missing.
        scale: "site": mean 0 and standard deviation 1 by the site's own training cases;
            "federation": by sums and counts that the sites exchange before the first round;
            "none": as written. A missing number becomes the mean, or 0 where nothing is scaled.
        decimal: The decimal mark; "auto": the comma where cells are separated by something else.
    """

    label: str
    numeric: tuple[str, ...] = ()
    categorical: dict[str, tuple[str, ...]] | None = None
    case: str | None = None
    patient: str | None = None
    split: str | None = None
    missing: tuple[str, ...] = ()
    zero_is_missing: tuple[str, ...] = ()
    zero_is_real: tuple[str, ...] = ()
    absent: Literal["refuse", "missing"] = "refuse"
    indicators: bool = False
    scale: Literal["site", "federation", "none"] = "site"
    decimal: Literal["auto", ".", ","] = "auto"

    def __post_init__(self) -> None:
        names = [*self.numeric, *(self.categorical or {})]
        twice = [name for name, count in Counter([*names, self.label]).items() if count > 1]
        if twice:
            raise ConfigError(f"table: the column {twice[0]!r} has two roles; name it once")
        if not names:
            raise ConfigError("table: there are no columns to learn from; name numeric ones")
        odd = [c for c in (*self.zero_is_missing, *self.zero_is_real) if c not in self.numeric]
        if odd:
            raise ConfigError(
                f"table: {odd[0]!r} is said to hold zeros and is not in table.numeric"
            )
        empty = [name for name, words in (self.categorical or {}).items() if not words]
        if empty:
            raise ConfigError(f"table.categorical.{empty[0]} names no category; name all there are")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are learnt from, in order."""
        return (*self.numeric, *(self.categorical or {}))

    @property
    def groups(self) -> list[list[int]]:
        """By column, which of the encoded features are its own; see `encode` for their order."""
        count = len(self.numeric)
        groups = [[i, count + i] if self.indicators else [i] for i in range(count)]
        start = 2 * count if self.indicators else count
        for words in (self.categorical or {}).values():
            groups.append(list(range(start, start + len(words) + 1)))
            start += len(words) + 1
        return groups

    @property
    def features(self) -> int:
        """How many numbers the network gets for a case."""
        return sum(map(len, self.groups))


@dataclass(frozen=True)
class Table:
    """The rows of a site, as far as they can be understood without knowing other sites.

    Attributes:
        cases: The site's own id of each row.
        patients: The site's own id of each row's patient; the case's without a column of them.
        targets: What is written in the column of the label.
        splits: What is written in the column of the splits; None without one.
        numbers: (rows, numeric columns); NaN where missing.
        codes: (rows, categorical columns): the place in the vocabulary, or behind its end.
        notes: One sentence for each thing that was noticed.
        missing: By column, in how many rows a value is missing.
        unknown: By column, the words that are not in the vocabulary, and how often they stand.
        stated: Whether there is a column of patients.
    """

    cases: tuple[str, ...]
    patients: tuple[str, ...]
    targets: tuple[str, ...]
    splits: tuple[str, ...] | None
    numbers: Array
    codes: NDArray[np.int64]
    notes: tuple[str, ...]
    missing: Mapping[str, int]
    unknown: Mapping[str, Mapping[str, int]]
    stated: bool


def read_table(path: Path, config: TableConfig, *, labelled: bool = True) -> Table:
    """Read a table of a site.

    Args:
        path: A CSV file (commas, semicolons or tabs; UTF-8 with or without a mark) or Parquet.
        config: What the columns are.
        labelled: Whether the columns of the label and of the split have to be there.

    Raises:
        DataError: The file cannot be read, lacks a column or holds a number that is none.
    """
    columns, separator = read_columns(path)
    wanted = [*config.columns, *filter(None, (config.case, config.patient))]
    if labelled:
        wanted += filter(None, (config.split, config.label))
    absent = [name for name in wanted if name not in columns]
    refused = [c for c in absent if config.absent == "refuse" or c not in config.columns]
    if refused:
        raise DataError(
            f"{path.name} has no column {listed(refused)} (it has {listed(columns)}); add it, "
            f"correct federation.table, or set table.absent to missing"
        )
    count = len(next(iter(columns.values()), ()))
    if not count:
        raise DataError(f"{path.name} holds no rows; add some or take the site out")
    cells = _Cells(path.name, columns, count, separator, config)
    numbers = [cells.numbers(name) for name in config.numeric]
    codes = [cells.codes(name, words) for name, words in (config.categorical or {}).items()]
    cases = cells.ids(config.case, "case") or tuple(f"{row + 1}" for row in range(count))
    return Table(
        cases=cases,
        patients=cells.ids(config.patient, "patient") or cases,
        targets=tuple(columns.get(config.label, [""] * count)),
        splits=tuple(columns[config.split]) if config.split in columns else None,
        numbers=np.stack(numbers, 1) if numbers else np.empty((count, 0)),
        codes=np.stack(codes, 1) if codes else np.empty((count, 0), np.int64),
        notes=tuple(cells.notes),
        missing=cells.missing,
        unknown=cells.unknown,
        stated=config.patient is not None,
    )


class _Cells:
    """Understands the cells of one table, and remembers what was odd about them."""

    def __init__(
        self, name: str, columns: Columns, count: int, separator: str, config: TableConfig
    ) -> None:
        self._name, self._columns, self._count, self._config = name, columns, count, config
        self._empty = {*MISSING, *(word.lower() for word in config.missing)}
        self._decimal = self._decimal_of(separator)
        self.notes: list[str] = []
        self.missing: dict[str, int] = {}
        self.unknown: dict[str, dict[str, int]] = {}

    def ids(self, column: str | None, what: str) -> tuple[str, ...] | None:
        """Return a column of ids as text."""
        if column is None:
            return None
        values = tuple(self._columns[column])
        counts = Counter(values)
        twice = [value for value, count in counts.items() if count > 1]
        if "" in counts or (what == "case" and twice):
            row = values.index("" if "" in counts else twice[0]) + 1
            raise DataError(
                f"{self._name}, row {row}: the id of the {what} is "
                f"{'missing' if '' in counts else 'there twice'}; correct column {column}"
            )
        return values

    def numbers(self, column: str) -> Array:
        """Return a column of numbers, NaN where missing."""
        if column not in self._columns:
            self._note_absent(column)
            return np.full(self._count, np.nan)
        cells = self._columns[column]
        values = np.array([self._number(cell, column, row) for row, cell in enumerate(cells, 1)])
        zeros = column in self._config.zero_is_missing
        known = values[~np.isnan(values)]
        if not zeros and column not in self._config.zero_is_real and len(known) > 1:
            zeros = bool((known == 0).all())
            if zeros:
                self.notes.append(
                    f"{self._name}: {column} is 0 in every row and is taken as missing; name it in "
                    f"table.zero_is_real if the zeros are true"
                )
        if zeros:
            values[values == 0] = np.nan
        known = values[~np.isnan(values)]
        if len(known) > 1 and known.min() == known.max():
            self.notes.append(f"{self._name}: {column} is {known[0]:g} in every row")
        self.missing[column] = int(np.isnan(values).sum())
        return values

    def codes(self, column: str, words: Sequence[str]) -> NDArray[np.int64]:
        """Return the place of every cell in a vocabulary; the place behind its end is unknown."""
        if column not in self._columns:
            self._note_absent(column)
            return np.full(self._count, len(words))
        place = {word: index for index, word in enumerate(words)}
        cells = [cell if cell in place else plain_code(cell) for cell in self._columns[column]]
        self.missing[column] = sum(cell.lower() in self._empty for cell in cells)
        odd = Counter(c for c in cells if c not in place and c.lower() not in self._empty)
        if odd:
            self.unknown[column] = dict(sorted(odd.items()))
            self.notes.append(
                f"{self._name}: {column} holds {listed(sorted(odd))}, which is not in its "
                f"vocabulary, in {sum(odd.values())} of {self._count} rows; taken as unknown"
            )
        return np.array([place.get(cell, len(words)) for cell in cells])

    def _note_absent(self, column: str) -> None:
        self.missing[column] = self._count
        self.notes.append(f"{self._name} has no column {column}; its values count as missing")

    def _number(self, cell: str, column: str, row: int) -> float:
        if cell.lower() in self._empty:
            return math.nan
        mark, other = (",", ".") if self._decimal == "," else (".", ",")
        try:
            if other in cell or "_" in cell:
                raise ValueError
            value = float(cell.replace(mark, "."))
        except ValueError as error:
            hint = f" (the decimal mark is {mark!r}, see table.decimal)" if other in cell else ""
            raise DataError(
                f"{self._name}, row {row}: column {column} holds no number{hint}; correct it, or "
                f"name what stands there in table.missing"
            ) from error
        if not math.isfinite(value):
            raise DataError(f"{self._name}, row {row}: column {column} is infinite; correct it")
        return value

    def _decimal_of(self, separator: str) -> str:
        """Decide what the decimal mark is, by all numeric cells together."""
        if self._config.decimal != "auto":
            return self._config.decimal
        named = [name for name in self._config.numeric if name in self._columns]
        cells = [cell for name in named for cell in self._columns[name]]
        known = [cell for cell in cells if cell.lower() not in self._empty]
        if not any("," in cell for cell in known):
            return "."
        if separator == "," or any("." in cell for cell in known):
            cause = "cells are separated by ','" if separator == "," else "others hold a point"
            raise DataError(
                f"{self._name}: some of its numbers hold a comma and {cause}, so that the decimal "
                f"mark is not clear; set table.decimal to ',' or '.', and write no thousands marks"
            )
        return ","


def plain_code(cell: str) -> str:
    """Write codes such as 3.0 or 3,0, as exports write whole numbers, as 3."""
    return re.split(r"[.,]", cell)[0] if re.fullmatch(r"-?\d+[.,]0+", cell) else cell


def vocabulary(
    paths: Iterable[Path], columns: Sequence[str], missing: Sequence[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Propose one vocabulary for a federation, for `TableConfig.categorical`.

    Args:
        paths: The tables of the training cases, of all sites.
        columns: The columns of words or codes; a table may lack some.
        missing: Further words for a missing value.

    Returns:
        The words of each column that stand in some table: numbers by size, then words by name.

    Raises:
        DataError: A table cannot be read.
    """
    empty = {*MISSING, *(word.lower() for word in missing)}
    found: dict[str, set[str]] = {column: set() for column in columns}
    for path in paths:
        table, _ = read_columns(path)
        for column, words in found.items():
            known = [cell for cell in table.get(column, ()) if cell.lower() not in empty]
            words |= set(map(plain_code, known))

    def order(word: str) -> tuple[float, str]:
        number = re.fullmatch(r"-?\d+", word)
        return (float(word) if number else math.inf, word)

    return {column: tuple(sorted(words, key=order)) for column, words in found.items()}


@dataclass(frozen=True)
class Moments:
    """Numbers, sums and sums of squares of the known values of numeric columns, (columns,) each.

    Moments of several sites add up to those of all their rows.
    """

    counts: Array
    sums: Array
    squares: Array

    @classmethod
    def of(cls, numbers: Array) -> "Moments":
        """Return the moments of (rows, columns), NaN being missing."""
        known = ~np.isnan(numbers)
        filled = np.where(known, numbers, 0.0)
        return cls(known.sum(0).astype(float), filled.sum(0), (filled**2).sum(0))

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(
            self.counts + other.counts, self.sums + other.sums, self.squares + other.squares
        )

    def scaling(self) -> "Scaling":
        """Return mean and population standard deviation; a constant column has none and gives 0."""
        count = np.maximum(self.counts, 1)
        mean = self.sums / count
        variance = np.maximum(self.squares / count - mean**2, 0)
        varies = variance > 1e-12 * np.maximum(mean**2, 1e-300)
        deviation = np.sqrt(np.where(varies, variance, 1.0))
        return Scaling(mean, np.where(varies, 1 / deviation, 0.0))


@dataclass(frozen=True)
class Scaling:
    """What is subtracted from a column, and what it is then multiplied by, (columns,) each."""

    shift: Array
    factor: Array

    def __call__(self, numbers: Array) -> Array:
        """Scale (rows, columns); a missing number becomes 0, the mean."""
        scaled = (numbers - self.shift) * self.factor
        return np.where(np.isnan(scaled), 0.0, scaled)


def encode(table: Table, config: TableConfig, scaling: Scaling | None) -> NDArray[np.float32]:
    """Turn rows into what the network gets.

    Args:
        table: The rows.
        config: What the columns are.
        scaling: How numbers are scaled; None: as they are, NaN where missing.

    Returns:
        (rows, features): the numbers; then, where there are indicators, for every number whether it
        is missing; then for every categorical column a 1 at its category, the last one being
        `UNKNOWN`.
    """
    parts = [table.numbers if scaling is None else scaling(table.numbers)]
    if config.indicators:
        parts.append(np.isnan(table.numbers).astype(float))
    for index, words in enumerate((config.categorical or {}).values()):
        parts.append(np.eye(len(words) + 1)[table.codes[:, index]])
    return np.concatenate(parts, axis=1).astype(np.float32)
