"""IOP-FL, inside personalisation (Jiang et al., 2023, https://arxiv.org/abs/2204.08467)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, handler
from collegium.core.message import Message
from collegium.core.settings import UnitInterval, settings
from collegium.core.tensors import Tensors


@settings
class IOPFL(FedAvg):
    """FedAvg whose clients accumulate their own trajectory into a personal model P.

    P^{t+1} = (1 - tau) P^t + tau w_k^{t+1} with P^0 = w_g^0, where w_k^{t+1} is the client's model
    after local training from the received one, and so holds both the last global update (its start)
    and the new local one. Eq. 4 as printed, (1 - tau) P - tau (...), would shrink the weights
    tenfold in every round; this is the form of the released code, whose alpha = 0.1 is 1 - tau. It
    covers running statistics too; integer counters keep the maximum. The released code shares
    references instead of copies in its first round, so that all clients but the last start from
    w_g^0: here every client applies the formula from the first round on.

    Attributes:
        tau: weight of the newest local model.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = {}

    tau: UnitInterval = 0.9

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train as FedAvg does and move the personal model towards the result.

        Args:
            client: the site.
            request: ``model``, the global model.
        """
        reply = super().train(client, request)
        personal = client.state.get("personal", request["model"])
        client.state["personal"] = (1 - self.tau) * personal + self.tau * reply["model"]
        return reply

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """Return P, or the received model before the client's first round.

        See `Algorithm.personal_model`.
        """
        model: Tensors = client.state.get("personal", request["model"])
        return model
