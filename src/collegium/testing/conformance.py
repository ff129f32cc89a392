"""The conformance suite that every algorithm passes.

    from collegium.testing.conformance import check_algorithm
    check_algorithm(MyAlgorithm())

It runs on the toy federation of `collegium.testing.toy`.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import torch

from collegium.compression.session.groups import NO_CODECS, Codecs
from collegium.core import files as files_module
from collegium.core.algorithm import GLOBAL, HOME, PERSONAL, Algorithm, State, check_needs
from collegium.core.message import pack, unpack
from collegium.core.model_parts import find_parts
from collegium.core.randomness import ambient
from collegium.core.tensors import Tensors
from collegium.core.userfile import describe_mistake
from collegium.errors import CollegiumError, ConfigError
from collegium.experiment.config.registry import ALGORITHMS
from collegium.runtime import client as client_module
from collegium.runtime import run as run_module
from collegium.runtime import state as state_module
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.participation import SKIPPING
from collegium.runtime.selection import KEPT
from collegium.runtime.server import Transport
from collegium.testing.toy import (
    ShuffledTransport,
    SwappedNames,
    ToyFederation,
    WorkerTransport,
    bare_network,
    toy_federation,
    toy_model,
    toy_network,
    toy_workers,
)


class ConformanceError(AssertionError):
    """An algorithm breaks a rule; the text says which and how."""


@contextmanager
def after_writes(then: Callable[[int], None]) -> Iterator[None]:
    """Call a function right after every write to disk inside the block, with its number from 1.

    Args:
        then: the function; a KeyboardInterrupt from it stops the run there.
    """
    original = files_module.write_atomically
    users: list[Any] = [state_module, client_module, run_module]
    count = [0]

    def write(path: Path, data: bytes) -> None:
        original(path, data)
        count[0] += 1
        then(count[0])

    for module in users:
        module.write_atomically = write
    try:
        yield
    finally:
        for module in users:
            module.write_atomically = original


def _keep(root: Path, stops: Path, number: int) -> None:
    """Copy a run as it would be found if it were stopped now."""
    root.mkdir(parents=True, exist_ok=True)
    shutil.copytree(root, stops / f"{number:06d}")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ConformanceError(text)


def _differences(a: Mapping[str, bytes], b: Mapping[str, bytes]) -> str:
    return ", ".join(sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name)))


def _without_home(state: State) -> State:
    return {key: value for key, value in state.items() if key != HOME}


def _without_kept(states: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return states without the models kept for the test, which evaluations choose."""
    return {name: data for name, data in states.items() if Path(name).parent.name != KEPT}


def _models(federation: ToyFederation) -> list[Tensors]:
    state = federation.server.state
    return [state["model"]] if "model" in state else list(state.get("models", []))


