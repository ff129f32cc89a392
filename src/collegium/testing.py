"""The conformance suite that every algorithm passes, and the toy federation on which it runs.

    from collegium.testing import check_algorithm
    check_algorithm(MyAlgorithm())

The toy has three sites of different sizes and a network with batch normalisation and dropout; a
whole run takes a fraction of a second.
"""

from __future__ import annotations

import inspect
import json
import random
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from collegium import state as state_module
from collegium.algorithm import Algorithm
from collegium.client import ClientRuntime
from collegium.data.dataset import ConcatDataset, TensorDataset
from collegium.data.site import Site
from collegium.engines.inprocess import InProcess
from collegium.errors import CollegiumError, MissingReply
from collegium.message import Message, pack, unpack
from collegium.models.parts import find_parts
from collegium.randomness import ambient, generator
from collegium.registry import describe, load_algorithm
from collegium.run import Run
from collegium.runtime import Answer, Request, ServerRuntime, Transport, answer
from collegium.tasks import SupervisedTask
from collegium.tensors import Tensors
from collegium.training import LocalTraining, TrainingConfig

SIZES = {"A": 9, "B": 14, "C": 21}
"""Training examples of the toy's sites."""

TRAINING = TrainingConfig(optimizer="sgd", lr=0.05, batch_size=4, local_epochs=1)
"""The toy's recipe: plain SGD, with which every method is right."""


class ConformanceError(AssertionError):
    """An algorithm breaks a rule; the text says which and how."""


def toy_network() -> nn.Module:
    """Return the toy's network: 3 inputs, batch normalisation, dropout, one output.

    Its head is the last layer.
    """
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 1)
    )


def toy_model(k: int, seed: int = 7) -> Tensors:
    """Return the ``k``-th initial model of the toy."""
    with ambient(seed, "model", k):
        return Tensors(toy_network().state_dict()).clone()


def toy_site(name: str, *, like: str | None = None, seed: int = 7) -> Site:
    """Return a site whose data is a linear function with a site's own shift.

    ``like`` makes it a copy of another.
    """
    source = like or name
    count = SIZES[source] + 8
    inputs = torch.randn(count, 3, generator=generator(seed, "toy", source, "inputs"))
    slope = torch.tensor([[1.0], [-2.0], [0.5]]) + 0.5 * torch.randn(
        3, 1, generator=generator(seed, "toy", source, "slope")
    )
    labels = inputs @ slope
    train, val, test = (
        TensorDataset({"image": inputs[rows], "label": labels[rows]})
        for rows in (slice(8, None), slice(0, 4), slice(4, 8))
    )
    return Site(name, train, val, test)


def toy_clients(
    algorithm: Algorithm | tuple[str, dict[str, Any]],
    root: Path,
    names: Sequence[str] = ("A", "B", "C"),
    *,
    training: TrainingConfig = TRAINING,
    like: str | None = None,
    seed: int = 7,
) -> dict[str, ClientRuntime]:
    """Return the toy's clients, all copies of the site ``like`` if it is given."""
    if isinstance(algorithm, tuple):
        algorithm = load_algorithm(algorithm[0])(**algorithm[1])
    sites = {name: toy_site(name, like=like) for name in names}
    local = LocalTraining(toy_network(), SupervisedTask(nn.functional.mse_loss), training)
    pool = ConcatDataset([sites[name].train for name in sorted(sites)])
    return {
        name: ClientRuntime(
            site,
            algorithm,
            local,
            seed=seed,
            root=root / "clients" / name,
            pool=pool if algorithm.simulation_only else None,
        )
        for name, site in sites.items()
    }


