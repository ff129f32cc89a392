"""Measures, round by round, how far features lie apart: before and after training, and by site."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from collegium.compression.session.groups import on_device
from collegium.core.algorithm import Algorithm
from collegium.core.dataset import Dataset
from collegium.core.message import Message
from collegium.core.randomness import seed_of
from collegium.core.tensors import Tensors
from collegium.diagnostics.drift.distances import SiteFeatures, apart, apart_matrix
from collegium.diagnostics.drift.recording import FeatureExtractor, RecordingTransport
from collegium.errors import ConfigError, DataError
from collegium.experiment.config.building import build_algorithm, build_codecs
from collegium.experiment.config.experiment import AlgorithmConfig, ExperimentConfig
from collegium.experiment.federation import (
    as_trained_by,
    for_training,
    open_configured,
    stored_splits,
)
from collegium.experiment.jobs import Event, Observer
from collegium.experiment.preflight import check_engine, check_network, check_setups
from collegium.runtime import process
from collegium.runtime.distances import SENT_BACK
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.federation import Federation
from collegium.runtime.server import ServerRuntime

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

Features = Mapping[str, Mapping[Kind, SiteFeatures]]
"""By site and kind of model."""


@dataclass(frozen=True)
class Point:
    """A window in a map: its site, under which kind of model, and its place, which has no unit."""

    site: str
    kind: Kind
    x: float
    y: float


@dataclass(frozen=True)
class RoundDrift:
    """The measurements of one algorithm in one round.

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
    """The measurements of the algorithms of an experiment, with one seed.

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
    moments: Sequence[RoundDrift]
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
        observe: called with every event.

    Raises:
        ConfigError: there is no such round or split, or an algorithm has no model that drifts.
        DataError: no site has windows of two patients.
        CollegiumError: in one sentence, whatever else cannot work.
    """
    wanted = _rounds(config, rounds)
    if config.secure_mean is not None:
        raise ConfigError(
            "drift looks at the model of each site, which secure_mean hides from a server; it is "
            "measured in a simulation without: set secure_mean=null"
        )
    if split not in SPLITS or limit < 2:
        raise ConfigError(
            f"split is {split!r} and limit {limit!r}; choose {', '.join(SPLITS)}, and a limit of "
            f"at least 2"
        )
    process.prepare(config.engine.threads)
    check_engine(config)
    federation = open_configured(config, splits=stored_splits(config))
    check_network(config, federation)
    check_setups(config)
    for chosen in config.algorithms:
        _check(config, chosen, as_trained_by(federation, config, chosen))
    with tempfile.TemporaryDirectory(prefix="collegium-drift-") as folder:
        trained = for_training(config, federation, Path(folder))
        measured = [
            found
            for chosen in config.algorithms
            for found in _Measurement(
                config, chosen, as_trained_by(trained, config, chosen), (split, limit), observe
            ).of(wanted)
        ]
    labels = [chosen.label for chosen in config.algorithms]
    notes = _notes(federation.names, measured, SPLITS[split])
    about = config.name, config.federation.name, config.seeds[0], split, limit
    return Drift(*about, federation.names, wanted, labels, measured, notes)


