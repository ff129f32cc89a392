"""GRACE (Zhang et al., MICCAI 2023, https://doi.org/10.1007/978-3-031-43898-1_2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge

from collegium.algorithms._grace_losses import Alignment
from collegium.algorithms._grace_weights import (
    consistency,
    nonnegative,
    reweighted,
    similarities,
)
from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, Replies, Server, handler
from collegium.core.dataset import Batch
from collegium.core.lazy import torch
from collegium.core.message import Message
from collegium.core.settings import NonNegative, Positive, settings
from collegium.core.tensors import Tensors
from collegium.training.alignment import contrastive, pool
from collegium.training.meta import look_ahead, split_batch

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.training.objectives import LiveNetwork, Objective


@settings
class Grace(FedAvg):
    """Correct gradients twice: at clients by a look ahead, at the server by their consistency.

    A client splits every batch in two halves, tr and te (Eq. 1-2):
        theta' = theta - inner_lr grad L(theta; tr)
        the optimiser's gradient, at theta, is d/dtheta [L(theta'; te) + beta A(h_g(te), h'(te))]
    where A compares the features that enter the head, h_g of the model received and h' of theta'.
    The server, with delta_m = theta_m - theta_g (Eq. 3-5):
        sigma_mn = cos(delta_m, delta_n), c_m = mean over n of sigma_mn, p'_m ~ c_m p_m
        theta_g <- theta_g + global_lr sum_m p'_m delta_m
    The personal model is theta_m after training and before averaging. `docs/algorithms/grace.md`
    lists what the paper and its released code, whose client files are empty, do otherwise: first of
    all the paper prints theta_g - eta_g delta, which moves away from the clients.

    Attributes:
        client: "meta" looks ahead as above; "plain" is L(theta) + beta A(h_g, h) on whole batches.
        order: 1 takes the gradient at theta' as it is; 2 multiplies it by I - inner_lr Hessian.
        inner_lr: step of the look ahead, plain gradient descent; None: this round's learning rate.
        alignment: A: "coral", "mmd", "adversarial" or "none".
        beta: weight of A; 1 in the paper, 0.1 in the commands of the released code.
        features: "pooled" compares examples by the mean of their features over space, "pixels" the
            features of single pixels.
        pixels: how many pixels are drawn from a batch.
        adversary_lr: learning rate of the classifier that "adversarial" misleads (Adam).
        base: "moon" adds MOON's mu L_con to the loss at theta'.
        mu: weight of L_con.
        temperature: tau of L_con.
        server: "consistency" weighs as above; "plain" as FedAvg does.
        similarity: "total" is the cosine over all parameters at once, "split" the mean of the
            tensors' own cosines, "reweight" that with weights that fall linearly from the first
            tensor to 0 at the last.
        include_self: whether c_m counts sigma_mm = 1 (the paper) or not (the released code).
        negative: what becomes of negative c: "shift" raises all by -min c + 0.001 (the released
            code), "relu" raises what is below 0.001 to it.
        global_lr: the server's step, eta_g.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = {
        "client": "plain", "alignment": "none", "base": "fedavg", "server": "plain",
        "global_lr": 1.0,
    }  # fmt: skip

    client: Literal["meta", "plain"] = "meta"
    order: Literal[1, 2] = 1
    inner_lr: NonNegative | None = None
    alignment: Literal["coral", "mmd", "adversarial", "none"] = "coral"
    beta: NonNegative = 1.0
    features: Literal["pooled", "pixels"] = "pooled"
    pixels: Annotated[int, Ge(2)] = 512
    adversary_lr: Positive = 7e-4
    base: Literal["fedavg", "moon"] = "fedavg"
    mu: NonNegative = 1.0
    temperature: Positive = 0.5
    server: Literal["consistency", "plain"] = "consistency"
    similarity: Literal["total", "split", "reweight"] = "total"
    include_self: bool = False
    negative: Literal["shift", "relu"] = "shift"
    global_lr: Positive = 1.0

    def round(self, server: Server) -> None:
        """Move theta_g by the clients' updates, weighted by their consistency.

        theta_g + eta_g sum p' delta is computed as theta_g + eta_g (mean - theta_g), where mean is
        sum p' theta_m: at eta_g = 1 the mean itself. Buffers are averaged with p'. The weights p'
        of the round are kept in ``server.state["weights"]``.
        """
        theta_g, weight = server.state["model"], self.weight
        replies = server.ask(self.train, model=theta_g)
        if self.server == "consistency":
            p = self.weights(server, replies, theta_g.select(server.parts.trainable))  # p'
            server.state["weights"] = p
            replies, weight = Replies(iter(replies), p), None
        mean = replies.mean("model", weight)  # sum_m p'_m theta_m
        theta = mean.select(server.parts.trainable)
        if self.global_lr != 1:
            start = theta_g.select(theta)
            theta = start + self.global_lr * (theta - start)  # theta_g + eta_g sum_m p'_m delta_m
        server.state["model"] = mean | theta

    def weights(self, server: Server, replies: Replies, theta_g: Tensors) -> dict[str, float]:
        """Return p'_m of every client (Eq. 3-5); one without training examples is not compared.

        Both sides of Eq. 4, sum_m p_m c_m / sum_m p_m and sum_m p'_m c_m, are recorded as
        ``consistency/before`` and ``consistency/after``. The second is never smaller: p' is p times
        a function of c that does not fall, so that by Chebyshev's sum inequality the mean of c
        cannot fall either, and no condition on p is needed.

        Args:
            server: records them.
            replies: theta_m and the number of examples of each client; they are held.
            theta_g: the parameters that the clients received.
        """
        messages = replies.collect().items()
        p = {client: float(m[self.weight]) if self.weight else 1.0 for client, m in messages}
        compared = [client for client in p if p[client] > 0]
        theta = [m["model"].select(theta_g) for client, m in messages if client in compared]
        if not theta:
            return p
        sigma = similarities(theta, theta_g, self.similarity)  # sigma_mn = cos(delta_m, delta_n)
        c = consistency(sigma, include_self=self.include_self)  # c_m = mean_n sigma_mn
        corrected = reweighted(p, nonnegative(c, self.negative))  # p'_m ~ c_m p_m
        for name, shares in (("before", p), ("after", corrected)):  # the sides of Eq. 4
            mean_c = np.average(c, weights=[shares[client] for client in compared])
            server.record(f"consistency/{name}", float(mean_c))
        return corrected

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train theta_g on the corrected objective; theta_m is the personal model.

        Args:
            client: the site.
            request: ``model``, theta_g.
        """
        theta_g = request["model"]
        align = Alignment(self, client) if self.alignment != "none" and self.beta > 0 else None
        contrasted = self.base == "moon" and self.mu > 0
        previous = client.state.get("personal") if contrasted else None
        corrected = self.client == "meta" or align is not None or previous is not None
        objective = self.objective(theta_g, previous, align) if corrected else None
        theta_m = client.fit(theta_g, objective=objective)
        client.state["personal"] = theta_m
        if align is not None:
            client.state |= align.state()
        return Message.of(model=theta_m, num_examples=client.num_examples)

    def objective(
        self, theta_g: Tensors, previous: Tensors | None, align: Alignment | None
    ) -> Objective:
        """Return what one local step minimises, as a function of theta and a batch (Eq. 1-2).

        Args:
            theta_g: the model received.
            previous: the client's model of its last round, for MOON's loss; None: without it.
            align: A; None: without it.
        """

        def losses(network: LiveNetwork, batch: Batch) -> tuple[Tensor, Tensor | None]:
            if self.client == "plain":
                output = network.forward(batch["image"])
            else:
                train, batch = split_batch(batch, 2)  # tr, te
                lr = network.lr if self.inner_lr is None else self.inner_lr
                ahead = look_ahead(network, train, lr=lr, order=self.order)  # theta', Eq. 1
                output = network.forward(batch["image"], ahead, learn_statistics=False)
            loss = network.loss(output, batch)  # L(theta'; te)
            if align is None and previous is None:
                return loss, None
            h, h_g = output.features, network.reference(batch["image"], theta_g).features
            added = torch.zeros_like(loss)
            if align is not None:
                added = added + self.beta * align(h_g, h)  # beta A(h_g, h'), Eq. 2
            if previous is not None:
                h_p = network.reference(batch["image"], previous).features
                term = contrastive(pool(h), pool(h_g), pool(h_p), temperature=self.temperature)
                added = added + self.mu * term  # mu L_con
            return loss, added

        return losses

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """Return theta_m, or theta_g before the client's first round.

        See `Algorithm.personal_model`.
        """
        model: Tensors = client.state.get("personal", request["model"])
        return model
