"""Whole runs of the toy federation with codecs."""

import logging
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from collegium.algorithms.fedavg import FedAvg
from collegium.compression.half import Half
from collegium.compression.identity import Identity
from collegium.compression.session.groups import CODEC_KEY, RESEND_REQUEST, Codecs
from collegium.core.algorithm import handler
from collegium.core.message import Message, pack, unpack
from collegium.core.tensors import Tensors
from collegium.errors import ProtocolError
from collegium.experiment.config.registry import ALGORITHMS
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.ledger import first_break, read_ledger
from collegium.runtime.participation import SKIPPING
from collegium.runtime.requests import Request, Response
from collegium.runtime.run import Run
from collegium.testing.toy import ToyFederation, toy_model

METHODS = ("fedavg", "scaffold", "fedbn", "ifca", "ditto")


class Watched:
    """The engine of one process, which records all messages and may damage them."""

    def __init__(self, federation: ToyFederation, damage: str = "", only: int = 0) -> None:
        self._engine, self._damage, self._only = InProcess(federation.clients), damage, only
        self.seen: list[tuple[Request, bytes]] = []

    def exchange(self, requests: Iterable[Request]) -> Iterator[Response]:
        def noted() -> Iterator[Request]:
            for request in requests:
                asked.append(request)
                yield request

        asked: list[Request] = []
        for response in self._engine.exchange(noted()):
            data = response.data
            hit = response.client == self._damage and self._only in (0, asked[-1].round)
            if hit and asked[-1].stage == "train":
                data = data[:-1] + bytes([data[-1] ^ 1])  # the last byte is one of the code's
            self.seen.append((asked[-1], data))
            yield replace(response, data=data, signed=None if hit else response.signed)

    def close(self) -> None:
        self._engine.close()


def watched(root, algorithm=None, rounds: int = 3, damage: str = "", **options) -> ToyFederation:
    federation = ToyFederation(algorithm or FedAvg(), root, lambda f: Watched(f, damage), **options)
    return federation.run(rounds)


def seen(federation: ToyFederation, stage: str = "train") -> list[tuple[Request, bytes]]:
    transport = federation.server.transport
    assert isinstance(transport, Watched)
    return [pair for pair in transport.seen if pair[0].stage == stage]


def left_out(federation: ToyFederation) -> list[str]:
    records = Run(federation.server, 3, "negative_loss").records()
    return [entry["client"] for record in records for entry in record.left_out]


def models(federation: ToyFederation) -> list[Tensors]:
    state = federation.server.state
    return [state["model"]] if "model" in state else list(state["models"])


