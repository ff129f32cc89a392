import csv
import errno
import logging
import os
import stat
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.fedbn import FedBN
from collegium.algorithms.iopfl import IOPFL
from collegium.core.algorithm import handler
from collegium.core.dataset import Batch, TensorDataset
from collegium.core.failures import kind_and_sentence
from collegium.core.message import Message, pack, unpack
from collegium.core.payloads import ModelPart, Numbers
from collegium.core.randomness import generator
from collegium.core.tensors import Tensors
from collegium.core.userfile import on_one_machine
from collegium.data.site import EgressPolicy, Site
from collegium.errors import ClientError, ConfigError, DataError, EgressError, ProtocolError
from collegium.runtime.client import ClientRuntime
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.ledger import first_break, read_ledger
from collegium.runtime.requests import Request
from collegium.tasks import SegmentationTask, SupervisedTask
from collegium.testing.toy import TRAINING, ToyFederation, toy_model, toy_network, toy_site
from collegium.training.loop import LocalTraining

SECRET = "patient_4711_Doe"


def client(
    root: Path, algorithm=None, *, site: Site | None = None, training=TRAINING, **options
) -> ClientRuntime:
    local = LocalTraining(toy_network(), SupervisedTask(nn.functional.mse_loss), training)
    site = site or toy_site("A")
    options = {"make_model": local.current, "seed": 7, **options}
    return ClientRuntime(site, algorithm or FedAvg(), local, root=root, **options)


def inputs(split: str) -> Batch:
    """The data of a toy site."""
    dataset = getattr(toy_site("A"), split)
    assert isinstance(dataset, TensorDataset)
    return dataset.inputs


def request(
    method: str = "train",
    *,
    round: int = 1,  # noqa: A002
    exchange: int = 0,
    stage="train",
    accepted: str | None = None,
    **parts,
):
    parts = parts or {"model": toy_model(0)}
    return Request("A", round, exchange, stage, method, pack(parts), accepted=accepted)


def reply(runtime: ClientRuntime, *arguments, **options) -> dict:
    envelope = unpack(runtime.handle(request(*arguments, **options)))
    assert "reply" in envelope, envelope
    found: dict = envelope["reply"]
    return found


def failure(runtime: ClientRuntime, *arguments, **options) -> dict:
    found: dict = unpack(runtime.handle(request(*arguments, **options)))["error"]
    return found


@dataclass(frozen=True)
class Counts(FedAvg):
    """Counts in client.state what it was asked."""

    sends = {"numbers": Numbers()}  # noqa: RUF012

    @handler
    def count(self, client, request):
        """Count on."""
        client.state["count"] = client.state.get("count", 0) + 1
        return Message.of(numbers={"count": client.state["count"]})

    @handler
    def keep(self, client, request):
        """Leave everything as it is."""
        return Message.of(numbers={"count": client.state.get("count", 0)})

    @handler
    def draw_twice(self, client, request):
        """Use one stream for two things."""
        client.rng("a")
        client.rng("b")
        client.rng("a")
        return Message.of()

    @handler
    def draw(self, client, request):
        """Use a stream of its own."""
        value = float(torch.rand((), generator=client.rng("mine")))
        return Message.of(numbers={"value": value, "lr": client.lr, "steps": client.num_steps})

    @handler
    def fit_twice(self, client, request):
        """Train twice in one stream."""
        return Message.of(model=client.fit(client.fit(request["model"])))


def count(runtime: ClientRuntime, method: str = "count", **options) -> int:
    return int(reply(runtime, method, **options)["numbers"]["count"])


def test_state_goes_from_exchange_to_exchange_and_round_to_round(tmp_path):
    runtime = client(tmp_path, Counts())
    assert count(runtime, round=1, exchange=0) == 1
    assert count(runtime, round=1, exchange=1) == 2
    assert count(runtime, round=2, exchange=0) == 3
    assert count(client(tmp_path, Counts()), round=2, exchange=1) == 4


def test_repeated_request_starts_from_the_state_before_it(tmp_path):
    runtime = client(tmp_path, Counts())
    first = request("count", round=1)
    data = runtime.handle(first)
    assert count(runtime, round=2) == 2
    assert runtime.handle(first) == data
    assert count(runtime, round=2) == 2


