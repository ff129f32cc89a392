"""An encoder for each modality, and a decoder that is personal filter by filter.

Most of FedMEPD (https://arxiv.org/abs/2603.04887), without its anchors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from collegium.algorithms._filters import combined, filters_of, judged, newcomer, overlaid
from collegium.algorithms._modalities import (
    absent_encoders,
    encoders_by_owners,
    encoders_of,
    sum_over_senders,
)
from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, Replies, Server, handler
from collegium.core.lazy import nn
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import ModelPart, PartSchema
from collegium.core.settings import Fraction, NonNegativeInt, PositiveInt, UnitInterval, settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError

if TYPE_CHECKING:
    from torch.nn import Module


@settings
class ModalityFilters(FedAvg):
    """Encoders as in `ModalityEncoders`, and decoders whose filters turn private one by one.

    **The server needs images with masks and, to be any use, with all modalities**, which it trains
    on in every round: another trust model than that of the other methods. A filter is a row of a
    weight outside the encoders, (filters, ...), and its bias follows it. With v_if the weight of
    filter f at client i, at first 1, and w_f the server's filter, the server takes

        w_f = (1 - retain) sum_i v_if w_if / sum_i v_if + retain w_f  if any v_if > 0,

    and w_f as it is otherwise; then it trains for `server_epochs`. After `warm_up` rounds it
    compares its own update a of a filter, after less before that training, with the client's b,
    after less before the client's:

        patience - 1 if cos(a, b) < 0, the full patience again if cos(a, b) > 0,
        v = momentum v + (1 - momentum) (n_i / sum n) |a| / |b|,

    and at patience 0 the filter is private for good: v is 0, and the client keeps its own. A filter
    that did not move at both is not judged. The site predicts with the server's encoders and shared
    filters and its own private ones; the global model is the server's.

    What could be read: a summary of the paper and of its released code. **Not FedMEPD as a whole**:
    the anchors (means of the hub's features, to which sites attend) and the attention are left out,
    and so are the losses of single encoders and of several scales; the loss is the task's. Tensors
    of the decoder that are neither weights nor their biases (normalisation, slopes) are averaged as
    in FedAvg, with `retain` too: what becomes of them could not be read. The code compares with the
    server's update of the first round for ever, has the sites' sizes written into it, and divides
    by 0 for a modality that no site has; here it is the present update, the sites' examples, and
    the server's encoder. v begins at 1 and drifts towards a client's share as in the code. Private
    filters are sent too, as in the code, and have no weight.

    Attributes:
        retain: the share of the server's own decoder; 0.3 in the code.
        patience: how many rounds in a row a filter may disagree.
        momentum: of v.
        warm_up: rounds without comparison; 20 by default in the code, 30 in its script.
        server_epochs: passes of the server over its data in a round.
        weighting: as in FedAvg, for the rest of the decoder.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {"model": ModelPart(some=True)}
    needs_public: ClassVar[Literal["images", "labels"] | None] = "labels"
    neutral: ClassVar[Mapping[str, Any] | None] = None

    retain: UnitInterval = 0.3
    patience: PositiveInt = 10
    momentum: Fraction = 0.95
    warm_up: NonNegativeInt = 20
    server_epochs: PositiveInt = 1

    def extend(self, module: Module) -> None:
        """Add nothing, but refuse transposed convolutions, whose first axis counts no filters."""
        for name, layer in module.named_modules():
            if isinstance(layer, nn.modules.conv._ConvTransposeNd) and "modality_" not in name:
                raise ConfigError(
                    f"modalityfilters takes the first axis of a weight as its filters, and the "
                    f"network's {name} is a transposed convolution; set model.name to modality_unet"
                )

    def setup(self, server: Server) -> None:
        """Start with all filters of all clients shared."""
        super().setup(server)
        model = server.initial_model
        first = newcomer(model.select(layers_of(model, server.parts)), self.patience)
        server.state["filters"] = dict.fromkeys(server.clients, first)

    def round(self, server: Server) -> None:
        """Average encoders and filters, train at the server, and compare the updates."""
        old: Tensors = server.state["model"]
        each = {client: self.shared_with(server, client) for client in server.clients}
        replies = server.ask(self.train, model=old, each=each).collect()
        model = old | encoders_by_owners(server.parts, replies) | self.decoder(server, replies)
        trained = server.public.fit(model, epochs=self.server_epochs)
        if server.round > self.warm_up:
            self.judge(server, replies, trained - model)
        server.state["model"] = trained

    def decoder(self, server: Server, replies: Replies) -> Tensors:
        """Return the decoder of the round.

        Args:
            server: with its model, and how the clients' filters stand.
            replies: with the clients' models.
        """
        old: Tensors = server.state["model"]
        layers = layers_of(old, server.parts)
        rest = server.parts.names.difference(*encoders_of(server.parts).values(), *layers.values())
        new = Tensors()
        if rest:
            mean = sum_over_senders(replies, rest, replies.weights(self.weight)).result()
            new = (1 - self.retain) * mean + self.retain * old.select(rest)
        factors = replies.weights(None)
        trained = [(c, m["model"]) for c, m in replies if m["num_examples"]]
        for layer, names in layers.items():
            v = [factors[c] * server.state["filters"][c]["weight"][layer] for c, _ in trained]
            for name in names:
                values = [model[name] for _, model in trained]
                new |= Tensors({name: combined(old[name], values, v, self.retain)})
        return new

    def judge(self, server: Server, replies: Replies, update: Tensors) -> None:
        """Compare the clients' updates with the server's, filter by filter.

        Args:
            server: its state holds how the filters stand, and the model before the round.
            replies: with the clients' models.
            update: of the server's own training.
        """
        old, total = server.state["model"], sum(reply["num_examples"] for _, reply in replies)
        server.state["filters"] = server.state["filters"] | {
            client: judged(
                server.state["filters"][client],
                update,
                reply["model"] - old.select(reply["model"]),
                share=reply["num_examples"] / total,
                momentum=self.momentum,
                patience=self.patience,
            )
            for client, reply in replies
            if reply["num_examples"]
        }

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the site's model; send the decoder, and the encoders of modalities that it has.

        Args:
            client: the site.
            request: ``model``, the server's, and ``shared``, which of the site's filters are.
        """
        model = client.fit(self.personal_model(client, request))
        layers = layers_of(model, client.parts)
        client.state["own"] = model.select({name for names in layers.values() for name in names})
        model = model.without(absent_encoders(client))
        return Message.of(model=model, num_examples=client.num_examples)

    def shared_with(self, server: Server, client: str) -> Mapping[str, Any]:
        """Return which of a client's filters are shared. See `Algorithm.shared_with`."""
        return {"shared": server.state["filters"][client]["patience"].map(lambda left: left > 0)}

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """Return the server's model with the client's own private filters.

        See `Algorithm.personal_model`.
        """
        model: Tensors = request["model"]
        own: Tensors | None = client.state.get("own")
        if own is None:
            return model
        return overlaid(model, own, layers_of(model, client.parts), request["shared"])


def layers_of(model: Tensors, parts: ModelParts) -> dict[str, list[str]]:
    """Return the weights outside the encoders, and what follows each; see `filters_of`.

    Args:
        model: a whole model.
        parts: the roles of its tensors.
    """
    return filters_of(model, parts, parts.names.difference(*encoders_of(parts).values()))
