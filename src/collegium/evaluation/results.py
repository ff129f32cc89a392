"""The tidy table of results: one `Row` per score, kept as JSON lines while a run goes on.

A run appends rows as they come (`append_rows`), reads them back after a crash (`read_rows`) and
ends with one table for everybody (`write_table`): ``results.csv`` and ``results.parquet``.
"""

import csv
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from collegium.core.files import write_atomically
from collegium.errors import DataError, StorageError

logger = logging.getLogger(__name__)

ROWS_FILE = "rows.jsonl"
"""The name of the file of rows in the folder of an (algorithm, seed) cell."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One score, or one round's loss, of one site.

    Attributes:
        experiment: Name of the experiment.
        algorithm: Label of the algorithm.
        seed: Seed of the run.
        fold: Number of the fold, 0 where there is one.
        variation: Name of the setting in a sweep; empty outside a sweep.
        round: Round of the row; the last one for the final scores.
        site: Name of the site.
        case: Pseudonym of the case; empty for rows of a round.
        patient: Pseudonym of the patient; empty for rows of a round.
        split: ``"train"``, ``"val"`` or ``"test"``; ``"outside"`` for a site that took no part.
        model: ``"global"`` or ``"personal"``; outside, the label of the adapter; empty where no
            model was scored.
        metric: What was measured.
        value: The number; None where it is undefined. NaN and infinity are stored as None.
        unit: Unit of the value, empty for a pure number.
        bytes_up: Bytes that left the site, in the round or (case rows) in the run.
        bytes_down: Bytes that came to the site.
        seconds: Seconds that the site worked.
    """

    experiment: str
    algorithm: str
    seed: int
    fold: int = 0
    variation: str = ""
    round: int
    site: str
    case: str = ""
    patient: str = ""
    split: str
    model: str = ""
    metric: str
    value: float | None
    unit: str = ""
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        defined = self.value is not None and math.isfinite(self.value)
        object.__setattr__(self, "value", float(self.value or 0) if defined else None)

    @property
    def key(self) -> tuple[str | int, ...]:
        """The key of the row; two rows with one key are the same measurement, made twice."""
        return (
            self.experiment, self.algorithm, self.seed, self.fold, self.variation, self.round,
            self.site, self.case, self.split, self.model, self.metric,
        )  # fmt: skip


COLUMNS = tuple(field.name for field in fields(Row))
"""The columns of the table, in order."""

_INTEGERS = frozenset({"seed", "fold", "round", "bytes_up", "bytes_down"})
_FLOATS = frozenset({"value", "seconds"})
_LATER = {"variation": ""}  # columns that a table of an earlier version lacks, and their value


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a file of JSON lines; when this returns they are on the disk.

    A half-written last line that an earlier crash left behind is removed first.

    Args:
        path: The file; it and its folder are made if absent.
        rows: What to add.

    Raises:
        StorageError: The file cannot be written.
    """
    lines = [json.dumps(asdict(row), ensure_ascii=False, allow_nan=False) for row in rows]
    if not lines:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            _mend(file, path)
            file.write(("\n".join(lines) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(
            f"{path}: the rows could not be written ({error.strerror}); "
            "make room or the folder writable, then resume the run."
        ) from error


def _mend(file: Any, path: Path) -> None:
    """Make the file end with a whole line."""
    file.seek(0)
    content: bytes = file.read()
    if not content or content.endswith(b"\n"):
        return
    start = content.rfind(b"\n") + 1
    if _parse(content[start:]) is None:
        logger.warning("%s: a half-written last line is removed", path)
        file.truncate(start)
    else:
        file.write(b"\n")


def _parse(line: bytes) -> Row | None:
    """Return the row of a line, or None where the line is not one."""
    try:
        return Row(**json.loads(line))
    except (ValueError, TypeError):
        return None


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """Read files of JSON lines; a measurement that was made twice counts once, the later one.

    Args:
        paths: The files, in the order wanted.

    Returns:
        The rows. A truncated last line is left out.

    Raises:
        StorageError: A file cannot be read, or a line other than the last is not a row.
    """
    rows: dict[tuple[str | int, ...], Row] = {}
    for path in paths:
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise StorageError(
                f"{path}: the rows could not be read ({error.strerror}); check the folder."
            ) from error
        for number, line in enumerate(lines, start=1):
            row = _parse(line)
            if row is not None:
                rows[row.key] = row
            elif number < len(lines):
                raise StorageError(
                    f"{path}, line {number}: this is not a row of results; "
                    "remove the line, or the file and resume the run."
                )
    return list(rows.values())


def write_table(rows: Iterable[Row], folder: Path) -> tuple[Path, Path]:
    """Write ``results.csv`` and ``results.parquet``, each replaced as a whole.

    Args:
        rows: The rows; one with an undefined value is kept, as an empty cell or null.
        folder: Where to write; made if absent.

    Returns:
        The paths of the CSV and of the Parquet file.

    Raises:
        StorageError: A file cannot be written.
    """
    rows = list(rows)
    paths = folder / "results.csv", folder / "results.parquet"
    for path, content in zip(paths, (_to_csv(rows), _to_parquet(rows)), strict=True):
        write_atomically(path, content)
    return paths


def _to_csv(rows: Sequence[Row]) -> bytes:
    text = StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue().encode()


def _to_parquet(rows: Sequence[Row]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    kinds = {
        **dict.fromkeys(_INTEGERS, pyarrow.int64()),
        **dict.fromkeys(_FLOATS, pyarrow.float64()),
    }
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.string())) for name in COLUMNS])
    buffer = BytesIO()
    table = pyarrow.Table.from_pylist([asdict(row) for row in rows], schema=schema)
    parquet.write_table(table, buffer)
    return buffer.getvalue()


def _read_csv(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return [Row(**_typed(record)) for record in csv.DictReader(file)]


def _typed(record: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {name: record[name] for name in COLUMNS if name not in _LATER}
    values.update({name: record.get(name, default) for name, default in _LATER.items()})
    values.update({name: int(record[name]) for name in _INTEGERS})
    values.update({name: float(record[name]) if record[name] else None for name in _FLOATS})
    return values


def _read_parquet(path: Path) -> list[Row]:
    from pyarrow import parquet

    present = parquet.read_schema(path).names
    columns = [name for name in COLUMNS if name not in _LATER or name in present]
    return [Row(**record) for record in parquet.read_table(path, columns=columns).to_pylist()]


def read_table(folder: Path) -> list[Row]:
    """Read the results of a run: the Parquet file, else the CSV, else the cells' JSON lines.

    Args:
        folder: The output folder of an experiment.

    Returns:
        The rows; none where the run has not yet scored anything.

    Raises:
        DataError: A table is there but cannot be read.
    """
    readers: dict[str, Callable[[Path], list[Row]]]
    readers = {"results.parquet": _read_parquet, "results.csv": _read_csv}
    for name, read in readers.items():
        path = folder / name
        if not path.is_file():
            continue
        try:
            return read(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}: this is not a table of results ({error}); "
                "remove the file and resume the run, which writes it anew."
            ) from error
    return read_rows(sorted(folder.rglob(ROWS_FILE)))
