from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from collegium.algorithms._grace_weights import consistency, nonnegative, similarities
from collegium.algorithms.grace import Grace
from collegium.core.algorithm import Replies
from collegium.core.message import Message
from collegium.core.model_parts import find_parts
from collegium.core.tensors import Tensors
from collegium.errors import ProtocolError
from collegium.solvers.gram import cosines, gram


def vectors(rows: Any) -> list[Tensors]:
    return [Tensors({"weight": torch.tensor(row, dtype=torch.float64)[None]}) for row in rows]


class Answered:
    """A server whose clients have already returned theta_g + delta_m."""

    def __init__(self, start: Sequence[float], deltas: Any, shares: Sequence[int]) -> None:
        self.parts = find_parts(nn.Linear(len(start), 1, bias=False))
        self.state: dict[str, Any] = {"model": vectors([start])[0]}
        self.recorded: dict[str, float] = {}
        models = vectors(np.array(start) + np.array(deltas))
        self._replies = [
            (f"c{index}", Message.of(model=model, num_examples=share))
            for index, (model, share) in enumerate(zip(models, shares, strict=True))
        ]

    def ask(self, method: Any, **items: Any) -> Replies:
        return Replies(iter(self._replies))

    def record(self, name: str, value: float) -> None:
        self.recorded[name] = value


def after_a_round(method: Grace, start: Any, deltas: Any, shares: Any) -> tuple[Any, Any]:
    """The global model and the weights."""
    server: Any = Answered(start, deltas, shares)
    method.round(server)
    return server.state["model"]["weight"][0].numpy(), [*server.state["weights"].values()]


@pytest.mark.parametrize(
    "name", ["reweight_positive_paper_with_self", "reweight_positive_code_without_self"]
)
def test_reference_values_of_consistent_updates(golden: Any, name: str) -> None:
    case = golden(name)
    inputs, params, expected = case["inputs"], case["params"], case["expected"]
    sigma = cosines(gram(vectors(inputs["delta"])))
    np.testing.assert_allclose(sigma, expected["cos"], atol=case["atol"])
    c = consistency(sigma, include_self=params["include_self"])
    np.testing.assert_allclose(c, expected["c"], atol=case["atol"])
    shares = [round(10 * p) for p in inputs["p"]]
    for eta in (params["eta_g"], 0.5):
        method = Grace(include_self=params["include_self"], global_lr=eta)
        found, weights = after_a_round(method, inputs["theta_g"], inputs["delta"], shares)
        np.testing.assert_allclose(weights, expected["p_new"], atol=case["atol"])
        np.testing.assert_allclose(found, eta * np.array(expected["delta_g"]), atol=case["atol"])
    found, _ = after_a_round(
        Grace(include_self=params["include_self"]), inputs["theta_g"], inputs["delta"], shares
    )
    np.testing.assert_allclose(found, expected["theta_g_next"], atol=case["atol"])


def test_reference_values_of_an_update_against_the_others(golden: Any) -> None:
    case = golden("reweight_negative_code_without_self")
    inputs, expected, atol = case["inputs"], case["expected"], case["atol"]
    c = consistency(cosines(gram(vectors(inputs["delta"]))), include_self=False)
    np.testing.assert_allclose(c, expected["c"], atol=atol)
    np.testing.assert_allclose(nonnegative(c, "shift"), expected["c_used"], atol=atol)
    found, weights = after_a_round(Grace(), [0.0] * 3, inputs["delta"], [5, 3, 2])
    np.testing.assert_allclose(weights, expected["p_new"], atol=atol)
    np.testing.assert_allclose(found, expected["delta_g"], atol=atol)


def by_hand(deltas: Any, shares: Any, *, include_self: bool, negative: str) -> tuple[float, float]:
    """Both sides of Eq. 4 in numpy, from single dot products."""
    deltas = np.asarray([delta for delta, n in zip(deltas, shares, strict=True) if n], dtype=float)
    p = np.array([n for n in shares if n]) / sum(shares)
    count = len(p)
    sigma = np.zeros((count, count))
    for m in range(count):
        for n in range(count):
            norms = np.sqrt(deltas[m] @ deltas[m]) * np.sqrt(deltas[n] @ deltas[n])
            sigma[m, n] = deltas[m] @ deltas[n] / norms if norms > 0 else 0.0
    if count == 1:
        c = np.ones(1)
    elif include_self:
        c = sigma.mean(1)
    else:
        c = (sigma.sum(1) - np.diag(sigma)) / (count - 1)
    used = np.maximum(c, 1e-3) if negative == "relu" else c - min(c.min(), 0) + 1e-3 * (c.min() < 0)
    new = used * p / (used * p).sum() if (used * p).sum() > 0 else p
    return float(p @ c), float(new @ c)


@pytest.mark.parametrize("negative", ["shift", "relu"])
@pytest.mark.parametrize("include_self", [True, False])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_mean_consistency_does_not_fall(
    include_self: bool, negative: Literal["shift", "relu"], data: st.DataObject
) -> None:
    """Eq. 4, on random updates, some of them zero, equal, opposite or of other orders of size."""
    clients, dims = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    number = st.floats(-4, 4, allow_subnormal=False).map(lambda x: round(x, 3))
    deltas = data.draw(arrays(float, (clients, dims), elements=number))
    scales = data.draw(st.lists(st.sampled_from([0.0, 1e-6, 1.0, -1.0, 1e4]), min_size=clients,
                                max_size=clients))  # fmt: skip
    deltas = deltas * np.array(scales)[:, None]
    if data.draw(st.booleans()):
        deltas[-1] = -deltas[0]
    shares = data.draw(st.lists(st.integers(0, 50), min_size=clients, max_size=clients))
    shares[0] += 1
    server: Any = Answered([0.0] * dims, deltas, shares)
    Grace(include_self=include_self, negative=negative).round(server)
    before, after = (server.recorded[f"consistency/{side}"] for side in ("before", "after"))
    expected = by_hand(deltas, shares, include_self=include_self, negative=negative)
    assert (before, after) == pytest.approx(expected, abs=1e-9)
    assert after >= before - 1e-12


