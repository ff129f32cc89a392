"""Tables of clinical data: read as text, interpreted by column name, encoded as numbers."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from collegium.core.settings import settings
from collegium.data.cells import (
    Limit,
    is_numeric,
    limit_of,
    may_be_thousands,
    parse_number,
    what_is_wrong,
)
from collegium.data.columns import (
    AS_ELSEWHERE,
    SiteWording,
    nfc,
    plain_code,
    read_columns,
    spelling_key,
)
from collegium.data.decoded_image import listed
from collegium.errors import ConfigError, DataError

MISSING = ("", "?", "na", "n/a", "nan", "null", "none", "-", ".")
"""Cells that stand for a missing value, in lower case."""

Array = NDArray[np.float64]
Columns = Mapping[str, Sequence[str]]


@settings
class TableConfig:
    """The columns of a table, the same for all sites.

    Columns are found by name, in any order; others are ignored.

    Attributes:
        label: The column that holds the class.
        numeric: Columns of numbers; in a file, `lab_*` stands for all that are called so and have
            no other role, sorted.
        categorical: Columns of words or codes, each with its vocabulary. Any other value at a site
            counts as unknown.
        case: The column with the case's id; None: the row's number.
        patient: The column with the patient's id; None: every case is a patient of its own.
        split: The column with the split ("train", "val", "test"); None: splits are drawn.
        missing: Further words for a missing value.
        zero_is_missing: Numeric columns in which 0 stands for a missing value. A numeric column
            that is 0 in every row of a site is interpreted so anyway.
        zero_is_real: Numeric columns in which it never does.
        absent: A site without one of the columns is an error ("refuse"), or the values are missing
            there ("missing").
        indicators: Whether each numeric column gets a second one that is 1 if it is missing.
        censored: What stands for a value beyond a limit, such as <0.5, >= 30 or below 0.5: the
            limit ("limit"), or half of it where the value is below one that is above 0, and the
            limit otherwise ("half"); each numeric column then gets one more that is 1 for such
            values. "refuse": it is an error.
        scale: By whose training cases numbers are scaled: "site", the site's own; "federation",
            those of all sites, which exchange a few numbers before the first round; "none": numbers
            stay as written, and a missing one becomes 0.
        scale_by: "deviation": to mean 0 and standard deviation 1, and a missing number becomes the
            mean; "range": to -1 for the smallest and 1 for the largest value, and a missing number
            becomes 0, the middle. Values outside that range are not cut off: they lie below -1 or
            above 1. Either way a column that is constant among the training cases becomes 0
            everywhere.
        decimal: The decimal mark; "auto": the comma if cells are separated by something else.
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
    censored: Literal["refuse", "limit", "half"] = "refuse"
    scale: Literal["site", "federation", "none"] = "site"
    scale_by: Literal["deviation", "range"] = "deviation"
    decimal: Literal["auto", ".", ","] = "auto"

    def __post_init__(self) -> None:
        self._normalise()
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
        if self.scale == "none" and self.scale_by != "deviation":
            raise ConfigError(
                f"table.scale_by is {self.scale_by}, but table.scale is none, so that nothing is "
                f"scaled; set table.scale to site or federation, or leave out table.scale_by"
            )
        empty = [name for name, words in (self.categorical or {}).items() if not words]
        if empty:
            raise ConfigError(f"table.categorical.{empty[0]} names no category; name all there are")

    def _normalise(self) -> None:
        """Write every name and word in the form in which tables are read, see `nfc`."""
        for name in ("label", "case", "patient", "split"):
            if (word := getattr(self, name)) is not None:
                object.__setattr__(self, name, nfc(word))
        for name in ("numeric", "missing", "zero_is_missing", "zero_is_real"):
            object.__setattr__(self, name, tuple(map(nfc, getattr(self, name))))
        if self.categorical is not None:
            kinds = {nfc(name): tuple(map(nfc, words)) for name, words in self.categorical.items()}
            object.__setattr__(self, "categorical", kinds)

    @property
    def imputed(self) -> str:
        """The value that stands for a missing number, in words."""
        if self.scale == "none":
            return "0"
        return "the mean" if self.scale_by == "deviation" else "the middle of the range"

    @property
    def columns(self) -> tuple[str, ...]:
        """The feature columns, in order."""
        return (*self.numeric, *(self.categorical or {}))

    @property
    def groups(self) -> list[list[int]]:
        """The indices of the encoded features of each column; see `encode` for their order."""
        count = len(self.numeric)
        start = count * (1 + self.indicators + (self.censored != "refuse"))
        groups = [[*range(place, start, count)] for place in range(count)]
        for words in (self.categorical or {}).values():
            groups.append(list(range(start, start + len(words) + 1)))
            start += len(words) + 1
        return groups

    @property
    def features(self) -> int:
        """The number of encoded features of a case, the network's inputs."""
        return sum(map(len, self.groups))


