"""Inverts what algorithms share beside models: amplitudes, statistics and embeddings of images.

The parts are those that an algorithm declares in ``sends``, and the inverter follows from what a
part's schema says that it holds. Each attack is compared with what an attacker has without the
part, the mean of images of his own: those of the other site that has the most alike one, judged by
what it would have sent.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from collegium.core.algorithm import Algorithm
from collegium.core.payloads import Features, ModelPart, PartSchema, Spectra
from collegium.core.randomness import ambient, generator
from collegium.core.tensors import Tensors
from collegium.diagnostics.attacks.features import embedding_of, latent_of
from collegium.diagnostics.attacks.inversion import DEFAULT, Inversion
from collegium.diagnostics.attacks.inverters import (
    BOUND,
    Amplitudes,
    Attack,
    Attacker,
    GridImage,
    Inverter,
    Moments,
    NetworkFeatures,
    SecondMoments,
    resized,
)
from collegium.diagnostics.attacks.likeness import Likeness, compare
from collegium.diagnostics.attacks.opening import open_attacked
from collegium.diagnostics.attacks.phases import withdrawn
from collegium.diagnostics.attacks.sent_parts import SentPart, collect_parts
from collegium.errors import ConfigError
from collegium.experiment.config.building import build_algorithm
from collegium.experiment.config.experiment import AlgorithmConfig, ExperimentConfig
from collegium.experiment.federation import as_trained_by, for_training
from collegium.heterogeneity.embeddings import make_encoder
from collegium.heterogeneity.survey import SurveyMixin
from collegium.runtime.federation import Federation

OWN = "own images only"
"""The name of the attack without the part: the mean of the attacker's own images."""

IMAGE, MEAN, WITHDRAWN = "one image", "a mean", "two means"
"""The numbers that are inverted: of an image, of the mean of several, of one from two means."""

MOST_OWN = 64
"""So many images of another site at most does an attacker use as his own."""

KINDS: Mapping[str, Callable[[Tensor], Inverter]] = {
    "amplitudes": partial(Amplitudes, by_pixels=True),
    "moments": Moments,
    "image": GridImage,
    "second moments": SecondMoments,
}
"""The inverters, by contents, of what is sent as one tensor over all images."""

BY_ROW = frozenset({"embeddings", "latent"})
"""The contents that have a row for each image, for their mean, or for the mean of each class."""

LINEAR = frozenset({"amplitudes", "moments", "image"})
"""The contents whose mean over n images, less that over n - 1, gives the last one's numbers."""


@dataclass(frozen=True)
class SharedResult:
    """The result of an inversion of a shared part.

    Attributes:
        algorithm: label of the algorithm.
        site: the site whose part it is.
        part: name of the part, and of several means in it the number.
        of: `IMAGE`, `MEAN` or `WITHDRAWN`.
        attack: name of the attack.
        numbers: how many independent numbers were inverted.
        pixels: how many the image has, in all channels.
        images: with how many images the rebuilt one was compared; the likeness is that of the most
            alike.
        apart: how far the numbers are from those of that image, relative to their norm.
        own_psnr: PSNR of the mean of the attacker's own images with that image.
        likeness: of the rebuilt image and that image.
    """

    algorithm: str
    site: str
    part: str
    of: str
    attack: str
    numbers: int
    pixels: int
    images: int
    apart: float
    own_psnr: float
    likeness: Likeness


@dataclass(frozen=True)
class Inverted:
    """A result with its images, (1, C, *spatial), which are not for everybody."""

    result: SharedResult
    truth: Tensor
    image: Tensor


@dataclass(frozen=True)
class NotTried:
    """Parts from which nothing is rebuilt, and why, in the words that end the sentence."""

    algorithm: str
    parts: Sequence[str]
    why: str


@dataclass(frozen=True)
class _View:
    """Numbers of a part, and the images that they could be of."""

    name: str
    of: str
    inverter: Inverter
    truths: Sequence[Tensor]


def has_inverter(schema: PartSchema) -> bool:
    """Return whether there is an inverter for what a part holds.

    Args:
        schema: of the part.
    """
    return isinstance(schema, Spectra) or (isinstance(schema, Features) and bool(schema.holds))


