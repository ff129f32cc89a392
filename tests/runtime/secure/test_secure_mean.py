"""A server that sees only the sum: what it gets, and what happens where a site is lost."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.robust import on
from collegium.algorithms.scaffold import Scaffold
from collegium.compression.half import Half
from collegium.compression.session.groups import Codecs
from collegium.core.algorithm import handler
from collegium.core.message import Message, pack, tensors_in, unpack
from collegium.core.tensors import Tensors
from collegium.errors import ClientError, ConfigError, MissingReply, NotInstalled, ProtocolError
from collegium.experiment.config.registry import ALGORITHMS
from collegium.runtime.engines.inprocess import respond_here
from collegium.runtime.ledger import first_break, read_ledger
from collegium.runtime.participation import EVERYBODY, SKIPPING, Participation
from collegium.runtime.requests import Request, Response
from collegium.runtime.secure.config import SecureMean, check_secure
from collegium.runtime.secure.parts import KEY, MASKED
from collegium.runtime.secure.site import FILE
from collegium.testing.toy import TRAINING, ShuffledTransport, ToyFederation

SECURE = SecureMean()
FOUR = ("A", "B", "C", "D")
WORKING = [
    "apfl", "condist", "ditto", "fedadam", "fedavg", "fedavgm", "fedavgp", "fedbabu", "fedbn",
    "fedper", "fedprox", "fedrep", "fedrod", "fedyogi", "finetune", "fml", "iopfl", "l2gd",
    "local", "moon", "perfedavg", "pfedme", "scaffold", "silobn", "superfed", "ttt",
]  # fmt: skip


class Lossy:
    """A transport in which some requests are not answered, and replies may be forged."""

    def __init__(
        self,
        federation: ToyFederation,
        lost: Callable[[Request], bool] = lambda request: False,
        forge: Callable[[Request, dict[str, Any]], None] = lambda request, reply: None,
    ) -> None:
        self._federation, self._lost, self._forge = federation, lost, forge
        self.asked: list[Request] = []
        self.replies: list[tuple[Request, dict[str, Any]]] = []

    def exchange(self, requests: Iterable[Request]) -> Iterator[Response]:
        for request in requests:
            self.asked.append(request)
            if self._lost(request):
                yield Response(request.client, b"", 0.0, missing="did not answer within 5 s")
                continue
            response = respond_here(self._federation.clients()[request.client], request)
            envelope = unpack(response.data, held=self._federation.server.held)
            if "reply" in envelope:
                self._forge(request, envelope["reply"])
                self.replies.append((request, envelope["reply"]))
                response = replace(
                    response, data=pack(envelope, self._federation.server.held), signed=None
                )
            yield response

    def close(self) -> None:
        """Nothing is held."""


def lossy(**options: Any) -> Callable[[ToyFederation], Lossy]:
    return lambda federation: Lossy(federation, **options)


def largest_difference(a: Tensors, b: Tensors) -> float:
    assert a.keys() == b.keys()
    return max((float((a[n].double() - b[n].double()).abs().max()) for n in a), default=0.0)


def received(federation: ToyFederation, number: int) -> dict[str, dict[str, Any]]:
    """The masked parts of a round by client, the last of each."""
    transport: Any = federation.server.transport
    return {
        request.client: reply[MASKED]
        for request, reply in transport.replies
        if request.method == MASKED and request.round == number
    }


@pytest.mark.parametrize("secure", [SECURE, SecureMean(bits=32, fraction_bits=12)])
def test_the_first_mean_is_the_plain_one_within_the_step(tmp_path, secure):
    """|error| <= sites * step / (2 * sum of weights), and half a unit of float32 beside it."""
    plain = ToyFederation(FedAvg(), tmp_path / "plain").run(1)
    masked = ToyFederation(FedAvg(), tmp_path / "masked", secure=secure).run(1)
    clients = plain.clients()
    step, total = 2.0**-secure.fraction_bits, sum(c.num_examples for c in clients.values())
    before, after = plain.server.state["model"], masked.server.state["model"]
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        if not tensor.is_floating_point():
            assert torch.equal(after[name], tensor)
            continue
        bound = len(clients) * step / (2 * total) + 2.0**-23 * float(tensor.abs().max())
        assert float((after[name].double() - tensor.double()).abs().max()) <= bound
    if secure.bits == 32:  # the step is coarse enough to be seen
        assert largest_difference(before, after) > 1e-7


class LargeCounter(FedAvg):
    """Of site B without examples the counter is far ahead of the others'."""

    @handler
    def train(self, client: Any, request: Message) -> Message:
        reply = super().train(client, request)
        if client.id != "B":
            return reply
        model = reply["model"].map(lambda t: t if t.is_floating_point() else t + 50)
        return Message.of(model=model, num_examples=0)


