from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.moon import Moon
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.tasks import SupervisedTask
from collegium.training.objectives import LiveNetwork

ROUNDS = 3
MU, TAU = 2.0, 0.3


def train(
    by_hand: Any, start: Any, previous: Any, data: Any, batches: Any, lr: float
) -> tuple[Any, list[float]]:
    """MOON's local training with plain SGD, by the paper's equation."""
    model, losses = dict(start), []
    for rows in batches:
        x, y = data.x[rows], data.y[rows]
        theirs, last = (by_hand.features(m, x, training=False) for m in (start, previous))

        def objective(
            now: Any, x: Any = x, y: Any = y, theirs: Any = theirs, last: Any = last
        ) -> Any:
            z = by_hand.features(now, x, training=True)
            error = z @ now["norm.weight"].T + now["norm.bias"] - y
            return (error**2).mean() + MU * by_hand.contrast(z, theirs, last, TAU)

        loss, _, buffers = by_hand.gradient(model, type(data)(x, y))
        losses.append(loss)
        gradient = by_hand.slopes(objective, model, by_hand.PARAMETERS)
        model |= buffers | {n: model[n] - lr * g for n, g in gradient.items()}
    return model, losses


def test_the_contrastive_gradient_takes_part_from_the_second_round_on(
    federation: Any, by_hand: Any
) -> None:
    outcome = federation.run(Moon(mu=MU, temperature=TAU), rounds=ROUNDS)
    model = federation.initial()
    previous = dict.fromkeys(federation.names, model)
    for t in range(1, ROUNDS + 1):
        trained = {}
        for name in federation.names:
            trained[name], losses = train(
                by_hand, model, previous[name], federation.data[name],
                federation.batches(name, t), 0.1 * 0.8 ** (t - 1),
            )  # fmt: skip
            reported = outcome.progress(name)[t - 1]["loss"]
            assert reported == pytest.approx(np.mean(losses), rel=1e-9)
            by_hand.assert_same(outcome.clients[t][name]["previous"], trained[name], f"{t} {name}")
        previous = trained
        model = by_hand.average([*trained.values()], [5, 8, 11])
        by_hand.assert_same(outcome.server[t]["model"], model, f"round {t}")


def test_the_first_round_is_fedavgs_bit_by_bit(federation: Any) -> None:
    """The constant log 2 has no gradient: see the first round of the test above, which has it."""
    found = federation.run(Moon(mu=MU), rounds=2).server
    expected = federation.run(FedAvg(), rounds=2).server
    assert all(found[1]["model"][n].equal(t) for n, t in expected[1]["model"].items())
    assert not all(found[2]["model"][n].equal(t) for n, t in expected[2]["model"].items())


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_with_mu_0_it_is_fedavg_bit_by_bit(federation: Any, optimizer: Any) -> None:
    recipe = replace(federation.recipe, optimizer=optimizer)
    found = federation.run(Moon(mu=0.0), recipe, rounds=ROUNDS).server[ROUNDS]["model"]
    expected = federation.run(FedAvg(), recipe, rounds=ROUNDS).server[ROUNDS]["model"]
    assert all(found[n].equal(t) for n, t in expected.items())


def test_there_is_no_personal_model(federation: Any) -> None:
    outcome = federation.run(Moon(), rounds=2)
    assert outcome.best == dict.fromkeys(federation.names)
    assert outcome.deployed.keys() == {"global"}


@pytest.mark.parametrize("kind", ["pooled", "flat"])
def test_maps_are_compared_pooled_or_flat(kind: Any, by_hand: Any) -> None:
    rng = torch.Generator().manual_seed(0)
    images = torch.randn(6, 1, 4, 4, generator=rng, dtype=torch.float64)
    module = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Conv2d(3, 1, 1)).double()
    now = Tensors(module.state_dict()).clone()
    received, previous = now.map(lambda t: 0.5 - t), now.map(lambda t: t + 0.3)

    def maps(model: Tensors) -> Any:
        windows = np.lib.stride_tricks.sliding_window_view(images[:, 0].numpy(), (2, 2), (1, 2))
        found = np.einsum("bhwij,cij->bchw", windows, model["0.weight"][:, 0].numpy())
        found += model["0.bias"].numpy()[:, None, None]
        return found.mean((2, 3)) if kind == "pooled" else found.reshape(6, -1)

    network = LiveNetwork(
        module, SupervisedTask(nn.functional.mse_loss), dict(module.named_parameters()), lr=0.1
    )
    batch = {"image": images, "label": torch.zeros(6, 1, 3, 3, dtype=torch.float64)}
    method = Moon(mu=MU, temperature=TAU, features=kind)
    _, term = method.objective(received, previous)(network, batch)
    assert term is not None
    expected = MU * by_hand.contrast(maps(now), maps(received), maps(previous), TAU)
    assert float(term.detach()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mu": -1.0}, r"Moon\.mu: should be at least 0, not -1\.0"),
        ({"mu": float("nan")}, r"Moon\.mu: should be finite and at least 0, not nan"),
        ({"temperature": 0.0}, r"Moon\.temperature: should be above 0, not 0\.0"),
        ({"features": "maps"}, r"Moon\.features: should be 'pooled' or 'flat', not 'maps'"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Moon(**fields)
