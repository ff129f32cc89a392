"""Scaling of numbers by all sites together: an exchange of sums and counts before the first round.

Every site sends, for each numeric column, how many of its training cases have a value, the sum of
these values and the sum of their squares. Mean and standard deviation of all sites' cases follow
(`collegium.data.tables.Moments`), and go into the first layer of the network, so that every model,
including one for a hospital outside, carries its scaling with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from collegium.core.algorithm import Algorithm, Client, Server, handler
from collegium.core.files import lock, write_atomically
from collegium.core.message import Message
from collegium.core.payloads import PartSchema, Statistics
from collegium.core.seals import read_sealed, seal_json
from collegium.data.tables import Moments, Scaling, TableConfig
from collegium.models.standardised import Standardised
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.federation import Federation, Network
from collegium.runtime.requests import Transport

FILE = "scaling.json"
"""The result of the exchange, beside the trainings; in a site's folder, its own scaling."""

ASK_AGAIN = "remove it and resume the run, which asks the sites again"
"""What to do about a damaged result."""

EXCHANGE = Path("scaling") / "seed-0"
"""Where the exchange itself is kept, as that of an algorithm, whose ledgers a report shows."""

WHAT = ("counts", "sums", "squares")
"""What a site sends of a column."""


@dataclass(frozen=True)
class FeatureSums(Algorithm):
    """Asks every site for the sums of its columns; nothing is trained.

    Attributes:
        numeric: Names of the columns to scale; they are the first features, in this order.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {
        "feature_sums": Statistics(
            description=(
                "number, sum and sum of squares of each numeric column of the training cases"
            ),
            columns="numeric",
        )
    }

    numeric: tuple[str, ...] = ()

    def round(self, server: Server) -> None:
        """Nothing is trained."""

    @handler
    def sum_columns(self, client: Client, request: Message) -> Message:
        """Add up the site's training cases. See `FeatureSums`."""
        data, count = client.examples, len(self.numeric)
        rows = [data.example(index).batch["image"][0, :count] for index in range(len(data))]
        table = torch.stack(rows) if rows else torch.empty(0, count)
        moments = vars(Moments.of(table.double().numpy()))
        columns = {
            name: {what: [float(values[place])] for what, values in moments.items()}
            for place, name in enumerate(self.numeric)
        }
        return Message.of(feature_sums={"unit": "", "cases": len(data), "columns": columns})


def agree_on_scaling(
    federation: Federation,
    table: TableConfig,
    folder: Path,
    transport: Callable[[], Transport | None] = lambda: None,
) -> Federation:
    """Return a federation whose network scales as all sites together do.

    The sites are asked once; the answer is kept in a folder, where a second call finds it. Of
    several processes that want to ask, one does, and the others wait for the answer.

    Args:
        federation: The sites, and a network that begins with a `Standardised` layer.
        table: What the columns are.
        folder: Where the answer, and the sites' ledgers of the exchange, are kept.
        transport: Returns what carries the exchange; None: this process.

    Raises:
        EgressError: A site's policy does not let the sums out.
        ClientError: A site failed.
    """
    path = folder / FILE
    if not path.exists():
        algorithm = FeatureSums(table.numeric)
        federation.check(algorithm)
        with lock(folder / EXCHANGE, wait=True):
            if not path.exists():
                scaling = _exchange(algorithm, federation, folder / EXCHANGE, transport())
                write_scaling(path, scaling)
    return replace(federation, network=_scaled(federation.network, table, read_scaling(path)))


def _exchange(
    algorithm: FeatureSums, federation: Federation, root: Path, transport: Transport | None
) -> Scaling:
    """Ask the sites for their sums, and return the scaling that follows from them."""
    carrier = transport or InProcess(partial(federation.clients, algorithm, seed=0, root=root))
    server = federation.server(algorithm, carrier, seed=0, root=root)
    replies = server.evaluate(algorithm.sum_columns).values()
    sums = [[*reply["feature_sums"]["columns"].values()] for reply in replies]
    moments = [
        Moments(*(np.array([column[what][0] for column in columns]) for what in WHAT))
        for columns in sums
    ]
    return reduce(add, moments).scaling()


def _scaled(network: Network, table: TableConfig, scaling: Scaling) -> Network:
    """Return what builds networks whose first layer, a `Standardised` one, holds a scaling."""
    shift, factor = torch.zeros(table.features), torch.ones(table.features)
    count = len(table.numeric)  # of the features the first ones
    shift[:count] = torch.from_numpy(scaling.shift).float()
    factor[:count] = torch.from_numpy(scaling.factor).float()

    def build() -> nn.Module:
        module = network()
        assert isinstance(module, Standardised)
        module.shift.copy_(shift)
        module.factor.copy_(factor)
        return module

    return build


def write_scaling(path: Path, scaling: Scaling) -> None:
    """Write a scaling as JSON.

    Args:
        path: The file.
        scaling: The scaling.
    """
    plain = {name: row.tolist() for name, row in vars(scaling).items()}
    write_atomically(path, seal_json(json.dumps(plain, indent=1)))


def read_scaling(path: Path) -> Scaling:
    """Read what `write_scaling` wrote.

    Raises:
        CheckpointError: the file is damaged.
    """
    stored = read_sealed(path, ASK_AGAIN)
    return Scaling(np.array(stored["shift"]), np.array(stored["factor"]))
