from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from collegium.errors import ConfigError
from collegium.solvers.admm import Coupling, Norm, ball_threshold, prox, run_admm

Golden = Callable[[str], dict[str, Any]]
NORMS: tuple[Norm, ...] = (1, 2, "inf")
PAIR = np.array([[1.0], [-1.0]])


@pytest.mark.parametrize(
    "name",
    [
        "z_update_triangle_p2_lambda0.05", "z_update_triangle_pinf_lambda0.05",
        "z_update_path_p1_lambda0.05", "z_update_path_p2_lambda0.05",
        "z_update_path_pinf_lambda0.05",
    ],
)  # fmt: skip
def test_the_first_iteration_is_that_of_algorithm_4(name: str, golden: Golden) -> None:
    case = golden(name)
    expected, params = case["expected"], case["params"]
    anchors, gradients = (np.array(case["inputs"][key]) for key in ("Z_t", "Nabla_N"))
    points = anchors - params["eta"] / 3 * gradients
    coupling = Coupling.of(np.array(case["inputs"]["Q"]), params["eta"], params["lam"], 1.0)
    start = torch.tensor(anchors)
    shrink = partial(prox, p=params["p"])
    first = run_admm(torch.tensor(points), coupling, shrink, start=start, iterations=1)
    np.testing.assert_allclose(first.z, expected["ADMM_iter1_Z"], atol=case["atol"])
    np.testing.assert_allclose(first.w, expected["ADMM_iter1_W"], atol=case["atol"])
    np.testing.assert_allclose(first.omega, expected["ADMM_iter1_Omega"], atol=case["atol"])


def test_proximal_maps_are_right_where_equation_9_is_not(golden: Golden) -> None:
    case = golden("prox_column")
    values, step = torch.tensor(case["inputs"]["v"]).double()[:, None], case["params"]["t"]
    for p in NORMS:
        found = prox(values, step, p)[:, 0]
        np.testing.assert_allclose(found, case["expected"][f"p{p}"], atol=case["atol"])
    for p in (1, "inf"):
        assert not np.allclose(prox(values, step, p)[:, 0], case["expected"][f"printed_eq9_p{p}"])


def test_proximal_maps_at_their_ends() -> None:
    values = torch.tensor([[1.0, 0.0, 0.2], [-2.0, 0.0, -0.1]], dtype=torch.float64)
    for p in NORMS:
        assert torch.equal(prox(values, 0.0, p), values)
        assert torch.equal(prox(values, 10.0, p), 0 * values)
        assert torch.equal(prox(values, 0.5, p)[:, 1:], torch.zeros(2, 2, dtype=torch.float64))


def test_the_projection_onto_the_l1_ball_lies_on_it() -> None:
    values = torch.from_numpy(np.random.default_rng(0).normal(size=(40, 6)))
    radius = torch.tensor([0.1, 1.0, 3.0, 10.0, 1e3, 20.0]).double()
    threshold = ball_threshold(values, radius)
    sizes = values.abs()
    inside = sizes.sum(0) <= radius
    left = (sizes - threshold).clamp(min=0).sum(0)
    np.testing.assert_allclose(left, torch.where(inside, sizes.sum(0), radius))
    assert inside.tolist() == [False, False, False, False, True, False]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lam": -1.0}, "lam is -1.0"),
        ({"lam": float("nan")}, "lam is nan"),
        ({"eta": 0.0}, "eta above 0"),
        ({"eta": [1.0, float("inf")]}, "eta above 0"),
        ({"rho": 0.0}, "rho is 0.0"),
        ({"incidence": np.array([[1.0], [1.0]])}, "one 1 and one -1"),
        ({"incidence": np.array([[1.0], [0.0]])}, "one 1 and one -1"),
    ],
)
def test_numbers_out_of_range_are_named(options: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"incidence": PAIR, "eta": 1.0, "lam": 1.0} | options
    with pytest.raises(ConfigError, match=words):
        Coupling.of(**given)
