"""One encoder for each modality, averaged over the sites that have it.

The part of FedMEPD (https://arxiv.org/abs/2603.04887) that needs no data at the server.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from collegium.algorithms._modalities import (
    absent_encoders,
    encoders_by_owners,
    encoders_of,
    sum_over_senders,
)
from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, Server, handler
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import ModelPart, PartSchema
from collegium.core.settings import settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError


@settings
class ModalityEncoders(FedAvg):
    """FedAvg of a network with an encoder for each modality, for sites that lack some.

    With O_m the sites of the round that have modality m in a training image, the encoder of m
    becomes the mean of theirs, each counting the same,

        E_m = 1/|O_m| sum_{i in O_m} E_{m,i},

    and stays as it is if O_m is empty. The other tensors, of which the decoder consists, are
    averaged as in FedAvg, or stay at the site. Encoders are averaged whole, running statistics
    included. A site neither trains nor sends the encoders of modalities that it lacks. A modality
    is absent from an image if its channel is exactly 0 everywhere, as the data of sites that lack
    it have it; the network has to mask it likewise, as ``modality_unet`` does. Without encoders by
    modality the method is FedAvg.

    What could be read: a summary of the paper, and of its released code this equation. Left out of
    FedMEPD is what its server computes with images of all modalities: the decoder that is personal
    filter by filter, and the anchors to which sites attend. The code divides by 0 if no site has a
    modality.

    Attributes:
        decoder: "shared", or "private": what is not in an encoder stays at the site, and there is
            no global model.
        weighting: as in FedAvg, for the decoder.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {"model": ModelPart(some=True)}
    neutral: ClassVar[Mapping[str, Any] | None] = None

    decoder: Literal["shared", "private"] = "shared"

    @property
    def has_global(self) -> bool:  # type: ignore[override]
        """Whether there is one model for all sites: with private decoders there is none."""
        return self.decoder == "shared"

    @property
    def has_personal(self) -> bool:
        """Whether sites have models of their own: with private decoders they have."""
        return self.decoder == "private"

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:
        """Refuse private decoders without encoders to share. See `Algorithm.check_setup`."""
        if self.decoder == "private" and not encoders_of(parts):
            raise ConfigError(
                "modalityencoders with private decoders shares nothing of a network without an "
                "encoder for each modality; set model.name to modality_unet, or choose local"
            )

    def same_as(self, parts: ModelParts) -> str | None:
        """Return "fedavg" without encoders by modality. See `Algorithm.same_as`."""
        return None if encoders_of(parts) else "fedavg"

    def round(self, server: Server) -> None:
        """Average every encoder over its owners, and the decoder over all."""
        replies = server.ask(self.train, model=server.state["model"]).collect()
        server.state["model"] |= encoders_by_owners(server.parts, replies)
        if self.decoder == "shared":
            decoder = server.parts.names.difference(*encoders_of(server.parts).values())
            sites = sum_over_senders(replies, decoder, replies.weights(self.weight))
            server.state["model"] |= sites.result()

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the received model, and send it without the encoders of modalities that lack.

        Args:
            client: the site.
            request: ``model``, the global model.
        """
        own: Tensors = client.state.get("private", Tensors())
        model = client.fit(request["model"] | own)
        kept = absent_encoders(client)
        if self.decoder == "private":
            decoder = client.parts.names.difference(*encoders_of(client.parts).values())
            client.state["private"] = model.select(decoder)
            kept |= decoder
        return Message.of(model=model.without(kept), num_examples=client.num_examples)

    def personal_model(self, client: Client, request: Message) -> Tensors | None:
        """Return the encoders with the site's own decoder, if decoders are private.

        See `Algorithm.personal_model`.
        """
        if self.decoder == "shared":
            return None
        own: Tensors = client.state.get("private", Tensors())
        model: Tensors = request["model"]
        return model | own
