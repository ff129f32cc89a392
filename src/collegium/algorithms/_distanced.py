"""Distance-aware weights and clusters on top of any algorithm that averages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar, Literal

from collegium.core.algorithm import Algorithm, Client, Replies, Server, State
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import Part
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, ProtocolError
from collegium.heterogeneity.survey import (
    Array,
    Inquiry,
    Summary,
    Surveyed,
    Unit,
    asks,
    make_encoder,
)

METADATA = ("intensity_maxima", "label_volumes")
"""The parts of which the paper's metadata consist."""


class View:
    """A server as a method inside sees it: with some of the clients, and weights for them.

    Args:
        server: the server itself.
        state: what the method inside keeps.
        clients: the clients that it knows of.
        factors: by client, what its weight in a mean is multiplied by.
    """

    def __init__(
        self, server: Server, state: State, clients: list[str], factors: Mapping[str, float]
    ) -> None:
        self.state, self.clients = state, clients
        self.round, self.parts = server.round, server.parts
        self._server, self._factors = server, factors
        self._asked: list[Replies] = []

    @property
    def initial_model(self) -> Tensors:
        """The common initial model."""
        return self._server.initial_model

    def fresh_model(self, k: int) -> Tensors:
        """Return the ``k``-th initial model; 0 is the common one."""
        return self._server.fresh_model(k)

    def ask(
        self,
        method: Callable[..., Message],
        *,
        to: Collection[str] | None = None,
        each: Mapping[str, Mapping[str, Any]] | None = None,
        **items: Any,
    ) -> Replies:
        """Ask clients; their replies carry their weights."""
        wanted = self.clients if to is None and each is None else to
        replies = self._server.ask(method, to=wanted, each=each, **items)
        self._asked.append(Replies(iter(replies), self._factors))
        return self._asked[-1]

    def require_mean(self, method: str) -> None:
        """Raise a `ConfigError` unless some replies were averaged with their weights."""
        weighs = any(factor < 1 for factor in self._factors.values())
        if weighs and not any(replies.averaged for replies in self._asked):
            raise ConfigError(
                f"{method} takes no mean of the replies, so that weights by distance do nothing in "
                f"it; set mode to clusters, or choose another algorithm"
            )


