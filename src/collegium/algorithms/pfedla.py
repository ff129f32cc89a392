"""pFedLA and HeurpFedLA (Ma et al., CVPR 2022, https://arxiv.org/abs/2205.03993)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from collegium.algorithms import _pfedla_hypernetworks as hypernetworks
from collegium.core.algorithm import Algorithm, Client, Server, handler
from collegium.core.lazy import torch
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import ModelPart, PartSchema
from collegium.core.settings import NonNegativeInt, Positive, PositiveInt, settings
from collegium.core.tensors import Tensors, mean
from collegium.errors import ConfigError


@settings
class PFedLA(Algorithm):
    """Mix each client's model of all clients' models, layer by layer, with learnt weights.

    The server keeps the models w_j that clients sent last, and for each client i a hypernetwork: an
    embedding, a perceptron, and for each layer l one number per client, cut at 0 and divided by
    their sum, the weights a_ij^l. In a round client i receives, and trains to w_i,

        wbar_i^l = sum_j a_ij^l w_j^l,

    then the hypernetwork's parameters phi_i take a step towards what was trained:

        phi_i <- phi_i + hypernetwork_lr (d wbar_i / d phi_i)^T (w_i - wbar_i).

    A site predicts with the wbar_i of all models that were sent last. A layer is one module's own
    parameters, weight and bias together, and its buffers have the same weights. Where all weights
    of a layer are 0 the client's own w_i is taken.

    HeurpFedLA (``kept_layers``) leaves the layers with the largest a_ii^l as the client trained
    them: they are not sent to it. It still sends them, for the others.

    Known limits. A step depends on the length of a layer's w_j, so that large layers learn faster.
    Weights that are cut at 0 together no longer move. In the first round all models are equal, and
    no weight moves either.

    What could be read: the abstract and FL-bench's version, whose defaults these are; the paper's
    equations could not. Deviations from that version. There the step has the other sign, which
    moves wbar_i away from what was trained. A layer is a single tensor there, and buffers stay at
    the clients. The stored model of a client grows by its update instead of becoming w_i, and
    clients take turns: later ones are mixed from what earlier ones trained in the same round. All
    weights start at random; here all clients' are equal to begin with, and all hypernetworks alike,
    so that the clients' names decide nothing. There layers are kept by a weight before it is
    divided by the sum.

    Attributes:
        hypernetwork_lr: step of the hypernetworks, plain gradient descent.
        embedding: length of a client's embedding.
        hidden: width of the perceptron.
        kept_layers: how many layers stay at the client (HeurpFedLA); at 0 it is pFedLA.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {"model": ModelPart()}
    has_global: ClassVar[bool] = False

    hypernetwork_lr: Positive = 5e-3
    embedding: PositiveInt = 100
    hidden: PositiveInt = 100
    kept_layers: NonNegativeInt = 0

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:
        """Refuse a single site, and to keep all layers. See `Algorithm.check_setup`."""
        if len(clients) < 2:
            raise ConfigError(
                "PFedLA mixes the models of several sites, and there is one site only; add sites, "
                "or choose local"
            )
        count = len({name.rpartition(".")[0] for name in parts.names})
        if self.kept_layers >= count:
            raise ConfigError(
                f"PFedLA's kept_layers is {self.kept_layers}, and the network has {count} layers, "
                f"of which none would be mixed; lower it, or choose local"
            )

    def setup(self, server: Server) -> None:
        """Start all clients from the common model, and all hypernetworks alike."""
        first, clients = server.initial_model, server.clients
        network = hypernetworks.initial(
            clients, len(_layers(first)), embedding=self.embedding, hidden=self.hidden,
            rng=server.rng("hypernetworks"),
        )  # fmt: skip
        server.state["models"] = dict.fromkeys(clients, first)
        server.state["hypernetworks"] = dict.fromkeys(clients, network)
        server.state["trained"] = []

    def round(self, server: Server) -> None:
        """Send every client its wbar_i, and learn from what comes back."""
        sent = {client: self.mixed(server, client) for client in server.clients}
        each = {client: {"model": model} for client, model in sent.items()}
        replies = server.ask(self.train, each=each).items()
        learnt = {
            client: self.learn(server, client, sent[client], reply["model"])
            for client, reply in replies
        }
        state = server.state
        state["hypernetworks"] = state["hypernetworks"] | learnt
        state["models"] = state["models"] | {client: reply["model"] for client, reply in replies}
        state["trained"] = sorted({*state["trained"], *learnt})

    def mixed(self, server: Server, client: str) -> Tensors:
        """Return wbar_i without the layers that stay at the client.

        Args:
            server: the server.
            client: i.
        """
        models, network = server.state["models"], server.state["hypernetworks"][client]
        a = hypernetworks.weights(network, server.clients, client).tolist()
        layers, own = list(_layers(models[client]).values()), server.clients.index(client)
        count = self.kept_layers if client in server.state["trained"] else 0
        trust = [round(row[own], 9) for row in a]  # equal ones may differ in their last bits
        kept = sorted(range(len(layers)), key=lambda layer: -trust[layer])[:count]
        mixed: dict[str, Any] = {}
        for layer, names in enumerate(layers):
            if layer not in kept:
                counted = {
                    j: a_j for j, a_j in zip(server.clients, a[layer], strict=True) if a_j > 0
                }
                mixed |= mean([models[j].select(names) for j in counted], [*counted.values()])
        return Tensors((name, mixed[name]) for name in models[client] if name in mixed)

    def learn(self, server: Server, client: str, received: Tensors, trained: Tensors) -> Tensors:
        """Return the hypernetwork of a client after its step.

        Args:
            server: the server, whose models are those of which wbar_i was mixed.
            client: i.
            received: wbar_i, as `mixed` returned it.
            trained: w_i.
        """
        models, moving = server.state["models"], server.parts.trainable
        update = (trained.select(received) - received).select(moving)
        products = torch.zeros(len(_layers(trained)), len(models), dtype=torch.float64)
        for layer, names in enumerate(_layers(trained).values()):
            part = update.select(names).distinct()
            for column, j in enumerate(server.clients):
                products[layer, column] = part.dot(models[j].select(part))
        return hypernetworks.step(
            server.state["hypernetworks"][client], server.clients, client, products,
            lr=self.hypernetwork_lr,
        )  # fmt: skip

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train wbar_i.

        Args:
            client: the site.
            request: ``model``, wbar_i without the layers that stay.
        """
        model = client.fit(self.personal_model(client, request))
        if self.kept_layers:
            client.state["model"] = model
        return Message.of(model=model)

    def shared(self, server: Server) -> Mapping[str, Any]:
        """Return nothing: each client receives a model of its own. See `Algorithm.shared`."""
        return {}

    def shared_with(self, server: Server, client: str) -> Mapping[str, Any]:
        """Return the client's wbar_i. See `Algorithm.shared_with`."""
        return {"model": self.mixed(server, client)}

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """Return wbar_i with the layers that stayed. See `Algorithm.personal_model`."""
        own: Tensors = client.state.get("model", Tensors())
        mixed: Tensors = request["model"]
        return own | mixed


def _layers(model: Tensors) -> dict[str, list[str]]:
    """Return by module the names of its own tensors; tied ones stand at their first module."""
    layers: dict[str, list[str]] = {}
    for name, first in model.first_names().items():
        layers.setdefault(first.rpartition(".")[0], []).append(name)
    return layers
