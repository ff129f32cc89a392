from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.grace import Grace
from collegium.algorithms.moon import Moon
from collegium.core.dataset import TensorDataset
from collegium.data.site import Site
from collegium.errors import ConfigError
from collegium.runtime.participation import SKIPPING
from collegium.tasks import SupervisedTask
from collegium.training.loop import TrainingConfig
from collegium.training.meta import look_ahead, split_batch
from collegium.training.objectives import LiveNetwork

ROUNDS = 3
BETA = 3.0


def quadratic(prediction: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """The mean of (t - a)' A (t - a) / 2, where a label (2, 3) is A beside a."""
    gap = prediction[..., 0] - label[..., 2]
    return 0.5 * torch.einsum("bi,bij,bj->b", gap, label[..., :2], gap).mean()


class InOrder(TensorDataset):
    """Gives all examples in the order they have, whatever is asked for."""

    def batch(self, indices: Sequence[int], rngs: Any) -> dict[str, torch.Tensor]:
        return super().batch(range(len(self)), rngs)


def quadratic_examples(inputs: Any) -> dict[str, torch.Tensor]:
    """Two examples with (A, a) and two with (B, b); the image is the identity, so that W x = t."""
    labels = [
        np.column_stack([inputs[matrix], inputs[centre]])
        for matrix, centre in (("A", "a"), ("A", "a"), ("B", "b"), ("B", "b"))
    ]
    return {
        "image": torch.eye(2, dtype=torch.float64).repeat(4, 1, 1),
        "label": torch.tensor(np.stack(labels)),
    }


def row(theta: Any) -> nn.Module:
    layer = nn.Linear(2, 1, bias=False).double()
    layer.weight.data = torch.tensor([theta], dtype=torch.float64)
    return layer


@pytest.mark.parametrize(("order", "words"), [(1, "first_order"), (2, "second_order")])
def test_reference_values_of_the_meta_step(
    federation: Any, golden: Any, order: Any, words: str
) -> None:
    case = golden("meta_step_quadratic")
    inputs, expected, eta = case["inputs"], case["expected"], case["params"]["eta"]
    examples = quadratic_examples(inputs)
    federation.task = SupervisedTask(quadratic)
    data = InOrder(examples)
    outcome = federation.run(
        Grace(order=order, alignment="none"),
        TrainingConfig(optimizer="sgd", lr=eta, batch_size=4),
        rounds=1,
        network=lambda: row(inputs["theta"]),
        sites=[Site("A", data, data, data)],
        deploy=False,
    )
    found = outcome.server[1]["model"]["weight"][0].numpy()
    np.testing.assert_allclose(found, expected[f"theta_next_{words}"], atol=case["atol"])
    gradient = (np.array(inputs["theta"]) - found) / eta
    np.testing.assert_allclose(gradient, expected[f"grad_{words}"], atol=case["atol"])


def test_reference_values_of_the_virtual_step(golden: Any) -> None:
    case = golden("meta_step_quadratic")
    module = row(case["inputs"]["theta"])
    network = LiveNetwork(module, SupervisedTask(quadratic), dict(module.named_parameters()), lr=9)
    first, _ = split_batch(quadratic_examples(case["inputs"]), 2)
    ahead = look_ahead(network, first, lr=case["params"]["eta"], order=1)
    found = ahead["weight"][0].detach()
    np.testing.assert_allclose(found, case["expected"]["theta_prime"], atol=case["atol"])
    np.testing.assert_allclose(module.state_dict()["weight"][0], case["inputs"]["theta"])


def task_loss(by_hand: Any, model: Any, data: Any) -> Any:
    z = by_hand.features(model, data.x, training=True)
    return ((z @ model["norm.weight"].T + model["norm.bias"] - data.y) ** 2).mean()


def coral(received: Any, local: Any) -> Any:
    if len(local) < 2:
        return 0.0
    one, two = ((r - r.mean(0)).T @ (r - r.mean(0)) / (len(r) - 1) for r in (received, local))
    return ((one - two) ** 2).sum() / (4 * local.shape[1] ** 2)


def steps(
    by_hand: Any,
    start: Any,
    model: Any,
    data: Any,
    rows: Any,
    lr: float,
    method: Grace,
    previous: Any,
) -> Any:
    """The objective of one step, the model ahead, and the buffers after it."""
    half = len(rows) // 2 if len(rows) >= 4 else 0
    first, second = rows[:half] or rows, rows[half:]
    batch = by_hand.Data(data.x[first], data.y[first])
    rest = by_hand.Data(data.x[second], data.y[second])
    _, gradient, buffers = by_hand.gradient(model, batch)
    ahead = dict(model)
    if method.client == "meta":
        inner = lr if method.inner_lr is None else method.inner_lr
        ahead |= {n: model[n] - inner * g for n, g in gradient.items()}
    else:
        rest = by_hand.Data(data.x[rows], data.y[rows])
        buffers = by_hand.gradient(model, rest)[2]
    theirs = by_hand.features(start, rest.x, training=False)

    def objective(now: Any) -> Any:
        local = by_hand.features(now, rest.x, training=True)
        value = task_loss(by_hand, now, rest)
        if method.alignment == "coral":
            value = value + method.beta * coral(theirs, local)
        if previous is not None:
            last = by_hand.features(previous, rest.x, training=False)
            value = value + method.mu * by_hand.contrast(local, theirs, last, 0.5)
        return value

    return objective, ahead, buffers, task_loss(by_hand, ahead, rest)


def train(
    by_hand: Any,
    start: Any,
    data: Any,
    batches: Any,
    lr: float,
    method: Grace,
    previous: Any = None,
    *,
    adam: bool = False,
) -> tuple[Any, list[float]]:
    """GRACE's local training: every step from theta, with the gradient at theta'."""
    model, losses = dict(start), []
    first = {n: np.zeros_like(start[n]) for n in by_hand.PARAMETERS}
    second = {n: np.zeros_like(start[n]) for n in by_hand.PARAMETERS}
    for step, rows in enumerate(batches, start=1):
        objective, ahead, buffers, loss = steps(
            by_hand, start, model, data, rows, lr, method, previous
        )
        losses.append(loss)
        gradient = by_hand.slopes(objective, ahead, by_hand.PARAMETERS)
        model |= buffers
        for name, move in gradient.items():
            if adam:
                first[name] = 0.9 * first[name] + 0.1 * move
                second[name] = 0.999 * second[name] + 0.001 * move**2
                root = np.sqrt(second[name] / (1 - 0.999**step))
                move = first[name] / (1 - 0.9**step) / (root + 1e-8)
            model[name] = model[name] - lr * move
    return model, losses


def consistent(by_hand: Any, start: Any, trained: Sequence[Any], shares: Sequence[int]) -> Any:
    """p' by the released code's rule, from all parameters laid end to end."""
    delta = np.stack(
        [np.concatenate([(m[n] - start[n]).ravel() for n in sorted(by_hand.PARAMETERS)])
         for m in trained]
    )  # fmt: skip
    unit = delta / np.linalg.norm(delta, axis=1, keepdims=True)
    sigma = unit @ unit.T
    c = np.array([np.mean([sigma[m, n] for n in range(3) if n != m]) for m in range(3)])
    if c.min() < 0:
        c = c - c.min() + 1e-3
    weights = c * np.array(shares)
    return weights / weights.sum()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    "method",
    [
        Grace(beta=BETA),
        Grace(alignment="none", inner_lr=0.3),
        Grace(beta=BETA, base="moon", mu=2.0),
        Grace(client="plain", beta=BETA),
        Grace(client="plain", beta=0.0, base="moon", server="plain"),
    ],
    ids=["coral", "no alignment", "on moon", "alignment alone", "moon"],
)
def test_rounds_follow_the_equations(
    federation: Any, by_hand: Any, method: Grace, optimizer: str
) -> None:
    lr = 0.01  # batch normalisation over halves of two is steep: 0.1 diverges
    recipe = replace(federation.recipe, optimizer=optimizer, lr=lr)
    outcome = federation.run(method, recipe, rounds=ROUNDS)
    model, previous = federation.initial(), dict.fromkeys(federation.names)
    history: list[Any] = []
    for t in range(1, ROUNDS + 1):
        trained = {}
        for name in federation.names:
            trained[name], losses = train(
                by_hand, model, federation.data[name], federation.batches(name, t),
                lr * 0.8 ** (t - 1), method, previous[name] if method.base == "moon" else None,
                adam=optimizer == "adam",
            )  # fmt: skip
            reported = outcome.progress(name)[t - 1]["loss"]
            assert reported == pytest.approx(np.mean(losses), rel=1e-8)
            same(outcome.clients[t][name]["personal"], trained[name])
        previous = trained
        history.append(trained)
        weights = [5, 8, 11]
        if method.server == "consistency":
            weights = consistent(by_hand, model, [*trained.values()], weights)
            np.testing.assert_allclose([*outcome.server[t]["weights"].values()], weights, rtol=1e-6)
        model = by_hand.average([*trained.values()], weights)
        same(outcome.server[t]["model"], model)
    for name in federation.names:
        best = by_hand.best([models[name] for models in history], federation.validation[name])
        same(outcome.best[name], best)


