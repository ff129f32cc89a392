"""Measures, round by round, how far features lie apart: before and after training, and by site."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from collegium.compression.session import on_device
from collegium.core.algorithm import Algorithm, Extended
from collegium.core.dataset import Dataset
from collegium.core.message import Message
from collegium.core.randomness import seed_of
from collegium.core.tensors import Tensors
from collegium.data.federation import open_federation
from collegium.data.site import Site
from collegium.diagnostics.drift.distances import Seen, apart, apart_matrix
from collegium.diagnostics.drift.probe import PARTS, Eye, Probe
from collegium.errors import ConfigError, DataError
from collegium.experiment.config.building import build_algorithm, build_coding, network_of, task_of
from collegium.experiment.config.experiment import AlgorithmConfig, ExperimentConfig
from collegium.experiment.jobs import Event, Observer, cache_folder
from collegium.experiment.preflight import check_engine, check_network, check_setups
from collegium.runtime import process
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.server import ServerRuntime
from collegium.runtime.simulation import build_clients, build_run, check_method, initial_model

MOST_POINTS = 400
"""How many points a map has at most; of every site it shows equally many windows at most."""

PERPLEXITY = 30.0
"""Perplexity of t-SNE, or a third of the other points where that is less."""

FEW = 10
"""With fewer patients of a site, its distances are called coarse."""

Kind = Literal["global", "local"]
Split = Literal["train", "val", "test"]

KINDS: tuple[Kind, Kind] = ("global", "local")
"""The model that a site received in a round, and that model after the site's training."""

SPLITS: Mapping[Split, str] = {"train": "training", "val": "validation", "test": "test"}
"""The images that may be looked at, in words."""

Features = Mapping[str, Mapping[Kind, Seen]]
"""By site and kind of model."""


@dataclass(frozen=True)
class Point:
    """A window in a map: its site, under which kind of model, and its place, which has no unit."""

    site: str
    kind: Kind
    x: float
    y: float


@dataclass(frozen=True)
class Moment:
    """What was measured of one algorithm in one round.

    Attributes:
        algorithm: Its label.
        round: The round.
        windows: How many windows were looked at, by site; only of sites that have some of two or
            more patients and sent a model back.
        patients: Of how many patients these are, by site.
        drift: The proxy A-distance, from 0 to 2, between the features of the model that a site
            received and of the same model after the site's training, by site.
        between: The proxy A-distances between these sites, each under the model that it received;
            rows and columns in the order of ``windows``.
        points: A map of all features by t-SNE; empty where there are too few windows or features.
    """

    algorithm: str
    round: int
    windows: Mapping[str, int]
    patients: Mapping[str, int]
    drift: Mapping[str, float]
    between: Sequence[Sequence[float]]
    points: Sequence[Point]


@dataclass(frozen=True)
class Drift:
    """What was measured of the algorithms of an experiment, with one seed.

    Attributes:
        experiment: Name of the experiment.
        federation: Name of the federation.
        seed: The seed.
        split: Of which images the windows are: "train", "val" or "test".
        limit: How many windows of a site were looked at, at most.
        sites: The sites that train.
        rounds: The rounds.
        algorithms: Labels of the algorithms.
        moments: By algorithm, then round.
        notes: What a reader has to know of the data.
    """

    experiment: str
    federation: str
    seed: int
    split: Split
    limit: int
    sites: Sequence[str]
    rounds: Sequence[int]
    algorithms: Sequence[str]
    moments: Sequence[Moment]
    notes: Sequence[str]


