"""A federation: the sites with their data and policies, the network, the task and the recipe."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import nn

from collegium.compression.session.groups import NO_CODECS, Codecs, check_codecs
from collegium.core.algorithm import Algorithm, NetworkBuilder, private_fits_of
from collegium.core.dataset import ConcatDataset, Dataset
from collegium.core.failures import known_error
from collegium.core.message import Held
from collegium.core.model_parts import find_parts
from collegium.core.optional import import_optional
from collegium.core.payloads import may_leave
from collegium.core.randomness import ambient, generator
from collegium.core.tensors import Tensors
from collegium.data.site import Site, never_labelled
from collegium.errors import ConfigError
from collegium.runtime.client import ClientRuntime
from collegium.runtime.distances import Diagnostic
from collegium.runtime.early_stopping import EarlyStopping
from collegium.runtime.local_work import LocalWork
from collegium.runtime.participation import EVERYBODY, Participation
from collegium.runtime.requests import Transport
from collegium.runtime.run import Run
from collegium.runtime.secure.config import SecureMean
from collegium.runtime.secure.identity import Identity
from collegium.runtime.selection import DEFAULT, Selection
from collegium.runtime.server import ServerRuntime
from collegium.tasks import ClassificationTask, SegmentationTask, Task, metrics_of
from collegium.training.loop import LocalTraining, TrainingConfig
from collegium.training.privacy import EXTRA, PURPOSE, PrivacyConfig

logger = logging.getLogger(__name__)

Network = Callable[[], nn.Module]
"""Builds a new network.

Its initial weights come from torch's generator, which is seeded around the call.
"""


class ModuleCopies:
    """Builds copies of a network; the first model of a run has the network's own weights.

    Args:
        module: the network.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self) -> nn.Module:
        """Return a copy."""
        return copy.deepcopy(self._module)