@pytest.mark.parametrize("how", ["plain", "secure", "norm_bound", "krum", "median"])
def test_counters_of_a_site_of_weight_0_count_in_no_mean(tmp_path, how):
    """The counter is that of a round in which the site was not there."""
    methods: list[Any] = [LargeCounter, FedAvg]
    if how not in ("plain", "secure"):
        options = {"rule": how, **({"hostile": 0} if how == "krum" else {})}
        methods = [partial(on(method), **options) for method in methods]
    secure = SECURE if how == "secure" else None
    there, away = Participation(), Participation(absent={"B": (1,)})
    found, wanted = (
        ToyFederation(
            method(), tmp_path / str(n), names=FOUR, participation=who, secure=secure
        ).run(1).server.state["model"]["1.num_batches_tracked"].item()
        for n, (method, who) in enumerate(zip(methods, (there, away), strict=True))
    )  # fmt: skip
    assert 0 < found == wanted < 50


def test_the_mean_is_deterministic_and_no_masked_reply_is(tmp_path):
    first, second = (
        ToyFederation(FedAvg(), tmp_path / name, lossy(), secure=SECURE).run(2) for name in "ab"
    )
    assert first.states() == second.states()
    for number in (1, 2):
        one, two = received(first, number), received(second, number)
        for client in "ABC":
            a, b = one[client]["sum"]["sum"], two[client]["sum"]["sum"]
            assert a.shape == b.shape
            assert float((a == b).double().mean()) < 0.01


def test_nothing_of_a_model_leaves_a_site_without_a_mask(tmp_path):
    federation = ToyFederation(FedAvg(), tmp_path, lossy(), secure=SECURE).run(2)
    transport: Any = federation.server.transport
    kinds = Counter[str]()
    for request, reply in transport.replies:
        if request.stage == "train":
            assert reply.keys() == {KEY, "progress"}
        elif request.method == MASKED:
            assert reply.keys() == {MASKED}
            assert reply[MASKED]["sum"]["sum"].dtype == torch.int64
            assert {*reply[MASKED]["rest"]["model"]} == {"1.num_batches_tracked"}
        assert not any(t.is_floating_point() for _, t in tensors_in(reply))
        kinds[request.method] += 1
    assert kinds["train"] == kinds[MASKED] == 6


def test_the_ledger_says_what_was_masked_and_for_whom(tmp_path):
    ToyFederation(FedAvg(), tmp_path, secure=SECURE).run(1)
    lines = read_ledger(tmp_path / "clients/B/ledger.jsonl")
    assert first_break(lines) is None
    trained, masked = (line for line in lines if line["method"] in ("train", MASKED))
    assert trained["parts"].keys() == {KEY, "progress"}
    part = masked["parts"][MASKED]
    assert (part["masked"], part["weight"], part["sites"]) == (
        ["model"], "num_examples", ["A", "B", "C"],
    )  # fmt: skip
    assert part["tensors"][0][::2] == ["sum.sum", "int64"]


@pytest.mark.parametrize("name", WORKING)
def test_methods_that_only_average_come_to_the_same_models(name, tmp_path):
    algorithm = ALGORITHMS.load(name)()
    states = [
        ToyFederation(algorithm, tmp_path / str(n), secure=secure).run(2).server.state
        for n, secure in enumerate((None, SECURE))
    ]
    plain, masked = (Tensors(dict(tensors_in(state))) for state in states)
    assert largest_difference(plain, masked) < 1e-5


def test_every_other_method_is_refused():
    options: Any = {"least": 3, "coded": False, "participation": EVERYBODY, "diagnostics": ()}
    for name in ALGORITHMS.names():
        algorithm = ALGORITHMS.load(name)()
        if name in WORKING:
            check_secure(algorithm, 3, **options)
        else:
            reasons = {"robust": "a robust mean compares", "pooled": "of all sites in one place"}
            words = reasons.get(name, "needs the part")
            with pytest.raises(ConfigError, match=words):
                check_secure(algorithm, 3, **options)