@dataclass(frozen=True)
class Table:
    """The rows of a site, as far as they can be interpreted without knowing other sites.

    Attributes:
        cases: The site's own id of each row.
        patients: The site's own id of each row's patient; the case's without a column of them.
        targets: The cells of the label's column, as written.
        splits: The cells of the splits' column, as written; None without one.
        numbers: (rows, numeric columns); NaN if missing.
        censored: (rows, numeric columns): whether only a limit of the number is known.
        codes: (rows, categorical columns): the index in the vocabulary, or its length if unknown.
        notes: One sentence for each observation.
        missing: By column, the number of rows in which the value is missing.
        unknown: By column, the words that are not in the vocabulary, and their counts.
        stated: Whether there is a column of patients.
    """

    cases: tuple[str, ...]
    patients: tuple[str, ...]
    targets: tuple[str, ...]
    splits: tuple[str, ...] | None
    numbers: Array
    censored: NDArray[np.bool_]
    codes: NDArray[np.int64]
    notes: tuple[str, ...]
    missing: Mapping[str, int]
    unknown: Mapping[str, Mapping[str, int]]
    stated: bool


def read_table(
    path: Path,
    config: TableConfig,
    *,
    labelled: bool = True,
    wording: SiteWording = AS_ELSEWHERE,
) -> Table:
    """Read a table of a site.

    Args:
        path: A CSV file (commas, semicolons or tabs; UTF-8 with or without a mark) or Parquet.
        config: The columns.
        labelled: Whether the columns of the label and of the split are required.
        wording: What the site writes otherwise than the federation.

    Raises:
        DataError: The file cannot be read, lacks a column or has a wrong cell in a numeric column.
    """
    columns, separator = read_columns(path)
    columns = wording.translate(path.name, columns)
    wanted = [*config.columns, *filter(None, (config.case, config.patient))]
    if labelled:
        wanted += filter(None, (config.split, config.label))
    absent = [name for name in wanted if name not in columns]
    spelt = {spelling_key(name): name for name in columns if name not in wanted}
    alike = {name: spelt[spelling_key(name)] for name in absent if spelling_key(name) in spelt}
    if alike:
        raise DataError(
            f"{path.name} has no column {listed(alike)} but {listed(alike.values())}, spelt "
            f"otherwise; rename it or, if it is the same, set columns: {alike} at the site"
        )
    refused = [c for c in absent if config.absent == "refuse" or c not in config.columns]
    if refused:
        raise DataError(
            f"{path.name} has no column {listed(refused)} (it has {listed(columns)}); add it, "
            f"correct federation.table, or set table.absent to missing"
        )
    count = len(next(iter(columns.values()), ()))
    if not count:
        raise DataError(f"{path.name} holds no rows; add some or take the site out")
    cells = _CellParser(path.name, columns, count, separator, config)
    numbers = [cells.numbers(name) for name in config.numeric]
    cells.refuse_limits()
    codes = [cells.codes(name, words) for name, words in (config.categorical or {}).items()]
    cases = cells.ids(config.case, "case") or tuple(f"{row + 1}" for row in range(count))
    return Table(
        cases=cases,
        patients=cells.ids(config.patient, "patient") or cases,
        targets=tuple(columns.get(config.label, [""] * count)),
        splits=tuple(columns[config.split]) if config.split in columns else None,
        numbers=np.stack(numbers, 1) if numbers else np.empty((count, 0)),
        censored=cells.censored(),
        codes=np.stack(codes, 1) if codes else np.empty((count, 0), np.int64),
        notes=tuple(cells.notes),
        missing=cells.missing,
        unknown=cells.unknown,
        stated=config.patient is not None,
    )