class ToyFederation:
    """A federation of toy sites in a folder.

    Args:
        algorithm: the algorithm to run.
        root: folder for all states.
        transport: made from this federation; by default the clients answer in this process.
        training: the local recipe.
        like: makes all sites copies of this one.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        root: Path,
        transport: Callable[[ToyFederation], Transport] | None = None,
        *,
        names: Sequence[str] = ("A", "B", "C"),
        training: TrainingConfig = TRAINING,
        like: str | None = None,
        on_failure: str = "fail",
    ) -> None:
        self.algorithm, self.root, self.names, self.training, self.like = (
            algorithm,
            root,
            names,
            training,
            like,
        )
        engine = transport(self) if transport else InProcess(self.clients)
        self.server = ServerRuntime(
            algorithm,
            names,
            toy_model,
            find_parts(toy_network()),
            engine,
            root / "server",
            on_failure="skip" if on_failure == "skip" else "fail",
        )

    def clients(self) -> dict[str, ClientRuntime]:
        """Build all clients anew, as a restarted site does."""
        return toy_clients(
            self.algorithm, self.root, self.names, training=self.training, like=self.like
        )

    def run(self, rounds: int = 2) -> ToyFederation:
        """Run up to round ``rounds``, with evaluation and test, from where the state stands."""
        try:
            Run(self.server, rounds, "negative_loss").execute()
        finally:
            self.server.transport.close()
        return self

    def states(self) -> dict[str, bytes]:
        """Return every stored state of server and clients, and the selected models, by file."""
        found = [*self.root.rglob("*.state"), self.root / "server/records/test.json"]
        return {str(file.relative_to(self.root)): file.read_bytes() for file in sorted(found)}


class Wire:
    """A transport that shuffles requests and rebuilds every client for each of them.

    It may also die, repeat requests or lose clients.
    """

    def __init__(
        self,
        federation: ToyFederation,
        *,
        die_at: int = -1,
        repeat: bool = False,
        lose: Mapping[int, str] | None = None,
    ) -> None:
        self._federation, self._die_at, self._repeat, self._lose = (
            federation,
            die_at,
            repeat,
            lose or {},
        )
        self.count = 0
        self.log: list[tuple[Request, Message]] = []

    def exchange(self, requests: Iterable[Request]) -> Iterator[Answer]:
        """Answer in an arbitrary order."""
        shuffled = list(requests)
        random.Random(self.count).shuffle(shuffled)
        for request in shuffled:
            if self.count == self._die_at:
                raise KeyboardInterrupt
            self.count += 1
            if self._lose.get(request.round) == request.client and request.stage == "train":
                error = {"kind": MissingReply.__name__, "text": "no answer in 1 s"}
                yield Answer(request.client, pack({"error": error}), 0.0)
                continue
            for _ in range(2 if self._repeat else 1):
                reply = answer(self._federation.clients()[request.client], request)
            envelope = unpack(reply.data)
            if "reply" in envelope:
                self.log.append((request, Message(envelope["reply"])))
            yield reply

    def close(self) -> None:
        """Nothing is held."""


@contextmanager
def dying_save(number: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt right after the ``number``-th write to disk inside the block.

    Yields the count of writes.
    """
    original = state_module.write_atomically
    count = [0]

    def write(path: Path, data: bytes) -> None:
        original(path, data)
        count[0] += 1
        if count[0] == number:
            raise KeyboardInterrupt

    state_module.write_atomically = write
    try:
        yield count
    finally:
        state_module.write_atomically = original


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ConformanceError(text)


def _differences(a: Mapping[str, bytes], b: Mapping[str, bytes]) -> str:
    return ", ".join(sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name)))


def _same(expected: ToyFederation, found: ToyFederation, what: str) -> None:
    different = _differences(expected.states(), found.states())
    _require(not different, f"{what} changes the result: {different} differ")


def _models(federation: ToyFederation) -> list[Tensors]:
    state = federation.server.state
    return [state["model"]] if "model" in state else list(state.get("models", []))


