"""The CER solver against the box-constrained dual, ADMM, golden values and its own certificate."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

from collegium.errors import ConfigError, ProtocolError
from collegium.solvers import taut_string
from collegium.solvers.taut_string import certificate, objective, solve

Vector = NDArray[np.floating[Any]]
HULLS, WALK = -1, 10**9  # steps a number that the walk may take: none at all, any number


def pulled(values: Vector, gamma: float, allowed: int) -> Vector:
    """The solution if the walk may take so many steps a number."""
    out = np.full(len(values), np.nan)
    taut_string._run(values, gamma, out, allowed)
    return out


def edges(gamma: float, side: int) -> tuple[float, float]:
    """The tube's edges above a knot on the lower edge (0) or on the upper one (1)."""
    return (-2 * gamma, 0.0) if side else (0.0, 2 * gamma)


def stretch_by_stretch(values: Vector, gamma: float) -> Vector:
    """The solution by one walk, without any from other places."""
    out, start, low = np.full(len(values), np.nan), 0, -gamma
    while start < len(values):
        high = low + 2 * gamma
        slope, end, side, _ = taut_string._short_stretch(values, start, low, high)
        if end == start:
            slope, end, side, _ = taut_string._long_stretch(values, start, low, high)
        if side:
            shift = low if side < 0 else high
            slope = taut_string._correct(values, start, end, slope, shift)
        out[start:end] = slope
        start, low = end, edges(gamma, int(side > 0))[0]
    return out


def differences(size: int) -> Vector:
    """The paper's Lambda: rows e_i - e_{i+1}, and e_d at the end."""
    return np.eye(size) - np.eye(size, k=1)


def by_dual(values: Vector, gamma: float) -> Vector:
    """g - Lambda^T s for the s in [-gamma, gamma]^d that makes it shortest."""
    matrix = differences(len(values)).T
    found = lsq_linear(matrix, values, (-gamma, gamma), method="bvls", tol=1e-14)
    return np.asarray(values - matrix @ found.x)


def shrink(a: Vector, by: float) -> Vector:
    return np.sign(a) * np.maximum(np.abs(a) - by, 0)


class Admm:
    """The paper's iteration for y = y_t - eta v, with the threshold 1 / rho that is right."""

    def __init__(self, g: Vector, y_t: Vector, eta: float, gamma: float, rho: float) -> None:
        self.g, self.y_t, self.eta, self.rho, self.pull = g, y_t, eta, rho, rho * eta * gamma
        self.lam = differences(len(g))
        self.inverse = np.linalg.inv(self.pull * self.lam.T @ self.lam + np.eye(len(g)))
        self.r = np.zeros_like(g)
        self.y, self.omega = y_t.copy(), np.zeros_like(g)

    def iterate(self) -> None:
        self.r = shrink(self.lam @ (self.y - self.y_t) - self.omega / self.rho, 1 / self.rho)
        target = self.r + self.lam @ self.y_t + self.omega / self.rho
        right = self.pull * self.lam.T @ target + self.y_t - self.eta * self.g
        self.y = self.inverse @ right
        self.omega = self.omega + self.rho * (self.r - self.lam @ (self.y - self.y_t))


@pytest.mark.parametrize("allowed", [taut_string.STEPS, HULLS])
@pytest.mark.parametrize(
    "name",
    [
        "cer_prox_gamma0.1", "cer_prox_gamma0.5", "cer_prox_gamma10.0",
        "cer_prox_d1", "cer_prox_d2", "cer_prox_d40",
    ],
)  # fmt: skip
def test_solution_equals_the_golden_one(golden, name, allowed):
    case = golden(name)
    values, gamma = np.array(case["inputs"]["g"]), case["params"]["gamma"]
    found = pulled(values, gamma, allowed)
    np.testing.assert_allclose(found, case["expected"]["nabla"], rtol=0, atol=case["atol"])
    assert certificate(values, found, gamma) < 1e-14


def test_soft_threshold_is_one_over_rho_and_not_rho(golden):
    case = golden("soft_threshold")
    a, nu = np.array(case["inputs"]["a"]), case["params"]["nu"]
    np.testing.assert_allclose(shrink(a, 1 / nu), case["expected"]["correct"], atol=case["atol"])
    assert np.abs(shrink(a, 1 / nu) - case["expected"]["printed_wrong"]).max() > 0.5