def test_rerun_that_changes_nothing_forgets_what_an_earlier_one_stored(tmp_path):
    runtime = client(tmp_path, Counts())
    count(runtime, round=1)
    count(runtime, round=2)
    assert runtime.store.names() == ["000001-0000", "000002-0000"]
    assert count(runtime, "keep", round=2) == 1
    assert runtime.store.names() == ["000001-0000"]


def test_evaluation_sees_the_round_s_last_state_and_stores_none(tmp_path):
    runtime = client(tmp_path, Counts())
    for exchange in range(2):
        count(runtime, round=1, exchange=exchange)
    count(runtime, round=2)
    names = runtime.store.names()
    assert count(runtime, round=1, stage="evaluate") == 3
    assert count(runtime, round=1, stage="evaluate") == 3
    assert count(runtime, "keep", round=2, stage="evaluate") == 3
    assert runtime.store.names() == names


def test_a_state_whose_reply_the_server_never_used_does_not_count(tmp_path):
    runtime = client(tmp_path, Counts())
    assert count(runtime, round=1, accepted="") == 1
    assert count(runtime, round=2, accepted="000001-0000") == 2
    assert count(runtime, round=3, accepted="000001-0000") == 2  # the reply of round 2 was lost
    assert runtime.store.names() == ["000001-0000", "000003-0000"]
    seen = count(runtime, "keep", round=3, stage="evaluate", accepted="000001-0000")
    assert (seen, runtime.store.names()) == (1, ["000001-0000", "000003-0000"])
    assert count(runtime, "keep", round=4, accepted="000001-0000") == 1
    assert count(runtime, round=5, exchange=1, accepted="000004-0000") == 2
    assert count(runtime, round=6, accepted="") == 1  # as at a server that begins again


def test_old_states_are_forgotten_when_the_server_no_longer_needs_them(tmp_path):
    runtime = client(tmp_path, Counts())
    for number in range(1, 6):
        runtime.handle(replace(request("count", round=number), floor=max(number - 2, 0)))
    assert runtime.store.names() == ["000002-0000", "000003-0000", "000004-0000", "000005-0000"]


def test_only_handlers_can_be_called(tmp_path):
    with on_one_machine():
        error = failure(client(tmp_path), "deploy")
    assert error == {"kind": "ProtocolError", "text": "'deploy' is not a handler of FedAvg"}


def test_random_stream_is_named_by_client_round_stage_exchange_and_purpose(tmp_path):
    runtime = client(tmp_path, Counts())
    values = [
        reply(runtime, "draw", round=3, exchange=2)["numbers"]["value"],
        reply(runtime, "draw", round=3, exchange=1)["numbers"]["value"],
        reply(runtime, "draw", round=4, exchange=2)["numbers"]["value"],
    ]
    rng = generator(7, "client", "A", 3, "train", 2, "mine")
    assert values[0] == float(torch.rand((), generator=rng))
    assert len(set(values)) == 3


@pytest.mark.parametrize(("method", "purpose"), [("draw_twice", "a"), ("fit_twice", "fit")])
def test_random_stream_is_used_once(tmp_path, method, purpose):
    with on_one_machine():
        error = failure(client(tmp_path, Counts()), method)
    assert f"the random generator '{purpose}' was used twice in one handler" in error["text"]


def test_learning_rate_decays_from_the_second_round(tmp_path):
    runtime = client(tmp_path, Counts(), training=replace(TRAINING, lr=0.8, lr_decay=0.5))
    found = [reply(runtime, "draw", round=n)["numbers"]["lr"] for n in (0, 1, 2, 4)]
    assert found == [0.8, 0.8, 0.4, 0.1]


def test_steps_follow_from_examples_and_recipe(tmp_path):
    assert reply(client(tmp_path, Counts()), "draw")["numbers"]["steps"] == 2
    steps = replace(TRAINING, local_steps=5)
    found = reply(client(tmp_path, Counts(), training=steps), "draw")
    assert found["numbers"]["steps"] == 5


def test_progress_reports_loss_and_steps(tmp_path):
    progress = reply(client(tmp_path))["progress"]
    assert set(progress) == {"loss", "steps"}
    assert progress["steps"] == 2
    assert progress["loss"] > 0


