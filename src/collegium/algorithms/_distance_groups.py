"""The server as a distance-aware method sees it: one group of clients, with weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from collegium.core.algorithm import LocalWork, Replies, Server, State
from collegium.core.message import Message
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError

if TYPE_CHECKING:
    import torch


class GroupServer:
    """A `Server` that is limited to a group of clients and weights their replies.

    Args:
        server: the server of all clients.
        state: the state of the method that runs on the group.
        clients: the group.
        factors: by client, the factor of its weight in a mean; 1 if it has none.
    """

    def __init__(
        self, server: Server, state: State, clients: list[str], factors: Mapping[str, float]
    ) -> None:
        self.state, self.clients = state, clients
        self.round, self.rounds, self.parts = server.round, server.rounds, server.parts
        self._server, self._factors = server, factors
        self._replies: list[Replies] = []

    def rng(self, purpose: str) -> torch.Generator:
        """Return the generator for ``purpose``, of which every group has its own."""
        return self._server.rng(self._of_group(purpose))

    def _of_group(self, name: str) -> str:
        whole = self.clients == self._server.clients
        return name if whole else f"{name}/{self.clients[0]}"

    def record(self, name: str, value: float) -> None:
        """Record a number, under a name of its own for every group. See `Server.record`."""
        self._server.record(self._of_group(name), value)

    @property
    def public(self) -> LocalWork:
        """The work of the server with public data, for the group of all clients."""
        return self._server.public

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
        """Ask clients of the group, whose replies carry their weights. See `Server.ask`."""
        clients = self.clients if to is None and each is None else to
        replies = self._server.ask(method, to=clients, each=each, **items)
        self._replies.append(Replies(iter(replies), self._factors))
        return self._replies[-1]

    def require_mean(self, method: str) -> None:
        """Check that some replies were averaged, if the clients' weights differ.

        Raises:
            ConfigError: none were.
        """
        weighs = any(factor < 1 for factor in self._factors.values())
        if weighs and not any(replies.averaged for replies in self._replies):
            raise ConfigError(
                f"{method} takes no mean of the replies, so that weights by distance do nothing in "
                f"it; set mode to clusters, or choose another algorithm"
            )


def require_sites(sites: Sequence[str], mode: str) -> None:
    """Check that there are enough sites for weights or for clusters.

    Args:
        sites: their names.
        mode: "weights" or "clusters".

    Raises:
        ConfigError: there are too few.
    """
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


def check_written_clusters(clusters: Sequence[Sequence[str]], mode: str) -> None:
    """Check clusters that were written by hand, as far as that needs no site.

    Args:
        clusters: the names of the sites in each.
        mode: "weights" or "clusters".

    Raises:
        ConfigError: the mode has no clusters, one is empty, there is only one, or a site is in two.
    """
    if mode != "clusters":
        raise ConfigError(
            f"clusters are given, but mode is {mode!r}, which has none; set mode to clusters"
        )
    if len(clusters) < 2 or not all(clusters):
        raise ConfigError(
            "clusters should name two or more clusters of at least one site each; for one cluster "
            "of all sites choose the method without distance"
        )
    counts = Counter(name for members in clusters for name in members)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ConfigError(f"clusters names site {twice[0]!r} more than once; name it once")


def require_every_site(clusters: Sequence[Sequence[str]], sites: Sequence[str]) -> None:
    """Check that clusters written by hand name the sites that train.

    Args:
        clusters: the names of the sites in each.
        sites: the names of the sites that train.

    Raises:
        ConfigError: a site is in no cluster, or a cluster names something else.
    """
    named = {name for members in clusters for name in members}
    absent, odd = sorted(set(sites) - named), sorted(named - set(sites))
    if absent:
        raise ConfigError(f"clusters does not name site {absent[0]!r}; add it to one of them")
    if odd:
        raise ConfigError(
            f"clusters names {odd[0]!r}, which is no site that trains (those are "
            f"{', '.join(sites)}); correct the name or take it out"
        )
