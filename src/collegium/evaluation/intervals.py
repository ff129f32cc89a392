"""Intervals of two error bars, the patients' and the trainings', added as sides of a right angle.

With at least `TRAININGS` trainings of both arms an interval is about a training like these on a
patient like these; with fewer it is about these models, and their trainings have no bar. The
patients' bar needs no correction where the method was chosen on validation, for the choice saw no
test case. The trainings' bar does: a training that was lucky at the site is lucky on validation
and on test. See docs/statistics.md for the reasons and the simulations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import fsum, hypot, sqrt

from scipy.special import stdtrit

from collegium.evaluation.estimates import Arm, Estimate, satterthwaite

LEVEL = 0.05
"""How often an interval may leave out the truth."""

TRAININGS = 3
"""With fewer trainings of an arm nothing is said about other trainings."""

PATIENTS = 6
"""With fewer patients, or patients of a class that counts, there is no interval."""

ALONE_TAIL = 0.015
"""The tail of the trainings' bar of a method that was not chosen among several."""

MOST_PATIENTS, MOST_TRAININGS = 1000, 50
"""More than these are not planned for."""


@dataclass(frozen=True)
class Bars:
    """The two error bars of a difference.

    Attributes:
        patients: How many patients were tested (n).
        variance_patients: The patients' variance (V_P).
        df_patients: Its degrees of freedom.
        trainings: How many trainings each arm has; if they differ, the harmonic mean.
        variance_trainings: The trainings' variance, net of what the patients' holds (T).
        df_trainings: Its degrees of freedom (nu); None if there are too few trainings for a bar.
        arms: How many arms were trained independently: one if each training gave both models.
        tail: The tail of Student's distribution that the trainings' bar leaves out, on each side.
    """

    patients: int
    variance_patients: float
    df_patients: float
    trainings: float = 1.0
    variance_trainings: float = 0.0
    df_trainings: float | None = None
    arms: int = 2
    tail: float = ALONE_TAIL

    @property
    def half_width(self) -> float:
        """Half the 95 % interval (H)."""
        return self._half_width(LEVEL)

    @property
    def smallest_detectable(self) -> float:
        """The smallest difference that would be found about 8 times in 10."""
        return self.half_width + self._both(0.1, 0.1)

    def _half_width(self, level: float) -> float:
        return self._both(level / 2, self.tail * level / LEVEL)

    def _both(self, tail_patients: float, tail_trainings: float) -> float:
        """Return both bars together, at a tail each."""
        return hypot(
            _bar(self.variance_patients, self.df_patients, tail_patients),
            _bar(self.variance_trainings, self.df_trainings or 1.0, tail_trainings),
        )

    def p_value(self, difference: float) -> float:
        """Return the level at which the interval around a difference would just reach zero."""
        low, high = 0.0, 1.0
        if self._half_width(high) >= abs(difference):
            return high
        while low < (middle := (low + high) / 2) < high:
            if self._half_width(middle) > abs(difference):
                low = middle
            else:
                high = middle
        return high

    def with_patients(self, count: int) -> Bars:
        """Return the bars that as many patients like these would have."""
        return replace(
            self,
            patients=count,
            variance_patients=self.variance_patients * self.patients / count,
            df_patients=self.df_patients * (count - 1) / (self.patients - 1),
        )

    def with_trainings(self, count: int) -> Bars:
        """Return the bars that as many trainings like these, of each arm, would have."""
        if self.df_trainings is None:
            return self
        return replace(
            self,
            trainings=count,
            variance_trainings=self.variance_trainings * self.trainings / count,
            df_trainings=self.df_trainings * (count - 1) / (self.trainings - 1),
        )

    def patients_needed(self, difference: float) -> int | None:
        """Return how many patients would find a difference; None if no number does."""
        return _first(self.with_patients, range(PATIENTS, MOST_PATIENTS + 1), abs(difference))

    def trainings_needed(self, difference: float) -> int | None:
        """Return how many trainings of each arm would find a difference; None if no number does."""
        return _first(self.with_trainings, range(TRAININGS, MOST_TRAININGS + 1), abs(difference))

    def tipping_sd(self, difference: float) -> float:
        """Return the sd between trainings at which a difference of two models could be their luck.

        It is u*: were the scores of two trainings of one method to differ by a larger sd here, an
        interval that held both models' trainings too would hold zero.
        """
        bar = difference / student(LEVEL / 2, self.df_patients)
        return sqrt(max(0.0, bar**2 - self.variance_patients) / self.arms)


def _first(bars: Callable[[int], Bars], counts: range, difference: float) -> int | None:
    """Return the first count whose bars find a difference; the more, the smaller they are."""
    place = bisect_left(
        counts, True, key=lambda count: difference >= bars(count).smallest_detectable
    )
    return counts[place] if place < len(counts) else None


def _bar(variance: float, df: float, tail: float) -> float:
    return student(tail, df) * sqrt(variance) if variance > 0 else 0.0


def student(tail: float, df: float) -> float:
    """Return the quantile of Student's distribution that leaves ``tail`` above it.

    Args:
        tail: The probability above, at most one half.
        df: Degrees of freedom.
    """
    return -float(stdtrit(df, tail))


def error_bars(estimate: Estimate, others: Sequence[Arm] = ()) -> Bars:
    """Return the error bars of a difference.

    Args:
        estimate: The difference of the method that was chosen.
        others: At the same site, the arms of the other distinct methods that it was chosen among;
            none if it is the only one, or if it was not chosen. With them the trainings' bar is
            that of all methods if it is larger, at a level by their number.

    Raises:
        ValueError: There are too few patients for a variance.
    """
    if estimate.variance is None or estimate.df is None:
        raise ValueError(f"{estimate.fewest} patients have no variance: give at least two")
    bars = Bars(estimate.patients, estimate.variance, estimate.df, arms=len(estimate.arms))
    if min(estimate.trainings) < TRAININGS:
        return bars
    arms, count = estimate.arms, 1 + len(others)
    weight = fsum(1 / arm.trainings for arm in arms)
    net = fsum((arm.variance - arm.residual) / arm.trainings for arm in arms)
    own = replace(
        bars,
        trainings=len(arms) / weight,
        variance_trainings=max(0.0, net),
        df_trainings=_welch(arms, [1 / arm.trainings for arm in arms]),
    )
    if count == 1:
        return own
    repeated = [arm for arm in (*arms, *others) if arm.trainings > 1]
    spare = fsum(arm.variance - arm.residual for arm in repeated) / len(repeated)
    every = replace(
        own,
        variance_trainings=max(0.0, spare) * weight,
        df_trainings=_welch(repeated, [1.0] * len(repeated)),
        tail=LEVEL / count,
    )
    own = replace(own, tail=LEVEL / 2)
    return max(own, every, key=lambda bars: bars.half_width)


def _welch(arms: Sequence[Arm], weights: Sequence[float]) -> float:
    """Return the degrees of freedom of the weighted sum of the arms' variances (Welch, 1947)."""
    variances = [w * arm.variance for w, arm in zip(weights, arms, strict=True)]
    return satterthwaite(variances, [arm.trainings - 1 for arm in arms])
