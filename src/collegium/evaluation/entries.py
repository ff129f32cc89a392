"""One entry for each distinct model of a table of comparisons, with all of its names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collegium.evaluation.comparisons import Comparison


def distinct(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """Return one comparison of each model at a site: of several names the chosen, or the first.

    Args:
        comparisons: Some comparisons.
    """
    found: dict[tuple[str, frozenset[str]], Comparison] = {}
    for each in comparisons:
        model = each.verdict.site, frozenset({each.verdict.method, *each.verdict.same_as})
        if each.chosen or model not in found:
            found[model] = each
    return [*found.values()]


def names_of(comparison: Comparison) -> str:
    """Return the names of a model, that of the comparison first.

    Args:
        comparison: The comparison.
    """
    verdict = comparison.verdict
    also = f" (also {', '.join(verdict.same_as)})" if verdict.same_as else ""
    return f"{verdict.method}{also}" + " (chosen)" * comparison.chosen
