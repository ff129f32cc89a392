import errno
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.fedbn import FedBN
from collegium.algorithms.iopfl import IOPFL
from collegium.algorithms.scaffold import Scaffold
from collegium.compression.half import Half
from collegium.compression.identity import Identity
from collegium.compression.session.groups import Codecs
from collegium.core.algorithm import handler
from collegium.core.dataset import TensorDataset
from collegium.core.message import Message
from collegium.core.randomness import ambient
from collegium.core.tensors import Tensors
from collegium.data.site import EgressPolicy, Site
from collegium.errors import (
    CheckpointError,
    ClientError,
    ConfigError,
    EgressError,
    ProtocolError,
    StorageError,
)
from collegium.runtime.federation import initial_model
from collegium.runtime.participation import SKIPPING
from collegium.runtime.simulation import simulate
from collegium.tasks import SupervisedTask
from collegium.testing.toy import TRAINING, toy_network, toy_site

ROOT = Path(__file__).resolve().parents[2]

TASK = SupervisedTask(nn.functional.mse_loss)


def run(algorithm=None, sites=None, network=toy_network, **options):
    sites = sites or [toy_site(name) for name in "ABC"]
    options = {"rounds": 2, "training": TRAINING, **options}
    return simulate(algorithm or FedAvg(), sites, network, TASK, **options)


def equal(a: Tensors, b: Tensors) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_same_seed_gives_the_same_bits_and_another_one_does_not():
    first, second, other = run(seed=1), run(seed=1), run(seed=2)
    assert first.model is not None
    assert equal(first.model, second.model)
    assert first.scores == second.scores
    assert not equal(first.model, other.model)


def test_order_of_the_sites_does_not_matter():
    sites = [toy_site(name) for name in "CAB"]
    assert equal(run().model, run(sites=sites).model)


def test_global_generator_is_left_as_it_was_and_has_no_say():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first = run()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(5)
    assert equal(run().model, first.model)


def test_initial_models_follow_from_seed_and_number():
    with ambient(5, "model", 1):
        expected = toy_network().state_dict()
    assert equal(initial_model(toy_network, 5, 1), Tensors(expected))
    assert not equal(initial_model(toy_network, 5, 0), Tensors(expected))


def test_result_holds_models_scores_and_records(tmp_path):
    result = run(FedBN(), output=tmp_path)
    assert result.model is None
    assert set(result.personal) == {"A", "B", "C"}
    assert set(result.scores) == {"A", "B", "C"}
    assert all(set(kinds) == {"personal"} for kinds in result.scores.values())
    assert [record.round for record in result.records] == [1, 2]


def test_interrupted_call_goes_on_in_its_folder(tmp_path):
    seen: list[int] = []

    def stop(record):
        seen.append(record.round)
        if record.round == 1:
            raise KeyboardInterrupt

    whole = run()
    with pytest.raises(KeyboardInterrupt):
        run(output=tmp_path, observe=stop)
    again: list[int] = []
    resumed = run(output=tmp_path, observe=lambda record: again.append(record.round))
    assert seen == [1]
    assert again == [2]
    assert equal(resumed.model, whole.model)
    assert resumed.scores == whole.scores


def test_interrupted_run_continues_at_the_learning_rate_of_its_round(tmp_path):
    recipe = replace(TRAINING, schedule="polynomial", power=2.0, warm_up=2)
    options = {"rounds": 4, "training": recipe}

    def stop(record):
        if record.round == 2:
            raise KeyboardInterrupt

    whole = run(**options)
    with pytest.raises(KeyboardInterrupt):
        run(**options, output=tmp_path, observe=stop)
    resumed = run(**options, output=tmp_path)
    assert equal(resumed.model, whole.model)
    assert not equal(run(rounds=4).model, whole.model)
    with pytest.raises(ConfigError, match="warm_up is 2, of 2 rounds in all"):
        run(rounds=2, training=recipe)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"algorithm": FedBN()}, "algorithm"),
        ({"algorithm": FedAvg("uniform")}, "algorithm"),
        ({"seed": 1}, "seed"),
        ({"rounds": 3}, "rounds"),
        ({"training": replace(TRAINING, lr=0.1)}, "training"),
        ({"sites": [toy_site("A")]}, "sites"),
    ],
)
def test_folder_of_another_run_is_refused(tmp_path, change, key):
    run(output=tmp_path)
    words = rf"{tmp_path} holds a run with other settings \({key}\)"
    with pytest.raises(CheckpointError, match=words):
        run(output=tmp_path, **change)
    assert run(output=tmp_path).scores  # and the run there is unharmed


