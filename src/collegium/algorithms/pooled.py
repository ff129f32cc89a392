"""Centralised training on the data of all sites: the upper bound that privacy forbids."""

from collections.abc import Mapping
from typing import ClassVar

from collegium.core.algorithm import Algorithm, Client, Server, handler
from collegium.core.message import Message
from collegium.core.payloads import ModelPart, PartSchema
from collegium.core.settings import settings


@settings
class Pooled(Algorithm):
    """Train one model on all sites' data together; possible in a simulation only.

    The first client trains on everybody's examples, drawn in proportion to the sites' sizes, with
    one set of normalisation statistics. A round has as many optimiser steps as all clients of a
    federation take together: with ``local_epochs`` an epoch runs over the pooled data, with
    ``local_steps`` the steps are multiplied by the number of clients.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {"model": ModelPart()}
    simulation_only: ClassVar[bool] = True

    def round(self, server: Server) -> None:
        """Train at the first client, which holds the pooled data."""
        replies = server.ask(
            self.train,
            to=server.clients[:1],
            model=server.state["model"],
            sites=len(server.clients),
        )
        server.state["model"] = replies.mean("model", weight=None)

    def round_at_home(self, server: Server) -> None:
        """Train on: all data are in one place, and no site has a home."""
        self.round(server)

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train on the pooled examples.

        Args:
            client: the site.
            request: ``model`` and ``sites``, the number of clients.
        """
        steps = None if client.local_steps is None else client.local_steps * request["sites"]
        return Message.of(model=client.fit(request["model"], data=client.pool, steps=steps))
