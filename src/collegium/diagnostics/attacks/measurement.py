"""Inverts what the algorithms of an experiment send, one site and defence at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from collegium.core.dataset import Batch, TensorDataset
from collegium.core.randomness import ambient, generator
from collegium.core.tensors import Tensors
from collegium.diagnostics.attacks.inversion import (
    DEFAULT,
    Inversion,
    KnownTraining,
    Rebuilt,
    rebuild,
    through_codec,
    with_noise,
)
from collegium.diagnostics.attacks.likeness import Likeness, compare
from collegium.diagnostics.drift.recording import SentModels
from collegium.errors import ConfigError
from collegium.experiment.config.building import build_algorithm
from collegium.experiment.config.experiment import AlgorithmConfig, ExperimentConfig
from collegium.experiment.config.registry import CODECS
from collegium.experiment.federation import (
    as_trained_by,
    for_training,
    open_configured,
    stored_splits,
)
from collegium.experiment.preflight import check_engine, check_network, check_setups
from collegium.runtime import process
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.federation import Federation
from collegium.runtime.requests import Request

NONE = "none"
"""The name of no defence."""

COMPARED = (NONE, "noise 0.1", "noise 1", "noise 10", "stc", "dadaquant", "cer")
"""The defences that are compared unless others are asked for."""


@dataclass(frozen=True)
class InversionResult:
    """The result of an inversion.

    Attributes:
        algorithm: label of the algorithm.
        site: the site whose image it is.
        defence: see `defended`.
        sent: how many trained numbers the site sent.
        trained: how many it has trained.
        label_right: whether the label that was assumed is the true one.
        objective: see `Rebuilt`.
        likeness: of the rebuilt image and the true one.
    """

    algorithm: str
    site: str
    defence: str
    sent: int
    trained: int
    label_right: bool
    objective: float
    likeness: Likeness


@dataclass(frozen=True)
class Attacked:
    """A result with its images, (1, C, *spatial), which are not for everybody."""

    result: InversionResult
    truth: torch.Tensor
    image: torch.Tensor


def defended(gradient: Tensors, defence: str, *, seed: int) -> Tensors:
    """Return what a defence leaves of a gradient.

    Args:
        gradient: the gradient.
        defence: "none"; "noise R", Gaussian noise of R times the gradient's norm; or a codec.
        seed: names the generators.

    Raises:
        ConfigError: there is no such defence.
    """
    word, _, number = defence.partition(" ")
    if defence == NONE:
        return gradient
    if word != "noise":
        return through_codec(gradient, CODECS.load(defence)(), seed=seed)
    try:
        ratio = float(number)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio < float("inf"):
        raise ConfigError(
            f"the defence {defence!r} has no size of the noise; write it in units of the "
            f"gradient's norm, e.g. 'noise 0.1'"
        )
    return with_noise(gradient, ratio, seed=seed)


def invert_sent(
    config: ExperimentConfig,
    settings: Inversion = DEFAULT,
    *,
    sites: Sequence[str] = (),
    defences: Sequence[str] = COMPARED,
    case: int = 0,
    local_steps: int = 1,
    notice: Callable[[str], None] = lambda text: None,
) -> Iterator[Attacked]:
    """Invert what sites send after one round on one image each, and yield the results.

    The round is the first one, from the initial model, with the algorithm's own halves and the
    experiment's learning rate, but with plain SGD on a batch of the one image, since the paper's
    attacker knows the optimiser and Adam's steps tell little more than signs. The image is that of
    a training case as it enters the network, cropped and augmented.

    Args:
        config: the experiment.
        settings: the settings of the attack.
        sites: the sites whose images are attacked; empty: the first.
        defences: see `defended`.
        case: the number of the training case, from 0.
        local_steps: how many steps the site takes.
        notice: called with a sentence before each attack.

    Raises:
        ConfigError: there is no such site or case, or nothing that can be inverted.
        CollegiumError: in one sentence, whatever else cannot work.
    """
    if config.variations:
        raise ConfigError(
            "an attack is on one setting; set variations={} and what you want of them"
        )
    process.prepare(config.engine.threads)
    check_engine(config)
    opened = open_configured(config, splits=stored_splits(config))
    check_network(config, opened)
    check_setups(config)
    chosen = [*sites] or opened.names[:1]
    if unknown := sorted(set(chosen) - set(opened.names)):
        raise ConfigError(
            f"there is no site {unknown[0]!r} that trains; choose from {', '.join(opened.names)}"
        )
    for site in chosen:
        if not 0 <= case < len(opened.sites[site].train):
            raise ConfigError(
                f"site {site!r} has {len(opened.sites[site].train)} training cases and no case "
                f"{case}; choose a smaller number, from 0"
            )
    for defence in defences:
        defended(Tensors({"x": torch.ones(2)}), defence, seed=0)  # is there such a one?
    for algorithm in config.algorithms:
        with tempfile.TemporaryDirectory(prefix="collegium-attack-") as folder:
            trained = for_training(config, opened, Path(folder))
            federation = as_trained_by(trained, config, algorithm)
            round_ = _OneRound(config, algorithm, federation, case, local_steps, Path(folder))
            for site in chosen:
                for defence in defences:
                    notice(f"{algorithm.label}: the image of {site}, defence: {defence}")
                    yield round_.attack(site, defence, settings)


class _OneRound(SentModels):
    """The first round of an algorithm in which each site has one image.

    Args:
        config: the experiment.
        algorithm: the algorithm.
        federation: the sites.
        case: the number of the training case.
        steps: how many steps a site takes.
        folder: for the run's files.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        algorithm: AlgorithmConfig,
        federation: Federation,
        case: int,
        steps: int,
        folder: Path,
    ) -> None:
        self._label, self._steps, self._seed = algorithm.label, steps, config.seeds[0]
        self._method = build_algorithm(algorithm)
        recipe = replace(
            federation.training, optimizer="sgd", momentum=0.0, weight_decay=0.0, batch_size=1,
            local_steps=steps, clip_norm=None, schedule="constant", warm_up=0, lr_decay=1.0,
            precision="fp32", compile="off", optimizer_state="reset",
        )  # fmt: skip
        self._images: dict[str, Batch] = {}
        for name, site in federation.sites.items():
            place = min(case, max(len(site.train) - 1, 0))
            rng = generator(self._seed, "attack", "image", name)
            self._images[name] = site.train.batch([place], [rng])
        parts = {
            name: replace(site, train=TensorDataset(self._images[name]))
            for name, site in federation.sites.items()
        }
        self._federation = replace(federation, sites=parts, training=recipe)
        self._federation.check(self._method)
        self._seen: dict[str, tuple[Tensors, Tensors]] = {}
        clients: Mapping[str, Any] = self._federation.clients(
            self._method, seed=self._seed, root=folder, rounds=config.rounds
        )
        super().__init__(
            InProcess(lambda: clients), self._federation.initial_model(self._method, self._seed)
        )
        server = self._federation.server(
            self._method, self, seed=self._seed, root=folder, rounds=config.rounds
        )
        self.held = server.held
        server.begin()
        server.advance()

    def see(
        self, request: Request, parts: dict[str, Any], received: Tensors, sent: Tensors
    ) -> None:
        """Keep what a site received and sent, the first time. See `SentModels.see`."""
        self._seen.setdefault(request.client, (received, sent))

    def attack(self, site: str, defence: str, settings: Inversion) -> Attacked:
        """Invert what a site sent under a defence."""
        if site not in self._seen:
            raise ConfigError(
                f"in {self._label!r} no site receives a model, trains it and sends it back, so "
                f"that there is nothing to invert; leave it out, e.g. with algorithm=fedavg"
            )
        received, sent = self._seen[site]
        federation, truth = self._federation, self._images[site]
        if truth["image"].ndim < 4:
            raise ConfigError(
                "gradient inversion rebuilds images, and the cases here are rows of a table; "
                "choose --kind membership"
            )
        method = self._method.at_site(site)
        with ambient(self._seed, "attack"):
            module = federation.builder(method)()
        task = federation.task_at(site, federation.sites[site].labelled)
        training = KnownTraining(
            module, task, received, federation.training.lr_of(1, 1), self._steps
        )
        gradient = training.gradient_of(sent - received.select(sent))
        rebuilt: Rebuilt = rebuild(
            training,
            defended(gradient, defence, seed=self._seed),
            truth["image"].shape,
            truth,
            settings,
            seed=self._seed,
        )
        result = InversionResult(
            self._label,
            site,
            defence,
            gradient.numel(),
            sum(p.numel() for p in module.parameters() if p.requires_grad),
            bool(torch.equal(rebuilt.label, truth["label"])),
            rebuilt.objective,
            compare(rebuilt.image, truth["image"]),
        )
        return Attacked(result, truth["image"], rebuilt.image)