def test_codecs_of_a_call_shorten_its_messages_and_belong_to_its_folder(tmp_path):
    plain = run()
    assert equal(run(codecs=Codecs(Identity(), Identity())).model, plain.model)
    half = Codecs(Half(), Half())
    coded = run(codecs=half, output=tmp_path)
    assert not equal(coded.model, plain.model)
    assert equal(run(codecs=half, output=tmp_path).model, coded.model)
    for other in ({}, {"codecs": Codecs(Half())}):
        with pytest.raises(CheckpointError, match=r"other settings \(coding\)"):
            run(output=tmp_path, **other)


def test_no_rounds_are_refused():
    with pytest.raises(ConfigError, match="rounds is 0; give a whole number from 1"):
        run(rounds=0)


def test_two_sites_with_one_name_are_refused():
    with pytest.raises(ConfigError, match="several sites have the same name"):
        run(sites=[toy_site("A"), toy_site("A")])


def test_forbidden_part_is_refused_before_anything_is_done(tmp_path):
    site = replace(toy_site("B"), policy=EgressPolicy(forbid=frozenset({"num_examples"})))
    with pytest.raises(EgressError) as caught:
        run(FedBN(), [toy_site("A"), site], output=tmp_path / "run")
    for word in ("FedBN", "'num_examples'", "site 'B'"):
        assert word in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_policy_that_names_all_but_the_model_is_refused():
    allow = frozenset({"progress", "scores", "num_examples"})
    site = replace(toy_site("A"), policy=EgressPolicy(allow=allow))
    with pytest.raises(EgressError, match="FedAvg sends 'model'"):
        run(sites=[site])


def test_opt_in_part_needs_no_leave_to_begin_with():
    assert set(run(IOPFL()).personal) == {"A", "B", "C"}


@pytest.mark.parametrize("change", [{"optimizer": "adam"}, {"momentum": 0.9}])
def test_optimiser_that_makes_a_method_wrong_is_refused(change):
    training = replace(TRAINING, **change)
    kind = "adam" if "optimizer" in change else "sgd with momentum"
    with pytest.raises(
        ConfigError, match=f"Scaffold is right with plain sgd only, not with {kind}"
    ):
        run(Scaffold(), training=training)


class TiedNetwork(nn.Module):
    """Two layers with one weight, batch normalisation with its counter, and a head."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.norm(self.b(self.a(x))))


@pytest.mark.parametrize("algorithm", [FedAvg(), FedBN(), IOPFL(), Scaffold()])
def test_ties_and_counters_survive_rounds(tmp_path, algorithm):
    result = run(algorithm, network=TiedNetwork, rounds=3, output=tmp_path)
    models = [m for m in (result.model, *result.personal.values()) if m is not None]
    assert models
    for model in models:
        assert model["a.weight"] is model["b.weight"]
        assert model["norm.num_batches_tracked"].dtype == torch.int64


def test_counter_of_batches_is_the_largest_of_all_clients(tmp_path):
    """Nine, fourteen and 21 examples in fours: 2, 4 and 5 steps a round, the tail of one merged."""
    steps: list[int] = []
    site = toy_site("C")
    assert len(site.train) == 21
    result = run(output=tmp_path, rounds=1, observe=lambda record: steps.append(record.round))
    assert result.model is not None
    assert int(result.model["1.num_batches_tracked"]) == 5


@pytest.mark.parametrize(
    ("good", "kind", "words"),
    [
        (2, StorageError, r"^the disk that holds .*/server is full; free some space and continue"),
        (14, ClientError, r"^client '.', round 1, evaluate: StorageError; the details are in the"),
    ],
)
def test_full_disk_is_one_sentence_and_the_run_goes_on_later(
    tmp_path, monkeypatch, caplog, good, kind, words
):
    """At the server it is said at once; at a client, whose folders are its own, in its log."""
    whole = run()
    original, left = os.fsync, [good]

    def full(number):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(kind, match=words):
            run(output=tmp_path)
    if kind is ClientError:
        assert f"the disk that holds {tmp_path}/clients/" in caplog.text
    assert not list(tmp_path.rglob("*.tmp"))
    assert equal(run(output=tmp_path).model, whole.model)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_permission_is_one_sentence(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="no permission to write in"):
        run(output=tmp_path / "run")


def test_file_in_place_of_the_folder_is_one_sentence(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(StorageError, match="run"):
        run(output=tmp_path / "run")


@dataclass(frozen=True)
class Fails(FedAvg):
    """FedAvg in which B fails in round 2."""

    @handler
    def train(self, client, request):
        reply = super().train(client, request)
        if client.id == "B" and client.round == 2:
            bad = reply["model"].map(lambda t: t * float("nan") if t.is_floating_point() else t)
            return Message({**reply, "model": bad})
        return reply


def test_client_that_fails_ends_the_run_or_is_left_out():
    with pytest.raises(ProtocolError, match=r"client 'B', round 2, train: part 'model': .* NaN"):
        run(Fails())
    result = run(Fails(), participation=SKIPPING)
    (left_out,) = result.records[1].left_out
    assert left_out["client"] == "B"
    assert result.model is not None
    assert all(t.isfinite().all() for t in result.model.values())


def test_model_that_diverges_names_the_client():
    image = torch.full((8, 3), 1e20)
    data = TensorDataset({"image": image, "label": torch.zeros(8, 1)})
    sites = [toy_site("A"), Site("hot", data, data, data)]
    network = lambda: nn.Linear(3, 1)  # noqa: E731
    with pytest.raises(ClientError, match="client 'hot', round 1, train: the loss became inf at"):
        run(sites=sites, network=network)


DRIVER = """
import json, os, signal, sys, time
from pathlib import Path
from torch import nn
from collegium.experiment.config.registry import ALGORITHMS
from collegium.runtime.participation import SKIPPING
from collegium.runtime.simulation import simulate
from collegium.tasks import SupervisedTask
from collegium.testing.toy import TRAINING, toy_network, toy_site

