"""The encoders of a network by modality, which of them a site owns, and their means."""

from __future__ import annotations

import re
from collections.abc import Mapping

from collegium.core.algorithm import Client, Replies
from collegium.core.model_parts import ModelParts
from collegium.core.tensors import Mean, Tensors


def encoders_of(parts: ModelParts) -> dict[int, frozenset[str]]:
    """Return the tensors of each modality's encoder, by the channel that it sees.

    That of channel 2 is the submodule ``modality_2``, wherever it stands in the network; see
    `collegium.models.modality_unet`.

    Args:
        parts: the roles of the network's tensors.
    """
    found = {int(k) for name in parts.names for k in re.findall(r"\bmodality_(\d+)\.", name)}
    return {k: parts.named(f"modality_{k}") for k in sorted(found)}


def owned_modalities(client: Client) -> list[int]:
    """Return the channels that are not 0 everywhere in all training images of a site.

    The first call looks at the images, and the client's state keeps what it found.

    Args:
        client: the site.
    """
    if "modalities" not in client.state:
        owned: set[int] = set()
        for case in range(client.num_examples):
            image = client.examples.example(case).batch["image"]  # (slices, C, *spatial)
            there = (image != 0).reshape(*image.shape[:2], -1).any(2).any(0)
            owned |= {*there.nonzero()[:, 0].tolist()}
        client.state["modalities"] = sorted(owned)
    found: list[int] = client.state["modalities"]
    return found


def absent_encoders(client: Client) -> frozenset[str]:
    """Return the tensors of the encoders of modalities that a site lacks.

    Args:
        client: the site.
    """
    encoders = encoders_of(client.parts)
    owned = owned_modalities(client) if encoders else []
    return frozenset[str]().union(*(names for k, names in encoders.items() if k not in owned))


def encoders_by_owners(parts: ModelParts, replies: Replies) -> Tensors:
    """Return every encoder's mean over the clients that sent it, each counting the same.

    Encoders that nobody sent are left out.

    Args:
        parts: the roles of the network's tensors.
        replies: with ``model``, of which a client leaves out the encoders that it has not trained.
    """
    found = Tensors()
    for names in encoders_of(parts).values():
        owners = sum_over_senders(replies, names, replies.weights(None))
        if owners.total > 0:
            found |= owners.result()
    return found


def sum_over_senders(replies: Replies, names: frozenset[str], weights: Mapping[str, float]) -> Mean:
    """Return the running mean of some tensors over the clients that sent them.

    Args:
        replies: with ``model``, some tensors of a model.
        names: of the tensors, of which a client sends all or none.
        weights: by client.
    """
    running = Mean()
    for client, reply in replies:
        own = reply["model"].select(names)
        if own:
            running.add(own, weights[client], source=f"client {client!r}")
    return running
