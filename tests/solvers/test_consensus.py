from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, ProtocolError
from collegium.solvers import admm, consensus
from collegium.solvers.admm import Coupling, Norm, prox, run_admm
from collegium.solvers.consensus import consensus as solve

Golden = Callable[[str], dict[str, Any]]
NORMS: tuple[Norm, ...] = (1, 2, "inf")


def incidence(count: int, edges: Sequence[tuple[int, int]]) -> Any:
    q = np.zeros((count, len(edges)))
    for column, (i, j) in enumerate(edges):
        q[i, column], q[j, column] = 1.0, -1.0
    return q


PATH = incidence(5, [(0, 1), (1, 2), (2, 3), (3, 4)])
CYCLES = incidence(5, [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3), (3, 4)])


def sites(matrix: Any, cut: int = 1) -> list[Tensors]:
    """The columns of (parameters, sites) as models of two tensors."""
    columns = torch.as_tensor(np.asarray(matrix)).T
    return [Tensors({"a": c[:cut].clone(), "b": c[cut:, None].clone()}) for c in columns]


def matrix(found: Sequence[Tensors]) -> Any:
    return np.stack([np.concatenate([t.numpy().ravel() for t in s.values()]) for s in found], 1)


def random(rows: int, count: int = 5, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 1)) + rng.normal(size=(rows, count))


def literal(z_t: Any, moved: Any, q: Any, eta: float, lam: float, rho: float, count: int) -> Any:
    """Algorithm 4 for p = 2 as in the paper, W starting at Z_t Q."""
    w, omega = z_t @ q, np.zeros((len(z_t), q.shape[1]))
    z = z_t
    inverse = np.linalg.inv(np.eye(len(q)) + eta * rho * q @ q.T)
    for _ in range(count):
        z = (moved + eta * (rho * w @ q.T - omega @ q.T)) @ inverse
        a = z @ q + omega / rho
        w = a * np.maximum(1 - lam / rho / np.linalg.norm(a, axis=0), 0)
        omega = omega + rho * (z @ q - w)
    return z


GOLDEN = (
    "z_update_triangle_p1_lambda0.5", "z_update_triangle_p2_lambda0.05",
    "z_update_triangle_p2_lambda0.5", "z_update_triangle_pinf_lambda0.05",
    "z_update_triangle_pinf_lambda0.5", "z_update_path_p1_lambda0.05",
    "z_update_path_p1_lambda0.5", "z_update_path_p2_lambda0.05", "z_update_path_p2_lambda0.5",
    "z_update_path_pinf_lambda0.05", "z_update_lambda_large",
)  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_the_minimiser_is_that_of_two_other_solvers(name: str, golden: Golden) -> None:
    case = golden(name)
    anchors, gradients = (np.array(case["inputs"][key]) for key in ("Z_t", "Nabla_N"))
    params = case["params"]
    points = anchors - params["eta"] / 3 * gradients
    coupling = Coupling.of(np.array(case["inputs"]["Q"]), params["eta"], params["lam"])
    found = matrix(solve(sites(points), coupling, p=params["p"]))
    np.testing.assert_allclose(found, case["expected"]["Z"], atol=case["atol"], rtol=0)
    dense = run_admm(torch.tensor(points), coupling, partial(prox, p=params["p"])).z
    np.testing.assert_allclose(dense, case["expected"]["Z"], atol=case["atol"], rtol=0)
    if "objective" in case["expected"]:
        lengths = np.linalg.norm(found @ np.array(case["inputs"]["Q"]), axis=0, ord={
            1: 1, 2: 2, "inf": np.inf}[params["p"]])  # fmt: skip
        value = (
            (gradients * found).sum() / 3
            + params["lam"] * lengths.sum()
            + ((found - anchors) ** 2).sum() / 2 / params["eta"]
        )
        assert value == pytest.approx(case["expected"]["objective"], abs=case["atol"])


