from typing import Any

import numpy as np
import pytest

from collegium.algorithms.pfedme import PFedMe
from collegium.errors import ClientError, ConfigError

ROUNDS = 2
LAM, K, INNER_LR, BETA = 4.0, 3, 0.05, 1.5


def train(by_hand: Any, w: Any, data: Any, batches: Any, lr: float) -> tuple[Any, Any, list[float]]:
    """w, theta and the losses of a round at one client, by Algorithm 1."""
    theta, losses = dict(w), []
    for rows in batches:
        batch = type(data)(data.x[rows], data.y[rows])
        for k in range(K):
            loss, gradient, buffers = by_hand.gradient(w | theta, batch)
            if k == 0:
                losses.append(loss)
                learnt = buffers
            for n, g in gradient.items():
                theta[n] = theta[n] - INNER_LR * (g + LAM * (theta[n] - w[n]))
        w = w | learnt | {n: w[n] - lr * LAM * (w[n] - theta[n]) for n in gradient}
        theta |= learnt
    return w, theta, losses


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_w_moves_to_theta_which_solves_the_proximal_problem(
    federation: Any, by_hand: Any, weighting: Any
) -> None:
    method = PFedMe(lam=LAM, inner_steps=K, inner_lr=INNER_LR, global_lr=BETA, weighting=weighting)
    outcome = federation.run(method, rounds=ROUNDS)
    w = federation.initial()
    personal: dict[str, list[Any]] = {name: [] for name in federation.names}
    for t in range(1, ROUNDS + 1):
        trained = []
        for name, data in federation.data.items():
            batches = federation.batches(name, t)
            own, theta, losses = train(by_hand, w, data, batches, 0.1 * 0.8 ** (t - 1))
            trained.append(own)
            by_hand.assert_same(outcome.clients[t][name]["personal"], theta, f"{t} {name}")
            reported = outcome.progress(name)[t - 1]["loss"]
            assert reported == pytest.approx(np.mean(losses), rel=1e-9)
            personal[name].append(theta)
        mean = by_hand.average(trained, [1, 1, 1] if weighting == "uniform" else [5, 8, 11])
        w = mean | {n: (1 - BETA) * w[n] + BETA * mean[n] for n in by_hand.PARAMETERS}
        by_hand.assert_same(outcome.server[t]["model"], w, f"round {t}")
    for name in federation.names:
        best = by_hand.best(personal[name], federation.validation[name])
        by_hand.assert_same(outcome.best[name], best, name)


def test_many_inner_steps_reach_the_minimum_in_closed_form(federation: Any) -> None:
    """The proximal problem of a linear model under the squared loss is a ridge regression."""
    method = PFedMe(lam=2.0, inner_steps=400, inner_lr=0.05)
    outcome = federation.run(method, federation.full_batch, rounds=1, network=federation.linear)
    start = federation.initial(network=federation.linear)
    w = np.append(start["weight"][0], start["bias"])
    moved = []
    for name, (x, y) in federation.data.items():
        design = np.column_stack([x, np.ones(len(x))])
        gram = 2 / len(x) * design.T @ design + 2.0 * np.eye(4)
        theta = np.linalg.solve(gram, 2 / len(x) * design.T @ y[:, 0] + 2.0 * w)
        found = outcome.clients[1][name]["personal"]
        np.testing.assert_allclose(np.append(found["weight"], found["bias"]), theta, rtol=1e-8)
        moved.append(w - 0.1 * 2.0 * (w - theta))
    found = outcome.server[1]["model"]
    mean = np.mean(moved, axis=0)
    np.testing.assert_allclose(np.append(found["weight"], found["bias"]), mean, rtol=1e-8)


def test_steps_that_would_pass_their_aim_are_refused(federation: Any) -> None:
    with pytest.raises(ConfigError, match="inner_lr times lam is 3"):
        PFedMe(lam=30.0, inner_lr=0.1)
    with pytest.raises(ClientError, match=r"which is 1\.5 and must be below 1"):
        federation.run(PFedMe(), rounds=1)
