"""How far a site's training moved the model that it received, layer by layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from collegium.core.lazy import torch
from collegium.core.tensors import Tensors

Diagnostic = Literal["layer_distance"]
"""What a run may record beside what it needs: "layer_distance", see `layer_distances`."""

SENT_BACK = frozenset({"model", "model_update"})
"""The parts by which a site sends back what it made of the model that it received."""


def model_sent_back(received: Mapping[str, Any], reply: Mapping[str, Any]) -> Tensors | None:
    """Return the tensors that a site sent back of the model that it received, as it trained them.

    Args:
        received: the parts of the request.
        reply: the parts of the reply, which hold ``model``, or ``model_update``.

    Returns:
        The tensors; None if the site was sent no model, or sends none back.
    """
    model = received.get("model")
    if not isinstance(model, Tensors) or not SENT_BACK & reply.keys():
        return None
    if "model" in reply:
        sent: Tensors = reply["model"]
        return sent
    update: Tensors = reply["model_update"]
    return model.select(update) + update


def layer_distances(
    received: Mapping[str, Any], reply: Mapping[str, Any], trainable: Collection[str]
) -> dict[str, float]:
    """Return the distance between the model that a site received and what it made of it.

    Of each trained tensor the Euclidean norm ||w_k - w_g||_2 of the difference, computed in
    float64, with w_g the tensor that the site was sent and w_k the one that it sent back: the
    quantity of IOP-FL's Figure 9 (Jiang et al., 2023), left, at one site and round. The paper shows
    means; here nothing is divided by the number of weights.

    Args:
        received: the parts of the request.
        reply: the parts of the reply.
        trainable: the names of the trainable tensors.

    Returns:
        A distance for each trainable tensor that was sent both ways, by ``layer_distance/<name>``
        in the order of the model; empty if no model was.
    """
    trained = model_sent_back(received, reply)
    if trained is None:
        return {}
    both = trainable & trained.keys() & received["model"].keys()
    start, end = (model.select(both).distinct() for model in (received["model"], trained))
    return {
        f"layer_distance/{name}": float(
            torch.linalg.vector_norm(end[name].double() - start[name].double())
        )
        for name in start
        if name in end
    }