def test_without_penalty_the_points_stay(golden: Golden) -> None:
    case = golden("z_update_lambda0")
    anchors, gradients = (np.array(case["inputs"][key]) for key in ("Z_t", "Nabla_N"))
    points = sites(anchors - case["params"]["eta"] / 3 * gradients)
    for p in NORMS:
        found = solve(points, Coupling.of(incidence(3, [(0, 1), (1, 2)]), 0.5, 0.0), p=p)
        np.testing.assert_allclose(matrix(found), case["expected"]["Z"], atol=case["atol"])
        assert np.array_equal(matrix(found), matrix(points))


def test_without_edges_the_points_stay() -> None:
    points = sites(random(4, 1))
    found = solve(points, Coupling.of(np.zeros((1, 0)), 0.5, 3.0))
    assert np.array_equal(matrix(found), matrix(points))
    assert found[0]["a"].data_ptr() != points[0]["a"].data_ptr()


def dual_norm(flow: Any, p: Any) -> Any:
    return np.linalg.norm(flow, axis=0, ord={1: np.inf, 2: 2, "inf": 1}[p])


def primal_norm(values: Any, p: Any) -> Any:
    return np.linalg.norm(values, axis=0, ord={1: 1, 2: 2, "inf": np.inf}[p])


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("strength", [0.02, 0.3, 1.5])
def test_the_optimality_conditions_hold_on_a_tree(p: Any, strength: float) -> None:
    """On a tree (b - z) / eta determines the flow y of every edge: |y|_q <= lam, <y, d> = lam |d|.

    Sites have steps of their own.
    """
    points = random(300)
    lam = strength * {1: 1.0, 2: 17.0, "inf": 100.0}[p]
    eta = np.array([0.5, 1.0, 2.0, 0.7, 1.3])
    found = matrix(solve(sites(points), Coupling.of(PATH, eta.tolist(), lam), p=p))
    flow = np.linalg.lstsq(PATH, ((points - found) / eta).T, rcond=None)[0].T
    np.testing.assert_allclose(flow @ PATH.T, (points - found) / eta, atol=1e-7)
    assert dual_norm(flow, p).max() <= lam * (1 + 1e-6)
    gap = lam * primal_norm(found @ PATH, p) - (flow * (found @ PATH)).sum(0)
    assert np.abs(gap).max() <= 1e-6 * lam
    assert np.abs(found - points).max() > 1e-3


