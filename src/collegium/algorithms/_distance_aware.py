"""Distance-aware weights and clusters on top of any algorithm that averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from collegium.algorithms._distance_groups import (
    GroupServer,
    check_written_clusters,
    require_every_site,
    require_sites,
)
from collegium.core.algorithm import Algorithm, Client, Server, State
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import PartSchema
from collegium.core.settings import PositiveInt, Share, settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.heterogeneity import clusters
from collegium.heterogeneity.embeddings import make_encoder
from collegium.heterogeneity.survey import Summary, SurveyMixin, SurveyQuestions, Unit, survey_parts
from collegium.heterogeneity.survey_distances import embedding_distances, metadata_distances

METADATA = ("intensity_maxima", "label_volumes")
"""The parts of which the paper's metadata consist."""


@settings
class DistanceAware(SurveyMixin, Algorithm):
    """A mix-in for distance-aware algorithms; name it before the algorithm among the bases.

    ``super()`` is the algorithm, which runs on a `GroupServer`: all clients with weights, or once
    for each cluster. `collegium.algorithms.distance.Distance` has the equations.

    Attributes:
        kind: "emd" compares intensities and label volumes, "embedding" a network's features of the
            images.
        mode: "weights": the weight of the most distant site is multiplied by omega. "clusters": the
            sites form clusters that train apart, and a site predicts with its cluster's model.
        omega: factor of the most distant site's weight, above 0 and at most 1. At 1 it changes
            nothing.
        cluster_rule: "recommended" gives all clusters of the paper, "printed" is its Algorithm 1;
            both make two.
        clusters: the names of the sites in each cluster, every site once, in place of a rule. No
            site is surveyed then.
        summary: what leaves a site: "cases" (the paper) one number per case, "histogram" or
            "quantiles" a summary of them, and of embeddings their mean.
        bins: bins of a histogram, or steps between quantiles.
        units: "physical" measures in mL or mm2 if spacings are known, "voxels" counts.
        normalise: "none" (the paper), or "pooled_std": divide each metadatum by its standard
            deviation over all cases, so that no unit dominates.
        between: the distance of two sites' embeddings: "centroid", "pairwise" or "energy".
        encoder: the network that embeds an image, "file.py:factory"; empty: a seeded random one.
        grid: side of the grid to which images are resized before they are embedded.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = survey_parts(*METADATA, "embeddings")

    kind: Literal["emd", "embedding"] = "emd"
    mode: Literal["weights", "clusters"] = "weights"
    omega: Share = 0.5
    cluster_rule: Literal["recommended", "printed"] = "recommended"
    clusters: tuple[tuple[str, ...], ...] = ()
    summary: Summary = "cases"
    bins: PositiveInt = 32
    units: Unit = "physical"
    normalise: Literal["none", "pooled_std"] = "none"
    between: Literal["centroid", "pairwise", "energy"] = "centroid"
    encoder: str = ""
    grid: PositiveInt = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.summary != "cases" and self.kind == "embedding" and self.between != "centroid":
            raise ConfigError(
                f"between is {self.between!r}, which takes the embedding of every case; set "
                f"summary to cases or between to centroid"
            )
        if self.clusters:
            check_written_clusters(self.clusters, self.mode)

    def questions(self) -> SurveyQuestions:
        """Return the questions: both metadata, or embeddings; with clusters by hand none."""
        parts: tuple[str, ...] = METADATA if self.kind == "emd" else ("embeddings",)
        if self.clusters:
            parts = ()
        return SurveyQuestions(parts, self.summary, self.bins, self.units, self.encoder, self.grid)

    @property
    def has_global(self) -> bool:  # type: ignore[override]
        """Whether there is one model for all sites: every cluster has one."""
        return self.mode == "weights" and super().has_global

    @property
    def has_personal(self) -> bool:
        """Whether sites have models of their own: with clusters every method's have."""
        bare = super().personal_model == MethodType(Algorithm.personal_model, self)
        return self.mode == "clusters" or (not bare and super().has_personal)

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:
        """Refuse too few sites, an unusable encoder, and what the method refuses.

        See `Algorithm.check_setup`.
        """
        super().check_setup(clients, parts)
        if self.clusters:
            require_every_site(self.clusters, clients)
        else:
            if self.kind == "embedding":
                make_encoder(self.encoder)
            if self.omega < 1 or self.mode == "clusters":
                require_sites(clients, self.mode)
        if self.needs_public and self.mode == "clusters":
            raise ConfigError(
                "the server's public data are there once, and every cluster would need its own; "
                "set mode to weights, or choose another algorithm"
            )

    def same_as(self, parts: ModelParts) -> str | None:
        """Return the method that it is, by distance unless all sites weigh as they do without.

        See `Algorithm.same_as`.
        """
        found: str | None = super().same_as(parts)
        weighted = self.omega < 1 or self.mode == "clusters"
        return f"{found}+distance" if found and weighted else found

    def setup(self, server: Server) -> None:
        """Survey the sites once, unless clusters are written, and set the method up.

        Raises:
            DataError: a site has no training cases.
            ProtocolError: a site did not reply.
        """
        if self.clusters:
            written = [sorted(members) for members in self.clusters]
            server.state["distance"] = {"sites": list(server.clients), "clusters": written}
        else:
            server.state["distance"] = self._surveyed(server)
        if self.mode == "clusters":
            server.state["clusters"] = [{} for _ in server.state["distance"]["clusters"]]
        for group in self._groups(server):
            super().setup(group)

    def _surveyed(self, server: Server) -> State:
        """Survey the sites; return their distances and what follows from them."""
        replies = self.collect_statistics(server)
        if self.kind == "embedding":
            matrix = embedding_distances(replies, self.between)  # Eq. 1
        else:
            matrix = metadata_distances(replies, self.questions(), self.normalise).matrix
        return self.distance_state(server.clients, matrix)

    def distance_state(self, sites: Sequence[str], matrix: NDArray[np.float64]) -> State:
        """Return the matrix, the most distant site, and the weights or clusters that follow.

        Args:
            sites: their names, sorted.
            matrix: D, (N, N).
        """
        farthest = sites[clusters.most_distant(matrix)]  # i_max = argmax_i sum_j D_ij
        found: State = {"sites": list(sites), "matrix": matrix.tolist(), "most_distant": farthest}
        if self.mode == "weights":
            return found | {"omega": {s: self.omega if s == farthest else 1.0 for s in sites}}
        rule = clusters.printed_clusters if self.cluster_rule == "printed" else clusters.clusters
        return found | {"clusters": [[sites[i] for i in members] for members in rule(matrix)]}

    def _groups(self, server: Server) -> list[GroupServer]:
        """Return all clients with weights, or each cluster."""
        found = server.state["distance"]
        if self.mode == "weights":
            return [GroupServer(server, server.state, server.clients, found["omega"])]
        pairs = zip(server.state["clusters"], found["clusters"], strict=True)
        return [GroupServer(server, state, members, {}) for state, members in pairs]

    def round(self, server: Server) -> None:
        """Run the method's round: with weights (Eq. 2), or in each cluster."""
        for group in self._groups(server):
            super().round(group)  # type: ignore[safe-super]
            group.require_mean(type(self).__name__)

    def finish(self, server: Server) -> None:
        """Run what the method does after the last round."""
        for group in self._groups(server):
            super().finish(group)

    def shared(self, server: Server) -> Mapping[str, Any]:
        """Return what the method shares; clusters have nothing in common."""
        return super().shared(server) if self.mode == "weights" else {}

    def shared_with(self, server: Server, client: str) -> Mapping[str, Any]:
        """Return what the method shares with one client, in its own cluster if there are clusters.

        See `Algorithm.shared_with`.
        """
        if self.mode == "weights":
            return super().shared_with(server, client)
        group = next(group for group in self._groups(server) if client in group.clients)
        return {**super().shared(group), **super().shared_with(group, client)}

    def personal_model(self, client: Client, request: Message) -> Tensors | None:
        """Return the method's own personal model; without one, in a cluster, the cluster's model.

        See `Algorithm.personal_model`.
        """
        personal = super().personal_model(client, request)
        if personal is None and self.mode == "clusters":
            model: Tensors = request["model"]
            return model
        return personal

    def deploy(self, server: Server) -> dict[str, Tensors]:
        """Return the method's models, of each cluster if there are clusters."""
        if self.mode == "weights":
            return super().deploy(server)
        models: dict[str, Tensors] = {}
        for number, group in enumerate(self._groups(server), start=1):
            if super().has_global:
                models[f"cluster-{number}"] = group.state["model"]
            for name, model in super().deploy(group).items():
                if name != "global":  # the one above
                    models[f"cluster-{number}-{name}"] = model
        return models