def _rounds(config: ExperimentConfig, rounds: Sequence[int] | None) -> list[int]:
    """Return the rounds to look at, in order."""
    if config.variations:
        raise ConfigError(
            f"drift is measured in one setting, and variations names {len(config.variations)}; set "
            f"variations={{}} and what you want of them"
        )
    last = config.rounds - config.home_rounds  # what follows averages nothing
    usual = {1, max(last // 4, 1), max(last // 2, 1), last}
    wanted = sorted(usual if rounds is None else {*rounds})
    if not wanted or wanted[0] < 1 or wanted[-1] > last:
        asked = ", ".join(map(str, wanted)) or "nothing"
        raise ConfigError(f"the rounds asked for are {asked}; choose some from 1 to {last}")
    return wanted


def _check(config: ExperimentConfig, chosen: AlgorithmConfig, federation: Federation) -> None:
    """Refuse an algorithm in which no site makes a local model of a global one."""
    algorithm = build_algorithm(chosen)
    federation.check(algorithm)
    if algorithm.simulation_only or not SENT_BACK & algorithm.all_sends().keys():
        raise ConfigError(
            f"in {chosen.label!r} no site receives a model, trains it and sends it back, so that "
            f"no features drift; leave it out, e.g. with algorithm=fedavg"
        )
    if build_codecs(config, chosen):
        raise ConfigError(
            f"the models of {chosen.label!r} travel coded, and drift is measured on models that "
            f"travel as they are; leave its codec out"
        )


class _Measurement:
    """Trains one algorithm and measures the features of its models.

    Args:
        config: the experiment.
        chosen: the algorithm.
        federation: the sites that train, and the network.
        windows: of which images, and how many windows of a site at most.
        observe: called with every event.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        chosen: AlgorithmConfig,
        federation: Federation,
        windows: tuple[Split, int],
        observe: Observer,
    ) -> None:
        self._config, self._chosen, self._federation = config, chosen, federation
        self._split, self._limit = windows
        self._observe, self._seed = observe, config.seeds[0]
        self._algorithm: Algorithm = build_algorithm(chosen)
        network = federation.builder(self._algorithm)
        self._extractor = FeatureExtractor(network, federation.task, federation.device)
        self._rounds: Sequence[int] = ()
        self._found: dict[str, dict[Kind, SiteFeatures]] = {}

    def of(self, wanted: Sequence[int]) -> Iterator[RoundDrift]:
        """Train up to the last of the wanted rounds, and yield the measurements of each."""
        self._rounds = wanted
        about: dict[str, Any] = {
            "algorithm": self._chosen.label, "seed": self._seed, "rounds": wanted[-1]
        }  # fmt: skip
        self._observe(Event("job", **about))
        with tempfile.TemporaryDirectory(prefix="collegium-drift-") as temporary:
            server = self._server(Path(temporary))
            server.begin()
            while server.round < wanted[-1]:
                self._found = {}
                server.advance()
                self._observe(Event("round", **about, round=server.round))
                if server.round in wanted:
                    yield self._drift(server.round)
        self._observe(Event("done", **about))

    def _server(self, root: Path) -> ServerRuntime:
        """Return a server whose transport records the models; nothing else differs from a run's."""
        algorithm, seed = self._algorithm, self._seed
        clients: Mapping[str, Any] = self._federation.clients(
            algorithm, seed=seed, root=root, rounds=self._config.rounds
        )
        recorder = RecordingTransport(
            InProcess(lambda: clients),
            self._federation.initial_model(algorithm, seed),
            personal=lambda site, message: algorithm.personal_model(
                clients[site], Message(on_device(dict(message), clients[site].training.device))
            ),
            take=self._take,
        )
        server = self._federation.server(
            algorithm,
            recorder,
            seed=seed,
            root=root,
            rounds=self._config.rounds,
            participation=self._config.participation,
        )
        recorder.held = server.held
        return server

    def _take(self, number: int, site: str, received: Tensors, trained: Tensors) -> None:
        """Extract a site's features; of several trainings in a round, the first start and end."""
        if number in self._rounds:
            data: Dataset = getattr(self._federation.sites[site], self._split)
            extract = partial(self._extractor.extract, data=data, limit=self._limit)
            start = self._found[site]["global"] if site in self._found else extract(received)
            self._found[site] = {"global": start, "local": extract(trained)}

    def _drift(self, number: int) -> RoundDrift:
        features: Features = {
            site: seen for site, seen in sorted(self._found.items()) if seen["global"].count > 1
        }
        if not features:
            raise DataError(
                f"round {number} of {self._chosen.label!r} shows no site's {SPLITS[self._split]} "
                f"images of two patients, of whom one has to be held out; look at other images"
            )
        seed = self._seed
        received = {site: seen["global"] for site, seen in features.items()}
        return RoundDrift(
            self._chosen.label,
            number,
            {site: len(seen.rows) for site, seen in received.items()},
            {site: seen.count for site, seen in received.items()},
            {s: apart(seen["global"], seen["local"], seed=seed) for s, seen in features.items()},
            apart_matrix(received, seed=seed).tolist(),
            map_features(features, seed),
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
    """Return some of the places from 0 to ``count`` - 1, spread evenly over them.

    Args:
        count: how many places there are.
        most: how many are returned at most.
    """
    some = min(count, most)
    return [k * count // some for k in range(some)]


def _notes(sites: Sequence[str], moments: Sequence[RoundDrift], images: str) -> list[str]:
    """Return notes on sites that are missing in a round, and on coarse distances."""
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
