"""An algorithm that hides data under a permitted name: nothing of it leaves the site."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, handler
from collegium.core.message import Message, pack, unpack
from collegium.core.payloads import (
    Count,
    Features,
    Index,
    ModelPart,
    Numbers,
    PartSchema,
    Statistics,
)
from collegium.core.tensors import Tensors
from collegium.runtime.ledger import read_ledger
from collegium.runtime.requests import Request
from collegium.testing.toy import ToyFederation, toy_model

PATIENT = "Doe, Jane *1950-01-02"

WAYS: Mapping[str, Callable[[Client], Mapping[str, Any]]] = {
    "an image in the place of a tensor": lambda c: {
        "model": toy_model(0) | Tensors({"0.weight": c.examples.example(0).image})
    },
    "a tensor beside the model's": lambda c: {
        "model": toy_model(0) | Tensors({"image": c.examples.example(0).image})
    },
    "a name in the name of a tensor": lambda c: {
        "model": toy_model(0) | Tensors({PATIENT: torch.zeros(1)})
    },
    "a text in the place of the model": lambda c: {"model": PATIENT},
    "a list of pixels in the place of the model": lambda c: {
        "model": c.examples.example(0).image.tolist()
    },
    "a text as a count": lambda c: {"num_examples": PATIENT},
    "a date of birth as a count": lambda c: {"num_examples": 19500102},
    "a name as the name of a number": lambda c: {"progress": {PATIENT: 1.0}},
    "a name in the place of a loss": lambda c: {"progress": {"loss": PATIENT}},
    "a name in the place of a pseudonym": lambda c: {
        "scores": {"global": [{"case": PATIENT, "patient": "val-p001", "negative_loss": 0.5}]}
    },
    "a name as the name of a score": lambda c: {
        "scores": {
            "global": [
                {"case": "val-c001", "patient": "val-p001", "negative_loss": 0.5, PATIENT: 1.0}
            ]
        }
    },
    "a name as a kind of model": lambda c: {"scores": {PATIENT: []}},
    "a name in the place of a score": lambda c: {
        "scores": {
            "global": [{"case": "val-c001", "patient": "val-p001", "negative_loss": PATIENT}]
        }
    },
    "a name as the name of a column": lambda c: {
        "sizes": {"unit": "mL", "cases": 1, "columns": {PATIENT: [1.0]}}
    },
    "a name as a unit": lambda c: {"sizes": {"unit": PATIENT, "cases": 1, "columns": {}}},
    "pixels as the numbers of a column": lambda c: {
        "sizes": {"unit": "", "cases": 1, "columns": {"1": {"edges": [0.0] * 65536}}}
    },
    "rows of more cases than there are": lambda c: {
        "seen": Tensors({"cases": torch.zeros(1000, 2)})
    },
    "more numbers than features have": lambda c: {"seen": Tensors({"cases": torch.zeros(3, 99)})},
    "a name as the name of features": lambda c: {"seen": Tensors({PATIENT: torch.zeros(1)})},
    "a choice that there is not": lambda c: {"choice": 19500102},
    "a part that nobody declared": lambda c: {"patients": [PATIENT]},
}


@dataclass(frozen=True)
class Smuggler(FedAvg):
    """Sends what one of the ways says."""

    sends: ClassVar[Mapping[str, PartSchema]] = {
        "model": ModelPart(),
        "num_examples": Count(),
        "sizes": Statistics(),
        "seen": Features(by_case=True, most=64),
        "choice": Index(below="count"),
    }

    way: str = ""
    count: int = 3

    @handler
    def train(self, client: Client, request: Message) -> Message:
        return Message.of(**WAYS[self.way](client))


def test_there_are_twice_as_many_ways_as_were_found() -> None:
    assert len(WAYS) >= 20
    assert Numbers(names=("loss",)).names == ("loss",)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_smuggled_out(tmp_path: Path, way: str) -> None:
    client = ToyFederation(Smuggler(way=way), tmp_path).clients()["A"]
    before = client.store.names()
    data = client.handle(Request("A", 1, 0, "train", "train", pack({"model": toy_model(0)})))
    assert unpack(data) == {"error": {"code": "protocol", "names": {}}}
    assert PATIENT.encode() not in data
    (line,) = read_ledger(client.ledger.path)
    assert list(line["parts"]) == ["failure"]
    assert client.store.names() == before
