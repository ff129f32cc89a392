"""Engines: transports that carry requests to clients."""

from typing import Literal

from collegium.core.settings import NonNegative, Positive, PositiveInt, settings
from collegium.errors import ConfigError


@settings
class EngineConfig:
    """The engine that carries requests to the clients, and its share of the hardware.

    Attributes:
        name: The engine: "inprocess" has all sites on this machine, "flare" reaches them by NVIDIA
            FLARE.
        workers: Client processes of each job; never changes a result.
        threads: Torch threads of each process; results depend on it in the last bits.
        jobs: Jobs, that is (algorithm, seed) pairs, at once; never changes a result.
        device: Where models are trained, as torch writes it; with "flare" each site's own file
            says it. "cuda" gives each process of ``jobs`` and ``workers`` a GPU of its own as long
            as there are enough; "cuda:1" is that one for all.
        together: Whether the sites of a job train in one loop where their networks, batches and
            numbers of steps are of equal shapes: several times as fast for networks on tables,
            with other last bits; see `collegium.training.together`. "inprocess" only, with one
            worker.
        folder: Of "flare": the folder with the start-up kits ``server`` and ``admin``.
        deadline: Of "flare": the seconds that a site may work on one request.
        patience: Of "flare": the seconds to wait for the server, and for sites that are not
            connected.
    """

    name: Literal["inprocess", "flare"] = "inprocess"
    workers: PositiveInt = 1
    threads: PositiveInt = 1
    jobs: PositiveInt = 1
    device: str = "cpu"
    together: bool = False
    folder: str | None = None
    deadline: Positive = 3600.0
    patience: NonNegative = 120.0

    def __post_init__(self) -> None:
        if self.together and (self.name != "inprocess" or self.workers > 1):
            raise ConfigError(
                "engine.together is true, and sites train together in one process only: set it to "
                "false, or engine.name to inprocess and engine.workers to 1"
            )
