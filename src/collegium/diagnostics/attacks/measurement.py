"""Inverts what the algorithms of an experiment send, one site and defence at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from collegium.core.dataset import Batch, Example, TensorDataset
from collegium.core.randomness import ambient, generator
from collegium.core.tensors import Tensors
from collegium.diagnostics.attacks.defences import NONE, defence_of
from collegium.diagnostics.attacks.inversion import (
    DEFAULT,
    Inversion,
    KnownTraining,
    Rebuilt,
    check,
    rebuild,
)
from collegium.diagnostics.attacks.likeness import Likeness, compare
from collegium.diagnostics.attacks.opening import open_attacked
from collegium.diagnostics.drift.recording import SentModels
from collegium.errors import ConfigError, DataError
from collegium.experiment.config.building import build_algorithm
from collegium.experiment.config.experiment import AlgorithmConfig, ExperimentConfig
from collegium.experiment.federation import as_trained_by, for_training
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.federation import Federation
from collegium.runtime.requests import Request
from collegium.tasks import SegmentationTask, Task

COMPARED = (NONE, "noise 0.1", "noise 1", "noise 10", "clip 1 + dp 1.1", "stc", "dadaquant", "cer")
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
        label_right: whether the label that was assumed or found is the true one.
        objective: see `Rebuilt`.
        likeness: of the rebuilt image and the true one; of a batch the mean over its images, each
            beside the one that it was matched with.
        mask_dice: Dice of a mask that was searched for, of a batch the mean; None: none was.
    """

    algorithm: str
    site: str
    defence: str
    sent: int
    trained: int
    label_right: bool
    objective: float
    likeness: Likeness
    mask_dice: float | None = None


@dataclass(frozen=True)
class Attacked:
    """A result with its images, (B, C, *spatial), which are not for everybody."""

    result: InversionResult
    truth: torch.Tensor
    image: torch.Tensor


def invert_sent(
    config: ExperimentConfig,
    settings: Inversion = DEFAULT,
    *,
    sites: Sequence[str] = (),
    defences: Sequence[str] = COMPARED,
    case: int = 0,
    batch: int = 1,
    local_steps: int = 1,
    notice: Callable[[str], None] = lambda text: None,
    left_out: Callable[[str], None] = lambda text: None,
) -> Iterator[Attacked]:
    """Invert what sites send after one round on one image, or a batch, and yield the results.

    The round is the first one, from the initial model, with the algorithm's own halves and the
    experiment's learning rate, but with plain SGD on a batch of these images, since the paper's
    attacker knows the optimiser and Adam's steps tell little more than signs. The images are those
    of training cases as they enter the network, cropped and augmented. As wherever a site trains on
    a batch of one image, batch normalisation uses its running statistics then; in a batch of
    several it uses those of the batch.

    Args:
        config: the experiment.
        settings: the settings of the attack.
        sites: the sites whose images are attacked; empty: the first.
        defences: see `defence_of`.
        case: the number of the training case, from 0.
        batch: how many cases, from that one on, the site's batch holds.
        local_steps: how many steps the site takes.
        notice: called with a sentence before each attack.
        left_out: called, before the first attack, with a sentence for each algorithm that cannot be
            attacked, while others can.

    Raises:
        ConfigError: there is no such site or case, nothing that can be inverted, or the server
            sees the sum of updates alone.
        CollegiumError: in one sentence, whatever else cannot work.
    """
    if config.secure_mean is not None:
        raise ConfigError(
            "a server sees no update of a single site under secure_mean, so that there is none to "
            "invert; set secure_mean=null to see what it would see without"
        )
    opened, chosen = open_attacked(config, sites)
    for site in chosen:
        count = len(opened.sites[site].train)
        if not 0 <= case < count:
            raise ConfigError(
                f"site {site!r} has {count} training cases and no case {case}; choose a smaller "
                f"number, from 0"
            )
        if not 1 <= batch <= count - case:
            raise ConfigError(
                f"from case {case} on site {site!r} has {count - case} training cases, and the "
                f"batch is to hold {batch}; choose a number from 1 to {count - case}"
            )
    for defence in defences:
        defence_of(defence)  # is there such a one?
    with tempfile.TemporaryDirectory(prefix="collegium-attack-") as folder:
        rounds = dict[str, _OneRound]()
        refused = dict[str, ConfigError | DataError]()
        for number, algorithm in enumerate(config.algorithms):
            place = Path(folder) / str(number)
            try:
                trained = for_training(config, opened, place)
                federation = as_trained_by(trained, config, algorithm)
                made = _OneRound(config, algorithm, federation, case, batch, local_steps, place)
                made.check(chosen, settings)
            except (ConfigError, DataError) as error:
                refused[algorithm.label] = error
            else:
                rounds[algorithm.label] = made
        if refused and not rounds:
            raise next(iter(refused.values()))
        for label, reason in refused.items():
            left_out(f"{label} is left out: {reason}")
        for label, made in rounds.items():
            for site in chosen:
                for defence in defences:
                    notice(f"{label}: the image of {site}, defence: {defence}")
                    yield made.attack(site, defence, settings)