class Conformance:
    """The checks, in order; each is a method whose docstring states the rule."""

    def __init__(self, algorithm: Algorithm, folder: Path, rounds: int = 2) -> None:
        self.algorithm, self._folder, self._rounds = algorithm, folder, rounds
        self._count = 0
        self._reference = self._federation().run(rounds)

    def _federation(
        self,
        transport: Callable[[ToyFederation], Transport] | None = None,
        algorithm: Algorithm | None = None,
        **options: Any,
    ) -> ToyFederation:
        self._count += 1
        return ToyFederation(
            algorithm or self.algorithm, self._folder / f"{self._count:04d}", transport, **options
        )

    def check_it_learns(self) -> None:
        """Two rounds run; every state stays finite, and models move."""
        before, moved = toy_model(0), False
        for file in self._reference.root.rglob("*.state"):
            for tensors in _groups(unpack(file.read_bytes())):
                finite = all(
                    bool(torch.isfinite(t).all()) for t in tensors.values() if t.is_floating_point()
                )
                _require(finite, f"{file.name} holds NaN or infinite values")
                moved |= any(
                    name in before and not torch.equal(t, before[name])
                    for name, t in tensors.items()
                )
        _require(moved, "no stored model moved from the initial one")

    def check_order_does_not_matter(self) -> None:
        """Shuffled clients, every one rebuilt for every request, give the same bits."""
        _same(self._reference, self._federation(Wire).run(self._rounds), "the clients' order")

    def check_workers_do_not_matter(self) -> None:
        """Clients in two processes give the same bits as in one."""

        def transport(federation: ToyFederation) -> Transport:
            build = partial(toy_clients, describe(self.algorithm), federation.root)
            return InProcess(build, workers=2)

        _same(
            self._reference,
            self._federation(transport).run(self._rounds),
            "a second worker process",
        )

    def check_interrupted_requests(self) -> None:
        """Stopped before every request and resumed, the run has the same bits."""
        counting = self._federation(Wire).run(self._rounds)
        total = counting.server.transport.count  # type: ignore[attr-defined]
        for number in range(total):
            federation = self._federation(partial(Wire, die_at=number))
            try:
                federation.run(self._rounds)
            except KeyboardInterrupt:
                resumed = ToyFederation(self.algorithm, federation.root, Wire).run(self._rounds)
                _same(self._reference, resumed, f"a stop before request {number}")

    def check_interrupted_saves(self) -> None:
        """Stopped after every write to disk and resumed, the run has the same bits."""
        with dying_save(-1) as count:
            self._federation().run(self._rounds)
        for number in range(1, count[0] + 1):
            federation = self._federation()
            try:
                with dying_save(number):
                    federation.run(self._rounds)
            except KeyboardInterrupt:
                resumed = ToyFederation(self.algorithm, federation.root).run(self._rounds)
                _same(self._reference, resumed, f"a stop after write {number}")

    def check_repeated_requests(self) -> None:
        """Every request delivered twice gives the same bits."""
        _same(
            self._reference,
            self._federation(partial(Wire, repeat=True)).run(self._rounds),
            "a repeated request",
        )

    def check_evaluation_changes_nothing(self) -> None:
        """Evaluating changes no state of server or clients."""
        federation = self._reference
        server = federation.server
        before = {name: data for name, data in federation.states().items() if "best" not in name}
        server.evaluate(self.algorithm.evaluate, **server.shared())
        after = {name: data for name, data in federation.states().items() if "best" not in name}
        different = _differences(before, after)
        _require(not different, f"evaluation changes {different}")

    def check_hyperparameters(self) -> None:
        """The instance is frozen, survives being written down, and every field is described."""
        name, params = describe(self.algorithm)
        again = load_algorithm(name)(**json.loads(json.dumps(params)))
        _require(
            again.hyperparameters() == self.algorithm.hyperparameters(),
            f"{name} does not survive being written down",
        )
        try:
            setattr(self.algorithm, "anything", 0)  # noqa: B010
        except AttributeError:
            pass
        else:
            raise ConformanceError(
                f"{type(self.algorithm).__name__} is not frozen: use @dataclass(frozen=True)"
            )
        described = " ".join(
            inspect.getdoc(c) or "" for c in type(self.algorithm).__mro__ if c is not object
        )
        missing = [
            f.name for f in fields(self.algorithm) if not re.search(rf"\b{f.name}:", described)
        ]
        _require(not missing, f"no line of the class docstring describes {', '.join(missing)}")

    def check_what_is_sent(self) -> None:
        """Only declared parts leave a client, with the tensors that the declaration names."""
        federation = self._federation(Wire)
        federation.run(self._rounds)
        declared = self.algorithm.all_sends()
        for request, message in federation.server.transport.log:  # type: ignore[attr-defined]
            undeclared = set(message) - declared.keys()
            _require(
                not undeclared, f"{request.method} sends {', '.join(sorted(undeclared))} undeclared"
            )

    def check_neutral_setting(self) -> None:
        """At its neutral hyper-parameters the global model is FedAvg's, bit by bit."""
        neutral = type(self.algorithm).neutral
        if neutral is None:
            return
        fedavg = self._federation(algorithm=load_algorithm("fedavg")()).run(self._rounds)
        found = self._federation(algorithm=replace(self.algorithm, **neutral)).run(self._rounds)
        expected, model = _models(fedavg)[0], _models(found)[0]
        equal = all(torch.equal(expected[name], model[name]) for name in expected)
        _require(equal, f"at {dict(neutral) or 'any setting'} the global model is not FedAvg's")

    def check_identical_clients(self) -> None:
        """Renaming identical clients leaves the server's model as it is, up to rounding."""
        if self.algorithm.simulation_only or not _models(self._reference):
            return
        a = self._federation(names=("A", "B"), like="A").run(1)
        b = self._federation(names=("B", "A"), like="A").run(1)
        for first, second in zip(_models(a), _models(b), strict=True):
            equal = all(
                torch.allclose(first[n].double(), second[n].double(), atol=1e-6) for n in first
            )
            _require(equal, "the order of identical clients changes the server's model")

    def check_absent_client(self) -> None:
        """A client that is missing in a round is left out, or the error says so in one sentence."""
        federation = self._federation(partial(Wire, lose={2: "B"}), on_failure="skip")
        try:
            federation.run(self._rounds)
        except CollegiumError as error:
            _require(
                "B" in str(error),
                f"a missing client ends in an error that does not name it: {error}",
            )

    def check_documentation(self) -> None:
        """The class says what it is, and its module names the source."""
        own = inspect.getdoc(type(self.algorithm)) or ""
        module = inspect.getdoc(inspect.getmodule(type(self.algorithm))) or ""
        _require(len(own) > 40, "the class has no docstring that says what it is")
        _require(len(module) > 20, "the module has no docstring that names the source")


