"""pFedNet's sites: the components of their models, and the graph of those that are similar."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from collegium.core.algorithm import Client, Replies, Server, State
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import Expected, ModelPart
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, ProtocolError
from collegium.heterogeneity import graphs
from collegium.heterogeneity.survey_distances import sketch_distances
from collegium.solvers.admm import Coupling

if TYPE_CHECKING:
    from collegium.algorithms.pfednet import PFedNet

logger = logging.getLogger(__name__)

ROLES = {"decoder": "decoder", "head": "head", "all": "names"}
"""The choices of `PFedNet.personal` as fields of `ModelParts`."""


@dataclass(frozen=True)
class Component(ModelPart):
    """The tensors of a component, as the algorithm's field `personal` divides the model.

    Attributes:
        shared: whether it is the shared component; otherwise the personal one.
    """

    shared: bool = False

    @property
    def description(self) -> str:
        """See `PartSchema.description`."""
        return "the model without its personal part" if self.shared else "the model's personal part"

    def check(self, value: Any, expected: Expected) -> None:
        """Check names, shapes, dtypes and finiteness. See `ModelPart.check`."""
        role = ROLES[expected.fields["personal"]]
        only, without = (None, role) if self.shared else (role, None)
        ModelPart(only, without, difference=self.difference).check(value, expected)


def personal_names(parts: ModelParts, choice: str) -> frozenset[str]:
    """Return the names of the tensors in z.

    Args:
        parts: the roles of the model's tensors.
        choice: see `PFedNet.personal`.

    Raises:
        ConfigError: the network has no such part.
    """
    names: frozenset[str] = getattr(parts, ROLES[choice])
    if not names & parts.trainable:
        raise ConfigError(
            f"pfednet: the network's {choice} has nothing to train, so that no part is personal; "
            f"declare the role in the network, or set personal to all"
        )
    return names


def ask_to_train(server: Server, method: Callable[..., Message]) -> Replies:
    """Send all sites x, with z_n to those that do not hold their newest, and return the replies.

    Args:
        server: its state holds ``shared``, x, ``personal``, z_n by site, and ``behind``, the sites
            that do not hold their newest z_n.
        method: the handler.
    """
    state = server.state
    each = {
        site: {"personal": state["personal"][site]} if site in state["behind"] else {}
        for site in server.clients
    }
    replies = server.ask(method, each=each if state["behind"] else None, shared=state["shared"])
    state["behind"] = sorted(set(state["behind"]) - set(replies.collect().clients))
    return replies


def deliver(server: Server, method: Callable[..., Message], sites: Collection[str]) -> None:
    """Send each of some sites its z_n, and note which of them did not receive it.

    Args:
        server: see `ask_to_train`.
        method: the handler.
        sites: those whose z_n is new to them.
    """
    each = {site: {"personal": server.state["personal"][site]} for site in sites}
    replies = server.ask(method, each=each).collect()
    server.state["behind"] = sorted(set(sites) - set(replies.clients))


def newest_personal(client: Client, request: Message) -> Tensors:
    """Return z_n as it came with the request, or otherwise as the client holds it.

    Args:
        client: the site; it holds what is returned from now on.
        request: ``personal``, z_n, if the site did not hold its newest.

    Raises:
        ProtocolError: the site's state was lost.
    """
    if "personal" in request:
        client.state["personal"] = request["personal"]
    if "personal" not in client.state:
        raise ProtocolError(
            f"site {client.id!r} has lost its personal part, which the server does not send "
            f"again; bring back the site's state, or start the run again"
        )
    personal: Tensors = client.state["personal"]
    return personal


def similarity_graph(replies: Mapping[str, Message], sketch: str, k: int | None) -> State:
    """Join every site with the k sites whose sketches are nearest, and return the graph.

    Args:
        replies: by site a message with its sketch, in sorted order of the sites.
        sketch: name of the sketch.
        k: neighbours of each site; None: 3, or all others if fewer.

    Returns:
        The sites, their distances and the edges, as pairs of sites.
    """
    sites, matrix = list(replies), sketch_distances(replies, sketch)
    nearest = graphs.neighbours(matrix, min(3, len(sites) - 1) if k is None else k)
    edges = [[sites[i], sites[j]] for i, j in graphs.edges(nearest)]
    logger.info("similar sites: %s", ", ".join(" - ".join(edge) for edge in edges))
    return {"clients": sites, "distances": matrix.tolist(), "edges": edges}


def coupling_of(method: PFedNet, edges: Sequence[Sequence[str]], replies: Replies) -> Coupling:
    """Return the graph of the sites that answered, with their steps eta_n = pace_n / p_n.

    Args:
        method: its hyper-parameters.
        edges: of the graph of all sites.
        replies: of each site its pace and its number of examples.
    """
    messages = replies.values()
    weights = [message[method.weight] if method.weight else 1 for message in messages]
    etas = [
        (method.eta or message["pace"]["eta"]) * sum(weights) / weight
        for message, weight in zip(messages, weights, strict=True)
    ]
    return Coupling.of(graphs.incidence_of(replies.clients, edges), etas, method.lam, method.rho)
