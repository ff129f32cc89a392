"""Forged replies of one of three sites, each under the policies to fail and to skip.

With "fail" the run ends in one sentence that names the site, and what was committed before is kept.
With "skip" it goes on without that site, with the bits of a run in which the site was not there.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.harmofl import HarmoFL
from collegium.compression.session.groups import NO_CODECS, RESEND_REQUEST, Codecs
from collegium.compression.stc import STC
from collegium.core.algorithm import Algorithm, handler
from collegium.core.message import Message, pack, unpack
from collegium.core.payloads import Features, PartSchema
from collegium.core.tensors import Tensors
from collegium.errors import ClientError, CollegiumError
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.participation import EVERYBODY, SKIPPING
from collegium.runtime.records import Records
from collegium.runtime.requests import Request, Response
from collegium.testing.kinds import KINDS
from collegium.testing.toy import ToyFederation

FORGER, ROUND = "B", 2
"""The site that forges, and the round in which it does; the round before is honest."""

Change = Callable[[Any], Any]
"""Returns what the site sends instead: an envelope, or bytes."""


class Forging(InProcess):
    """Changes what one site sends in one round, or loses it where nothing is to be changed."""

    def __init__(
        self,
        build: Any,
        change: Change | None,
        stage: str,
        method: str = "",
        number: int = ROUND,
        forger: str = FORGER,
    ) -> None:
        super().__init__(build)
        self._forger = forger
        self._change, self._stage, self._method = change, stage, method
        self._number = number
        self.forged = 0

    def exchange(self, requests: Iterable[Request]) -> Iterator[Response]:
        for request in requests:
            (response,) = super().exchange([request])
            asked = request.client, request.round, request.stage
            forges = asked == (self._forger, self._number, self._stage)
            if not forges or self._method not in ("", request.method):
                yield response
            elif self._change is None:
                yield Response(self._forger, b"", 0.0, missing="is not there")
            else:
                self.forged += 1
                changed = self._change(unpack(response.data))
                data = changed if isinstance(changed, bytes) else pack(changed)
                yield replace(response, data=data, signed=None)


def reply(**parts: Any) -> Change:
    """Replace parts of a reply; None leaves one out, and a function makes it of the honest one."""

    def change(envelope: dict[str, Any]) -> dict[str, Any]:
        honest = envelope["reply"]
        changed = {n: p(honest.get(n)) if callable(p) else p for n, p in parts.items()}
        found = {n: p for n, p in {**honest, **changed}.items() if p is not None}
        return {**envelope, "reply": found}

    return change


def tensor(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Replace a tensor of the model."""
    return reply(model=lambda model: model | Tensors({name: make(model[name])}))


def origin(position: int, value: Any) -> Change:
    """Change what the reply says of the request that it answers."""

    def change(envelope: dict[str, Any]) -> dict[str, Any]:
        return {
            **envelope,
            "of": [*envelope["of"][:position], value, *envelope["of"][position + 1 :]],
        }

    return change


def nested(depth: int) -> bytes:
    """An envelope that is nested as deep as told."""
    nesting = '{"reply":' + "[" * depth + "]" * depth + "}"
    head = json.dumps({"__metadata__": {"nesting": nesting}}).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head


def with_number(part: str, digits: str) -> Change:
    """Write digits in the place of a number that `pack` could not write."""

    def change(envelope: dict[str, Any]) -> bytes:
        data = pack({**envelope, "reply": {**envelope["reply"], part: 777777}})
        size = int.from_bytes(data[:8], "little")
        head = data[8 : 8 + size].replace(b"777777", digits.encode())
        head += b" " * (-len(head) % 8)
        return len(head).to_bytes(8, "little") + head + data[8 + size :]

    return change


def flipped(place: int) -> Change:
    """Flip one bit of the envelope's text."""

    def change(envelope: dict[str, Any]) -> bytes:
        data = bytearray(pack(envelope))
        data[place] ^= 1 << 5
        return bytes(data)

    return change


PATIENT = "Doe, Jane *1950-01-02"


