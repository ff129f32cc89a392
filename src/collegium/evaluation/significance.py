"""Intervals, tests and verdicts: does a method help the patients of a site?

The unit is the patient: the cases of one patient, and the seeds that scored them, are not
independent and are averaged first. The bootstrap interval shows how much the mean depends on which
patients were tested; the signed-rank test looks for a shift of the ranks, and is corrected for how
many methods were compared with one reference at one site (`corrected`). Only if both agree is the
answer yes or no (`verdict`). Sites are not corrected for: each hospital asks for itself.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from collegium.heterogeneity.evidence import holm

Outcome = Literal["helps", "hurts", "cannot tell"]

MINIMUM_PATIENTS = 6
"""With fewer patients no verdict is given.

If a method changed nothing, all of n patients would still point the same way with probability
2 / 2^n; a bootstrap interval then never holds zero. Only from n = 6 on is that below 5 %.
"""

LEVEL = 0.05
"""Only a p-value below it is evidence."""

_LOWER_IS_BETTER = frozenset({"loss", "log_loss", "hd", "hd95", "hausdorff", "assd", "asd", "msd"})
_BLOCK = 200_000  # numbers resampled at once; bounds the memory, and fits the cache
_DECIMALS = 9  # differences that agree so far are ties; closer is the noise of floats
_EXACT = 200  # with more patients the signed-rank test uses the normal limit


@dataclass(frozen=True)
class Interval:
    """The mean paired difference over patients, with its 95 % bootstrap interval.

    Attributes:
        mean: Mean over patients, or over sites of these; None if no pair is defined.
        low: Lower end; None with fewer than two patients, or too few of a class, at any site.
        high: Upper end; None if ``low`` is.
        patients: Number of patients with at least one defined pair.
        undefined: Number of pairs left out because a score of theirs is undefined.
        rarest: Patients of a site's rarest class, at fewest; None if no score depends on it.
    """

    mean: float | None
    low: float | None
    high: float | None
    patients: int
    undefined: int
    rarest: int | None = None

    @property
    def few(self) -> bool:
        """Whether the rarest class has fewer than `MINIMUM_PATIENTS`."""
        return self.rarest is not None and self.rarest < MINIMUM_PATIENTS


@dataclass(frozen=True)
class RankTest:
    """The Wilcoxon signed-rank test of one method against a reference, by patient.

    Attributes:
        p: Two-sided p-value; None if it is undefined.
        direction: 1 if by their ranks the method's scores are larger, -1 smaller, 0 neither.
        p_holm: The p-value corrected for the family; None before, and if ``p`` is undefined.
        family: How many methods it is corrected for.
    """

    p: float | None
    direction: int
    p_holm: float | None = None
    family: int = 0


def interval_over_sites(
    sites: Sequence[Mapping[str, float]],
    *,
    undefined: int = 0,
    rarest: int | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Return the mean over sites of the mean over patients, with its 95 % bootstrap interval.

    Patients are resampled within their site, so the interval holds for these sites' patients and
    not for other sites.

    Args:
        sites: The mean difference of each patient, by name, of each site.
        undefined: Number of pairs that were left out.
        rarest: How many patients the rarest class has, if the scores depend on it.
        resamples: How often the patients are resampled.
        seed: Names the generator of the resamples.

    Returns:
        The interval; no mean if a site has no patient, no ends if one has a single patient or
        `Interval.few` of a class.

    Raises:
        ValueError: There is less than one resample.
    """
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, not {resamples}")
    values = [np.array([site[patient] for patient in sorted(site)]) for site in sites]
    patients = sum(site.size for site in values)
    if not values or not all(site.size for site in values):
        return Interval(None, None, None, patients, undefined, rarest)
    mean = fmean(float(site.mean()) for site in values)
    endless = Interval(mean, None, None, patients, undefined, rarest)
    if endless.few or any(site.size < 2 for site in values):
        return endless
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    drawn = np.mean([_bootstrap_means(site, resamples, rng) for site in values], axis=0)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Interval(mean, float(low), float(high), patients, undefined, rarest)


