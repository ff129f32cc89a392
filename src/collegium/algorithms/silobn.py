"""SiloBN (Andreux et al., 2020, https://arxiv.org/abs/2008.07424)."""

from collections.abc import Mapping
from typing import ClassVar

from collegium.algorithms._partial import PartialSharing
from collegium.core.payloads import ModelPart, PartSchema
from collegium.core.settings import settings


@settings
class SiloBN(PartialSharing):
    """FedAvg whose running statistics of normalisation layers stay local.

    Their affine parameters are shared.

    This is what libraries that average parameters only call FedAvg. A personal model is the
    aggregated weights under the statistics of the client's last local training; they are not
    recalibrated for the aggregated weights.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {"model": ModelPart(without="norm_statistics")}
    private: ClassVar[str] = "norm_statistics"