class Conformance:
    """The checks, in order; each is a method whose docstring states the rule.

    Args:
        algorithm: the algorithm to check.
        folder: for the states of all federations.
        workers: what `toy_workers` returned.
        rounds: of every run.
        codecs: the codecs of every run.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        folder: Path,
        workers: InProcess,
        rounds: int = 2,
        *,
        codecs: Codecs = NO_CODECS,
    ) -> None:
        self.algorithm, self._folder, self._workers = algorithm, folder, workers
        self._rounds, self._count, self._codecs = rounds, 0, codecs

    @cached_property
    def _reference(self) -> ToyFederation:
        return self._run()

    def _federation(
        self,
        transport: Callable[[ToyFederation], Transport] | None = None,
        algorithm: Algorithm | None = None,
        **options: Any,
    ) -> ToyFederation:
        self._count += 1
        return ToyFederation(
            algorithm or self.algorithm,
            self._folder / f"{self._count:04d}",
            transport,
            codecs=self._codecs,
            **options,
        )

    def _run(
        self,
        transport: Callable[[ToyFederation], Transport] | None = None,
        algorithm: Algorithm | None = None,
    ) -> ToyFederation:
        """Return another federation, run to its end."""
        return self._federation(transport, algorithm).run(self._rounds)

    def _require_same(self, found: ToyFederation, what: str) -> None:
        different = _differences(self._reference.states(), found.states())
        _require(not different, f"{what} changes the result: {different} differ")

    def _require_same_after_restart(self, root: Path, what: str, transport: Any = None) -> None:
        again = ToyFederation(self.algorithm, root, transport, codecs=self._codecs)
        self._require_same(again.run(self._rounds), what)

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
        self._require_same(self._run(ShuffledTransport), "the clients' order")

    def check_workers_do_not_matter(self) -> None:
        """Clients in two processes give the same bits as in one."""
        found = self._run(partial(WorkerTransport, self._workers))
        self._require_same(found, "a second worker process")

    def check_interrupted_requests(self) -> None:
        """Stopped before every request and resumed, the run has the same bits."""
        stops = self._folder / "requests"
        federation = self._federation(
            lambda f: ShuffledTransport(f, before=partial(_keep, f.root, stops))
        )
        federation.run(self._rounds)
        for root in sorted(stops.iterdir()):
            what = f"a stop before request {int(root.name)}"
            self._require_same_after_restart(root, what, ShuffledTransport)

    def check_interrupted_saves(self) -> None:
        """Stopped after every write to disk and resumed, the run has the same bits."""
        stops, federation = self._folder / "writes", self._federation()
        with after_writes(partial(_keep, federation.root, stops)):
            federation.run(self._rounds)
        for root in sorted(stops.iterdir()):
            self._require_same_after_restart(root, f"a stop after write {int(root.name)}")

    def check_repeated_requests(self) -> None:
        """Every request delivered twice gives the same bits."""
        found = self._run(partial(ShuffledTransport, repeat=True))
        self._require_same(found, "a repeated request")

    def check_evaluation_changes_nothing(self) -> None:
        """Evaluating changes no state of server or clients, nor asks for it to be changed."""
        reference, clients = self._reference, self._reference.clients()
        server, files = reference.server, _without_kept(reference.states())
        state, server.transport = pack(server.state), InProcess(lambda: clients)
        server.evaluate_models({})
        _require(pack(server.state) == state, "evaluation changes the server's state")
        different = _differences(files, _without_kept(reference.states()))
        _require(not different, f"evaluation changes {different}")
        for name, client in clients.items():
            newest = client.store.newest("~")
            stored = client.store.read(newest) if newest else pack({})
            same = pack(client.whole_state()) == stored
            _require(same, f"evaluation changes client.state of {name}, which is not kept then")

    def check_hyperparameters(self) -> None:
        """The instance is frozen, survives being written down, and every field is described."""
        name, params = ALGORITHMS.describe(self.algorithm)
        again = ALGORITHMS.load(name)(**json.loads(json.dumps(params)))
        _require(
            again.hyperparameters() == self.algorithm.hyperparameters(),
            f"{name} does not survive being written down",
        )
        own = sorted(vars(self.algorithm).keys() - params.keys())
        _require(not own, f"it keeps {', '.join(own)} on itself, which belongs into a state")
        described = " ".join(
            inspect.getdoc(c) or "" for c in type(self.algorithm).__mro__ if c is not object
        )
        missing = [
            f.name for f in fields(self.algorithm) if not re.search(rf"\b{f.name}:", described)
        ]
        _require(not missing, f"no line of the class docstring describes {', '.join(missing)}")

    def check_settings(self) -> None:
        """Hyper-parameters are checked: another type, another word or NaN is refused in words."""
        kind = type(self.algorithm)
        hints = get_type_hints(kind, include_extras=True)
        for name in (f.name for f in fields(kind) if f.init):
            for value in _nonsense(hints[name]):
                try:
                    replace(self.algorithm, **{name: value})
                except ConfigError:
                    continue
                raise ConformanceError(
                    f"{name} may be {value!r}: decorate the class with @settings, and give the "
                    f"field a type and a range"
                )

    def check_what_is_sent(self) -> None:
        """Only declared parts leave a client, and every declared part but the opt-in ones does."""
        log = self._run(ShuffledTransport).server.transport.log  # type: ignore[attr-defined]
        sent = {name for _, message in log for name in message}
        declared = self.algorithm.all_sends()
        undeclared = sorted(sent - declared.keys())
        _require(not undeclared, f"{', '.join(undeclared)} is sent and not declared in 'sends'")
        idle = sorted(n for n, part in declared.items() if n not in sent and not part.opt_in)
        _require(not idle, f"'sends' declares {', '.join(idle)}, which is never sent")

    def check_rounds_at_home(self) -> None:
        """Rounds at home send progress alone, and the server's models stay as they were."""
        if self.algorithm.simulation_only:
            return
        together = self._federation().run(1)
        apart = self._federation(ShuffledTransport).run(3, home_rounds=2)
        first, last = (pack(_without_home(f.server.state)) for f in (together, apart))
        _require(first == last, "rounds at home change the server's state")
        log = apart.server.transport.log  # type: ignore[attr-defined]
        sent = {n for r, m in log if r.round == 3 and r.stage == "train" for n in m}
        more = sorted(sent - {"progress"})
        _require(not more, f"{', '.join(more)} is sent in a round at home")

    def check_neutral_setting(self) -> None:
        """At its neutral hyper-parameters the global model is FedAvg's, bit by bit."""
        neutral = type(self.algorithm).neutral
        if neutral is None:
            return
        fedavg = self._run(algorithm=ALGORITHMS.load("fedavg")())
        found = self._run(algorithm=replace(self.algorithm, **neutral))
        expected, model = _models(fedavg)[0], _models(found)[0]
        equal = all(torch.equal(expected[name], model[name]) for name in expected)
        _require(equal, f"at {dict(neutral) or 'any setting'} the global model is not FedAvg's")

    def check_added_layers(self) -> None:
        """Layers that it adds to the network leave predictions alone, if the class says so."""
        if self.algorithm.extension_predicts:
            return
        with ambient(0, "conformance"):
            whole, plain = toy_federation().builder(self.algorithm)().eval(), toy_network().eval()
            inputs = torch.randn(5, 3)
        own = {name: whole.state_dict()[name] for name in plain.state_dict()}
        plain.load_state_dict(own)
        with torch.no_grad():
            equal = torch.equal(whole(inputs), plain(inputs))
        _require(equal, "extension_predicts is False, but what it adds changes predictions")

    def check_names_do_not_matter(self) -> None:
        """Clients that swap their names leave the server's models as they are, up to rounding."""
        if self.algorithm.simulation_only:
            return
        renamed = self._run(SwappedNames)
        for first, second in zip(_models(self._reference), _models(renamed), strict=True):
            equal = all(
                torch.allclose(first[n].double(), second[n].double(), atol=1e-5) for n in first
            )
            _require(equal, "which client has which name changes the server's model")

    def check_absent_client(self) -> None:
        """A client that is missing in a round is left out, or the error says so in one sentence."""
        federation = self._federation(
            partial(ShuffledTransport, lose={2: "B"}), participation=SKIPPING
        )
        try:
            federation.run(self._rounds)
        except CollegiumError as error:
            text = f"a missing client ends in an error that does not name it: {error}"
            _require("B" in str(error), text)

    def check_documentation(self) -> None:
        """The class says what it is, and its module names the source."""
        own = inspect.getdoc(type(self.algorithm)) or ""
        module = inspect.getdoc(inspect.getmodule(type(self.algorithm))) or ""
        _require(len(own) > 40, "the class has no docstring that says what it is")
        _require(len(module) > 20, "the module has no docstring that names the source")

    def check_same_as(self) -> None:
        """Without normalisation layers it scores as the method that it names, and only then."""
        parts = find_parts(toy_federation(network=bare_network).builder(self.algorithm)())
        try:
            check_needs(self.algorithm, ("A", "B", "C"), parts)
        except ConfigError:
            return
        named, fedavg = self.algorithm.same_as(parts), ALGORITHMS.load("fedavg")
        own = self._scores_on_bare_network(self.algorithm)
        if named is not None:
            other = self._scores_on_bare_network(ALGORITHMS.load(named)())
            _require(own == other, f"it says that it is {named}, and its scores are others")
        elif type(self.algorithm) is not fedavg:
            other = self._scores_on_bare_network(fedavg())
            _require(own != other, "it scores as FedAvg, and same_as does not say so")

    def _scores_on_bare_network(self, algorithm: Algorithm) -> dict[str, Any]:
        """Return by site the test scores of the model with which it predicts."""
        self._count += 1
        root = self._folder / f"{self._count:04d}"
        ToyFederation(algorithm, root, network=bare_network).run(self._rounds)
        scores = json.loads((root / "server" / "records" / "test.json").read_text())
        return {site: found.get(PERSONAL, found.get(GLOBAL)) for site, found in scores.items()}