def test_optimiser_is_kept_in_the_client_s_state_or_not(tmp_path):
    adam = replace(TRAINING, optimizer="adam")
    results = {}
    for rule in ("reset", "keep"):
        runtime = client(tmp_path / rule, training=replace(adam, optimizer_state=rule))
        for number in (1, 2):
            results[rule, number] = reply(runtime, round=number)["model"]
        state = runtime.store.load(runtime.store.names()[-1]) if runtime.store.names() else {}
        kept = state.get("optimizer/fit", {})
        assert {float(m["step"]) for m in kept.values()} == ({4.0} if rule == "keep" else set())
    assert torch.equal(results["reset", 1]["0.weight"], results["keep", 1]["0.weight"])
    assert not torch.equal(results["reset", 2]["0.weight"], results["keep", 2]["0.weight"])


def test_site_without_examples_returns_the_model_as_it_came(tmp_path, caplog):
    empty = TensorDataset({"image": torch.zeros(0, 3), "label": torch.zeros(0, 1)})
    site = replace(toy_site("A"), train=empty)
    with caplog.at_level(logging.WARNING):
        found = reply(client(tmp_path, site=site))
    assert found["num_examples"] == 0
    assert all(torch.equal(found["model"][name], t) for name, t in toy_model(0).items())
    assert "site 'A' has no training examples" in caplog.text


def test_scores_carry_pseudonyms_and_the_key_stays_in_the_site_s_folder(tmp_path):
    rows_in = inputs("test")
    site = replace(toy_site("A"), test=TensorDataset(rows_in, ["Zoe", SECRET, "Zoe", "Al"]))
    runtime = client(tmp_path, site=site)
    parts = {"models": {"1": toy_model(0)}, "kinds": {"global": "1"}, "chosen": None}
    data = runtime.handle(replace(request("test", stage="evaluate"), payload=pack(parts)))
    assert SECRET.encode() not in data
    rows = unpack(data)["reply"]["scores"]["global"]
    assert [(row["case"], row["patient"]) for row in rows] == [
        ("test-c001", "test-p001"), ("test-c002", "test-p002"),
        ("test-c003", "test-p001"), ("test-c004", "test-p003"),
    ]  # fmt: skip
    with (tmp_path / "cases-test.csv").open() as file:
        key = list(csv.DictReader(file))
        assert sys.platform == "win32" or stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
    assert key[1] == {
        "case": "test-c002", "patient": "test-p002", "own_case": "1", "own_patient": SECRET,
    }  # fmt: skip
    network = toy_network().eval()
    network.load_state_dict(dict(toy_model(0)))
    with torch.no_grad():
        output = network(rows_in["image"])
    for row, error in zip(rows, (output - rows_in["label"]).square()[:, 0].tolist(), strict=True):
        assert row["negative_loss"] == pytest.approx(-error, rel=1e-5)


class Unreadable(TensorDataset):
    """A dataset whose files are damaged."""

    def batch(self, indices, rngs):
        raise DataError(f"/hospital/{SECRET}.nii.gz is damaged; copy it again")


class Broken(TensorDataset):
    """A dataset with a programming error."""

    def batch(self, indices, rngs):
        raise KeyError(f"/hospital/{SECRET}.nii.gz")


@pytest.mark.parametrize(("kind", "code"), [(Unreadable, "data"), (Broken, "client")])
def test_path_of_a_file_stays_in_the_site_s_log(tmp_path, caplog, kind, code):
    site = replace(toy_site("A"), train=kind(inputs("train")))
    runtime = client(tmp_path, site=site)
    with caplog.at_level(logging.WARNING):
        data = runtime.handle(request())
    assert b"hospital" not in data
    assert SECRET.encode() not in data
    assert unpack(data)["error"] == {"code": code, "names": {}}
    assert SECRET in caplog.text
    (line,) = read_ledger(tmp_path / "ledger.jsonl")
    assert (list(line["parts"]), line["bytes"]) == (["failure"], len(data))


def test_a_policy_may_forbid_to_say_why_something_failed(tmp_path):
    policy = EgressPolicy(forbid=frozenset({"failure"}))
    site = replace(toy_site("A"), train=Unreadable(inputs("train")), policy=policy)
    assert failure(client(tmp_path, site=site)) == {"code": "withheld", "names": {}}


