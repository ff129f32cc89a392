"""Sites that train together in one process: turns, and whole runs beside those of single sites."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from collegium.algorithms.ditto import Ditto
from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.fedbn import FedBN
from collegium.algorithms.fedrep import FedRep
from collegium.algorithms.ifca import IFCA
from collegium.algorithms.scaffold import Scaffold
from collegium.core.dataset import TensorDataset
from collegium.core.tensors import Tensors
from collegium.data.site import Site
from collegium.errors import CheckpointError, ClientError, ConfigError
from collegium.runtime.engines import EngineConfig
from collegium.runtime.engines.turns import respond_together
from collegium.runtime.requests import Request
from collegium.runtime.simulation import simulate
from collegium.tasks import SupervisedTask
from collegium.testing.toy import ToyFederation, toy_site
from collegium.training.loop import WAITING, TrainingConfig

TRAINING = TrainingConfig(optimizer="sgd", lr=0.05, batch_size=4, local_steps=5)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def run(algorithm=None, sites="ABC", **options):
    options = {"rounds": 3, "training": TRAINING, "together": True, **options}
    made = [toy_site(name) if isinstance(name, str) else name for name in sites]
    task = SupervisedTask(nn.functional.mse_loss)
    return simulate(algorithm or FedAvg(), made, network, task, **options)


def equal(a: Tensors, b: Tensors) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "algorithm",
    [FedAvg(), FedBN(), Ditto(), FedRep(), IFCA(num_clusters=2), Scaffold()],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_runs_together_and_apart_are_equal_up_to_rounding(algorithm):
    together, apart = run(algorithm), run(algorithm, together=False)
    assert together.personal.keys() == apart.personal.keys()
    pairs = [(together.personal[site], apart.personal[site]) for site in apart.personal]
    if apart.model is not None:
        pairs.append((together.model, apart.model))
    for ours, theirs in pairs:
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


def test_a_run_has_the_same_bits_again_and_after_an_interruption(tmp_path):
    def stop(record):
        if record.round == 2:
            raise KeyboardInterrupt

    whole = run()
    assert equal(run().model, whole.model)
    with pytest.raises(KeyboardInterrupt):
        run(output=tmp_path, observe=stop)
    resumed = run(output=tmp_path)
    assert equal(resumed.model, whole.model)
    assert resumed.scores == whole.scores


def test_a_run_is_not_continued_otherwise(tmp_path):
    run(output=tmp_path)
    with pytest.raises(CheckpointError, match=r"other settings \(together\)"):
        run(output=tmp_path, together=False)


def test_one_site_that_fails_fails_as_it_does_alone():
    inputs = {"image": torch.full((6, 3), float("inf")), "label": torch.zeros(6, 1)}
    data = TensorDataset(inputs)
    broken = Site("D", data, data, data)
    messages = []
    for together in (True, False):
        with pytest.raises(ClientError) as error:
            run(sites=["A", "B", broken], together=together)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert "client 'D', round 1, train: the loss became" in messages[0]


class Handler:
    """A client whose handler notes when it runs, and trains twice."""

    signed = None

    def __init__(self, name: str, seen: list[str], fit) -> None:
        self.name, self.seen, self.fit = name, seen, fit

    def handle(self, request: Request) -> bytes:
        for part in ("first", "second"):
            self.seen.append(f"{self.name} {part}")
            wait = WAITING.get()
            assert wait is not None
            wait(self.fit)
        self.seen.append(f"{self.name} ends")
        return self.name.encode()


def requests(names: str) -> list[Request]:
    return [Request(name, 1, 0, "train", "train", b"") for name in names]


@pytest.fixture
def fit(tmp_path):
    from collegium.training.loop import Fit

    federation = ToyFederation(FedAvg(), tmp_path)
    client = federation.clients()["A"]
    model = client.training.current()
    return Fit(client.training, model, client.site.train, 0, ("x",), 0.1, None, None, None)


def test_handlers_run_one_at_a_time_in_their_order(fit):
    seen: list[str] = []
    clients = {name: Handler(name, seen, replace(fit, path=(name,))) for name in "BA"}
    fit.local.module[3].p = 0.0  # its dropout
    found = [*respond_together(clients, requests("AB"))]
    assert seen == ["A first", "B first", "A second", "B second", "A ends", "B ends"]
    assert [response.data for response in found] == [b"A", b"B"]
    assert all(response.seconds > 0 for response in found)


def test_threads_end_where_a_handler_is_interrupted(fit):
    class Interrupted(Handler):
        def handle(self, request: Request) -> bytes:
            raise KeyboardInterrupt

    seen: list[str] = []
    clients = {"A": Handler("A", seen, fit), "B": Interrupted("B", seen, fit)}
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        [*respond_together(clients, requests("AB"))]
    assert seen == ["A first"]
    assert threading.active_count() == before


def test_threads_compute_as_the_process_is_set():
    """Torch threads and the flushing of denormal numbers are settings of a thread."""

    class Computing(Handler):
        def handle(self, request: Request) -> bytes:
            return repr((torch.get_num_threads(), float(torch.tensor(1e-39) * 0.5))).encode()

    (found,) = respond_together({"A": Computing("A", [], None)}, requests("A"))
    assert found.data == repr((torch.get_num_threads(), float(torch.tensor(1e-39) * 0.5))).encode()


@pytest.mark.parametrize("options", [{"workers": 2}, {"name": "flare"}])
def test_sites_train_together_in_one_process_only(options):
    with pytest.raises(ConfigError, match=r"engine\.workers to 1"):
        EngineConfig(together=True, **options)
