"""The pooled rows of all tables of a federation, and new tables written from them."""

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from collegium.data.columns import SUFFIXES, read_columns
from collegium.data.federation import read_site_table, wording_of
from collegium.data.federation_config import FederationConfig, expand_root
from collegium.data.partition import SiteAssignment
from collegium.errors import ConfigError, DataError, StorageError


@dataclass(frozen=True)
class PooledRow:
    """A pooled row.

    Attributes:
        patient: The id of its patient; if patients are not stated, its location.
        target: The cell in the column of the label.
        cells: Every cell of its table as text, by column, in the words of the federation.
    """

    patient: str
    target: str
    cells: Mapping[str, str]


@dataclass(frozen=True)
class PooledTables:
    """The rows of all tables of a federation.

    Attributes:
        rows: Every row by its location, such as "site north, row 3", in order.
        separator: The separator of their cells.
    """

    rows: Mapping[str, PooledRow]
    separator: str

    @property
    def columns(self) -> list[str]:
        """The columns that any row has."""
        return [*dict.fromkeys(column for row in self.rows.values() for column in row.cells)]


def pool_tables(config: FederationConfig) -> PooledTables:
    """Read all rows of a federation of tables.

    Raises:
        DataError: A table cannot be read, two rows have one id, or tables differ in their
            separator.
    """
    assert config.table is not None, "the federation has no tables"
    rows: dict[str, PooledRow] = {}
    separators: dict[str, str] = {}
    ids: set[str] = set()
    for name in sorted(config.sites):
        table = read_site_table(config, name)
        path = _path(config, name)
        columns, separator = read_columns(path)
        columns = wording_of(config, name).translate(path.name, columns)
        separators.setdefault(separator or ",", name)
        lines = zip(*columns.values(), strict=True)
        named = zip(table.cases, table.patients, table.targets, lines, strict=True)
        for number, (case, patient, target, cells) in enumerate(named, 1):
            where = f"site {name}, row {number}"
            if config.table.case is not None and case in ids:
                raise DataError(
                    f"{where}: another site has a case of the same id; give cases ids of their own "
                    f"to pool them"
                )
            ids.add(case)
            rows[where] = PooledRow(
                patient if table.stated else where, target, dict(zip(columns, cells, strict=True))
            )
    if len(separators) > 1:
        (one, first), (other, second), *_ = separators.items()
        raise DataError(
            f"the tables of the sites {first} and {second} separate cells by {one!r} and "
            f"{other!r}; save them alike to pool them"
        )
    return PooledTables(rows, next(iter(separators), ","))


def write_tables(
    config: FederationConfig, pool: PooledTables, sites: SiteAssignment, folder: Path
) -> None:
    """Write the rows of each site as a table `<site>.csv`; rows without a site are left out.

    Args:
        config: The federation that was pooled; its own tables are never overwritten.
        pool: The rows.
        sites: The site of each row, by its location.
        folder: The folder to write to.

    Raises:
        ConfigError: The folder has the suffix of a table, or a table would be overwritten.
        DataError: A site's name cannot name a file.
        StorageError: A table cannot be written.
    """
    files = _files(config, sites, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for site, file in files.items():
            chosen = [row for where, row in pool.rows.items() if sites.get(where) == site]
            file.write_text(_text(pool, chosen), "utf-8", newline="")
    except OSError as error:
        raise StorageError(f"{folder} cannot be written ({error.strerror})") from error


def _files(config: FederationConfig, sites: SiteAssignment, folder: Path) -> dict[str, Path]:
    """Return the file of each new site."""
    if folder.suffix.lower() in SUFFIXES:
        raise ConfigError(
            f"tables are divided into one for each site; name a folder as --output, not {folder}"
        )
    for where, site in sites.items():
        if not re.fullmatch(r"\w[\w .+-]*", site):
            raise DataError(
                f"{where}: the word in the column cannot name a site; use letters, digits, - and _"
            )
    files = {site: folder / f"{site}.csv" for site in sorted(set(sites.values()))}
    for name in config.sites:
        if _path(config, name).resolve() in {file.resolve() for file in files.values()}:
            raise ConfigError(
                f"{folder} holds the table of site {name}, which is kept; choose another --output"
            )
    return files


def _text(pool: PooledTables, rows: list[PooledRow]) -> str:
    """Return rows as CSV; all cells are quoted if a column's name holds a separator."""
    columns, text = pool.columns, io.StringIO()
    marked = any(mark in column for column in columns for mark in ",;\t")
    writer = csv.writer(
        text,
        delimiter=pool.separator,
        lineterminator="\n",
        quoting=csv.QUOTE_ALL if marked else csv.QUOTE_MINIMAL,
    )
    writer.writerow(columns)
    writer.writerows([row.cells.get(column, "") for column in columns] for row in rows)
    return text.getvalue()


def _path(config: FederationConfig, name: str) -> Path:
    return expand_root(config.root) / str(config.sites[name].table)
