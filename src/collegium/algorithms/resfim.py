"""pFL-ResFIM (Zhu et al., ISBI 2026, https://arxiv.org/abs/2603.14848)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from collegium.algorithms._spectra import SpectraExchange, in_the_style_of
from collegium.core.algorithm import Client, Replies, Server, handler
from collegium.core.dataset import unchanged
from collegium.core.lazy import torch
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import Bits, Numbers, PartSchema
from collegium.core.settings import Positive, PositiveInt, settings
from collegium.core.tensors import Mean, Tensors
from collegium.errors import ClientError
from collegium.training.fisher import (
    Normaliser,
    mean_information,
    pack_mask,
    residual_information,
    top_mask,
    unpack_mask,
)


@settings
class ResFIM(SpectraExchange):
    """FedAvg in which a client keeps those parameters that depend on its images' style.

    Once, before training: every client sends the low-frequency amplitudes of its training images
    and receives those of the others. Then in every round, with F the diagonal Fisher information
    (see `collegium.training.fisher`), F' the same over each image under the amplitudes of one
    random image of each other client, and e = eps * mean of F:

    W_c  = trained from V_c
    R_c  = |F - F'| / max(F, F', e)
    M_c  = 1 for the delta percent of the trainable parameters with the largest R_c, otherwise 0
    V_c  = M_c W_c + (1 - M_c) mean_i W_i

    V_c is the client's personal model, the mean the global one.

    Deviations. Eq. 1 as printed divides |F - F'| by max(|F - F'|, e), which is 1 nearly everywhere
    and ranks nothing; three other denominators are options. Eq. 2 as printed sums the W_i, but only
    a mean keeps their scale. The printed expectation over the model's own predictions (the true
    Fisher information) contradicts its arguments; true labels are used. Only the window of
    amplitudes that is replaced leaves a site, which gives the same images as whole spectra. The
    client forms V_c from the mean and what it kept, so that masks need not travel: the same
    numbers, and one model for all on the way down. Running statistics, which have no gradient, are
    averaged. There is no released code.

    Attributes:
        weighting: "uniform" (the paper's objective) or "examples", for the mean.
        delta: percentage of the trainable parameters that stay personal; at 0 the method is FedAvg
            and no spectra are exchanged. The paper prints no value.
        fim_max_samples: most training images that a Fisher information is estimated from, drawn
            again in every round; each takes one backward pass per client.
        normaliser: denominator of R_c: "max" as above, "source" max(F, e), "absolute" none.
        eps: relative to the mean of F.
        invariant_only: average every parameter over the clients alone that do not keep it, for
            which the masks travel, one bit for a parameter.
        bn_buffers: whether a personal model takes the "average" running statistics of
            normalisation layers or keeps its "local" ones.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {
        "mask": Bits(description="which parameters stay personal"),
        "masking_rates": Numbers(
            description="share of each tensor that stays personal", record=True, tensors=True
        ),
    }
    neutral: ClassVar[Mapping[str, Any] | None] = {
        "delta": 0.0, "weighting": "examples", "bn_buffers": "average",
    }  # fmt: skip

    weighting: Literal["examples", "uniform"] = "uniform"
    delta: Annotated[float, Ge(0), Le(100)] = 20.0
    fim_max_samples: PositiveInt = 64
    normaliser: Normaliser = "max"
    eps: Positive = 1e-3
    invariant_only: bool = False
    bn_buffers: Literal["average", "local"] = "average"

    def unused_sends(self) -> Collection[str]:
        """Return masks unless the server needs them; all but FedAvg's parts at delta 0."""
        if self.delta == 0:
            return {"spectra", "mask", "masking_rates"}
        return set() if self.invariant_only else {"mask"}

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:
        """Refuse a single site. See `Algorithm.check_setup`."""
        if self.delta:
            self.require_others(clients, "set delta to 0, ")

    def setup(self, server: Server) -> None:
        """Exchange amplitudes: every client receives those of the others, unnamed.

        Raises:
            ProtocolError: fewer than two sites have training images, or their sizes differ.
        """
        super().setup(server)
        if self.delta:
            self.exchange_spectra(server)

    def round(self, server: Server) -> None:
        """Average the models, or of each parameter those of the clients that do not keep it."""
        if self.invariant_only and self.delta:
            replies = server.ask(self.train, model=server.state["model"])
            server.state["model"] = self._invariant_mean(replies, server.parts.trainable)
        else:
            super().round(server)

    def _invariant_mean(self, replies: Replies, trainable: Collection[str]) -> Tensors:
        """Return sum_i p_i (1 - M_i) W_i / sum_i p_i (1 - M_i); the plain mean where all M_i are 1.

        Buffers are averaged over all clients.
        """
        models, invariant, shares = Mean(), Mean(), Mean()
        for client, reply in replies:
            parameters = reply["model"].select(trainable)
            free = unpack_mask(reply["mask"], parameters).map(torch.logical_not)  # 1 - M_i
            p = reply[self.weight] if self.weight else 1.0
            models.add(reply["model"], p, f"client {client!r}")
            invariant.add(parameters.map(torch.mul, free), p)
            shares.add(parameters.map(lambda t, m: m.to(t.dtype), free), p)
        mean = models.result()
        return mean | mean.select(trainable).map(
            lambda whole, part, share: torch.where(share > 0, part / share, whole),
            invariant.result(),
            shares.result(),
        )

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train V_c and keep what of W_c depends on the images' style.

        Args:
            client: the site.
            request: ``model``, the mean.
        """
        model = client.fit(self.personal_model(client, request))  # W_c
        reply = {"model": model, "num_examples": client.num_examples}
        if self.bn_buffers == "local":
            client.state["statistics"] = model.select(client.parts.norm_statistics)
        if self.delta:
            mask = self.mask(client, model)  # M_c
            client.state["mask"] = pack_mask(mask)
            client.state["own"] = model.select(mask).map(lambda t, m: t[m], mask)  # M_c W_c
            rates = {name: float(m.double().mean()) for name, m in mask.distinct().items()}
            reply["masking_rates"] = rates
            if self.invariant_only:
                reply["mask"] = client.state["mask"]
        return Message(reply)

    def mask(self, client: Client, model: Tensors) -> Tensors:
        """Return M_c; a site without training images keeps nothing.

        Args:
            client: the site.
            model: W_c.

        Raises:
            ClientError: no parameter moves the loss.
            ProtocolError: the site missed the exchange of spectra.
        """
        parameters = model.select(client.parts.trainable)
        if client.num_examples == 0:
            return parameters.map(lambda t: torch.zeros_like(t, dtype=torch.bool))
        views = (unchanged, in_the_style_of(self.spectra_of_others(client)))
        own, simulated = client.fisher(model, views=views, limit=self.fim_max_samples)  # F, F'
        if mean_information(own) == 0:
            raise ClientError(
                f"the Fisher information of site {client.id!r} is zero everywhere: no parameter "
                f"moves the loss on its images; look at their labels and fields of view, or set "
                f"delta to 0"
            )
        residual = residual_information(own, simulated, self.normaliser, self.eps)  # R_c, Eq. 1
        return top_mask(Tensors((n, residual[n]) for n in parameters), self.delta)

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """Return V_c, or the received model before the client's first round.

        See `Algorithm.personal_model`.
        """
        model: Tensors = request["model"]
        statistics: Tensors = client.state.get("statistics", Tensors())
        if "mask" not in client.state:
            return model | statistics
        mean = model.select(client.parts.trainable)
        mask = unpack_mask(client.state["mask"], mean)
        kept = mean.map(torch.Tensor.masked_scatter, mask, client.state["own"])  # Eq. 2
        return model | kept | statistics
