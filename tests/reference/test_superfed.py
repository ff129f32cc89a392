from typing import Any

import numpy as np
import pytest
import torch

from collegium.algorithms.superfed import SuPerFed
from collegium.core.randomness import generator

ROUNDS = 3
MU, NU = 0.3, 0.7
SIZES = np.array([5, 8, 11])


def expected(federation: Any, theta: Any, mixing: str) -> list[tuple[Any, dict[str, Any]]]:
    """w and the clients' theta after every round, of a linear layer under full batches."""
    w = federation.initial(network=federation.linear)
    own = {name: dict(theta) for name in federation.names}
    history = []
    for t in range(1, ROUNDS + 1):
        trained = []
        for name in federation.names:
            x, y = federation.data[name]
            now, mine = dict(w), dict(own[name])
            random = generator(federation.seed, "client", name, t, "train", 0, "lambda")
            for _ in range(2):  # two epochs of one batch
                joined, share = t > 1, dict.fromkeys(w, 0.0)
                if joined and mixing == "model":
                    drawn = float(torch.rand(1, dtype=torch.float64, generator=random))
                    share = dict.fromkeys(w, drawn)
                elif joined:
                    pair = torch.rand(2, dtype=torch.float64, generator=random).tolist()
                    share = dict(zip(w, pair, strict=True))
                mixed = {n: (1 - share[n]) * now[n] + share[n] * mine[n] for n in w}
                slope = 2 * (x @ mixed["weight"].T + mixed["bias"] - y) / y.size
                by = {"weight": slope.T @ x, "bias": slope.sum(0)}
                step = {n: (1 - share[n]) * by[n] for n in w}
                for n in w:
                    apart = now[n] - w[n]
                    length = np.sqrt((apart**2).sum())
                    step[n] = step[n] + (MU * apart / length if length else 0.0)
                if joined:
                    a = np.concatenate([now[n].ravel() for n in w])
                    b = np.concatenate([mine[n].ravel() for n in w])
                    dot, aa, bb = a @ b, a @ a, b @ b
                    for n in w:
                        more = 2 * dot / (aa * bb) * (mine[n] - dot / aa * now[n])
                        step[n] = step[n] + NU * more
                    by_own = {
                        n: share[n] * by[n]
                        + NU * 2 * dot / (aa * bb) * (now[n] - dot / bb * mine[n])
                        for n in w
                    }
                    mine = {n: mine[n] - 0.1 * by_own[n] for n in w}
                now = {n: now[n] - 0.1 * step[n] for n in w}
            own[name] = mine
            trained.append(now)
        w = {
            n: np.tensordot(SIZES / SIZES.sum(), np.stack([one[n] for one in trained]), axes=1)
            for n in w
        }
        history.append((w, dict(own)))
    return history


@pytest.mark.parametrize("mixing", ["model", "layer"])
def test_both_networks_follow_algorithm_1(federation: Any, by_hand: Any, mixing: Any) -> None:
    recipe = federation.full_batch.__class__(
        optimizer="sgd", lr=0.1, batch_size=100, local_epochs=2
    )
    method = SuPerFed(mixing=mixing, start=0.4, mu=MU, nu=NU)
    outcome = federation.run(method, recipe, rounds=ROUNDS, network=federation.linear)
    initial = outcome.server[1]["model"]
    theta = {n: initial[f"second.network.{n}"].numpy() for n in ("weight", "bias")}
    start = federation.initial(network=federation.linear)
    assert not np.allclose(theta["weight"], start["weight"])  # other weights than w's
    for t, (w, own) in enumerate(expected(federation, theta, mixing), start=1):
        by_hand.assert_same({n: outcome.server[t]["model"][n] for n in w}, w, f"round {t}")
        for name, mine in own.items():
            state = outcome.clients[t][name]["own"]
            found = {n: state[f"second.network.{n}"] for n in mine}
            by_hand.assert_same(found, mine, f"round {t}, {name}")


def test_the_client_predicts_with_the_mixture_that_validates_best(federation: Any) -> None:
    outcome = federation.run(SuPerFed(start=0.0, grid=4), rounds=2, network=federation.linear)
    for name in federation.names:
        x, y = federation.validation[name]
        w, state = outcome.server[2]["model"], outcome.clients[2][name]["own"]
        losses = []
        for share in (0, 0.25, 0.5, 0.75, 1):
            mixed = {
                n: (1 - share) * w[n].numpy() + share * state[f"second.network.{n}"].numpy()
                for n in ("weight", "bias")
            }
            losses.append(((x @ mixed["weight"].T + mixed["bias"] - y) ** 2).mean())
        (reply,) = [
            reply
            for request, _, reply in outcome.log
            if (request.method, request.client, request.round) == ("evaluate", name, 2)
        ]
        found = -np.mean([row["negative_loss"] for row in reply["scores"]["personal"]])
        np.testing.assert_allclose(found, min(losses), rtol=1e-9)
