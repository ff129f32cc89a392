"""The conformance suite that every algorithm passes.

    from collegium.testing.conformance import check_algorithm
    check_algorithm(MyAlgorithm())

It runs on the toy federation of `collegium.testing.toy`: all rules on the quickest kind of data for
which the algorithm is made, and those that depend on the data on every other kind.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from collegium.compression.session.groups import NO_CODECS, Codecs
from collegium.core.algorithm import HOME, Algorithm, State, check_needs
from collegium.core.message import pack, unpack
from collegium.core.model_parts import ModelParts, find_parts
from collegium.core.payloads import GLOBAL, PERSONAL, Expected, ModelPart
from collegium.core.randomness import ambient
from collegium.core.seals import read_json, seal_tensors
from collegium.core.tensors import Tensors
from collegium.errors import CollegiumError, ConfigError, ProtocolError
from collegium.experiment.config.registry import ALGORITHMS
from collegium.runtime import process
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.participation import SKIPPING
from collegium.runtime.requests import Transport
from collegium.runtime.secure.config import SecureMean
from collegium.runtime.selection import KEPT
from collegium.testing.kinds import KINDS
from collegium.testing.statements import (
    NAMES,
    ConformanceError,
    Statements,
    kinds_of,
    mistake_of,
    require,
)
from collegium.testing.stops import Stops, after_writes
from collegium.testing.toy import (
    REGRESSION,
    TRAINING,
    Kind,
    ShuffledTransport,
    SwappedNames,
    ToyFederation,
    WorkerTransport,
    toy_federation,
    toy_model,
    toy_workers,
)
from collegium.training.loop import TrainingConfig

ON_EVERY_KIND = (
    "it_runs",
    "it_learns",
    "order_does_not_matter",
    "evaluation_changes_nothing",
    "what_is_sent",
    "neutral_setting",
    "added_layers",
)
"""The rules that an algorithm may keep on one kind of data and break on another."""


def _differences(a: Mapping[str, bytes], b: Mapping[str, bytes]) -> str:
    return ", ".join(sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name)))


def _without_home(state: State) -> State:
    return {key: value for key, value in state.items() if key != HOME}


def _without_kept(states: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return states without the models kept for the test, which evaluations choose."""
    return {name: data for name, data in states.items() if Path(name).parent.name != KEPT}


def _models(federation: ToyFederation) -> dict[str, Tensors]:
    """Return the server's models: "model", and those of "models" by number or by name."""
    state = federation.server.state
    several = state.get("models", {})
    named = several.items() if isinstance(several, Mapping) else enumerate(several)
    own = {"model": state["model"]} if "model" in state else {}
    return own | {str(name): model for name, model in named}