def test_corrected_admm_gives_the_golden_iterates_and_ends_at_our_solution(golden):
    case = golden("cer_admm_two_iterations")
    g, y_t = (np.array(case["inputs"][name]) for name in ("g", "y_t"))
    admm = Admm(g, y_t, **case["params"])
    for number in (1, 2):
        admm.iterate()
        for name in ("r", "y", "omega"):
            expected = case["expected"][f"{name}{number}"]
            np.testing.assert_allclose(getattr(admm, name), expected, rtol=0, atol=case["atol"])
    ours = solve(g, case["params"]["gamma"])
    early = (y_t - admm.y) / admm.eta
    assert np.abs(early - ours).max() > 0.1
    assert objective(g, early, 0.5) > objective(g, ours, 0.5) + 0.01
    for _ in range(3000):
        admm.iterate()
    np.testing.assert_allclose((y_t - admm.y) / admm.eta, ours, rtol=0, atol=1e-10)


numbers = st.one_of(
    st.integers(-3, 3).map(float),  # ties
    st.floats(-5, 5, allow_subnormal=False).map(lambda x: round(x, 6)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=12), st.floats(0.01, 12, allow_subnormal=False))
def test_solution_equals_the_dual_one(numbers, gamma):
    values = np.array(numbers)
    expected = by_dual(values, gamma)
    for allowed in (taut_string.STEPS, 0, HULLS):
        np.testing.assert_allclose(pulled(values, gamma, allowed), expected, rtol=0, atol=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 3000),
    st.floats(-2, 3, allow_subnormal=False),
    st.booleans(),
)
def test_walk_and_hulls_agree_and_are_certified(seed, size, scale, whole):
    rng = np.random.default_rng(seed)
    values = rng.laplace(rng.choice([0, 0.5]), 1, size)
    values, gamma = np.round(values) if whole else values, 10.0**scale
    walked, bent = pulled(values, gamma, WALK), pulled(values, gamma, HULLS)
    np.testing.assert_allclose(walked, bent, rtol=0, atol=1e-12)
    assert certificate(values, walked, gamma) < 1e-11
    assert certificate(values, bent, gamma) < 1e-11


SIZE = 20_000
PLACE = np.arange(SIZE) / SIZE
NOISE = np.random.default_rng(5).standard_normal(SIZE)
HARD: dict[str, tuple[Vector, float]] = {
    "ramp up": (PLACE, 1.0),
    "ramp down": (1 - PLACE, 1.0),
    "ramp to below zero": (-PLACE, 1e-2),
    "ramp through zero": (2 * PLACE - 1, 100.0),
    "ramp behind noise": (np.where(PLACE < 0.5, NOISE, PLACE), 1.0),
    "ramp that alternates": (PLACE + (-1.0) ** np.arange(SIZE), 1.0),
    "parabola": (np.cumsum(2 * PLACE - 1) / SIZE, 1e-2),
    "constant": (np.ones(SIZE), 1.0),
    "nearly constant": (1 + 1e-3 * NOISE, 1.0),
    "ties": (np.round(NOISE), 2.0),
    "alternating signs": ((-1.0) ** np.arange(SIZE), 0.3),
    "sawtooth": (np.arange(SIZE) % 1000 / 1000 - 0.5, 10.0),
    "growth": (1.001 ** np.arange(SIZE), 10.0),
    "decay": (1.001 ** -np.arange(SIZE), 0.1),
    "random walk": (np.cumsum(NOISE), 100.0),
}


@pytest.mark.parametrize("name", HARD)
def test_every_input_takes_linearly_many_steps(name):
    values, gamma = HARD[name]
    out = np.empty(SIZE)
    steps = taut_string._run(values, gamma, out, taut_string.STEPS)
    assert steps <= (taut_string.STEPS + 2 + 4) * SIZE
    assert steps > taut_string.STEPS * SIZE or "ramp" not in name  # there both ways were taken
    assert taut_string._run(values, gamma, np.empty(SIZE), HULLS) <= 4 * SIZE
    bent = pulled(values, gamma, HULLS)
    np.testing.assert_allclose(out, bent, rtol=1e-11, atol=1e-11)
    if name != "growth":  # whose values are 10^7 times gamma, so that rounding alone shows
        assert certificate(values, out, gamma) < 1e-9
        assert certificate(values, bent, gamma) < 1e-9


def test_walk_alone_would_be_quadratic_on_a_ramp():
    for size in (1000, 4000):
        out = np.empty(size)
        assert taut_string._run(np.arange(size) / size, size / 100, out, WALK) > size * size / 10


@pytest.mark.parametrize("allowed", [0, 1, 3, 10, 100])
def test_hulls_go_on_from_wherever_the_walk_stops(allowed):
    values, gamma = HARD["ramp behind noise"]
    values = values[::20].copy()
    expected = pulled(values, gamma, WALK)
    np.testing.assert_allclose(pulled(values, gamma, allowed), expected, rtol=0, atol=1e-12)


