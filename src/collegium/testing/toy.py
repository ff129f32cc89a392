"""A toy federation: three sites of different sizes that train in a fraction of a second.

Its transports shuffle, repeat, lose and interrupt requests, or hand them to other processes. The
conformance suite runs on it, with each of the kinds of data in `collegium.testing.kinds`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from collegium.compression.session.groups import NO_CODECS, Codecs
from collegium.core.algorithm import Algorithm
from collegium.core.dataset import Batch, TensorDataset
from collegium.core.message import Message, pack, unpack
from collegium.core.randomness import generator
from collegium.core.settings import from_mapping
from collegium.core.tensors import Tensors
from collegium.data.site import Site
from collegium.errors import MissingReply
from collegium.experiment.config.registry import ALGORITHMS, CODECS
from collegium.runtime.client import ClientRuntime
from collegium.runtime.engines.inprocess import InProcess, respond_here
from collegium.runtime.federation import Federation, Network, initial_model
from collegium.runtime.ledger import SignOff
from collegium.runtime.participation import EVERYBODY, Participation
from collegium.runtime.requests import Request, Response, Transport
from collegium.runtime.run import Run
from collegium.runtime.secure.config import SecureMean
from collegium.runtime.selection import Selection
from collegium.tasks import SupervisedTask, Task
from collegium.training.loop import TrainingConfig

SEED = 7
"""The seed of the toy's runs."""

ROUNDS = 2
"""How many rounds the toy's runs have, unless a test asks for others."""

SIZES = {"A": 9, "B": 14, "C": 21}
"""Training examples of the toy's sites."""

PUBLIC = 6
"""Examples that the toy's server holds."""

FEWER = {"A": 4, "B": 7, "C": 10}
"""The same where training takes longer."""

HELD = 4
"""Validation cases, and as many test cases, of a toy site."""

TRAINING = TrainingConfig(optimizer="sgd", lr=0.05, batch_size=4, local_epochs=1)
"""The toy's recipe: plain SGD, with which every method is right."""


def toy_network() -> nn.Module:
    """Return the toy's network: 3 inputs, batch normalisation, dropout, one output.

    Its head is the last layer.
    """
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 1)
    )


def bare_network() -> nn.Module:
    """Return a network without normalisation layers: 3 inputs, one output."""
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def toy_rows(name: str, count: int, seed: int) -> Batch:
    """Return rows of three numbers and a linear function of them with a site's own slope.

    Args:
        name: the site's name.
        count: how many.
        seed: decides the data.
    """
    inputs = torch.randn(count, 3, generator=generator(seed, "toy", name, "inputs"))
    slope = torch.tensor([[1.0], [-2.0], [0.5]]) + 0.5 * torch.randn(
        3, 1, generator=generator(seed, "toy", name, "slope")
    )
    return {"image": inputs, "label": inputs @ slope}


@dataclass(frozen=True)
class Kind:
    """A kind of data: what the sites hold, and the network and the task with which it is learnt.

    Attributes:
        name: as messages call it.
        task_name: what it is in `collegium.core.algorithm.TASKS`; "regression" is none of them.
        network: builds the network.
        task: makes the task.
        samples: returns samples of a site, from its name, their number and a seed.
        bare: builds the network without normalisation layers, where scores tell any two methods
            apart; None where they do not.
        sizes: training examples of the sites.
    """

    name: str
    task_name: str
    network: Network
    task: Callable[[], Task]
    samples: Callable[[str, int, int], Batch]
    bare: Network | None = None
    sizes: Mapping[str, int] = field(default_factory=lambda: FEWER)


REGRESSION = Kind(
    "rows with a number",
    "regression",
    toy_network,
    lambda: SupervisedTask(nn.functional.mse_loss),
    toy_rows,
    bare_network,
    SIZES,
)
"""The quickest kind: a table, a network with batch normalisation and dropout, the mean square."""


def toy_model(k: int, seed: int = 7, network: Network = toy_network) -> Tensors:
    """Return an initial model of the toy.

    Args:
        k: its number.
        seed: of the run.
        network: builds the network.
    """
    return initial_model(network, seed, k)


