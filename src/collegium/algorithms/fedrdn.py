"""FedRDN (CVPR 2025, https://arxiv.org/abs/2306.09363)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from collegium.algorithms._private_addition import PrivateAddition
from collegium.core.algorithm import Client, Server, handler
from collegium.core.lazy import torch
from collegium.core.message import Message
from collegium.core.payloads import Features, PartSchema
from collegium.core.settings import settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from collegium.core.dataset import Batch
    from collegium.training.objectives import LiveNetwork, Objective

STATISTICS = "site_norm.statistics"
"""The name of mean and deviation in a model; see `collegium.algorithms._site_norm.SiteNorm`."""


@settings
class FedRDN(PrivateAddition):
    """FedAvg on images that are normalised as those of a site drawn at random.

    Once, before training, every site sends mean mu_j and standard deviation sigma_j of each channel
    of its training images, and receives those of all. In training an image becomes

        (x - mu_j) / sigma_j,  j drawn from all sites, the own one among them,

    and in prediction j is the own site. The personal model is the global one with the site's own
    mu and sigma before it; the global model has the mean of all sites' mu and sigma.

    What could be read: the abstract, the authors' code and a benchmark's version. Deviations. The
    authors' code draws mean and deviation apart, once for a batch, and normalises batches in place;
    the benchmark draws a pair for a batch. Statistics are of whole images without augmentation;
    both codes take them of augmented ones. A deviation is at least 1e-8. Images that are z-scored
    one by one have mean 0 and deviation 1 everywhere, so that nothing would happen: refused.

    Attributes:
        spread: sigma_j: "images" is the mean over images of each one's own deviation (the authors'
            code), "pixels" the deviation over all pixels of the site.
        draw: "pair" takes mu and sigma of one site, "independent" of one each.
        per: whether each "image" or each "batch" has a draw of its own.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {
        "statistics": Features(
            description="mean and standard deviation of each channel", most=1 << 12, holds="moments"
        )
    }
    tasks: ClassVar[frozenset[str] | None] = frozenset({"segmentation", "classification"})

    spread: Literal["images", "pixels"] = "images"
    draw: Literal["pair", "independent"] = "pair"
    per: Literal["image", "batch"] = "image"

    def extend(self, module: nn.Module) -> None:
        """Add the layer before the network."""
        from collegium.algorithms._site_norm import attach_site_norm

        attach_site_norm(module)

    def setup(self, server: Server) -> None:
        """Exchange the statistics, unnamed.

        Raises:
            ConfigError: the images are z-scored already.
        """
        super().setup(server)
        replies = server.ask(self.measure).values()
        found = [reply["statistics"]["statistics"] for reply in replies if "statistics" in reply]
        if not found:
            return
        table = torch.stack(sorted(found, key=lambda one: one.tolist()))  # (N, 2, C)
        if table[:, 0].abs().max() < 1e-3 and (table[:, 1] - 1).abs().max() < 1e-3:
            raise ConfigError(
                "fedrdn normalises by the sites' means and deviations, and the images have mean 0 "
                "and deviation 1 at every site; set federation.image.normalise to none, or scale"
            )
        own = server.state["model"][STATISTICS]
        server.state["model"] |= Tensors({STATISTICS: table.mean(0).to(own)})
        server.ask(self.keep_table, table=Tensors({"table": table}))

    @handler
    def measure(self, client: Client, request: Message) -> Message:
        """Keep and send the statistics of the training images, if there is any.

        Args:
            client: the site.
            request: empty.
        """
        from collegium.algorithms._site_norm import statistics_of

        cases = range(client.num_examples)
        if not cases:
            return Message.of()
        images = [client.examples.example(case).batch["image"] for case in cases]
        own = statistics_of(images, pooled=self.spread == "pixels")
        client.state["own"] = Tensors({STATISTICS: own.to(images[0])})
        return Message.of(statistics=Tensors({"statistics": own}))

    @handler
    def keep_table(self, client: Client, request: Message) -> Message:
        """Keep the statistics of all sites.

        Args:
            client: the site.
            request: ``table``, (N, 2, C).
        """
        client.state["table"] = request["table"]
        return Message.of()

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the received model on images normalised as those of drawn sites.

        Args:
            client: the site.
            request: ``model``, the global model.
        """
        received: Tensors = request["model"]
        if not client.num_examples:
            return Message.of(model=received, num_examples=0)
        table = client.state["table"]["table"]
        objective = self.objective(table, client.rng("sites"))
        return self.split(client, client.fit(received | client.state["own"], objective=objective))

    def objective(self, table: Tensor, random: torch.Generator) -> Objective:
        """Return the objective of local training.

        Args:
            table: of all sites, (N, 2, C).
            random: the generator of sites.
        """
        from collegium.algorithms._site_norm import normalised

        def losses(network: LiveNetwork, batch: Batch) -> tuple[Tensor, None]:
            images = batch["image"]
            count = len(images) if self.per == "image" else 1
            first = torch.randint(len(table), (count,), generator=random)
            second = first
            if self.draw == "independent":
                second = torch.randint(len(table), (count,), generator=random)
            drawn = normalised(images, table[first, 0], table[second, 1])
            return network.loss(network.forward(drawn), batch), None

        return losses