def measure_drift(
    config: ExperimentConfig,
    rounds: Sequence[int] | None = None,
    *,
    limit: int = 64,
    split: Split = "val",
    observe: Observer = lambda event: None,
) -> Drift:
    """Train every algorithm of an experiment with its first seed, and measure the drift.

    All sites but `federation.outside` train as in a run of the experiment, bit for bit, but in a
    temporary folder, without evaluations, and up to the last of ``rounds``. The model received in
    round 1 is the untrained one.

    Distances are `collegium.diagnostics.drift.distances.apart`, whose classifier is judged on
    patients that it has not learnt from, whichever the model.

    Args:
        config: the experiment.
        rounds: which rounds to look at; None: the first, those at a quarter and at half, the last.
        limit: how many windows of a site to look at, at most.
        split: of which images; the model after training has learnt from those of "train".
        observe: told what happens.

    Raises:
        ConfigError: there is no such round or split, or an algorithm has no model that drifts.
        DataError: no site has windows of two patients.
        CollegiumError: in one sentence, whatever else cannot work.
    """
    wanted = _rounds(config, rounds)
    if split not in SPLITS or limit < 2:
        raise ConfigError(
            f"split is {split!r} and limit {limit!r}; choose {', '.join(SPLITS)}, and a limit of "
            f"at least 2"
        )
    process.prepare(config.engine.threads)
    check_engine(config)
    sites = _open_sites(config)
    check_network(config, sites)
    check_setups(config)
    for chosen in config.algorithms:
        _check(config, chosen, sites)
    moments = [
        moment
        for chosen in config.algorithms
        for moment in _Following(config, chosen, sites, (split, limit), observe).moments(wanted)
    ]
    labels = [chosen.label for chosen in config.algorithms]
    notes = _notes(sorted(sites), moments, SPLITS[split])
    about = config.name, config.federation.name, config.seeds[0], split, limit
    return Drift(*about, sorted(sites), wanted, labels, moments, notes)