@pytest.mark.parametrize("frozen", [(), ("0", "1")])
def test_what_nobody_trains_stays_as_it_is(tmp_path, frozen):
    recipe = replace(TRAINING, freeze=frozen)
    federation = ToyFederation(FedAvg(), tmp_path, lossy(), training=recipe, secure=SECURE).run(2)
    initial, model = federation.server.initial_model, federation.server.state["model"]
    stay = [n for n in initial if n[0] in frozen or torch.equal(initial[n], model[n])]
    assert all(torch.equal(initial[name], model[name]) for name in stay)
    assert len(stay) < len(initial)
    part = received(federation, 1)["A"]
    trained = initial.without([n for n in initial if n[0] in frozen])
    floats = [t for t in trained.values() if t.is_floating_point()]
    assert part["sum"]["sum"].numel() == sum(t.numel() for t in floats) + 1


def test_a_site_lost_between_key_and_reply_is_left_out_and_nobody_trains_twice(tmp_path):
    federation = ToyFederation(
        FedAvg(),
        tmp_path / "lost",
        lossy(lost=lambda r: (r.method, r.client, r.round) == (MASKED, "B", 2)),
        names=FOUR,
        participation=SKIPPING,
        secure=SECURE,
    )
    server = federation.server
    server.begin()
    server.advance()
    server.advance()
    assert [(left["client"], left["method"]) for left in server.left_out] == [("B", MASKED)]
    away = Participation(absent={"B": (2,)})
    without = ToyFederation(FedAvg(), tmp_path / "away", names=FOUR, participation=away)
    without.server.begin()
    without.server.advance()
    without.server.advance()
    assert largest_difference(server.state["model"], without.server.state["model"]) < 1e-6
    transport: Any = server.transport
    asked = [r for r in transport.asked if r.round == 2]
    assert Counter(r.client for r in asked if r.method == "train") == dict.fromkeys(FOUR, 1)
    sums = Counter(r.client for r in asked if r.method == MASKED)
    assert sums == {"A": 2, "B": 1, "C": 2, "D": 2}
    first, second = (
        [reply[MASKED]["sum"]["sum"] for r, reply in transport.replies
         if (r.round, r.client, r.method) == (2, "A", MASKED)]
    )  # fmt: skip
    assert float((first == second).double().mean()) < 0.01  # under new masks
    server.advance()
    assert server.left_out == []


def test_both_means_of_scaffold_are_of_the_same_sites_and_a_lost_variate_does_not_count(tmp_path):
    """c stays the mean of all c_i, which is that of a run in which B was absent in round 2.

    The step is fine, since a variate is an update divided by steps and learning rate.
    """
    masked = ToyFederation(
        Scaffold(),
        tmp_path / "lost",
        lossy(lost=lambda r: (r.method, r.client, r.round) == (MASKED, "B", 2)),
        names=FOUR,
        participation=SKIPPING,
        secure=SecureMean(fraction_bits=40),
    ).run(3)
    transport: Any = masked.server.transport
    rosters = [unpack(r.payload)["roster"] for r in transport.asked if r.method == MASKED]
    assert {tuple(r["parts"]) for r in rosters} == {("model_update", "control_update")}
    away = Participation(absent={"B": (2,)})
    plain = ToyFederation(Scaffold(), tmp_path / "away", names=FOUR, participation=away).run(3)
    for name, tensor in masked.server.state["control"].items():
        own = [
            unpack((tmp_path / f"lost/clients/{c}/states/000003-0000.state").read_bytes())
            for c in FOUR
        ]
        mean = sum(state["control"][name].double() for state in own) / 4
        assert float((tensor.double() - mean).abs().max()) < 1e-6
    for part in ("model", "control"):
        assert largest_difference(masked.server.state[part], plain.server.state[part]) < 1e-6


def test_a_lost_site_ends_the_run_where_it_is_to(tmp_path):
    lost = lossy(lost=lambda r: (r.method, r.client) == (MASKED, "B"))
    federation = ToyFederation(FedAvg(), tmp_path / "fail", lost, names=FOUR, secure=SECURE)
    with pytest.raises(MissingReply, match=r"^client 'B', round 1, \$masked: did not answer"):
        federation.run(1)
    federation = ToyFederation(
        FedAvg(), tmp_path / "few", lost, participation=SKIPPING, secure=SECURE
    )
    with pytest.raises(MissingReply, match=r"2 sites answered \(A, C; lost: B\), and secure_mean"):
        federation.run(1)