def same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-7, atol=1e-10, err_msg=name)


def test_the_second_order_gradient_sees_the_step_ahead(federation: Any, by_hand: Any) -> None:
    """One full batch of 8 at one site: the derivative of L(theta - lr grad L(theta))."""
    site = next(site for site in federation.sites() if site.name == "B")
    method = Grace(order=2, alignment="coral", beta=BETA, inner_lr=0.2)
    outcome = federation.run(method, federation.full_batch, rounds=1, sites=[site], deploy=False)
    start, data = federation.initial(), federation.data["B"]
    [rows] = federation.batches("B", 1, epochs=1, batch_size=100)
    objective, *_ = steps(by_hand, start, start, data, rows, 0.1, method, None)
    first = by_hand.Data(data.x[rows[:4]], data.y[rows[:4]])

    def ahead(model: Any) -> float:
        gradient = by_hand.gradient(model, first)[1]
        return float(objective(model | {n: model[n] - 0.2 * g for n, g in gradient.items()}))

    for name in by_hand.PARAMETERS:
        found = (start[name] - outcome.server[1]["model"][name].numpy()) / 0.1
        for place in np.ndindex(start[name].shape):
            step = np.zeros_like(start[name])
            step[place] = 1e-5
            up, down = (ahead(start | {name: start[name] + s}) for s in (step, -step))
            assert found[place] == pytest.approx((up - down) / 2e-5, rel=1e-5, abs=1e-7)


