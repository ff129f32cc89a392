"""Columns that a federation names by a pattern, such as lab_*."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from collegium.data.columns import nfc, read_columns
from collegium.data.decoded_image import listed
from collegium.errors import ConfigError, DataError


def is_pattern(name: str) -> bool:
    """Return whether a name stands for several columns, as `*` in it does for any characters."""
    return "*" in name


def expand_table(table: Mapping[str, Any], sites: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """Return the settings of tables with the columns that patterns among them stand for.

    Args:
        table: The mapping of a `TableConfig`. Patterns are expanded in `numeric`, by the columns of
            all tables without those that have another role, and in `zero_is_missing` and
            `zero_is_real` by the numeric columns.
        sites: The mapping of each site.
        root: The folder that their tables are relative to.

    Raises:
        ConfigError: A pattern stands for no column, or no table is on this machine.
    """
    keys = ("numeric", "zero_is_missing", "zero_is_real")
    given = {key: [*map(str, table.get(key) or ())] for key in keys}
    if not any(map(is_pattern, [name for names in given.values() for name in names])):
        return dict(table)
    single = (table.get(key) for key in ("label", "case", "patient", "split"))
    taken = {nfc(str(name)) for name in (*single, *(table.get("categorical") or ())) if name}
    numeric = _expand("numeric", given["numeric"], taken, _columns(sites, root))
    rest = {key: _expand(key, given[key], (), numeric) for key in keys[1:] if given[key]}
    return {**table, "numeric": numeric, **rest}


def _columns(sites: Mapping[str, Any], root: Path) -> list[str]:
    """Return the columns of all tables that can be read, by the federation's names, sorted."""
    found: set[str] = set()
    for site in sites.values():
        if isinstance(site, Mapping) and isinstance(site.get("table"), str):
            with suppress(DataError):  # which is reported where the table is read
                columns, _ = read_columns(root / site["table"])
                common = {nfc(own): nfc(name) for name, own in (site.get("columns") or {}).items()}
                found |= {common.get(column, column) for column in columns}
    if not found:
        raise ConfigError("no table can be read on this machine; name every column")
    return sorted(found)


def _expand(
    key: str, names: Sequence[str], taken: Collection[str], columns: Iterable[str]
) -> list[str]:
    """Return names with each pattern replaced by the columns that nothing else names."""
    named = {*taken, *(nfc(name) for name in names if not is_pattern(name))}
    free, expanded = [column for column in columns if column not in named], []
    for name in names:
        if not is_pattern(name):
            expanded.append(name)
            continue
        pattern = ".*".join(map(re.escape, nfc(name).split("*")))
        found = [column for column in free if re.fullmatch(pattern, column)]
        if not found:
            raise ConfigError(f"{key} names {name!r}, and none of {listed(free)} is so called")
        expanded += found
        free = [column for column in free if column not in found]
    return expanded