BRIEF: dict[str, tuple[Vector, float]] = {
    "noise, gamma small": (NOISE, 0.1),
    "noise": (NOISE, 0.7),
    "noise, gamma large": (NOISE, 2.5),
    "offset": (NOISE + 100, 0.5),
    "ties": (np.round(NOISE), 0.5),
    "ties of zero": (np.round(0.5 * NOISE), 0.25),
    "alternating signs": ((-1.0) ** np.arange(SIZE), 0.2),
    "still between noise": (np.where(np.arange(SIZE) // 700 % 3 == 1, 0.0, NOISE), 0.5),
    "flat behind noise": (np.where(PLACE < 0.9, NOISE, 3.0), 0.5),
    "growing noise": (NOISE * 10 ** (6 * PLACE - 3), 0.5),
}


@pytest.mark.parametrize("name", BRIEF)
def test_walks_from_several_places_find_the_stretches_of_one_to_the_last_bit(name):
    values, gamma = BRIEF[name]
    expected = stretch_by_stretch(values, gamma)
    assert pulled(values, gamma, WALK).tobytes() == expected.tobytes()
    single = values.astype(np.float32)
    expected = stretch_by_stretch(single, gamma).astype(np.float32)
    solve(single, gamma, single)
    assert single.tobytes() == expected.tobytes()


@pytest.mark.parametrize("gamma", [0.1, 0.7, 2.5, 100.0])
def test_a_survey_notes_what_one_walk_finds_from_each_knot(gamma):
    places = taut_string.SIGHT
    values, nexts, slopes = NOISE[:places].copy(), np.empty(2 * places, int), np.empty(2 * places)
    steps = taut_string._survey(values, 2 * gamma, nexts, slopes)
    assert steps < taut_string.LANES * taut_string.SHORT
    for knot in np.flatnonzero(nexts):
        start, side = divmod(int(knot), 2)
        low, high = edges(gamma, side)
        found = taut_string._short_stretch(values, start, low, high)
        noted = (values[start] + slopes[knot], nexts[knot] // 2, nexts[knot] % 2 * 2 - 1)
        assert found[:3] == noted


@pytest.mark.parametrize("gamma", [0.1, 0.7])
def test_a_survey_knows_most_stretches_of_a_block_of_noise(gamma):
    places = taut_string.SIGHT
    values, nexts, slopes = NOISE[:places].copy(), np.empty(2 * places, int), np.empty(2 * places)
    taut_string._survey(values, 2 * gamma, nexts, slopes)
    bends = np.flatnonzero(np.diff(stretch_by_stretch(values, gamma))) + 1
    bends = bends[bends < taut_string.BLOCK - taut_string.SPAN]
    known = (nexts[2 * bends] > 0) | (nexts[2 * bends + 1] > 0)
    assert known.mean() > 0.9


def test_one_number_is_shrunk_by_gamma():
    found = [solve(np.array([x]), 0.5)[0] for x in (2.0, -2.0, 0.3, 0.5)]
    np.testing.assert_allclose(found, [1.5, -1.5, 0, 0], atol=1e-15)


@pytest.mark.parametrize("allowed", [taut_string.STEPS, HULLS])
@pytest.mark.parametrize("sign", [1, -1])
def test_long_stairs_at_the_end_are_solved_in_closed_form(sign, allowed):
    stairs = sign * np.repeat([1.0, 0.99], 600)  # too flat for the other edge, and never level
    expected = sign * np.repeat([1 - 3.5 / 600, 0.99], 600)
    np.testing.assert_allclose(pulled(stairs, 3.5, allowed), expected, rtol=0, atol=1e-15)


def test_nothing_is_solved_to_nothing():
    found = solve(np.empty(0, np.float32), 1.0)
    assert found.shape == (0,)
    assert found.dtype == np.float32
    assert certificate(np.empty(0), np.empty(0), 1.0) == 0


def test_gamma_zero_returns_a_copy_of_the_values():
    values = np.concatenate([NOISE[:500], np.full(1000, 1 / 3), 1e-200 * NOISE[:50], PLACE])
    found = solve(values, 0)
    assert np.array_equal(found, values)
    assert not np.shares_memory(found, values)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_solution_is_exactly_zero_from_the_largest_partial_sum_on(dtype):
    values = NOISE.astype(dtype)
    largest = float(np.abs(np.cumsum(values, dtype=np.float64)).max())
    assert not solve(values, largest).any()
    assert not solve(values, np.inf).any()
    assert solve(values, 0.999 * largest).any()


def test_solution_is_exactly_zero_although_partial_sums_are_rounded():
    for values in NOISE.reshape(200, -1):
        assert not solve(values, float(np.abs(np.cumsum(values)).max())).any()


@pytest.mark.parametrize("allowed", [taut_string.STEPS, HULLS])
def test_float32_is_the_float64_solution_rounded_once(allowed):
    values = NOISE.astype(np.float32)
    out = np.empty_like(values)
    taut_string._run(values, 3.0, out, allowed)
    exact = pulled(values.astype(np.float64), 3.0, allowed)
    assert out.tobytes() == exact.astype(np.float32).tobytes()


def test_result_may_be_wider_than_the_values_or_replace_them():
    values = PLACE.astype(np.float32)  # so that both ways are taken
    expected = solve(values.astype(np.float64), 0.5)
    wide = np.empty(SIZE)
    assert solve(values, 0.5, wide) is wide
    assert np.array_equal(wide, expected)
    assert np.array_equal(solve(np.repeat(values, 2)[::2], 0.5), expected.astype(np.float32))
    solve(values, 0.5, values)
    assert np.array_equal(values, expected.astype(np.float32))


@pytest.mark.parametrize(
    ("values", "out"),
    [
        (NOISE.reshape(2, -1), None),
        (np.arange(3), None),
        (NOISE, np.empty(3)),
        (NOISE, np.empty(2 * SIZE)[::2]),
        (NOISE, np.empty(SIZE, np.float16)),
        (NOISE[:-1], NOISE[1:]),
        (np.zeros(8, np.float32)[:4], "wider view"),
    ],
)
def test_arrays_that_the_loops_cannot_use_are_refused(values, out):
    if isinstance(out, str):
        out = values.base.view(np.float64)
    with pytest.raises(ValueError, match=r"expected|contiguous|overlap"):
        solve(values, 1.0, out)


def test_a_result_that_is_read_only_is_refused():
    out = np.empty(SIZE)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="written to"):
        solve(NOISE, 1.0, out)


@pytest.mark.parametrize("gamma", [-1e-9, -np.inf, np.nan])
def test_gamma_below_zero_is_refused(gamma):
    with pytest.raises(ConfigError, match="gamma is"):
        solve(NOISE, gamma)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e306])
