"""FML, federated mutual learning (Shen et al., 2020, https://arxiv.org/abs/2006.16765)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from collegium.algorithms._private_addition import PrivateAddition
from collegium.core.algorithm import HOME, Client, handler
from collegium.core.lazy import torch
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.settings import UnitInterval, settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.models.factory import build_fitting
from collegium.models.mixture import SECOND, WEIGHT, attach_second_network
from collegium.training.distillation import divergence

if TYPE_CHECKING:
    from torch import Tensor, nn

    from collegium.core.dataset import Batch
    from collegium.training.objectives import LiveNetwork

PRIVATE = f"{SECOND}.network"
"""The name of the private network among the submodules."""


@settings
class FML(PrivateAddition):
    """A private network at every site and a small shared one, which teach each other.

    The shared network w (the paper's meme model) is averaged as in FedAvg; the private one v, of
    any architecture, never leaves. With p_w and p_v their predictions for a batch, a step descends

        beta L(w) + (1 - beta) KL(p_v || p_w)  by w,
        alpha L(v) + (1 - alpha) KL(p_w || p_v)  by v,

    where no gradient flows to the one that teaches. The global model is w, a site's own is v.

    Deviations. PFLlib's version has alpha = 1 and beta = 0 by default, with which v learns nothing
    from w, and w nothing from labels; here both are 0.5. The divergence is a mean over pixels and a
    sum over classes (torch's default would divide by the classes too). One optimiser holds both
    networks, which without ``clip_norm`` is the same as one each. In rounds at home v learns alone.
    Personal models are not shared with sites outside, as the server does not know their networks.

    Attributes:
        alpha: the weight of the labels for the private network, against the shared one's teaching.
        beta: the same for the shared network.
        private: the private network, as under ``model``; channels that go in and come out may be
            left out. None: that of the experiment.
        networks: by site a private network of its own.
        own: the private network where the method runs; the runtime fills it in at every site.
    """

    alpha: UnitInterval = 0.5
    beta: UnitInterval = 0.5
    private: dict[str, Any] | None = None
    networks: dict[str, dict[str, Any]] = field(default_factory=dict)
    own: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {"private": self.private, **{f"networks.{s}": n for s, n in self.networks.items()}}
        for where, network in given.items():
            if network is not None and not isinstance(network.get("name"), str):
                raise ConfigError(f"FML.{where} should be a network, such as {{name: unet}}")

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:
        """Refuse a private network whose site is not there. See `Algorithm.check_setup`."""
        unknown = sorted(self.networks.keys() - {*clients})
        if unknown:
            raise ConfigError(
                f"FML.networks names {unknown[0]}, which does not train here; the sites are "
                f"{', '.join(clients)}"
            )

    def unused_sends(self) -> Collection[str]:
        """See `Algorithm.unused_sends`."""
        return ("personal",)

    def at_site(self, site: str) -> FML:
        """Return the method with the site's private network. See `Algorithm.at_site`."""
        return replace(self, own=self.networks.get(site, self.private) or {}, networks={})

    @property
    def extends(self) -> bool:
        """Whether the method is at a site. See `Algorithm.extends`."""
        return self.own is not None

    def extend(self, module: nn.Module) -> None:
        """Add the private network at a site; the server has none."""
        if self.extends:
            other = build_fitting(module, self.own) if self.own else None
            attach_second_network(module, other, alike=False)

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the shared and the private network together.

        Args:
            client: the site.
            request: ``model``, w.
        """
        own = self.private_of(client)
        return self.split(client, client.fit(request["model"] | own, objective=self.losses))

    @handler
    def train_at_home(self, client: Client, request: Message) -> Message:
        """Train the private network alone. See `Algorithm.train_at_home`."""
        own: Tensors | None = client.state.get(HOME)
        model = self.personal_model(client, request) if own is None else own

        def alone(network: LiveNetwork, batch: Batch) -> tuple[Tensor, None]:
            return network.task.loss(network.call(PRIVATE, batch["image"]), batch), None

        client.state[HOME] = client.fit(model, objective=alone, trainable=client.parts.added)
        return Message.of()

    def private_of(self, client: Client) -> Tensors:
        """Return the site's private network, at first as initialised; it predicts for the site.

        Args:
            client: the site.
        """
        own: Tensors | None = client.state.get("own")
        if own is None:
            drawn = client.initial_model.select(client.parts.added)
            own = drawn | Tensors({WEIGHT: torch.ones_like(drawn[WEIGHT])})
        return own

    def losses(self, network: LiveNetwork, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the shared network's loss and what both learn beside it.

        Args:
            network: the live network.
            batch: images and labels.
        """
        w, mask = network.predict(batch["image"]), batch.get("mask")
        v, task = network.call(PRIVATE, batch["image"]), network.task
        to_w, to_v = (divergence(s, t, task, mask=mask) for s, t in ((w, v), (v, w)))
        shared = task.loss(w, batch)
        private = self.alpha * task.loss(v, batch) + (1 - self.alpha) * to_v
        return shared, private + (1 - self.beta) * (to_w - shared)

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """Return the private network, beside the shared one. See `Algorithm.personal_model`."""
        model: Tensors = request["model"]
        return model | self.private_of(client)
