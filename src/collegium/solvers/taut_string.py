"""The exact minimiser behind communication-efficient regularisation (CER) of pFedNet, Eq. 4.

For an update g of d numbers the problem is, in the paper's notation after y = y_t - eta * v,

    minimise over v    1/2 ||v - g||^2 + gamma * (sum over i < d of |v_i - v_{i+1}| + |v_d|)

which is total-variation denoising of a signal that a zero follows. With S the partial sums of g,
the partial sums of the solution are the shortest string through the tube of half-width gamma around
S that starts at 0 and whose end is free: it leaves the tube horizontally, or as nearly so as the
tube allows. The solution is the slope of that string. This replaces the paper's ADMM, which stops
early, and its eigenvectors of Lambda^T Lambda, which need d^2 memory.

Two ways of pulling the string share the work:

- a walk after Condat, "A direct algorithm for 1-D total variation denoising", IEEE Signal
  Processing Letters 20, 2013, with a rule for the free end, and bounds on the slope from partial
  sums instead of his recurrence, whose steps wait for each other. It starts again behind every
  stretch that it settles: in updates of real networks it looks at each number once or twice, but
  on a ramp nearly as often as the ramp is long;
- two convex hulls after Davies and Kovac, "Local extremes, runs, strings and multiresolution",
  Annals of Statistics 29, 2001, in linear time always. They go on from where the walk has used up
  its steps.

The loops are compiled and do not hold the interpreter's lock: clients solve in parallel.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collegium.core.kernels import compiled
from collegium.errors import ConfigError, ProtocolError

Floats = NDArray[np.floating[Any]]
Indices = NDArray[np.signedinteger[Any]]
Stretch = tuple[float, int, int, int]
"""The slope; one past the last number; whether it ends on the tube's lower edge (-1) or the upper
one (1), or is level to the end (0); how many numbers were looked at."""

STEPS = 8
"""How often the walk may look at each number, on average, before the hulls take over."""

SHORT = 512
"""Below which length a stretch counts as short."""

RECIPROCALS = 1 / np.maximum(np.arange(SHORT), 1.0)
"""1 / length, since dividing would take as long as the rest of a step."""


def solve(values: Floats, gamma: float, out: Floats | None = None) -> Floats:
    """Return the exact minimiser of pFedNet's Eq. 4.

    Takes O(d) time for every input and computes in float64 whatever the type of ``values``. Beside
    input and output it needs no memory or, where the hulls take over, three float64 vectors at
    most while it runs. The same values give the same bits on every call.

    Deviations: the paper and its code stop an ADMM after 20 to 200 iterations, far from the
    minimum; the code also cuts the vector into chunks, and a zero follows each of them.

    Args:
        values: (d,), float32 or float64, the update; d may be 0.
        gamma: in the unit of the values' partial sums. 0 returns the values; from the largest
            absolute partial sum on, the result is exactly zero.
        out: (d,), float32 or float64, contiguous: where the result goes. It may be ``values``
            itself, but not overlap it otherwise. By default a new vector of the values' type.

    Raises:
        ConfigError: gamma is negative or NaN.
        ProtocolError: the values hold NaN or infinite numbers, or some so large that sums overflow.
        ValueError: the arrays are not as described.
    """
    if not gamma >= 0:
        raise ConfigError(f"gamma is {gamma}; give zero or a positive number")
    if out is None:
        out = np.empty(values.shape, values.dtype)
    _check_arrays(values, out)
    if not _summable(values, np.finfo(np.float64).max / 8 / max(1, len(values))):
        raise ProtocolError(
            "the update to be regularised holds NaN, infinite or enormous numbers; lower the "
            "learning rate or look at the training data"
        )
    _run(np.ascontiguousarray(values), float(gamma), out, STEPS)
    return out


def objective(values: Floats, solution: Floats, gamma: float) -> float:
    """Return what `solve` minimises, of any vector.

    Args:
        values: (d,), the update g.
        solution: (d,), any v.
        gamma: as for `solve`.
    """
    _, _, misfit, variation = _measure(values, solution, float(gamma))
    return 0.5 * misfit + gamma * variation


def certificate(values: Floats, solution: Floats, gamma: float) -> float:
    """Return by how much a vector violates the conditions of the minimum; 0 proves it exact.

    With s the partial sums of g - v, the dual variable that belongs to v, the conditions (Karush,
    Kuhn and Tucker) are |s_i| <= gamma and s_i (v_i - v_{i+1}) = gamma |v_i - v_{i+1}| for all i,
    where v_{d+1} = 0. The result is the larger of

    - what max |s_i| exceeds gamma by, relative to gamma (to max |g| where gamma is 0);
    - the duality gap, the sum of gamma |v_i - v_{i+1}| - s_i (v_i - v_{i+1}), relative to the
      objective.

    Takes O(d) time, in float64. Rounding v alone costs up to d * max |v| / gamma times the
    precision of its type, so give `solve` a float64 ``out`` where the solver is to be certified.

    Args:
        values: (d,), the update g.
        solution: (d,), the vector v to be judged.
        gamma: as for `solve`.
    """
    largest, gap, misfit, variation = _measure(values, solution, float(gamma))
    unit = gamma or float(np.abs(values).max(initial=0)) or 1.0
    cost = 0.5 * misfit + gamma * variation
    return max(0.0, (largest - gamma) / unit, gap / cost if cost > 0 else gap)


def _check_arrays(values: Floats, out: Floats) -> None:
    """Refuse what the loops cannot read or write."""
    if values.ndim != 1 or out.shape != values.shape:
        raise ValueError(f"expected two vectors of one length, got {values.shape} and {out.shape}")
    if not {values.dtype, out.dtype} <= {np.dtype(np.float32), np.dtype(np.float64)}:
        raise ValueError(f"expected float32 or float64, got {values.dtype} and {out.dtype}")
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueError("the result needs a contiguous vector that can be written to")
    same = out.ctypes.data == values.ctypes.data and out.strides == values.strides
    if not same and np.may_share_memory(values, out):
        raise ValueError("the result may replace the values, but not overlap them otherwise")


def _run(values: Floats, gamma: float, out: Floats, allowed: int) -> int:
    """Solve, by walking for ``allowed`` steps a number at most; return all steps, of both ways."""
    size = len(values)
    if gamma == 0 or _vanishes(values, gamma):
        out[:] = values if gamma == 0 else 0
        return size
    start, low, steps = _walk(values, gamma, out, allowed * size)
    if start < size:
        index: type[np.signedinteger[Any]] = np.int32 if size < 2**31 else np.int64
        floor_from, roof_from = np.empty(size - start, index), np.empty(size - start, index)
        floor, roof = np.empty(size - start), np.empty(size - start)
        steps += _bend(values, gamma, out, start, low, floor_from, floor, roof_from, roof)
    return int(steps)


@compiled
def _summable(values: Floats, limit: float) -> bool:
    """Whether every value is a number of no more than some magnitude."""
    wrong = 0
    for i in range(len(values)):
        wrong += not (abs(values[i]) <= limit)
    return wrong == 0


@compiled
def _vanishes(values: Floats, gamma: float) -> bool:
    """Whether the solution is zero, since no partial sum exceeds gamma."""
    total = 0.0
    for i in range(len(values)):
        total += values[i]
        if abs(total) > gamma:
            return False
    return True


@compiled
def _walk(values: Floats, gamma: float, out: Floats, budget: int) -> tuple[int, float, int]:
    """Settle stretches from the left until all is done, or more steps than the budget are taken.

    Returns:
        The first number that is not settled; where the tube's lower edge is as seen from the
        string's last knot, 0 (the knot is on it), -gamma (the knot is the string's start) or
        -2 gamma (the knot is on the upper edge); the steps taken.
    """
    start, low, steps = 0, -gamma, 0
    while start < len(values) and steps <= budget:
        high = low + 2 * gamma
        slope, end, side, seen = _near_stretch(values, start, low, high)
        steps += seen
        if end == start:
            slope, end, side, seen = _far_stretch(values, start, low, high)
            steps += seen
        if side != 0:
            slope = _correct(values, start, end, slope, low if side < 0 else high)
        _write(out, start, end, slope)
        start, low = end, 0.0 if side < 0 else -2 * gamma
    return start, low, steps


@compiled
def _near_stretch(values: Floats, start: int, low: float, high: float) -> Stretch:
    """Find the string's first straight stretch from a knot on, if few numbers tell.

    ``low`` and ``high`` are the tube's edges at the knot, as seen from it. The lines from there to
    the edges behind each number bound the slope from below and above. Once a number's line crosses
    the other bound, the string bends at the number that gave this bound. Slopes are kept less the
    first number, which saves digits where all have much in common.

    The stretch ends where it starts if more numbers are needed.
    """
    origin, total = np.float64(values[start]), 0.0
    least, most = low, high
    low_end = high_end = start + 1
    last = min(len(values), start + SHORT - 1)
    for at in range(start + 1, last):
        total += values[np.uintp(at)] - origin  # unsigned: spares the check for a negative index
        share = RECIPROCALS[np.uintp(at - start + 1)]
        down, up = (total + low) * share, (total + high) * share
        if up < least:
            return origin + least, low_end, -1, at - start + 1
        if down > most:
            return origin + most, high_end, 1, at - start + 1
        low_end = at + 1 if down >= least else low_end
        high_end = at + 1 if up <= most else high_end
        least, most = max(least, down), min(most, up)
    if last < len(values):
        return 0.0, start, 0, last - start
    slope, end, side = _free_end(origin + least, origin + most, low_end, high_end, last)
    return slope, end, side, last - start


@compiled
def _far_stretch(values: Floats, start: int, low: float, high: float) -> Stretch:
    """Find the string's first straight stretch, however long; else like `_near_stretch`.

    The sum is kept in two parts, so that its error does not grow with the length.
    """
    origin, before = np.float64(values[start]), 0.0
    least, most = low, high
    low_end = high_end = start + 1
    for first in range(start, len(values), SHORT):
        total = 0.0
        for at in range(first, min(first + SHORT, len(values))):
            total += values[np.uintp(at)] - origin
            share = 1.0 / (at - start + 1)
            down, up = (before + total + low) * share, (before + total + high) * share
            if up < least:
                return origin + least, low_end, -1, at - start + 1
            if down > most:
                return origin + most, high_end, 1, at - start + 1
            low_end = at + 1 if down >= least else low_end
            high_end = at + 1 if up <= most else high_end
            least, most = max(least, down), min(most, up)
        before += total
    last = len(values)
    slope, end, side = _free_end(origin + least, origin + most, low_end, high_end, last)
    return slope, end, side, last - start


@compiled
def _free_end(
    least: float, most: float, low_end: int, high_end: int, size: int
) -> tuple[float, int, int]:
    """Decide a stretch that nothing bends: level to the end, unless its bounds forbid it."""
    if least > 0.0:
        return least, low_end, -1
    if most < 0.0:
        return most, high_end, 1
    return 0.0, size, 0


@compiled
def _correct(values: Floats, start: int, end: int, slope: float, shift: float) -> float:
    """Return a stretch's slope, (the sum of its values + shift) / length, to the last digits.

    It came about in as many roundings as the stretch is long; in a long one, what it leaves of the
    sum tells how far off it is.
    """
    if end - start < SHORT:
        return slope
    rest = shift
    for i in range(start, end):
        rest += values[i] - slope
    return slope + rest / (end - start)


@compiled
def _write(out: Floats, start: int, end: int, slope: float) -> None:
    """Write a settled stretch; most are so short that their two ends are all."""
    out[np.uintp(start)] = slope
    out[np.uintp(end - 1)] = slope
    for i in range(start + 1, end - 1):
        out[np.uintp(i)] = slope


@compiled
def _bend(
    values: Floats, gamma: float, out: Floats, start: int, low: float,
    floor_from: Indices, floor: Floats, roof_from: Indices, roof: Floats,
) -> int:  # fmt: skip
    """Settle all from a place that `_walk` reached, by the hulls of the tube's edges.

    The floor is the lowest concave line from the knot that keeps above the lower edge, the roof the
    highest convex one below the upper edge; the arrays hold where each piece starts and its slope.
    Where the floor's first slope exceeds the roof's, the string bends at the end of the shorter of
    the two pieces, and the other hull, now of one piece, starts there anew.

    Returns:
        The steps: pieces added to the hulls or taken from them, at most four a number.
    """
    begin, size, width = start, len(values), 2 * gamma
    ff = rf = 0  # the first pieces of floor and roof
    fl = rl = -1  # and the last
    for i in range(begin, size):
        shift = low if i == begin else 0.0
        fl = _append(floor_from, floor, ff, fl, i, values[i] + shift, 1)
        shift = low + width if i == begin else 0.0
        rl = _append(roof_from, roof, rf, rl, i, values[i] + shift, -1)
        while floor[ff] > roof[rf]:
            floor_end = floor_from[ff + 1] if ff < fl else i + 1
            roof_end = roof_from[rf + 1] if rf < rl else i + 1
            if floor_end < roof_end:
                _anchor(roof_from, roof, rf, roof_end, floor_end, floor[ff])
                _settle(values, out, start, floor_end, floor[ff], low)
                start, low, ff = floor_end, 0.0, ff + 1
            elif roof_end < floor_end:
                _anchor(floor_from, floor, ff, floor_end, roof_end, roof[rf])
                _settle(values, out, start, roof_end, roof[rf], low + width)
                start, low, rf = roof_end, -width, rf + 1
            else:  # both end at the number in hand: rounding alone tells their slopes apart
                break
    steps = 4 * (size - begin) - (fl + 1 - ff) - (rl + 1 - rf)
    if floor[ff] > 0:
        start = _release(values, out, start, low, floor_from, floor, ff, fl, 1)
    elif roof[rf] < 0:
        start = _release(values, out, start, low + width, roof_from, roof, rf, rl, -1)
    out[start:] = 0
    return steps


@compiled
def _settle(values: Floats, out: Floats, start: int, end: int, slope: float, shift: float) -> None:
    """Correct the slope of a stretch and write it."""
    _write(out, start, end, _correct(values, start, end, slope, shift))


@compiled
def _release(
    values: Floats, out: Floats, start: int, shift: float,
    origins: Indices, slopes: Floats, first: int, last: int, sign: int,
) -> int:  # fmt: skip
    """Settle a hull's pieces that rise (sign 1) or fall (-1); return where the level end starts."""
    while first <= last and sign * slopes[first] > 0:
        end = origins[first + 1] if first < last else len(values)
        _settle(values, out, start, end, slopes[first], shift)
        start, shift, first = end, 0.0, first + 1
    return start