@dataclass(frozen=True)
class Federation:
    """The sites, the network, the task and the recipe, whichever algorithm and engine run.

    Everything that trains or asks sites is made by one of these: an experiment's jobs, `simulate`,
    the assessment, the measurement of drift, and the toy federation of the conformance suite.

    Attributes:
        sites: the sites that take part, by name.
        network: builds the network as configured, with the scaling that the sites agreed on.
        task: loss, prediction and scores.
        training: the local recipe.
        device: where the clients compute, as torch writes it.
        start: returns an initial model with weights of its own, given the model that the network
            draws and the names of what an algorithm has added; None: the model stays as drawn.
        public: data that the server holds; None: none. Where they are elsewhere, an empty dataset.
        identity: by which this participant signs keys of secure means and checks those of others,
            where its sites are apart; None: nobody signs.
    """

    sites: Mapping[str, Site]
    network: Network
    task: Task
    training: TrainingConfig = field(default_factory=TrainingConfig)
    device: str = "cpu"
    start: Callable[[Tensors, Collection[str]], Tensors] | None = None
    public: Dataset | None = None
    identity: Identity | None = None

    @property
    def names(self) -> list[str]:
        """The sites' names, sorted."""
        return sorted(self.sites)

    @property
    def task_name(self) -> str:
        """The name of the task in `collegium.core.algorithm.TASKS`; any other is its class's."""
        if isinstance(self.task, SegmentationTask):
            return "segmentation"
        if not isinstance(self.task, ClassificationTask):
            return type(self.task).__name__
        splits = [s for site in self.sites.values() for s in (site.train, site.val, site.test)]
        held = next((split for split in splits if len(split)), None)
        rows = held is not None and held.example(0).batch["image"].ndim == 2
        return "table" if rows else "classification"

    def task_at(self, site: str, labelled: Sequence[str] | None) -> Task:
        """Return the task at a site: loss and scores leave out what its masks do not annotate.

        Args:
            site: the site's name.
            labelled: see `Site.labelled`.

        Raises:
            ConfigError: these are no classes of the task, or its loss has no form for some of them.
        """
        if labelled is None:
            return self.task
        if not isinstance(self.task, SegmentationTask):
            raise ConfigError(
                f"site {site!r} has labelled some classes only, and the loss of "
                f"{type(self.task).__name__} has no form for that; use a SegmentationTask, or "
                f"sites that annotate everything"
            )
        try:
            return self.task.with_labelled(labelled)
        except ConfigError as error:
            raise ConfigError(f"site {site!r}: {error}") from error

    @property
    def partial(self) -> dict[str, Sequence[str]]:
        """The classes that the masks of each site annotate, where that is not all of them.

        Raises:
            ConfigError: see `task_at`.
        """
        return {
            name: site.labelled
            for name, site in sorted(self.sites.items())
            if site.labelled is not None and self.task_at(name, site.labelled) is not self.task
        }

    def check_labelled(self) -> None:
        """Check what the masks of all sites together annotate, and say what follows for the loss.

        Raises:
            ConfigError: no site annotates a class, or see `task_at`.
        """
        partial = self.partial
        if isinstance(self.task, SegmentationTask):
            sites = [site.labelled for site in self.sites.values()]
            if problem := never_labelled(self.task.structures, sites):
                raise ConfigError(problem)
        if partial:
            logger.warning(
                "masks annotate some classes only (%s): the loss there is the marginal loss, which "
                "merges the other classes with the background, and these have no scores",
                "; ".join(f"{name}: {', '.join(known)}" for name, known in partial.items()),
            )

    def builder(self, algorithm: Algorithm) -> NetworkBuilder:
        """Return what builds the network that an algorithm trains, with what it adds."""
        training = self.training
        return NetworkBuilder(self.network, algorithm, training.memory_format, training.freeze)

    def initial_model(self, algorithm: Algorithm, seed: int, k: int = 0) -> Tensors:
        """Return an initial model.

        Args:
            algorithm: the algorithm that trains it.
            seed: of the run.
            k: its number; 0 is the one that all clients start from.

        Raises:
            ConfigError: the algorithm needs several, and there is one network with its weights.
        """
        if k and (isinstance(self.network, ModuleCopies) or self.start is not None):
            raise ConfigError(
                f"{type(algorithm).__name__} starts from several initial models, and the weights "
                f"of one were given; leave them out (initial_weights), or in Python give a "
                f"function that builds a network"
            )
        drawn = initial_model(self.builder(algorithm), seed, k)
        if self.start is None:
            return drawn
        with ambient(seed, "model", k):
            added = find_parts(self.builder(algorithm)()).added
        return self.start(drawn, added)

    def check(self, algorithm: Algorithm) -> None:
        """Check before round 0 that an algorithm suits the recipe and every site's policy.

        Raises:
            ConfigError: the algorithm needs another optimiser or public data, is made for another
                task, pools the data of sites that annotate some classes only, or cannot be trained
                with the privacy that the recipe asks for.
            EgressError: a site's policy forbids what the algorithm sends.
        """
        check_optimizer(algorithm, self.training)
        if algorithm.tasks is not None:
            check_task(algorithm, self.task_name)
        if algorithm.needs_public is not None:
            check_public(algorithm, self.public)
        if algorithm.simulation_only and self.partial:
            raise ConfigError(
                f"{type(algorithm).__name__} has one loss for the data of all sites, and site "
                f"{min(self.partial)!r} has labelled some classes only; choose another algorithm"
            )
        privacy = self.training.privacy
        if privacy is not None and not privacy.is_plain:
            check_privacy(algorithm, self.training)
            self._check_private_network(algorithm, privacy)
        for site in self.sites.values():
            check_policy(algorithm, site.name, site.policy.allow, site.policy.forbid)

    def _check_private_network(self, algorithm: Algorithm, privacy: PrivacyConfig) -> None:
        """Check on a few cases that noise covers all that training changes in the network."""
        from collegium.training.private_steps import check_case_gradients, check_statistics

        with ambient(0, "privacy"):
            module = self.builder(algorithm)()
            for name, site in sorted(self.sites.items()):
                rows = range(min(len(site.train), 3))
                if not rows:
                    continue
                batch = site.train.batch(rows, [generator(0, "privacy", row) for row in rows])
                check_statistics(module, batch)
                if privacy.unit == "case":
                    check_case_gradients(module, self.task_at(name, site.labelled), batch)
                if privacy.delta * len(site.train) >= 1:
                    logger.warning(
                        "training.privacy.delta is %g, and site %s has %d training cases: one of "
                        "them could be shown openly within it; lower it below 1 / cases",
                        privacy.delta,
                        name,
                        len(site.train),
                    )

    def clients(
        self,
        algorithm: Algorithm,
        *,
        seed: int,
        root: Path,
        rounds: int = 1,
        codecs: Codecs = NO_CODECS,
        secure: SecureMean | None = None,
    ) -> dict[str, ClientRuntime]:
        """Return a runtime for every site; they share networks, as a process runs one at a time.

        Args:
            algorithm: the algorithm whose client half runs.
            seed: of the run.
            root: the folder of the run; each site has one of its own in ``clients``.
            rounds: how many rounds the run has, over which a schedule lowers the learning rate.
            codecs: the codecs of training exchanges.
            secure: how sites mask what is averaged; None: nothing is masked.
        """
        built: list[tuple[Algorithm, LocalTraining]] = []

        def local(method: Algorithm) -> LocalTraining:
            """Return the training of a method, which sites at which it is the same share."""
            found = next((training for other, training in built if other == method), None)
            if found is None:
                with ambient(seed, "model", 0):
                    module = self.builder(method)()
                found = LocalTraining(module, self.task, self.training, self.device)
                built.append((method, found))
            return found

        methods = {name: algorithm.at_site(name) for name in self.sites}
        at_server = local(algorithm)
        frozen = Tensors(at_server.module.state_dict()).select(at_server.parts.frozen).clone()
        held, pool = Held(frozen) if frozen else None, None
        if algorithm.simulation_only:
            pool = ConcatDataset([self.sites[name].train for name in self.names])
        return {
            name: ClientRuntime(
                site,
                methods[name],
                local(methods[name]).with_task(self.task_at(name, site.labelled)),
                make_model=partial(self.initial_model, methods[name], seed),
                seed=seed,
                root=root / "clients" / name,
                rounds=rounds,
                pool=pool,
                codecs=codecs,
                held=held,
                secure=secure,
                identity=self.identity,
            )
            for name, site in self.sites.items()
        }

    def server(
        self,
        algorithm: Algorithm,
        transport: Transport,
        *,
        seed: int,
        root: Path,
        rounds: int = 1,
        participation: Participation = EVERYBODY,
        codecs: Codecs = NO_CODECS,
        diagnostics: Collection[Diagnostic] = (),
        secure: SecureMean | None = None,
    ) -> ServerRuntime:
        """Return the server half of a run.

        Args:
            algorithm: the algorithm.
            transport: carries requests to the clients.
            seed: of the run.
            root: the folder of the run; the server's state is in ``server``.
            rounds: how many rounds the run has.
            participation: who takes part in a round, and what happens if a client fails.
            codecs: the codecs of training exchanges; the clients must have the same.
            diagnostics: what is recorded beside what the run needs; it changes no bit of it.
            secure: how sites mask what is averaged; the clients must have the same.

        Raises:
            ConfigError: the algorithm needs single replies, and ``secure`` hides them, or a codec
                leaves out what its mean needs.
        """
        check_codecs(algorithm, codecs)
        with ambient(seed, "model", 0):
            module = self.builder(algorithm)()
        public = None
        if algorithm.needs_public and self.public is not None:
            local = LocalTraining(module, self.task, self.training, self.device)
            public = LocalWork(local, self.public, seed=seed, rounds=rounds, owner="the server")
        return ServerRuntime(
            algorithm,
            self.names,
            lambda k: self.initial_model(algorithm, seed, k),
            find_parts(module),
            transport,
            root / "server",
            participation=participation,
            codecs=codecs,
            seed=seed,
            rounds=rounds,
            public=public,
            metrics=metrics_of(self.task),
            headline=self.task.metric,
            cases={name: site.cases for name, site in self.sites.items()},
            diagnostics=diagnostics,
            secure=secure,
            identity=self.identity,
        )

    def run(
        self,
        algorithm: Algorithm,
        transport: Transport,
        *,
        rounds: int,
        seed: int,
        root: Path,
        evaluate_every: int = 1,
        home_rounds: int = 0,
        participation: Participation = EVERYBODY,
        codecs: Codecs = NO_CODECS,
        selection: Selection = DEFAULT,
        early_stopping: EarlyStopping | None = None,
        diagnostics: Collection[Diagnostic] = (),
        secure: SecureMean | None = None,
    ) -> Run:
        """Return the run of an algorithm, which continues from whatever its folder holds.

        Args:
            algorithm: the algorithm.
            transport: carries requests to the clients.
            rounds: how many rounds.
            seed: of the run.
            root: the folder of the run.
            evaluate_every: rounds between two evaluations on validation cases.
            home_rounds: how many of the rounds, the last ones, are trained at home.
            participation: see `server`.
            codecs: see `server`.
            selection: the rule that selects the round of each model.
            early_stopping: the rule that ends the run before its last round; None: none does.
            diagnostics: see `server`.
            secure: see `server`.
        """
        server = self.server(
            algorithm,
            transport,
            seed=seed,
            root=root,
            rounds=rounds,
            participation=participation,
            codecs=codecs,
            diagnostics=diagnostics,
            secure=secure,
        )
        return Run(
            server,
            rounds,
            self.task.metric,
            evaluate_every,
            selection,
            home_rounds=home_rounds,
            early_stopping=early_stopping,
        )


