"""SCAFFOLD (Karimireddy et al., 2020, https://arxiv.org/abs/1910.06378), option II."""

from collections.abc import Mapping
from typing import ClassVar

from collegium.core.algorithm import Algorithm, Client, Server, handler
from collegium.core.message import Message
from collegium.core.payloads import ModelPart, PartSchema
from collegium.core.settings import Positive, settings


@settings
class Scaffold(Algorithm):
    """Correct local steps by the difference of server and client variates (Algorithm 1).

    Variates cover the parameters; buffers travel in the model update and are averaged whatever the
    server's step, since beyond their mean running variances could become negative. A client's
    variate counts once the server has its update, so that c stays the mean of all c_i if a reply is
    lost, also under `secure_mean`, where both means are of one masked sum; a robust mean would not
    keep it so, and is refused. Option II divides by steps times learning rate, which is right for
    plain SGD only: other optimisers are refused (some released code divides by the steps alone,
    which makes the variates too small by the learning rate). Clients weigh the same, as in the
    paper.

    Attributes:
        global_lr: the server's step, eta_g, of the parameters.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {
        "model_update": ModelPart(difference=True),
        "control_update": ModelPart(only="trainable", difference=True),
    }
    only_averaged: ClassVar[frozenset[str] | None] = frozenset({"model_update", "control_update"})
    optimizers: ClassVar[frozenset[str] | None] = frozenset({"sgd"})
    commit_on_acknowledgement: ClassVar[bool] = True

    global_lr: Positive = 1.0

    def setup(self, server: Server) -> None:
        """Start with the common model and a zero server variate."""
        super().setup(server)
        server.state["control"] = 0.0 * server.initial_model.select(server.parts.trainable)

    def round(self, server: Server) -> None:
        """Move the model and the server variate by the clients' mean updates."""
        state = server.state
        replies = server.ask(self.train, model=state["model"], control=state["control"])
        means = replies.means(["model_update", "control_update"], weight=None)
        update = means["model_update"]
        state["model"] += update | self.global_lr * update.select(server.parts.trainable)
        share = len(replies.clients) / len(server.clients)
        state["control"] += share * means["control_update"]

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train with corrected gradients and update the client's variate.

        Args:
            client: the site.
            request: ``model``, x, and ``control``, c.
        """
        start, control = request["model"], request["control"]
        own = client.state.get("control", 0.0 * control)
        shift = control - own
        model = client.fit(start, correct=lambda gradient, _: gradient + shift.select(gradient))
        update = model - start
        pace = client.num_steps * client.lr
        new = own - control + (-1.0 / pace) * update.select(control) if pace else own
        client.state["control"] = new
        return Message.of(model_update=update, control_update=new - own)
