"""The rows of all tables of a federation, and how they become one table for each of other sites."""

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from collegium.data.columns import SUFFIXES, read_columns
from collegium.data.federation import FederationConfig, expand_root, table_of
from collegium.data.partition import Sites
from collegium.errors import ConfigError, DataError, StorageError


@dataclass(frozen=True)
class PooledRow:
    """A row of a pool.

    Attributes:
        patient: The id of its patient; where patients are not stated, its place.
        target: What is written in the column of the label.
        cells: Every cell of its table as text, by column.
    """

    patient: str
    target: str
    cells: Mapping[str, str]


@dataclass(frozen=True)
class Pool:
    """The rows of all tables of a federation.

    Attributes:
        rows: Every row by its place, such as "site north, row 3", in order.
        separator: What stands between their cells.
    """

    rows: Mapping[str, PooledRow]
    separator: str

    @property
    def columns(self) -> list[str]:
        """The columns that any row has."""
        return [*dict.fromkeys(column for row in self.rows.values() for column in row.cells)]


def pool_tables(config: FederationConfig) -> Pool:
    """Read all rows of a federation of tables.

    Raises:
        DataError: A table cannot be read, two rows have one id, or cells are not separated alike.
    """
    assert config.table is not None, "the federation has no tables"
    rows: dict[str, PooledRow] = {}
    separators: dict[str, str] = {}
    ids: set[str] = set()
    for name in sorted(config.sites):
        table = table_of(config, name)
        columns, separator = read_columns(_path(config, name))
        separators.setdefault(separator or ",", name)
        lines = zip(*columns.values(), strict=True)
        about = zip(table.cases, table.patients, table.targets, lines, strict=True)
        for number, (case, patient, target, cells) in enumerate(about, 1):
            where = f"site {name}, row {number}"
            if config.table.case is not None and case in ids:
                raise DataError(
                    f"{where}: another site has a case of the same id; give cases ids of their own "
                    f"to pool them"
                )
            ids.add(case)
            who = patient if table.stated else where
            rows[where] = PooledRow(who, target, dict(zip(columns, cells, strict=True)))
    if len(separators) > 1:
        (one, first), (other, second), *_ = separators.items()
        raise DataError(
            f"the tables of the sites {first} and {second} separate cells by {one!r} and "
            f"{other!r}; save them alike to pool them"
        )
    return Pool(rows, next(iter(separators), ","))


def write_tables(config: FederationConfig, pool: Pool, sites: Sites, folder: Path) -> None:
    """Write the rows of each site as a table of its own, `<site>.csv`, and no others.

    Args:
        config: The federation that was pooled; its own tables are not written over.
        pool: The rows.
        sites: The site of each row, by its place.
        folder: Where to write.

    Raises:
        ConfigError: The folder is called like a table, or a table would be written over.
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


def _files(config: FederationConfig, sites: Sites, folder: Path) -> dict[str, Path]:
    """Return the file of each new site."""
    if folder.suffix.lower() in SUFFIXES:
        raise ConfigError(
            f"tables are divided into one for each site; name a folder as --output, not {folder}"
        )
    for where, site in sites.items():
        if not re.fullmatch(r"\w[\w .+-]*", site):
            raise DataError(
                f"{where}: what stands in the column cannot name a site; use letters, digits, - "
                f"and _"
            )
    files = {site: folder / f"{site}.csv" for site in sorted(set(sites.values()))}
    for name in config.sites:
        if _path(config, name).resolve() in {file.resolve() for file in files.values()}:
            raise ConfigError(
                f"{folder} holds the table of site {name}, which is kept; choose another --output"
            )
    return files


def _text(pool: Pool, rows: list[PooledRow]) -> str:
    """Write rows as CSV; where a name has a separator in it, quotes keep it from being one."""
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
