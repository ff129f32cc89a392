"""A small federation on the real runtimes, and its counterpart in numpy.

An algorithm's test runs the library through `federation`, computes the paper's equations with the
functions of `numpy_rounds.py` (the fixture `by_hand`), and compares. The library lends the numpy
side its inputs only: data, initial weights, and the order of the batches.
"""

import importlib.util
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.core.algorithm import Algorithm, State
from collegium.core.dataset import TensorDataset
from collegium.core.message import Held, pack, unpack
from collegium.core.tensors import Tensors
from collegium.data.site import EgressPolicy, Site
from collegium.errors import MissingReply
from collegium.runtime.distances import Diagnostic
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.federation import Federation as RuntimeFederation
from collegium.runtime.federation import initial_model
from collegium.runtime.participation import EVERYBODY, Participation
from collegium.runtime.records import RoundRecord
from collegium.runtime.requests import Request, Response
from collegium.runtime.selection import Selection
from collegium.tasks import SupervisedTask
from collegium.training.batches import plan_batches
from collegium.training.loop import TrainingConfig

SEED = 4
SIZES = {"A": 5, "B": 8, "C": 11}
"""With batches of 4, an epoch takes 1, 2 and 3 steps."""

RECIPE = TrainingConfig(optimizer="sgd", lr=0.1, lr_decay=0.8, batch_size=4, local_epochs=2)
FULL_BATCH = TrainingConfig(optimizer="sgd", lr=0.1, batch_size=100)


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_BY_HAND = _load("numpy_rounds")


def normed_network() -> nn.Module:
    """The network of `numpy_rounds`."""
    layers = {
        "bn_in": nn.Linear(3, 2, bias=False),
        "conv": nn.BatchNorm1d(2),
        "norm": nn.Linear(2, 1),
    }
    return nn.Sequential(OrderedDict(layers)).double()


def linear_network() -> nn.Module:
    """One linear layer."""
    return nn.Linear(3, 1).double()


class Recording(InProcess):
    """Keeps every message, and loses the training answers of a client in a round, where told to.

    They get lost on their way, after the client has done its work, or there is no work at all.
    """

    def __init__(self, build: Any, lose: Mapping[int, str], *, on_their_way: bool = False) -> None:
        super().__init__(build)
        self._lose, self._on_their_way = lose, on_their_way
        self.log: list[tuple[Request, dict[str, Any], dict[str, Any]]] = []
        self.held: Held | None = None

    def exchange(self, requests: Iterable[Request]) -> Iterator[Response]:
        for request in requests:
            if request.stage == "train" and self._lose.get(request.round) == request.client:
                error = {"kind": MissingReply.__name__, "text": "no answer"}
                if self._on_their_way:
                    list(super().exchange([request]))
                yield Response(request.client, pack({"error": error}), 0.0)
                continue
            for response in super().exchange([request]):
                asked = unpack(request.payload, held=self.held)
                reply = unpack(response.data, held=self.held).get("reply", {})
                self.log.append((request, asked, reply))
                yield response


