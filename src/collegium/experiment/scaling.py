"""Scaling of numbers by all sites together: an exchange of a few numbers before the first round.

Every site sends, for each numeric column, how many of its training cases have a value, the sum of
these values and the sum of their squares; or, to scale by the range, the smallest and the largest
value. Mean and standard deviation, or the range, of all sites' cases follow
(`collegium.data.tables.Moments` and `Ranges`), and go into the first layer of the network, so that
every model, including one for a hospital outside, carries its scaling with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import nn

from collegium.core.algorithm import Algorithm, Client, Server, handler
from collegium.core.files import lock, write_atomically
from collegium.core.message import Message
from collegium.core.payloads import PartSchema, Statistics
from collegium.core.seals import read_sealed, seal_json
from collegium.data.tables import Moments, Ranges, Scaling, TableConfig
from collegium.errors import ProtocolError
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


@dataclass(frozen=True)
class ColumnExchange(Algorithm):
    """Asks every site once about its numeric columns; nothing is trained.

    A subclass says what is asked for, and names it.

    Attributes:
        kind: What describes the columns; its fields are what a site sends of each column.
        part: The part in which a site sends it.
        numeric: Names of the columns to scale; they are the first features, in this order.
    """

    kind: ClassVar[type[Moments] | type[Ranges]]
    part: ClassVar[str]

    numeric: tuple[str, ...] = ()

    def round(self, server: Server) -> None:
        """Nothing is trained."""

    @handler
    def describe_columns(self, client: Client, request: Message) -> Message:
        """Describe the columns of the site's training cases; what is not known is left out.

        Args:
            client: The site.
            request: Nothing; both sides know the columns.
        """
        data, count = client.examples, len(self.numeric)
        rows = [data.example(index).batch["image"][0, :count] for index in range(len(data))]
        table = torch.stack(rows) if rows else torch.empty(0, count)
        found = vars(self.kind.of(table.double().numpy())).items()
        columns = {
            name: {
                what: [value for value in values[[place]].tolist() if not math.isnan(value)]
                for what, values in found
            }
            for place, name in enumerate(self.numeric)
        }
        return Message({self.part: {"unit": "", "cases": len(data), "columns": columns}})

    def described(self, site: str, reply: Message) -> Any:
        """Return a site's columns as the site described them, an instance of the kind.

        Args:
            site: Its name.
            reply: What it sent.

        Raises:
            ProtocolError: It sent something else than it was asked for.
        """
        columns = reply[self.part]["columns"]
        found = {
            field.name: np.array([
                self._number(site, name, columns.get(name), field.name) for name in self.numeric
            ])
            for field in fields(self.kind)
        }  # fmt: skip
        return self.kind(**found)

    def _number(self, site: str, name: str, column: Any, what: str) -> float:
        """Return what a site said of a column; NaN if there is no value to say it of."""
        numbers = column.get(what) if isinstance(column, Mapping) else None
        if numbers is None or len(numbers) > 1 or (not numbers and self.kind is Moments):
            raise ProtocolError(
                f"site {site!r} did not send one number as {what} of column {name}; let it install "
                f"this version of Collegium, or leave the site out"
            )
        return float(numbers[0]) if numbers else math.nan


@dataclass(frozen=True)
class FeatureSums(ColumnExchange):
    """Asks every site for the sums of its columns. See `ColumnExchange`."""

    kind: ClassVar[type[Moments] | type[Ranges]] = Moments
    part: ClassVar[str] = "feature_sums"
    sends: ClassVar[Mapping[str, PartSchema]] = {
        "feature_sums": Statistics(
            description=(
                "number, sum and sum of squares of each numeric column of the training cases"
            ),
            columns="numeric",
        )
    }


@dataclass(frozen=True)
class FeatureRanges(ColumnExchange):
    """Asks every site for the ranges of its columns. See `ColumnExchange`."""

    kind: ClassVar[type[Moments] | type[Ranges]] = Ranges
    part: ClassVar[str] = "feature_ranges"
    sends: ClassVar[Mapping[str, PartSchema]] = {
        "feature_ranges": Statistics(
            description="smallest and largest value of each numeric column of the training cases",
            columns="numeric",
        )
    }


def scaling_exchange(table: TableConfig) -> ColumnExchange:
    """Return the exchange by which sites agree on the scaling of a table.

    Args:
        table: What the columns are, and by what they are scaled.
    """
    return (FeatureRanges if table.scale_by == "range" else FeatureSums)(table.numeric)


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
        EgressError: A site's policy does not let out what is asked for.
        ClientError: A site failed.
    """
    path = folder / FILE
    if not path.exists():
        algorithm = scaling_exchange(table)
        federation.check(algorithm)
        with lock(folder / EXCHANGE, wait=True):
            if not path.exists():
                scaling = _exchange(algorithm, federation, folder / EXCHANGE, transport())
                write_scaling(path, scaling)
    return replace(federation, network=_scaled(federation.network, table, read_scaling(path)))


def _exchange(
    algorithm: ColumnExchange, federation: Federation, root: Path, transport: Transport | None
) -> Scaling:
    """Ask the sites about their columns, and return the scaling that follows."""
    carrier = transport or InProcess(partial(federation.clients, algorithm, seed=0, root=root))
    server = federation.server(algorithm, carrier, seed=0, root=root)
    replies = server.evaluate(algorithm.describe_columns)
    found = [algorithm.described(site, reply) for site, reply in replies.items()]
    return cast(Scaling, reduce(add, found).scaling())


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
