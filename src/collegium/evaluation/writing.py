"""Write the tables of a run into files, for papers, for other programs and for the hospitals."""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from collegium.core.files import write_atomically
from collegium.errors import DataError
from collegium.evaluation.answers import answer_lines
from collegium.evaluation.comparisons import ComparisonTable, RunComparisons
from collegium.evaluation.cross_site import cross_site_tables, read_cross_site
from collegium.evaluation.formats import to_csv, to_json, to_latex, to_markdown, to_text
from collegium.evaluation.reliability import reliability_table
from collegium.evaluation.results import frame_to_csv
from collegium.evaluation.scores import (
    SPLITS,
    Where,
    final_scores,
    headline_metric,
    is_compared,
    variations,
)
from collegium.evaluation.selection import selection_notes
from collegium.evaluation.sent_estimates import list_estimates
from collegium.evaluation.tables import MethodTable, method_table, sweep_table, undefined_notes
from collegium.evaluation.timing import read_accounts, time_against_quality, time_table
from collegium.evaluation.validation import selected_tables, validation_tables

logger = logging.getLogger(__name__)

FOLDER = "tables"
"""The folder of the tables in the output folder of a run."""

VERDICTS = "verdicts.json"
"""The file of all verdicts in that folder."""

RELIABILITY = "reliability.csv"
"""The file of reliability diagrams in that folder."""

NamedTable = tuple[str, MethodTable | ComparisonTable]
"""The name of a file without its extension, and what it holds."""

CROSS_SITE = "-cross-site"
"""The end of the name of a table of personal models at every site, before the setting."""

SELECTED = "-selected"
"""The end of the name of a table of what validation cases choose."""

_WRITERS = {"txt": to_text, "md": to_markdown, "tex": to_latex, "csv": to_csv}
_UNSAFE = re.compile(r"[^\w.=+-]+")


def write_tables(output: Path) -> tuple[Path, ...]:
    """Write every table and comparison of a run into the folder ``tables`` of its output.

    ``<metric>[-outside][-<setting>]``, of a sweep also ``<metric>[-outside]-sweep``, and the
    comparisons ``<metric>[-<setting>]-joining`` and ``-adapting``, see `is_compared`. Of the metric
    that selects models ``-validation[-<setting>]`` and ``-validation-sweep`` hold the validation
    scores, and ``[-outside]-selected`` what they choose, with its test score. If sites are outside,
    ``time[-<setting>]`` holds time against quality. ``<metric>-cross-site[-<setting>]`` is there
    after `collegium cross-site`. Each is there as ``.txt``, ``.md``, ``.tex`` and ``.csv``.
    ``verdicts.json`` holds every verdict. ``reliability.csv`` holds the bins of reliability
    diagrams, see `reliability_table`, if the expected calibration error was scored. Files of an
    earlier call are replaced.

    Args:
        output: The output folder of an experiment, finished or not.

    Returns:
        The paths, in the order written, ``verdicts.json`` last.

    Raises:
        DataError: There are no scores of test cases yet, or a file cannot be read.
        StorageError: A file cannot be written.
    """
    run = RunComparisons.read(output)
    tables: dict[str, MethodTable | ComparisonTable] = {}
    named = _score_tables(output, run), _time_tables(output, run), _cross_site_tables(output, run)
    for stem, table in chain(*named):
        tables[_free(_UNSAFE.sub("_", stem), tables)] = table
    texts = {
        output / FOLDER / f"{stem}.{extension}": write(table)
        for stem, table in tables.items()
        for extension, write in _WRITERS.items()
    }
    compared = [table for table in tables.values() if isinstance(table, ComparisonTable)]
    if "ece" in set(run.results["metric"]):
        bins = reliability_table(
            run.results, bins=run.settings.calibration_bins, classes=run.settings.classes
        )
        texts[output / FOLDER / RELIABILITY] = frame_to_csv(bins)
    texts[output / FOLDER / VERDICTS] = to_json(compared)
    for path, text in texts.items():
        write_atomically(path, text.encode())
    return tuple(texts)


def selected_texts(files: Iterable[Path]) -> list[str]:
    """Return the tables of what validation cases choose, as text.

    Args:
        files: What `write_tables` returned.

    Raises:
        DataError: There are no validation scores to choose by.
    """
    texts = [f.read_text(encoding="utf-8") for f in files if f.name.endswith(f"{SELECTED}.txt")]
    if not texts:
        raise DataError(
            "this run has no validation scores, so that nothing can be chosen without test cases; "
            "give federation.splits.validation a share and train in a new output folder"
        )
    return texts