@pytest.mark.parametrize("method", METHODS)
def test_identity_changes_no_bit_of_models_and_scores(tmp_path, method):
    algorithm = ALGORITHMS.load(method)()
    plain = ToyFederation(algorithm, tmp_path / "plain").run(3)
    codecs = Codecs(Identity(), Identity())
    coded = ToyFederation(algorithm, tmp_path / "coded", codecs=codecs).run(3)
    for a, b in zip(models(plain), models(coded), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
    test = "server/test.json"
    assert plain.states()[test] == coded.states()[test]


@pytest.mark.parametrize("method", METHODS)
def test_half_precision_both_ways_stays_near(tmp_path, method):
    algorithm = ALGORITHMS.load(method)()
    plain = ToyFederation(algorithm, tmp_path / "plain").run(2)
    coded = ToyFederation(algorithm, tmp_path / "coded", codecs=Codecs(Half(), Half())).run(2)
    differ = False
    for a, b in zip(models(plain), models(coded), strict=True):
        for name in a:
            assert torch.allclose(a[name].float(), b[name].float(), atol=5e-3), name
            differ |= not torch.equal(a[name], b[name])
    assert differ


@pytest.mark.parametrize("both", [True, False])
def test_bytes_in_the_records_are_those_that_travel(tmp_path, coarse, both):
    codecs = Codecs(coarse(), coarse() if both else None)
    federation = watched(tmp_path, codecs=codecs)
    for record in Run(federation.server, 3, "negative_loss").records()[:3]:
        pairs = [pair for pair in seen(federation) if pair[0].round == record.round]
        assert record.bytes_down == {r.client: len(r.payload) for r, _ in pairs}
        assert record.bytes_up == {r.client: len(data) for r, data in pairs}


def test_evaluation_is_not_coded(tmp_path, coarse):
    federation = watched(tmp_path, codecs=Codecs(coarse(), coarse()))
    requests = seen(federation, "evaluate")
    assert requests
    for request, data in requests:
        assert CODEC_KEY not in unpack(request.payload)
        assert "coded" not in unpack(data)
    (last,) = [r for r, _ in requests if (r.client, r.method, r.round) == ("A", "evaluate", 3)]
    assert last.payload == pack({"model": federation.server.state["model"], "chosen": None})


def test_without_codecs_nothing_is_added(tmp_path):
    federation = watched(tmp_path)
    for request, data in seen(federation):
        assert unpack(request.payload).keys() == {"model"}
        assert unpack(data).keys() == {"reply", "of"}
    assert not any(CODEC_KEY.encode() in data for data in federation.states().values())


def test_messages_get_shorter_from_the_second_round_on(tmp_path):
    plain = watched(tmp_path / "plain", rounds=2)
    coded = watched(tmp_path / "coded", rounds=2, codecs=Codecs(Half(), Half()))
    numbers = sum(t.numel() for n, t in toy_model(0).items() if n in coded.server.parts.trainable)
    sent = {
        (r.round, r.client): len(unpack(r.payload)[CODEC_KEY]["parts"]["model"]["data"][""])
        for r, _ in seen(coded)
        if r.round == 2
    }
    assert set(sent) == {(2, c) for c in "ABC"}
    assert all(2 * numbers <= size < 4 * numbers for size in sent.values())
    for (a, _), (b, _) in zip(seen(plain), seen(coded), strict=True):
        whole, half = (unpack(r.payload)["model"].numel() for r in (a, b))
        assert whole - half == (numbers if b.round == 2 else 0)


def test_ledger_says_what_left_by_which_codec_in_how_many_bytes(tmp_path, coarse):
    federation = watched(tmp_path, codecs=Codecs(up=coarse()))
    lines = read_ledger(tmp_path / "clients/B/ledger.jsonl")
    answers = [data for request, data in seen(federation) if request.client == "B"]
    trained = [line for line in lines if line["stage"] == "train"]
    assert [line["bytes"] for line in trained] == [len(data) for data in answers]
    assert first_break(lines) is None
    envelope = unpack(answers[0])
    code = envelope["coded"]["model"]["data"][""].numel()
    rest = sum(t.numel() * t.element_size() for t in envelope["reply"]["model"].values())
    part = trained[0]["parts"]["model"]
    assert (part["codec"], part["bytes"]) == ("Coarse", code + rest)
    assert [name for name, _, _ in part["tensors"]] == list(toy_model(0))
    assert "codec" not in trained[0]["parts"]["num_examples"]


def test_site_that_lost_its_state_is_sent_everything_again(tmp_path, coarse, caplog):
    codecs = Codecs(coarse(), coarse())
    watched(tmp_path, rounds=1, codecs=codecs)
    shutil.rmtree(tmp_path / "clients/B/states")
    (tmp_path / "server/test.json").unlink()
    again = ToyFederation(FedAvg(), tmp_path, Watched, codecs=codecs)
    (tmp_path / "server/000002.state").unlink(missing_ok=True)  # what ended the run
    with caplog.at_level(logging.WARNING):
        again.run(3)
    assert "client 'B' lost its reference models; sending everything again" in caplog.text
    asked = [(r.round, r.client) for r, _ in seen(again)]
    assert asked == [(2, "A"), (2, "B"), (2, "C"), (2, "B"), (3, "A"), (3, "B"), (3, "C")]
    second = [pair for pair in seen(again) if pair[0].round == 2 and pair[0].client == "B"]
    assert [data == RESEND_REQUEST for _, data in second] == [True, False]
    record = Run(again.server, 3, "negative_loss").records()[1]
    assert record.bytes_down["B"] == sum(len(r.payload) for r, _ in second)
    assert record.bytes_up["B"] == sum(len(data) for _, data in second)
    assert record.left_out == []
    assert CODEC_KEY not in again.server.state  # of no concern to an algorithm, nor after a restart
    held = again.server._session.state["held"]  # type: ignore[union-attr]
    assert len({versions["model"] for versions in held.values()}) == 1


@dataclass(frozen=True)
class Explodes(FedAvg):
    """FedAvg in which one site's model is not a number."""

    @handler
    def train(self, client, request):
        """Divide by nothing."""
        reply = super().train(client, request)
        factor = float("nan") if client.id == "B" else 1.0
        return Message({**reply, "model": factor * reply["model"]})


@pytest.mark.parametrize("codec", ["coarse", "half", "identity"])
def test_update_that_is_not_a_number_is_named_or_left_out(tmp_path, coarse, codec, caplog):
    up = {"coarse": coarse, "half": Half, "identity": Identity}[codec]()
    words = r"client 'B', round 1, train: part 'model': .*(NaN|not finite)"
    with pytest.raises(ProtocolError, match=words):
        watched(tmp_path / "fail", Explodes(), codecs=Codecs(up))
    found = watched(tmp_path / "skip", Explodes(), codecs=Codecs(up), participation=SKIPPING)
    assert left_out(found) == ["B", "B", "B"]
    assert torch.isfinite(found.server.state["model"]["4.bias"]).all()
    assert "left out of this exchange" in caplog.text


def test_damaged_code_is_named_or_left_out(tmp_path):
    codecs = Codecs(Half(), Half())
    words = r"client 'B', round 1, train: part 'model': encoded tensors are damaged"
    with pytest.raises(ProtocolError, match=words):
        watched(tmp_path / "fail", damage="B", codecs=codecs)
    found = watched(tmp_path / "skip", damage="B", codecs=codecs, participation=SKIPPING)
    assert left_out(found) == ["B", "B", "B"]
    full = {
        r.client: "data" not in unpack(r.payload)[CODEC_KEY]["parts"]["model"]
        for r, _ in seen(found)
        if r.round == 3
    }
    assert full == {"A": False, "B": True, "C": False}


def test_site_whose_reply_was_left_out_once_gets_everything_in_the_next_round(tmp_path):
    """It holds what the server sent, but the server cannot know that."""
    federation = ToyFederation(
        FedAvg(),
        tmp_path,
        lambda f: Watched(f, "B", only=2),
        codecs=Codecs(Half(), Half()),
        participation=SKIPPING,
    ).run(4)
    full = [
        (r.round, r.client)
        for r, _ in seen(federation)
        if "data" not in unpack(r.payload)[CODEC_KEY]["parts"]["model"]
    ]
    assert full == [(1, "A"), (1, "B"), (1, "C"), (3, "B")]
    assert RESEND_REQUEST not in [data for _, data in seen(federation)]


def test_server_without_a_codec_refuses_what_is_coded(tmp_path, coarse):
    clients = ToyFederation(FedAvg(), tmp_path, codecs=Codecs(up=coarse())).clients()
    federation = ToyFederation(FedAvg(), tmp_path, lambda _: InProcess(lambda: clients))
    words = "client 'A', round 1, train: it is coded, and the server has no codec"
    with pytest.raises(ProtocolError, match=words):
        federation.run(1)


@dataclass(frozen=True)
class Forgets(FedAvg):
    """FedAvg whose halves replace their whole state in every round."""

    def round(self, server):
        """Replace the whole state."""
        model = server.state["model"]
        server.state = {}
        server.state["model"] = server.ask(self.train, model=model).mean("model")

    @handler
    def train(self, client, request):
        """Replace the whole state."""
        assert not any(str(key).startswith("$") for key in client.state)
        client.state = {"round": client.round}
        return super().train(client, request)


def test_state_that_an_algorithm_replaces_keeps_what_the_codecs_remember(tmp_path, coarse):
    codecs = Codecs(coarse(step=0.01), coarse(step=0.01))
    usual = watched(tmp_path / "usual", codecs=codecs)
    found = watched(tmp_path / "found", Forgets(), codecs=codecs)
    for name, tensor in usual.server.state["model"].items():
        assert torch.equal(found.server.state["model"][name], tensor)
    client = found.clients()["A"]
    stored = client.store.load(client.store.names()[-1])
    assert stored.keys() == {"round", CODEC_KEY}
    assert stored[CODEC_KEY].keys() == {"down", "up"}


def test_update_of_a_chosen_model_is_coded_against_it(tmp_path, coarse):
    federation = watched(tmp_path, ALGORITHMS.load("ifca")(), codecs=Codecs(up=coarse(step=0.01)))
    for _, data in seen(federation):
        envelope = unpack(data)
        cluster = envelope["reply"]["cluster"]
        assert envelope["coded"]["model"]["base"] == f"models/{cluster}"