def test_both_orders_differ(federation: Any) -> None:
    first, second = (federation.run(Grace(order=k), rounds=1).server[1]["model"] for k in (1, 2))
    assert not torch.allclose(first["bn_in.weight"], second["bn_in.weight"], rtol=1e-6)


def test_the_server_step_moves_parameters_and_not_buffers(federation: Any) -> None:
    whole = federation.run(Grace(), rounds=1).server[1]["model"]
    half = federation.run(Grace(global_lr=0.5), rounds=1).server[1]["model"]
    start = federation.initial()
    for name, value in start.items():
        moved = 0.5 * (value + whole[name].numpy()) if "running" not in name else whole[name]
        if name != "conv.num_batches_tracked":
            np.testing.assert_allclose(half[name], moved, rtol=1e-9, atol=1e-12, err_msg=name)
    assert int(half["conv.num_batches_tracked"]) == 6  # the most steps of any client


# Settings


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_with_both_halves_plain_it_is_fedavg_bit_by_bit(federation: Any, optimizer: Any) -> None:
    recipe = replace(federation.recipe, optimizer=optimizer)
    assert Grace.neutral is not None
    found = federation.run(Grace(**Grace.neutral), recipe, rounds=ROUNDS).server[ROUNDS]["model"]
    expected = federation.run(FedAvg(), recipe, rounds=ROUNDS).server[ROUNDS]["model"]
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


