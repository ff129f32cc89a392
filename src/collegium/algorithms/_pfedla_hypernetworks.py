"""pFedLA's hypernetworks: from an embedding to weights of all clients' layers.

One is a group of float64 tensors: ``embedding`` (E,); ``0.weight``, ``0.bias`` and so on of a
perceptron of three layers with ReLU and H outputs; and for each client ``to.CLIENT.weight``
(layers, H) and ``to.CLIENT.bias`` (layers,).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from collegium.core.lazy import functional, torch
from collegium.core.tensors import Tensors

if TYPE_CHECKING:
    from torch import Tensor

DEPTH = 3
"""Layers of the perceptron."""


def initial(
    clients: Sequence[str], layers: int, *, embedding: int, hidden: int, rng: torch.Generator
) -> Tensors:
    """Return a hypernetwork that weighs all clients alike.

    The perceptron starts as torch's linear layers do; what leads to the clients is uniform in
    [0, 1], the same for each of them.

    Args:
        clients: their names.
        layers: how many layers the clients' networks have.
        embedding: E.
        hidden: H.
        rng: draws all numbers.
    """

    def uniform(*shape: int, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=rng, dtype=torch.float64)

    tensors = {"embedding": torch.randn(embedding, generator=rng, dtype=torch.float64)}
    for k, inputs in enumerate([embedding, *[hidden] * (DEPTH - 1)]):
        bound = inputs**-0.5
        tensors[f"{k}.weight"] = uniform(hidden, inputs, low=-bound, high=bound)
        tensors[f"{k}.bias"] = uniform(hidden, low=-bound, high=bound)
    row, zero = uniform(layers, hidden, low=0.0, high=1.0), torch.zeros(layers, dtype=torch.float64)
    for client in clients:
        tensors |= {f"to.{client}.weight": row.clone(), f"to.{client}.bias": zero.clone()}
    return Tensors(tensors)


def weights(network: Tensors, clients: Sequence[str], own: str) -> Tensor:
    """Return the weight of every client's layers in a client's model.

    Args:
        network: the client's hypernetwork.
        clients: the clients' names, in the order of the columns.
        own: the client's name; it alone counts in a layer of which all weights are 0.

    Returns:
        (layers, clients), rows that sum to 1; gradients flow to the hypernetwork.
    """
    features = network["embedding"]
    for k in range(DEPTH):
        features = functional.linear(features, network[f"{k}.weight"], network[f"{k}.bias"]).relu()
    columns = [
        (network[f"to.{client}.weight"] @ features + network[f"to.{client}.bias"]).relu()
        for client in clients
    ]
    found = torch.stack(columns, dim=1)
    total = found.sum(1, keepdim=True)
    alone = torch.tensor([float(client == own) for client in clients], dtype=found.dtype)
    return torch.where(total > 0, found / torch.where(total > 0, total, 1.0), alone)


def step(
    network: Tensors, clients: Sequence[str], own: str, products: Tensor, *, lr: float
) -> Tensors:
    """Return a hypernetwork after a step of gradient descent towards what its client has trained.

    With wbar^l = sum_j a_j^l w_j^l as the client received it and w as it sent it back, the step
    descends ||wbar - w||^2 / 2, whose derivative by a_j^l is -<w_j^l, w^l - wbar^l>.

    Args:
        network: the hypernetwork of the client.
        clients: the clients' names.
        own: the client's name.
        products: (layers, clients), the inner products <w_j^l, w^l - wbar^l>.
        lr: length of the step.
    """
    leaves = Tensors((name, tensor.detach().requires_grad_()) for name, tensor in network.items())
    gain = (weights(leaves, clients, own) * products).sum()
    slopes = torch.autograd.grad(gain, list(leaves.values()))
    return Tensors(
        (name, leaf.detach() + lr * slope)
        for (name, leaf), slope in zip(leaves.items(), slopes, strict=True)
    )