@dataclass(frozen=True)
class ByDistance(Surveyed, Algorithm):
    """What makes an algorithm distance-aware; name it before the algorithm among the bases.

    Attributes:
        kind: "emd" compares intensities and label volumes, "embedding" what a network sees in the
            images.
        mode: "weights": the most distant site weighs omega times what it would. "clusters": the
            sites form two clusters that train apart, and a site predicts with its cluster's model.
        omega: factor of the most distant site's weight, above 0 and at most 1. At 1 it changes
            nothing.
        cluster_rule: "recommended" gives all clusters of the paper, "printed" is its Algorithm 1.
        summary: what leaves a site: "cases" (the paper) one number per case, "histogram" or
            "quantiles" a summary of them, and of embeddings their mean.
        bins: bins of a histogram, or steps between quantiles.
        units: "physical" takes mL or mm2 where spacings are known, "voxels" counts.
        normalise: "none" (the paper), or "pooled_std": divide each metadatum by its standard
            deviation over all cases, so that no unit drowns the other.
        between: how far two sites' embeddings are apart: "centroid", "pairwise" or "energy".
        encoder: the network that embeds an image, "file.py:factory"; empty: a seeded random one.
        grid: side of the grid to which images are resized before they are embedded.
    """

    sends: ClassVar[Mapping[str, Part]] = asks(*METADATA, "embeddings")

    kind: Literal["emd", "embedding"] = "emd"
    mode: Literal["weights", "clusters"] = "weights"
    omega: float = 0.5
    cluster_rule: Literal["recommended", "printed"] = "recommended"
    summary: Summary = "cases"
    bins: int = 32
    units: Unit = "physical"
    normalise: Literal["none", "pooled_std"] = "none"
    between: Literal["centroid", "pairwise", "energy"] = "centroid"
    encoder: str = ""
    grid: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.omega <= 1:
            raise ConfigError(f"omega is {self.omega}; choose a number above 0 and at most 1")
        if self.summary != "cases" and self.kind == "embedding" and self.between != "centroid":
            raise ConfigError(
                f"between is {self.between!r}, which takes the embedding of every case; set "
                f"summary to cases or between to centroid"
            )
        self.inquiry()

    def inquiry(self) -> Inquiry:
        """Ask for both metadata, or for embeddings."""
        parts = METADATA if self.kind == "emd" else ("embeddings",)
        return Inquiry(parts, self.summary, self.bins, self.units, self.encoder, self.grid)

    def unused_sends(self) -> Collection[str]:
        """What is not asked for, and of a method without personal models these; clusters are."""
        bare = super().personal_model == MethodType(Algorithm.personal_model, self)
        nothing = {"personal"} if bare and self.mode == "weights" else set()
        return {*super().unused_sends(), *nothing}

    @property
    def has_global(self) -> bool:  # type: ignore[override]
        """Whether there is one model for everybody: two clusters have two."""
        return self.mode == "weights" and super().has_global

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:
        """Refuse too few sites, an encoder that cannot be made, and what the method refuses."""
        super().check_setup(clients, parts)
        if self.kind == "embedding":
            make_encoder(self.encoder)
        if self.omega < 1 or self.mode == "clusters":
            _require_sites(clients, self.mode)

    def setup(self, server: Server) -> None:
        """Ask the sites once, see which is most distant, and set the method up.

        Raises:
            DataError: a site has nothing to tell.
            ProtocolError: a site did not answer.
        """
        replies = dict(server.ask(self.survey).items())
        missing = [site for site in server.clients if site not in replies]
        if missing:
            raise ProtocolError(
                f"site {missing[0]!r} gave no statistics, so that its distance is unknown; start "
                f"again when it answers, or leave it out"
            )
        server.state["distance"] = self._judge(server.clients, self.distances(replies))
        for view in self._views(server):
            super().setup(view)

    def distances(self, replies: Mapping[str, Message]) -> Array:
        """Return the distance matrix of the sites, in sorted order."""
        from collegium.heterogeneity import survey_distances

        if self.kind == "embedding":
            return survey_distances.of_embeddings(replies, self.between)
        return survey_distances.of_metadata(replies, self.inquiry(), self.normalise).matrix

    def _judge(self, sites: Sequence[str], matrix: Array) -> State:
        """Write down the matrix and what follows from it."""
        from collegium.heterogeneity import clusters

        farthest = sites[clusters.most_distant(matrix)]
        found: State = {"sites": list(sites), "matrix": matrix.tolist(), "most_distant": farthest}
        if self.mode == "weights":
            return found | {"omega": {s: self.omega if s == farthest else 1.0 for s in sites}}
        rule = clusters.printed_clusters if self.cluster_rule == "printed" else clusters.clusters
        return found | {"clusters": [[sites[i] for i in members] for members in rule(matrix)]}

    def _views(self, server: Server) -> list[View]:
        """Return the server as the method sees it: with weights, or once for each cluster."""
        found = server.state["distance"]
        if self.mode == "weights":
            return [View(server, server.state, server.clients, found["omega"])]
        states = server.state.setdefault("clusters", [{} for _ in found["clusters"]])
        pairs = zip(states, found["clusters"], strict=True)
        return [View(server, state, members, {}) for state, members in pairs]

    def round(self, server: Server) -> None:
        """Run the method's round: with weights, or in each cluster."""
        for view in self._views(server):
            super().round(view)  # type: ignore[safe-super]
            view.require_mean(type(self).__name__)

    def finish(self, server: Server) -> None:
        """Do what the method does after the last round."""
        for view in self._views(server):
            super().finish(view)

    def shared(self, server: Server) -> Mapping[str, Any]:
        """What the method shares; two clusters have nothing in common."""
        return super().shared(server) if self.mode == "weights" else {}

    def shared_with(self, server: Server, client: str) -> Mapping[str, Any]:
        """What the method shares with one client, in clusters from the client's own."""
        if self.mode == "weights":
            return super().shared_with(server, client)
        view = next(view for view in self._views(server) if client in view.clients)
        return {**super().shared(view), **super().shared_with(view, client)}

    def personal_model(self, client: Client, request: Message) -> Tensors | None:
        """The method's own personal model; in a cluster, failing that, the cluster's model."""
        personal = super().personal_model(client, request)
        if personal is None and self.mode == "clusters":
            model: Tensors = request["model"]
            return model
        return personal

    def deploy(self, server: Server) -> dict[str, Tensors]:
        """The method's models, in clusters those of each."""
        if self.mode == "weights":
            return super().deploy(server)
        models: dict[str, Tensors] = {}
        for number, view in enumerate(self._views(server), start=1):
            if super().has_global:
                models[f"cluster-{number}"] = view.state["model"]
            for name, model in super().deploy(view).items():
                if name != "global":  # the one above
                    models[f"cluster-{number}-{name}"] = model
        return models


def _require_sites(sites: Sequence[str], mode: str) -> None:
    """Say why so few sites do not do."""
    if len(sites) == 1:
        raise ConfigError(
            f"{sites[0]!r} is the only site, so that there is no other to be distant from; add "
            f"sites or choose fedavg"
        )
    if len(sites) == 2 and mode == "weights":
        raise ConfigError(
            f"of the two sites {' and '.join(sites)} neither is more distant than the other; add "
            f"sites, set omega to 1, or choose fedavg"
        )
    if len(sites) < 4 and mode == "clusters":
        raise ConfigError(
            f"{len(sites)} sites do not make two clusters of at least two; add sites, or set mode "
            f"to weights"
        )
