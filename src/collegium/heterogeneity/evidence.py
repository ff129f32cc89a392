"""Tests of whether sites differ by more than chance, by permuted and by resampled cases."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from collegium.core.randomness import seed_of
from collegium.errors import ConfigError, DataError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Evidence:
    """The result of a permutation test of a difference between sites.

    Attributes:
        p: how often cases that are assigned to the sites at random differ as much, from
            1 / (permutations + 1) to 1.
        effect: the share of the spread of all cases that lies between the sites, less what chance
            alone puts there: about 0 if sites are alike, 1 if all cases of a site are equal.
        smallest_p: the least ``p`` that so few cases can give.
        cases: number of cases compared.
    """

    p: float
    effect: float
    smallest_p: float
    cases: int


def energy_test(
    samples: Mapping[str, ArrayLike], *, permutations: int = 999, limit: int = 600, seed: int = 0
) -> Evidence:
    """Test whether all sites' cases come from one distribution (Rizzo and Szekely, 2010, DISCO).

    The statistic is the between-sample energy: by how much cases of different sites are farther
    apart than cases of one site. It detects differences of any kind, not of means alone. Cases are
    assumed to be independent, which several cases of one patient are not.

    Args:
        samples: by site (n,) values or (n, D) embeddings, a row per case.
        permutations: how often the cases are assigned to the sites at random.
        limit: with more cases in all, each site takes part with a random share of its cases.
        seed: names the generators.

    Raises:
        ConfigError: fewer than two sites.
        DataError: a site has no cases, or NaN or infinite values.
    """
    from scipy.spatial.distance import cdist

    rng = np.random.default_rng(seed_of(seed, "permutations"))
    rows, sites = _pooled_cases(samples, limit, rng)
    apart = cdist(rows, rows)
    total = apart.sum() / (2 * len(apart))
    least = smallest_p(np.bincount(sites).tolist(), permutations)
    if total <= 0:
        return Evidence(1.0, 0.0, least, len(rows))
    within = _within(apart, sites)
    by_chance = np.array([_within(apart, rng.permutation(sites)) for _ in range(permutations)])
    as_far = (by_chance <= within + 1e-12 * total).sum()
    expected = total - by_chance.mean()
    effect = (total - within - expected) / (total - expected)
    p = (1 + as_far) / (1 + permutations)
    return Evidence(float(p), float(effect), least, len(rows))


def smallest_p(sizes: Sequence[int], permutations: int) -> float:
    """Return the least p-value that `energy_test` can give.

    There are n! / (n_1! ... n_k!) ways to assign the cases, of which those that only swap sites of
    equal size give the same statistic.

    Args:
        sizes: n_i, the number of cases of each site.
        permutations: how often the cases are assigned to the sites at random.
    """
    ways = math.lgamma(sum(sizes) + 1) - sum(math.lgamma(size + 1) for size in sizes)
    same = sum(math.lgamma(count + 1) for count in Counter(sizes).values())
    return max(math.exp(same - ways), 1 / (permutations + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for how many there are (Holm, 1979), in the order given."""
    adjusted = [0.0] * len(p_values)
    worst = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = worst
    return adjusted


def stability(
    cases: Mapping[str, int],
    choose: Callable[[Mapping[str, NDArray[np.int64]]], str],
    *,
    draws: int = 200,
    seed: int = 0,
) -> dict[str, float]:
    """Return how often each site is chosen if every site's cases are resampled (bootstrap).

    Args:
        cases: by site the number of its cases.
        choose: returns the chosen site for the rows drawn at each site.
        draws: how often.
        seed: names the generator.
    """
    rng = np.random.default_rng(seed_of(seed, "resampled"))
    counts: Counter[str] = Counter()
    for _ in range(draws):
        rows = {site: rng.integers(0, count, count) for site, count in sorted(cases.items())}
        counts[choose(rows)] += 1
    return {site: counts[site] / draws for site in sorted(cases)}


def _pooled_cases(
    samples: Mapping[str, ArrayLike], limit: int, rng: np.random.Generator
) -> tuple[Array, NDArray[np.int64]]:
    """Return all cases in rows, and the index of the site that each belongs to."""
    if len(samples) < 2:
        raise ConfigError("a difference takes two sites, and there are fewer to compare; add sites")
    tables = {}
    for site, values in sorted(samples.items()):
        table = np.asarray(values, np.float64)
        table = table[:, None] if table.ndim == 1 else table
        if table.ndim != 2 or not len(table) or not np.isfinite(table).all():
            raise DataError(
                f"site {site!r} has no cases to compare, or NaN or infinite values; leave it out"
            )
        tables[site] = table
    total = sum(map(len, tables.values()))
    if total > limit:
        tables = {
            site: table[rng.permutation(len(table))[: max(2, len(table) * limit // total)]]
            for site, table in tables.items()
        }
    sites = np.repeat(np.arange(len(tables)), [len(table) for table in tables.values()])
    return np.concatenate(list(tables.values())), sites


def _within(apart: Array, sites: NDArray[np.int64]) -> float:
    """Return the energy within sites: the sum over sites of half their size times the mean pair."""
    members = np.eye(sites.max() + 1)[sites]
    sums = (members * (apart @ members)).sum(0)
    return float((sums / (2 * members.sum(0))).sum())
