"""Comparisons with a reference of one's choice, and "does adapting help this hospital?"."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

from collegium.evaluation.paired import (
    Comparing,
    Comparison,
    ComparisonTable,
    compare,
    group_scores,
)
from collegium.evaluation.results import Row
from collegium.evaluation.scores import (
    NO_ADAPTER,
    MethodKey,
    Where,
    position,
    rarest_class,
    unit_of,
)
from collegium.evaluation.significance import higher_is_better
from collegium.evaluation.tables import final_scores, method_name, scored_name


def comparison_table(
    rows: Iterable[Row],
    metric: str,
    reference: MethodKey,
    order: Sequence[str] = (),
    *,
    where: Where = "inside",
    variation: str = "",
    resamples: int = 2000,
    seed: int = 0,
) -> ComparisonTable:
    """Compare every other method with one reference, at every site and over all sites.

    The scores are paired by case, seed and fold, and averaged by patient. All methods compared at
    a site are one family of the correction, see `corrected`; so are those compared over all sites.

    Args:
        rows: Rows of results.
        metric: Which metric.
        reference: Label of the algorithm, and which of its models; outside, which adapter.
        order: Labels of the algorithms in the order wanted; the others follow by name.
        where: Scores of the sites inside, or of those outside.
        variation: The setting of a sweep.
        resamples: Resamples of the bootstrap.
        seed: Names the generator of the bootstrap.

    Returns:
        The comparisons by site, then method; none, with the reason, where the reference has no
        scores.
    """
    rows = list(rows)
    scores = final_scores(rows, metric, where=where, variation=variation)
    unit, groups = unit_of(scores), group_scores(scores)
    higher = higher_is_better(metric, unit)
    rarest = rarest_class(rows, metric, where, variation)
    how = Comparing(higher, partial(scored_name, where=where), resamples, seed, rarest)
    name = scored_name(*reference, where)
    question = f"Is it better than {name}?"
    if reference not in groups:
        missing = f"This run holds no scores of {name}, so nothing can be compared with it."
        return ComparisonTable(
            metric, unit, higher, (), missing, question=question, variation=variation
        )
    others = {key: group for key, group in groups.items() if key != reference}
    comparisons, pooled = compare(others, groups[reference], order, how)
    return ComparisonTable(
        metric,
        unit,
        higher,
        tuple(comparisons),
        pooled=tuple(pooled),
        question=question,
        variation=variation,
    )


def adapting_table(
    rows: Iterable[Row],
    metric: str,
    order: Sequence[str] = (),
    *,
    variation: str = "",
    resamples: int = 2000,
    seed: int = 0,
) -> ComparisonTable:
    """Compare every adapter with the same algorithm's unadapted model, at every site outside.

    The adapters of one algorithm at one site are one family of the correction.

    Args:
        rows: Rows of results. The scores of sites inside tell which algorithms have a global model,
            the one that is scored unadapted.
        metric: Which metric.
        order: Labels of the algorithms in the order wanted; the others follow by name.
        variation: The setting of a sweep.
        resamples: Resamples of the bootstrap.
        seed: Names the generator of the bootstrap.

    Returns:
        The comparisons by site, algorithm and adapter. `missing` names the algorithms whose models
        were adapted but never scored without an adapter, and says which of them never can be.
    """
    rows = list(rows)
    scores = final_scores(rows, metric, where="outside", variation=variation)
    unit, groups = unit_of(scores), group_scores(scores)
    higher = higher_is_better(metric, unit)
    rarest = rarest_class(rows, metric, "outside", variation)
    how = Comparing(higher, partial(scored_name, where="outside"), resamples, seed, rarest)
    comparisons: list[Comparison] = []
    pooled: list[Comparison] = []
    lacking: dict[str, None] = {}
    for algorithm, adapter in sorted(groups, key=lambda key: position(key, order)):
        if adapter == NO_ADAPTER:
            adapted = {
                key: group
                for key, group in groups.items()
                if key[0] == algorithm and key[1] != NO_ADAPTER
            }
            found, overall = compare(adapted, groups[algorithm, adapter], order, how)
            comparisons += found
            pooled += overall
        elif (algorithm, NO_ADAPTER) not in groups:
            lacking[algorithm] = None
    return ComparisonTable(
        metric,
        unit,
        higher,
        tuple(sorted(comparisons, key=lambda comparison: comparison.site)),
        _missing(lacking, final_scores(rows, metric, variation=variation), any_scores=bool(scores)),
        tuple(pooled),
        "Does adapting help this hospital?",
        ("unadapted", "adapted"),
        variation,
    )


def _missing(lacking: Iterable[str], inside: Iterable[Row], *, any_scores: bool) -> str:
    """Return notes on algorithms without an unadapted model, by whether there could be one."""
    if not any_scores:
        return "This run holds no scores of a site outside, so whether adapting helps is not known."
    models: dict[str, set[str]] = defaultdict(set)
    for row in inside:
        models[row.algorithm].add(row.model)
    names: dict[bool, list[str]] = {True: [], False: []}
    for algorithm in lacking:
        could = not models[algorithm] or "global" in models[algorithm]
        names[could].append(method_name(algorithm, ""))
    sentences = []
    if names[True]:
        sentences.append(
            f"There are no scores without an adapter of {', '.join(names[True])}, so whether "
            f"adapting helps cannot be said there. Add the adapter {NO_ADAPTER!r}."
        )
    if names[False]:
        sentences.append(
            f"No global model comes from {', '.join(names[False])}, so there is nothing unadapted "
            "to compare with."
        )
    return " ".join(sentences)
