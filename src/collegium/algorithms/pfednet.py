"""pFedNet: shared and personal components (Zhao et al., 2023, https://arxiv.org/abs/2306.14483)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from collegium.core.algorithm import Algorithm, Client, Replies, Server, handler
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import Count, Expected, ModelPart, Numbers, Part
from collegium.core.tensors import Tensors, mean
from collegium.errors import ConfigError, ProtocolError
from collegium.heterogeneity.survey import Array, Inquiry, Surveyed, asks, vectors
from collegium.solvers.admm import Coupling, Norm
from collegium.solvers.consensus import consensus
from collegium.tasks.metrics import box, sdwd

logger = logging.getLogger(__name__)

ROLES = {"decoder": "decoder", "head": "head", "all": "names"}
"""The choices of `PFedNet.personal` as fields of `ModelParts`."""


@dataclass(frozen=True)
class Chosen(ModelPart):
    """Tensors of the part that the field `personal` of the algorithm chooses, or of the rest.

    Attributes:
        rest: whether it is the rest.
    """

    rest: bool = False

    @property
    def says(self) -> str:
        """What it is, in a few words."""
        return "the model without its personal part" if self.rest else "the model's personal part"

    def check(self, value: Any, expected: Expected) -> None:
        """Check names, shapes, dtypes and finiteness."""
        role = ROLES[expected.fields["personal"]]
        part = ModelPart(without=role) if self.rest else ModelPart(only=role)
        part.check(value, expected)


@dataclass(frozen=True)
class PFedNet(Surveyed, Algorithm):
    """A shared part x, and personal parts z_n tied along a graph of similar sites (Algorithm 5).

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
    edge once. Local steps are divided between the trainings of a round (``split_steps``), where the
    paper trains anew in each. Running statistics of shared layers are averaged, those of personal
    layers stay the site's own. A site that fails is left out of the round's graph.

    Attributes:
        lam: strength of the pull; the paper has 0.01 for classification and 1.0 for segmentation.
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
        sketch: what sites tell of their data: "mean_image", "second_moment" (both compared by sums
            of absolute differences) or "label_histogram" (Euclidean distance).
        sketch_items: how many training images a sketch is made from.
        sketch_size: side of the grid of a sketch.
    """

    sends: ClassVar[Mapping[str, Part]] = {
        **asks("mean_image", "second_moment", "label_histogram"),
        "shared": Chosen(rest=True),
        "personal_update": Chosen(),
        "pace": Numbers(says="learning rate times steps"),
        "num_examples": Count(),
    }
    has_global: ClassVar[bool] = False

    lam: float = 0.01
    k: int | None = None
    p: Norm = 2
    personal: Literal["decoder", "head", "all"] = "decoder"
    inner_shared: int = 1
    inner_personal: int = 1
    weighting: Literal["uniform", "examples"] = "uniform"
    combined: bool = False
    split_steps: bool = True
    eta: float | None = None
    rho: float | None = None
    iterations: int | None = None
    sketch: Literal["mean_image", "second_moment", "label_histogram"] = "mean_image"
    sketch_items: int = 16
    sketch_size: int = 16

    def __post_init__(self) -> None:
        for name in ("k", "inner_shared", "inner_personal", "iterations"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; choose at least 1")
        for name in ("eta", "rho"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value}; choose a number above 0")
        if not 0 <= self.lam < float("inf"):
            raise ConfigError(f"lam is {self.lam}; choose a number of at least 0")
        if self.combined and (self.inner_shared, self.inner_personal) != (1, 1):
            raise ConfigError(
                "combined makes one training of the two of a round; leave inner_shared and "
                "inner_personal at 1, or set combined to false"
            )
        self.inquiry()

    def inquiry(self) -> Inquiry:
        """Ask for the sketch."""
        return Inquiry((self.sketch,), items=self.sketch_items, size=self.sketch_size)

    def unused_sends(self) -> Collection[str]:
        """The other sketches; where everything is personal, the shared part too."""
        nothing = {"shared"} if self.personal == "all" else set()
        return {*super().unused_sends(), *nothing}

    def personal_names(self, parts: ModelParts) -> frozenset[str]:
        """Return the names of z.

        Raises:
            ConfigError: the network has no such part.
        """
        names: frozenset[str] = getattr(parts, ROLES[self.personal])
        if not names & parts.trainable:
            raise ConfigError(
                f"pfednet: the network's {self.personal} has nothing to train, so that no part is "
                f"personal; declare the role in the network, or set personal to all"
            )
        return names

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:
        """Refuse too few sites for k, and a network without the personal part."""
        from collegium.heterogeneity import graphs

        if len(clients) < 2:
            raise ConfigError(
                "pfednet joins similar sites, and there is one site only; add sites, or choose "
                "the algorithm local"
            )
        if self.k is not None:
            graphs.check_neighbours(self.k, len(clients))
        self.personal_names(parts)

    def setup(self, server: Server) -> None:
        """Build the graph; all sites start with the common model.

        Raises:
            ProtocolError: a site sent no sketch.
        """
        names, model = self.personal_names(server.parts), server.initial_model
        state = server.state
        state["shared"] = model.without(names)
        state["personal"] = {client: model.select(names) for client in server.clients}
        state["behind"] = list(server.clients)
        state["graph"] = self._graph(server)
        state["sdwd"] = []

    def _graph(self, server: Server) -> dict[str, Any]:
        """Ask for sketches and join every site with the k most similar ones."""
        from collegium.heterogeneity import graphs

        replies = dict(server.ask(self.survey).items())
        silent = [site for site in server.clients if site not in replies]
        if silent:
            raise ProtocolError(
                f"site {silent[0]!r} sent no {self.sketch}, so that its place in the graph is "
                f"unknown; start again when it answers, or leave it out"
            )
        matrix = self._distances(vectors(replies.items(), self.sketch))
        k = min(3, len(matrix) - 1) if self.k is None else self.k
        edges = graphs.edges(graphs.neighbours(matrix, k))
        pairs = [[server.clients[i], server.clients[j]] for i, j in edges]
        logger.info("similar sites: %s", ", ".join(" - ".join(pair) for pair in pairs))
        return {"clients": server.clients, "distances": matrix.tolist(), "edges": pairs}

    def _distances(self, sketches: Mapping[str, Array]) -> Array:
        from collegium.heterogeneity import distances

        if self.sketch == "label_histogram":
            return distances.euclidean_distances(sketches)
        return distances.l1_distances(sketches)

    def round(self, server: Server) -> None:
        """Train and average x (phase X), then train Z and tie it (phase Z)."""
        if self.combined:
            replies = self._ask(server, self.train_both)
            self._average(server, replies)
            self._tie(server, replies)
            return
        for _ in range(self.inner_shared):
            if self.personal != "all":
                self._average(server, self._ask(server, self.train_shared))
        for _ in range(self.inner_personal):
            self._tie(server, self._ask(server, self.train_personal))

    def _ask(self, server: Server, method: Any) -> Replies:
        """Ask all sites; one that has not got its newest z_n gets it with the request."""
        state = server.state
        late = {
            client: {"personal": state["personal"][client]} if client in state["behind"] else {}
            for client in server.clients
        }
        each = late if state["behind"] else None
        replies = server.ask(method, each=each, shared=state["shared"]).hold()
        state["behind"] = sorted(set(state["behind"]) - set(replies.clients))
        return replies

    def _average(self, server: Server, replies: Replies) -> None:
        if self.personal != "all":
            weight = "num_examples" if self.weighting == "examples" else None
            server.state["shared"] = replies.mean("shared", weight)

    def _tie(self, server: Server, replies: Replies) -> None:
        """Solve for Z among the sites that answered, and hand each site its own part."""
        personal, sites = server.state["personal"], list(replies.clients)
        if not sites:
            raise ProtocolError("nothing to tie: no client sent a reply that can be used")
        trainable = self.personal_names(server.parts) & server.parts.trainable
        points = [personal[site] + reply["personal_update"] for site, reply in replies.items()]
        tied = consensus(
            [point.select(trainable) for point in points],
            self._coupling(server.state["graph"]["edges"], sites, replies),
            p=self.p,
            iterations=self.iterations,
            start=[personal[site].select(trainable) for site in sites] if self.iterations else None,
        )
        new = {site: b | z for site, b, z in zip(sites, points, tied, strict=True)}
        server.state["personal"] = personal | new
        parts = [server.state["personal"][site].select(trainable) for site in server.clients]
        server.state["sdwd"] = [*server.state["sdwd"], {"round": server.round, **box(sdwd(parts))}]
        self._deliver(server, {*sites, *server.state["behind"]})

    def _coupling(
        self, pairs: Sequence[Sequence[str]], sites: Sequence[str], replies: Replies
    ) -> Coupling:
        """Return the graph of the sites that answered, with their steps eta_n."""
        from collegium.heterogeneity import graphs

        place = {site: index for index, site in enumerate(sites)}
        edges = [(place[a], place[b]) for a, b in pairs if a in place and b in place]
        messages = replies.values()
        counts = [m["num_examples"] if self.weighting == "examples" else 1 for m in messages]
        etas = [
            (self.eta or message["pace"]["eta"]) * sum(counts) / count
            for message, count in zip(messages, counts, strict=True)
        ]
        return Coupling.of(graphs.incidence(len(sites), edges), etas, self.lam, self.rho)

    def _deliver(self, server: Server, sites: Collection[str]) -> None:
        """Send each site its z_n and note who did not get it."""
        parts = {site: {"personal": server.state["personal"][site]} for site in sites}
        replies = server.ask(self.receive, each=parts).hold()
        server.state["behind"] = sorted(set(sites) - set(replies.clients))

    def shared(self, server: Server) -> Mapping[str, Any]:
        """The shared part; every site holds its personal part already."""
        return {"shared": server.state["shared"]}

    def deploy(self, server: Server) -> dict[str, Tensors]:
        """The shared part with the mean of all personal parts: what lam without bound leads to."""
        parts = [server.state["personal"][site] for site in server.clients]
        return {"mean": server.state["shared"] | mean(parts)}

    @handler
    def train_shared(self, client: Client, request: Message) -> Message:
        """Train the whole model and send its shared part."""
        start = self._model(client, request)
        model = client.fit(start, steps=self._steps(client, personal=False))
        shared = model.without(self.personal_names(client.parts))
        return Message.of(shared=shared, num_examples=client.num_examples)

    @handler
    def train_personal(self, client: Client, request: Message) -> Message:
        """Train the whole model and send the update of its personal part."""
        start = self._model(client, request)
        steps = self._steps(client, personal=True)
        model = client.fit(start, steps=steps)
        return self._update(client, start, model, client.num_steps if steps is None else steps)

    @handler
    def train_both(self, client: Client, request: Message) -> Message:
        """Train the whole model and send both."""
        start = self._model(client, request)
        model = client.fit(start)
        update = self._update(client, start, model, client.num_steps)
        if self.personal == "all":
            return update
        return Message.of(**update, shared=model.without(self.personal_names(client.parts)))

    @handler
    def receive(self, client: Client, request: Message) -> Message:
        """Keep the personal part that the server has tied to those of similar sites."""
        client.state["personal"] = request["personal"]
        return Message.of()

    def _model(self, client: Client, request: Message) -> Tensors:
        """Return y_n, whose personal part is the newest that the client was given."""
        if "personal" in request:
            client.state["personal"] = request["personal"]
        if "personal" not in client.state:
            raise ProtocolError(
                f"site {client.id!r} has lost its personal part, which the server does not send "
                f"again; bring back the site's state, or start the run again"
            )
        model: Tensors = request["shared"] | client.state["personal"]
        return model

    def _update(self, client: Client, start: Tensors, model: Tensors, steps: int) -> Message:
        names = self.personal_names(client.parts)
        return Message.of(
            personal_update=model.select(names) - start.select(names),
            pace={"eta": client.lr * steps},
            num_examples=client.num_examples,
        )

    def _steps(self, client: Client, *, personal: bool) -> int | None:
        """Return the steps of one training: its share of the round's, at least one.

        None: as many as the recipe says.
        """
        total = client.num_steps
        shared = 0 if self.personal == "all" else self.inner_shared
        if not self.split_steps or shared + self.inner_personal == 1:
            return None
        each = total // (shared + self.inner_personal)
        rest = (total - shared * each) // self.inner_personal
        return max(rest if personal else each, 1)

    def personal_model(self, client: Client, request: Message) -> Tensors | None:
        """The shared part and the client's own; None before it has one."""
        if "personal" not in client.state:
            return None
        return self._model(client, request)
