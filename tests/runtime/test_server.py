import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.fedbn import FedBN
from collegium.algorithms.iopfl import IOPFL
from collegium.core.failures import describe
from collegium.core.message import pack, unpack
from collegium.core.model_parts import find_parts
from collegium.core.payloads import may_leave
from collegium.core.randomness import generator
from collegium.core.tensors import Tensors
from collegium.core.userfile import on_one_machine
from collegium.errors import (
    CheckpointError,
    ClientError,
    ConfigError,
    DataError,
    DivergedError,
    EgressError,
    MissingReply,
    ProtocolError,
)
from collegium.runtime.federation import check_policy
from collegium.runtime.participation import SKIPPING
from collegium.runtime.requests import Request, Response, origin_of
from collegium.runtime.server import ServerRuntime
from collegium.testing.toy import toy_model, toy_network


class Scripted:
    """A transport whose clients send the model back, unless the script says something else."""

    def __init__(self, script: dict[str, Any] | None = None, *, backwards: bool = False) -> None:
        self.script, self.backwards = script or {}, backwards
        self.requests: list[Request] = []

    def exchange(self, requests: Iterable[Request]) -> Iterator[Response]:
        for request in reversed(list(requests)) if self.backwards else requests:
            self.requests.append(request)
            yield Response(request.client, self.data(request), 0.25)

    def data(self, request: Request) -> bytes:
        asked = unpack(request.payload)
        reply = {"model": asked.get("model"), "num_examples": 1, "progress": {"loss": 0.5}}
        change = self.script.get(request.client)
        if isinstance(change, bytes):
            return change
        if isinstance(change, dict) and "error" in change:
            return pack(change)
        if callable(change):
            reply = change(reply)
        return pack({"reply": reply, "of": origin_of(request)})

    def close(self) -> None:
        """Nothing is held."""


def server(tmp_path, transport, algorithm=None, **options) -> ServerRuntime:
    return ServerRuntime(
        algorithm or FedAvg(), ["B", "A", "C"], toy_model, find_parts(toy_network()), transport,
        tmp_path, **options,
    )  # fmt: skip


def with_tensor(name: str, change):
    """Return a reply whose model has one tensor changed."""

    def reply(parts: dict) -> dict:
        model = parts["model"]
        return {**parts, "model": model | Tensors({name: change(model[name])})}

    return reply