def toy_site(name: str, *, seed: int = 7, kind: Kind = REGRESSION) -> Site:
    """Return a site whose data are a function with a site's own shift.

    Args:
        name: the site's name.
        seed: decides its data.
        kind: what its data are.
    """
    samples = kind.samples(name, kind.sizes.get(name, PUBLIC) + 2 * HELD, seed)
    train, val, test = (
        TensorDataset({key: value[rows] for key, value in samples.items()})
        for rows in (slice(2 * HELD, None), slice(0, HELD), slice(HELD, 2 * HELD))
    )
    return Site(name, train, val, test)


def toy_federation(
    names: Sequence[str] = ("A", "B", "C"),
    training: TrainingConfig = TRAINING,
    kind: Kind = REGRESSION,
) -> Federation:
    """Return the toy's sites, network, task and recipe.

    Args:
        names: the sites.
        training: the local recipe.
        kind: the kind of data.
    """
    sites = {name: toy_site(name, kind=kind) for name in names}
    public = toy_site("public", kind=kind).train
    return Federation(sites, kind.network, kind.task(), training, public=public)


class ToyFederation:
    """A federation of toy sites in a folder.

    Args:
        algorithm: the algorithm to run.
        root: folder for all states.
        transport: made from this federation; by default the clients answer in this process.
        training: the local recipe.
        codecs: the codecs of training exchanges.
        kind: the kind of data.
        secure: how what is averaged is masked; None: it is not.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        root: Path,
        transport: Callable[[ToyFederation], Transport] | None = None,
        *,
        names: Sequence[str] = ("A", "B", "C"),
        training: TrainingConfig = TRAINING,
        participation: Participation = EVERYBODY,
        codecs: Codecs = NO_CODECS,
        kind: Kind = REGRESSION,
        secure: SecureMean | None = None,
    ) -> None:
        self.algorithm, self.root, self.names, self.training = algorithm, root, names, training
        self.codecs, self.kind, self.secure = codecs, kind, secure
        engine = transport(self) if transport else InProcess(self.clients)
        self.server = toy_federation(names, training, kind).server(
            algorithm,
            engine,
            seed=SEED,
            root=root,
            rounds=ROUNDS,
            participation=participation,
            codecs=codecs,
            secure=secure,
        )

    def clients(self) -> dict[str, ClientRuntime]:
        """Return new clients, as a restarted site builds them."""
        federation = toy_federation(self.names, self.training, self.kind)
        return federation.clients(
            self.algorithm,
            seed=SEED,
            root=self.root,
            rounds=ROUNDS,
            codecs=self.codecs,
            secure=self.secure,
        )

    def run(self, rounds: int = ROUNDS, *, home_rounds: int = 0) -> ToyFederation:
        """Run with evaluation and test from where the state stands, and return this federation.

        Args:
            rounds: the last round.
            home_rounds: how many of them, the last ones, are trained at home.
        """
        try:
            rule = Selection(min_events=1)
            metric = self.kind.task().metric
            Run(self.server, rounds, metric, selection=rule, home_rounds=home_rounds).execute()
        finally:
            self.server.transport.close()
        return self

    def states(self) -> dict[str, bytes]:
        """Return every stored state of server and clients, and the selected models, by file."""
        found = [*self.root.rglob("*.state"), self.root / "server/test.json"]
        return {str(file.relative_to(self.root)): file.read_bytes() for file in sorted(found)}


class ShuffledTransport:
    """A transport that shuffles requests and rebuilds every client for each of them.

    It may also repeat requests or lose clients.

    Args:
        federation: the federation.
        before: called before every request, with its number from 0; it may raise KeyboardInterrupt.
        repeat: whether every request arrives twice.
        lose: by round a client that does not answer in training.
    """

    def __init__(
        self,
        federation: ToyFederation,
        *,
        before: Callable[[int], None] = lambda number: None,
        repeat: bool = False,
        lose: Mapping[int, str] | None = None,
    ) -> None:
        self._federation, self._before = federation, before
        self._repeat, self._lose = repeat, lose or {}
        self.count = 0
        self.log: list[tuple[Request, Message]] = []

    def exchange(self, requests: Iterable[Request]) -> Iterator[Response]:
        """Answer in an arbitrary order."""
        shuffled = list(requests)
        order = torch.randperm(len(shuffled), generator=generator(self.count, "order"))
        shuffled = [shuffled[position] for position in order]
        for request in shuffled:
            self._before(self.count)
            self.count += 1
            if self._lose.get(request.round) == request.client and request.stage == "train":
                error = {"kind": MissingReply.__name__, "text": "no answer in 1 s"}
                yield Response(request.client, pack({"error": error}), 0.0)
                continue
            for _ in range(2 if self._repeat else 1):
                reply = respond_here(self._federation.clients()[request.client], request)
            envelope = unpack(reply.data, held=self._federation.server.held)
            if "reply" in envelope:
                self.log.append((request, Message(envelope["reply"])))
            yield reply

    def close(self) -> None:
        """Nothing is held."""


class SwappedNames:
    """A transport in which every client answers under the name of the next one."""

    def __init__(self, federation: ToyFederation) -> None:
        names = sorted(federation.names)
        self._next = dict(zip(names, [*names[1:], names[0]], strict=True))
        self._clients = federation.clients()

    def exchange(self, requests: Iterable[Request]) -> Iterator[Response]:
        """Answer in order."""
        for request in requests:
            yield respond_here(self._clients[self._next[request.client]], request)

    def close(self) -> None:
        """Nothing is held."""


class _Addressed:
    """A client that is asked under an address that says how to build it."""

    def __init__(self, client: ClientRuntime) -> None:
        self.client = client

    @property
    def signed(self) -> SignOff | None:
        """See `collegium.runtime.requests.RequestHandler.signed`."""
        return self.client.signed

    def handle(self, request: Request) -> bytes:
        """Return the response to a request, as to one under the client's name."""
        return self.client.handle(replace(request, client=self.client.id))


