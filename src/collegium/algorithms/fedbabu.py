"""FedBABU (Oh, Kim and Yun, 2022, https://arxiv.org/abs/2106.06042)."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

from collegium.algorithms.finetune import FineTune
from collegium.core.algorithm import Client, Server, handler
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import ModelPart, PartSchema
from collegium.core.settings import PositiveInt, settings
from collegium.errors import ConfigError


@settings
class FedBABU(FineTune):
    """FedAvg over the body, under a head that stays random; then local fine-tuning (Algorithm 1).

    In the rounds clients train and send the body alone, below the common initial head. The global
    model is the averaged body with that head. After the last round every client fine-tunes the
    global model once, on top of the rounds' budget: that is its personal model.

    The head is no parameter of the optimiser in the rounds, so that neither momentum nor weight
    decay moves it (the authors' code gives it the learning rate 0). Its initial weights are those
    of the network; the orthogonal ones of the paper's appendix are the network's to choose. The
    head, the network's last layer, travels down with the body in every round, although it is the
    same in all. Fine-tuning has the learning rate of a next round and the recipe's optimiser.

    Attributes:
        epochs: passes of the fine-tuning over the site's data, 5 in the authors' code; with
            ``training.local_steps`` that many times the local steps.
        part: what is fine-tuned: "all" parameters (the paper's main results), the "head" or the
            "body".
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {"model": ModelPart(without="head")}
    only_averaged: ClassVar[frozenset[str] | None] = frozenset({"model", "num_examples"})
    private_fits: ClassVar[int] = 1
    neutral: ClassVar[Mapping[str, Any] | None] = None

    epochs: PositiveInt = 5
    part: Literal["all", "head", "body"] = "all"

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:
        """Refuse a network without a head, or with nothing else. See `Algorithm.check_setup`."""
        if not parts.head or not parts.trainable & parts.body:
            missing = "nothing to train but its head" if parts.head else "no head"
            raise ConfigError(
                f"FedBABU trains the body below a head that stays as it is, and the network has "
                f"{missing}: name the head in the network's roles, or choose finetune"
            )

    def round(self, server: Server) -> None:
        """Average the bodies; the head stays the initial one."""
        replies = server.ask(self.train, model=server.state["model"])
        server.state["model"] |= replies.mean("model", self.weight)

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the body below the head received.

        Args:
            client: the site.
            request: ``model``, the global model.
        """
        body = client.parts.trainable & client.parts.body
        model = client.fit(request["model"], trainable=body).without(client.parts.head)
        return Message.of(model=model, num_examples=client.num_examples)

    def tuned(self, parts: ModelParts) -> Collection[str] | None:
        """See `FineTune.tuned`."""
        names: frozenset[str] = getattr(parts, {"all": "names"}.get(self.part, self.part))
        return None if self.part == "all" else parts.trainable & names