def shorten(part: dict[str, Any]) -> None:
    part["sum"] = Tensors({"sum": part["sum"]["sum"][:-1]})


def as_floats(part: dict[str, Any]) -> None:
    part["sum"] = Tensors({"sum": part["sum"]["sum"].double()})


def other_roster(part: dict[str, Any]) -> None:
    part["roster"] = "0" * 64


def negative_counter(part: dict[str, Any]) -> None:
    part["rest"] = {"model": part["rest"]["model"].map(lambda tensor: tensor - 10**6)}


def more_tensors(part: dict[str, Any]) -> None:
    part["rest"] = {"model": Tensors({**part["rest"]["model"], "0.weight": torch.zeros(1)})}


def rest_of_another_part(part: dict[str, Any]) -> None:
    part["rest"] = {"scores": part["rest"]["model"]}


def rest_without_its_part(part: dict[str, Any]) -> None:
    part["rest"] = part["rest"]["model"]


def no_rest(part: dict[str, Any]) -> None:
    del part["rest"]


@pytest.mark.parametrize(
    "change",
    [shorten, as_floats, other_roster, negative_counter, more_tensors, rest_of_another_part,
     rest_without_its_part, no_rest],
)  # fmt: skip
def test_a_forged_masked_part_is_its_senders_fault(tmp_path, change):
    def forge(request: Request, reply: dict[str, Any]) -> None:
        if request.client == "B" and MASKED in reply:
            change(reply[MASKED])

    with pytest.raises(ProtocolError, match="client 'B', round 1, "):
        ToyFederation(FedAvg(), tmp_path / "fail", lossy(forge=forge), secure=SECURE).run(1)
    skipping = ToyFederation(
        FedAvg(),
        tmp_path / "skip",
        lossy(forge=forge),
        names=FOUR,
        participation=SKIPPING,
        secure=SECURE,
    )
    skipping.run(1)
    away = Participation(absent={"B": (1,)})
    without = ToyFederation(FedAvg(), tmp_path / "away", names=FOUR, participation=away).run(1)
    models = [federation.server.state["model"] for federation in (skipping, without)]
    assert largest_difference(*models) < 1e-6


def test_a_site_that_sends_no_key_is_named(tmp_path):
    def forge(request: Request, reply: dict[str, Any]) -> None:
        if request.client == "C":
            reply.pop(KEY, None)

    with pytest.raises(ProtocolError, match=r"client 'C', round 1, train: no part '\$key'"):
        ToyFederation(FedAvg(), tmp_path, lossy(forge=forge), secure=SECURE).run(1)


def asked_of(tmp_path, **changes: Any) -> tuple[ToyFederation, Request]:
    """A federation after a round, and a request for a masked reply with another roster."""
    federation = ToyFederation(FedAvg(), tmp_path, lossy(), secure=SECURE).run(1)
    transport: Any = federation.server.transport
    request = next(r for r in transport.asked if (r.method, r.client) == (MASKED, "A"))
    roster = unpack(request.payload)["roster"]
    return federation, replace(request, payload=pack({"roster": {**roster, **changes}}))


def test_a_site_answers_the_same_request_with_the_same_bytes(tmp_path):
    federation, request = asked_of(tmp_path)
    first, second = (federation.clients()["A"].handle(request) for _ in range(2))
    assert first == second
    assert MASKED in unpack(first)["reply"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"round": 2}, "another exchange"),
        ({"parts": ["scores"]}, "does not hold what is to be averaged"),
        ({"parts": "model"}, "does not hold what is to be averaged"),
        ({"parts": 1}, "did not say whose"),
        ({"signatures": 1}, "did not say whose"),
        ({"weight": "progress"}, "does not hold what is to be averaged"),
        ({"keys": dict.fromkeys("ABC", "00" * 32)}, "a sum over 1 sites"),
        ({"keys": {n: f"{i:064x}" for i, n in enumerate("ABC")}}, "the reply to another request"),
        ({"keys": {}}, "a sum over 0 sites"),
        ({"keys": "ABC"}, "did not say whose"),
        ({"nonce": 1}, "did not say whose"),
        ({"more": 1}, "did not say whose"),
    ],
)
def test_a_site_refuses_to_mask_for_another_sum(tmp_path, changes, text):
    federation, request = asked_of(tmp_path, **changes)
    assert text in refusal(federation, request)


