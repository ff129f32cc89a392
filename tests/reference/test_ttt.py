from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.ttt import TTT
from collegium.core.algorithm import NetworkBuilder
from collegium.errors import ConfigError
from collegium.runtime.federation import initial_model
from collegium.tasks import SegmentationTask
from collegium.training.objectives import LiveNetwork

ROUNDS = 2
LAM = 0.7
SHIFTS = (0, 0, 1, 2)
"""By how much a ring of three numbers is shifted for 0, 1, 2 and 3 quarter turns."""


def rotation_loss(by_hand: Any, model: Any, x: Any) -> Any:
    """The mean cross-entropy over every input in its four turns; right for complex numbers too."""
    turned = np.concatenate([np.roll(x, shift, axis=1) for shift in SHIFTS])
    labels = np.repeat(np.arange(4), len(x))
    features = by_hand.features(model, turned, training=True)
    logits = features @ model["rotation.weight"].T + model["rotation.bias"]
    right = logits[np.arange(len(labels)), labels]
    return (np.log(np.exp(logits).sum(1)) - right).mean()


def train(by_hand: Any, start: Any, data: Any, batches: Any, lr: float) -> tuple[Any, list[float]]:
    """Local training with plain SGD on L + lam L_rot."""
    model, losses = dict(start), []
    names = by_hand.PARAMETERS | {"rotation.weight", "rotation.bias"}
    for rows in batches:
        x, y = data.x[rows], data.y[rows]

        def objective(now: Any, x: Any = x, y: Any = y) -> Any:
            z = by_hand.features(now, x, training=True)
            error = z @ now["norm.weight"].T + now["norm.bias"] - y
            return (error**2).mean() + LAM * rotation_loss(by_hand, now, x)

        loss, _, buffers = by_hand.gradient(model, type(data)(x, y))
        losses.append(loss)
        gradient = by_hand.slopes(objective, model, names)
        model |= buffers | {n: model[n] - lr * g for n, g in gradient.items()}
    return model, losses


def test_rounds_equal_the_joint_loss_by_hand(federation: Any, by_hand: Any) -> None:
    method = TTT(lam=LAM, rotations="all")
    outcome = federation.run(method, rounds=ROUNDS)
    model = federation.initial(network=NetworkBuilder(federation.normed, method))
    for t in range(1, ROUNDS + 1):
        trained = []
        for name in federation.names:
            own, losses = train(
                by_hand, model, federation.data[name], federation.batches(name, t),
                0.1 * 0.8 ** (t - 1),
            )  # fmt: skip
            reported = outcome.progress(name)[t - 1]["loss"]
            assert reported == pytest.approx(np.mean(losses), rel=1e-9), "L_rot is not reported"
            trained.append(own)
        model = by_hand.average(trained, [5, 8, 11])
        by_hand.assert_same(outcome.server[t]["model"], model, f"round {t}")


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_with_lam_0_the_networks_own_tensors_are_fedavgs_bit_by_bit(
    federation: Any, optimizer: Any
) -> None:
    recipe = replace(federation.recipe, optimizer=optimizer)
    found = federation.run(TTT(lam=0.0), recipe, rounds=ROUNDS).server[ROUNDS]["model"]
    expected = federation.run(FedAvg(), recipe, rounds=ROUNDS).server[ROUNDS]["model"]
    assert set(found) - set(expected) == {"rotation.weight", "rotation.bias"}
    assert all(found[n].equal(t) for n, t in expected.items())
    learnt = federation.run(TTT(), recipe, rounds=ROUNDS).server[ROUNDS]["model"]
    assert not all(learnt[n].equal(t) for n, t in expected.items())


def test_the_head_leaves_the_networks_initial_weights_alone(federation: Any) -> None:
    plain = initial_model(federation.normed, 9)
    with_head = initial_model(NetworkBuilder(federation.normed, TTT()), 9)
    assert all(with_head[n].equal(t) for n, t in plain.items())
    again = initial_model(NetworkBuilder(federation.normed, TTT()), 9)
    assert with_head["rotation.weight"].equal(again["rotation.weight"])
    other = initial_model(NetworkBuilder(federation.normed, TTT()), 10)
    assert not with_head["rotation.weight"].equal(other["rotation.weight"])


def test_the_head_is_sent_deployed_and_averaged(federation: Any) -> None:
    outcome = federation.run(TTT(), rounds=2)
    for reply in outcome.replies("train"):
        assert tuple(reply["model"]["rotation.weight"].shape) == (4, 2)
    assert outcome.deployed.keys() == {"global"}
    assert "rotation.bias" in outcome.deployed["global"]
    assert outcome.best == dict.fromkeys(federation.names)
    uploads = [
        record.bytes_up
        for method in (TTT(lam=0.0), FedAvg())
        for record in federation.run(method, rounds=1).records
    ]
    assert all(uploads[0][name] >= uploads[1][name] + 8 * 12 for name in federation.names)


def test_random_turns_are_those_that_the_generator_draws() -> None:
    """Images are cut to the square in their middle first, and labels are not looked at."""
    weight = torch.randn(2, 1, 2, 2, generator=torch.Generator().manual_seed(1)).double()
    module: Any = nn.Sequential(nn.Conv2d(1, 2, 2, bias=False), nn.Conv2d(2, 2, 1)).double()
    TTT().extend(module)
    module[0].weight.data.copy_(weight)
    images = torch.randn(6, 1, 4, 7, generator=torch.Generator().manual_seed(2)).double()
    network = LiveNetwork(module, SegmentationTask(2), dict(module.named_parameters()), lr=0.1)
    batch = {"image": images, "label": torch.zeros(6, 3, 6, dtype=torch.int64)}
    _, term = TTT(lam=LAM).objective(torch.Generator().manual_seed(3))(network, batch)
    turns = torch.randint(4, (6,), generator=torch.Generator().manual_seed(3)).numpy()
    assert len(set(turns)) > 2
    middle = images[:, 0, :, 1:5].numpy()
    turned = np.stack([np.rot90(image, k) for image, k in zip(middle, turns, strict=True)])
    windows = np.lib.stride_tricks.sliding_window_view(turned, (2, 2), (1, 2))
    pooled = np.einsum("bhwij,cij->bchw", windows, weight[:, 0].numpy()).mean((2, 3))
    head = module.rotation
    logits = pooled @ head.weight.detach().numpy().T + head.bias.detach().numpy()
    expected = (np.log(np.exp(logits).sum(1)) - logits[np.arange(6), turns]).mean()
    assert term is not None
    assert float(term.detach()) == pytest.approx(LAM * expected, rel=1e-12)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lam": -1.0}, r"TTT\.lam: should be at least 0, not -1\.0"),
        ({"lam": float("nan")}, r"TTT\.lam: should be finite and at least 0, not nan"),
        ({"rotations": "some"}, r"TTT\.rotations: should be 'random' or 'all', not 'some'"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TTT(**fields)