def cross_site_texts(output: Path, files: Iterable[Path]) -> list[str]:
    """Return the tables of personal models at every site as text, of the headline metric.

    Args:
        output: The output folder of a run.
        files: What `write_tables` returned.
    """
    stem = f"{headline_metric(RunComparisons.read(output).results)}{CROSS_SITE}"
    names = [f for f in files if f.suffix == ".txt" and f.name.startswith(stem)]
    return [file.read_text(encoding="utf-8") for file in names]


def run_estimates(output: Path) -> list[dict[str, Any]]:
    """Return the estimates of a site's own run as it sends them, see `list_estimates`.

    Args:
        output: The output folder of the site's own run.

    Raises:
        DataError: A file cannot be read.
    """
    tables = (table for _, table in _score_tables(output, RunComparisons.read(output)))
    return list_estimates(table for table in tables if isinstance(table, ComparisonTable))


def run_answers(output: Path) -> list[str]:
    """Return the answers of a run to single sites as lines, by the headline metric.

    Of a sweep they are about every setting, which stands before its answers.

    Args:
        output: The output folder of an experiment, finished or not.

    Raises:
        DataError: A file cannot be read.
    """
    run = RunComparisons.read(output)
    metric, lines = headline_metric(run.results), []
    for name in variations(run.results):
        tables = run.joining(metric, name), run.adapting(metric, name)
        found = [line for table in tables for line in answer_lines(table)]
        lines += [f"{name}:", *found] if name and found else found
    return lines


def _score_tables(output: Path, run: RunComparisons) -> Iterator[NamedTable]:
    """Yield the tables of all metrics."""
    metrics: list[tuple[str, Where]] = sorted(
        (str(metric), where)
        for where in SPLITS
        for metric in final_scores(run.results, where=where)["metric"].unique()
    )
    if not metrics:
        raise DataError(
            f"{output}: there are no scores of test cases to make tables of; "
            "run the experiment until a job is finished."
        )
    for metric, where in metrics:
        yield from _tables_of(run, metric, where)
    results, labels = run.results, run.labels
    metric = headline_metric(results)
    for table in validation_tables(results, labels.order):
        stem = f"-{table.variation}" if table.variation else "-sweep" if table.over_sites else ""
        yield f"{metric}-validation{stem}", table
    for table in selected_tables(results, labels.order, labels.pooled):
        yield f"{metric}{'-outside' if table.where == 'outside' else ''}{SELECTED}", table


def _tables_of(run: RunComparisons, metric: str, where: Where) -> Iterator[NamedTable]:
    """Yield the tables of one metric."""
    results, order = run.results, run.labels.order
    place = "-outside" if where == "outside" else ""
    names = variations(final_scores(results, metric, where=where))
    for name in names:
        setting = f"-{name}" if name else ""
        table = method_table(results, metric, order, where=where, variation=name)
        inside = results[results["variation"] == name] if where == "inside" else results.iloc[:0]
        notes = selection_notes(inside, run.settings.selection)
        undefined = undefined_notes(results, metric, where=where, variation=name)
        yield f"{metric}{place}{setting}", replace(table, notes=(*undefined, *notes))
        if not is_compared(metric):
            continue
        if where == "inside":
            yield f"{metric}{setting}-joining", run.joining(metric, name)
        else:
            yield f"{metric}{setting}-adapting", run.adapting(metric, name)
    named = [name for name in names if name]
    if named:
        swept = sweep_table(results, metric, order, where=where, settings=named)
        yield f"{metric}{place}-sweep", swept


def _time_tables(output: Path, run: RunComparisons) -> Iterator[NamedTable]:
    """Yield the tables of time against quality."""
    results, order = run.results, run.labels.order
    metric = headline_metric(results)
    for name in variations(final_scores(results, where="outside")):
        accounts = read_accounts(output, name)
        table = time_table(results, accounts, metric, order, variation=name)
        if table.missing:
            logger.warning("%s: %s", output / name, table.missing)
        if not table.methods.empty:
            yield f"time-{name}" if name else "time", time_against_quality(table)


def _cross_site_tables(output: Path, run: RunComparisons) -> Iterator[NamedTable]:
    """Yield the tables of personal models at other sites, if they were scored there."""
    for table in cross_site_tables(read_cross_site(output), run.labels.order):
        yield f"{table.metric}{CROSS_SITE}" + f"-{table.variation}" * bool(table.variation), table


def _free(stem: str, taken: Container[str]) -> str:
    """Return the stem, with a number if it is taken."""
    names = chain([stem], (f"{stem}_{number}" for number in count(2)))
    return next(name for name in names if name not in taken)
