"""Write the tables of a run into files, for papers, for other programs and for the hospitals."""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from collegium.core.files import write_atomically
from collegium.errors import DataError
from collegium.evaluation.comparisons import adapting_table
from collegium.evaluation.formats import (
    comparisons_to_csv,
    comparisons_to_latex,
    comparisons_to_markdown,
    comparisons_to_text,
    to_csv,
    to_latex,
    to_markdown,
    to_text,
)
from collegium.evaluation.paired import ComparisonTable
from collegium.evaluation.results import Row, read_table
from collegium.evaluation.scores import SPLITS, Where
from collegium.evaluation.sweeps import sweep_table, variations
from collegium.evaluation.tables import MethodTable, final_scores, joining_table, method_table
from collegium.evaluation.timing import as_methods, headline_metric, read_accounts, time_table

logger = logging.getLogger(__name__)

FOLDER = "tables"
"""The folder of the tables in the output folder of a run."""

_WRITERS: dict[str, Callable[[MethodTable], str]] = {
    "txt": to_text, "md": to_markdown, "tex": to_latex, "csv": to_csv,
}  # fmt: skip
_COMPARISON_WRITERS: dict[str, Callable[[ComparisonTable], str]] = {
    "txt": comparisons_to_text, "md": comparisons_to_markdown, "tex": comparisons_to_latex,
    "csv": comparisons_to_csv,
}  # fmt: skip
_UNSAFE = re.compile(r"[^\w.=+-]+")


@dataclass(frozen=True)
class _Labels:
    """Labels of the algorithms as configured, and of the one that trains each site alone."""

    order: tuple[str, ...]
    local: str


def write_tables(output: Path) -> tuple[Path, ...]:
    """Write every table and comparison of a run into the folder ``tables`` of its output.

    ``<metric>[-outside][-<setting>]``, of a sweep also ``<metric>[-outside]-sweep``, and the
    comparisons ``<metric>[-<setting>]-joining`` and ``-adapting``. Where sites are outside,
    ``time[-<setting>]`` holds time against quality. Each is there as ``.txt``, ``.md``, ``.tex``
    and ``.csv``. Files of an earlier call are replaced.

    Args:
        output: The output folder of an experiment, finished or not.

    Returns:
        The paths, in the order written.

    Raises:
        DataError: There are no scores of test cases yet, or a file cannot be read.
        StorageError: A file cannot be written.
    """
    labels = _read_labels(output)
    groups: dict[tuple[str, Where], list[Row]] = defaultdict(list)
    rows = read_table(output)
    for where in SPLITS:
        for row in final_scores(rows, where=where):
            groups[row.metric, where].append(row)
    if not groups:
        raise DataError(
            f"{output}: there are no scores of test cases to make tables of; "
            "run the experiment until a cell is finished."
        )
    made = [_texts(groups, metric, where, labels) for metric, where in sorted(groups)]
    texts: dict[str, str] = {}
    for stem, extension, text in chain(*made, _time_texts(output, rows, labels)):
        texts[_free(f"{_UNSAFE.sub('_', stem)}.{extension}", texts)] = text
    paths = tuple(output / FOLDER / name for name in texts)
    for path, text in zip(paths, texts.values(), strict=True):
        write_atomically(path, text.encode())
    return paths


def _texts(
    groups: Mapping[tuple[str, Where], Sequence[Row]], metric: str, where: Where, labels: _Labels
) -> Iterator[tuple[str, str, str]]:
    """Yield name, extension and content of the files of one metric."""
    scores, inside = groups[metric, where], groups.get((metric, "inside"), ())
    place = "-outside" if where == "outside" else ""
    by_setting: dict[str, list[Row]] = {name: [] for name in variations(scores)}
    for row in scores:
        by_setting[row.variation].append(row)
    for name, rows in by_setting.items():
        setting = f"-{name}" if name else ""
        table = method_table(rows, metric, labels.order, where=where, variation=name)
        yield from _table_texts(f"{metric}{place}{setting}", table)
        if where == "inside":
            compared: ComparisonTable = joining_table(
                rows, metric, labels.order, local=labels.local, variation=name
            )
        else:
            compared = adapting_table([*rows, *inside], metric, labels.order, variation=name)
        word = "joining" if where == "inside" else "adapting"
        for extension, write in _COMPARISON_WRITERS.items():
            yield f"{metric}{setting}-{word}", extension, write(compared)
    if any(by_setting):
        table = sweep_table(scores, metric, labels.order, where=where)
        yield from _table_texts(f"{metric}{place}-sweep", table)


def _time_texts(
    output: Path, rows: Sequence[Row], labels: _Labels
) -> Iterator[tuple[str, str, str]]:
    """Yield name, extension and content of the tables of time against quality."""
    scores, metric = final_scores(rows, where="outside"), headline_metric(rows)
    for name in variations(scores):
        accounts = read_accounts(output, name)
        table = time_table(scores, accounts, metric, labels.order, variation=name)
        if table.missing:
            logger.warning("%s: %s", output / name, table.missing)
        if table.methods:
            yield from _table_texts(f"time-{name}" if name else "time", as_methods(table))


def _table_texts(stem: str, table: MethodTable) -> Iterator[tuple[str, str, str]]:
    for extension, write in _WRITERS.items():
        yield stem, extension, write(table)


def _free(name: str, taken: Mapping[str, str]) -> str:
    """Return the name, with a number where two settings would share a file."""
    stem, _, extension = name.rpartition(".")
    number = 2
    while name in taken:
        name = f"{stem}_{number}.{extension}"
        number += 1
    return name


def _read_labels(output: Path) -> _Labels:
    path = output / "run.json"
    try:
        info: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        entries = list(info.get("config", {}).get("algorithms", ()))
        labels = [(str(entry.get("label") or entry["name"]), entry["name"]) for entry in entries]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(
            f"{path}: the description of the run cannot be read ({error}); "
            "restore the file, or remove it to make tables without it."
        ) from error
    local = next((label for label, name in labels if name == "local"), "local")
    return _Labels(tuple(label for label, _ in labels), local)