@pytest.mark.parametrize("p", NORMS)
def test_small_blocks_give_the_same_as_one_large(p: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    points = sites(random(200), cut=77)
    coupling = Coupling.of(CYCLES, 1.0, {1: 0.3, 2: 3.0, "inf": 15.0}[p])
    whole = matrix(solve(points, coupling, p=p))
    monkeypatch.setattr(consensus, "WIDTH", 20)
    np.testing.assert_allclose(matrix(solve(points, coupling, p=p)), whole, atol=1e-7)
    dense = run_admm(torch.tensor(matrix(points)), coupling, partial(prox, p=p)).z
    np.testing.assert_allclose(whole, dense, atol=1e-7)


@pytest.mark.parametrize("count", [1, 2, 20])
def test_the_small_matrices_of_p_2_give_every_iterate_of_algorithm_4(count: int) -> None:
    anchors, gradients = random(300), random(300, seed=1)
    eta, lam, rho = 0.3, 6.0, 0.8
    points = anchors - eta / 5 * gradients
    expected = literal(anchors, points, CYCLES, eta, lam, rho, count)
    coupling = Coupling.of(CYCLES, eta, lam, rho)
    found = solve(sites(points), coupling, iterations=count, start=sites(anchors))
    np.testing.assert_allclose(matrix(found), expected, atol=1e-12)
    other = literal(points, points, CYCLES, eta, lam, rho, count)
    np.testing.assert_allclose(
        matrix(solve(sites(points), coupling, iterations=count)), other, atol=1e-12
    )


@pytest.mark.parametrize("p", [1, "inf"])
def test_a_number_of_iterations_can_be_asked_for_with_every_norm(
    p: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchors, points = random(120), random(120, seed=1)
    coupling = Coupling.of(CYCLES, 0.3, 0.5, 1.0)
    shrink, start = partial(prox, p=p), torch.tensor(anchors)
    dense = run_admm(torch.tensor(points), coupling, shrink, start=start, iterations=7)
    monkeypatch.setattr(consensus, "WIDTH", 20)
    found = solve(sites(points, 50), coupling, p=p, iterations=7, start=sites(anchors, 50))
    np.testing.assert_allclose(matrix(found), dense.z, atol=1e-12)


@pytest.mark.parametrize("p", NORMS)
def test_a_strong_pull_makes_sites_equal_to_their_weighted_mean(p: Any) -> None:
    points, eta = random(50), np.array([0.5, 1.0, 2.0, 0.7, 1.3])
    found = matrix(solve(sites(points), Coupling.of(PATH, eta.tolist(), 1e4), p=p))
    expected = (points / eta).sum(1) / (1 / eta).sum()
    np.testing.assert_allclose(found, np.tile(expected[:, None], 5), atol=1e-7)


@pytest.mark.parametrize("p", NORMS)
def test_sites_that_no_edge_joins_do_not_meet(p: Any) -> None:
    pairs = incidence(5, [(0, 1), (2, 3)])
    points = random(30)
    found = matrix(solve(sites(points), Coupling.of(pairs, 1.0, 1e3), p=p))
    np.testing.assert_allclose(found[:, 4], points[:, 4], atol=1e-12)
    for pair in ([0, 1], [2, 3]):
        mean = points[:, pair].mean(1, keepdims=True)
        np.testing.assert_allclose(found[:, pair], np.tile(mean, 2), atol=1e-7)


@pytest.mark.parametrize("p", NORMS)
def test_equal_sites_stay_as_they_are(p: Any) -> None:
    points = np.tile(random(30, 1), 5)
    found = matrix(solve(sites(points), Coupling.of(CYCLES, 1.0, 0.7), p=p))
    np.testing.assert_allclose(found, points, atol=1e-14)


@pytest.mark.parametrize("p", NORMS)
def test_single_precision_loses_no_more_than_its_last_digit(p: Any) -> None:
    """The common part of the sites is large, and must not cost digits of their differences."""
    points = (1e3 * random(200, 1) + random(200)).astype(np.float32)
    coupling = Coupling.of(CYCLES, 1.0, {1: 0.3, 2: 3.0, "inf": 15.0}[p])
    exact = matrix(solve(sites(points.astype(np.float64)), coupling, p=p))
    found = matrix(solve(sites(points), coupling, p=p))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact, rtol=1.3e-7, atol=1e-6)


def test_the_result_does_not_depend_on_rho() -> None:
    points = sites(random(60))
    results = [
        matrix(solve(points, Coupling.of(CYCLES, 0.01, 40.0, rho))) for rho in (None, 1.0, 1e4)
    ]
    np.testing.assert_allclose(results[1], results[0], atol=1e-7)
    np.testing.assert_allclose(results[2], results[0], atol=1e-7)


def test_tied_weights_stay_tied() -> None:
    points = []
    for column in torch.tensor(random(6)).T:
        tensor = column.clone()
        points.append(Tensors({"a": tensor, "twin": tensor}))
    found = solve(points, Coupling.of(CYCLES, 1.0, 0.5))
    alone = solve([point.select(["a"]) for point in points], Coupling.of(CYCLES, 1.0, 0.5))
    for site, other in zip(found, alone, strict=True):
        assert site["a"] is site["twin"]
        assert torch.equal(site["a"], other["a"])


def test_sites_must_agree_in_names_and_number() -> None:
    coupling = Coupling.of(incidence(2, [(0, 1)]), 1.0, 1.0)
    with pytest.raises(ConfigError, match="3 sites do not fit a graph of 2 sites"):
        solve(sites(random(4, 3)), coupling)
    with pytest.raises(ProtocolError, match="missing c"):
        solve([Tensors({"c": torch.ones(2)}), Tensors({"a": torch.ones(2)})], coupling)


def test_an_iteration_that_does_not_converge_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(admm, "MAX_ITERATIONS", 2)
    solve(sites(random(30)), Coupling.of(CYCLES, 1.0, 3.0))
    assert "stopped after 2 iterations, not converged" in caplog.text
