"""pFedNet: shared and personal components (Zhao et al., 2023, https://arxiv.org/abs/2306.14483)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

from collegium.algorithms._pfednet_sites import (
    Component,
    ask_to_train,
    coupling_of,
    deliver,
    newest_personal,
    personal_names,
    similarity_graph,
)
from collegium.core.algorithm import Algorithm, Client, Replies, Server, handler
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import Count, Numbers, PartSchema
from collegium.core.settings import NonNegative, Positive, PositiveInt, settings
from collegium.core.tensors import Tensors, mean
from collegium.errors import ConfigError, ProtocolError
from collegium.heterogeneity import graphs
from collegium.heterogeneity.survey import SurveyMixin, SurveyQuestions, survey_parts
from collegium.solvers.admm import Norm
from collegium.solvers.consensus import consensus
from collegium.tasks.metrics.overlap import box_plot_summary, sdwd


@settings
class PFedNet(SurveyMixin, Algorithm):
    """A shared part x, and personal parts z_n coupled along a graph of similar sites (Algorithm 5).

    Site n predicts with y_n = x and z_n together. With p_n = 1/N the objective is

        sum_n p_n f_n(x, z_n) + lam sum_{edges (i, j)} ||z_i - z_j||_p.

    Before training the sites are joined to those with the most similar data. A round alternates:

        x   <- sum_n p_n x_n,            x_n being x after local training of y_n;
        z_n <- b_n = z_n + update_n,     the update of z_n in a second local training, then
        Z   <- argmin sum_n ||z_n - b_n||^2 / (2 eta_n) + lam sum_{(i, j)} ||z_i - z_j||_p,

    with eta_n = pace_n / p_n and pace_n the learning rate times the number of local steps. So the
    update divided by pace_n stands for the gradient, as in the paper, and the balance between data
    and penalty depends neither on the learning rate nor on the number of steps. lam = 0 averages x
    and lets every z_n train alone.

    Deviations. The Z-update is solved exactly, with the right proximal maps (see
    `collegium.solvers.consensus`). The graph is the union of the nearest-neighbour relations, each
    edge once. Local steps are divided between the trainings of a round (``split_steps``), while the
    paper trains in full in each. Running statistics of shared layers are averaged, those of
    personal layers stay the site's own. A site that fails is left out of the round's graph.

    Attributes:
        lam: weight of the penalty; the paper has 0.01 for classification and 1.0 for segmentation.
            Its effect grows with the number of sites, since f is a mean over them.
        k: neighbours of each site in the graph; None: 3 as in the paper, or all others if fewer.
        p: norm of the differences: 1, 2 or "inf".
        personal: "decoder" (the head alone in a network without a path up), "head" or "all".
        inner_shared: trainings of the shared part per round, I.
        inner_personal: trainings of the personal part per round, J.
        weighting: p_n: "uniform" (the paper), or "examples": by number of training examples.
        combined: one training per round gives both updates, which takes half the messages.
        split_steps: whether all trainings of a round share the local steps that other methods take.
        eta: replaces pace_n in the Z-update; None: learning rate times steps.
        rho: of the augmented Lagrangian; it matters with ``iterations`` only. None: chosen.
        iterations: runs so many iterations of Algorithm 4 from Z_t; None: to the optimum.
        sketch: the summary of their data that sites send: "mean_image", "second_moment" (both
            compared by sums of absolute differences) or "label_histogram" (Euclidean distance).
        sketch_items: how many training images a sketch is made from.
        sketch_size: side of the grid of a sketch.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {
        **survey_parts("mean_image", "second_moment", "label_histogram"),
        "shared": Component(shared=True),
        "personal_update": Component(shared=False, difference=True),
        "pace": Numbers(description="learning rate times steps", names=("eta",)),
        "num_examples": Count(),
    }
    has_global: ClassVar[bool] = False

    lam: NonNegative = 0.01
    k: PositiveInt | None = None
    p: Norm = 2
    personal: Literal["decoder", "head", "all"] = "decoder"
    inner_shared: PositiveInt = 1
    inner_personal: PositiveInt = 1
    weighting: Literal["uniform", "examples"] = "uniform"
    combined: bool = False
    split_steps: bool = True
    eta: Positive | None = None
    rho: Positive | None = None
    iterations: PositiveInt | None = None
    sketch: Literal["mean_image", "second_moment", "label_histogram"] = "mean_image"
    sketch_items: PositiveInt = 16
    sketch_size: PositiveInt = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.combined and (self.inner_shared, self.inner_personal) != (1, 1):
            raise ConfigError(
                "combined makes one training of the two of a round; leave inner_shared and "
                "inner_personal at 1, or set combined to false"
            )

    def questions(self) -> SurveyQuestions:
        """Return the question: the sketch."""
        return SurveyQuestions((self.sketch,), items=self.sketch_items, size=self.sketch_size)

    def unused_sends(self) -> Collection[str]:
        """Return the other sketches; if everything is personal, the shared part too."""
        nothing = {"shared"} if self.personal == "all" else set()
        return {*super().unused_sends(), *nothing}

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:
        """Refuse too few sites for k, and a network without the personal part.

        See `Algorithm.check_setup`.
        """
        if len(clients) < 2:
            raise ConfigError(
                "pfednet joins similar sites, and there is one site only; add sites, or choose "
                "the algorithm local"
            )
        if self.k is not None:
            graphs.check_neighbours(self.k, len(clients))
        personal_names(parts, self.personal)

    def setup(self, server: Server) -> None:
        """Build the graph; all sites start from the common model.

        Raises:
            ProtocolError: a site sent no sketch.
        """
        names, model = personal_names(server.parts, self.personal), server.initial_model
        state = server.state
        state["shared"] = model.without(names)  # x
        state["personal"] = {site: model.select(names) for site in server.clients}  # Z
        state["behind"] = list(server.clients)
        state["graph"] = similarity_graph(self.collect_statistics(server), self.sketch, self.k)  # Q

    def round(self, server: Server) -> None:
        """Run phase X, which trains and averages x, and phase Z, which trains and couples Z."""
        if self.combined:
            replies = ask_to_train(server, self.train_both)
            self.update_shared(server, replies)
            self.update_personal(server, replies)
            return
        for _ in range(self._shared_trainings):  # phase X
            self.update_shared(server, ask_to_train(server, self.train_shared))
        for _ in range(self.inner_personal):  # phase Z
            self.update_personal(server, ask_to_train(server, self.train_personal))

    def update_shared(self, server: Server, replies: Replies) -> None:
        """Average the shared parts: x <- sum_n p_n x_n.

        Args:
            server: its state receives x.
            replies: x_n of each site.
        """
        if self.personal != "all":
            server.state["shared"] = replies.mean("shared", self.weight)

    def update_personal(self, server: Server, replies: Replies) -> None:
        """Solve for Z among the sites that answered (Algorithm 4), and send each site its z_n.

        Args:
            server: its state receives Z.
            replies: the update of z_n and the pace of each site.

        Raises:
            ProtocolError: no site answered.
        """
        state, sites = server.state, replies.clients
        if not sites:
            raise ProtocolError("nothing to tie: no client sent a reply that can be used")
        trainable = personal_names(server.parts, self.personal) & server.parts.trainable
        z = state["personal"]
        b = {n: z[n] + reply["personal_update"] for n, reply in replies.items()}  # z_n + update_n
        # Z <- argmin sum_n ||z_n - b_n||^2 / (2 eta_n) + lam sum_{(i, j)} ||z_i - z_j||_p
        coupled = consensus(
            [b[n].select(trainable) for n in sites],
            coupling_of(self, state["graph"]["edges"], replies),
            p=self.p,
            iterations=self.iterations,
            start=[z[n].select(trainable) for n in sites] if self.iterations else None,
        )
        state["personal"] = z | {n: b[n] | z_n for n, z_n in zip(sites, coupled, strict=True)}
        parts = [state["personal"][n].select(trainable) for n in server.clients]
        for name, value in box_plot_summary(sdwd(parts)).items():
            server.record(f"sdwd/{name}", value)
        deliver(server, self.receive, {*sites, *state["behind"]})

    @property
    def weight(self) -> str | None:
        """The part that holds p_n up to a factor; None: all are equal."""
        return "num_examples" if self.weighting == "examples" else None

    def shared(self, server: Server) -> Mapping[str, Any]:
        """Return x; every site holds its z_n already."""
        return {"shared": server.state["shared"]}

    @handler
    def train_shared(self, client: Client, request: Message) -> Message:
        """Train y_n and send x_n, its shared part.

        Args:
            client: the site.
            request: ``shared``, x; ``personal``, z_n, if the site does not hold its newest.
        """
        _, trained, _ = self._fit(client, request, personal=False)
        x = trained.without(personal_names(client.parts, self.personal))
        return Message.of(shared=x, num_examples=client.num_examples)

    @handler
    def train_personal(self, client: Client, request: Message) -> Message:
        """Train y_n and send the update of z_n, its personal part, with the pace.

        Args:
            client: the site.
            request: see `train_shared`.
        """
        return self._update(client, *self._fit(client, request, personal=True))

    @handler
    def train_both(self, client: Client, request: Message) -> Message:
        """Train y_n once and send all of that.

        Args:
            client: the site.
            request: see `train_shared`.
        """
        y, trained, steps = self._fit(client, request, personal=True)
        update = self._update(client, y, trained, steps)
        if self.personal == "all":
            return update
        x = trained.without(personal_names(client.parts, self.personal))
        return Message.of(**update, shared=x)

    @handler
    def receive(self, client: Client, request: Message) -> Message:
        """Keep z_n as the server has coupled it to those of similar sites.

        Args:
            client: the site.
            request: ``personal``, z_n.
        """
        client.state["personal"] = request["personal"]
        return Message.of()

    def _model(self, client: Client, request: Message) -> Tensors:
        y: Tensors = request["shared"] | newest_personal(client, request)  # y_n = M x + N z_n
        return y

    def _fit(
        self, client: Client, request: Message, *, personal: bool
    ) -> tuple[Tensors, Tensors, int]:
        """Return y_n before and after one training of a phase, and its number of local steps."""
        y, steps = self._model(client, request), None
        trainings = self._shared_trainings + self.inner_personal
        if self.split_steps and not self.combined and trainings > 1:
            each = client.num_steps // trainings
            rest = (client.num_steps - self._shared_trainings * each) // self.inner_personal
            steps = max(rest if personal else each, 1)
        trained = client.fit(y, steps=steps)
        return y, trained, client.num_steps if steps is None else steps

    def _update(self, client: Client, y: Tensors, trained: Tensors, steps: int) -> Message:
        names = personal_names(client.parts, self.personal)
        return Message.of(
            personal_update=trained.select(names) - y.select(names),
            pace={"eta": client.lr * steps},
            num_examples=client.num_examples,
        )

    @property
    def _shared_trainings(self) -> int:
        return 0 if self.personal == "all" else self.inner_shared

    def personal_model(self, client: Client, request: Message) -> Tensors | None:
        """Return y_n, or None before the site has a personal part.

        See `Algorithm.personal_model`.
        """
        return self._model(client, request) if "personal" in client.state else None

    def deploy(self, server: Server) -> dict[str, Tensors]:
        """Return x with the mean of all z_n, the limit of Z as lam grows."""
        parts = [server.state["personal"][site] for site in server.clients]
        return {"mean": server.state["shared"] | mean(parts)}