UNUSABLE = {
    "not a number": (with_tensor("0.bias", lambda t: t * float("nan")), "0.bias holds NaN"),
    "infinite": (with_tensor("0.bias", lambda t: t + float("inf")), "0.bias holds NaN or infinite"),
    "shape": (with_tensor("0.bias", lambda t: t[:2]), r"0.bias is \(2,\) torch.float32, expected"),
    "dtype": (with_tensor("0.bias", lambda t: t.double()), "0.bias is .* torch.float64, expected"),
    "missing": (lambda r: {**r, "model": r["model"].without({"0.bias"})}, "missing 0.bias$"),
    "extra": (lambda r: {**r, "model": r["model"] | Tensors({"x": torch.ones(1)})}, "unexpected x"),
    "undeclared": (lambda r: {**r, "age": 3}, "part 'age' is not among what FedAvg declares"),
    "count": (lambda r: {**r, "num_examples": -1}, "part 'num_examples': expected a count"),
    "loss": (lambda r: {**r, "progress": {"loss": float("nan")}}, "part 'progress': loss is nan"),
    "scores": (lambda r: {**r, "scores": {"global": ["x"]}}, "part 'scores': a row of scores"),
    "cut": (b"\x10\x00", "2 bytes are damaged"),
    "no reply": (pack({"hello": 1}), "the response is not a reply"),
    "no envelope": (pack([1]), "the response is not a reply"),
    "no error": (pack({"error": "text"}), "the response is not a reply"),
    "error": ({"error": {"kind": "DivergedError", "text": "the loss became nan"}}, "became nan"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_unusable_reply_is_fatal_and_names_client_and_round(tmp_path, kind):
    change, words = UNUSABLE[kind]
    run = server(tmp_path, Scripted({"B": change}))
    run.begin()
    with pytest.raises(ClientError, match=words) as caught:
        run.advance()
    if kind != "cut":
        assert str(caught.value).startswith("client 'B', round 1, train: ")
    assert run.store.names() == ["000000"]


@pytest.mark.parametrize("kind", UNUSABLE)
def test_unusable_reply_is_left_out_and_recorded_where_failures_are_skipped(tmp_path, kind, caplog):
    change, _ = UNUSABLE[kind]
    run = server(tmp_path, Scripted({"B": change}), participation=SKIPPING)
    run.begin()
    with caplog.at_level(logging.WARNING):
        run.advance()
    (left_out,) = run.left_out
    assert (left_out["client"], left_out["method"]) == ("B", "train")
    assert "left out of this exchange" in caplog.text
    for name, tensor in toy_model(0).items():
        assert torch.equal(run.state["model"][name], tensor)


def test_error_keeps_its_kind_if_it_is_a_client_s(tmp_path):
    for sent, raised in (
        ("DivergedError", DivergedError), ("MissingReply", MissingReply),
        ("DataError", ClientError), ("SystemExit", ClientError),
    ):  # fmt: skip
        script = {"B": {"error": {"kind": sent, "text": "so it is"}}}
        run = server(tmp_path / sent, Scripted(script))
        run.begin()
        with pytest.raises(ClientError, match="client 'B', round 1, train: so it is") as caught:
            run.advance()
        assert type(caught.value) is raised


def test_round_in_which_everybody_fails_is_an_error(tmp_path):
    error = {"error": {"kind": "DataError", "text": "x"}}
    run = server(tmp_path, Scripted(dict.fromkeys("ABC", error)), participation=SKIPPING)
    run.begin()
    with pytest.raises(MissingReply, match="round 1, train: 0 of 3 clients answered"):
        run.advance()


def test_server_asks_in_sorted_order_and_counts_bytes(tmp_path):
    transport = Scripted()
    run = server(tmp_path, transport)
    run.begin()
    run.advance()
    assert [request.client for request in transport.requests] == ["A", "B", "C"]
    stats = run.client_stats["B"]
    assert stats.bytes_down == len(transport.requests[1].payload)
    assert stats.bytes_up == len(transport.data(transport.requests[1]))
    assert (stats.seconds, stats.loss) == (0.25, 0.5)


def test_replies_come_in_sorted_order_whatever_the_engine_does(tmp_path):
    seen = []

    @dataclass(frozen=True)
    class Watches(FedAvg):
        """Looks at who answers."""

        def round(self, server):
            seen.append([client for client, _ in server.ask(self.train, model=Tensors())])

    replies = {c: lambda _: {"num_examples": 1} for c in "ABC"}
    for backwards in (False, True):
        run = server(tmp_path / str(backwards), Scripted(replies, backwards=backwards), Watches())
        run.begin()
        run.advance()
    assert seen == [["A", "B", "C"]] * 2


def test_client_that_the_engine_forgets_is_named(tmp_path):
    class Forgets(Scripted):
        def exchange(self, requests):
            yield from (a for a in super().exchange(requests) if a.client != "B")

    run = server(tmp_path, Forgets())
    run.begin()
    with pytest.raises(ProtocolError, match="client 'B', round 1, train: the engine brought no"):
        run.advance()


@dataclass(frozen=True)
class Asks(FedAvg):
    """Two exchanges in a round, the first without looking at the replies."""

    def round(self, server):
        server.ask(self.train, to=["C", "A"], model=server.state["model"])
        each = {"B": {"extra": 2}, "A": {"extra": 1}}
        server.ask(self.train, each=each, model=server.state["model"])


def test_exchanges_are_numbered_and_seen_through(tmp_path):
    transport = Scripted()
    run = server(tmp_path, transport, Asks())
    run.begin()
    run.advance()
    found = [(r.client, r.exchange, unpack(r.payload).get("extra")) for r in transport.requests]
    assert found == [("A", 0, None), ("C", 0, None), ("A", 1, 1), ("B", 1, 2)]


def test_stranger_and_what_is_no_handler_cannot_be_asked(tmp_path):
    run = server(tmp_path, Scripted())
    algorithm = FedAvg()
    with pytest.raises(ProtocolError, match="asked Z, which is not in the federation"):
        run.ask(algorithm.train, to=["A", "Z"])
    with pytest.raises(ProtocolError, match="'deploy' is not a handler of FedAvg"):
        run.ask(algorithm.deploy)  # type: ignore[arg-type]


def test_absent_part_names_the_client(tmp_path):
    run = server(tmp_path, Scripted({"B": lambda r: {"model": r["model"]}}))
    run.begin()
    with pytest.raises(ProtocolError, match=r"client 'B', round 1, train: no part 'num_examples'"):
        run.advance()


def test_state_of_every_round_is_committed_and_the_last_two_are_kept(tmp_path):
    run = server(tmp_path, Scripted())
    run.begin()
    for _ in range(3):
        run.advance()
    assert run.store.names() == ["000002", "000003"]
    run.conclude()
    assert (run.round, run.store.names()) == (4, ["000003", "000004"])


def test_what_is_written_while_committing_is_never_behind_the_state(tmp_path):
    seen: list[tuple] = []
    run = server(tmp_path, Scripted())
    run.begin()
    run.advance(lambda: seen.append((run.round, run.client_stats["A"].loss, run.store.names())))
    run.conclude(lambda: seen.append((run.round, run.store.names())))
    assert seen == [(1, 0.5, ["000000"]), (2, ["000000", "000001"])]


def test_request_says_which_states_are_no_longer_needed(tmp_path):
    transport = Scripted()
    run = server(tmp_path, transport)
    run.begin()
    for _ in range(4):
        run.advance()
    assert [r.floor for r in transport.requests if r.client == "A"] == [0, 0, 1, 2]


def test_damaged_states_are_passed_over_and_all_damaged_is_an_error(tmp_path, caplog):
    run = server(tmp_path, Scripted())
    run.begin()
    run.advance()
    run.advance()
    for name in ("000002", "000001"):
        run.store.write(name, run.store.read(name)[:-1])
        again = server(tmp_path, Scripted())
        if name == "000002":
            with caplog.at_level(logging.WARNING):
                again.begin()
            assert again.round == 1
            assert "000002.state is damaged" in caplog.text
        else:
            with pytest.raises(CheckpointError, match=f"no undamaged state is left in {tmp_path}"):
                again.begin()


def test_first_initial_model_is_the_common_one(tmp_path):
    run = server(tmp_path, Scripted())
    assert run.fresh_model(0) is run.initial_model
    assert torch.equal(run.fresh_model(2)["0.weight"], toy_model(2)["0.weight"])


def test_evaluating_and_deploying_ask_in_a_stage_of_their_own(tmp_path):
    transport = Scripted({c: lambda r: {"scores": {}} for c in "ABC"})
    run = server(tmp_path, transport)
    run.begin()
    run.evaluate(run.algorithm.evaluate, model=run.state["model"])
    assert {(r.stage, r.exchange, r.round) for r in transport.requests} == {("evaluate", 0, 0)}
    assert run.stage == "train"
    transport = Scripted({c: lambda r: {"personal": toy_model(1)} for c in "ABC"})
    run = server(tmp_path / "iopfl", transport, IOPFL())
    run.begin()
    assert set(run.deploy()) == {"global", "A", "B", "C"}
    assert {r.stage for r in transport.requests} == {"evaluate"}


@pytest.mark.parametrize(
    ("allow", "forbid", "opt_in", "leaves"),
    [
        (None, (), False, True),
        (None, (), True, False),
        (None, ("model",), False, False),
        (("model",), (), False, True),
        (("model",), (), True, True),
        (("other",), (), False, False),
        (("model",), ("model",), True, False),
    ],
)
def test_policy_decides_what_leaves(allow, forbid, opt_in, leaves):
    assert may_leave("model", opt_in=opt_in, allow=allow, forbid=forbid) == leaves


def test_forbidden_part_is_refused_with_algorithm_part_and_site():
    with pytest.raises(EgressError) as caught:
        check_policy(FedBN(), "St. Elsewhere", None, {"num_examples"})
    for word in ("FedBN", "'num_examples'", "(a count)", "'St. Elsewhere'"):
        assert word in str(caught.value)
    check_policy(IOPFL(), "St. Elsewhere", None, {"personal"})  # opt-in: asked for later


def test_failure_with_a_path_stays_at_the_site():
    path = "/hospital/patient_4711.nii"
    for error in (
        DataError(f"{path} is damaged"),
        OSError(2, "No such file", path),
        KeyError(path),
    ):
        assert path not in str(describe(error))
        with on_one_machine():
            assert describe(error)["text"].startswith(type(error).__name__)
            assert path not in str(describe(error))
    assert describe(DivergedError("nan")) == {"code": "diverged", "names": {}}
    assert describe(MemoryError(path)) == {"code": "memory", "names": {}}
    with on_one_machine():
        assert describe(ConfigError("no")) == {"kind": "ConfigError", "text": "no"}


@dataclass(frozen=True)
class Draws(FedAvg):
    """FedAvg whose server draws a number in its set-up and two in every round."""

    def setup(self, server):
        super().setup(server)
        server.state["drawn"] = [draw(server, "start")]

    def round(self, server):
        super().round(server)
        server.state["drawn"] += [draw(server, "coin"), draw(server, "start")]


def draw(server, purpose: str) -> float:
    return float(torch.rand((), generator=server.rng(purpose)))


def drawn(root, **options) -> list[float]:
    run = server(root, Scripted(), Draws(), **options)
    run.begin()
    while run.round < 2:
        run.advance()
    found: list[float] = run.state["drawn"]
    return found


def test_the_server_draws_by_seed_round_and_purpose(tmp_path):
    found = drawn(tmp_path / "a", seed=3)
    assert len(set(found)) == 5
    paths = [(0, "start"), (1, "coin"), (1, "start"), (2, "coin"), (2, "start")]
    assert found == [
        float(torch.rand((), generator=generator(3, "server", *path))) for path in paths
    ]
    assert drawn(tmp_path / "b", seed=3) == found
    assert not {*drawn(tmp_path / "c", seed=4)} & {*found}


def test_a_round_that_is_run_again_draws_the_same(tmp_path):
    first = server(tmp_path, Scripted(), Draws(), seed=3)
    first.begin()
    with pytest.raises(KeyboardInterrupt):
        first.advance(before_commit=interrupt)
    again = server(tmp_path, Scripted(), Draws(), seed=3)
    again.begin()
    again.advance()
    assert again.state["drawn"] == first.state["drawn"]


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_purpose_is_used_once_in_a_round(tmp_path):
    run = server(tmp_path, Scripted())
    run.begin()
    run.rng("coin")
    with pytest.raises(ProtocolError, match="'coin' was used twice in one round"):
        run.rng("coin")


class Recorder(FedAvg):
    """FedAvg that records a number before it asks and one after."""

    def round(self, server: Any) -> None:
        server.record(f"asked in {server.round}", len(server.clients))
        super().round(server)
        server.record("round", server.round)


def test_what_is_recorded_is_of_its_round_alone(tmp_path):
    run = server(tmp_path, Scripted(), Recorder())
    run.begin()
    assert run.recorded == {}
    run.advance()
    assert run.recorded == {"asked in 1": 3.0, "round": 1.0}
    run.advance()
    assert run.recorded == {"asked in 2": 3.0, "round": 2.0}
