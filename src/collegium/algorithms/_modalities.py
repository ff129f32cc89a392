"""The encoders of a network by modality, and which modalities the images of a site have."""

from __future__ import annotations

import re

from collegium.core.algorithm import Client
from collegium.core.model_parts import ModelParts


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