def initial_model(network: Network, seed: int, k: int = 0) -> Tensors:
    """Return an initial model.

    Args:
        network: builds the network.
        seed: of the run.
        k: the number of the model; 0 is the one that all clients start from.
    """
    with ambient(seed, "model", k):
        return Tensors(network().state_dict()).clone()


def check_optimizer(algorithm: Algorithm, training: TrainingConfig) -> None:
    """Check that an algorithm is right with the optimiser of a recipe.

    Args:
        algorithm: the algorithm.
        training: the recipe.

    Raises:
        ConfigError: it needs another optimiser.
    """
    wanted = algorithm.optimizers
    if wanted is not None and training.optimizer_kind not in wanted:
        raise ConfigError(
            f"{type(algorithm).__name__} is right with plain {', '.join(sorted(wanted))} only, not "
            f"with {training.optimizer_kind}; set training.optimizer to {min(wanted)} and "
            f"training.momentum to 0, in an experiment for this algorithm alone by its own training"
        )


def check_privacy(algorithm: Algorithm, training: TrainingConfig) -> None:
    """Check that the noise of private training covers all that an algorithm sends.

    Args:
        algorithm: the algorithm.
        training: the recipe, with privacy.

    Raises:
        ConfigError: it does not, a setting is one that private training does not have, or Opacus is
            not installed.
    """
    privacy, name = training.privacy, type(algorithm).__name__
    assert privacy is not None
    import_optional("opacus", EXTRA, PURPOSE)
    if algorithm.simulation_only:
        raise ConfigError(
            f"training.privacy: {name} trains on the data of all sites in one place, where nothing "
            f"leaves a site that noise could cover; leave out {name}, or give it a recipe of its "
            f"own without: training: {{privacy: null}}"
        )
    if not private_fits_of(type(algorithm)):
        raise ConfigError(
            f"training.privacy: {name} is not known to send nothing of the training cases but what "
            f"noise covers; choose a method that declares it, such as fedavg, fedprox, fedper or "
            f"ditto, or leave training.privacy out for {name}"
        )
    if privacy.unit == "case" and training.precision != "fp32":
        raise ConfigError(
            f"training.privacy: gradients of single cases are computed in float32, and "
            f"training.precision is {training.precision}; set it to fp32"
        )
    if privacy.unit == "case" and training.clip_norm is not None:
        raise ConfigError(
            "training.clip_norm limits the gradient of a batch, and training.privacy.max_grad_norm "
            "that of each case; leave out training.clip_norm"
        )


