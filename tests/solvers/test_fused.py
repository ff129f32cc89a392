import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

from collegium.solvers.fused import FusedLasso

EDGES = [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3), (3, 4)]
CYCLES = np.array([[(n == i) - (n == j) for i, j in EDGES] for n in range(5)], dtype=np.float64)


def random(problems: int) -> NDArray[np.float64]:
    return np.random.default_rng(3).normal(size=(5, problems))


@pytest.mark.parametrize("lam", [0.05, 0.4, 5.0])
def test_the_dual_is_least_squares_in_a_box(lam: float) -> None:
    """On a graph with cycles, against scipy on the dual of every problem."""
    points, eta = random(25), np.array([0.5, 1.0, 2.0, 0.7, 1.3])
    found = FusedLasso(CYCLES, eta, lam).solve(points)
    root = np.sqrt(eta)
    for row, z in zip(points.T, found.T, strict=True):
        dual = lsq_linear(
            root[:, None] * CYCLES, row / root, (-lam, lam), method="bvls", tol=1e-14
        ).x
        np.testing.assert_allclose(z, row - eta * (CYCLES @ dual), atol=1e-7)


def test_problems_that_do_not_converge_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("collegium.solvers.fused.MAX_SWEEPS", 1)
    FusedLasso(CYCLES, np.ones(5), 0.4).solve(random(30))
    assert "have not converged in 1 sweeps" in caplog.text


def test_equal_numbers_stay_and_the_input_is_not_changed() -> None:
    points = np.tile(random(1)[:1], (5, 4))
    before = points.copy()
    assert np.array_equal(FusedLasso(CYCLES, np.ones(5), 2.0).solve(points), before)
    assert np.array_equal(points, before)
