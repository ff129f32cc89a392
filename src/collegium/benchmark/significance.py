"""Does a method help the patients of a site? Paired differences with bootstrap intervals.

The unit of resampling is the patient: the cases of one patient, and the seeds that scored them,
are not independent and are averaged first. The interval says how much the answer depends on which
patients were tested; it is not corrected for asking about several sites and methods at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Outcome = Literal["helps", "hurts", "cannot tell"]

MINIMUM_PATIENTS = 6
"""With fewer patients no verdict is given.

If a method changed nothing, all of n patients would still point the same way with probability
2 / 2^n; a bootstrap interval then never holds zero. Only from n = 6 on is that below 5 %.
"""

_LOWER_IS_BETTER = frozenset({"loss", "hd", "hd95", "hausdorff", "assd", "asd", "msd"})
_BLOCK = 1_000_000  # numbers resampled at once; bounds the memory


@dataclass(frozen=True)
class Interval:
    """The mean paired difference over patients, with its 95 % bootstrap interval.

    Attributes:
        mean: Mean over patients; None where no pair is defined.
        low: Lower end; None with fewer than two patients.
        high: Upper end; None with fewer than two patients.
        patients: Number of patients with at least one defined pair.
        undefined: Number of pairs left out because a score of theirs is undefined.
    """

    mean: float | None
    low: float | None
    high: float | None
    patients: int
    undefined: int


@dataclass(frozen=True)
class Disparity:
    """How unequal the sites are: largest minus smallest mean, and population sd of the means."""

    range: float
    sd: float


def paired_difference(
    a: Sequence[float | None] | NDArray[np.float64],
    b: Sequence[float | None] | NDArray[np.float64],
    patients: Sequence[str],
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Return the mean of a - b over patients, with its 95 % percentile bootstrap interval.

    Args:
        a: Scores of one method; position i is one (site, case, seed). None is undefined.
        b: Scores of the other method at the same positions.
        patients: The patient of each position. Patients of different sites need different names.
        resamples: How often the patients are drawn anew.
        seed: Names the generator of the draws.

    Returns:
        The interval.

    Raises:
        ValueError: The three sequences differ in length, or there is less than one resample.
    """
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, not {resamples}")
    differences: dict[str, list[float]] = {}
    undefined = 0
    for left, right, patient in zip(a, b, patients, strict=True):
        if left is None or right is None or not np.isfinite([left, right]).all():
            undefined += 1
        else:
            differences.setdefault(patient, []).append(left - right)
    means = np.array([np.mean(differences[patient]) for patient in sorted(differences)])
    if means.size == 0:
        return Interval(None, None, None, 0, undefined)
    if means.size == 1:
        return Interval(float(means[0]), None, None, 1, undefined)
    low, high = np.percentile(_bootstrap_means(means, resamples, seed), [2.5, 97.5])
    return Interval(float(means.mean()), float(low), float(high), means.size, undefined)


def _bootstrap_means(values: NDArray[np.float64], resamples: int, seed: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    rows = max(1, _BLOCK // values.size)
    blocks = [
        values[rng.integers(values.size, size=(min(rows, resamples - start), values.size))].mean(1)
        for start in range(0, resamples, rows)
    ]
    return np.concatenate(blocks)


def higher_is_better(metric: str, unit: str = "") -> bool:
    """Return False for distances and losses, by unit or name (``hd95``, ``hd95_vessel``)."""
    first = metric.lower().replace("/", "_").split("_")[0]
    return unit not in ("mm", "px") and first not in _LOWER_IS_BETTER


def outcome(interval: Interval, *, higher_is_better: bool = True) -> Outcome:
    """Return what the interval says of the method, in one of three words.

    Args:
        interval: Method minus reference.
        higher_is_better: False for distances and losses.

    Returns:
        "cannot tell" where the interval holds zero or fewer than `MINIMUM_PATIENTS` were scored.
    """
    if interval.low is None or interval.high is None or interval.patients < MINIMUM_PATIENTS:
        return "cannot tell"
    if interval.low <= 0 <= interval.high:
        return "cannot tell"
    return "helps" if (interval.low > 0) == higher_is_better else "hurts"


def verdict(interval: Interval, *, higher_is_better: bool = True) -> str:
    """Return a plain sentence: does it help?

    Args:
        interval: Method minus reference.
        higher_is_better: False for distances and losses.

    Returns:
        A sentence that begins with "Helps", "Hurts" or "Cannot tell".
    """
    if interval.mean is None:
        return "Cannot tell: no patient has a score with both."
    if interval.patients < MINIMUM_PATIENTS:
        plural = "patient" if interval.patients == 1 else "patients"
        return (
            f"Cannot tell: {interval.patients} {plural}, and fewer than {MINIMUM_PATIENTS} can all "
            "point the same way by chance."
        )
    answer = outcome(interval, higher_is_better=higher_is_better)
    if answer == "cannot tell":
        return f"Cannot tell: over {interval.patients} patients the interval holds zero."
    side = "better" if answer == "helps" else "worse"
    return (
        f"{answer.capitalize()}: {side} on average over {interval.patients} patients, "
        "and the interval does not hold zero."
    )


def worst_site(
    means: Mapping[str, float | None], *, higher_is_better: bool = True
) -> tuple[str, float] | None:
    """Return the site with the worst mean and that mean; of equals the first by name.

    Args:
        means: Mean score of each site; None is undefined and left out.
        higher_is_better: False for distances and losses.

    Returns:
        The site and its mean, or None where no site has one.
    """
    defined = {site: mean for site, mean in sorted(means.items()) if mean is not None}
    if not defined:
        return None
    choose = min if higher_is_better else max
    site = choose(defined, key=lambda name: defined[name])
    return site, defined[site]


def disparity(means: Mapping[str, float | None]) -> Disparity | None:
    """Return how far the sites lie apart, or None with fewer than two defined means.

    Args:
        means: Mean score of each site; None is undefined and left out.

    Returns:
        Range and population standard deviation of the means.
    """
    defined = np.array([mean for mean in means.values() if mean is not None])
    if defined.size < 2:
        return None
    return Disparity(float(np.ptp(defined)), float(defined.std()))
