"""The exact minimiser behind communication-efficient regularisation (CER) of pFedNet, Eq. 4.

For an update g of d numbers the problem is, in the paper's notation after y = y_t - eta * v,

    minimise over v    1/2 ||v - g||^2 + gamma * (sum over i < d of |v_i - v_{i+1}| + |v_d|)

which is total-variation denoising of a signal followed by a zero. With S the partial sums of g,
the partial sums of the solution are the shortest string through the tube of half-width gamma around
S that starts at 0 and whose end is free: it leaves the tube horizontally, or as nearly so as the
tube allows. The solution is the slope of that string. This replaces the paper's ADMM, which stops
early, and its eigenvectors of Lambda^T Lambda, which need d^2 memory.

Three ways of pulling the string share the work:

- a walk after Condat, "A direct algorithm for 1-D total variation denoising", IEEE Signal
  Processing Letters 20, 2013, with a rule for the free end, and bounds on the slope from partial
  sums instead of his recurrence, whose steps depend on each other. It starts again behind every
  stretch that it has solved: in updates of real networks it visits each number once or twice, but
  on a ramp nearly as often as the ramp is long;
- the same walk from several places at once, where stretches are short: there a processor guesses
  wrong where the next one ends, which takes more time than all sums. As a stretch depends on
  nothing but the knot at which it starts, walks from guessed knots, without branches, note their
  stretches by knot. Behind the first knot that it shares with one of them, the string is theirs, to
  the last bit;
- two convex hulls after Davies and Kovac, "Local extremes, runs, strings and multiresolution",
  Annals of Statistics 29, 2001, always in linear time. They continue from the place at which the
  walk has used up its steps.

The loops are compiled and release the interpreter's lock, so that clients solve in parallel.
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
one (1), or is level to the end (0); the number of numbers visited."""

STEPS = 8
"""How often the walk may visit each number, on average, before the hulls take over."""

SHORT = 512
"""The length below which a stretch counts as short."""

RECIPROCALS = 1 / np.maximum(np.arange(SHORT), 1.0)
"""1 / length, since a division would take as long as the rest of a step."""

BRIEF = 5
"""The mean length of stretches below which walks from several places are the quicker way."""

LANES = 4
"""These walks; a processor has room to work on about four at once."""

SPAN = 340
"""Numbers from the start of one to that of the next."""

BLOCK = LANES * SPAN

ROUND = 34
"""Steps after which it is seen how far they have come; fewer than `SHORT` steps in all."""

SIGHT = BLOCK - SPAN + SHORT
"""Numbers that they may visit."""

FEW = 4
"""Numbers of a stretch that are written at once."""

KNOT, CASE = 12, 13
"""Where a walk's knot and the place of its current state are kept; see `_survey`."""

ONE, TWO, THREE = np.uintp(1), np.uintp(2), np.uintp(3)