def _bootstrap_means(
    values: NDArray[np.float64], resamples: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    rows = max(1, _BLOCK // values.size)
    blocks = [
        values[rng.integers(values.size, size=(min(rows, resamples - start), values.size))].mean(1)
        for start in range(0, resamples, rows)
    ]
    return np.concatenate(blocks)


def signed_rank(differences: Iterable[float]) -> RankTest:
    """Test whether differences lie evenly about zero (Wilcoxon, 1945; zeros as Pratt, 1959).

    Equal magnitudes share the mean of their ranks. Zeros take part in the ranking, then their ranks
    are dropped: dropping the zeros first can make a difference more significant by adding patients
    for whom nothing changed. Given the ranks every pattern of signs is equally likely; the p-value
    counts the patterns, so it is exact with ties and zeros too. Beyond 200 patients the normal
    limit stands in, without a correction for continuity. Differences are rounded to 9 decimals
    first, or the noise of floats would decide which are tied.

    Args:
        differences: The mean difference of each patient.

    Returns:
        The test, with ``p`` None if there are fewer than `MINIMUM_PATIENTS` patients or all
        differences are zero.
    """
    values = np.round(np.fromiter(differences, dtype=np.float64), _DECIMALS)
    _, place, counts = np.unique(np.abs(values), return_inverse=True, return_counts=True)
    doubled = (2 * np.cumsum(counts) - counts + 1)[place]  # twice the mean rank, a whole number
    ranks, up = doubled[values != 0], int(doubled[values > 0].sum())
    total = int(ranks.sum())
    direction = (2 * up > total) - (2 * up < total)
    if values.size < MINIMUM_PATIENTS or not total:
        return RankTest(None, direction)
    tail = (_tail if values.size <= _EXACT else _normal_tail)(ranks, max(up, total - up))
    return RankTest(min(1.0, 2 * tail), direction)


def _tail(ranks: NDArray[np.int64], least: int) -> float:
    """Return the probability that the ranks with a random plus sign sum to ``least`` or more."""
    chance = np.zeros(int(ranks.sum()) + 1)
    chance[0] = 1.0
    for rank in ranks:
        half = chance / 2
        chance = half.copy()
        chance[rank:] += half[:-rank]
    return float(chance[least:].sum())


def _normal_tail(ranks: NDArray[np.int64], least: int) -> float:
    mean, sd = ranks.sum() / 2, math.sqrt(float((ranks.astype(np.float64) ** 2).sum())) / 2
    return math.erfc((least - mean) / sd / math.sqrt(2)) / 2


def corrected(tests: Sequence[RankTest]) -> list[RankTest]:
    """Return the tests of one family with p-values corrected for their number (Holm, 1979).

    The family is all methods that are compared with one reference at one site: the question is
    which of them to take, and the more are tried the more look good by chance. Tests without a
    p-value are not counted.

    Args:
        tests: The tests of the family.

    Returns:
        The same tests, in the same order.
    """
    defined = [test.p for test in tests if test.p is not None]
    adjusted = iter(holm(defined))
    return [
        replace(test, p_holm=None if test.p is None else next(adjusted), family=len(defined))
        for test in tests
    ]


def higher_is_better(metric: str, unit: str = "") -> bool:
    """Return False for distances and losses, by unit or name (``hd95``, ``hd95_vessel``).

    Args:
        metric: Name of the metric.
        unit: Its unit.
    """
    name = metric.lower().replace("/", "_")
    first = name.split("_")[0]
    return unit not in ("mm", "px") and not {name, first} & _LOWER_IS_BETTER


def verdict(
    interval: Interval, test: RankTest, *, higher_is_better: bool = True
) -> tuple[Outcome, str]:
    """Return whether a method helps, in one of three words and in plain sentences.

    "helps" and "hurts" need both: an interval that does not hold zero, and a signed-rank test that
    points the same way with a corrected p-value below `LEVEL`. With fewer than `MINIMUM_PATIENTS`,
    or if one of the two does not agree, it is "cannot tell".

    Args:
        interval: Method minus reference.
        test: The signed-rank test of the same differences, see `corrected`.
        higher_is_better: False for distances and losses.

    Returns:
        The word, and sentences that begin with it and name the reason. If only one of interval and
        test shows a difference, they name it.
    """
    if interval.mean is None:
        return _cannot_tell("no patient has a score with both.")
    if interval.few or interval.patients < MINIMUM_PATIENTS:
        count = interval.rarest if interval.few else interval.patients
        who = ("patient" if count == 1 else "patients") + " of the rarest class" * interval.few
        chance = f"fewer than {MINIMUM_PATIENTS} can all point the same way by chance"
        return _cannot_tell(f"{count} {who}, and {chance}.")
    if interval.low is None or interval.high is None:
        return _cannot_tell("a site with a single patient leaves no interval.")
    if interval.low <= 0 <= interval.high:
        text = f"over {interval.patients} patients the interval holds zero."
        return _cannot_tell(" ".join([text, *_beside_zero(test)]))
    better = (interval.low > 0) == higher_is_better
    seen = (
        f"{'better' if better else 'worse'} on average over {interval.patients} patients, and the "
        "interval does not hold zero"
    )
    if against := _disagreement(interval, test):
        return _cannot_tell(f"{seen}, but {against}.")
    confirmed = (
        "The signed-rank test confirms it"
        if test.family < 2
        else f"It survives the correction for {test.family} methods"
    )
    word: Outcome = "helps" if better else "hurts"
    return word, f"{word.capitalize()}: {seen}. {confirmed} ({_p_values(test)})."


def _cannot_tell(reason: str) -> tuple[Outcome, str]:
    return "cannot tell", f"Cannot tell: {reason}"


def _disagreement(interval: Interval, test: RankTest) -> str:
    """Return why the test contradicts an interval without zero; empty if it agrees."""
    if test.p is None or test.p_holm is None or interval.low is None:
        return "the differences are too small to be ranked"
    if test.p >= LEVEL:
        return f"the signed-rank test does not confirm it ({_p_values(test)})"
    if test.direction != (1 if interval.low > 0 else -1):
        return (
            f"the signed-rank test points the other way ({_p_values(test)}): a few patients make "
            "the mean"
        )
    if test.p_holm >= LEVEL:
        return (
            "the signed-rank test does not survive the correction for "
            f"{test.family} methods ({_p_values(test)})"
        )
    return ""


def _beside_zero(test: RankTest) -> list[str]:
    """Return what the test adds to an interval that holds zero."""
    if test.p is None or test.p_holm is None:
        return []
    if test.p_holm >= LEVEL:
        return [f"The signed-rank test sees no difference either ({_p_values(test)})."]
    return [f"By ranks there is a difference ({_p_values(test)}), but the mean does not show it."]


def _p_values(test: RankTest) -> str:
    """Return the p-value, and with it the corrected one if there are several methods."""
    known = [p for p in (test.p, test.p_holm) if p is not None]
    return ", corrected ".join(map(p_text, known if test.family > 1 else known[:1]))


def p_text(p: float) -> str:
    """Return e.g. "p = 0.012", or "p < 0.001"."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
