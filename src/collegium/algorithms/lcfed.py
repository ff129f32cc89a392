"""LC-Fed (Wang et al., ECCV 2022, https://arxiv.org/abs/2207.04655)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge

from collegium.algorithms._partial import PartialSharing
from collegium.core.algorithm import Client, Server, handler
from collegium.core.lazy import torch
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import ModelPart, PartSchema
from collegium.core.settings import NonNegativeInt, settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

OWN = "calibration.site_own"
"""Where the network holds what stays at a site; see `collegium.algorithms._calibration`."""


@settings
class LCFed(PartialSharing):
    """Private heads on a shared body that selects channels by site, and a calibration at the end.

    Channels x of the encoder's output become x (1 + sigmoid(s)), where s follows from their mean
    and maximum over space and from an embedding of the site. In a round the first ``head_steps``
    steps train the head alone, the others the rest, and the rest is averaged. After the last round
    sites exchange their heads once. With p_j what head j makes of a site's features and p_i what
    its own does, the disagreement is u = sqrt(mean_j (p_j - p_i)^2), of which the local maxima
    above a fifth of the largest are kept and smoothed by a Gaussian; so is p_i. For each class the
    features times 1 + smooth(u) and times 1 + smooth(p_i) enter one convolution of 3 x 3, which
    each site trains on the features as they are, and with which it then predicts.

    What could be read: the released code. Deviations from it. The selection's layers stand in a
    plain list there, so that they are neither trained nor averaged. The column of the first layer
    that belongs to a site is its embedding here, which only that site would train, and stays with
    it; it is trained with the body. The weight of the contrast between sites' selections is 0
    there, and the term is left out; channels are selected once, at the end of the encoder. Heads do
    not change while the convolution is trained, so that one exchange suffices. p is a softmax if
    there are several classes, and logits leave the convolution. Head and body have an optimiser
    each. At least one step of a round trains the body. As in the code the Gaussian has 1 as its
    largest weight, so that its sum over a window is 226: the convolution starts far off, and needs
    many passes (the code takes up to 300).

    Attributes:
        sites: number of sites that take part; each network holds the heads of the others.
        head_steps: steps of a round that train the head.
        calibration_epochs: passes that train the convolution; 0: no calibration, and no head
            leaves a site.
        weighting: as in FedAvg; all sites alike in the paper.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {
        "model": ModelPart(only="body", without="site_own"),
        "head": ModelPart(only="head"),
    }
    private: ClassVar[str] = "head"

    sites: Annotated[int, Ge(2)] = 3
    head_steps: NonNegativeInt = 10
    calibration_epochs: NonNegativeInt = 10
    weighting: Literal["examples", "uniform"] = "uniform"

    def unused_sends(self) -> Sequence[str]:
        """Return "head" without a calibration. See `Algorithm.unused_sends`."""
        return [] if self.calibration_epochs else ["head"]

    def extend(self, module: nn.Module) -> None:
        """Add the selection of channels, the other sites' heads and the convolution."""
        from collegium.algorithms._calibration import attach_calibration

        attach_calibration(module, self.sites)

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:
        """Refuse another number of sites, too. See `Algorithm.check_setup`."""
        super().check_setup(clients, parts)
        if len(clients) != self.sites:
            raise ConfigError(
                f"LCFed's sites is {self.sites}, and {len(clients)} take part; set sites to "
                f"{len(clients)}"
            )

    def finish(self, server: Server) -> None:
        """Send each site the heads of the others, with which it trains its convolution."""
        if not self.calibration_epochs:
            return
        heads = {c: m["head"] for c, m in server.ask(self.send_head).items() if "head" in m}
        each = {
            client: {"heads": [head for other, head in heads.items() if other != client]}
            for client in server.clients
        }
        server.ask(self.calibrate, each=each, model=server.state["model"])

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the head on the received body, then the body under the new head.

        Args:
            client: the site.
            request: ``model``, the shared body.
        """
        model, parts = self.personal_model(client, request), client.parts
        first = max(min(self.head_steps, client.num_steps - 1), 0)
        if first:
            head = parts.trainable & parts.head
            model = client.fit(model, trainable=head, steps=first, stream="head")
        fuse = {f"{OWN}.fuse.weight", f"{OWN}.fuse.bias"}
        body = parts.trainable - parts.head - fuse
        return self.split(client, client.fit(model, trainable=body, steps=client.num_steps - first))

    def split(self, client: Client, model: Tensors) -> Message:
        """Keep the head and the site's own additions; return the message with the rest.

        See `PartialSharing.split`.
        """
        own = client.parts.head | client.parts.named("site_own")
        client.state["private"] = model.select(own)
        return Message.of(model=model.without(own), num_examples=client.num_examples)

    @handler
    def send_head(self, client: Client, request: Message) -> Message:
        """Send the head, if the site has trained.

        Args:
            client: the site.
            request: empty.
        """
        own: Tensors | None = client.state.get("private")
        return Message.of() if own is None else Message.of(head=own.select(client.parts.head))

    @handler
    def calibrate(self, client: Client, request: Message) -> Message:
        """Train the convolution with all heads, and predict with it from now on.

        Args:
            client: the site.
            request: ``model``, the final body, and ``heads``, those of the other sites.
        """
        if not client.num_examples:
            return Message.of()
        model = self.personal_model(client, request)
        own = model.select(client.parts.head)
        heads = [*request["heads"], *[own] * self.sites][: self.sites - 1]  # own: no disagreement
        placed = {}
        for name in model.select(client.parts.named("heads") & client.parts.named("site_own")):
            number, _, rest = name.removeprefix(f"{OWN}.heads.").partition(".")
            [source] = [n for n in own if n == rest or n.endswith(f".{rest}")]
            placed[name] = heads[int(number)][source]
        active = torch.ones_like(model[f"{OWN}.active"])
        model = model | Tensors(placed) | Tensors({f"{OWN}.active": active})
        self.split(
            client,
            client.fit(
                model, trainable={f"{OWN}.fuse.weight", f"{OWN}.fuse.bias"},
                epochs=self.calibration_epochs, stream="calibration",
            ),
        )  # fmt: skip
        return Message.of()