name, folder = sys.argv[1], Path(sys.argv[2])

def run(output):
    sites = [toy_site(site) for site in "ABC"]
    task = SupervisedTask(nn.functional.mse_loss)
    simulate(ALGORITHMS.load(name)(), sites, toy_network, task, rounds=2, training=TRAINING,
             output=output)

def killed(output, number, when):
    "Run in a process of its own that dies at the number-th replacement of a file."
    child = os.fork()
    if child:
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        return
    original, left = os.replace, [number]
    def replace(*arguments, **options):
        left[0] -= 1
        if left[0] == 0 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        original(*arguments, **options)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    os.replace = replace
    run(output)
    os._exit(0)

def killed_after(output, seconds):
    "Run in a process of its own that is killed from outside."
    child = os.fork()
    if not child:
        run(output)
        os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)

def states(output):
    found = {str(p.relative_to(output)): p.read_bytes() for p in output.rglob("*.state")}
    return found | {"test": (output / "server/test.json").read_bytes()}

count = [0]
original = os.replace
def counting(*arguments, **options):
    count[0] += 1
    original(*arguments, **options)
os.replace = counting
start = time.perf_counter()
run(folder / "whole")
seconds = time.perf_counter() - start
os.replace = original
expected = states(folder / "whole")
different, moments, leftovers = [], 0, 0
for number in range(1, count[0] + 1, 4):
    for when in ("before", "after"):
        output = folder / f"{number}-{when}"
        killed(output, number, when)
        leftovers += len(list(output.rglob("*.tmp")))
        run(output)
        moments += 1
        different += [f"{number} {when}"] if states(output) != expected else []
for number in range(4):
    output = folder / f"time-{number}"
    killed_after(output, seconds * (number + 0.5) / 4)
    run(output)
    moments += 1
    different += [f"time {number}"] if states(output) != expected else []
print(json.dumps({"different": different, "moments": moments, "states": len(expected),
                  "leftovers": leftovers}))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("name", ["ditto", pytest.param("scaffold", marks=pytest.mark.slow)])
def test_run_killed_at_any_moment_has_the_same_bits_when_resumed(tmp_path, name):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, name, str(tmp_path)],
        capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["different"] == []
    assert found["moments"] > 15
    assert found["states"] > 8
    assert found["leftovers"] > 5  # the kills did hit writes half-way


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("algorithm", "codecs"),
    [(FedAvg(), {}), (Scaffold(), {}), (IOPFL(), {}), (FedAvg(), {"codecs": Codecs(up=Half())})],
    ids=["fedavg", "scaffold", "iopfl", "coded"],
)
def test_a_run_on_a_gpu_has_the_same_bits_again_and_after_an_interruption(
    cuda, tmp_path, algorithm, codecs
):
    def stop(record):
        if record.round == 1:
            raise KeyboardInterrupt

    first, second = (run(algorithm, device=cuda, **codecs) for _ in range(2))
    with pytest.raises(KeyboardInterrupt):
        run(algorithm, device=cuda, output=tmp_path, observe=stop, **codecs)
    resumed = run(algorithm, device=cuda, output=tmp_path, **codecs)
    assert first.scores == second.scores == resumed.scores
    assert first.model is not None
    assert equal(first.model, second.model)
    assert equal(first.model, resumed.model)


@pytest.mark.gpu
def test_sites_train_together_on_a_gpu(cuda):
    def network():
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))

    recipe = replace(TRAINING, local_steps=5)
    options = {"network": network, "device": cuda, "training": recipe}
    together, again = (run(together=True, **options) for _ in range(2))
    apart = run(**options)
    assert equal(together.model, again.model)
    for name in apart.model:
        torch.testing.assert_close(together.model[name], apart.model[name], rtol=1e-3, atol=1e-4)
