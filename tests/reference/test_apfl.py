from typing import Any

import numpy as np
import pytest

from collegium.algorithms.apfl import APFL

ROUNDS = 3
SIZES = np.array([5, 8, 11])


def output(w: Any, x: Any) -> Any:
    return x @ w["weight"].T + w["bias"]


def slope(d_output: Any, x: Any) -> Any:
    """The gradient of a linear layer from that of its output."""
    return {"weight": d_output.T @ x, "bias": d_output.sum(0)}


def expected(federation: Any, alpha: float, alpha_lr: float) -> list[tuple[Any, Any, Any]]:
    """The global model, the clients' own networks and their alphas, after every round."""
    model = federation.initial(network=federation.linear)
    own = {name: dict(model) for name in federation.names}
    alphas = dict.fromkeys(federation.names, alpha)
    history = []
    for t in range(1, ROUNDS + 1):
        lr, trained = 0.1 * 0.8 ** (t - 1), []
        for name in federation.names:
            w, v, a = dict(model), dict(own[name]), alphas[name]
            for rows in federation.batches(name, t):
                x, y = federation.data[name].x[rows], federation.data[name].y[rows]
                first, second = output(w, x), output(v, x)
                error = a * second + (1 - a) * first - y
                by_w = slope(2 * (first - y) / y.size, x)
                by_v = slope(a * 2 * error / y.size, x)
                by_a = float((2 * error * (second - first)).sum() / y.size)
                w = {n: w[n] - lr * by_w[n] for n in w}
                v = {n: v[n] - lr * by_v[n] for n in v}
                a = min(max(a - alpha_lr * by_a, 0.0), 1.0)
            own[name], alphas[name] = v, a
            trained.append(w)
        model = {
            n: np.tensordot(SIZES / SIZES.sum(), np.stack([w[n] for w in trained]), axes=1)
            for n in model
        }
        history.append((model, dict(own), dict(alphas)))
    return history


@pytest.mark.parametrize(("alpha", "alpha_lr"), [(0.5, 0.05), (0.3, 0.0), (0.9, 5.0)])
def test_models_and_mixing_weights_follow_the_equations(
    federation: Any, by_hand: Any, alpha: float, alpha_lr: float
) -> None:
    method = APFL(alpha=alpha, alpha_lr=alpha_lr)
    outcome = federation.run(method, rounds=ROUNDS, network=federation.linear)
    for t, (model, own, alphas) in enumerate(expected(federation, alpha, alpha_lr), start=1):
        found = {n: outcome.server[t]["model"][n] for n in model}
        by_hand.assert_same(found, model, f"round {t}")
        for name in federation.names:
            state = outcome.clients[t][name]["own"]
            wanted = {f"second.network.{n}": value for n, value in own[name].items()}
            wanted["second.weight"] = np.array(alphas[name])
            by_hand.assert_same(state, wanted, f"round {t}, {name}")
    assert all(0 <= value <= 1 for value in alphas.values())


def test_neither_the_own_network_nor_its_weight_leaves_a_client(federation: Any) -> None:
    outcome = federation.run(APFL(), rounds=1)
    for request, received, reply in outcome.log:
        if request.method == "train":
            assert not [name for name in received["model"] if name.startswith("second.")]
            assert {*reply["model"]} == {*received["model"]}


def test_a_client_predicts_with_the_mixture(federation: Any, by_hand: Any) -> None:
    """Its validation scores are those of the mixed outputs, in evaluation mode."""
    outcome = federation.run(APFL(alpha=0.4, alpha_lr=0.0), rounds=1)
    (reply,) = [
        reply
        for request, _, reply in outcome.log
        if request.method == "evaluate" and request.client == "B"
    ]
    data, own = federation.validation["B"], outcome.clients[1]["B"]["own"]
    outputs = []
    for prefix, tensors in (("", outcome.server[1]["model"]), ("second.network.", own)):
        model = {n: np.asarray(tensors[prefix + n]) for n in by_hand.NAMES}
        features = by_hand.features(model, data.x, training=False)
        outputs.append(features @ model["norm.weight"].T + model["norm.bias"])
    mixed = 0.6 * outputs[0] + 0.4 * outputs[1]
    wanted = -((mixed - data.y) ** 2)[:, 0]
    found = [row["negative_loss"] for row in reply["scores"]["personal"]]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    plain = [row["negative_loss"] for row in reply["scores"]["global"]]
    np.testing.assert_allclose(plain, -((outputs[0] - data.y) ** 2)[:, 0], rtol=1e-6)