def solve(values: Floats, gamma: float, out: Floats | None = None) -> Floats:
    """Return the exact minimiser of pFedNet's Eq. 4.

    Takes O(d) time for every input and computes in float64 for either type of ``values``. Beside
    input and output it needs 0.1 MB or, if the hulls take over, three float64 vectors at most while
    it runs. The same values give the same bits on every call.

    Deviations: the paper and its code stop an ADMM after 20 to 200 iterations, far from the
    minimum; the code also cuts the vector into chunks, each followed by a zero.

    Args:
        values: (d,), float32 or float64, the update; d may be 0.
        gamma: in the unit of the values' partial sums. 0 returns the values; from the largest
            absolute partial sum on, the result is exactly zero.
        out: (d,), float32 or float64, contiguous: receives the result. It may be ``values``
            itself, but not overlap it otherwise. By default a new vector of the values' type.

    Returns:
        (d,), the minimiser v; ``out`` if given.

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
            "learning rate or check the training data"
        )
    _run(np.ascontiguousarray(values), float(gamma), out, STEPS)
    return out


def objective(values: Floats, solution: Floats, gamma: float) -> float:
    """Return the objective that `solve` minimises.

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

    - the excess of max |s_i| over gamma, relative to gamma (to max |g| if gamma is 0);
    - the duality gap, the sum of gamma |v_i - v_{i+1}| - s_i (v_i - v_{i+1}), relative to the
      objective.

    Takes O(d) time, in float64. Rounding v alone costs up to d * max |v| / gamma times the
    precision of its type, so give `solve` a float64 ``out`` to certify the solver.

    Args:
        values: (d,), the update g.
        solution: (d,), the vector v to be checked.
        gamma: as for `solve`.
    """
    largest, gap, misfit, variation = _measure(values, solution, float(gamma))
    unit = gamma or float(np.abs(values).max(initial=0)) or 1.0
    cost = 0.5 * misfit + gamma * variation
    return max(0.0, (largest - gamma) / unit, gap / cost if cost > 0 else gap)


def _check_arrays(values: Floats, out: Floats) -> None:
    """Check that the loops can read and write the arrays."""
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
    """Solve, walking for at most ``allowed`` steps a number; return the steps of both methods."""
    size = len(values)
    if gamma == 0 or _vanishes(values, gamma):
        out[:] = values if gamma == 0 else 0
        return size
    start, low, steps = _walk(values, gamma, out, allowed * size)
    if start < size:
        index: type[np.signedinteger[Any]] = np.int32 if size < 2**31 else np.int64
        floor_from, roof_from = np.empty(size - start, index), np.empty(size - start, index)
        floor, roof = np.empty(size - start), np.empty(size - start)
        steps += _follow_hulls(values, gamma, out, start, low, floor_from, floor, roof_from, roof)
    return int(steps)


@compiled
def _summable(values: Floats, limit: float) -> bool:
    """Return whether every value is a number of no more than some magnitude."""
    wrong = 0
    for i in range(len(values)):
        wrong += not (abs(values[i]) <= limit)
    return wrong == 0


@compiled
def _vanishes(values: Floats, gamma: float) -> bool:
    """Return whether the solution is zero, since no partial sum exceeds gamma."""
    total = 0.0
    for i in range(len(values)):
        total += values[i]
        if abs(total) > gamma:
            return False
    return True


@compiled
def _walk(values: Floats, gamma: float, out: Floats, budget: int) -> tuple[int, float, int]:
    """Solve stretches from the left until the end, or until the budget of steps is exceeded.

    Returns:
        The first number that is not solved; the height of the tube's lower edge above the string's
        last knot, 0 (the knot is on it), -gamma (the knot is the string's start) or -2 gamma (the
        knot is on the upper edge); the steps taken.
    """
    start, low, steps, width = 0, -gamma, 0, 2 * gamma
    numbers, written = np.empty(SIGHT), np.empty(SIGHT + FEW)
    nexts, slopes = np.empty(2 * SIGHT, np.int64), np.empty(2 * SIGHT)
    first, stretches, surveyed = 0, 0, False  # of the block in which the walk is
    while start < len(values) and steps <= budget:
        if start - first >= BLOCK:
            surveyed = start - first < BRIEF * stretches and start + SIGHT <= len(values)
            first, stretches = start, 0
            if surveyed:
                for i in range(SIGHT):
                    numbers[i] = values[np.uintp(start + i)]
                steps += _survey(numbers, width, nexts, slopes)
        if surveyed:
            knot = 2 * (start - first) + (low < 0.0)
            knot, found = _follow(numbers, nexts, slopes, knot, written, out[first:])
            start, low, stretches = (
                first + knot // 2,
                -width if knot % 2 else 0.0,
                stretches + found,
            )
            if start - first >= BLOCK:
                continue
        slope, end, side, visited = _short_stretch(values, start, low, low + width)
        steps += visited
        if end == start:
            slope, end, side, visited = _long_stretch(values, start, low, low + width)
            steps += visited
        if side != 0:
            slope = _correct(values, start, end, slope, low if side < 0 else low + width)
        _write(out, start, end, slope)
        start, low, stretches = end, 0.0 if side < 0 else -width, stretches + 1
    return start, low, steps


@compiled
def _survey(numbers: Floats, width: float, nexts: Indices, slopes: Floats) -> int:
    """Walk from `LANES` places at once, and note the stretches by the knots where they start.

    Knot 2 i is on the tube's lower edge before number i, knot 2 i + 1 on the upper one. Of the
    stretch from a knot, ``nexts`` receives the knot at its end, or 0 if the stretch is not known,
    and ``slopes`` its slope less its first number.

    Every step is one of `_short_stretch`. A walk's state are, in ``places``, the stretch's length
    and the lengths that gave its bounds; in ``heights``, the tube's lower edge, the sum and the
    bounds. The state of the stretch that continues is at 0; those behind a new knot, on the lower
    edge at 4 and on the upper one at 8, are always the same. So a step ends with the choice of one
    of the three, which takes no branch. It notes the stretch whether it has ended or not; the note
    of its last step stays.

    Args:
        numbers: (`SIGHT`,), those from the first place on.
        width: of the tube.
        nexts: (2 `SIGHT`,).
        slopes: (2 `SIGHT`,).

    Returns:
        The steps taken.
    """
    places, heights = np.ones((LANES, 16), np.int64), np.zeros((LANES, 16))
    _begin(places, heights, width)
    nexts[:] = 0
    steps = 0
    while steps + ROUND < SHORT and _solved_by_all(places) < SPAN + ROUND // 2:
        steps += ROUND
        for _ in range(ROUND):
            for lane in range(LANES):
                knot, case = places[lane, KNOT], np.uintp(places[lane, CASE])
                length, low_end = places[lane, case], places[lane, case + ONE]
                high_end = places[lane, case + TWO]
                low, total = heights[lane, case], heights[lane, case + ONE]
                least, most = heights[lane, case + TWO], heights[lane, case + THREE]
                start = knot >> 1
                total += numbers[np.uintp(start + length)] - numbers[np.uintp(start)]
                length += 1
                share = RECIPROCALS[np.uintp(length)]
                down, up = (total + low) * share, (total + (low + width)) * share
                bends_low, bends_high = np.int64(up < least), np.int64(down > most)
                there = 2 * (start + (low_end if bends_low else high_end)) + bends_high
                nexts[np.uintp(knot)] = there
                slopes[np.uintp(knot)] = least if bends_low else most
                places[lane, KNOT] = there if bends_low | bends_high else knot
                places[lane, CASE] = 4 * bends_low + 8 * bends_high
                places[lane, 0] = length
                places[lane, 1] = length if down >= least else low_end
                places[lane, 2] = length if up <= most else high_end
                heights[lane, 0], heights[lane, 1] = low, total
                heights[lane, 2], heights[lane, 3] = max(least, down), min(most, up)
    for lane in range(LANES):
        nexts[places[lane, KNOT]] = 0  # this stretch has not ended
    return LANES * steps


@compiled
def _begin(places: Indices, heights: Floats, width: float) -> None:
    """Set the states of `_survey`; each walk begins at a knot on the lower edge."""
    for lane in range(LANES):
        places[lane, KNOT], places[lane, CASE] = 2 * SPAN * lane, 4
        heights[lane, 7], heights[lane, 8], heights[lane, 10] = width, -width, -width


@compiled
def _solved_by_all(places: Indices) -> int:
    """Return how many numbers the slowest walk of `_survey` has solved."""
    slowest = SIGHT
    for lane in range(LANES):
        slowest = min(slowest, (places[lane, KNOT] >> 1) - SPAN * lane)
    return slowest


@compiled
def _follow(
    numbers: Floats, nexts: Indices, slopes: Floats, knot: int, written: Floats, out: Floats
) -> tuple[int, int]:
    """Write the stretches that a survey knows from a knot on.

    Most have no more than `FEW` numbers. These are written without asking how many, since the next
    stretch overwrites what is too much, and therefore to ``written`` first.

    Returns:
        The first knot from which none is known; the number of stretches.
    """
    begin, found = knot >> 1, 0
    while nexts[np.uintp(knot)] != 0:
        start, end = knot >> 1, nexts[np.uintp(knot)] >> 1
        slope = numbers[np.uintp(start)] + slopes[np.uintp(knot)]
        for i in range(FEW):
            written[np.uintp(start + i)] = slope
        for i in range(start + FEW, end):
            written[np.uintp(i)] = slope
        knot = nexts[np.uintp(knot)]
        found += 1
    for i in range(begin, knot >> 1):
        out[np.uintp(i)] = written[np.uintp(i)]
    return knot, found


@compiled
def _short_stretch(values: Floats, start: int, low: float, high: float) -> Stretch:
    """Return the string's first straight stretch from a knot on, if few numbers determine it.

    ``low`` and ``high`` are the heights of the tube's edges above the knot. The lines from there to
    the edges behind each number bound the slope from below and above. Once a number's line crosses
    the other bound, the string bends at the number that gave this bound. The first number is
    subtracted from slopes, which saves digits if all numbers have much in common.

    If more numbers are needed, the stretch returned is empty.
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
def _long_stretch(values: Floats, start: int, low: float, high: float) -> Stretch:
    """Return the string's first straight stretch, however long; otherwise like `_short_stretch`.

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
    """Return a stretch that nothing bends: level to the end, unless its bounds forbid it."""
    if least > 0.0:
        return least, low_end, -1
    if most < 0.0:
        return most, high_end, 1
    return 0.0, size, 0


@compiled
def _correct(values: Floats, start: int, end: int, slope: float, shift: float) -> float:
    """Return a stretch's slope, (the sum of its values + shift) / length, to the last digits.

    It was rounded as often as the stretch is long; in a long one, the rest of the sum shows how far
    off it is.
    """
    if end - start < SHORT:
        return slope
    rest = shift
    for i in range(start, end):
        rest += values[i] - slope
    return slope + rest / (end - start)


@compiled
def _write(out: Floats, start: int, end: int, slope: float) -> None:
    """Write a solved stretch; most are so short that their two ends are all."""
    out[np.uintp(start)] = slope
    out[np.uintp(end - 1)] = slope
    for i in range(start + 1, end - 1):
        out[np.uintp(i)] = slope


@compiled
def _follow_hulls(
    values: Floats, gamma: float, out: Floats, start: int, low: float,
    floor_from: Indices, floor: Floats, roof_from: Indices, roof: Floats,
) -> int:  # fmt: skip
    """Solve the rest, from the place that `_walk` reached, by the hulls of the tube's edges.

    The floor is the lowest concave line from the knot that keeps above the lower edge, the roof the
    highest convex one below the upper edge; the arrays hold the start of each piece and its slope.
    If the floor's first slope exceeds the roof's, the string bends at the end of the shorter of the
    two pieces, and the other hull, now of one piece, starts again there.

    Returns:
        The steps: pieces added to the hulls or removed from them, at most four a number.
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
                _solve_stretch(values, out, start, floor_end, floor[ff], low)
                start, low, ff = floor_end, 0.0, ff + 1
            elif roof_end < floor_end:
                _anchor(floor_from, floor, ff, floor_end, roof_end, roof[rf])
                _solve_stretch(values, out, start, roof_end, roof[rf], low + width)
                start, low, rf = roof_end, -width, rf + 1
            else:  # both end at the current number: only rounding separates their slopes
                break
    steps = 4 * (size - begin) - (fl + 1 - ff) - (rl + 1 - rf)
    if floor[ff] > 0:
        start = _solve_pieces(values, out, start, low, floor_from, floor, ff, fl, 1)
    elif roof[rf] < 0:
        start = _solve_pieces(values, out, start, low + width, roof_from, roof, rf, rl, -1)
    out[start:] = 0
    return steps


@compiled
def _solve_stretch(
    values: Floats, out: Floats, start: int, end: int, slope: float, shift: float
) -> None:
    """Correct the slope of a stretch and write it."""
    _write(out, start, end, _correct(values, start, end, slope, shift))


@compiled
def _solve_pieces(
    values: Floats, out: Floats, start: int, shift: float,
    origins: Indices, slopes: Floats, first: int, last: int, sign: int,
) -> int:  # fmt: skip
    """Solve a hull's pieces that rise (sign 1) or fall (-1); return the start of the level end."""
    while first <= last and sign * slopes[first] > 0:
        end = origins[first + 1] if first < last else len(values)
        _solve_stretch(values, out, start, end, slopes[first], shift)
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