def test_the_sides_of_the_inequality_of_two_that_agree_and_one_against_them() -> None:
    """c is 0, 0 and -1, shifted 1.001, 1.001 and 0.001: p' is nearly 1/2, 1/2 and 0."""
    server: Any = Answered([0.0], [[1.0], [1.0], [-1.0]], [1, 1, 1])
    Grace().round(server)
    assert server.recorded["consistency/before"] == pytest.approx(-1 / 3)
    assert server.recorded["consistency/after"] == pytest.approx(-0.001 / 2.003)


def test_the_printed_sign_would_move_away_from_the_clients() -> None:
    deltas = [[1.0, 0.0], [1.0, 0.1]]
    found, _ = after_a_round(Grace(), [5.0, 5.0], deltas, [1, 1])
    assert found[0] == pytest.approx(6.0)  # printed: theta_g - eta_g delta, 4.0


def test_relu_lets_the_worst_client_keep_a_floor() -> None:
    c = np.array([-0.2, 0.0005, 0.5])
    assert nonnegative(c, "relu").tolist() == [0.001, 0.001, 0.5]
    assert nonnegative(np.array([0.0005, 0.5]), "shift").tolist() == [0.0005, 0.5]


@pytest.mark.parametrize("negative", ["shift", "relu"])
def test_updates_that_all_point_apart_weigh_as_in_fedavg(negative: Any) -> None:
    third = np.pi * 2 / 3
    deltas = [[np.cos(k * third), np.sin(k * third)] for k in range(3)]
    _, weights = after_a_round(Grace(negative=negative), [0.0, 0.0], deltas, [5, 3, 2])
    np.testing.assert_allclose(weights, [0.5, 0.3, 0.2], rtol=1e-6)


@pytest.mark.parametrize("include_self", [True, False])
def test_updates_that_are_all_zero_leave_the_model(include_self: bool) -> None:
    method = Grace(include_self=include_self)
    found, weights = after_a_round(method, [1.0, 2.0], np.zeros((3, 2)), [5, 3, 2])
    np.testing.assert_allclose(weights, [0.5, 0.3, 0.2])
    assert found.tolist() == [1.0, 2.0]


def test_a_client_that_did_not_move_agrees_with_nobody() -> None:
    deltas = [[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]
    _, weights = after_a_round(Grace(), [0.0, 0.0], deltas, [1, 1, 1])
    np.testing.assert_allclose(weights, [0.5, 0.5, 0.0])


@pytest.mark.parametrize("include_self", [True, False])
def test_one_client_alone_is_followed(include_self: bool) -> None:
    method = Grace(include_self=include_self)
    found, weights = after_a_round(method, [1.0, 1.0], [[-1.0, 2.0]], [7])
    assert weights == [1.0]
    assert found.tolist() == [0.0, 3.0]


def test_a_site_without_examples_is_not_compared() -> None:
    """Its model comes back as it went; it must not lower the consistency of the others."""
    deltas = [[1.0, 0.2], [0.8, -0.3], [0.5, 0.5]]
    _, three = after_a_round(Grace(), [0.0, 0.0], deltas, [5, 3, 2])
    _, four = after_a_round(Grace(), [0.0, 0.0], [*deltas, [0.0, 0.0]], [5, 3, 2, 0])
    assert four == [*three, 0.0]


def test_no_examples_anywhere_say_so() -> None:
    with pytest.raises(ProtocolError, match="every client reported 0 examples"):
        after_a_round(Grace(), [0.0, 0.0], [[1.0, 0.0]], [0])


def test_no_reply_says_so() -> None:
    server: Any = Answered([0.0], [[0.0]], [1])
    server._replies = []
    with pytest.raises(ProtocolError, match="no client sent a reply"):
        Grace().round(server)


def two_tensors(rng: Any) -> list[Tensors]:
    return [
        Tensors({n: torch.tensor(rng.normal(size=size)) for n, size in (("a", 3), ("b", 5))})
        for _ in range(3)
    ]


@pytest.mark.parametrize(
    ("similarity", "factors"), [("split", [0.5, 0.5]), ("reweight", [1.0, 0.0])]
)
def test_tensors_may_be_compared_one_by_one(similarity: Any, factors: Any) -> None:
    """The released code's "reweight" is linspace(1, 0), whose mean over two tensors is 1/2."""
    models, start = two_tensors(np.random.default_rng(0)), two_tensors(np.random.default_rng(1))[0]
    expected = np.zeros((3, 3))
    for name, factor in zip("ab", factors, strict=True):
        delta = np.stack([(m[name] - start[name]).numpy() for m in models])
        unit = delta / np.linalg.norm(delta, axis=1, keepdims=True)
        expected += factor * unit @ unit.T
    found = similarities(models, start, similarity)
    np.testing.assert_allclose(found, expected, atol=1e-12)
