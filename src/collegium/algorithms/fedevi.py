"""FedEvi (Chen et al., MICCAI 2024, https://doi.org/10.1007/978-3-031-72117-5_34)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from collegium.algorithms._dirichlet import evidence, evidential_loss, uncertainties
from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, Replies, Server, handler
from collegium.core.dataset import Batch
from collegium.core.message import Message
from collegium.core.payloads import Numbers, PartSchema
from collegium.core.settings import Fraction, NonNegative, PositiveInt, settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.training.objectives import LiveNetwork, Objective, Output

LEAST = 1e-6
"""The least a_i in a quotient, as a share of ln K."""


@settings
class FedEvi(FedAvg):
    """FedAvg whose weights follow how uncertain evidential networks are on each client's images.

    The K outputs z of a pixel, at least two, give a Dirichlet distribution over its classes,
    alpha = exp(min(z, 80)) + 1 (of a classification each case is one pixel). Clients minimise, with
    its mean p = alpha / sum alpha,

        1 - soft Dice(p, y) + kl_weight min(1, round / annealing) KL(Dir(alpha') || Dir(1)),

    where alpha' is alpha with 1 at the true class (`collegium.algorithms._dirichlet`). On the
    client's validation images a_i is the mean aleatoric uncertainty of its own model w_i, and e_i
    the mean epistemic one of the surrogate w~ = sum_i omega_i w_i under the weights of the round
    before, at first those of FedAvg. Then w <- sum_i omega_i w_i with the new

        omega_i = e_i / a_i, normalised, raised to ``floor`` at least, and normalised again.

    Both leave the site as shares of ln K, the largest that they can be. Every client receives two
    models in a round. Validation images steer the weights here and select models too, so that
    scores on them are no independent estimate; their labels are not used, and test images are not
    looked at. The class predicted is that of the largest output, which has the largest evidence;
    the probabilities of a classification are the softmax of the outputs as usual, and not p.

    What could be read: the abstract and the released code, whose equations these are. Deviations
    from it. There weights are not normalised after the floor, and keys with "bn" in their name are
    not averaged; here all that is in the model is, with the same weights. Images are predicted by
    the task's windows: uncertainties are means over the pixels of a window inside the field of
    view, then over windows. A client without validation images has FedAvg's weight, and the others
    share the rest; one without training images has none. A client that was missing comes back with
    the weight of its last round. KL is computed without the cancellation that float32 suffers at
    much evidence. The code trains for 2 epochs in batches of 8 with Adam (learning rate 0.001,
    times 0.99 after every round, weight decay 1e-5, moments kept over the rounds): these are the
    recipe's.

    Attributes:
        kl_weight: weight of the KL term.
        annealing: rounds until it has its whole weight.
        floor: least omega_i before the last normalisation.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {
        "uncertainty": Numbers(
            description="uncertainty on the validation images, as a share of the largest",
            record=True,
            least=0.0,
            most=1.0,
        )
    }
    tasks: ClassVar[frozenset[str] | None] = frozenset({"segmentation", "classification"})
    neutral: ClassVar[Mapping[str, Any] | None] = None

    kl_weight: NonNegative = 0.01
    annealing: PositiveInt = 10
    floor: Fraction = 1e-3

    def round(self, server: Server) -> None:
        """Train, form the surrogate, and average; omega stays in ``server.state["omega"]``."""
        trained = server.ask(self.train, model=server.state["model"]).collect()
        n = {client: count for client, count in trained.weights(self.weight).items() if count > 0}
        p = {client: count / sum(n.values()) for client, count in n.items()}
        old = server.state.get("omega", {})
        surrogate = _averaged(trained, {client: old.get(client, p[client]) for client in p})
        own, factors, ratios = dict(trained), trained.weights(None), {}
        for client, message in server.ask(self.assess, to=[*p], model=surrogate):
            if "uncertainty" in message:
                e, a = message["uncertainty"]["epistemic"], own[client]["uncertainty"]["aleatoric"]
                ratios[client] = factors[client] * e / max(a, LEAST)
        omega = self.weigh(p, ratios)
        server.state["omega"] = old | omega
        server.state["model"] = _averaged(trained, omega)

    def weigh(self, p: Mapping[str, float], ratios: Mapping[str, float]) -> dict[str, float]:
        """Return the weights omega_i, which sum to 1.

        Args:
            p: by client FedAvg's weight, all of which sum to 1.
            ratios: e_i / a_i of the clients among them that have validation images.
        """
        total, share = sum(ratios.values()), sum(p[client] for client in ratios)
        omega = {
            client: share * ratios[client] / total if total > 0 and client in ratios else own
            for client, own in p.items()
        }
        raised = {client: max(weight, self.floor) for client, weight in omega.items()}
        return {client: weight / sum(raised.values()) for client, weight in raised.items()}

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the received model under the evidential loss, and find a_i.

        Args:
            client: the site.
            request: ``model``, w.
        """
        share = min(1.0, client.round / self.annealing)
        model = client.fit(request["model"], objective=self.objective(self.kl_weight * share))
        reply = {"model": model, "num_examples": client.num_examples}
        return Message(reply | self.uncertainty(client, model, "aleatoric"))

    @handler
    def assess(self, client: Client, request: Message) -> Message:
        """Find e_i.

        Args:
            client: the site.
            request: ``model``, the surrogate w~.
        """
        return Message(self.uncertainty(client, request["model"], "epistemic"))

    def objective(self, strength: float) -> Objective:
        """Return the objective of local training.

        Args:
            strength: weight of the KL term.
        """

        def losses(network: LiveNetwork, batch: Batch) -> tuple[Tensor, Tensor]:
            output, label = network.predict(batch["image"]), batch["label"]
            regions = getattr(network.task, "regions", None)
            if output.shape[1] < 2 or regions is not None or label.is_floating_point():
                raise ConfigError(
                    "FedEvi needs a network with one output for each class, two at least, and "
                    "labels that are classes: name the background as a class and no regions, or "
                    "choose another algorithm"
                )
            overlap, wrong = evidential_loss(output, label, _inside(output, batch))
            return overlap, strength * wrong

        return losses

    def uncertainty(self, client: Client, model: Tensors, kind: str) -> dict[str, Any]:
        """Return the part with the mean uncertainty of a model on the client's validation images.

        Args:
            client: the site.
            model: a whole model.
            kind: "epistemic" or "aleatoric".

        Returns:
            Nothing if there are no such images.
        """

        def means_of(batch: Batch, output: Output) -> list[float]:
            both = uncertainties(evidence(output.prediction.double()) + 1)
            found = both[0 if kind == "epistemic" else 1] / math.log(output.prediction.shape[1])
            inside = _inside(output.prediction, batch)
            if inside is None:
                return found.tolist()
            windows = zip(found, inside, strict=True)
            return [float(one[where].mean()) for one, where in windows if where.any()]

        cases = client.validation_examples
        seen = client.collect(model, means_of, data=cases, whole=True, stream=kind)
        means = [mean for means in seen for mean in means]
        return {"uncertainty": {kind: min(sum(means) / len(means), 1.0)}} if means else {}


def _inside(output: Tensor, batch: Batch) -> Tensor | None:
    """Return where pixels count; None where a case has no pixels, or everywhere."""
    return batch.get("mask") if output.ndim > 2 else None


def _averaged(replies: Replies, weights: Mapping[str, float]) -> Tensors:
    """Return the mean of the clients' models under weights by client; the others have none."""
    missing = dict.fromkeys(replies.clients, 0.0)
    return Replies(iter(replies), {**missing, **weights}).mean("model", None)
