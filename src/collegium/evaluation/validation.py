"""Validation scores of the tested models, and the settings that are chosen by them alone.

A test score that has chosen something is no test score any more: the best of several is better than
it will be on other patients. So what a sweep varies is chosen by validation cases, and the test
score of the chosen setting is read once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isnan
from typing import TYPE_CHECKING

from collegium.core.payloads import GLOBAL, PERSONAL
from collegium.evaluation.scores import (
    METHOD,
    MethodKey,
    Where,
    final_scores,
    group_means,
    headline_metric,
    higher_is_better,
    method_name,
    position,
    rows_of,
    unit_of,
    variations,
)
from collegium.evaluation.selection import selected_scores, used_models
from collegium.evaluation.tables import (
    UNDEFINED,
    MethodTable,
    make_cells,
    method_table,
    side_by_side,
    table_of_means,
)
from collegium.evaluation.wording import number

if TYPE_CHECKING:
    import pandas as pd

VALIDATION, TEST = "validation", "test"
"""The columns of the table of chosen settings."""

CASES = "validation cases"
"""The words for what the scores of these tables are of."""


def validation_tables(
    results: pd.DataFrame, order: Sequence[str] = (), settings: Sequence[str] = ()
) -> list[MethodTable]:
    """Return the tables of validation scores: of each setting and, of a sweep, of all settings.

    Args:
        results: The table of results.
        order: Labels of the algorithms in the order wanted; the others follow by name.
        settings: The settings in the order of the columns; by default by name.
    """
    names = variations(final_scores(results))
    tables = [validation_table(results, order, variation=name) for name in names]
    if any(names):
        tables.append(validation_sweep_table(results, order, settings))
    return [table for table in tables if table.methods]


def selected_tables(
    results: pd.DataFrame, order: Sequence[str] = (), apart: Collection[str] = ()
) -> list[MethodTable]:
    """Return the tables of what validation cases choose, of sites inside and outside.

    Args:
        results: The table of results.
        order: See `selected_table`.
        apart: See `selected_table`.
    """
    places: list[Where] = ["inside", "outside"] if any(variations(results)) else ["inside"]
    tables = [selected_table(results, order, where=where, apart=apart) for where in places]
    return [table for table in tables if table.methods]


def validation_table(
    results: pd.DataFrame, order: Sequence[str] = (), *, variation: str = ""
) -> MethodTable:
    """Build the table of the validation scores of the tested models, each in its selected round.

    A cell is mean and sample sd over seeds of the site's mean over validation cases; of several
    folds the means are averaged. A round that was selected as the best of many has a validation
    score that is too good; the same holds for all methods and settings.

    Args:
        results: The table of results.
        order: Labels of the algorithms in the order wanted; the others follow by name.
        variation: The setting of a sweep.

    Returns:
        The table of the metric that selects models, without rows if there are no such scores.
    """
    metric = headline_metric(results)
    scores = selected_scores(results[results["variation"] == variation])
    means = group_means(scores, [*METHOD, "seed", "site"])
    table = table_of_means(means, metric, unit_of(scores), order)
    return replace(table, variation=variation, cases=CASES)


def validation_sweep_table(
    results: pd.DataFrame, order: Sequence[str] = (), settings: Sequence[str] = ()
) -> MethodTable:
    """Build the table of a sweep's validation scores: methods by settings, average over sites.

    Args:
        results: The table of results.
        order: Labels of the algorithms in the order wanted; the others follow by name.
        settings: The settings in the order wanted; by default all named ones.
    """
    names = settings or [name for name in variations(results) if name]
    tables = [validation_table(results, order, variation=name) for name in names]
    return replace(side_by_side(tables, headline_metric(results), order), cases=CASES)


def selected_table(
    results: pd.DataFrame,
    order: Sequence[str] = (),
    *,
    where: Where = "inside",
    apart: Collection[str] = (),
) -> MethodTable:
    """Build the table of the settings that validation cases choose, with their test scores.

    Of each method it is the setting with the best mean validation score over sites and seeds, the
    first of equals. Settings whose sites or seeds differ from those of most are left out, as the
    scores would be of other patients. Nothing else than validation scores takes part. At sites
    outside, which have no validation cases, an algorithm has the setting that those inside choose
    for its global model or, without one, for its personal models.

    Args:
        results: The table of results.
        order: Labels of the algorithms in the order wanted; the others follow by name.
        where: Test scores of the sites inside, or of those outside.
        apart: Labels of the algorithms that nobody can join, such as one on pooled data.

    Returns:
        The table: rows methods; columns validation and test. The chosen setting is the note of the
        cell of validation.
    """
    metric, used = headline_metric(results), used_models(results)
    tables = {name: validation_table(used, order, variation=name) for name in variations(used)}
    compared, others = _comparable(used, tables)
    scores = {name: tables[name].averages for name in compared}
    tests = {
        name: method_table(used, metric, order, where=where, variation=name).averages
        for name in compared
    }
    unit = unit_of(final_scores(used, metric, where=where))
    higher = higher_is_better(metric, unit)
    cells: list[tuple[object, ...]] = []
    alike: list[str] = []
    methods = {key for found in tests.values() for key in found}
    for key in sorted(methods, key=lambda key: position(key, order)):
        chooser = _chooser(key, scores, where)
        own = {name: found[chooser].mean for name, found in scores.items() if chooser in found}
        own = {name: score for name, score in own.items() if not isnan(score)}
        if not own:
            continue
        best = (max if higher else min)(own.values())
        setting, *equal = (name for name, score in own.items() if score == best)
        if equal:
            alike.append(method_name(*key, where))
        chosen, test = scores[setting][chooser], tests[setting].get(key)
        score = (UNDEFINED, UNDEFINED) if test is None else (test.mean, test.sd)
        cells.append((*key, VALIDATION, chosen.mean, chosen.sd, setting))
        cells.append((*key, TEST, *score, ""))
    frame = make_cells(cells, unit, where, higher=higher)
    table = MethodTable(metric, unit, higher, (), (VALIDATION, TEST), frame, where)
    return replace(table, notes=tuple(_notes(table, compared, others, alike, apart)))


def _chooser(
    key: MethodKey, scores: Mapping[str, Mapping[MethodKey, object]], where: Where
) -> MethodKey:
    """Return the method inside whose validation scores choose the setting of a method."""
    if where == "inside":
        return key
    known = any((key[0], GLOBAL) in found for found in scores.values())
    return key[0], GLOBAL if known else PERSONAL


def _scored(table: MethodTable) -> tuple[str, ...]:
    """Return the sites at which a method has a defined score."""
    known = set(table.cells[table.cells["mean"].notna()]["column"])
    return tuple(site for site in table.sites if site in known)


def _comparable(
    results: pd.DataFrame, tables: Mapping[str, MethodTable]
) -> tuple[list[str], list[str]]:
    """Return the settings with scores at the sites and of the seeds of most, and the others."""
    seeds = {name: set(results[results["variation"] == name]["seed"]) for name in tables}
    about = {name: (_scored(table), tuple(sorted(seeds[name]))) for name, table in tables.items()}
    most, _ = Counter(about.values()).most_common(1)[0] if about else (None, 0)
    compared = [name for name, found in about.items() if found == most]
    return compared, [name for name in about if name not in compared]


def _notes(
    table: MethodTable,
    compared: Sequence[str],
    others: Sequence[str],
    alike: Sequence[str],
    apart: Collection[str],
) -> Iterator[str]:
    """Yield in sentences how the settings were chosen, and what could not be compared."""
    names = [name for name in compared if name]
    if len(names) > 1:
        yield (
            f"Each method has the setting, of {', '.join(names)}, with the best mean validation "
            f"score over sites and seeds. Its test score has chosen nothing."
        )
    if alike and len(names) > 1:
        yield (
            f"Settings with equal validation scores, of which the first stands here: "
            f"{', '.join(alike)}."
        )
    if others:
        yield (
            f"Not compared, since their sites or seeds are others: {', '.join(map(str, others))}."
        )
    scored = table.cells[table.cells["column"] == VALIDATION]
    scored = scored[~scored["algorithm"].isin([*apart])]
    best = scored.sort_values("mean", ascending=not table.higher_is_better, kind="stable")
    for first in rows_of(best.head(1)):
        setting = f" with {first.note}" if first.note else ""
        (test,) = table.cells[
            (table.cells["method"] == first.method) & (table.cells["column"] == TEST)
        ]["mean"]
        yield (
            f"Over all methods, validation cases choose {first.method}{setting}: "
            f"{number(first.mean, table.unit)} on validation and {number(test, table.unit)} on "
            f"test cases."
        )