def _nonsense(hint: Any) -> Iterator[Any]:
    """Yield values that a field with an annotation should refuse."""
    yield object()
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        yield "neither of these"
    if hint is float:
        yield math.nan


def _groups(value: Any) -> Iterator[Tensors]:
    """Yield every `Tensors` anywhere in ``value``."""
    if isinstance(value, Tensors):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _groups(item)


def conformance_checks() -> dict[str, str]:
    """Return the checks in order: name, and the rule to which it holds an algorithm."""
    return {
        name.removeprefix("check_"): inspect.getdoc(method) or ""
        for name, method in vars(Conformance).items()
        if name.startswith("check_")
    }


def check_algorithm(
    algorithm: Algorithm,
    passed: Callable[[str], None] = lambda name: None,
    *,
    workers: InProcess | None = None,
) -> None:
    """Hold ``algorithm`` to every rule of the conformance suite.

    Args:
        algorithm: an instance with the hyper-parameters to check.
        passed: called with the name of every check that passes.
        workers: what `toy_workers` returned, to be shared by several checks; None: its own.

    Raises:
        ConformanceError: a rule is broken; the text says which and how.
    """
    engine = workers or toy_workers()
    memory = Path("/dev/shm")  # where there is one, waiting for the disk is saved
    with tempfile.TemporaryDirectory(
        prefix="collegium-check-", dir=memory if os.access(memory, os.W_OK) else None
    ) as folder:
        suite = Conformance(algorithm, Path(folder), engine)
        try:
            for name in conformance_checks():
                getattr(suite, f"check_{name}")()
                passed(name)
        except (CollegiumError, ConformanceError) as error:
            raise ConformanceError(f"{name}: {error}") from error
        except Exception as error:
            mistake = describe_mistake(error)
            if mistake is None:
                raise
            raise ConformanceError(f"{name}: {mistake}") from error
        finally:
            if workers is None:
                engine.close()