class _CellParser:
    """A parser of the cells of one table, which collects notes on their oddities."""

    def __init__(
        self, name: str, columns: Columns, count: int, separator: str, config: TableConfig
    ) -> None:
        self._name, self._columns, self._count, self._config = name, columns, count, config
        self._empty = {*MISSING, *(word.lower() for word in config.missing)}
        self._decimal = self._decimal_of(separator)
        self.notes: list[str] = []
        self.missing: dict[str, int] = {}
        self.unknown: dict[str, dict[str, int]] = {}
        self._limits: dict[str, dict[int, str]] = {}

    def ids(self, column: str | None, kind: str) -> tuple[str, ...] | None:
        """Return a column of ids as text."""
        if column is None:
            return None
        values = tuple(self._columns[column])
        counts = Counter(values)
        twice = [value for value, count in counts.items() if count > 1]
        if "" in counts or (kind == "case" and twice):
            row = values.index("" if "" in counts else twice[0]) + 1
            raise DataError(
                f"{self._name}, row {row}: the id of the {kind} "
                f"{'is missing' if '' in counts else 'occurs twice'}; correct column {column}"
            )
        return values

    def numbers(self, column: str) -> Array:
        """Return a column of numbers, NaN if missing."""
        if column not in self._columns:
            self._note_absent(column)
            return np.full(self._count, np.nan)
        cells = self._columns[column]
        limited = sum(cell.lower() in self._empty and bool(limit_of(cell)) for cell in cells)
        if limited:
            self.notes.append(
                f"{self._name}: {column} holds values beyond a limit in {limited} of {self._count} "
                f"rows, which table.missing makes missing: they become {self._config.imputed}"
            )
        values = np.array([self._number(cell, column, row) for row, cell in enumerate(cells, 1)])
        if column in self._limits and self._config.censored != "refuse":
            self.notes.append(
                f"{self._name}: {column} holds values beyond a limit in "
                f"{len(self._limits[column])} of {self._count} rows; the limit or half of it "
                f"stands for them (table.censored: {self._config.censored})"
            )
        zeros = column in self._config.zero_is_missing
        known = values[~np.isnan(values)]
        real = column in self._config.zero_is_real
        real = real or self._one_hot(column)
        if not zeros and not real and len(known) > 1 and not known.any():
            zeros = True
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

    def _one_hot(self, column: str) -> bool:
        """Return whether a column is one of several by whose 0 and 1 a category is told.

        They have one name up to its last mark, such as stage_I and stage_II, hold nothing but 0 and
        1 (or missing values), and no row holds more than one 1, but some do.
        """
        stem = _stem(column)
        group = [name for name in self._config.numeric if name in self._columns and stem]
        group = [name for name in group if _stem(name) == stem]
        words = [[plain_code(cell) for cell in self._columns[name]] for name in group]
        ones = [row.count("1") for row in zip(*words, strict=True)]
        found = {cell for cells in words for cell in cells if cell.lower() not in self._empty}
        return len(group) > 1 and found == {"0", "1"} and max(ones) == 1

    def codes(self, column: str, words: Sequence[str]) -> NDArray[np.int64]:
        """Return the index of every cell in a vocabulary; the index after its end is unknown."""
        if column not in self._columns:
            self._note_absent(column)
            return np.full(self._count, len(words))
        place = {word: index for index, word in enumerate(words)}
        cells = [cell if cell in place else plain_code(cell) for cell in self._columns[column]]
        empty = self._empty - {word.lower() for word in words}
        self.missing[column] = sum(cell.lower() in empty for cell in cells)
        odd = Counter(c for c in cells if c not in place and c.lower() not in empty)
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
        if limit := limit_of(cell):
            return self._limit(limit, column, row)
        where = f"{self._name}, row {row}: column {column}"
        try:
            value = parse_number(cell, self._decimal)
        except ValueError as error:
            raise DataError(f"{where} {what_is_wrong(cell, self._decimal)}") from error
        if not math.isfinite(value):
            raise DataError(f"{where} is infinite; correct it")
        return value

    def _limit(self, limit: Limit, column: str, row: int) -> float:
        """Return what stands for a value beyond a limit; NaN if `refuse_limits` will refuse it."""
        self._limits.setdefault(column, {})[row] = limit.side
        if self._config.censored == "refuse":
            return math.nan
        try:
            value = parse_number(limit.text, self._decimal)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise DataError(
                f"{self._name}, row {row}: column {column} holds a value {limit.side} a limit that "
                f"is no number; write the limit alone after < or >, in the unit of the column"
            )
        halved = self._config.censored == "half" and limit.side == "below" and value > 0
        return value / 2 if halved else value

    def refuse_limits(self) -> None:
        """Refuse values beyond a limit, of all columns at once, if there is no rule for them.

        Raises:
            DataError: There are some, with the first one and their number in each column.
        """
        if self._config.censored != "refuse" or not self._limits:
            return
        counts = [
            f"{column} {count} {side}"
            for column, rows in self._limits.items()
            for side, count in sorted(Counter(rows.values()).items())
        ]
        column, rows = next(iter(self._limits.items()))
        row, side = next(iter(rows.items()))
        raise DataError(
            f"{self._name}, row {row}: column {column} holds a value {side} a limit, not a number "
            f"(in all {listed(counts)}); set table.censored to limit or half: the limit or half of "
            "it then stands for such a value, and a further feature tells which they are. They are "
            f"not missing: as such they would become {self._config.imputed}"
        )

    def censored(self) -> NDArray[np.bool_]:
        """Return (rows, numeric columns): whether only a limit of the number is known."""
        found = np.zeros((self._count, len(self._config.numeric)), bool)
        for column, rows in self._limits.items():
            found[[row - 1 for row in rows], self._config.numeric.index(column)] = True
        return found

    def _decimal_of(self, separator: str) -> str:
        """Determine the decimal mark from all numeric cells together."""
        if self._config.decimal != "auto":
            return self._config.decimal
        named = [name for name in self._config.numeric if name in self._columns]
        cells = [cell for name in named for cell in self._columns[name]]
        known = [cell for cell in cells if cell.lower() not in self._empty and is_numeric(cell)]
        comma = any("," in cell for cell in known)
        doubt = may_be_thousands(known, "," if comma else ".", exact=not separator)
        if comma and separator == ",":
            cause = "hold a comma and cells are separated by ','"
        elif comma and any("." in cell for cell in known):
            cause = "hold a comma and others hold a point"
        elif doubt:
            cause = "may hold a mark between thousands or before decimals"
        else:
            return "," if comma else "."
        raise DataError(
            f"{self._name}: some of its numbers {cause}, so that the decimal mark is not clear; "
            f"set table.decimal to ',' or '.', and write no thousands marks"
        )