def _rounds(config: ExperimentConfig, rounds: Sequence[int] | None) -> list[int]:
    """Return the rounds to look at, in order."""
    if config.variations:
        raise ConfigError(
            f"drift is measured in one setting, and variations names {len(config.variations)}; set "
            f"variations={{}} and what you want of them"
        )
    last = config.rounds
    usual = {1, max(last // 4, 1), max(last // 2, 1), last}
    wanted = sorted(usual if rounds is None else {*rounds})
    if not wanted or wanted[0] < 1 or wanted[-1] > last:
        asked = ", ".join(map(str, wanted)) or "nothing"
        raise ConfigError(f"the rounds asked for are {asked}; choose some from 1 to {last}")
    return wanted


def _open_sites(config: ExperimentConfig) -> dict[str, Site]:
    """Open the sites with the splits of a run in the output folder, or those that it would draw."""
    stored = Path(config.output) / "splits"
    return open_federation(
        config.federation, cache_folder(), 0, stored if stored.is_dir() else None
    )


def _check(config: ExperimentConfig, chosen: AlgorithmConfig, sites: Mapping[str, Site]) -> None:
    """Refuse an algorithm in which no site makes a local model of a global one."""
    algorithm = build_algorithm(chosen)
    check_method(algorithm, config.training, sites)
    if algorithm.simulation_only or not PARTS & algorithm.all_sends().keys():
        raise ConfigError(
            f"in {chosen.label!r} no site receives a model, trains it and sends it back, so that "
            f"no features drift; leave it out, e.g. with algorithm=fedavg"
        )
    if build_coding(config, chosen):
        raise ConfigError(
            f"the models of {chosen.label!r} travel coded, and drift is measured on models that "
            f"travel as they are; leave its codec out"
        )


class _Following:
    """One algorithm on its way, and what its models see.

    Args:
        config: the experiment.
        chosen: the algorithm.
        sites: the sites that train.
        what: of which images how many windows of a site.
        observe: told what happens.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        chosen: AlgorithmConfig,
        sites: Mapping[str, Site],
        what: tuple[Split, int],
        observe: Observer,
    ) -> None:
        self._config, self._chosen, self._sites = config, chosen, sites
        self._split, self._limit = what
        self._observe, self._seed = observe, config.seeds[0]
        self._algorithm: Algorithm = build_algorithm(chosen)
        self._network = Extended(network_of(config), self._algorithm)
        self._eye = Eye(self._network, task_of(config), config.engine.device)
        self._rounds: Sequence[int] = ()
        self._seen: dict[str, dict[Kind, Seen]] = {}

    def moments(self, rounds: Sequence[int]) -> Iterator[Moment]:
        """Train up to the last of ``rounds``, and yield what was measured in each of them."""
        self._rounds = rounds
        about: dict[str, Any] = {
            "algorithm": self._chosen.label, "seed": self._seed, "rounds": rounds[-1]
        }  # fmt: skip
        self._observe(Event("job", **about))
        with tempfile.TemporaryDirectory(prefix="collegium-drift-") as temporary:
            server = self._server(Path(temporary))
            server.begin()
            while server.round < rounds[-1]:
                self._seen = {}
                server.advance()
                self._observe(Event("round", **about, round=server.round))
                if server.round in rounds:
                    yield self._moment(server.round)
        self._observe(Event("done", **about))

    def _server(self, root: Path) -> ServerRuntime:
        """Return a server whose transport is looked at; nothing else differs from a run's."""
        config, algorithm = self._config, self._algorithm
        clients: Mapping[str, Any] = build_clients(
            algorithm, self._sites, network_of(config), task_of(config), config.training,
            seed=self._seed, root=root, device=config.engine.device,
        )  # fmt: skip
        probe = Probe(
            InProcess(lambda: clients),
            initial_model(self._network, self._seed),
            personal=lambda site, message: algorithm.personal_model(
                clients[site], Message(on_device(dict(message), clients[site].training.device))
            ),
            take=self._take,
        )
        return build_run(
            algorithm, sorted(self._sites), network_of(config), probe, rounds=config.rounds,
            metric="", seed=self._seed, root=root, on_failure=config.on_failure,
        ).server  # fmt: skip

    def _take(self, number: int, site: str, received: Tensors, trained: Tensors) -> None:
        """Look at a site's images; of several trainings in a round, at the first start and end."""
        if number in self._rounds:
            data: Dataset = getattr(self._sites[site], self._split)
            seen = self._seen.setdefault(site, {})
            if "global" not in seen:
                seen["global"] = self._eye.look(received, data, limit=self._limit)
            seen["local"] = self._eye.look(trained, data, limit=self._limit)

    def _moment(self, number: int) -> Moment:
        features: Features = {
            site: seen for site, seen in sorted(self._seen.items()) if seen["global"].count > 1
        }
        if not features:
            raise DataError(
                f"round {number} of {self._chosen.label!r} shows no site's {SPLITS[self._split]} "
                f"images of two patients, of whom one has to be held out; look at other images"
            )
        drift = {
            site: apart(seen["global"], seen["local"], seed=self._seed)
            for site, seen in features.items()
        }
        received = {site: seen["global"] for site, seen in features.items()}
        return Moment(
            self._chosen.label,
            number,
            {site: len(seen.rows) for site, seen in received.items()},
            {site: seen.count for site, seen in received.items()},
            drift,
            apart_matrix(received, seed=self._seed).tolist(),
            map_features(features, self._seed),
        )


def map_features(features: Features, seed: int) -> list[Point]:
    """Return a place in the plane for every window under both kinds of model, by t-SNE.

    Every feature is divided by its spread over all of them. Of many windows some are shown, spread
    evenly over each site's, up to `MOST_POINTS` in all.

    Args:
        features: by site and kind of model.
        seed: of the run.

    Returns:
        The points by site and kind; none for fewer than four, or for a single feature.
    """
    from sklearn.manifold import TSNE

    most = max(MOST_POINTS // (2 * len(features)), 1)
    chosen = {
        (site, kind): seen[kind].rows[spread(len(seen[kind].rows), most)]
        for site, seen in features.items()
        for kind in KINDS
    }
    rows = np.concatenate(list(chosen.values())).astype(np.float64)
    rows = rows[:, rows.std(0) > 0]
    if len(rows) < 4 or rows.shape[1] < 2:
        return []
    places = TSNE(
        perplexity=min(PERPLEXITY, (len(rows) - 1) / 3),
        init="pca",
        random_state=seed_of(seed, "drift") % 2**32,
        method="exact",  # the quicker one adds in the order in which its threads end
    ).fit_transform((rows - rows.mean(0)) / rows.std(0))
    names = [name for name, group in chosen.items() for _ in group]
    return [Point(*name, float(x), float(y)) for name, (x, y) in zip(names, places, strict=True)]


def spread(count: int, most: int) -> list[int]:
    """Return at most ``most`` of the places from 0 to ``count`` - 1, spread evenly over them."""
    some = min(count, most)
    return [k * count // some for k in range(some)]


def _notes(sites: Sequence[str], moments: Sequence[Moment], images: str) -> list[str]:
    """Say which sites are missing somewhere, and whose distances are coarse."""
    notes = []
    for site in sites:
        counts = [moment.patients.get(site, 0) for moment in moments]
        if not all(counts):
            where = "some rounds" if any(counts) else "every round"
            notes.append(
                f"{site} is missing in {where}: it has {images} images of fewer than two patients, "
                f"or sent no model back."
            )
        elif min(counts) < FEW:
            notes.append(
                f"{site} has {images} images of {min(counts)} patients; its distances are coarse, "
                f"and a large one can be chance."
            )
    return notes
