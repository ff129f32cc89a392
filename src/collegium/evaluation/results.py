"""The table of results: a pandas frame with one row per score, or per loss of a round.

A job stores its rows as JSON lines (`write_rows`), and a run ends with one table for everybody
(`write_results`): ``results.csv`` and ``results.parquet``. Tables, statistics and the report take
slices of this frame. What a run was made with (``run.json``) is read here too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from collegium.core.files import write_atomically
from collegium.core.seals import digest_of, open_lines, read_json, seal_lines
from collegium.core.text import with_formula, without_formula
from collegium.errors import DataError, StorageError
from collegium.evaluation.scores import RELEVANT, UNUSABLE, variations
from collegium.tasks.metrics.calibration import BINS

if TYPE_CHECKING:
    import pandas as pd

ROWS_FILE = "rows.jsonl"
"""The name of the file of rows in the folder of an (algorithm, seed) job."""

COLUMNS = {
    "experiment": "str", "algorithm": "str", "seed": "int64", "fold": "int64", "part": "int64",
    "variation": "str", "round": "int64", "site": "str", "case": "str", "patient": "str",
    "split": "str", "model": "str", "metric": "str", "value": "float64", "unit": "str",
    "bytes_up": "int64", "bytes_down": "int64", "seconds": "float64",
}  # fmt: skip
"""The columns of the table, in order, with their pandas types.

experiment: name of the experiment.
algorithm: label of the algorithm.
seed: seed of the run.
fold: number of the site that is left out, 0 without leaving sites out.
part: the fold of the patients that is the test, from 1; 0 without cross-validation.
variation: name of the setting in a sweep; empty outside a sweep.
round: round of the row; of a test score the one that was selected for the model.
site: name of the site; empty for what the server recorded in a round.
case: pseudonym of the case, under cross-validation with its fold; empty for rows of a round.
patient: pseudonym of the patient; empty for rows of a round.
split: "train", "val" or "test"; "outside" for a site that took no part; "selection" for the number
    of patients on which the choice of the round depends and, with early stopping, for the number of
    rounds that were trained.
model: "global", "personal", or the global model of the round that was selected otherwise, see
    `collegium.core.payloads.OTHER_GLOBAL`; outside, the label of the adapter; empty if no model
    was scored.
metric: what was measured.
value: the number, NaN if it is undefined or infinite.
unit: unit of the value, empty for a pure number.
bytes_up: bytes that left the site, in the round or (case rows) in the run.
bytes_down: bytes that came to the site.
seconds: seconds that the site worked.
"""

SELECTION = "selection"
"""The split of the rows that count events, see `collegium.tasks.count_events`, and `ROUNDS`."""

ROUNDS = "rounds"
"""The metric of the rows that say after how many rounds a training ended, by early stopping."""

DEFAULTS: dict[str, Any] = {
    "fold": 0, "part": 0, "variation": "", "case": "", "patient": "", "model": "", "unit": "",
    "bytes_up": 0, "bytes_down": 0, "seconds": 0.0,
}  # fmt: skip
"""The columns that a row may leave out, and their values."""

KEY = (
    "experiment", "algorithm", "seed", "fold", "part", "variation", "round", "site", "case",
    "split", "model", "metric",
)  # fmt: skip
"""The columns that identify a measurement: two rows that agree in them are the same one."""

ResultRow = dict[str, Any]
"""A row before it is in the table: column -> value."""

_CSV, _PARQUET, _DIGESTS = "results.csv", "results.parquet", "results.sha256"


def results_frame(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows as a table of results.

    Args:
        rows: A mapping for each row; columns with `DEFAULTS` may be absent.

    Returns:
        The table, with the columns and types of `COLUMNS`.

    Raises:
        ValueError: A row has other columns, or a value of another kind.
    """
    import pandas as pd

    return _typed(pd.DataFrame([_whole(row) for row in rows], columns=list(COLUMNS)))