class _OneRound(SentModels):
    """The first round of an algorithm in which each site has one batch of images.

    Args:
        config: the experiment.
        algorithm: the algorithm.
        federation: the sites.
        case: the number of the first training case.
        batch: how many cases there are, or as many as a site that is not attacked has.
        steps: how many steps a site takes.
        folder: for the run's files.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        algorithm: AlgorithmConfig,
        federation: Federation,
        case: int,
        batch: int,
        steps: int,
        folder: Path,
    ) -> None:
        self._label, self._steps, self._seed = algorithm.label, steps, config.seeds[0]
        self._method = build_algorithm(algorithm)
        recipe = replace(
            federation.training, optimizer="sgd", momentum=0.0, weight_decay=0.0, batch_size=batch,
            local_steps=steps, clip_norm=None, schedule="constant", warm_up=0, lr_decay=1.0,
            precision="fp32", compile="off", optimizer_state="reset",
        )  # fmt: skip
        self._images: dict[str, Batch] = {}
        for name, site in federation.sites.items():
            count = max(len(site.train), 1)
            places = [min(case + n, count - 1) for n in range(min(batch, count))]
            path = (self._seed, "attack", "image", name)
            rngs = [generator(*path, *([n] if n else [])) for n in range(len(places))]
            self._images[name] = site.train.batch(places, rngs)
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

    def check(self, sites: Sequence[str], settings: Inversion) -> None:
        """Raise the errors of the attacks that can be told before them."""
        for site in sites:
            training, gradient = self._known(site)
            check(training, list(gradient), self._images[site]["image"].shape, settings)

    def _known(self, site: str) -> tuple[KnownTraining, Tensors]:
        """Return the training of a site and the gradient that it sent, before any defence."""
        if site not in self._seen:
            raise ConfigError(
                f"in {self._label!r} no site receives a model, trains it and sends it back, so "
                f"that there is nothing to invert; leave it out, e.g. with algorithm=fedavg"
            )
        received, sent = self._seen[site]
        federation = self._federation
        with ambient(self._seed, "attack"):
            module = federation.builder(self._method.at_site(site))()
        task = federation.task_at(site, federation.sites[site].labelled)
        rate = federation.training.lr_of(1, 1)
        training = KnownTraining(module, task, received, rate, self._steps)
        return training, training.gradient_of(sent - received.select(sent))

    def attack(self, site: str, defence: str, settings: Inversion) -> Attacked:
        """Invert what a site sent under a defence."""
        truth, (training, gradient) = self._images[site], self._known(site)
        made = defence_of(defence)
        left = made.apply(gradient, seed=self._seed)
        rebuilt = rebuild(
            training, left, truth["image"].shape, truth, settings,
            seed=self._seed, clip=made.clip, noise=made.noise_norm(left),
        )  # fmt: skip
        rebuilt = matched(rebuilt, truth["image"])
        dice = mask_dice(training.task, rebuilt, truth) if settings.label == "unknown" else None
        result = InversionResult(
            self._label,
            site,
            defence,
            gradient.numel(),
            sum(p.numel() for p in training.module.parameters() if p.requires_grad),
            bool(torch.equal(rebuilt.label, truth["label"])),
            rebuilt.objective,
            mean_likeness(rebuilt.image, truth["image"]),
            dice,
        )
        return Attacked(result, truth["image"], rebuilt.image)


def matched(rebuilt: Rebuilt, truth: torch.Tensor) -> Rebuilt:
    """Return a result whose images are in the order in which they are nearest to the true ones.

    A gradient is the same for any order of a batch. The assignment is the one with the least sum of
    squared differences.

    Args:
        rebuilt: the result.
        truth: the true images, (B, C, *spatial).
    """
    found = rebuilt.image.flatten(1).double()
    _, order = linear_sum_assignment(torch.cdist(truth.flatten(1).double(), found).square().numpy())
    return replace(rebuilt, image=rebuilt.image[order], label=rebuilt.label[order])


def mean_likeness(images: torch.Tensor, truth: torch.Tensor) -> Likeness:
    """Return the mean likeness of images to the true ones.

    Args:
        images: (B, C, *spatial).
        truth: the true ones, in the same order and of the same shape.

    Raises:
        DataError: a true image is constant.
    """
    each = [asdict(compare(i[None], t[None])) for i, t in zip(images, truth, strict=True)]
    return Likeness(**{name: float(np.mean([one[name] for one in each])) for name in each[0]})


def mask_dice(task: Task, rebuilt: Rebuilt, truth: Batch) -> float | None:
    """Return the mean Dice, as the task scores it, of the masks found; None if it is undefined.

    Args:
        task: the task, a segmentation.
        rebuilt: the result.
        truth: the true batch.
    """
    assert isinstance(task, SegmentationTask)  # an attack on an unknown mask is refused elsewhere
    found = []
    for n, mask in enumerate(rebuilt.label):
        example = Example("", "", {key: t[n : n + 1] for key, t in truth.items()}, None)
        found.append(task.scores(mask[None], example, ["dice"])["dice"])
    defined = [dice for dice in found if dice is not None]
    return float(np.mean(defined)) if defined else None
