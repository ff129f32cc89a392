"""FedBN (Li et al., 2021, https://arxiv.org/abs/2102.07623)."""

from collections.abc import Mapping
from typing import ClassVar

from collegium.algorithms._partial import PartialSharing
from collegium.core.payloads import ModelPart, PartSchema
from collegium.core.settings import settings


@settings
class FedBN(PartialSharing):
    """FedAvg whose normalisation layers never leave the client (Algorithm 1).

    Affine parameters, running statistics and counters of every normalisation layer are private,
    found by the layer's type; the released code looks for "bn" in names, which keeps a layer called
    ``norm1`` shared. There is no global model for a hospital outside: the server's normalisation
    stays as initialised and is never evaluated.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {"model": ModelPart(without="norm")}
    private: ClassVar[str] = "norm"
    private_fits: ClassVar[int] = 1
