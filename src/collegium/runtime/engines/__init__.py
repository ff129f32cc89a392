"""Engines: transports that carry requests to clients."""

from typing import Literal

from collegium.core.settings import PositiveInt, settings


@settings
class EngineConfig:
    """The engine that carries requests to the clients, and its share of the hardware.

    Attributes:
        name: The engine.
        workers: Client processes of each job; never changes a result.
        threads: Torch threads of each process; results depend on it in the last bits.
        jobs: Jobs, that is (algorithm, seed) pairs, at once; never changes a result.
        device: Where models are trained, as torch writes it.
    """

    name: Literal["inprocess"] = "inprocess"
    workers: PositiveInt = 1
    threads: PositiveInt = 1
    jobs: PositiveInt = 1
    device: str = "cpu"