def names_of_the_network() -> tuple[str, str, str]:
    """The names of a weight, a variance and a counter of the network."""
    module = KINDS["rows with classes"].network()
    names = [*module.state_dict()]
    return tuple(next(n for n in names if n.endswith(e)) for e in (  # type: ignore[return-value]
        "weight", "running_var", "num_batches_tracked"
    ))  # fmt: skip


WEIGHT, VARIANCE, COUNTER = names_of_the_network()

MESSAGES: Mapping[str, Change] = {
    "nothing": lambda _: b"",
    "one byte": lambda _: b"x",
    "garbage": lambda _: b"garbage" * 100,
    "zeros": lambda _: bytes(1000),
    "a header longer than the message": lambda _: (1 << 40).to_bytes(8, "little") + b"{}",
    "cut in half": lambda e: pack(e)[: len(pack(e)) // 2],
    "its last byte missing": lambda e: pack(e)[:-1],
    "a byte too many": lambda e: pack(e) + b"\0",
    "a bit flipped in the length": flipped(2),
    "a bit flipped in the header": flipped(12),
    "a header of JSON that is no mapping": lambda _: (8).to_bytes(8, "little") + b"[1,2,3]  "[:8],
    "no nesting": lambda _: (24).to_bytes(8, "little") + b'{"__metadata__":{}}     ',
    "nested a hundred thousand deep": lambda _: nested(100_000),
    "nested nine hundred deep": lambda _: nested(900),
    "a list": lambda e: [e],
    "a number": lambda _: 3,
    "no envelope": lambda _: None,
    "no reply": lambda e: {"of": e["of"]},
    "a reply that is a list": lambda e: {**e, "reply": [1]},
    "a reply that is a text": lambda e: {**e, "reply": PATIENT},
    "more than a reply": lambda e: {**e, PATIENT: 1},
    "no word on the request": lambda e: {"reply": e["reply"]},
    "another site's reply": origin(0, "A"),
    "a reply of the round before": origin(1, ROUND - 1),
    "a reply of the round after": origin(1, ROUND + 1),
    "a reply to another exchange": origin(2, 1),
    "a reply to another request": origin(3, "test"),
    "an origin that is a text": lambda e: {**e, "of": "B"},
    "coded without a codec": lambda e: {**e, "coded": {"model": {}}},
    "coded into a number": lambda e: {**e, "coded": 3},
    "an error without a word": lambda _: {"error": {}},
    "an error with control characters": lambda _: {"error": {"text": "\x1b[2J\n\r\x07" * 500}},
    "an error of a kind of its own": lambda _: {"error": {"kind": "SystemExit", "text": "0"}},
    "an error whose names are none": lambda _: {"error": {"code": "not_accepted", "names": 3}},
    "asking for everything again, for ever": lambda _: RESEND_REQUEST,
}  # fmt: skip
"""Messages that are no reply to the request."""

PARTS: Mapping[str, Change] = {
    "no model": reply(model=None),
    "no number of examples": reply(num_examples=None),
    "no part at all": lambda e: {**e, "reply": {}},
    "a part that nobody declared": reply(patients=[PATIENT]),
    "a model that is a list": reply(model=[1.0, 2.0]),
    "a model that is a text": reply(model=PATIENT),
    "a model that is a mapping": reply(model={WEIGHT: 1.0}),
    "a model without tensors": reply(model=lambda m: Tensors({})),
    "a tensor missing": reply(model=lambda m: m.without({WEIGHT})),
    "a tensor too many": reply(model=lambda m: m | Tensors({PATIENT: torch.ones(3)})),
    "a tensor of another shape": tensor(WEIGHT, lambda t: torch.ones(99, 99)),
    "a tensor without an axis": tensor(WEIGHT, lambda t: t[0]),
    "an empty tensor": tensor(WEIGHT, lambda t: t[:0]),
    "a tensor of another type": tensor(WEIGHT, torch.Tensor.double),
    "a tensor of whole numbers": tensor(WEIGHT, torch.Tensor.long),
    "a tensor of complex numbers": tensor(WEIGHT, lambda t: t.to(torch.complex64)),
    "NaN": tensor(WEIGHT, lambda t: t.index_fill(0, torch.tensor(0), float("nan"))),
    "infinity": tensor(WEIGHT, lambda t: t.index_fill(0, torch.tensor(0), float("inf"))),
    "minus infinity": tensor(WEIGHT, lambda t: t.index_fill(0, torch.tensor(0), -float("inf"))),
    "one absurd weight": tensor(WEIGHT, lambda t: t.index_fill(0, torch.tensor(0), 1e30)),
    "all weights absurd": reply(
        model=lambda m: m.map(lambda t: t * 1e6 if t.is_floating_point() else t)
    ),
    "an absurd variance": tensor(VARIANCE, lambda t: t + 1e30),
    "a negative variance": tensor(VARIANCE, lambda t: -t - 1e-3),
    "a negative counter": tensor(COUNTER, lambda t: t - 1_000_000),
    "an absurd counter": tensor(COUNTER, lambda t: t + (1 << 60)),
    "minus one example": reply(num_examples=-1),
    "half an example": reply(num_examples=0.5),
    "as many examples as true": reply(num_examples=True),
    "a text of examples": reply(num_examples="9"),
    "more examples than cases": reply(num_examples=lambda n: n + 1000),
    "10^18 examples": reply(num_examples=10**18),
    "10^400 examples": with_number("num_examples", "1" + "0" * 400),
    "a number of ten thousand digits": with_number("num_examples", "9" * 10_000),
    "NaN examples": with_number("num_examples", "NaN"),
    "a list of examples": reply(num_examples=[9]),
    "a loss that is NaN": reply(progress={"loss": float("nan"), "steps": 1}),
    "a loss of 10^400": reply(progress={"loss": 10**400, "steps": 1}),
    "a loss that is a text": reply(progress={"loss": PATIENT}),
    "a patient as the name of a number": reply(progress={PATIENT: 1.0}),
    "progress that is a list": reply(progress=[0.5]),
    "progress in a mapping": reply(progress={"loss": {"loss": 0.5}}),
    "a thousand numbers": reply(progress={f"n{k}": 0.0 for k in range(1000)}),
}
"""Replies with parts that an honest site does not send."""


def scores(make: Callable[[list[dict[str, Any]]], Any]) -> Change:
    """Change the rows of scores of the global model."""
    return reply(scores=lambda found: {**found, "global": make(found["global"])})


def first_row(**values: Any) -> Change:
    """Change the first row of scores; None leaves a value out."""

    def make(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        changed = {k: v for k, v in {**rows[0], **values}.items() if v is not Ellipsis}
        return [changed, *rows[1:]]

    return scores(make)


MEAN = {"case": "mean", "patient": "mean", "accuracy": 0.5}

SCORES: Mapping[str, Change] = {
    "no scores": reply(scores=None),
    "scores that are a list": reply(scores=[]),
    "scores of a kind of model of its own": reply(scores=lambda s: {**s, PATIENT: []}),
    "rows that are a mapping": scores(lambda rows: rows[0]),
    "a row that is a text": scores(lambda rows: [PATIENT]),
    "a patient in the place of a case": first_row(case=PATIENT),
    "a patient in the place of a pseudonym": first_row(patient=PATIENT),
    "no case": first_row(case=...),
    "no score": first_row(accuracy=...),
    "a patient as the name of a score": first_row(**{PATIENT: 1.0}),
    "a score that is NaN": first_row(accuracy=float("nan")),
    "a score that is a text": first_row(accuracy="1.0"),
    "a score that is true": first_row(accuracy=True),
    "a score of 10^400": first_row(accuracy=10**400),
    "a score above its range": first_row(accuracy=7.0),
    "a score below its range": first_row(accuracy=-0.5),
    "a class that there is not": first_row(_class=9.0),
    "one case twice": scores(lambda rows: [rows[0], *rows]),
    "more rows than cases": scores(
        lambda rows: [{**rows[0], "case": f"val-c{k:03d}"} for k in range(1000)]
    ),
    "a mean of 10^18 cases": scores(lambda rows: [{**MEAN, "cases": 10**18, "events": 1}]),
    "a mean of minus one case": scores(lambda rows: [{**MEAN, "cases": -1, "events": 1}]),
    "a mean without events": scores(lambda rows: [{**MEAN, "cases": 3}]),
    "a mean beside cases": scores(lambda rows: [{**MEAN, "cases": 3, "events": 1}, *rows]),
}  # fmt: skip
"""Replies to an evaluation with scores that no site has."""


def states_of_the_server(root: Path) -> dict[str, bytes]:
    """The stored states of the server, and the models that it keeps."""
    files = sorted((root / "server").rglob("*.state"))
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


@dataclass
class Outcome:
    """A run with one site that forges."""

    federation: ToyFederation
    engine: Forging

    @property
    def left_out(self) -> set[str]:
        """The sites that the server left out in the round of the forgery."""
        record = Records(self.federation.root / "server").read(ROUND)
        return {left["client"] for left in record.left_out}


def run(
    root: Path,
    change: Change | None,
    stage: str,
    method: str = "",
    *,
    skip: bool,
    codecs: Codecs = NO_CODECS,
    algorithm: Algorithm | None = None,
    kind: str = "rows with classes",
) -> Outcome:
    engines: list[Forging] = []

    def engine(federation: ToyFederation) -> Forging:
        engines.append(Forging(federation.clients, change, stage, method))
        return engines[-1]

    federation = ToyFederation(
        algorithm or FedAvg(),
        root,
        engine,
        participation=SKIPPING if skip else EVERYBODY,
        codecs=codecs,
        kind=KINDS[kind],
    )
    outcome = Outcome(federation, engines[0])
    federation.run(ROUND)
    return outcome


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The states of runs in which the site was not there, by the stage in which it was not."""
    found = {}
    for stage in ("train", "evaluate"):
        root = tmp_path_factory.mktemp(stage)
        run(root, None, stage, skip=True)
        found[stage] = states_of_the_server(root)
    assert found["train"] != found["evaluate"]
    return found


ALL = [
    *(("train", name, change) for name, change in {**MESSAGES, **PARTS}.items()),
    *(("evaluate", name, change) for name, change in SCORES.items()),
]


def test_there_are_as_many_forgeries_as_promised() -> None:
    assert len(ALL) >= 60
    assert len({name for _, name, _ in ALL}) == len(ALL)


@pytest.mark.parametrize(("stage", "name", "change"), ALL, ids=[name for _, name, _ in ALL])
def test_a_forgery_ends_the_run_in_one_sentence(
    tmp_path: Path, stage: str, name: str, change: Change
) -> None:
    with pytest.raises(ClientError) as caught:
        run(tmp_path, change, stage, skip=False)
    check_sentence(caught.value)
    kept = sorted(path.stem for path in (tmp_path / "server").glob("*.state"))
    assert kept[-1] == f"{ROUND - (stage == 'train'):06d}"


def check_sentence(error: CollegiumError) -> None:
    """Check that a message is one line of a bounded length that names the site."""
    text = str(error)
    assert text.startswith(f"client {FORGER!r}, round {ROUND}, ")
    assert text.isprintable()
    assert len(text) < 2200


@pytest.mark.parametrize(("stage", "name", "change"), ALL, ids=[name for _, name, _ in ALL])
def test_a_forgery_leaves_out_its_site_alone(
    tmp_path: Path, without: dict[str, dict[str, bytes]], stage: str, name: str, change: Change
) -> None:
    outcome = run(tmp_path, change, stage, skip=True)
    assert outcome.engine.forged
    assert states_of_the_server(tmp_path) == without[stage]
    if stage == "train":
        assert outcome.left_out == {FORGER}


@pytest.mark.parametrize(
    ("name", "change"),
    {
        "no entries": lambda e: {**e, "coded": {}},
        "entries of another part": lambda e: {**e, "coded": {"patients": {}}},
        "an entry that is empty": lambda e: {**e, "coded": {"model": {}}},
        "an entry that is a number": lambda e: {**e, "coded": {"model": 3}},
        "data of no bytes": lambda e: with_entry(e, data=Tensors({"": torch.zeros(0).byte()})),
        "data of zeros": lambda e: with_entry(e, data=Tensors({"": torch.zeros(64).byte()})),
        "data of ones": lambda e: with_entry(e, data=Tensors({"": torch.full((64,), 255).byte()})),
        "data that are floats": lambda e: with_entry(e, data=Tensors({"": torch.ones(9)})),
        "names that are none": lambda e: with_entry(e, names="ff" * 10_000),
        "a base that was not sent": lambda e: with_entry(e, base="patients"),
        "a base that is a list": lambda e: with_entry(e, base=["model"]),
    }.items(),
)
def test_a_forgery_of_a_coded_reply_leaves_out_its_site_alone(
    tmp_path: Path, name: str, change: Change
) -> None:
    codecs = Codecs(up=STC(p=0.5))
    with pytest.raises(ClientError) as caught:
        run(tmp_path / "fail", change, "train", skip=False, codecs=codecs)
    check_sentence(caught.value)
    run(tmp_path / "without", None, "train", skip=True, codecs=codecs)
    outcome = run(tmp_path / "skip", change, "train", skip=True, codecs=codecs)
    assert outcome.left_out == {FORGER}
    wanted = states_of_the_server(tmp_path / "without")
    assert states_of_the_server(tmp_path / "skip") == wanted


def with_entry(envelope: dict[str, Any], **values: Any) -> dict[str, Any]:
    entry = {**envelope["coded"]["model"], **values}
    return {**envelope, "coded": {"model": entry}}


def test_features_of_another_shape_leave_out_their_site_alone(tmp_path: Path) -> None:
    """The amplitudes of HarmoFL, which are exchanged before the first round."""
    assert HarmoFL().amplitudes == "low"
    larger = reply(amplitude=lambda a: a.map(lambda t: torch.ones(*t.shape[:-1], 99)))
    absurd = reply(amplitude=lambda a: a.map(lambda t: t + 1e30))
    for place, change in enumerate((larger, absurd)):
        for skip in (False, True):
            engine, root = _harmofl(change, tmp_path / f"{place}-{skip}", skip=skip)
            if not skip:
                with pytest.raises(ClientError, match=f"client '{FORGER}', round 0, measure: part"):
                    engine.server.begin()
            else:
                engine.server.begin()
                silent, other = _harmofl(None, tmp_path / f"{place}-without", skip=True)
                silent.server.begin()
                assert states_of_the_server(root) == states_of_the_server(other)


@dataclass(frozen=True)
class MeanOfFeatures(FedAvg):
    """A method that averages features as they arrive, whose shape no schema knows."""

    sends: ClassVar[Mapping[str, PartSchema]] = {**FedAvg.sends, "features": Features()}

    def setup(self, server: Any) -> None:
        super().setup(server)
        server.state["features"] = server.ask(self.look).mean("features", weight=None)

    @handler
    def look(self, client: Any, message: Message) -> Message:
        return Message({"features": Tensors({"x": torch.arange(3.0)})})


@pytest.mark.parametrize("forger", ["A", "B", "C"])
def test_features_of_another_shape_in_a_mean_leave_out_their_site_alone(
    tmp_path: Path, forger: str
) -> None:
    """Whether it answers first or last: an honest site is never blamed."""

    def begin(name: str, change: Change | None, *, skip: bool) -> dict[str, bytes]:
        federation = ToyFederation(
            MeanOfFeatures(),
            tmp_path / name,
            lambda f: Forging(f.clients, change, "train", number=0, forger=forger),
            participation=SKIPPING if skip else EVERYBODY,
        )
        federation.server.begin()
        return states_of_the_server(tmp_path / name)

    larger = reply(features=lambda part: part.map(lambda t: torch.ones(7)))
    assert begin("skip", larger, skip=True) == begin("without", None, skip=True)
    with pytest.raises(CollegiumError, match="features"):
        begin("fail", larger, skip=False)


def _harmofl(change: Change | None, root: Path, *, skip: bool) -> tuple[ToyFederation, Path]:
    federation = ToyFederation(
        HarmoFL(),
        root,
        lambda f: Forging(f.clients, change, "train", number=0),
        participation=SKIPPING if skip else EVERYBODY,
        kind=KINDS["images with classes"],
    )
    return federation, root