def invert_shared(
    config: ExperimentConfig,
    settings: Inversion = DEFAULT,
    *,
    sites: Sequence[str] = (),
    case: int = 0,
    notice: Callable[[str], None] = lambda text: None,
) -> Iterator[Inverted | NotTried]:
    """Invert the parts beside models that sites send, and yield results and what was not tried.

    The algorithms run as in the experiment with its first seed, without codecs and masks, until
    each part was sent once: before training, or in the first round. The images are those that the
    site looked at for the part, as they enter the network or, of embeddings and sketches, whole.

    Args:
        config: the experiment.
        settings: of feature inversion; of phase retrieval the steps and restarts count.
        sites: the sites whose parts are inverted; empty: the first.
        case: the number of the image, from 0, among those that a site sent something of, and of
            the patient who is withdrawn from a mean.
        notice: called with a sentence before each part is inverted.

    Raises:
        ConfigError: no algorithm sends a part that can be inverted, there is no such site or image,
            or cases are rows of a table.
        CollegiumError: in one sentence, whatever else cannot work.
    """
    opened, chosen = open_attacked(config, sites)
    if opened.task_name == "table":
        raise ConfigError(
            "inversion rebuilds images, and the cases here are rows of a table; choose --kind "
            "membership"
        )
    methods = [(algorithm, build_algorithm(algorithm)) for algorithm in config.algorithms]
    if not any(map(has_inverter, (s for _, m in methods for s in m.all_sends().values()))):
        labels = ", ".join(algorithm.label for algorithm in config.algorithms)
        raise ConfigError(
            f"nothing that could be inverted is sent beside models by {labels}; choose feddg, "
            f"resfim, harmofl, fedrdn, pfednet or distance with kind: embedding, or --kind "
            f"inversion for what models give away"
        )
    for algorithm, method in methods:
        with tempfile.TemporaryDirectory(prefix="collegium-attack-") as folder:
            trained = for_training(config, opened, Path(folder))
            federation = as_trained_by(trained, config, algorithm)
            federation.check(method)
            yield from _Shared(config, algorithm, method, federation).inverted(
                settings, chosen, case, notice
            )


