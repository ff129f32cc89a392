"""Both halves against each other, with updates that are known beforehand."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from collegium.compression.half import Half
from collegium.compression.identity import Identity
from collegium.compression.session.client_session import ClientSession, LostReference
from collegium.compression.session.groups import CODEC_KEY, Codecs
from collegium.compression.session.layout import ModelLayout
from collegium.compression.session.server_session import Exchange, ServerSession
from collegium.core.message import pack, unpack
from collegium.core.model_parts import find_parts
from collegium.core.randomness import generator
from collegium.core.tensors import Tensors, mean
from collegium.errors import ProtocolError
from collegium.testing.toy import toy_model, toy_network

TRAINABLE = find_parts(toy_network()).trainable
Reply = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]


def noise(*path: str | int) -> Tensors:
    """An update of the toy's model, its running statistics and counter included."""
    rng = generator(5, *path)
    return toy_model(0).map(
        lambda t: torch.randn(t.shape, generator=rng) if t.is_floating_point() else t + 1
    )


def close(a: Tensors, b: Tensors, atol: float = 1e-5) -> bool:
    return a.keys() == b.keys() and all(
        torch.allclose(a[n].double(), b[n].double(), rtol=0, atol=atol) for n in a
    )


def equal(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


class Pair:
    """A server's half and those of three clients, which exchange bytes."""

    def __init__(self, up=None, down=None) -> None:
        self.codecs = Codecs(up, down)
        self.layout = ModelLayout(toy_model(0), TRAINABLE)
        self.server = ServerSession(self.codecs, self.layout, seed=3)
        self.memories: dict[str, dict[str, Any]] = {}
        self.number = 0
        self.received: dict[str, dict[str, Any]] = {}
        self.requests: dict[str, bytes] = {}
        self.answers: dict[str, bytes] = {}

    def exchange(self, reply: Reply, each=None, clients="ABC", fail="", **items) -> dict[str, Any]:
        """Ask, and return the replies as the server decodes them."""
        self.number += 1
        exchange = Exchange(self.server, items, each, clients, position=(self.number, 0))
        found = {}
        for client in clients:
            self.requests[client] = exchange.payload(client)
            if client in fail:
                exchange.record_failure(client)
                continue
            found[client] = self.answer(exchange, client, reply)
            exchange.record_reply(client, found[client])
        return found

    def answer(self, exchange: Exchange, client: str, reply: Reply) -> dict[str, Any]:
        memory = unpack(pack(self.memories.get(client, {})))
        position = (client, self.number, 0)
        session = ClientSession(self.codecs, self.layout, memory, seed=3, position=position)
        self.received[client] = session.decode_request(unpack(self.requests[client]))
        sent = session.encode_reply(reply(client, self.received[client]))
        self.answers[client] = pack({"reply": sent.parts, "coded": sent.coded})
        self.memories[client] = memory
        envelope = unpack(self.answers[client])
        return exchange.decode_reply(client, envelope["reply"], envelope["coded"])

    def coded(self, client: str) -> dict[str, Any]:
        """The coded groups of a client's last answer."""
        found: dict[str, Any] = unpack(self.answers[client])["coded"]
        return found

    def coding(self, client: str) -> dict[str, Any]:
        """The codecs' data in the last request to a client."""
        found: dict[str, Any] = unpack(self.requests[client]).get(CODEC_KEY, {})
        return found

    def versions(self) -> list[str]:
        return [held["model"] for held in self.server.state["held"].values()]


def trained(client: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """A reply that adds noise of the client's own to the model received."""
    return {"model": request["model"] + noise(client)}


def moved(*path: str | int) -> Reply:
    """A reply that adds the noise of ``path`` and of the client's name to the model received."""
    return lambda client, request: {"model": request["model"] + noise(client, *path)}


def reporting(loss: float) -> Reply:
    """A reply with a loss, and the number of the client's letter as its number of examples."""
    return lambda client, _: {"progress": {"loss": loss}, "num_examples": ord(client)}


# --- upload --------------------------------------------------------------------------------------


def test_what_was_lost_is_sent_later(coarse):
    """Sum of what the server received + the last residual = sum of the true updates."""
    pair = Pair(up=coarse(step=1.0))
    model, seen, true = toy_model(0), 0.0 * toy_model(0), 0.0 * toy_model(0)
    for number in range(6):
        update = noise("A", number)
        found = pair.exchange(moved(number), clients="A", model=model)["A"]["model"]
        seen, true = seen + (found - model), true + update
        model = found
    (kept,) = pair.memories["A"]["up"].values()
    names = sorted(TRAINABLE)
    lost = max(float(t.abs().max()) for t in (true - seen).select(names).values())
    assert 0.1 < lost < 1.0 + 1e-4  # something is missing, but no more than one step
    assert close(seen.select(names) + kept["residual"], true.select(names))


def test_without_feedback_nothing_is_kept(coarse):
    pair = Pair(up=coarse(step=1.0, feedback=False))
    start = toy_model(0)
    found = pair.exchange(trained, model=start)["A"]["model"]
    assert pair.memories["A"] == {}
    update = start + noise("A") - start
    for name in TRAINABLE:
        assert torch.allclose(found[name], start[name] + torch.trunc(update[name]))


def test_statistics_and_counters_travel_as_they_are(coarse):
    pair = Pair(up=coarse(step=100.0), down=coarse(step=100.0))
    start = toy_model(0)
    for _ in range(2):
        found = pair.exchange(trained, model=start)["B"]["model"]
    assert list(found) == list(start)
    expected = start + noise("B")
    for name in start.without(TRAINABLE):
        assert torch.equal(found[name], expected[name])
        assert torch.equal(pair.received["B"]["model"][name], start[name])


def test_residual_of_another_model_is_not_added(coarse):
    """A client that changes its cluster starts without a residual."""
    pair = Pair(up=coarse(step=1.0))
    models = [toy_model(0), toy_model(1)]
    update = 0.6 * toy_model(0).map(torch.ones_like)

    def choose(index: int) -> Tensors:
        reply = pair.exchange(
            lambda _, request: {"model": request["models"][index] + update},
            clients="A",
            models=models,
        )
        assert pair.coded("A")["model"]["base"] == f"models/{index}"
        found: Tensors = reply["A"]["model"] - models[index]
        return found

    # the update is far shorter than the models so that these are told apart
    models = [10.0 * model for model in models]
    assert float(choose(0)["4.bias"]) == pytest.approx(0.0, abs=1e-5)  # 0.6 is kept
    assert float(choose(1)["4.bias"]) == pytest.approx(0.0, abs=1e-5)  # 0.6, not 1.2
    assert float(choose(1)["4.bias"]) == pytest.approx(1.0, abs=1e-5)  # 1.2


def test_part_of_another_name_is_coded_against_what_was_received(coarse):
    pair = Pair(up=coarse(step=1e-3), down=coarse(step=1.0))
    start = 10.0 * toy_model(0)
    for factor in (1.0, 1.1):
        model = factor * start
        found = pair.exchange(
            lambda _, request: {"result": request["model"] * 1.01}, clients="A", model=model
        )["A"]["result"]
        assert pair.coded("A")["result"]["base"] == "model"
        names = sorted(TRAINABLE)
        assert close(found.select(names), 1.01 * pair.received["A"]["model"].select(names), 2e-3)
    assert not close(pair.received["A"]["model"], model, 0.1)


def test_update_is_coded_by_itself(coarse):
    pair = Pair(up=coarse(step=1e-3))
    found = pair.exchange(lambda *_: {"update": noise("u")}, clients="A", model=toy_model(0))
    assert pair.coded("A")["update"]["base"] is None
    assert close(found["A"]["update"], noise("u"), 1e-3)


def test_part_of_the_model_is_coded_as_far_as_it_goes(coarse):
    pair = Pair(up=coarse(step=1e-3))
    private = find_parts(toy_network()).norm
    found = pair.exchange(
        lambda _, request: {"model": (request["model"] + noise("u")).without(private)},
        clients="A",
        model=toy_model(0),
    )
    assert found["A"]["model"].keys() == toy_model(0).without(private).keys()
    assert pair.coded("A")["model"]["names"] == "33"  # 0.bias, 0.weight, 4.bias and 4.weight


def test_ties_survive(coarse):
    weight = torch.ones(4, 3)
    model = Tensors({"x": weight, "y": weight, "z": torch.ones(2)})
    pair = Pair(up=coarse(), down=coarse())
    pair.layout = pair.server.layout = ModelLayout(model, model)
    for _ in range(2):
        found = pair.exchange(lambda _, r: {"model": 2.0 * r["model"]}, clients="A", model=model)
    tied = found["A"]["model"]
    assert tied["x"] is tied["y"]
    assert pair.coded("A")["model"]["data"][""].numel() == 4 * (12 + 2)


def test_identity_gives_back_every_bit():
    pair = Pair(Identity(), Identity())
    for _ in range(2):
        found = pair.exchange(trained, model=toy_model(0))
    assert equal(pair.received["C"]["model"], toy_model(0))
    assert equal(found["C"]["model"], trained("C", {"model": toy_model(0)})["model"])
    assert pair.server.state == {}
    assert pair.memories["C"] == {}


def test_generator_is_named_by_who_and_when_and_what(planned):
    pair = Pair(up=planned(step=1.0))
    for _ in range(2):
        pair.exchange(lambda *_: {"update": noise("u")}, clients="B", model=toy_model(0))
    rng = generator(3, "codec", "up", "B", 2, 0, "update")
    drawn = int(torch.randint(0, 1000, (1,), generator=rng))
    sent = pair.coded("B")["update"]["data"][""].numpy().tobytes()
    assert int.from_bytes(sent[:4], "little") == drawn + 1000 * 2  # 2: the order to B


# --- download ------------------------------------------------------------------------------------


@pytest.mark.parametrize("up", [None, Identity(), "coarse"])
def test_nothing_of_a_lossy_download_is_lost_for_good(up, coarse):
    """The server's model moves by the clients' updates, however little of it they received."""
    pair = Pair(coarse(step=2.0**-12) if up == "coarse" else up, coarse(step=1.0))
    model, true = toy_model(0), toy_model(0)
    for number in range(5):
        found = pair.exchange(moved(number), model=model)
        assert (number > 0) == (not equal(pair.received["A"]["model"], model))
        model = mean([reply["model"] for reply in found.values()])
        true = true + mean([noise(client, number) for client in "ABC"])
    names = sorted(TRAINABLE)
    assert close(model.select(names), true.select(names), 2e-3 if up == "coarse" else 1e-5)


def test_both_sides_hold_the_same_bits_and_a_broadcast_is_encoded_once(coarse):
    pair, model = Pair(down=coarse(step=1.0)), toy_model(0)
    for number in range(4):
        model = model + noise("move", number)
        pair.exchange(lambda *_: {}, model=model)
        (version,) = set(pair.versions())
        known = pair.server.pruned_state()["known"]["model"]
        assert known.keys() == {version}
        for client in "ABC":
            held = pair.memories[client]["down"]["model"]
            assert held["version"] == version
            assert equal(held["tensors"], known[version])
            received = pair.received[client]["model"]
            assert equal(received.select(TRAINABLE), known[version])
        assert pair.requests["A"] is pair.requests["B"]
    assert not close(known[version], model.select(sorted(TRAINABLE)), 0.01)


def test_download_is_the_difference_from_what_is_held(coarse):
    pair, start = Pair(down=coarse(step=1.0)), toy_model(0)
    pair.exchange(lambda *_: {}, model=start)
    assert equal(pair.received["A"]["model"], start)  # in full
    step = 0.6 * start.map(torch.ones_like)
    for times, came in ((1, 0.0), (2, 1.0), (3, 1.0), (4, 2.0)):  # 0.6, 1.2, 1.8, 2.4 cut to 1
        pair.exchange(lambda *_: {}, model=start + float(times) * step)
        found = pair.received["A"]["model"]
        assert float(found["4.bias"] - start["4.bias"]) == pytest.approx(came, abs=1e-5)


def test_parts_for_single_clients_have_references_of_their_own(coarse):
    pair = Pair(down=coarse(step=1e-4))
    own = {client: {"model": toy_model(k)} for k, client in enumerate("ABC")}
    for number in range(3):
        own = {c: {"model": parts["model"] + noise(c, number)} for c, parts in own.items()}
        pair.exchange(lambda *_: {}, each=own)
    assert len(set(pair.versions())) == 3
    for client in "ABC":
        assert close(pair.received[client]["model"], own[client]["model"], 2e-4)


def test_models_of_a_list_are_coded_one_by_one(coarse):
    pair, models = Pair(down=coarse(step=1e-4)), [toy_model(0), toy_model(1)]
    for number in range(2):
        models = [model + noise(number, k) for k, model in enumerate(models)]
        pair.exchange(lambda *_: {}, models=models, count=2)
    assert pair.coding("A")["parts"].keys() == {"models/0", "models/1"}
    assert pair.received["A"]["count"] == 2
    for found, model in zip(pair.received["A"]["models"], models, strict=True):
        assert close(found, model, 2e-4)


def test_client_that_failed_gets_in_full_what_the_others_decode(coarse):
    pair, model = Pair(down=coarse(step=1.0)), toy_model(0)
    pair.exchange(lambda *_: {}, model=model)
    pair.exchange(lambda *_: {}, model=model + noise(1), fail="B")
    assert "B" not in pair.server.state["held"]
    pair.exchange(lambda *_: {}, model=model + noise(1) + noise(2))
    assert "data" not in pair.coding("B")["parts"]["model"]
    assert "data" in pair.coding("A")["parts"]["model"]
    assert equal(pair.received["B"]["model"], pair.received["A"]["model"])
    assert len(set(pair.versions())) == 1
    pair.exchange(lambda *_: {}, model=model + noise(3))
    assert pair.requests["A"] is pair.requests["B"]


def test_clients_that_hold_different_things_get_different_messages(coarse):
    pair, model = Pair(down=coarse(step=1e-4)), toy_model(0)
    pair.exchange(lambda *_: {}, model=model)
    pair.exchange(lambda *_: {}, clients="AB", model=model + noise(1))
    pair.exchange(lambda *_: {}, model=model + noise(2))
    assert pair.requests["A"] is pair.requests["B"]
    assert pair.requests["A"] != pair.requests["C"]
    for client in "ABC":
        assert close(pair.received[client]["model"], model + noise(2), 2e-4)


def test_client_without_what_it_should_hold_says_so(coarse):
    pair = Pair(down=coarse(step=1.0))
    pair.exchange(lambda *_: {}, model=toy_model(0))
    older = pair.memories["B"]
    pair.exchange(lambda *_: {}, model=toy_model(1))
    for memory in ({}, older):
        pair.memories["B"] = memory
        with pytest.raises(LostReference, match="part 'model': this site does not hold"):
            pair.exchange(lambda *_: {}, clients="B", model=toy_model(2))
    pair.server.forget("B")
    pair.exchange(lambda *_: {}, clients="B", model=toy_model(2))
    assert equal(pair.received["B"]["model"], toy_model(2))


def test_down_generator_is_named_by_what_is_held(planned):
    pair = Pair(down=planned(step=1.0))
    pair.exchange(lambda *_: {}, clients="A", model=toy_model(0))
    pair.exchange(lambda *_: {}, clients="A", model=toy_model(0))
    rng = generator(3, "codec", "down", 2, 0, "model", "1-0-0")
    drawn = int(torch.randint(0, 1000, (1,), generator=rng))
    step = pair.received["A"]["model"] - toy_model(0)
    assert float(step["0.bias"][0]) == pytest.approx(drawn, rel=1e-6)  # the first that is drawn


# --- plan ----------------------------------------------------------------------------------------


def test_plan_is_told_the_last_round_and_its_orders_travel(planned):
    pair = Pair(up=planned(step=1.0))
    pair.number = -1
    for loss in (9.0, 0.5, 0.25):  # the first is the set-up, for which there is no plan
        pair.exchange(reporting(loss), model=toy_model(0))
    planned_with = pair.server.state["plan"]["reports"]
    assert [list(reports) for reports in planned_with] == [["A", "B", "C"], ["A", "B", "C"]]
    assert planned_with[1] == {"A": [0.5, 65], "B": [0.5, 66], "C": [0.5, 67]}
    assert pair.coding("C") == {"order": {"shift": 3}}


def test_client_that_tells_nothing_weighs_one(planned):
    pair = Pair(up=planned(step=1.0))
    for _ in range(2):
        pair.exchange(lambda *_: {}, model=toy_model(0))
    assert pair.server.state["plan"]["reports"] == [{}, {c: [None, 1.0] for c in "ABC"}]


def test_codec_without_a_plan_leaves_no_trace_at_the_server(coarse):
    pair = Pair(up=coarse(step=1.0))
    pair.exchange(trained, model=toy_model(0))
    assert pair.server.pruned_state() == {}
    assert CODEC_KEY not in unpack(pair.requests["A"])


# --- damage --------------------------------------------------------------------------------------


def entry(pair: Pair, **changes) -> dict[str, Any]:
    return {**pair.coded("A")["model"], **changes}


DAMAGE: dict[str, tuple[Callable[[Pair], Any], str]] = {
    "no mapping": (lambda p: [1], "what is coded is not what the message holds"),
    "no part": (lambda p: {"modell": entry(p)}, "what is coded is not what the message holds"),
    "no entry": (lambda p: {"model": 3}, "part 'model': its coded form is damaged"),
    "no names": (lambda p: {"model": {"data": entry(p)["data"]}}, "its coded form is damaged"),
    "mask": (lambda p: {"model": entry(p, names="fff")}, "its coded form is damaged"),
    "no bytes": (lambda p: {"model": entry(p, data=Tensors())}, "its coded form is damaged"),
    "text": (lambda p: {"model": entry(p, data="abc")}, "its coded form is damaged"),
    "floats": (
        lambda p: {"model": entry(p, data=Tensors({"": torch.ones(8)}))},
        "its coded form is damaged",
    ),
    "short": (
        lambda p: {"model": entry(p, data=Tensors({"": torch.ones(8, dtype=torch.uint8)}))},
        "part 'model': 8 bytes for",
    ),
    "fewer": (lambda p: {"model": entry(p, names="1")}, r"part 'model': \d+ bytes for"),
    "base": (lambda p: {"model": entry(p, base="else")}, "its coded form is damaged"),
    "list as base": (lambda p: {"model": entry(p, base=["model"])}, "its coded form is damaged"),
    "statistics as base": (
        lambda p: {"model": entry(p, base="small")},
        "its coded form is damaged",
    ),
    "nothing": (lambda p: {"model": {"names": "1"}}, "its coded form is damaged"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_reply_is_refused_in_a_sentence(kind, coarse):
    change, words = DAMAGE[kind]
    pair = Pair(up=coarse())
    small = toy_model(0).select({"1.running_mean", "0.bias"})
    exchange = Exchange(
        pair.server, {"model": toy_model(0), "small": small}, None, "A", position=(1, 0)
    )
    pair.requests["A"] = exchange.payload("A")
    pair.answer(exchange, "A", trained)
    reply = unpack(pair.answers["A"])["reply"]
    with pytest.raises(ProtocolError, match=words):
        exchange.decode_reply("A", reply, change(pair))


def test_part_that_comes_twice_is_refused(coarse):
    pair = Pair(up=coarse())
    exchange = Exchange(pair.server, {"model": toy_model(0)}, None, "A", position=(1, 0))
    pair.requests["A"] = exchange.payload("A")
    pair.answer(exchange, "A", trained)
    with pytest.raises(ProtocolError, match="its coded form is damaged"):
        exchange.decode_reply("A", {"model": toy_model(1)}, pair.coded("A"))


def test_coded_part_without_a_codec_is_refused(coarse):
    pair = Pair(up=coarse())
    exchange = Exchange(pair.server, {"model": toy_model(0)}, None, "A", position=(1, 0))
    pair.requests["A"] = exchange.payload("A")
    pair.answer(exchange, "A", trained)
    other = Pair(down=Half())
    theirs = Exchange(other.server, {"model": toy_model(0)}, None, "A", position=(1, 0))
    theirs.payload("A")
    envelope = unpack(pair.answers["A"])
    with pytest.raises(
        ProtocolError, match="it is coded, and this side has no codec; use the same"
    ):
        theirs.decode_reply("A", envelope["reply"], envelope["coded"])


def test_update_that_is_not_finite_is_refused_where_it_is_made_and_nothing_is_kept(coarse):
    pair = Pair(up=coarse())
    with pytest.raises(ProtocolError, match=r"part 'model': .* is not finite"):
        pair.exchange(lambda _, r: {"model": float("nan") * r["model"]}, model=toy_model(0))
    assert pair.memories == {}


def test_model_that_is_not_finite_is_refused_at_the_server(coarse):
    pair = Pair(down=coarse())
    pair.exchange(lambda *_: {}, model=toy_model(0))
    with pytest.raises(ProtocolError, match=r"part 'model': .* is not finite"):
        pair.exchange(lambda *_: {}, model=float("inf") * toy_model(0))


# --- ledger --------------------------------------------------------------------------------------


def test_bytes_of_a_part_are_those_of_its_code_and_of_what_is_not_coded(coarse):
    pair = Pair(up=coarse())
    session = ClientSession(pair.codecs, pair.layout, {}, seed=3, position=("A", 1, 0))
    session.decode_request({"model": toy_model(0)})
    sent = session.encode_reply({"model": toy_model(1), "num_examples": 3})
    numbers = 4 * 3 + 4 + 4 + 4 + 4 + 1  # weights and biases; four bytes each in Coarse
    rest = 4 * (4 + 4) + 8  # running mean and variance, and a counter of eight bytes
    assert sent.ledger == {"model": {"codec": "Coarse", "bytes": 4 * numbers + rest}}
