import weakref
from dataclasses import FrozenInstanceError, dataclass
from typing import ClassVar

import pytest
import torch

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.fedbn import FedBN
from collegium.algorithms.iopfl import IOPFL
from collegium.core.algorithm import Algorithm, Replies, handler
from collegium.core.message import Message
from collegium.core.payloads import Count, ModelPart, Numbers, Scores
from collegium.core.tensors import Tensors
from collegium.errors import ProtocolError
from collegium.runtime.requests import handler_of


def messages(*pairs: tuple[str, float, int]):
    for client, value, count in pairs:
        yield client, Message.of(model=Tensors({"w": torch.tensor([value])}), num_examples=count)


def test_mean_weighs_by_a_part_or_all_alike():
    pairs = (("a", 1.0, 1), ("b", 5.0, 3))
    assert Replies(messages(*pairs)).mean("model")["w"].tolist() == [4.0]
    assert Replies(messages(*pairs)).mean("model", weight=None)["w"].tolist() == [3.0]


def test_mean_of_fifty_clients_keeps_a_handful_of_replies_alive():
    alive: weakref.WeakSet = weakref.WeakSet()
    most = 0

    def source():
        nonlocal most
        for number in range(50):
            model = Tensors({"w": torch.full((10,), float(number))})
            alive.add(model["w"])
            most = max(most, len(alive))
            message = Message.of(model=model, num_examples=1)
            del model
            yield f"{number:02d}", message
            del message

    replies = Replies(source())
    assert replies.mean("model")["w"][0] == sum(range(50)) / 50
    assert most <= 6
    assert replies.clients == [f"{number:02d}" for number in range(50)]


def test_replies_are_let_go_and_say_so():
    replies = Replies(messages(("a", 1.0, 1)))
    replies.mean("model")
    with pytest.raises(ProtocolError, match=r"call \.collect\(\) before their first use"):
        replies.mean("model")


def test_held_replies_may_be_used_again():
    replies = Replies(messages(("a", 1.0, 1), ("b", 5.0, 3))).collect()
    assert replies.mean("model")["w"].tolist() == [4.0]
    assert [reply["num_examples"] for reply in replies.values()] == [1, 3]
    assert [client for client, _ in replies.items()] == ["a", "b"]
    assert [client for client, _ in replies] == ["a", "b"]


def test_weights_are_those_of_the_mean_with_the_factors():
    pairs = [("a", 1.0, 1), ("b", 5.0, 3)]
    replies = Replies(messages(*pairs), {"b": 0.5})
    assert not replies.averaged
    assert replies.weights() == {"a": 1.0, "b": 1.5}
    assert replies.averaged
    assert replies.weights(None) == {"a": 1.0, "b": 0.5}
    assert float(replies.mean("model")["w"]) == pytest.approx((1 + 1.5 * 5) / 2.5)


def test_mean_names_the_client_whose_names_differ():
    def source():
        yield from messages(("a", 1.0, 1))
        yield "b", Message.of(model=Tensors({"v": torch.ones(1)}), num_examples=1)

    with pytest.raises(ProtocolError, match="client 'b', part 'model': tensor names differ: missi"):
        Replies(source()).mean("model")


def test_mean_of_no_reply_says_so():
    with pytest.raises(ProtocolError, match="no client sent a reply that can be used"):
        Replies(iter(())).mean("model")


def test_declared_parts_are_those_of_the_bases_with_the_own_ones_on_top():
    declared = FedBN.all_sends()
    assert {name: type(part) for name, part in declared.items()} == {
        "progress": Numbers, "scores": Scores, "model": ModelPart, "num_examples": Count,
        "personal": ModelPart,
    }  # fmt: skip
    assert declared["model"] == ModelPart(without="norm")
    assert FedAvg.all_sends()["model"] == ModelPart()
    assert [name for name, part in IOPFL.all_sends().items() if part.opt_in] == ["personal"]


def test_an_instance_is_frozen_and_describes_itself():
    algorithm = IOPFL(tau=0.5)
    assert algorithm.hyperparameters() == {"weighting": "examples", "tau": 0.5}
    with pytest.raises(FrozenInstanceError):
        algorithm.tau = 0.1  # type: ignore[misc]


def test_class_without_a_round_cannot_be_made():
    @dataclass(frozen=True)
    class Nothing(Algorithm):
        """No round."""

    with pytest.raises(TypeError, match="round"):
        Nothing()  # type: ignore[abstract]


def test_only_marked_methods_can_be_called_from_outside():
    @dataclass(frozen=True)
    class Mine(FedAvg):
        """Three methods."""

        plain: ClassVar[int] = 3

        @handler
        def marked(self, client, request):
            return Message.of()

        def unmarked(self, client, request):
            return Message.of()

    assert handler_of(Mine(), "marked")(None, None) == Message.of()
    assert handler_of(Mine(), "train").__name__ == "train"
    for name in ("unmarked", "plain", "__init__", "absent", "deploy"):
        with pytest.raises(ProtocolError, match=f"'{name}' is not a handler of Mine"):
            handler_of(Mine(), name)