class Conformance(Statements):
    """The checks, in order; each is a method whose docstring states the rule.

    Args:
        algorithm: the algorithm to check.
        folder: for the states of all federations.
        workers: what `toy_workers` returned.
        rounds: of every run.
        codecs: the codecs of every run.
        kind: the kind of data.
        training: the local recipe.
        secure: how what is averaged is masked in every run; None: it is not.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        folder: Path,
        workers: InProcess,
        rounds: int = 2,
        *,
        codecs: Codecs = NO_CODECS,
        kind: Kind = REGRESSION,
        training: TrainingConfig = TRAINING,
        secure: SecureMean | None = None,
    ) -> None:
        super().__init__(algorithm)
        process.prepare()  # as in every run and in its workers: bits depend on the threads
        self._folder, self._workers, self._kind = folder, workers, kind
        self._rounds, self._count, self._codecs, self._training = rounds, 0, codecs, training
        self._secure = secure

    @cached_property
    def _reference(self) -> ToyFederation:
        return self._run()

    @cached_property
    def _shuffled(self) -> ToyFederation:
        return self._run(ShuffledTransport)

    @cached_property
    def _stops(self) -> dict[str, Path]:
        """The stops of a run before every request and after every write."""
        stops = Stops(self._folder / "stops")
        federation = self._federation(
            lambda f: ShuffledTransport(f, before=partial(stops.keep, f.root, "before request"))
        )
        with after_writes(partial(stops.keep, federation.root, "after write")):
            federation.run(self._rounds)
        return stops.found

    def _find_parts(self, kind: Kind) -> ModelParts:
        with ambient(0, "conformance"):
            return find_parts(toy_federation(kind=kind).builder(self.algorithm)())

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
            **{
                "codecs": self._codecs,
                "kind": self._kind,
                "training": self._training,
                "secure": self._secure,
                **options,
            },
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
        require(not different, f"{what} changes the result: {different} differ")

    def _require_same_after_restart(self, root: Path, what: str, transport: Any = None) -> None:
        again = ToyFederation(
            self.algorithm,
            root,
            transport,
            codecs=self._codecs,
            kind=self._kind,
            training=self._training,
            secure=self._secure,
        )
        self._require_same(again.run(self._rounds), what)

    def check_it_runs(self) -> None:
        """The set-up and a round run; reserved keys of the states hold what is read from them."""
        federation = self._federation()
        server = federation.server
        server.begin()
        self._check_server_state(federation)
        server.advance()
        self._check_server_state(federation)
        for name, client in federation.clients().items():
            newest = client.store.newest("~")
            state = client.store.load(newest) if newest else {}
            require(
                HOME not in state,
                f"client.state[{HOME!r}] of {name} is reserved for the model of rounds at home; "
                f"use another key",
            )

    def _check_server_state(self, federation: ToyFederation) -> None:
        """Check what stands under reserved keys of the server's state."""
        server = federation.server
        require(
            HOME not in server.state,
            f"server.state[{HOME!r}] is reserved for the clients that train at home; use another "
            f"key",
        )
        expected = Expected(server.initial_model, server.parts, {})
        if self.algorithm.has_global or "model" in server.state:
            require("model" in server.state, "has_global is True, and server.state has no 'model'")
            try:
                ModelPart().check(server.state["model"], expected)
            except ProtocolError as error:
                raise ConformanceError(
                    f"server.state['model'] is reserved for the whole global model: {error}; use "
                    f"another key"
                ) from error
        several = server.state.get("models", [])
        held = several.values() if isinstance(several, Mapping) else several
        require(
            isinstance(several, Mapping | list) and all(isinstance(m, Tensors) for m in held),
            "server.state['models'] is reserved for several models, a list or a dictionary of "
            "tensors by name; use another key",
        )

    def check_it_learns(self) -> None:
        """Two rounds run; every state stays finite, and models move."""
        before, moved = toy_model(0, network=self._kind.network), False
        for file in self._reference.root.rglob("*.state"):
            for tensors in _groups(unpack(file.read_bytes())):
                finite = all(
                    bool(torch.isfinite(t).all()) for t in tensors.values() if t.is_floating_point()
                )
                require(finite, f"{file.name} holds NaN or infinite values")
                moved |= any(
                    name in before and not torch.equal(t, before[name])
                    for name, t in tensors.items()
                )
        require(moved, "no stored model moved from the initial one")

    def check_order_does_not_matter(self) -> None:
        """Shuffled clients, every one rebuilt for every request, give the same bits."""
        self._require_same(self._shuffled, "the clients' order")

    def check_workers_do_not_matter(self) -> None:
        """Clients in two processes give the same bits as in one."""
        found = self._run(partial(WorkerTransport, self._workers))
        self._require_same(found, "a second worker process")

    def check_interrupted_requests(self) -> None:
        """Stopped before every request and resumed, the run has the same bits."""
        for stop, root in self._stops.items():
            if "request" in stop:
                self._require_same_after_restart(root, f"a stop {stop}", ShuffledTransport)

    def check_interrupted_saves(self) -> None:
        """Stopped after every write to disk and resumed, the run has the same bits."""
        for stop, root in self._stops.items():
            if "write" in stop:
                self._require_same_after_restart(root, f"a stop {stop}")

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
        require(pack(server.state) == state, "evaluation changes the server's state")
        different = _differences(files, _without_kept(reference.states()))
        require(not different, f"evaluation changes {different}")
        for name, client in clients.items():
            newest = client.store.newest("~")
            stored = client.store.read(newest) if newest else b"".join(seal_tensors(pack({})))
            same = b"".join(seal_tensors(pack(client.whole_state()))) == stored
            require(same, f"evaluation changes client.state of {name}, which is not kept then")

    def check_it_keeps_nothing(self) -> None:
        """Nothing is kept on the instance: what has to be kept is in a state."""
        own = sorted(vars(self.algorithm).keys() - self.algorithm.hyperparameters().keys())
        require(not own, f"it keeps {', '.join(own)} on itself, which belongs into a state")

    def check_what_is_sent(self) -> None:
        """Only declared parts leave a client, and every declared part but the opt-in ones does."""
        log = self._shuffled.server.transport.log  # type: ignore[attr-defined]
        sent = {name for _, message in log for name in message}
        declared = self.algorithm.all_sends()
        undeclared = sorted(sent - declared.keys())
        require(not undeclared, f"{', '.join(undeclared)} is sent and not declared in 'sends'")
        idle = sorted(n for n, part in declared.items() if n not in sent and not part.opt_in)
        require(not idle, f"'sends' declares {', '.join(idle)}, which is never sent")

    def check_rounds_at_home(self) -> None:
        """Rounds at home send progress alone, and the server's models stay as they were."""
        if self.algorithm.simulation_only:
            return
        together = self._federation().run(1)
        apart = self._federation(ShuffledTransport).run(3, home_rounds=2)
        first, last = (pack(_without_home(f.server.state)) for f in (together, apart))
        require(first == last, "rounds at home change the server's state")
        log = apart.server.transport.log  # type: ignore[attr-defined]
        sent = {n for r, m in log if r.round == 3 and r.stage == "train" for n in m}
        more = sorted(sent - {"progress"})
        require(not more, f"{', '.join(more)} is sent in a round at home")

    def check_neutral_setting(self) -> None:
        """At its neutral hyper-parameters the global model is FedAvg's, bit by bit."""
        neutral = type(self.algorithm).neutral
        if neutral is None:
            return
        fedavg = self._run(algorithm=ALGORITHMS.load("fedavg")())
        at_neutral = replace(self.algorithm, **neutral)
        found = self._reference if at_neutral == self.algorithm else self._run(algorithm=at_neutral)
        expected, model = _models(fedavg)["model"], next(iter(_models(found).values()), None)
        equal = model is not None and all(torch.equal(expected[n], model[n]) for n in expected)
        require(equal, f"at {dict(neutral) or 'any setting'} the global model is not FedAvg's")

    def check_added_layers(self) -> None:
        """Layers that it adds to the network leave predictions alone, if the class says so."""
        if self.algorithm.extension_predicts:
            return
        with ambient(0, "conformance"):
            federation = toy_federation(kind=self._kind)
            added_nothing = ALGORITHMS.load("fedavg")()
            whole, plain = (
                federation.builder(algorithm)().eval()
                for algorithm in (self.algorithm, added_nothing)
            )
            inputs = federation.sites["A"].train.batch([0, 1], [torch.Generator()] * 2)["image"]
        own = {name: whole.state_dict()[name] for name in plain.state_dict()}
        plain.load_state_dict(own)
        with torch.no_grad():
            equal = torch.equal(whole(inputs), plain(inputs))
        require(equal, "extension_predicts is False, but what it adds changes predictions")

    def check_names_do_not_matter(self) -> None:
        """Clients that swap their names leave the server's models as they are, up to rounding."""
        if self.algorithm.simulation_only:
            return
        renamed, owners = _models(self._run(SwappedNames)), dict(zip(NAMES, "BCA", strict=True))
        for key, first in _models(self._reference).items():
            second = renamed[next((name for name, other in owners.items() if other == key), key)]
            equal = all(
                torch.allclose(first[n].double(), second[n].double(), atol=1e-5) for n in first
            )
            require(equal, "which client has which name changes the server's model")

    def check_absent_client(self) -> None:
        """A client that is missing in a round is left out, or the error says so in one sentence."""
        federation = self._federation(
            partial(ShuffledTransport, lose={2: "B"}), participation=SKIPPING
        )
        try:
            federation.run(self._rounds)
        except CollegiumError as error:
            text = f"a missing client ends in an error that does not name it: {error}"
            require("B" in str(error), text)

    def check_same_as(self) -> None:
        """Without normalisation layers it scores as the method that it names, and only then."""
        if self._kind.bare is None:
            return
        parts = self._find_parts(replace(self._kind, network=self._kind.bare))
        try:
            check_needs(self.algorithm, NAMES, parts)
        except ConfigError:
            return
        named, fedavg = self.algorithm.same_as(parts), ALGORITHMS.load("fedavg")
        own = self._scores_on_bare_network(self.algorithm)
        if named is not None:
            kind = ALGORITHMS.load(named)
            both = {f.name for f in fields(kind)}
            values = self.algorithm.hyperparameters()
            same = kind(**{name: value for name, value in values.items() if name in both})
            other = self._scores_on_bare_network(same)
            require(own == other, f"it says that it is {named}, and its scores are others")
        elif type(self.algorithm) is not fedavg:
            other = self._scores_on_bare_network(fedavg())
            require(own != other, "it scores as FedAvg, and same_as does not say so")

    def _scores_on_bare_network(self, algorithm: Algorithm) -> dict[str, Any]:
        """Return by site the test scores of the model with which it predicts."""
        assert self._kind.bare is not None
        bare = replace(self._kind, network=self._kind.bare)
        root = (
            self._federation(algorithm=algorithm, kind=bare, codecs=NO_CODECS)
            .run(self._rounds)
            .root
        )
        scores = read_json(root / "server" / "test.json")
        return {site: found.get(PERSONAL, found.get(GLOBAL)) for site, found in scores.items()}


