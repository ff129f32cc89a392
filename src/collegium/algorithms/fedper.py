"""FedPer (Arivazhagan et al., 2019, https://arxiv.org/abs/1912.00818)."""

from collections.abc import Mapping
from typing import ClassVar

from collegium.algorithms._partial import PartialSharing
from collegium.core.payloads import ModelPart, PartSchema
from collegium.core.settings import settings


@settings
class FedPer(PartialSharing):
    """FedAvg over the body.

    Every client has a head of its own, and one optimiser trains both (Algorithm 1).

    The head is the network's last layer (K_P = 1 in the paper); all heads start from the common
    initial one.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {"model": ModelPart(without="head")}
    private: ClassVar[str] = "head"
    private_fits: ClassVar[int] = 1
