"""Local training and averaging in numpy, with gradients derived by hand.

Nothing here knows the library. The network is linear -> batch normalisation -> linear, under the
mean squared error; the layers' names mislead on purpose: `bn_in` is a linear layer, `conv` the
batch normalisation, `norm` the head. What an algorithm does with this is written in its own test.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Model = dict[str, Array]

AFFINE = frozenset({"conv.weight", "conv.bias"})
STATISTICS = frozenset({"conv.running_mean", "conv.running_var", "conv.num_batches_tracked"})
NORM = AFFINE | STATISTICS
HEAD = frozenset({"norm.weight", "norm.bias"})
PARAMETERS = AFFINE | HEAD | {"bn_in.weight"}
NAMES = PARAMETERS | STATISTICS


class Data(NamedTuple):
    """Inputs `(n, 3)` and labels `(n, 1)`."""

    x: Array
    y: Array


def gradient(
    model: Model, data: Data, *, batch_statistics: bool = True
) -> tuple[float, Model, Model]:
    """Give the loss, its gradient by every parameter, and the buffers after the forward pass."""
    x, y = data
    n = len(x)
    z = x @ model["bn_in.weight"].T
    mean, var = model["conv.running_mean"], model["conv.running_var"]
    buffers = {name: model[name] for name in STATISTICS}
    if batch_statistics:
        mean, var = z.mean(0), z.var(0)
        buffers = {
            "conv.running_mean": 0.9 * model["conv.running_mean"] + 0.1 * mean,
            "conv.running_var": 0.9 * model["conv.running_var"] + 0.1 * var * n / (n - 1),
            "conv.num_batches_tracked": model["conv.num_batches_tracked"] + 1,
        }
    scale = 1 / np.sqrt(var + 1e-5)
    normal = (z - mean) * scale
    hidden = model["conv.weight"] * normal + model["conv.bias"]
    error = hidden @ model["norm.weight"].T + model["norm.bias"] - y
    d_output = 2 * error / error.size
    d_hidden = d_output @ model["norm.weight"]
    d_normal = d_hidden * model["conv.weight"]
    d_z = d_normal * scale
    if batch_statistics:
        d_z = scale * (d_normal - d_normal.mean(0) - normal * (d_normal * normal).mean(0))
    gradients = {
        "bn_in.weight": d_z.T @ x,
        "conv.weight": (d_hidden * normal).sum(0),
        "conv.bias": d_hidden.sum(0),
        "norm.weight": d_output.T @ hidden,
        "norm.bias": d_output.sum(0),
    }
    return float((error**2).mean()), gradients, buffers


def loss(model: Model, data: Data, *, batch_statistics: bool = False) -> float:
    """Give the mean squared error, in evaluation mode unless told otherwise."""
    return gradient(model, data, batch_statistics=batch_statistics)[0]


def train(
    model: Model,
    data: Data,
    batches: Iterable[Sequence[int]],
    lr: float,
    *,
    moving: Collection[str] = PARAMETERS,
    change: Callable[[Model, Model], Model] = lambda gradients, model: gradients,
    adam: bool = False,
) -> tuple[Model, list[float]]:
    """Take one step per batch and give the model and the losses before each step.

    `change` maps gradients and current model to the gradients that the optimiser sees. A
    normalisation that does not move uses, and keeps, its running statistics.
    """
    model, losses = dict(model), []
    first = {name: np.zeros_like(model[name]) for name in moving}
    second = {name: np.zeros_like(model[name]) for name in moving}
    for step, rows in enumerate(batches, start=1):
        batch = Data(data.x[list(rows)], data.y[list(rows)])
        value, gradients, buffers = gradient(
            model, batch, batch_statistics=bool(AFFINE & {*moving})
        )
        losses.append(value)
        changed = change(gradients, model)
        model |= buffers
        for name in moving:
            move = changed[name]
            if adam:
                first[name] = 0.9 * first[name] + 0.1 * move
                second[name] = 0.999 * second[name] + 0.001 * move**2
                root = np.sqrt(second[name] / (1 - 0.999**step))
                move = first[name] / (1 - 0.9**step) / (root + 1e-8)
            model[name] = model[name] - lr * move
    return model, losses


def combine(models: Sequence[Model], factors: Sequence[float]) -> Model:
    """Give the sum of factor times model over floating-point tensors, the maximum over counters."""
    combined = {}
    for name, first in models[0].items():
        stacked = np.stack([model[name] for model in models])
        is_counter = first.dtype.kind != "f"
        combined[name] = stacked.max(0) if is_counter else np.tensordot(factors, stacked, axes=1)
    return combined


def average(models: Sequence[Model], weights: Sequence[float]) -> Model:
    """Give the weighted mean, counters by their maximum."""
    return combine(models, [weight / sum(weights) for weight in weights])


def select(model: Model, names: Collection[str]) -> Model:
    """Give the tensors named."""
    return {name: value for name, value in model.items() if name in names}


def best(models: Sequence[Model], validation: Data) -> Model:
    """Give the first of the models with the least mean loss over validation cases."""
    losses = [loss(model, validation) for model in models]
    return models[losses.index(min(losses))]


def assert_same(found: Mapping[str, Any], expected: Model, what: str = "") -> None:
    """Fail unless names, dtypes and values agree, values to nine digits."""
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        numbers = np.asarray(found[name])
        assert numbers.dtype == value.dtype, f"{what} {name}"
        np.testing.assert_allclose(
            numbers, value, rtol=1e-9, atol=1e-12, err_msg=f"{what} {name}", strict=True
        )


def features(model: Model, x: Array, *, training: bool) -> Array:
    """Give what enters the head; right for complex numbers too."""
    z = x @ model["bn_in.weight"].T
    mean, var = model["conv.running_mean"], model["conv.running_var"]
    if training:
        mean, var = z.mean(0), ((z - z.mean(0)) ** 2).mean(0)
    entering: Array = model["conv.weight"] * (z - mean) / np.sqrt(var + 1e-5) + model["conv.bias"]
    return entering


def contrast(now: Array, received: Array, previous: Array, tau: float) -> Any:
    """Give MOON's contrastive loss of features; right for complex numbers too."""

    def cosine(other: Array) -> Any:
        return (now * other).sum(1) / np.sqrt((now * now).sum(1) * (other * other).sum(1))

    near, far = np.exp(cosine(received) / tau), np.exp(cosine(previous) / tau)
    return -np.log(near / (near + far)).mean()


def slopes(function: Callable[[Model], Any], model: Model, names: Collection[str]) -> Model:
    """Give the gradient by every entry, by a complex step: exact to the last digits."""
    found = {}
    for name in names:
        found[name] = np.zeros_like(model[name])
        for place in np.ndindex(model[name].shape):
            moved = model[name].astype(complex)
            moved[place] += 1e-30j
            found[name][place] = function(model | {name: moved}).imag / 1e-30
    return found