def test_a_damaged_file_of_a_site_is_not_masked(tmp_path):
    federation, request = asked_of(tmp_path)
    damaged = tmp_path / "clients/A" / FILE
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert "keeps no reply that could be masked" in refusal(federation, request)


def refusal(federation: ToyFederation, request: Request) -> str:
    """Return the text of the error that site A answers with, on one machine."""
    response = respond_here(federation.clients()["A"], request)
    return str(unpack(response.data)["error"]["text"])


def test_a_site_without_the_setting_masks_nothing(tmp_path):
    federation, request = asked_of(tmp_path)
    federation.secure = None
    assert "secure_mean is not set" in refusal(federation, request)


def test_values_beyond_the_range_are_refused_and_never_wrap(tmp_path):
    secure = SecureMean(bits=32, fraction_bits=24)  # below 2^31 / (3 * 2^24) = 42.67

    class Large(FedAvg):
        @handler
        def train(self, client: Any, request: Message) -> Message:
            factor = 50.0 if client.id == "B" else 1e-3
            model = client.fit(request["model"]).map(
                lambda t: torch.full_like(t, factor) if t.is_floating_point() else t
            )
            return Message.of(model=model, num_examples=1)

    federation = ToyFederation(Large(), tmp_path, secure=secure)
    with pytest.raises(
        ClientError, match=r"'model' of site 'B', times its weight, is beyond the 42"
    ):
        federation.run(1)


class ReadsEach(FedAvg):
    """Says that it only averages, and looks at every reply."""

    only_averaged: ClassVar[frozenset[str] | None] = frozenset({"model", "num_examples"})
    how: ClassVar[str] = "values"

    def round(self, server: Any) -> None:
        replies = server.ask(self.train, model=server.state["model"])
        list(replies) if self.how == "iter" else getattr(replies, self.how)()


@pytest.mark.parametrize("how", ["values", "items", "weights", "iter"])
def test_a_method_that_reads_single_replies_after_all_is_stopped(tmp_path, how, monkeypatch):
    monkeypatch.setattr(ReadsEach, "how", how)
    with pytest.raises(ConfigError, match="ReadsEach reads the replies of single sites"):
        ToyFederation(ReadsEach(), tmp_path, secure=SECURE).run(1)


class OwnRound(FedAvg):
    """Has a round of its own and declares nothing about it."""

    def round(self, server: Any) -> None:
        """Average, which nobody can know."""
        super().round(server)


def test_a_round_of_ones_own_has_to_say_that_it_only_averages(tmp_path):
    assert OwnRound().averaged_parts() == frozenset()
    with pytest.raises(ConfigError, match="OwnRound needs the part 'model' of each"):
        ToyFederation(OwnRound(), tmp_path, secure=SECURE)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"codecs": Codecs(down=Half())}, "no codec can shorten"),
        ({"names": ("A", "B")}, "2 sites train in a round, and secure_mean.min_sites is 3"),
        ({"participation": Participation(clients_per_round=2)}, "2 sites train in a round"),
    ],
)
def test_what_excludes_masks_is_refused_before_the_first_round(tmp_path, options, text):
    with pytest.raises(ConfigError, match=text):
        ToyFederation(FedAvg(), tmp_path, secure=SECURE, **options)


def test_without_the_package_one_sentence_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(NotInstalled, match=r"pip install 'collegium\[secure\]'"):
        ToyFederation(FedAvg(), tmp_path, secure=SECURE)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"bits": 16}, "bits"),
        ({"min_sites": 1}, "min_sites"),
        ({"bits": 32, "fraction_bits": 25}, "fraction_bits is 25 of 32 bits"),
        ({"fraction_bits": -1}, "fraction_bits"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        SecureMean(**settings)


def test_rounds_at_home_send_nothing_to_mask(tmp_path):
    federation = ToyFederation(FedAvg(), tmp_path, ShuffledTransport, secure=SECURE)
    federation.run(3, home_rounds=2)
    transport: Any = federation.server.transport
    assert {r.round for r, _ in transport.log if r.method == MASKED} == {1}