def _whole(row: Mapping[str, Any]) -> ResultRow:
    whole = {**DEFAULTS, **row}
    if wrong := whole.keys() ^ COLUMNS.keys():
        raise ValueError(f"unknown or missing columns: {', '.join(sorted(wrong))}")
    return whole


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of the table; one of an earlier version may lack some."""
    lacking = {name: DEFAULTS[name] for name in ("part", "variation") if name not in frame}
    whole = frame.assign(**lacking)
    typed = whole[list(COLUMNS)].astype(COLUMNS)
    return typed.assign(value=typed["value"].where(np.isfinite(typed["value"])))


def write_rows(path: Path, results: pd.DataFrame) -> None:
    """Write a table as JSON lines, replaced as a whole; an undefined value is null.

    Every number keeps all its digits, which pandas' own JSON lines do not.

    Args:
        path: The file.
        results: The table.

    Raises:
        StorageError: The file cannot be written.
    """
    records = results.to_dict("records")
    for record in records:
        record["value"] = None if np.isnan(record["value"]) else record["value"]
    lines = [json.dumps(record, allow_nan=False) + "\n" for record in records]
    write_atomically(path, seal_lines("".join(lines)))


def read_rows(paths: Iterable[Path]) -> pd.DataFrame:
    """Read files of JSON lines; a measurement that was made twice counts once, the later one.

    Args:
        paths: The files, in the order wanted.

    Returns:
        The table.

    Raises:
        StorageError: A file cannot be read, or a line is not a row.
    """
    rows: dict[tuple[Any, ...], ResultRow] = {}
    for path in paths:
        try:
            lines = open_lines(path.read_bytes())
        except OSError as error:
            raise StorageError(
                f"{path}: the rows could not be read ({error.strerror}); check the folder."
            ) from error
        except ValueError as error:
            raise StorageError(
                f"{path} is damaged (a part of it has changed); remove the file and resume the run."
            ) from error
        for number, line in enumerate(lines, start=1):
            try:
                row = _whole(json.loads(line))
            except (ValueError, TypeError) as error:
                raise StorageError(
                    f"{path}, line {number}: this is not a row of results; "
                    "remove the file and resume the run."
                ) from error
            rows[tuple(row[name] for name in KEY)] = row
    return results_frame(rows.values())


def write_results(results: pd.DataFrame, folder: Path) -> tuple[Path, Path]:
    """Write ``results.csv`` and ``results.parquet``, each replaced as a whole.

    Their digests go into ``results.sha256``, as ``sha256sum`` writes and checks them.

    Args:
        results: The table; an undefined value is an empty cell or null.
        folder: Where to write; created if absent.

    Returns:
        The paths of the CSV and of the Parquet file.

    Raises:
        StorageError: A file cannot be written.
    """
    paths = folder / _CSV, folder / _PARQUET
    contents = (
        frame_to_csv(results).encode(),
        results.to_parquet(index=False),
    )
    if (folder / _DIGESTS).exists():  # of other tables, should this be interrupted
        (folder / _DIGESTS).unlink()
    for path, content in zip(paths, contents, strict=True):
        write_atomically(path, content)
    lines = [f"{digest_of(c)}  {path.name}\n" for path, c in zip(paths, contents, strict=True)]
    write_atomically(folder / _DIGESTS, "".join(lines).encode())
    return paths


def frame_to_csv(frame: pd.DataFrame) -> str:
    """Return a table as CSV, with every digit; no text in it is a formula to a spreadsheet.

    Args:
        frame: The table; its index is left out.
    """
    from pandas.api.types import is_numeric_dtype

    safe = frame.rename(columns=_safe)
    for name in [name for name in safe if not is_numeric_dtype(safe[name])]:
        safe[name] = safe[name].map(_safe)
    return safe.to_csv(index=False, lineterminator="\n")


def _safe(cell: Any) -> Any:
    return without_formula(cell) if isinstance(cell, str) else cell


def read_results(output: Path) -> pd.DataFrame:
    """Read the results of a run: the Parquet file, or the CSV, or the jobs' JSON lines.

    Args:
        output: The output folder of an experiment.

    Returns:
        The table; without rows if the run has not yet scored anything.

    Raises:
        DataError: A table is there but cannot be read.
        StorageError: Rows of a job are there but cannot be read.
    """
    import pandas as pd

    for path in (output / _PARQUET, output / _CSV):
        if not path.is_file():
            continue
        try:
            _check_digest(path)
            if path.name == _PARQUET:
                return _typed(pd.read_parquet(path))
            text = pd.read_csv(path, dtype="str", keep_default_na=False)  # numbers are exact so
            text = text.map(with_formula)
            return _typed(text.assign(value=text["value"].replace("", "nan")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}: this is not a table of results ({error}); "
                "remove the file and resume the run, which writes it again."
            ) from error
    return read_rows(sorted(output.rglob(ROWS_FILE)))


def _check_digest(path: Path) -> None:
    """Check a table against the digests beside it, where there are any."""
    digests = path.parent / _DIGESTS
    if not digests.exists():
        return
    line = f"{digest_of(path.read_bytes())}  {path.name}".encode()
    if line not in digests.read_bytes().splitlines():
        raise ValueError(f"its SHA-256 is not the one in {_DIGESTS}")


_FOLD = re.compile(r"without-|fold-[0-9]+$")


def job_folders(output: Path, setting: str = "") -> list[Path]:
    """Return the folders of jobs, sorted.

    They are ``[<setting>/][fold-<number>/][without-<site>/]<label>/seed-<s>``.

    Args:
        output: The output folder of an experiment.
        setting: The variation that is wanted; empty outside a sweep.
    """
    base = output / setting
    return [
        job
        for job in sorted(base.rglob("seed-*/"))
        if all(_FOLD.match(part) for part in job.relative_to(base).parts[:-2])
    ]


@dataclass(frozen=True)
class AlgorithmLabels:
    """The labels of the algorithms of a run.

    Attributes:
        configured: As configured; empty if the run left no description.
        order: Those with results: the one that trains each site alone, then as configured, then
            the others by name.
        local: The one that trains each site alone.
        pooled: Those that put all data in one place, a bound that nobody can join.
    """

    configured: tuple[str, ...]
    order: tuple[str, ...]
    local: str
    pooled: frozenset[str]


def read_description(output: Path) -> dict[str, Any]:
    """Read ``run.json``, the description of what a run was made with.

    Args:
        output: The output folder of an experiment.

    Returns:
        The content, with a mapping as ``config``; empty without the file.

    Raises:
        DataError: It cannot be read.
    """
    path = output / "run.json"
    if not path.is_file():
        return {}
    try:
        info = read_json(path)
        info["config"] = {**info.get("config", {})}
        _named_algorithms(info)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: the description of the run cannot be read ({error}); "
            "restore the file, or remove it to continue without it."
        ) from error
    return info


def _named_algorithms(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return label and name of every algorithm as configured."""
    entries = info.get("config", {}).get("algorithms", ())
    return [(str(e.get("label") or e["name"]), e["name"]) for e in entries if isinstance(e, dict)]


