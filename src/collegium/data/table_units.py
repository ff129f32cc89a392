"""Numbers that look as if they were written in other units at another site, or at one site."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from collegium.data.decoded_image import listed
from collegium.data.tables import Table

Array = NDArray[np.float64]

LEAST_VALUES = 3
"""The fewest known values of a column from which a site's unit, or a group's, is judged."""

LEAST_FACTOR = 8.0
"""The least factor between medians that is told of in a column of an unknown quantity."""

TOLERANCE = 1.5
"""The greatest ratio of a median to the converted one, as patients of sites differ too."""

CLOSE_TOLERANCE = 1.25
"""The same for conversions by a factor below `LEAST_FACTOR`."""

LEAST_DISTANCE = 5.0
"""The least distance between two groups of one column, see `_two_groups`."""

OLDEST = 120
"""The greatest age in years that is taken as one."""


@dataclass(frozen=True)
class Conversion:
    """A quantity that laboratories and wards write in two units.

    Attributes:
        names: What the names of its columns look like, in lower case.
        units: The unit with the smaller numbers, and the other.
        factor: The other number is this many times the smaller one,
        offset: plus this.
    """

    names: str
    units: tuple[str, str]
    factor: float
    offset: float = 0.0

    def fits(self, low: float, high: float) -> bool:
        """Return whether a typical value is another one in the other unit, roughly.

        Args:
            low: A positive value in the first unit, as supposed.
            high: A greater value in the other.
        """
        ratio = high / (self.factor * low + self.offset)
        most = TOLERANCE if self.factor >= LEAST_FACTOR else CLOSE_TOLERANCE
        return 1 / most <= ratio <= most

    def __str__(self) -> str:
        plus = f" and {self.offset:g} more" if self.offset else ""
        return f"{self.units[0]} and {self.units[1]}, a factor of {self.factor:g}{plus}?"


def _word(*words: str) -> str:
    """Return the pattern of words that stand alone between digits and marks."""
    return rf"(?<![a-z])(?:{'|'.join(words)})(?![a-z])"


_UREA = f"urea|harnstoff|{_word('bun')}"
_HEIGHT = f"height|grösse|größe|groesse|{_word('ht', 'length')}"
_WEIGHT = f"weight|gewicht|{_word('wt')}"
_AGE = _word("age", "alter", "age.?at.*")

CONVERSIONS = (
    Conversion(f"crea|krea|{_word('scr')}", ("mg/dL", "umol/L"), 88.4),
    Conversion(f"gluc|gluk|{_word('glu', 'bz', 'fbg', 'fpg')}", ("mmol/L", "mg/dL"), 18.0),
    Conversion("chol|hdl|ldl", ("mmol/L", "mg/dL"), 38.67),
    Conversion(f"trigl|{_word('tg', 'trig')}", ("mmol/L", "mg/dL"), 88.57),
    Conversion("bili", ("mg/dL", "umol/L"), 17.1),
    Conversion(_UREA, ("BUN in mg/dL", "urea in mg/dL"), 2.14),
    Conversion(_UREA, ("urea in mmol/L", "BUN in mg/dL"), 2.8),
    Conversion(_UREA, ("urea in mmol/L", "urea in mg/dL"), 6.006),
    Conversion(f"h(a?e)moglob|{_word('hb', 'hgb')}", ("g/dL", "g/L"), 10.0),
    Conversion(f"h(a?e)moglob|{_word('hb', 'hgb')}", ("mmol/L", "g/dL"), 1.611),
    Conversion(f"h(a?e)moglob|{_word('hb', 'hgb')}", ("mmol/L", "g/L"), 16.11),
    Conversion("hba1c", ("%", "mmol/mol"), 10.93, -23.5),
    Conversion("album|protein", ("g/dL", "g/L"), 10.0),
    Conversion(_word("crp"), ("mg/dL", "mg/L"), 10.0),
    Conversion("calci|kalz", ("mmol/L", "mg/dL"), 4.008),
    Conversion("uric|harnsäure|urate", ("mg/dL", "umol/L"), 59.48),
    Conversion("lact|lakt", ("mmol/L", "mg/dL"), 9.009),
    Conversion(f"press|{_word('sbp', 'dbp', 'map', 'rr')}", ("kPa", "mmHg"), 7.501),
    Conversion(f"temp|{_word('t')}", ("degrees C", "degrees F"), 1.8, 32.0),
    Conversion(_HEIGHT, ("m", "cm"), 100.0),
    Conversion(_HEIGHT, ("inches", "cm"), 2.54),
    Conversion(_HEIGHT, ("m", "inches"), 39.37),
    Conversion(_WEIGHT, ("kg", "lb"), 2.2046),
    Conversion(_WEIGHT, ("kg", "g"), 1000.0),
    Conversion(_AGE, ("years", "months"), 12.0),
    Conversion(_AGE, ("years", "days"), 365.25),
    Conversion("fraction|percent|prozent|hct|hematocrit|haematocrit|ejection|spo2|sao2|fio2",
               ("a share of 1", "%"), 100.0),
)  # fmt: skip
"""Pairs of units that are common, by the names of columns."""


def unit_notes(tables: Mapping[str, Table], numeric: Sequence[str]) -> list[str]:
    """Return a sentence for each numeric column whose values look as if their units differed.

    Between sites: medians that are a conversion of the column's quantity apart, or, whatever it is,
    `LEAST_FACTOR` times, while the middle halves of the values do not overlap. At one site: two
    groups of values that are so far apart. Values that are not above 0 are not looked at. Patients
    may differ as well, so that this is a question.

    Args:
        tables: The rows of each site.
        numeric: The names of the numeric columns, in the order of `Table.numbers`.
    """
    notes = []
    for place, column in enumerate(numeric):
        found = {name: table.numbers[:, place] for name, table in sorted(tables.items())}
        values = {name: np.sort(numbers[numbers > 0]) for name, numbers in found.items()}
        values = {name: own for name, own in values.items() if len(own) >= LEAST_VALUES}
        mixed = {name: _two_groups(column, own) for name, own in values.items()}
        alone = {name: own for name, own in values.items() if mixed[name] is None}
        told = [_mixed_note(column, name, groups) for name, groups in mixed.items() if groups]
        notes += _differences(column, alone) + told
    return notes


def _differences(column: str, values: Mapping[str, Array]) -> list[str]:
    """Compare every site with the one whose median is the next lower."""
    medians = {name: float(np.median(own)) for name, own in values.items()}
    order = sorted(values, key=lambda name: medians[name])
    groups, reasons = [order[:1]], []
    for lower, name in pairwise(order):
        separate = np.quantile(values[lower], 0.75) < np.quantile(values[name], 0.25)
        reason = _reason(column, medians[lower], medians[name]) if separate else None
        if reason is None:
            groups[-1].append(name)
        else:
            groups.append([name])
            reasons.append(reason)
    middles = [float(np.median([medians[name] for name in group])) for group in groups if group]
    notes = [
        f"{column}: the median at {listed(sorted(groups[place]))} is "
        f"{_short(middles[place] / middles[place - 1])} times that at "
        f"{listed(sorted(groups[place - 1]))}, {_short(middles[place])} and "
        f"{_short(middles[place - 1])} ({reason}); if the units differ, convert the column at one "
        f"of them"
        for place, reason in enumerate(reasons, 1)
    ]
    return notes or _old(column, values)


def _old(column: str, values: Mapping[str, Array]) -> list[str]:
    """Return a note on the sites at which ages are greater than those of people."""
    if not re.search(_AGE, column.casefold()):
        return []
    shares = {name: float(np.mean(own > OLDEST)) for name, own in values.items()}
    old = [name for name, share in shares.items() if share >= 0.05]
    if not old or len(old) == len(values):
        return []
    return [
        f"{column}: more than {OLDEST} in {max(shares.values()):.0%} of the rows at {listed(old)} "
        f"(years and months, a factor of 12?); if the units differ, convert the column there"
    ]


def _reason(column: str, low: float, high: float) -> str | None:
    """Return which units two typical values are in, as far as known; None if in the same."""
    of_column = [known for known in CONVERSIONS if re.search(known.names, column.casefold())]
    fitting = [known for known in of_column if known.fits(low, high)]
    if fitting:
        return str(min(fitting, key=lambda known: abs(np.log(known.factor * low / high))))
    return "another unit?" if high / low >= LEAST_FACTOR else None


def _two_groups(column: str, values: Array) -> tuple[Array, Array, str] | None:
    """Return two groups of sorted positive values that are far apart, and which units they are in.

    The values are divided where the logarithms of both parts vary least (Otsu's threshold). The
    parts are groups if their means are `LEAST_DISTANCE` apart by Ashman's D, which is 2.7 for the
    halves of a normal and 3.5 for those of a uniform distribution. Where the quantity is not known,
    the gap between them must also be wider than either, since diseases make two groups too.
    """
    cut = _cut(np.log(values))
    low, high = values[:cut], values[cut:]
    if min(len(low), len(high)) < LEAST_VALUES:
        return None
    logs = np.log(low), np.log(high)
    deviation = np.sqrt(sum(float(part.var()) for part in logs))
    if np.sqrt(2) * (logs[1].mean() - logs[0].mean()) < LEAST_DISTANCE * deviation:
        return None
    reason = _reason(column, float(np.median(low)), float(np.median(high)))
    if reason is None or min(len(np.unique(part)) for part in logs) < LEAST_VALUES:
        return None
    wide = logs[1][0] - logs[0][-1] > max(np.ptp(part) for part in logs)
    return (low, high, reason) if wide or reason != "another unit?" else None


def _cut(values: Array) -> int:
    """Return at which index sorted values fall into two parts of the least sum of squares."""
    count = np.arange(1, len(values))
    sums = np.cumsum(values)
    left, right = sums[:-1] / count, (sums[-1] - sums[:-1]) / (len(values) - count)
    return int(np.argmax(count * (len(values) - count) * (right - left) ** 2)) + 1


def _mixed_note(column: str, site: str, groups: tuple[Array, Array, str]) -> str:
    low, high, reason = groups
    medians = float(np.median(low)), float(np.median(high))
    return (
        f"{column}: site {site} holds two groups of values {_short(medians[1] / medians[0])} "
        f"times apart, {len(low)} rows around {_short(medians[0])} and {len(high)} around "
        f"{_short(medians[1])} ({reason}); if the units differ, convert one of them"
    )


def _short(value: float) -> str:
    """Return a number with three significant digits, or without decimals."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
