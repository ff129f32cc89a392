"""FedAvg (McMahan et al., 2017, https://arxiv.org/abs/1602.05629)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from collegium.core.algorithm import Algorithm, Client, Server, handler
from collegium.core.message import Message
from collegium.core.payloads import Count, ModelPart, PartSchema
from collegium.core.settings import settings


@settings
class FedAvg(Algorithm):
    """Train the global model at every client and average what they return (Algorithm 1).

    The whole state is averaged, running statistics of normalisation layers included; integer
    counters keep the maximum. Several libraries average parameters only, which leaves the
    statistics of one client, or none, in the global model.

    Attributes:
        weighting: "examples" weighs clients by their training examples (the paper), "uniform" all
            alike.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {"model": ModelPart(), "num_examples": Count()}
    only_averaged: ClassVar[frozenset[str] | None] = frozenset({"model", "num_examples"})
    neutral: ClassVar[Mapping[str, Any] | None] = {}
    private_fits: ClassVar[int] = 1

    weighting: Literal["examples", "uniform"] = "examples"

    @property
    def weight(self) -> str | None:
        """The part that holds a client's weight in a mean; None: all are equal."""
        return "num_examples" if self.weighting == "examples" else None

    def round(self, server: Server) -> None:
        """Ask every client to train and average the models."""
        replies = server.ask(self.train, model=server.state["model"])
        server.state["model"] = replies.mean("model", self.weight)

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the received model on the site's data.

        Args:
            client: the site.
            request: ``model``, the global model.
        """
        model = client.fit(request["model"])
        return Message.of(model=model, num_examples=client.num_examples)