def labels_of(info: Mapping[str, Any], results: pd.DataFrame) -> AlgorithmLabels:
    """Return the labels of the algorithms of a run.

    Args:
        info: The description of the run, see `read_description`.
        results: Its table of results.
    """
    named = _named_algorithms(info)
    local = next((label for label, name in named if name == "local"), "local")
    configured = tuple(label for label, _ in named)
    present = set(results["algorithm"])
    known = [label for label in dict.fromkeys([local, *configured]) if label in present]
    return AlgorithmLabels(
        configured,
        (*known, *sorted(present.difference(known))),
        local,
        frozenset(label for label, name in named if name == "pooled"),
    )


def list_settings(info: Mapping[str, Any], results: pd.DataFrame) -> tuple[str, ...]:
    """Return the settings of a sweep with results: as configured, then the others by name.

    Args:
        info: The description of the run, see `read_description`.
        results: Its table of results.

    Returns:
        The names; none outside a sweep.
    """
    present = [name for name in variations(results) if name]
    wanted = [name for name in info.get("config", {}).get("variations") or () if name in present]
    return tuple(dict.fromkeys([*wanted, *present]))


@dataclass(frozen=True)
class VerdictSettings:
    """The settings of verdicts.

    Attributes:
        relevant: The smallest relevant differences, by metric.
        unusable: The mean below which a model is of no use, by metric.
        selection: The rule that selected rounds, as configured; empty if unknown.
        classes: The names of the classes of a classification; empty if unknown.
        calibration_bins: How many bins a reliability diagram has.
    """

    relevant: Mapping[str, float] = field(default_factory=lambda: RELEVANT)
    unusable: Mapping[str, float] = field(default_factory=lambda: UNUSABLE)
    selection: Mapping[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    calibration_bins: int = BINS


DEFAULT_SETTINGS = VerdictSettings()
"""The settings of a run that left no description."""


def verdict_settings(info: Mapping[str, Any]) -> VerdictSettings:
    """Return what the verdicts of a run are made with.

    Args:
        info: The description of the run, see `read_description`; without settings the defaults.
    """
    config = info.get("config", {})
    report, federation = config.get("report", {}), config.get("federation", {})
    task = federation.get("task", {}) if isinstance(federation, dict) else {}
    named = task.get("classes", ()) if task.get("name") == "classification" else ()
    return VerdictSettings(
        report.get("relevant", RELEVANT),
        report.get("unusable", UNUSABLE),
        config.get("selection", {}),
        tuple(map(str, named)),
        task.get("calibration_bins", BINS),
    )