@compiled
def _append(
    origins: Indices, slopes: Floats, first: int, last: int, at: int, slope: float, sign: int
) -> int:
    """Add a number, merge until slopes fall (sign 1) or rise (-1); return the hull's last piece."""
    end = at + 1
    while last >= first and sign * (slope - slopes[last]) >= 0:
        slope += (slopes[last] - slope) * ((at - origins[last]) / (end - origins[last]))
        at = origins[last]
        last -= 1
    last += 1
    origins[last], slopes[last] = at, slope
    return last


@compiled
def _anchor(
    origins: Indices, slopes: Floats, first: int, end: int, knot: int, slope: float
) -> None:
    """Start a hull's first piece at a new knot, on a line of some slope from the old one."""
    slopes[first] += (slopes[first] - slope) * ((knot - origins[first]) / (end - knot))
    origins[first] = knot


@compiled
def _measure(values: Floats, solution: Floats, gamma: float) -> tuple[float, float, float, float]:
    """Return max |s|, the duality gap, ||v - g||^2 and ||Lambda v||_1 (see `certificate`)."""
    dual = largest = gap = misfit = variation = 0.0
    for i in range(len(values)):
        here = np.float64(solution[i])
        jump = here - solution[i + 1] if i + 1 < len(values) else here
        away = values[i] - here
        dual += away
        largest = max(largest, abs(dual))
        gap += gamma * abs(jump) - dual * jump
        misfit += away * away
        variation += abs(jump)
    return largest, gap, misfit, variation
