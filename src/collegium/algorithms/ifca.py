"""IFCA (Ghosh et al., 2020, https://arxiv.org/abs/2006.04088), model averaging."""

from collections.abc import Mapping
from typing import Any, ClassVar

from collegium.core.algorithm import Algorithm, Client, Server, handler
from collegium.core.message import Message
from collegium.core.payloads import Count, Index, ModelPart, PartSchema
from collegium.core.settings import PositiveInt, settings
from collegium.core.tensors import Mean, Tensors


@settings
class IFCA(Algorithm):
    """Every client trains whichever of several models fits its data best (Algorithm 1, option II).

    The choice is the least mean loss over the client's training data in evaluation mode, on the
    same crops for every model, each with the normalisation statistics of its own cluster. A cluster
    that no client chose keeps its model. Every client receives all models. The models start from
    different initial weights, since equal ones would never separate.

    Attributes:
        num_clusters: how many models there are. With 1 the method is FedAvg.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {
        "model": ModelPart(),
        "cluster": Index(below="num_clusters"),
        "num_examples": Count(),
    }
    has_global: ClassVar[bool] = False
    neutral: ClassVar[Mapping[str, Any] | None] = {"num_clusters": 1}

    num_clusters: PositiveInt = 2

    def setup(self, server: Server) -> None:
        """Start from different models."""
        server.state["models"] = [server.fresh_model(k) for k in range(self.num_clusters)]

    def round(self, server: Server) -> None:
        """Average within every cluster, as the replies arrive."""
        running = [Mean() for _ in range(self.num_clusters)]
        for client, reply in server.ask(self.train, models=server.state["models"]):
            running[reply["cluster"]].add(
                reply["model"], reply["num_examples"], source=f"client {client!r}"
            )
        server.state["models"] = [
            mean.result() if mean.total > 0 else model
            for mean, model in zip(running, server.state["models"], strict=True)
        ]

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Choose a model and train it; a site without examples takes the first.

        Args:
            client: the site.
            request: ``models``, one per cluster.
        """
        models = request["models"] if client.num_examples else []
        losses = [client.loss(model) for model in models] or [0.0]
        k = client.state["cluster"] = losses.index(min(losses))
        model = client.fit(request["models"][k])
        return Message.of(model=model, cluster=k, num_examples=client.num_examples)

    def shared(self, server: Server) -> Mapping[str, Any]:
        """Return all models."""
        return {"models": server.state["models"]}

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """Return the model of the client's last choice, or the first one before its first round.

        See `Algorithm.personal_model`.
        """
        model: Tensors = request["models"][client.state.get("cluster", 0)]
        return model

    def deploy(self, server: Server) -> dict[str, Tensors]:
        """Return the model of every cluster."""
        return {f"cluster-{k}": model for k, model in enumerate(server.state["models"])}
