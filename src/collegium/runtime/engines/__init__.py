"""Engines: transports that carry requests to clients."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    """What carries requests to the clients, and on how much hardware.

    Attributes:
        name: The engine.
        workers: Client processes of each job; never changes a result.
        threads: Torch threads of each process; results depend on it in the last bits.
        jobs: Jobs, that is (algorithm, seed) pairs, at once; never changes a result.
        device: Where models are trained, as torch writes it.
    """

    name: str = "inprocess"
    workers: int = 1
    threads: int = 1
    jobs: int = 1
    device: str = "cpu"