class ToyClients(dict[str, _Addressed]):
    """The clients of whichever toy federation is asked for, built when they are."""

    def __missing__(self, key: str) -> _Addressed:
        from collegium.testing.kinds import KINDS

        self.clear()
        name, params, training, root, kind, masked, *described, client = json.loads(key)
        codecs = Codecs(**{side: CODECS.load(name)(**own) for side, name, own in described})
        recipe, _ = from_mapping(TrainingConfig, training)
        assert recipe is not None
        algorithm = ALGORITHMS.load(name)(**params)
        clients = toy_federation(training=recipe, kind=KINDS[kind]).clients(
            algorithm,
            seed=SEED,
            root=Path(root),
            codecs=codecs,
            secure=SecureMean(**masked) if masked else None,
        )
        self[key] = _Addressed(clients[client])
        return self[key]


def toy_workers(count: int = 2) -> InProcess:
    """Return an engine whose processes serve one toy federation after the other.

    One takes seconds to start, so that whoever checks several algorithms hands the same engine to
    all; close it in the end.
    """
    return InProcess(ToyClients, count)


class WorkerTransport:
    """A transport that lets another process answer every other request, and this one the rest.

    Args:
        workers: what `toy_workers` returned.
        federation: the federation.
    """

    def __init__(self, workers: InProcess, federation: ToyFederation) -> None:
        name, params = ALGORITHMS.describe(federation.algorithm)
        self._workers, self._federation = workers, federation
        sides = {"up": federation.codecs.up, "down": federation.codecs.down}
        described = [[side, *CODECS.describe(codec)] for side, codec in sides.items() if codec]
        root, kind = str(federation.root), federation.kind.name
        masked = asdict(federation.secure) if federation.secure else None
        self._about = [name, params, asdict(federation.training), root, kind, masked, *described]

    def exchange(self, requests: Iterable[Request]) -> Iterator[Response]:
        """Answer in order; a worker knows by the address whose client it has to build."""
        clients = self._federation.clients()
        for number, request in enumerate(requests):
            if number % 2:
                yield respond_here(clients[request.client], request)
                continue
            key = json.dumps([*self._about, request.client])
            for reply in self._workers.exchange([replace(request, client=key)]):
                yield replace(reply, client=request.client)

    def close(self) -> None:
        """Leave the workers to others."""