def _stem(column: str) -> str:
    """Return the name of a column up to its last mark; empty without one."""
    found = re.fullmatch(r"(.*[\w)\]])[_.=:|/ -]+[^_.=:|/ -]+", column)
    return found[1] if found else ""


def vocabulary(
    paths: Iterable[Path], columns: Sequence[str], missing: Sequence[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Propose one vocabulary for a federation, for `TableConfig.categorical`.

    Args:
        paths: The tables of the training cases, of all sites.
        columns: The columns of words or codes; a table may lack some.
        missing: Further words for a missing value.

    Returns:
        The words of each column that occur in any table: numbers by size, then words by name.

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
    """Counts, sums and sums of squares of the known values of numeric columns, (columns,) each.

    Moments of several sites add up to those of all their rows.
    """

    counts: Array
    sums: Array
    squares: Array

    @classmethod
    def of(cls, numbers: Array) -> "Moments":
        """Return the moments of (rows, columns); NaN is missing."""
        known = ~np.isnan(numbers)
        filled = np.where(known, numbers, 0.0)
        return cls(known.sum(0).astype(float), filled.sum(0), (filled**2).sum(0))

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(
            self.counts + other.counts, self.sums + other.sums, self.squares + other.squares
        )

    def scaling(self) -> "Scaling":
        """Return mean and population standard deviation; the factor of a constant column is 0."""
        count = np.maximum(self.counts, 1)
        mean = self.sums / count
        variance = np.maximum(self.squares / count - mean**2, 0)
        varies = variance > 1e-12 * np.maximum(mean**2, 1e-300)
        deviation = np.sqrt(np.where(varies, variance, 1.0))
        return Scaling(mean, np.where(varies, 1 / deviation, 0.0))


@dataclass(frozen=True)
class Ranges:
    """The smallest and the largest known value of numeric columns, (columns,) each.

    NaN where no value is known. Ranges of several sites add up to those of all their rows.
    """

    smallest: Array
    largest: Array

    @classmethod
    def of(cls, numbers: Array) -> "Ranges":
        """Return the ranges of (rows, columns); NaN is missing."""
        return cls(
            np.fmin.reduce(numbers, axis=0, initial=np.nan),
            np.fmax.reduce(numbers, axis=0, initial=np.nan),
        )

    def __add__(self, other: "Ranges") -> "Ranges":
        return Ranges(np.fmin(self.smallest, other.smallest), np.fmax(self.largest, other.largest))

    def scaling(self) -> "Scaling":
        """Return the middle of each range and 2 over its width; 0 for a constant column."""
        smallest, largest = np.nan_to_num(self.smallest), np.nan_to_num(self.largest)
        width = largest - smallest
        size = np.maximum(np.maximum(abs(smallest), abs(largest)), 1e-300)
        varies = width > 1e-12 * size
        return Scaling(
            smallest + width / 2, np.where(varies, 2 / np.where(varies, width, 1.0), 0.0)
        )


def describe_columns(numbers: Array, config: TableConfig) -> Moments | Ranges:
    """Return what the scaling of numeric columns follows from.

    Args:
        numbers: (rows, numeric columns); NaN is missing.
        config: By what they are scaled.
    """
    return Ranges.of(numbers) if config.scale_by == "range" else Moments.of(numbers)


@dataclass(frozen=True)
class Scaling:
    """The shift subtracted from each column and the factor applied then, (columns,) each."""

    shift: Array
    factor: Array

    def __call__(self, numbers: Array) -> Array:
        """Scale (rows, columns); a missing number becomes 0."""
        scaled = (numbers - self.shift) * self.factor
        return np.where(np.isnan(scaled), 0.0, scaled)


def encode(table: Table, config: TableConfig, scaling: Scaling | None) -> NDArray[np.float32]:
    """Encode rows as the network's inputs.

    Args:
        table: The rows.
        config: The columns.
        scaling: The scaling of the numbers; None: as they are, NaN if missing.

    Returns:
        (rows, features): the numbers; then, with indicators, for every number whether it is
        missing; then, where `censored` is not "refuse", whether only a limit of it is known; then
        for every categorical column a one-hot code, whose last place stands for
        values that are missing or not in the vocabulary.
    """
    parts = [table.numbers if scaling is None else scaling(table.numbers)]
    if config.indicators:
        parts.append(np.isnan(table.numbers).astype(float))
    if config.censored != "refuse":
        parts.append(table.censored.astype(float))
    for index, words in enumerate((config.categorical or {}).values()):
        parts.append(np.eye(len(words) + 1)[table.codes[:, index]])
    return np.concatenate(parts, axis=1).astype(np.float32)