def test_plain_on_moon_is_moon(federation: Any) -> None:
    method = Grace(client="plain", alignment="none", server="plain", base="moon")
    found = federation.run(method, rounds=ROUNDS).server[ROUNDS]["model"]
    expected = federation.run(Moon(), rounds=ROUNDS).server[ROUNDS]["model"]
    assert all(torch.allclose(found[name], t, rtol=1e-12) for name, t in expected.items())


@pytest.mark.parametrize("alignment", ["coral", "mmd", "adversarial"])
@pytest.mark.parametrize("kind", ["pooled", "pixels"])
def test_every_alignment_runs_on_maps_and_changes_the_model(
    federation: Any, alignment: Any, kind: Any
) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 3, 2), nn.Conv2d(3, 1, 1)).double()

    sites = [image_site("A", 9), image_site("B", 6)]
    options: Any = {"network": network, "sites": sites, "rounds": 2, "deploy": False}
    method = Grace(alignment=alignment, features=kind, pixels=5)
    found, again = (federation.run(method, **options) for _ in range(2))
    plain = federation.run(Grace(alignment="none"), **options)
    model = found.server[2]["model"]
    assert all(torch.equal(model[name], t) for name, t in again.server[2]["model"].items())
    assert not torch.equal(model["0.weight"], plain.server[2]["model"]["0.weight"])
    for client in ("A", "B"):
        assert ("adversary" in found.clients[2][client]) == (alignment == "adversarial")


def image_site(name: str, count: int) -> Site:
    rng = torch.Generator().manual_seed(ord(name))
    images = torch.randn(count, 1, 4, 4, generator=rng, dtype=torch.float64)
    data = TensorDataset({"image": images, "label": images[:, :, :3, :3] * 2})
    return Site(name, data, data, data)


def test_the_classifier_goes_on_from_round_to_round(federation: Any) -> None:
    outcome = federation.run(Grace(alignment="adversarial"), rounds=2)
    for name in federation.names:
        first, second = (outcome.clients[t][name]["adversary"] for t in (1, 2))
        change = (second["hidden.weight"] - first["hidden.weight"]).abs().max()
        assert 0 < float(change) <= 1.5 * 7e-4 * 6  # Adam moves each weight by about lr a step
    others = [outcome.clients[1][name]["adversary"]["hidden.weight"] for name in "AB"]
    assert not torch.equal(*others)


def test_what_is_sent_is_what_fedavg_sends(federation: Any) -> None:
    outcome = federation.run(Grace(alignment="adversarial", base="moon"))
    sent = {part for _, _, reply in outcome.log for part in reply}
    assert sent == {"model", "num_examples", "progress", "scores"}


def test_a_client_that_misses_a_round_is_left_out_of_it(federation: Any) -> None:
    outcome = federation.run(Grace(), rounds=3, lose={2: "B"}, participation=SKIPPING)
    assert [*outcome.server[2]["weights"]] == ["A", "C"]
    assert [*outcome.server[3]["weights"]] == ["A", "B", "C"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"alignment": "corel"},
            r"Grace\.alignment: should be 'coral', 'mmd', 'adversarial' or 'none', not 'corel'; "
            r"did you mean 'coral'\?",
        ),
        ({"order": 3}, r"Grace\.order: should be 1 or 2, not 3"),
        ({"beta": -1.0}, r"Grace\.beta: should be at least 0, not -1\.0"),
        ({"inner_lr": float("nan")}, r"Grace\.inner_lr: should be finite and at least 0, not nan"),
        ({"global_lr": 0.0}, r"Grace\.global_lr: should be above 0, not 0\.0"),
        ({"pixels": 1}, r"Grace\.pixels: should be at least 2, not 1"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Grace(**fields)