def _groups(value: Any) -> Iterator[Tensors]:
    """Yield every `Tensors` anywhere in ``value``."""
    if isinstance(value, Tensors):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _groups(item)


def conformance_checks(*rules: type) -> dict[str, str]:
    """Return the checks in order: name, and the rule to which it holds an algorithm.

    Args:
        *rules: the classes that hold them; none: all.
    """
    return {
        name.removeprefix("check_"): inspect.getdoc(method) or ""
        for holder in rules or (Statements, Conformance)
        for name, method in vars(holder).items()
        if name.startswith("check_")
    }


def check_algorithm(
    algorithm: Algorithm,
    passed: Callable[[str], None] = lambda name: None,
    *,
    workers: InProcess | None = None,
) -> None:
    """Hold ``algorithm`` to every rule of the conformance suite.

    All rules are checked on the first kind of data for which it is made, and `ON_EVERY_KIND` on the
    others, see `kinds_of`.

    Args:
        algorithm: an instance with the hyper-parameters to check.
        passed: called with the name of every check that passes, and the kind of data from the
            second kind on.
        workers: what `toy_workers` returned, to be shared by several checks; None: its own.

    Raises:
        ConformanceError: a rule is broken; the text says which and how.
    """
    engine = workers or toy_workers()
    memory = Path("/dev/shm")  # where there is one, waiting for the disk is saved
    step = "declarations"
    with tempfile.TemporaryDirectory(
        prefix="collegium-check-", dir=memory if os.access(memory, os.W_OK) else None
    ) as folder:
        try:
            for step, check in _checks(algorithm, Path(folder), engine):
                check()
                passed(step)
        except Exception as error:
            raise ConformanceError(f"{step}: {mistake_of(error)}") from error
        finally:
            if workers is None:
                engine.close()


def _checks(
    algorithm: Algorithm, folder: Path, workers: InProcess
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the checks of an algorithm: the rule, with the kind of data but the first; and how."""
    stated = Statements(algorithm)
    for name in conformance_checks(Statements):
        yield name, getattr(stated, f"check_{name}")
    kinds = [KINDS[name] for name, why in kinds_of(algorithm).items() if not why]
    for number, kind in enumerate(kinds):
        suite = Conformance(algorithm, folder / str(number), workers, kind=kind)
        for name in (
            ON_EVERY_KIND
            if number
            else [*conformance_checks()][len(conformance_checks(Statements)) :]
        ):
            check = getattr(suite, f"check_{name}")
            yield (f"{name} on {kind.name}" if number else name), check