def check_task(algorithm: Algorithm, task: str) -> None:
    """Check that an algorithm is made for a task.

    Args:
        algorithm: the algorithm.
        task: the task's name; see `collegium.core.algorithm.TASKS`.

    Raises:
        ConfigError: it is made for others.
    """
    if algorithm.tasks is not None and task not in algorithm.tasks:
        raise ConfigError(
            f"{type(algorithm).__name__} is made for {' and '.join(sorted(algorithm.tasks))}, and "
            f"the task here is {task}; choose another algorithm"
        )


def check_public(algorithm: Algorithm, public: Dataset | None) -> None:
    """Check that the server holds the data on which an algorithm trains there.

    Args:
        algorithm: the algorithm.
        public: the server's data; empty where they are elsewhere.

    Raises:
        ConfigError: there are none, or they have no labels and it needs some.
    """
    if public is None:
        raise ConfigError(
            f"{type(algorithm).__name__} trains at the server on public data, and there are none; "
            f"name images or a table that the server may hold in federation.public"
        )
    labelled = len(public) == 0 or "label" in public.example(0).batch
    if algorithm.needs_public == "labels" and not labelled:
        raise ConfigError(
            f"{type(algorithm).__name__} trains at the server on public data with labels, and "
            f"those of federation.public have none; name their labels too"
        )


def check_policy(
    algorithm: Algorithm, site: str, allow: Collection[str] | None, forbid: Collection[str]
) -> None:
    """Check before round 0 that a site's policy lets out what an algorithm sends in training.

    Args:
        algorithm: the algorithm.
        site: the site's name.
        allow: the parts that may leave; None: all that an algorithm declares.
        forbid: the parts that may not leave.

    Raises:
        EgressError: it does not; the sentence names algorithm, part and site.
    """
    for name, part in algorithm.all_sends().items():
        if not part.opt_in and not may_leave(name, opt_in=False, allow=allow, forbid=forbid):
            raise known_error(
                "egress_algorithm",
                algorithm=type(algorithm).__name__,
                part=name,
                what=part.description,
                site=site,
            )
