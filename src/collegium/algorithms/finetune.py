"""FedAvg followed by local fine-tuning (e.g. Wang et al., 2019, https://arxiv.org/abs/1910.10252)."""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, Server, handler
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.settings import PositiveInt, settings
from collegium.core.tensors import Tensors


@settings
class FineTune(FedAvg):
    """FedAvg whose clients train the final model further on their own data, once, at the end.

    All parameters move; the learning rate is that of a next round. The fine-tuning comes on top of
    the rounds' budget.

    Attributes:
        epochs: passes over the site's data; with ``training.local_steps`` that many times the local
            steps.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = {}
    only_averaged: ClassVar[frozenset[str] | None] = frozenset({"model", "num_examples"})
    private_fits: ClassVar[int] = 1

    epochs: PositiveInt = 1

    @property
    def final_epochs(self) -> int:
        """The passes of the fine-tuning. See `Algorithm.final_epochs`."""
        return self.epochs

    def finish(self, server: Server) -> None:
        """Fine-tune the final model at every client."""
        server.ask(self.fine_tune, model=server.state["model"])

    @handler
    def fine_tune(self, client: Client, request: Message) -> Message:
        """Train the final global model on the site's data and keep the result.

        Args:
            client: the site.
            request: ``model``, the global model.
        """
        steps = None if client.local_steps is None else self.epochs * client.local_steps
        epochs = self.epochs if steps is None else None
        client.state["personal"] = client.fit(
            request["model"], epochs=epochs, steps=steps, trainable=self.tuned(client.parts)
        )
        return Message.of()

    def tuned(self, parts: ModelParts) -> Collection[str] | None:
        """Return the names of the parameters that are fine-tuned; None: all."""
        return None

    def personal_model(self, client: Client, request: Message) -> Tensors | None:
        """Return the fine-tuned model, which exists after the last round only.

        See `Algorithm.personal_model`.
        """
        model: Tensors | None = client.state.get("personal")
        return model