def _groups(value: Any) -> Iterator[Tensors]:
    """Yield every `Tensors` anywhere in ``value``."""
    if isinstance(value, Tensors):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _groups(item)
    elif isinstance(value, list):
        for item in value:
            yield from _groups(item)


def conformance_checks() -> dict[str, str]:
    """Return the checks in order: name, and the rule to which it holds an algorithm."""
    methods = {
        name: method for name, method in vars(Conformance).items() if name.startswith("check_")
    }
    return {
        name.removeprefix("check_"): inspect.getdoc(method) or ""
        for name, method in methods.items()
    }


def check_algorithm(
    algorithm: Algorithm, passed: Callable[[str], None] = lambda name: None
) -> None:
    """Hold ``algorithm`` to every rule of the conformance suite.

    Args:
        algorithm: an instance with the hyper-parameters to check.
        passed: called with the name of every check that passes.

    Raises:
        ConformanceError: a rule is broken; the text says which and how.
    """
    with tempfile.TemporaryDirectory(prefix="collegium-check-") as folder:
        suite = Conformance(algorithm, Path(folder))
        for name in conformance_checks():
            try:
                getattr(suite, f"check_{name}")()
            except CollegiumError as error:
                raise ConformanceError(f"{name}: {error}") from error
            except ConformanceError as error:
                raise ConformanceError(f"{name}: {error}") from error
            passed(name)
