"""FPFC (Yu, Liu, Wang and Sun, 2022, https://arxiv.org/abs/2211.04218)."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Annotated, Any, Literal

from annotated_types import Gt

from collegium.algorithms._fpfc_pairs import shrunk, zeta
from collegium.algorithms._tied import TiedModels
from collegium.core.algorithm import Client, Server, handler
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.settings import NonNegativeInt, Positive, settings
from collegium.core.tensors import Tensors, mean
from collegium.errors import ConfigError


@settings
class FPFC(TiedModels):
    """Fuse the models of similar clients by a penalty on the difference of every pair (ADMM).

    The objective is sum_i L_i(w_i) + 1/N sum_{i<j} g(||w_i - w_j||), where g is the SCAD penalty:
    lam r for small r, smoothed below ``smoothing``, and constant from a lam on, so that it fuses
    similar clients and leaves those far apart alone. A round of its ADMM:

        zeta_i  = 1/N sum_j (w_j + theta_ij - v_ij / rho), with theta_ji = -theta_ij, v_ji = -v_ij,
        w_i     = trained from the client's own on L_i(w) + rho/2 ||w - zeta_i||^2,
        theta_ij <- argmin g(||theta||) + rho/2 ||theta - d||^2,  d = w_i - w_j + v_ij / rho,
        v_ij    <- v_ij + rho (w_i - w_j - theta_ij).

    Local training is the recipe's, for the paper's K steps with a rate that falls. Pairs of which
    no client answered keep theta and v (the authors' code sets theta to 0). From equal models all
    would stay fused, so that training begins with ``warm_up`` rounds apart, after which theta_ij =
    w_i - w_j; the paper warms up along a path of growing lam and chooses lam on it, which is left
    out. The clusters, pairs with theta_ij near 0, are not computed: every client predicts with its
    own w_i. The server's memory and state are N (N - 1) times the fused parameters. As the authors'
    code does for deep networks, ``part: head`` fuses the head alone and averages the parameters of
    the body, all clients alike. Running statistics stay at their site. Of the paper only the
    abstract could be read: the equations follow a description of the authors' code, and were
    derived again from the objective.

    Attributes:
        lam: strength of the fusion.
        rho: of the augmented Lagrangian, and of the pull towards zeta_i; (a - 1) rho must be more
            than 1.
        a: from a lam on a difference is not penalised.
        smoothing: xi, at most lam; below it the penalty is a square.
        part: "all" parameters are fused, or the "head".
        warm_up: first rounds of single-site training.
    """

    lam: Positive = 0.4
    rho: Positive = 1.0
    a: Annotated[float, Gt(2)] = 3.7
    smoothing: Positive = 1e-6
    part: Literal["all", "head"] = "all"
    warm_up: NonNegativeInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.a - 1) * self.rho <= 1:
            raise ConfigError("(a - 1) rho must be more than 1; raise rho or a")
        if self.smoothing > self.lam:
            raise ConfigError("smoothing must be at most lam; lower it")

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:
        """Refuse a single site, and a network without the part. See `Algorithm.check_setup`."""
        super().check_setup(clients, parts)
        if not self._fused(parts):
            raise ConfigError(
                "FPFC fuses the heads, and the network has none: name it in the network's roles, "
                "or set part to all"
            )

    def setup(self, server: Server) -> None:
        """Start from the common model, with theta and v at 0."""
        super().setup(server)
        state, model = server.state, server.initial_model.select(server.parts.trainable)
        fused = self._fused(server.parts)
        state["body"] = model.without(fused)
        zero = 0.0 * model.select(fused)
        state["theta"] = {i: {j: zero for j in server.clients if j > i} for i in server.clients}
        state["v"] = state["theta"]

    def round(self, server: Server) -> None:
        """Train every w_i towards its zeta_i, then update theta and v of each pair."""
        state, apart = server.state, server.round <= self.warm_up
        body: Tensors = state["body"]
        w = {i: w_i.without(body) for i, w_i in state["parameters"].items()}
        theta, v = ({i: dict(row) for i, row in state[name].items()} for name in ("theta", "v"))
        aims = {i: Tensors() if apart else zeta(i, w, theta, v, rho=self.rho) for i in w}
        replies = self.exchange(server, {i: {"aim": aim, "body": body} for i, aim in aims.items()})
        sent = {i: reply["parameters"] for i, reply in replies}
        w |= {i: w_i.without(body) for i, w_i in sent.items()}
        for i, j in combinations(sorted(w), 2):
            if {i, j} & sent.keys():
                difference = w[i] - w[j]
                d = difference + (1 / self.rho) * v[i][j]
                theta[i][j] = d if apart else shrunk(d, self)
                v[i][j] = v[i][j] + self.rho * (difference - theta[i][j])
        state["theta"], state["v"] = theta, v
        if body and sent:
            state["body"] = mean([w_i.select(body) for w_i in sent.values()])

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the client's own model, pulled towards zeta_i after the warm-up.

        Args:
            client: the site.
            request: ``aim``, zeta_i, empty in the warm-up; ``body``, what is averaged.
        """
        client.state["model"] = self.personal_model(client, request)
        aim = request["aim"]
        return self.fit(client, aim, self.rho if aim else 0.0)

    def shared(self, server: Server) -> Mapping[str, Any]:
        """Return what is averaged."""
        return {"body": server.state["body"]}

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """Return the client's own model over the averaged body, if there is one.

        See `Algorithm.personal_model`.
        """
        model: Tensors = client.state["model"] | request["body"]
        return model

    def _fused(self, parts: ModelParts) -> frozenset[str]:
        return parts.trainable & (parts.head if self.part == "head" else parts.names)
