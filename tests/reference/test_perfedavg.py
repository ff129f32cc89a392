from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from collegium.algorithms.perfedavg import PerFedAvg

ROUNDS = 2
ALPHA, DELTA, LR = 0.05, 0.02, 0.01


def moved(model: Any, gradient: Any, step: float) -> Any:
    return model | {name: model[name] - step * g for name, g in gradient.items()}


def train(by_hand: Any, w: Any, data: Any, batches: Any, lr: float, *, thirds: bool) -> Any:
    """w after a round at one client, by Algorithm 1."""
    for rows in batches:
        count = 3 if thirds else 2
        cuts = {
            (3, 2): [3], (5, 2): [2, 3], (8, 2): [4, 4],
            (3, 3): [3], (5, 3): [5], (8, 3): [2, 3, 3],
        }[len(rows), count]  # fmt: skip
        places = np.split(rows, np.cumsum(cuts)[:-1])
        own = places * count if len(rows) < 2 * count else places
        parts = [type(data)(data.x[place], data.y[place]) for place in own]
        _, gradient, buffers = by_hand.gradient(w, parts[0])
        meta = by_hand.gradient(moved(w, gradient, ALPHA), parts[1])[1]
        if thirds:
            up = by_hand.gradient(moved(w, meta, -DELTA), parts[2])[1]
            down = by_hand.gradient(moved(w, meta, DELTA), parts[2])[1]
            meta = {n: g - ALPHA * (up[n] - down[n]) / (2 * DELTA) for n, g in meta.items()}
        w = moved(w, meta, lr) | buffers
    return w


@pytest.mark.parametrize("variant", ["first_order", "hessian_free"])
def test_clients_descend_the_loss_after_a_step_and_adapt_what_they_receive(
    federation: Any, by_hand: Any, variant: Any
) -> None:
    method = PerFedAvg(variant=variant, inner_lr=ALPHA, delta=DELTA, adaptation_steps=2)
    recipe = replace(federation.recipe, lr=LR, batch_size=8)
    outcome = federation.run(method, recipe, rounds=ROUNDS)
    w = federation.initial()
    personal: dict[str, list[Any]] = {name: [] for name in federation.names}
    for t in range(1, ROUNDS + 1):
        trained = [
            train(
                by_hand, w, data, federation.batches(name, t, batch_size=8), LR * 0.8 ** (t - 1),
                thirds=variant == "hessian_free",
            )
            for name, data in federation.data.items()
        ]  # fmt: skip
        w = by_hand.average(trained, [1, 1, 1])
        by_hand.assert_same(outcome.server[t]["model"], w, f"round {t}")
        for name, data in federation.data.items():
            batches = federation.batches(
                name, t, steps=2, batch_size=8, stage="evaluate", stream="adaptation"
            )
            adapted, _ = by_hand.train(w, data, batches, ALPHA)
            personal[name].append(adapted)
    for name in federation.names:
        best = by_hand.best(personal[name], federation.validation[name])
        by_hand.assert_same(outcome.best[name], best, name)


def test_the_hessian_of_a_quadratic_loss_is_exact(federation: Any) -> None:
    """With four examples all batches are one, so that the step is (I - a H) H-gradient at w'."""
    method = PerFedAvg(variant="hessian_free", inner_lr=ALPHA, delta=0.5)
    sites = [replace(site, train=first(site.train, 4)) for site in federation.sites()]
    outcome = federation.run(
        method, federation.full_batch, rounds=1, network=federation.linear, sites=sites
    )
    start = federation.initial(network=federation.linear)
    w = np.append(start["weight"][0], start["bias"])
    ends = []
    for x, y in federation.data.values():
        design = np.column_stack([x, np.ones(len(x))])[:4]
        hessian = 2 / 4 * design.T @ design
        ahead = w - ALPHA * (hessian @ w - 2 / 4 * design.T @ y[:4, 0])
        gradient = hessian @ ahead - 2 / 4 * design.T @ y[:4, 0]
        ends.append(w - 0.1 * (np.eye(4) - ALPHA * hessian) @ gradient)
    found = outcome.server[1]["model"]
    found = np.append(found["weight"][0], found["bias"])
    np.testing.assert_allclose(found, np.mean(ends, axis=0), rtol=1e-9)


def first(data: Any, count: int) -> Any:
    return type(data)({key: value[:count] for key, value in data.inputs.items()})
