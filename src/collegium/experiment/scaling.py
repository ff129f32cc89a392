"""Scaling of numbers by all sites together: an exchange of sums and counts before the first round.

Every site tells, for each numeric column, how many of its training cases have a value, the sum of
these values and the sum of their squares. Mean and standard deviation of all sites' cases follow
(`collegium.data.tables.Moments`), and go into the first layer of the network, so that every model,
also one handed to a hospital outside, carries its scaling with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from collegium.core.algorithm import Algorithm, Client, Server, handler
from collegium.core.files import storage_error, write_atomically
from collegium.core.message import Message
from collegium.core.payloads import Part, Statistics
from collegium.data.federation import TableConfig
from collegium.data.site import Site
from collegium.data.tables import Moments, Scaling
from collegium.models.standardised import Standardised
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.simulation import Network, build_clients, build_run, check_method
from collegium.tasks import Task
from collegium.training.loop import TrainingConfig

FILE = "scaling.json"
"""What came of the exchange, beside the trainings; in a site's folder, how it scales by itself."""

EXCHANGE = Path("scaling") / "seed-0"
"""Where the exchange itself is kept, as that of an algorithm, whose ledgers a report shows."""

WHAT = ("counts", "sums", "squares")
"""What a site tells of a column."""


@dataclass(frozen=True)
class FeatureSums(Algorithm):
    """Asks every site for the sums of its columns; nothing is trained.

    Attributes:
        numeric: Names of the columns to scale; they are the first features, in this order.
    """

    sends: ClassVar[Mapping[str, Part]] = {
        "feature_sums": Statistics(
            says="number, sum and sum of squares of each numeric column of the training cases"
        )
    }

    numeric: tuple[str, ...] = ()

    def round(self, server: Server) -> None:
        """Nothing is trained."""

    @handler
    def tell(self, client: Client, request: Message) -> Message:
        """Add up the site's training cases."""
        data, count = client.examples, len(self.numeric)
        rows = [data.example(index).batch["image"][0, :count] for index in range(len(data))]
        table = torch.stack(rows) if rows else torch.empty(0, count)
        moments = vars(Moments.of(table.double().numpy()))
        columns = {
            name: {what: [float(values[place])] for what, values in moments.items()}
            for place, name in enumerate(self.numeric)
        }
        return Message.of(feature_sums={"unit": "", "cases": len(data), "columns": columns})


def scale_together(
    sites: Mapping[str, Site],
    table: TableConfig,
    network: Network,
    task: Task,
    *,
    folder: Path,
) -> Scaling:
    """Ask all sites once, and keep the answer in a folder, where a second call finds it.

    Of several processes that want to ask, one does, and the others wait for the answer.

    Args:
        sites: The sites inside.
        table: What the columns are.
        network: Makes the network.
        task: The task.
        folder: Where the answer, and the sites' ledgers of the exchange, are kept.

    Raises:
        EgressError: A site's policy does not let the sums out.
        ClientError: A site failed.
    """
    path = folder / FILE
    if path.exists():
        return read_scaling(path)
    asking = FeatureSums(table.numeric)
    check_method(asking, TrainingConfig(), sites)
    with _alone(folder / EXCHANGE):
        if path.exists():
            return read_scaling(path)
        scaling = _ask(asking, sites, network, task, folder / EXCHANGE)
        write_scaling(path, scaling)
    return scaling


def _ask(
    asking: FeatureSums, sites: Mapping[str, Site], network: Network, task: Task, root: Path
) -> Scaling:
    """Ask the sites, and give what follows from their answers."""
    clients = build_clients(asking, sites, network, task, TrainingConfig(), seed=0, root=root)
    server = build_run(
        asking, sorted(sites), network, InProcess(lambda: clients), rounds=1, metric="", seed=0,
        root=root,
    ).server  # fmt: skip
    replies = server.evaluate(asking.tell).values()
    told = [[*reply["feature_sums"]["columns"].values()] for reply in replies]
    moments = [
        Moments(*(np.array([column[what][0] for column in columns]) for what in WHAT))
        for columns in told
    ]
    return reduce(add, moments).scaling()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process is here, and keep others waiting."""
    import fcntl  # not on every system

    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise storage_error(error, folder / ".lock") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Scaled:
    """Makes networks whose first layer holds a scaling.

    Args:
        network: Makes networks that begin with a `Standardised` layer.
        table: What the columns are.
        scaling: By how much.
    """

    def __init__(self, network: Network, table: TableConfig, scaling: Scaling) -> None:
        self._network = network
        self._shift, self._factor = torch.zeros(table.features), torch.ones(table.features)
        count = len(table.numeric)  # of the features the first ones
        self._shift[:count] = torch.from_numpy(scaling.shift).float()
        self._factor[:count] = torch.from_numpy(scaling.factor).float()

    def __call__(self) -> nn.Module:
        """Make a new network."""
        module = self._network()
        assert isinstance(module, Standardised)
        module.shift.copy_(self._shift)
        module.factor.copy_(self._factor)
        return module


def write_scaling(path: Path, scaling: Scaling) -> None:
    """Write a scaling as JSON."""
    plain = {name: row.tolist() for name, row in vars(scaling).items()}
    write_atomically(path, json.dumps(plain, indent=1).encode())


def read_scaling(path: Path) -> Scaling:
    """Read what `write_scaling` wrote."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    return Scaling(np.array(stored["shift"]), np.array(stored["factor"]))