def test_error_of_the_server_holds_no_path(tmp_path):
    federation = ToyFederation(FedAvg(), tmp_path)
    clients = federation.clients()
    clients["B"].examples = Unreadable(inputs("train"))
    federation.server.transport = InProcess(lambda: clients)
    with pytest.raises(ClientError) as caught:
        federation.run()
    assert str(caught.value) == (
        "client 'B', round 1, train: DataError; the details are in the log of this site"
    )


def test_full_disk_at_a_client_stays_an_answer(tmp_path, monkeypatch, caplog):
    runtime = client(tmp_path, Counts())

    def full(_number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with caplog.at_level(logging.WARNING):
            error = failure(runtime, "count")
    assert error == {"code": "storage", "names": {}}
    assert f"the disk that holds {tmp_path / 'states'} is full" in caplog.text
    assert count(runtime) == 1


def test_everything_that_leaves_is_in_the_ledger_first(tmp_path):
    runtime = client(tmp_path)
    data = runtime.handle(request(round=3, exchange=1))
    (line,) = read_ledger(tmp_path / "ledger.jsonl")
    assert line["bytes"] == len(data)
    assert list(line["parts"]) == ["model", "num_examples", "progress"]
    assert [name for name, _, _ in line["parts"]["model"]["tensors"]] == list(toy_model(0))
    assert (line["round"], line["exchange"], line["stage"], line["method"]) == (
        3, 1, "train", "train",
    )  # fmt: skip


def test_nothing_leaves_when_the_ledger_cannot_be_written(tmp_path, monkeypatch):
    runtime = client(tmp_path)
    (tmp_path / "ledger.jsonl").mkdir()
    data = runtime.handle(request())
    assert set(unpack(data)) == {"error"}
    assert unpack(data)["error"] == {"code": "storage", "names": {}}


def test_fedbn_never_sends_a_norm_tensor(tmp_path):
    federation = ToyFederation(FedBN(), tmp_path).run(3)
    norm = {"1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
    for site in ("A", "B", "C"):
        lines = read_ledger(tmp_path / "clients" / site / "ledger.jsonl")
        sent = {
            n for line in lines for n, _, _ in line["parts"].get("model", {}).get("tensors", [])
        }
        assert sent == set(federation.server.state["model"]) - norm
        assert first_break(lines) is None


def test_undeclared_part_never_leaves(tmp_path):
    @dataclass(frozen=True)
    class Leaks(FedAvg):
        """Sends the patients."""

        @handler
        def train(self, client, request):
            client.state["leaked"] = 1
            return Message.of(patients=[SECRET])

    runtime = client(tmp_path, Leaks())
    with on_one_machine():
        data = runtime.handle(request())
    assert SECRET.encode() not in data
    text = unpack(data)["error"]["text"]
    assert text == "part 'patients' is not among what Leaks declares to send"
    assert runtime.store.names() == []


@dataclass(frozen=True)
class Careless(IOPFL):
    """Sends the personal model without asking whether it may."""

    @handler
    def share_personal(self, client, request):
        return Message.of(personal=self.personal_model(client, request))


def policy(*allow: str, share: tuple[str, ...] = (), forbid: tuple[str, ...] = ()) -> Site:
    allowed = frozenset(allow) or None
    own = EgressPolicy(allowed, frozenset(share), frozenset(forbid))
    return replace(toy_site("A"), policy=own)


@pytest.mark.parametrize(
    ("site", "sent"),
    [
        (policy(), False),
        (policy("personal"), True),
        (policy("model", "num_examples"), False),
        (policy("personal", forbid=("personal",)), False),
        (policy(share=("personal",)), True),
        (policy("model", share=("personal",)), True),
        (policy(share=("personal",), forbid=("personal",)), False),
    ],
)
def test_opt_in_part_leaves_only_where_the_policy_names_it(tmp_path, site, sent):
    runtime = client(tmp_path, Careless(), site=site)
    assert runtime.may_send("personal") == sent
    envelope = unpack(runtime.handle(request("share_personal", stage="evaluate")))
    if sent:
        assert set(envelope["reply"]) == {"personal"}
    else:
        assert envelope["error"] == {
            "code": "egress_part", "names": {"site": "A", "part": "personal"}
        }  # fmt: skip
        assert kind_and_sentence(envelope["error"]) == (
            EgressError,
            "the policy of site 'A' does not let 'personal' out; nothing was sent",
        )
        (line,) = read_ledger(tmp_path / "ledger.jsonl")
        assert list(line["parts"]) == ["failure"]


def test_iopfl_deploys_the_personal_models_of_the_sites_that_let_them_out(tmp_path):
    federation = ToyFederation(IOPFL(), tmp_path).run(2)
    before = federation.states()
    assert set(federation.server.deploy()) == {"global"}
    clients = federation.clients()
    for runtime in clients.values():
        runtime.site = replace(runtime.site, policy=EgressPolicy(share=frozenset({"personal"})))
    again = ToyFederation(IOPFL(), tmp_path, lambda _: InProcess(lambda: clients))
    again.server.begin()  # after a restart the clients' states must be found and left alone
    models = again.server.deploy()
    assert set(models) == {"global", "A", "B", "C"}
    for site in "ABC":
        kept = clients[site].kept()
        assert kept is not None
        assert all(torch.equal(models[site][name], kept[name]) for name in kept)
    assert federation.states() == before


def keep(runtime: ClientRuntime, number: int | None, chosen: int | None) -> float | None:
    if number is not None:
        runtime.round = number
    model = None if number is None else Tensors({"w": torch.tensor([float(number)])})
    runtime.keep(model, chosen)
    found = runtime.kept()
    return None if found is None else float(found["w"])


def test_a_site_keeps_the_chosen_personal_model_and_the_newest(tmp_path):
    runtime = client(tmp_path)
    assert keep(runtime, None, None) is None
    assert keep(runtime, 1, None) == 1
    assert keep(runtime, 2, 1) == 2
    assert keep(runtime, 2, 1) == 2  # the request came twice
    assert keep(runtime, 3, 1) == 3
    assert sorted(f.stem for f in (tmp_path / "kept").iterdir()) == ["000001", "000003"]
    assert keep(runtime, None, 1) == 1
    assert keep(runtime, None, 1) == 1


def test_of_a_chosen_round_in_which_it_was_away_a_site_keeps_the_model_before(tmp_path):
    runtime = client(tmp_path)
    keep(runtime, 2, None)
    keep(runtime, 4, 2)
    assert keep(runtime, None, 3) == 2
    assert keep(runtime, None, 1) == 2


def test_pool_exists_in_a_simulation_only(tmp_path):
    with pytest.raises(ConfigError, match="which only a simulation has"):
        _ = client(tmp_path).pool
    pool = toy_site("B").train
    assert client(tmp_path, pool=pool).pool is pool


def test_damaged_client_state_is_told_without_its_path(tmp_path, caplog):
    runtime = client(tmp_path, Counts())
    count(runtime, round=1)
    path = runtime.store.path("000001-0000")
    path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        error = failure(runtime, "count", round=2)
    assert error == {"code": "checkpoint", "names": {}}
    assert f"{path} is damaged" in caplog.text


def test_rest_of_a_killed_write_is_cleaned_when_the_site_works_again(tmp_path):
    runtime = client(tmp_path, Counts())
    for folder in (tmp_path / "kept", tmp_path / "states"):
        folder.mkdir(exist_ok=True)
        (folder / "x.state.1.tmp").write_bytes(b"half")
    client(tmp_path, Counts())
    assert len(list(tmp_path.rglob("*.tmp"))) == 2  # another process may be writing them
    count(runtime)
    assert not list(tmp_path.rglob("*.tmp"))


def test_absent_part_of_a_request_is_named(tmp_path):
    with on_one_machine():
        error = failure(client(tmp_path), n=3)
    assert error["kind"] == ProtocolError.__name__
    assert error["text"] == "request 'train': no part 'model' (has: n)"


@dataclass(frozen=True)
class Looks(FedAvg):
    """A client that collects predictions and features, and trains nothing."""

    @handler
    def train(self, client, request):
        model = request["model"]
        client.state["seen"] = client.collect(
            model, lambda batch, output: Tensors({"label": batch["label"], **output._asdict()})
        )
        client.state["trained"] = client.fit(model, trainable=())
        return Message.of(model=model, num_examples=client.num_examples)


def test_predictions_and_features_of_a_pass_are_those_of_the_network(tmp_path):
    runtime = client(tmp_path, Looks())
    reply = unpack(runtime.handle(request()))["reply"]
    assert "progress" not in reply  # nothing was trained
    assert pack(runtime.state["trained"]) == pack(toy_model(0))
    network, data = toy_network().eval(), inputs("train")
    network.load_state_dict(dict(toy_model(0)))
    with torch.no_grad():
        features = nn.Sequential(*[*network.children()][:-1])(data["image"])
        predictions = network(data["image"])
    seen = runtime.state["seen"]
    order = [
        int((data["label"] == label).all(dim=1).nonzero())
        for batch in seen
        for label in batch["label"]
    ]
    assert sorted(order) == [*range(len(order))]
    assert len(order) == runtime.num_examples
    found = {key: torch.cat([batch[key] for batch in seen]) for key in ("features", "prediction")}
    torch.testing.assert_close(found["features"], features[order])
    torch.testing.assert_close(found["prediction"], predictions[order])


@dataclass(frozen=True)
class LooksAtWholeCases(FedAvg):
    """A client that looks at the windows of its validation cases."""

    @handler
    def train(self, client, request):
        client.state["seen"] = client.collect(
            request["model"],
            lambda batch, output: Tensors({**batch, "prediction": output.prediction}),
            data=client.validation_examples,
            whole=True,
        )
        return Message.of(model=request["model"], num_examples=client.num_examples)


def test_whole_cases_are_seen_in_the_windows_in_which_they_are_predicted(tmp_path):
    images = torch.rand(2, 1, 6, 4, generator=generator(0, "images"))
    masks = images[:, 0] > 0.3
    masks[1] = True
    labels = torch.zeros(2, 6, 4, dtype=torch.int64)
    whole = TensorDataset({"image": images, "label": labels, "mask": masks})

    class Cropped(TensorDataset):
        """Cases whose samples are crops."""

        def batch(self, indices, rngs):
            return {key: value[..., :2, :2] for key, value in super().batch(indices, rngs).items()}

    network = nn.Conv2d(1, 2, 1)
    model = Tensors(network.state_dict()).clone()
    task = SegmentationTask(2, window=(4, 4), overlap=0.5, batch_size=3)
    local = LocalTraining(network, task, TRAINING)
    site = Site("A", whole, Cropped(whole.inputs), whole)
    runtime = ClientRuntime(
        site, LooksAtWholeCases(), local, make_model=local.current, seed=7, root=tmp_path
    )
    assert "reply" in unpack(runtime.handle(request(model=model)))
    seen = runtime.state["seen"]
    assert [tuple(batch["image"].shape) for batch in seen] == [(2, 1, 4, 4)] * 2
    for batch, image, mask in zip(seen, images, masks, strict=True):
        assert batch["image"].equal(torch.stack([image[:, :4], image[:, 2:]]))
        assert batch["mask"].equal(torch.stack([mask[:4], mask[2:]]))
        with torch.no_grad():
            torch.testing.assert_close(batch["prediction"], network(batch["image"]))


def test_without_a_field_of_view_padding_alone_does_not_count(tmp_path):
    images = torch.rand(1, 1, 3, 4, generator=generator(0, "images"))
    whole = TensorDataset({"image": images, "label": torch.zeros(1, 3, 4, dtype=torch.int64)})
    local = LocalTraining(nn.Conv2d(1, 2, 1), SegmentationTask(2, window=(4, 4)), TRAINING)
    model = local.current()
    site = Site("A", whole, whole, whole)
    runtime = ClientRuntime(
        site, LooksAtWholeCases(), local, make_model=local.current, seed=7, root=tmp_path
    )
    assert "reply" in unpack(runtime.handle(request(model=model)))
    [batch] = runtime.state["seen"]
    assert batch["mask"].sum(dim=(1, 2)).tolist() == [12]
    assert batch["image"].shape == (1, 1, 4, 4)


@dataclass(frozen=True)
class SendsAdapters(FedAvg):
    """FedAvg that sends a part which the network does not have."""

    sends = {"model": ModelPart(only="lora")}  # noqa: RUF012


def test_a_part_that_the_network_does_not_have_is_refused_before_training(tmp_path):
    federation = ToyFederation(SendsAdapters(), tmp_path)
    with pytest.raises(ConfigError, match=r"the part 'model' cannot be sent: .* tensor 'lora'"):
        federation.run()