@dataclass
class Outcome:
    """What a run left behind.

    Attributes:
        server: The server's state after every round; the number after the last is `finish`.
        clients: The clients' states after every round.
        log: Every request, what it carried, and the reply.
        best: The personal models that the sites selected.
        best_global: The global model that the server selected.
        deployed: What an outsider receives.
        records: The run's records.
    """

    server: dict[int, State] = field(default_factory=dict)
    clients: dict[int, dict[str, State]] = field(default_factory=dict)
    log: list[tuple[Request, dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    best: dict[str, Tensors | None] = field(default_factory=dict)
    best_global: Tensors | None = None
    deployed: dict[str, Tensors] = field(default_factory=dict)
    records: Sequence[RoundRecord] = ()

    def replies(self, method: str) -> list[dict[str, Any]]:
        """What the clients answered to one handler, in order."""
        return [reply for request, _, reply in self.log if request.method == method]

    def progress(self, client: str, method: str = "train") -> list[dict[str, float]]:
        """A client's progress, one entry per call of a handler."""
        return [
            reply["progress"]
            for request, _, reply in self.log
            if request.method == method and request.client == client
        ]


class Federation:
    """Three sites with their data in numpy, and a way to run an algorithm on them."""

    names = tuple(SIZES)
    sizes = SIZES
    recipe = RECIPE
    full_batch = FULL_BATCH
    task = SupervisedTask(nn.functional.mse_loss)
    normed = staticmethod(normed_network)
    linear = staticmethod(linear_network)

    def __init__(self, root: Path, seed: int = SEED) -> None:
        self.seed = seed
        self._root, self._runs = root, 0
        rng = np.random.default_rng(seed)
        slopes = {"A": [1.0, -2.0, 0.5], "B": [1.2, -1.5, 0.0], "C": [-1.0, 1.0, 2.0]}
        self.data: dict[str, Any] = {}
        self.validation: dict[str, Any] = {}
        for name, size in SIZES.items():
            x = rng.normal(0.5, 1.5, (size + 4, 3))
            y = x @ np.array(slopes[name])[:, None] + rng.normal(0.0, 0.3, (size + 4, 1))
            self.data[name] = _BY_HAND.Data(x[4:], y[4:])
            self.validation[name] = _BY_HAND.Data(x[:4], y[:4])

    def sites(self, policies: Mapping[str, EgressPolicy] | None = None) -> list[Site]:
        """The sites as the library sees them; they test on what they validate on."""

        def dataset(data: Any) -> TensorDataset:
            return TensorDataset({"image": torch.tensor(data.x), "label": torch.tensor(data.y)})

        return [
            Site(
                name,
                dataset(self.data[name]),
                dataset(self.validation[name]),
                dataset(self.validation[name]),
                (policies or {}).get(name, EgressPolicy()),
            )
            for name in self.names
        ]

    def initial(self, k: int = 0, network: Callable[[], nn.Module] = normed_network) -> Any:
        """The initial weights, in numpy."""
        return {n: t.numpy().copy() for n, t in initial_model(network, self.seed, k).items()}

    def batches(
        self,
        client: str,
        number: int,
        *,
        count: int | None = None,
        epochs: int = RECIPE.local_epochs,
        steps: int | None = None,
        batch_size: int = RECIPE.batch_size,
        stream: str = "fit",
        stage: str = "train",
    ) -> list[list[int]]:
        """The rows of every batch that the library draws in round `number`."""
        plan = plan_batches(
            self.sizes[client] if count is None else count,
            batch_size,
            epochs=epochs,
            steps=steps,
            seed=self.seed,
            path=("client", client, number, stage, 0, stream),
        )
        return [[index for _, index in batch] for batch in plan]

    def run(
        self,
        algorithm: Algorithm,
        training: TrainingConfig = RECIPE,
        *,
        rounds: int = 3,
        network: Callable[[], nn.Module] = normed_network,
        sites: Sequence[Site] | None = None,
        lose: Mapping[int, str] | None = None,
        on_their_way: bool = False,
        deploy: bool = True,
        participation: Participation = EVERYBODY,
        public: TensorDataset | None = None,
        diagnostics: Sequence[Diagnostic] = (),
    ) -> Outcome:
        """Run the library, and keep every state and every message."""
        self._runs += 1
        root = self._root / f"run-{self._runs}"
        by_name = {site.name: site for site in sites or self.sites()}
        runtime = RuntimeFederation(by_name, network, self.task, training, public=public)
        clients = runtime.clients(algorithm, seed=self.seed, root=root, rounds=rounds)
        transport = Recording(lambda: clients, lose or {}, on_their_way=on_their_way)
        run = runtime.run(
            algorithm,
            transport,
            rounds=rounds,
            seed=self.seed,
            root=root,
            participation=participation,
            selection=Selection(min_events=0),
            diagnostics=diagnostics,
        )
        transport.held = run.server.held
        outcome = Outcome(log=transport.log)

        def observe(record: RoundRecord) -> None:
            outcome.server[record.round] = dict(run.server.state)
            outcome.clients[record.round] = {
                name: client.store.load(newest) if (newest := client.store.newest("~")) else {}
                for name, client in clients.items()
            }

        run.execute(observe)
        selected = run.best()
        outcome.best_global = selected["model"] if selected else None
        outcome.best = {name: client.kept() for name, client in clients.items()}
        outcome.records = run.records()
        if deploy:
            outcome.deployed = run.server.deploy()
        return outcome


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    """Three sites of different sizes."""
    return Federation(tmp_path)


@pytest.fixture(scope="session")
def by_hand() -> ModuleType:
    """The functions of `numpy_rounds.py`."""
    return _BY_HAND


@pytest.fixture
def one_client_moves_to(tmp_path: Path) -> Callable[..., Outcome]:
    """A run in which each round's local training ends exactly at prescribed weights.

    The loss is the mean over three weights of (w - target)^2, whose gradient is 2/3 (w - target):
    one step of plain SGD with a learning rate of 3/2 lands on the target.
    """

    class Targets(TensorDataset):
        """Gives the next target whenever it is asked for a batch."""

        def batch(self, indices: Sequence[int], rngs: Any) -> dict[str, torch.Tensor]:
            target = torch.tensor(next(targets), dtype=torch.float64)[:, None]
            return {"image": torch.eye(3, dtype=torch.float64), "label": target}

    targets: Iterator[Sequence[float]] = iter(())

    def run(algorithm: Algorithm, start: Sequence[float], path: list[list[float]]) -> Outcome:
        nonlocal targets
        targets = iter(path)

        def network() -> nn.Module:
            layer = nn.Linear(3, 1, bias=False).double()
            layer.weight.data = torch.tensor([start], dtype=torch.float64)
            return layer

        eye = TensorDataset(
            {
                "image": torch.eye(3, dtype=torch.float64),
                "label": torch.zeros(3, 1, dtype=torch.float64),
            }
        )
        site = Site("A", Targets(eye.inputs), eye, eye)
        recipe = TrainingConfig(optimizer="sgd", lr=1.5, batch_size=3)
        return Federation(tmp_path / "moves").run(
            algorithm, recipe, rounds=len(path), network=network, sites=[site], deploy=False
        )

    return run
