"""Runs a federation in one call: from sites, a model and a task to trained models and scores.

This is the library's entry point for those who bring their own network, data or loop over settings;
experiments described by a file (`collegium.experiment`) use the same `Federation`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils import data

from collegium.compression.session.groups import NO_CODECS, Codecs
from collegium.core.algorithm import Algorithm
from collegium.core.dataset import Dataset
from collegium.core.files import write_atomically
from collegium.core.seals import read_json, seal_json
from collegium.core.tensors import Tensors
from collegium.data.site import Site
from collegium.data.torch_dataset import as_dataset
from collegium.errors import CheckpointError, ConfigError
from collegium.runtime.distances import Diagnostic
from collegium.runtime.early_stopping import EarlyStopping, check_validation
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.federation import Federation, ModuleCopies, Network
from collegium.runtime.participation import EVERYBODY, Participation, check_home_rounds
from collegium.runtime.process import prepare
from collegium.runtime.records import RoundRecord
from collegium.runtime.secure.config import SecureMean
from collegium.runtime.selection import DEFAULT, Selection
from collegium.tasks import Task
from collegium.training.loop import TrainingConfig, check_warm_up
from collegium.training.together import check_together

Splits = Sequence[Dataset | data.Dataset[Any]]
"""The training, validation and test data of a site."""


@dataclass(frozen=True)
class Simulated:
    """The outcome of a simulated federation.

    Attributes:
        model: the global model of the round that the federation has chosen; None for an algorithm
            without one.
        personal: the personal model selected at each site, by site; empty for an algorithm without
            them.
        scores: test scores by site and kind of model, one mapping per case.
        records: what happened in each round.
        deployed: the models for sites outside the federation, by name: "global", and the personal
            ones of the sites whose policy shares theirs.
    """

    model: Tensors | None
    personal: Mapping[str, Tensors]
    scores: Mapping[str, Mapping[str, list[dict[str, Any]]]]
    records: Sequence[RoundRecord]
    deployed: Mapping[str, Tensors]


def simulate(
    algorithm: Algorithm,
    sites: Sequence[Site] | Mapping[str, Site | Splits],
    model: nn.Module | Network,
    task: Task,
    *,
    rounds: int,
    training: TrainingConfig | None = None,
    seed: int = 0,
    output: Path | None = None,
    evaluate_every: int = 1,
    home_rounds: int = 0,
    threads: int = 1,
    device: str = "cpu",
    together: bool = False,
    participation: Participation = EVERYBODY,
    codecs: Codecs = NO_CODECS,
    selection: Selection = DEFAULT,
    early_stopping: EarlyStopping | None = None,
    public: Dataset | data.Dataset[Any] | None = None,
    diagnostics: Collection[Diagnostic] = (),
    secure_mean: SecureMean | None = None,
    observe: Callable[[RoundRecord], None] = lambda record: None,
) -> Simulated:
    """Run a federation in this process.

    Args:
        algorithm: the algorithm.
        sites: the sites; or, by name, the training, validation and test data of each, as datasets
            of PyTorch (see `collegium.data.torch_dataset.TorchDataset`) or of Collegium.
        model: a network, from whose weights training starts; or a function that builds one, whose
            initial weights depend on the seed. Methods that need several initial models, such as
            IFCA, take a function.
        task: loss, prediction and scores.
        rounds: how many rounds.
        training: the local recipe.
        seed: decides initial weights and everything random.
        output: folder of the run's state, from which an interrupted call continues; by default a
            temporary one.
        evaluate_every: rounds between two evaluations on validation cases.
        home_rounds: how many of the rounds, the last ones, every site trains its own model in; they
            make a personal model of any algorithm's.
        threads: torch threads; results depend on it.
        device: where to compute.
        together: whether sites train in one loop where they can; results depend on it in the last
            bits. See `collegium.training.together`.
        participation: who takes part in a round, and what happens if a client fails.
        codecs: the codecs of training exchanges.
        selection: the rule that selects the round of each model.
        early_stopping: the rule that ends the run before its last round, see
            `collegium.runtime.early_stopping`; None: none does.
        public: data that the server holds, for methods that train there.
        diagnostics: what the records of the rounds hold beside what they need; "layer_distance":
            how far training moved each layer, see `collegium.runtime.distances.layer_distances`.
        secure_mean: how sites mask what is averaged, so that the server sees the sum alone; None:
            nothing is masked.
        observe: called after every round.

    Returns:
        The selected models, the scores on test cases and the records of the rounds.

    Raises:
        CheckpointError: ``output`` holds a run with other settings.
        CollegiumError: in one sentence, whatever else of the above cannot work.
    """
    prepare(threads)
    if rounds < 1:
        raise ConfigError(f"rounds is {rounds}; give a whole number from 1")
    federation = Federation(
        _sites(sites),
        _network(model),
        task,
        training or TrainingConfig(),
        device,
        public=None if public is None else as_dataset(public),
    )
    federation.check(algorithm)
    federation.check_labelled()
    check_home_rounds(home_rounds, rounds)
    check_warm_up(federation.training, rounds)
    if early_stopping is not None:
        check_validation(federation.sites.values())
    if together:
        check_together(federation.network(), federation.training)
    settings = {
        "algorithm": {"name": type(algorithm).__name__, **algorithm.hyperparameters()},
        "training": asdict(federation.training),
        "sites": {
            name: [len(site.train), len(site.val), len(site.test)]
            for name, site in federation.sites.items()
        },
        **({"labelled": dict(federation.partial)} if federation.partial else {}),
        "rounds": rounds,
        "seed": seed,
        "evaluate_every": evaluate_every,
        **({"home_rounds": home_rounds} if home_rounds else {}),
        **({"coding": codecs.describe()} if codecs else {}),
        **({"together": True} if together else {}),
        **participation.decisive(),
        "selection": asdict(selection),
        **({"early_stopping": asdict(early_stopping)} if early_stopping else {}),
        **({"public": len(federation.public)} if federation.public is not None else {}),
        **({"diagnostics": sorted(diagnostics)} if diagnostics else {}),
        **({"secure_mean": asdict(secure_mean)} if secure_mean else {}),
    }
    with tempfile.TemporaryDirectory(prefix="collegium-") as temporary:
        root = output or Path(temporary)
        _claim(root, settings)
        clients = federation.clients(
            algorithm, seed=seed, root=root, rounds=rounds, codecs=codecs, secure=secure_mean
        )
        run = federation.run(
            algorithm,
            InProcess(lambda: clients, together=together),
            rounds=rounds,
            seed=seed,
            root=root,
            evaluate_every=evaluate_every,
            home_rounds=home_rounds,
            participation=participation,
            codecs=codecs,
            selection=selection,
            early_stopping=early_stopping,
            diagnostics=diagnostics,
            secure=secure_mean,
        )
        scores = run.execute(observe)
        best = run.best()
        personal = {name: client.kept() for name, client in clients.items()}
        return Simulated(
            best["model"] if best else None,
            {name: model for name, model in personal.items() if model is not None},
            scores,
            run.records(),
            run.deploy(),
        )


def _sites(given: Sequence[Site] | Mapping[str, Site | Splits]) -> dict[str, Site]:
    """Return the sites by name."""
    if not isinstance(given, Mapping):
        by_name = {site.name: site for site in given}
        if len(by_name) < len(given):
            raise ConfigError("several sites have the same name; give each a name of its own")
        return by_name
    return {
        name: found if isinstance(found, Site) else _site(name, found)
        for name, found in given.items()
    }


def _site(name: str, splits: Splits) -> Site:
    """Return a site from its three splits."""
    if len(splits) != 3:
        raise ConfigError(
            f"site {name!r} has {len(splits)} sets of data; give three, for training, validation "
            f"and test"
        )
    train, val, test = map(as_dataset, splits)
    return Site(name, train, val, test)


def _network(model: nn.Module | Network) -> Network:
    return ModuleCopies(model) if isinstance(model, nn.Module) else model


def _claim(root: Path, settings: Mapping[str, Any]) -> None:
    """Record what the run in ``root`` is made with, or check that it is the same again."""
    path = root / "simulation.json"
    text = json.dumps(settings, sort_keys=True, default=str)
    if not path.exists():
        write_atomically(path, seal_json(text))
        return
    try:
        old, new = read_json(path), json.loads(text)
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged; remove it if the run was made with the same settings, or choose "
            f"another output folder"
        ) from error
    if old != new:
        changed = ", ".join(sorted(k for k in old.keys() | new.keys() if new.get(k) != old.get(k)))
        raise CheckpointError(
            f"{root} holds a run with other settings ({changed}); choose another output folder"
        )