def test_values_that_cannot_be_summed_are_refused(bad):
    values = NOISE.copy()
    values[-1] = bad
    with pytest.raises(ProtocolError, match="NaN"):
        solve(values, 1.0)
    if not np.isfinite(bad):
        with pytest.raises(ProtocolError, match="NaN"):
            solve(values.astype(np.float32), 1.0)


def test_enormous_values_are_solved_without_overflow():
    values = 1e300 * NOISE[:100]
    found = solve(values, 1e300)
    np.testing.assert_allclose(found / 1e300, solve(NOISE[:100].copy(), 1.0), atol=1e-12)


def test_the_same_values_give_the_same_bits_in_any_thread():
    values = np.concatenate([NOISE, PLACE])
    expected = solve(values, 2.0).tobytes()
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda _: solve(values, 2.0).tobytes(), range(8))
    assert set(found) == {expected}


def test_objective_is_the_papers():
    values, solution = NOISE[:50], NOISE[50:100]
    penalty = np.abs(differences(50) @ solution).sum()
    expected = 0.5 * ((solution - values) ** 2).sum() + 0.7 * penalty
    assert objective(values, solution, 0.7) == pytest.approx(expected, rel=1e-13)


def test_certificate_is_the_larger_of_excess_and_gap():
    values, gamma = NOISE[:50], 0.7
    for solution in (values, np.zeros(50), 0.9 * by_dual(values, gamma)):
        dual, jumps = np.cumsum(values - solution), differences(50) @ solution
        excess = max(0, np.abs(dual).max() - gamma) / gamma
        cost = 0.5 * ((solution - values) ** 2).sum() + gamma * np.abs(jumps).sum()
        gap = (gamma * np.abs(jumps).sum() - dual @ jumps) / cost
        expected = max(excess, gap)
        assert certificate(values, solution, gamma) == pytest.approx(expected, rel=1e-12)
        assert expected > 0.1


def spoil_one(solution: Vector) -> None:
    solution[700] += 1e-6


def spoil_all(solution: Vector) -> None:
    solution += 1e-9


def spoil_scale(solution: Vector) -> None:
    solution *= 1 + 1e-6


def spoil_order(solution: Vector) -> None:
    solution[:] = solution[::-1].copy()


@pytest.mark.parametrize("spoil", [spoil_one, spoil_all, spoil_scale, spoil_order])
def test_certificate_detects_a_wrong_solution(spoil: Callable[[Vector], None]):
    solution = solve(NOISE, 1.0)
    assert certificate(NOISE, solution, 1.0) < 1e-12
    spoil(solution)
    assert certificate(NOISE, solution, 1.0) > 1e-8


def test_certificate_without_a_penalty_is_zero_for_the_values_only():
    assert certificate(NOISE, NOISE, 0.0) == 0
    assert certificate(NOISE, NOISE + 1e-6, 0.0) > 1e-7
    assert certificate(np.zeros(3), np.zeros(3), 0.0) == 0
    assert certificate(np.zeros(3), np.ones(3), 0.0) > 0.1