class _Shared:
    """Inverts what one algorithm shares.

    Args:
        config: the experiment.
        algorithm: the algorithm.
        method: the same, built.
        federation: the sites.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        algorithm: AlgorithmConfig,
        method: Algorithm,
        federation: Federation,
    ) -> None:
        self._label, self._method, self._federation = algorithm.label, method, federation
        self._seed, self._rounds = config.seeds[0], config.rounds
        others = {
            name: schema
            for name, schema in method.all_sends().items()
            if not isinstance(schema, ModelPart)
        }
        self._schemas = {name: s for name, s in others.items() if has_inverter(s)}
        self._rest = [name for name in others if name not in self._schemas]

    def inverted(
        self,
        settings: Inversion,
        sites: Sequence[str],
        case: int,
        notice: Callable[[str], None],
    ) -> Iterator[Inverted | NotTried]:
        """Yield the results of each part, and what was not tried. See `invert_shared`."""
        found = self._collect() if self._schemas else {}
        for site in sites:
            for part in self._schemas:
                if (site, part) not in found:
                    why = f"{site} sent none before training or in the first round"
                    yield NotTried(self._label, [part], why)
                    continue
                notice(f"{self._label}: what {site} sends as {part}")
                yield from self._part(site, part, found, settings, case)
        if self._rest:
            yield NotTried(self._label, self._rest, "there is no inverter for such parts")

    def _collect(self, without: tuple[str, int] | None = None) -> dict[tuple[str, str], SentPart]:
        with tempfile.TemporaryDirectory(prefix="collegium-attack-") as folder:
            return collect_parts(
                self._method, self._federation, self._schemas, Path(folder),
                seed=self._seed, rounds=self._rounds, without=without,
            )  # fmt: skip

    def _part(
        self,
        site: str,
        part: str,
        found: Mapping[tuple[str, str], SentPart],
        settings: Inversion,
        case: int,
    ) -> Iterator[Inverted | NotTried]:
        """Yield the results of one part of one site."""
        whole, sent = self._holds(part) == "embeddings", found[site, part]
        images = _images_of(sent.images, whole=whole)
        if not 0 <= case < len(sent.images):
            raise ConfigError(
                f"site {site!r} sent {part!r} of {len(sent.images)} images, and there is no image "
                f"{case} among them; choose a smaller number, from 0"
            )
        own = self._own_images(site, part, images[case].shape)
        if not own:
            why = "no other site has training images, with which an attacker begins"
            yield NotTried(self._label, [part], why)
            return
        for view in self._views(site, part, sent, images, case):
            yield from self._inverted(site, view, own, settings)

    def _own_images(self, site: str, part: str, shape: Sequence[int]) -> Mapping[str, Tensor]:
        """Return training images of the other sites, as the part is made of, by site (N, *shape).

        They are training samples where amplitudes or latent features are sent, otherwise whole
        images, which are brought to the size.
        """
        found = dict[str, Tensor]()
        for other, theirs in self._federation.sites.items():
            data, images = theirs.train, dict[int, Tensor]()
            for number in range(min(len(data), MOST_OWN) if other != site else 0):
                rng = generator(self._seed, "attack", "own", other, number)
                sample = self._holds(part) in ("", "amplitudes", "latent")
                images[number] = (
                    data.batch([number], [rng])["image"] if sample else data.example(number).image
                )
            whole = self._holds(part) == "embeddings"
            fitting = [
                resized(image, shape[1:])
                for image in _images_of(images, whole=whole)
                if len(image) == shape[0]
            ]
            if fitting:
                found[other] = torch.stack(fitting)
        return found

    def _holds(self, part: str) -> str:
        schema = self._schemas[part]
        return schema.holds if isinstance(schema, Features) else ""

    def _views(
        self, site: str, part: str, sent: SentPart, images: Sequence[Tensor], case: int
    ) -> Iterator[_View]:
        """Yield the numbers that are inverted, and the images that they could be of."""
        truth = images[case]
        slices = [one for image in sent.images.values() for one in image]
        same = [one for one in slices if one.shape == truth.shape] or [truth]
        if isinstance(self._schemas[part], Spectra):
            yield _View(part, IMAGE, Amplitudes(sent.value["windows"][case]), [truth])
            return
        (value,) = sent.value.values()
        holds, count = self._holds(part), len(sent.images)
        if holds in BY_ROW:
            features = self._features(site, holds, value.shape[1:], sent.model)
            rows = [NetworkFeatures(row, features) for row in value]
            if len(rows) == count:  # in any order
                yield _View(part, IMAGE, min(rows, key=lambda row: row.apart(truth)), [truth])
            else:
                alike = [image for image in images if image.shape == truth.shape]
                for number, row in enumerate(rows):
                    if row.value.any():  # no image of this class
                        name = part if len(rows) == 1 else f"{part} {number}"
                        yield _View(name, MEAN, row, alike)
            return
        kind = KINDS[holds]
        yield _View(part, MEAN if count > 1 else IMAGE, kind(value), same)
        if holds in LINEAR and 1 < count == len(slices):
            number = [*sent.images][case]
            rest = self._collect((site, number))[site, part].value
            added = withdrawn(value, count, next(iter(rest.values())))
            yield _View(part, WITHDRAWN, kind(added), [truth])

    def _features(
        self, site: str, holds: str, shape: Sequence[int], model: Tensors
    ) -> Callable[[Tensor], Tensor]:
        """Return what makes the features of an image, differentiably."""
        if holds == "embeddings":
            if not isinstance(self._method, SurveyMixin):
                raise ConfigError(
                    f"{self._label} declares embeddings, which are those of a survey; let it "
                    f"derive from SurveyMixin, or declare what it sends as latent"
                )
            asked = self._method.questions()
            return partial(embedding_of, encoder=make_encoder(asked.encoder), grid=asked.grid)
        with ambient(self._seed, "attack"):
            module = self._federation.builder(self._method.at_site(site))()
        module.load_state_dict(dict(model))
        module.double().eval().requires_grad_(requires_grad=False)
        return partial(latent_of, module=module, shape=shape)

    def _inverted(
        self,
        site: str,
        view: _View,
        own: Mapping[str, Tensor],
        settings: Inversion,
    ) -> Iterator[Inverted]:
        """Yield the results of all attacks on some numbers."""
        inverter, first = view.inverter, view.truths[0]
        distances = {other: min(map(inverter.apart, images)) for other, images in own.items()}
        images = own[min(distances, key=lambda other: distances[other])]
        mean = images.double().mean(0)
        attacker = Attacker(images, settings, self._seed)
        base = SharedResult(
            self._label, site, view.name, view.of, OWN, inverter.numbers, first.numel(),
            len(view.truths), 0.0, 0.0, compare(mean[None], first[None]),
        )  # fmt: skip
        attacks: list[Attack] = [
            (OWN, lambda truth: mean),
            *inverter.attacks(tuple(first.shape), attacker),
        ]
        for name, make in attacks:
            if name == BOUND and len(view.truths) > 1:
                continue  # of a mean there are no true phases
            pairs = [(make(truth)[None], truth[None]) for truth in view.truths]
            likenesses = [compare(*pair) for pair in pairs]
            best = max(range(len(pairs)), key=lambda place: likenesses[place].correlation)
            (image, truth), likeness = pairs[best], likenesses[best]
            result = replace(
                base, attack=name, apart=inverter.apart(truth[0]), likeness=likeness,
                own_psnr=compare(mean[None], truth).psnr,
            )  # fmt: skip
            yield Inverted(result, truth, image)


def _images_of(images: Mapping[int, Tensor], *, whole: bool) -> list[Tensor]:
    """Return the images of the cases, (C, *spatial): a volume as one, or its first slice."""
    return [
        image.movedim(0, 1) if whole and len(image) > 1 else image[0] for image in images.values()
    ]
