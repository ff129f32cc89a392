"""A federation in one call: from sites, a network and a task to the models and their scores.

This is the library's front door for those who bring their own network, data or loop over settings;
experiments described by a file (`collegium.experiment.runner`) go through the same pieces.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from collegium.compression.session import NO_CODECS, Coding
from collegium.core.algorithm import Algorithm, Extended
from collegium.core.dataset import ConcatDataset
from collegium.core.files import write_atomically
from collegium.core.model_parts import find_parts
from collegium.core.payloads import may_leave
from collegium.core.randomness import ambient
from collegium.core.tensors import Tensors
from collegium.data.site import Site
from collegium.errors import CheckpointError, ConfigError, EgressError
from collegium.runtime.client import ClientRuntime
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.process import prepare
from collegium.runtime.run import RoundRecord, Run
from collegium.runtime.server import ServerRuntime, Transport
from collegium.tasks import Task
from collegium.training.loop import LocalTraining, TrainingConfig

Network = Callable[[], nn.Module]
"""Makes a new network.

Its initial weights come from torch's generator, which is seeded around the call.
"""


@dataclass(frozen=True)
class Simulated:
    """What a simulated federation ends with.

    Attributes:
        model: the global model selected on validation cases; None for an algorithm without one.
        personal: the personal model selected at each site, by site; empty for an algorithm without
            them.
        scores: test scores by site and kind of model, one mapping per case.
        records: what happened in each round.
        deployed: the models for sites outside the federation, by name: "global", and the personal
            ones of the sites whose policy hands theirs out.
    """

    model: Tensors | None
    personal: Mapping[str, Tensors]
    scores: Mapping[str, Mapping[str, list[dict[str, Any]]]]
    records: Sequence[RoundRecord]
    deployed: Mapping[str, Tensors]


def initial_model(network: Network, seed: int, k: int = 0) -> Tensors:
    """Return the ``k``-th initial model of the run with this seed."""
    with ambient(seed, "model", k):
        return Tensors(network().state_dict()).clone()


def check_method(algorithm: Algorithm, training: TrainingConfig, sites: Mapping[str, Site]) -> None:
    """Check before round 0 that the algorithm suits the recipe and every site's policy.

    Raises:
        ConfigError: the method needs another optimiser.
        EgressError: a site's policy forbids what the method sends.
    """
    name, wanted = type(algorithm).__name__, algorithm.optimizers
    if wanted is not None and training.optimizer_kind not in wanted:
        raise ConfigError(
            f"{name} is right with plain {', '.join(sorted(wanted))} only, not with "
            f"{training.optimizer_kind}; set "
            f"training.optimizer to {min(wanted)} and training.momentum to 0"
        )
    for site in sites.values():
        refuse_forbidden(algorithm, site.name, site.policy.allow, site.policy.forbid)


def refuse_forbidden(
    algorithm: Algorithm, site: str, allow: Collection[str] | None, forbid: Collection[str]
) -> None:
    """Check before round 0 that a site's policy lets out what the algorithm sends in training.

    Raises:
        EgressError: it does not; the sentence names algorithm, part and site.
    """
    for name, part in algorithm.all_sends().items():
        if not part.opt_in and not may_leave(name, opt_in=False, allow=allow, forbid=forbid):
            raise EgressError(
                f"{type(algorithm).__name__} sends {name!r} ({part.says}), which the "
                f"policy of site {site!r} forbids; "
                f"allow it there or choose another algorithm"
            )


def build_clients(
    algorithm: Algorithm,
    sites: Mapping[str, Site],
    network: Network,
    task: Task,
    training: TrainingConfig,
    *,
    seed: int,
    root: Path,
    device: str = "cpu",
    coding: Coding = NO_CODECS,
) -> dict[str, ClientRuntime]:
    """Return a runtime for every site.

    They share one network, since a process works for one client at a time.
    """
    with ambient(seed, "model", 0):
        local = LocalTraining(Extended(network, algorithm)(), task, training, device)
    pool = (
        ConcatDataset([sites[name].train for name in sorted(sites)])
        if algorithm.simulation_only
        else None
    )
    return {
        name: ClientRuntime(
            site,
            algorithm,
            local,
            seed=seed,
            root=root / "clients" / name,
            pool=pool,
            coding=coding,
        )
        for name, site in sites.items()
    }


def build_run(
    algorithm: Algorithm,
    names: Sequence[str],
    network: Network,
    transport: Transport,
    *,
    rounds: int,
    metric: str,
    seed: int,
    root: Path,
    evaluate_every: int = 1,
    on_failure: Literal["fail", "skip"] = "fail",
    coding: Coding = NO_CODECS,
) -> Run:
    """Return the run of one algorithm with one seed, in the folder ``root``."""
    extended = Extended(network, algorithm)
    with ambient(seed, "model", 0):
        parts = find_parts(extended())
    server = ServerRuntime(
        algorithm,
        names,
        lambda k: initial_model(extended, seed, k),
        parts,
        transport,
        root / "server",
        on_failure=on_failure,
        coding=coding,
        seed=seed,
    )
    return Run(server, rounds, metric, evaluate_every)


def simulate(
    algorithm: Algorithm,
    sites: Sequence[Site],
    network: Network,
    task: Task,
    *,
    rounds: int,
    training: TrainingConfig | None = None,
    seed: int = 0,
    output: Path | None = None,
    evaluate_every: int = 1,
    threads: int = 1,
    device: str = "cpu",
    on_failure: Literal["fail", "skip"] = "fail",
    coding: Coding | None = None,
    observe: Callable[[RoundRecord], None] = lambda record: None,
) -> Simulated:
    """Run a federation in this process.

    Args:
        algorithm: the algorithm.
        sites: the sites' data.
        network: makes the network.
        task: loss, prediction and scores.
        rounds: how many rounds.
        training: the local recipe.
        seed: decides initial weights and everything random.
        output: folder of the run's state, from which an interrupted call goes on; by default a
            temporary one.
        evaluate_every: rounds between two evaluations on validation cases.
        threads: torch threads; results depend on it.
        device: where to compute.
        on_failure: "fail" or "skip" clients that fail.
        coding: the codecs of training exchanges; None: nothing is coded.
        observe: called after every round.

    Raises:
        CheckpointError: ``output`` holds a run with other settings.
        CollegiumError: in one sentence, whatever else of the above cannot work.
    """
    prepare(threads)
    recipe = training or TrainingConfig()
    by_name = {site.name: site for site in sites}
    if rounds < 1:
        raise ConfigError(f"rounds is {rounds}; give a whole number from 1")
    if len(by_name) < len(sites):
        raise ConfigError("several sites have the same name; give each a name of its own")
    check_method(algorithm, recipe, by_name)
    codecs = coding or NO_CODECS
    settings = {
        "algorithm": {"name": type(algorithm).__name__, **algorithm.hyperparameters()},
        "training": asdict(recipe),
        "sites": {n: [len(s.train), len(s.val), len(s.test)] for n, s in by_name.items()},
        "rounds": rounds,
        "seed": seed,
        "evaluate_every": evaluate_every,
        **({"coding": codecs.describe()} if codecs else {}),
    }
    with tempfile.TemporaryDirectory(prefix="collegium-") as temporary:
        root = output or Path(temporary)
        _claim(root, settings)
        clients = build_clients(
            algorithm,
            by_name,
            network,
            task,
            recipe,
            seed=seed,
            root=root,
            device=device,
            coding=codecs,
        )
        run = build_run(
            algorithm,
            sorted(by_name),
            network,
            InProcess(lambda: clients),
            rounds=rounds,
            metric=task.metric,
            seed=seed,
            root=root,
            evaluate_every=evaluate_every,
            on_failure=on_failure,
            coding=codecs,
        )
        scores = run.execute(observe)
        best = run.best()
        personal = {name: client.best() for name, client in clients.items()}
        return Simulated(
            best["model"] if best else None,
            {name: model for name, model in personal.items() if model is not None},
            scores,
            run.records(),
            run.deploy(),
        )


def _claim(root: Path, settings: Mapping[str, Any]) -> None:
    """Write down what the run in ``root`` is made with, or see that it is the same again."""
    path = root / "simulation.json"
    data = json.dumps(settings, sort_keys=True, default=str).encode()
    if not path.exists():
        write_atomically(path, data)
    elif path.read_bytes() != data:
        old, new = json.loads(path.read_bytes()), json.loads(data)
        changed = ", ".join(sorted(k for k in old.keys() | new.keys() if new.get(k) != old.get(k)))
        raise CheckpointError(
            f"{root} holds a run with other settings ({changed}); choose another output folder"
        )
