"""Who takes part in a round, and what happens where a client does not answer."""

from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
import torch

from collegium.algorithms.fedavg import FedAvg
from collegium.core.message import pack
from collegium.core.model_parts import find_parts
from collegium.errors import ConfigError, MissingReply, ProtocolError
from collegium.runtime import server as server_module
from collegium.runtime.participation import Participation
from collegium.runtime.requests import Request, Response, origin_of
from collegium.runtime.server import ServerRuntime
from collegium.testing.toy import ShuffledTransport, ToyFederation, toy_model, toy_network

NAMES = [f"s{number}" for number in range(10)]


class Silent:
    """A transport in which clients send the model back, but for some that do not answer."""

    def __init__(self, silent: dict[str, int] | None = None, lost: dict[str, int] | None = None):
        self.silent, self.lost = dict(silent or {}), dict(lost or {})
        self.asked: list[tuple[int, str]] = []

    def exchange(self, requests: Iterable[Request]) -> Iterator[Response]:
        for request in requests:
            name = request.client
            self.asked.append((request.round, name))
            if self.silent.get(name, 0) > 0:
                self.silent[name] -= 1
                yield Response(name, b"", 0.0, missing="did not answer within 5 s")
            elif self.lost.get(name, 0) > 0:
                self.lost[name] -= 1
                yield Response(name, b"", 0.0, again=True)
            else:
                parts = {"model": toy_model(0), "num_examples": 1, "scores": {}}
                reply = pack({"reply": parts, "of": origin_of(request)})
                yield Response(name, reply, 0.1)

    def close(self) -> None:
        """Nothing is held."""


def make(tmp_path, transport, names=("A", "B", "C"), seed=0, **options) -> ServerRuntime:
    server = ServerRuntime(
        FedAvg(), names, toy_model, find_parts(toy_network()), transport, tmp_path,
        participation=Participation(**options), seed=seed,
    )  # fmt: skip
    server.begin()
    return server


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(server_module, "RETRY_PAUSE", 0.0)


def test_a_round_asks_as_many_clients_as_wanted_and_every_one_in_turn(tmp_path):
    transport = Silent()
    server = make(tmp_path, transport, NAMES, clients_per_round=3)
    for _ in range(60):
        server.advance()
    asked = Counter(number for number, _ in transport.asked)
    assert set(asked.values()) == {3}
    by_client = Counter(name for _, name in transport.asked)
    # 60 draws of 3 out of 10: 18 each, standard deviation 3.5
    assert by_client.keys() == set(NAMES)
    assert max(abs(count - 18) for count in by_client.values()) < 14


@pytest.mark.parametrize("data", [b"", b"garbage", pack({"reply": {}})[:-1]])
def test_who_sends_what_is_no_message_is_named(tmp_path, data):
    class Garbled(Silent):
        def exchange(self, requests: Iterable[Request]) -> Iterator[Response]:
            for response in super().exchange(requests):
                yield Response(
                    response.client, data if response.client == "B" else response.data, 0.1
                )

    with pytest.raises(ProtocolError, match=r"^client 'B', round 1, train: \d+ bytes are damaged"):
        make(tmp_path / "fail", Garbled()).advance()
    server = make(tmp_path / "skip", Garbled(), on_failure="skip")
    server.advance()
    assert [left["client"] for left in server.left_out] == ["B"]


def test_participants_depend_on_seed_and_round_only(tmp_path):
    drawn = {}
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        transport = Silent()
        server = make(tmp_path / folder, transport, NAMES, seed=seed, clients_per_round=4)
        server.advance()
        server = make(tmp_path / folder, transport, NAMES, seed=seed, clients_per_round=4)
        for _ in range(4):
            server.advance()
        drawn[folder] = transport.asked
    assert drawn["a"] == drawn["b"] != drawn["c"]


def test_evaluations_ask_everybody_who_is_not_away(tmp_path):
    transport = Silent()
    server = make(tmp_path, transport, clients_per_round=1, absent={"B": (1,)})
    server.advance()
    transport.asked.clear()
    assert sorted(server.evaluate(FedAvg().evaluate, model=toy_model(0))) == ["A", "C"]
    server.advance()
    assert sorted(server.evaluate(FedAvg().evaluate, model=toy_model(0))) == ["A", "B", "C"]


def test_a_client_that_is_away_is_not_asked_in_its_rounds(tmp_path):
    transport = Silent()
    server = make(tmp_path, transport, absent={"A": (2, 3), "C": (3,)})
    for _ in range(4):
        server.advance()
    by_round = {n: "".join(c for r, c in transport.asked if r == n) for n in range(1, 5)}
    assert by_round == {1: "ABC", 2: "BC", 3: "B", 4: "ABC"}


def test_a_request_that_got_lost_is_made_again_whatever_the_policy(tmp_path):
    transport = Silent(lost={"B": 2})
    server = make(tmp_path, transport)
    server.advance()
    assert [name for _, name in transport.asked] == ["A", "B", "C", "B", "B"]
    assert server.left_out == []


def test_retry_asks_again_and_then_counts_everybody(tmp_path):
    transport = Silent(silent={"B": 3})
    server = make(tmp_path, transport, on_failure="retry")
    server.advance()
    assert [name for _, name in transport.asked] == ["A", "B", "C", "B", "B", "B"]
    assert server.left_out == []


def test_retry_ends_the_run_after_its_time(tmp_path):
    server = make(tmp_path, Silent(silent={"B": 99}), on_failure="retry", retry_seconds=0.0)
    with pytest.raises(MissingReply, match="client 'B', round 1, train: did not answer within 5 s"):
        server.advance()
    assert server.store.names() == ["000000"]


def test_skip_leaves_out_who_does_not_answer_and_says_so(tmp_path):
    server = make(tmp_path, Silent(silent={"B": 1}), on_failure="skip")
    server.advance()
    (left_out,) = server.left_out
    assert (left_out["client"], left_out["method"]) == ("B", "train")
    assert "did not answer within 5 s" in left_out["why"]


def test_too_few_answers_end_the_run_and_keep_its_rounds(tmp_path):
    server = make(tmp_path, Silent(silent={"A": 1, "B": 1}), on_failure="skip", min_clients=2)
    with pytest.raises(MissingReply, match="1 of 3 clients answered, and min_clients is 2"):
        server.advance()
    assert server.store.names() == ["000000"]
    server = make(tmp_path, Silent(silent={"A": 1}), on_failure="skip", min_clients=2)
    server.advance()
    assert server.round == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"absent": {"D": (1,)}}, "absent names D, which is not among the sites"),
        ({"clients_per_round": 4}, "clients_per_round is 4, and 3 sites train"),
        ({"min_clients": 4}, "min_clients is 4, and 3 sites train"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_round(tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        make(tmp_path, Silent(), **options)


def test_the_mean_is_that_of_the_clients_drawn(tmp_path):
    one = Participation(clients_per_round=1)
    logs = []

    def shuffled(federation: ToyFederation) -> ShuffledTransport:
        logs.append(ShuffledTransport(federation))
        return logs[-1]

    federation = ToyFederation(FedAvg(), tmp_path, shuffled, participation=one).run(1)
    trained = [
        (request.client, reply["model"])
        for request, reply in logs[0].log
        if request.stage == "train" and request.round == 1
    ]
    ((client, model),) = trained
    assert [client] == one.drawn(["A", "B", "C"], 1, federation.server.seed)
    for name, tensor in federation.server.state["model"].items():
        assert torch.equal(tensor, model[name])
