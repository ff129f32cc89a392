"""FedAS (Yang, Huang and Ye, CVPR 2024).

https://openaccess.thecvf.com/content/CVPR2024/html/Yang_FedAS_Bridging_Inconsistency_in_Personalized_Federated_Learning_CVPR_2024_paper.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from collegium.algorithms._partial import PartialSharing
from collegium.core.algorithm import Client, Replies, Server, handler
from collegium.core.dataset import Batch
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import ModelPart, Numbers, PartSchema
from collegium.core.settings import NonNegativeInt, PositiveInt, settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.training.alignment import class_means, prototypes
from collegium.training.fisher import mean_information

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.training.objectives import LiveNetwork, Objective


@settings
class FedAS(PartialSharing):
    """A shared body under private heads: bodies are aligned on arrival, and weighted by Fisher.

    A client trains the received body so that its features resemble those of the client's own body
    of its last round, then its whole model as usual, and sends the body with the trace F_i of its
    Fisher information. The server averages the bodies with the weights F_i / sum_j F_j, or by
    ``weighting`` if every F_i is 0. The alignment minimises, with the head frozen, the sum over the
    classes y of a batch of the mean square of f - c_y, where f are the features that enter the head
    and c_y is the mean of those of class y under the old body. The personal model is the aligned
    body with the client's own head; a client without an old body does not align.

    Classes of a segmentation are compared image by image, by the mean of the features over the
    pixels of the class inside the field of view. Where labels are no classes, each example is
    compared with its own features under the old body.

    What could be read: the abstract, the released code and PFLlib's version. Deviations from the
    code. There every client starts its alignment where the last one ended, as all share one object,
    and running statistics never leave a client: here each client aligns what it received, and the
    whole body is averaged with the same weights, its statistics included. The old body runs in
    evaluation mode, the aligned one in training mode (there, in whatever mode they were left). F_i
    is that of single samples, in evaluation mode; the code squares the gradients of whole batches,
    which become smaller the larger a batch is. Alignment uses the recipe's optimiser and learning
    rate, instead of SGD with 0.01. It takes steps beyond those of the recipe, also where that
    counts in steps, and is repeated for every evaluation.

    Attributes:
        align_epochs: passes over the data that align a body.
        fisher: F_i: "sum" over the training examples, which grows with their number, as in the
            released code; "mean" over them.
        fisher_examples: at most so many examples are taken for F_i, drawn in every round; None:
            all.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {
        "model": ModelPart(without="head"),
        "fisher": Numbers(description="trace of the Fisher information", least=0.0),
    }
    private: ClassVar[str] = "head"

    align_epochs: NonNegativeInt = 1
    fisher: Literal["sum", "mean"] = "sum"
    fisher_examples: PositiveInt | None = None

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:
        """Refuse a network without a head, too. See `Algorithm.check_setup`."""
        super().check_setup(clients, parts)
        if not parts.head:
            raise ConfigError(
                "FedAS aligns the features that enter the head, and the network has none: name it "
                "in the network's roles, or choose fedavg"
            )

    def round(self, server: Server) -> None:
        """Average the bodies; the weights of the round stay in ``server.state["weights"]``."""
        replies = server.ask(self.train, model=server.state["model"]).collect()
        factors = replies.weights(None)
        weights = {client: factors[client] * m["fisher"]["trace"] for client, m in replies}
        if not any(weights.values()):
            weights = replies.weights(self.weight)
        server.state["model"] |= Replies(iter(replies), weights).mean("model", None)
        total = sum(weights.values())
        server.state["weights"] = {client: weight / total for client, weight in weights.items()}

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the aligned body with the client's own head, and estimate F_i.

        Args:
            client: the site.
            request: ``model``, the shared body.
        """
        model = client.fit(self.personal_model(client, request))
        client.state["body"] = model.without(client.parts.head)
        trace = 0.0
        if client.num_examples:
            [diagonal] = client.fisher(model, limit=self.fisher_examples)
            trace = mean_information(diagonal) * diagonal.numel()
            trace *= client.num_examples if self.fisher == "sum" else 1
        return Message({**self.split(client, model), "fisher": {"trace": trace}})

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """Return the received body, aligned, with the client's own head.

        See `Algorithm.personal_model`.
        """
        model = super().personal_model(client, request)
        body: Tensors | None = client.state.get("body")
        if body is None or not client.num_examples or not self.align_epochs:
            return model
        objective = self.objective(client, model | body)
        trained = client.parts.trainable - client.parts.head
        return client.fit(
            model, objective=objective, trainable=trained, epochs=self.align_epochs, stream="align"
        )

    def objective(self, client: Client, old: Tensors) -> Objective:
        """Return the objective of the alignment.

        Args:
            client: the site.
            old: a whole model with the client's body of its last round.
        """
        seen = client.collect(
            old, lambda batch, output: class_means(output.features, batch), stream="prototypes"
        )
        c = prototypes([means for means in seen if means is not None])

        def losses(network: LiveNetwork, batch: Batch) -> tuple[Tensor, None]:
            features = network.forward(batch["image"]).features
            means = class_means(features, batch)
            if means is None:
                target = network.reference(batch["image"], old).features
                return (features - target).square().mean(), None
            vectors, classes = means
            # crops may show a class that those of the prototypes did not
            gaps = [
                (vectors[classes == y] - c[y]).square().mean()
                for y in sorted({*classes.tolist()} & c.keys())
            ]
            return sum(gaps, 0.0 * vectors.sum()), None

        return losses
