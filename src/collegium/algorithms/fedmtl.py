"""Federated multi-task learning (Smith et al., 2017, https://arxiv.org/abs/1705.10467)."""

import math
from typing import Literal

from collegium.algorithms._tied import TiedModels
from collegium.core.algorithm import Client, Server, handler
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.settings import NonNegative, settings
from collegium.core.tensors import mean


@settings
class FedMTL(TiedModels):
    """Train a model for every client under a penalty that ties all (MOCHA's primal objective).

    With the clients' parameters w_i as columns of W the objective is

        sum_i L_i(w_i) + lam/2 tr(W Omega W'),  Omega = (I - 11'/N)^2,

    whose penalty is lam/2 sum_i ||w_i - mean_j w_j||^2: mean-regularised multi-task learning. In a
    round every client trains its w_i from where it was, with the others' as they were sent last, so
    that the gradient of the penalty is lam (w_i - mean_j w_j), whose mean holds the live w_i.

    This is the baseline that libraries and papers' tables call FedMTL or MOCHA: Omega is fixed, and
    local training is the recipe's. MOCHA itself learns Omega, weighs it against a ridge penalty and
    solves the dual of a convex problem. The libraries add, on their own,
    c (||W||^2 + ||(1 - 1/N) sum_j w_j||^2), c = 10^-(floor(log10(d) + 1) + 1) for d parameters: the
    1 of I - 11'/N became a matrix of ones, so that it shrinks models and ties none ("released"). In
    PFLlib and in GRACE's code W is detached, so that it has no gradient at all ("detached"): their
    FedMTL is single-site training. The libraries send every client all of W; the mean of the others
    gives the same gradient. Parameters are tied, running statistics stay at their site. d counts
    parameters, where the libraries count buffers too.

    Attributes:
        penalty: "mean" as above; "released" or "detached" is that of released code.
        lam: strength of "mean"; papers' tables print none. At 0 the method is single-site training.
    """

    penalty: Literal["mean", "released", "detached"] = "mean"
    lam: NonNegative = 0.1

    def same_as(self, parts: ModelParts) -> str | None:
        """Return "local" without a gradient of the penalty. See `Algorithm.same_as`."""
        alone = self.penalty == "detached" or (self.penalty == "mean" and self.lam == 0)
        return "local" if alone else None

    def round(self, server: Server) -> None:
        """Send every client the mean of the others, and keep the w_i that come back."""
        w, count = server.state["parameters"], len(server.clients)
        others = {i: mean([w_j for j, w_j in w.items() if j != i]) for i in w}
        each = {i: {"others": found, "clients": count} for i, found in others.items()}
        self.exchange(server, each)

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the client's own model under the penalty.

        Args:
            client: the site.
            request: ``others``, the mean of the other clients' parameters; ``clients``, N.
        """
        u, rest = request["others"], 1 - 1 / request["clients"]
        if self.penalty == "released":
            c = 10.0 ** -(math.floor(math.log10(u.numel()) + 1) + 1)
            # 2 c (w + rest^2 sum_j w_j), with sum_j w_j = w + (N - 1) u
            own = 1 + rest**2
            others = rest**2 * (request["clients"] - 1)
            return self.fit(client, (-others / own) * u, 2 * c * own)
        # w - mean_j w_j = rest (w - u)
        return self.fit(client, u, 0.0 if self.penalty == "detached" else self.lam * rest)
