"""A survey of the sites' data before training: statistics, embeddings and sketches.

An algorithm that needs one derives from `SurveyMixin`, names the parts that it needs by
`questions`, and asks for them in its `setup` by `collect_statistics`. Every kind of statistic is a
part of its own, so that a site's egress policy can allow or forbid it by name. Identifiers of cases
and patients never leave, and neither does the order of the cases: columns are sorted, rows
shuffled. `collegium.heterogeneity.survey_distances` turns the replies into distances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from collegium.core.algorithm import Client, Server, handler
from collegium.core.dataset import Dataset, Example
from collegium.core.lazy import functional, torch
from collegium.core.message import Message
from collegium.core.payloads import Features, Numbers, PartSchema, Statistics
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, DataError, ProtocolError
from collegium.heterogeneity import summaries
from collegium.heterogeneity.embeddings import embed_with_components, make_encoder, mean_direction

if TYPE_CHECKING:
    from torch import Tensor

Summary = Literal["cases", "histogram", "quantiles"]
Unit = Literal["physical", "voxels"]

PARTS: Mapping[str, PartSchema] = {
    "intensity_maxima": Statistics(
        description="the largest intensity of each training case, by channel"
    ),
    "label_volumes": Statistics(description="how much of each label each training case holds"),
    "embeddings": Features(
        description="embeddings of the training images, or their mean",
        by_case=True,
        holds="embeddings",
    ),
    "components": Features(
        description="the direction that the first principal components of the training images' "
        "feature maps have in common",
        most=1 << 20,
    ),
    "mean_image": Features(
        description="the mean of a few training images on a small grid",
        most=1 << 20,
        holds="image",
    ),
    "second_moment": Features(
        description="second moments of the pixels of a few small training images",
        holds="second moments",
    ),
    "label_histogram": Numbers(description="the share of each label in the training cases"),
}
"""What a site can be asked for, by the name that an egress policy uses."""

VOXEL_PARTS = frozenset({"intensity_maxima", "label_volumes", "label_histogram"})
"""The parts for which a site reads every voxel of every training case."""


@dataclass(frozen=True)
class SurveyQuestions:
    """The questions that the sites are asked.

    Attributes:
        parts: names among `PARTS`.
        summary: what leaves of values that belong to one case each. "cases": every value.
            "histogram" and "quantiles": a summary (see `collegium.heterogeneity.summaries`), and of
            the embeddings their mean only.
        bins: number of bins of a histogram, or of steps between quantiles.
        units: "physical": volumes in mL and areas in mm^2 if the cases know their spacing,
            otherwise numbers of voxels; "voxels": always these.
        encoder: the network that embeds an image; see
            `collegium.heterogeneity.embeddings.make_encoder`.
        grid: side of the grid to which images are resized before they are embedded.
        items: how many training images, drawn at random, a sketch is made from.
        size: side of the grid of a sketch.
    """

    parts: tuple[str, ...]
    summary: Summary = "cases"
    bins: int = 32
    units: Unit = "physical"
    encoder: str = ""
    grid: int = 64
    items: int = 16
    size: int = 16

    def __post_init__(self) -> None:
        unknown = sorted(set(self.parts) - PARTS.keys())
        if unknown:
            raise ConfigError(f"a survey knows no {unknown[0]!r}; choose among {', '.join(PARTS)}")
        for name, choices in (("summary", get_args(Summary)), ("units", get_args(Unit))):
            if getattr(self, name) not in choices:
                words = ", ".join(choices)
                raise ConfigError(f"{name} is {getattr(self, name)!r}; choose one of {words}")
        for name in ("bins", "grid", "items", "size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; choose at least 1")

    def column(self, values: Sequence[float]) -> list[float] | dict[str, list[float]]:
        """Return what leaves of one value per case: sorted values, or their summary."""
        if self.summary == "cases":
            return sorted(values)
        make = summaries.histogram if self.summary == "histogram" else summaries.quantiles
        return make(sorted(values), self.bins)


def survey_parts(*parts: str) -> dict[str, PartSchema]:
    """Return the entries of ``sends`` for an algorithm that may ask for these parts."""
    return {part: PARTS[part] for part in parts}


class SurveyMixin:
    """A mix-in for algorithms that survey the sites' data; name it before `Algorithm`.

    The algorithm declares what it may ask for by `survey_parts`, and what it does ask for by
    `questions`.
    """

    def questions(self) -> SurveyQuestions:
        """Return what this algorithm, with its hyper-parameters, asks for."""
        raise NotImplementedError

    def unused_sends(self) -> Collection[str]:
        """Return all parts that the questions do not name."""
        return PARTS.keys() - set(self.questions().parts)

    def collect_statistics(self, server: Server) -> dict[str, Message]:
        """Ask all sites, and return their replies in sorted order of the sites.

        Raises:
            ProtocolError: a site did not reply.
        """
        replies = dict(server.ask(self.survey).items())
        missing = [site for site in server.clients if site not in replies]
        if missing:
            raise ProtocolError(
                f"site {missing[0]!r} sent no {' and no '.join(self.questions().parts)}, so "
                f"that nothing is known of how far it is from the others; start again when it "
                f"answers, or leave it out"
            )
        return replies

    @handler
    def survey(self, client: Client, request: Message) -> Message:
        """Compute the statistics from the site's training cases.

        Args:
            client: the site.
            request: nothing; both sides know the questions.
        """
        return Message(site_statistics(client, self.questions()))


def site_statistics(client: Client, questions: SurveyQuestions) -> dict[str, Any]:
    """Return what a site replies, part by part.

    Args:
        client: lends its training examples and random generators.
        questions: what it is asked for.

    Raises:
        DataError: intensities are NaN or infinite, or only some cases know their spacing.
        ProtocolError: there are no training images to make a sketch from.
    """
    data, asked = client.examples, set(questions.parts)

    @cache
    def embedded() -> tuple[Tensor, Tensor]:
        return embed_with_components(data, make_encoder(questions.encoder), questions.grid)

    cases = CaseStatistics()
    if asked & VOXEL_PARTS:
        cases = CaseStatistics.of(data, questions.units)
    compute: dict[str, Callable[[], Any]] = {
        "intensity_maxima": lambda: _columns("intensity", cases.maxima, cases.cases, questions),
        "label_volumes": lambda: _columns(cases.unit, cases.volumes, cases.cases, questions),
        "label_histogram": cases.label_shares,
        "embeddings": lambda: _embeddings(client, questions, embedded()[0]),
        "components": lambda: Tensors(
            {"first": torch.from_numpy(mean_direction(embedded()[1].numpy())).float()}
        ),
        "mean_image": lambda: Tensors({"mean": _sketched(client, questions, "mean_image").mean(0)}),
        "second_moment": lambda: _second_moment(_sketched(client, questions, "second_moment")),
    }
    return {part: compute[part]() for part in questions.parts}


@dataclass
class CaseStatistics:
    """The statistics of a site's cases, from one pass over their voxels.

    Attributes:
        maxima: by channel ("1", "2", ...) the largest intensity of each case.
        volumes: by label above 0 how much of it each case holds; a label that a case does not
            have counts 0.
        unit: of the volumes: "mL", "mm2" or "voxels".
        voxels: by label, the background included, the number of voxels in all cases.
        cases: how many cases there are.
    """

    maxima: dict[str, list[float]] = field(default_factory=dict)
    volumes: dict[str, list[float]] = field(default_factory=dict)
    unit: str = ""
    voxels: dict[int, int] = field(default_factory=dict)
    cases: int = 0

    @classmethod
    def of(cls, data: Dataset, units: Unit) -> CaseStatistics:
        """Read every whole case, inside its field of view if it has one.

        Args:
            data: training examples.
            units: see `SurveyQuestions`.

        Raises:
            DataError: intensities are NaN or infinite, or only some cases know their spacing.
        """
        found = cls()
        for index in range(len(data)):
            found._add(data.example(index), units)
        found.unit = found.unit or "voxels"
        return found

    def _add(self, example: Example, units: Unit) -> None:
        image, label = example.image, example.batch["label"]
        inside = example.batch.get("mask")
        pixels = image.movedim(1, 0).reshape(image.shape[1], -1)
        if inside is not None and inside.any():
            pixels = pixels[:, inside.reshape(-1)]
        for channel, value in enumerate(pixels.amax(1).tolist(), start=1):
            if not math.isfinite(value):
                raise DataError(
                    f"case {example.case}: channel {channel} holds NaN or infinite intensities"
                )
            self.maxima.setdefault(str(channel), []).append(value)
        unit, size = voxel_size(example.spacing, units)
        if self.unit not in ("", unit):
            raise DataError(
                f"case {example.case} is measured in {unit}, cases before it in {self.unit}; "
                f"give all cases a spacing, or set units to voxels"
            )
        self.unit = unit
        counts = _label_counts(label, inside)
        for value in counts.keys() | {int(name) for name in self.volumes}:
            if value > 0:
                column = self.volumes.setdefault(str(value), [0.0] * self.cases)
                column.append(counts.get(value, 0) * size)
        for value, count in counts.items():
            self.voxels[value] = self.voxels.get(value, 0) + count
        self.cases += 1

    def label_shares(self) -> dict[str, float]:
        """Return the share of each label among all voxels, the background included."""
        total = sum(self.voxels.values())
        return {str(value): count / total for value, count in sorted(self.voxels.items())}


def _label_counts(label: Tensor, inside: Tensor | None) -> dict[int, int]:
    """Return the number of voxels by label; there are none if labels are not whole numbers."""
    if label.is_floating_point():
        return {}
    values = label[inside] if inside is not None and inside.shape == label.shape else label
    found, counts = torch.unique(values, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def voxel_size(spacing: tuple[float, ...] | None, units: Unit) -> tuple[str, float]:
    """Return the unit of a volume and how much of it one voxel is.

    Args:
        spacing: millimetres per spatial axis (two or three); None if unknown.
        units: see `SurveyQuestions`.
    """
    if units == "voxels" or spacing is None:
        return "voxels", 1.0
    return ("mL", math.prod(spacing) / 1000) if len(spacing) == 3 else ("mm2", math.prod(spacing))


def _columns(
    unit: str, columns: Mapping[str, list[float]], cases: int, questions: SurveyQuestions
) -> dict[str, Any]:
    """Return columns of case values as a `Statistics` part."""
    sent = {name: questions.column(values) for name, values in sorted(columns.items())}
    return {"unit": unit, "cases": cases, "columns": sent}


def _embeddings(client: Client, questions: SurveyQuestions, rows: Tensor) -> Tensors:
    """Return one row per case, shuffled; if a summary is asked for, their mean alone."""
    if questions.summary != "cases":
        return Tensors({"mean": rows.double().mean(0, keepdim=True).float()[: len(rows)]})
    order = torch.randperm(len(rows), generator=client.rng("embeddings"))
    return Tensors({"cases": rows[order]})


def _sketched(client: Client, questions: SurveyQuestions, purpose: str) -> Tensor:
    """Return a few training images on a small grid: (n, channels, *grid), slices one by one."""
    data = client.examples
    drawn = torch.randperm(len(data), generator=client.rng(purpose))[: questions.items]
    images = [data.example(int(index)).image.float() for index in drawn]
    if not images:
        raise ProtocolError(
            f"site {client.id!r} has no training cases to describe; add some or leave the site out"
        )
    axes = images[0].ndim - 2
    if axes:
        images = [
            functional.interpolate(image, (questions.size,) * axes, mode="area") for image in images
        ]
    return torch.cat(images)


def _second_moment(images: Tensor) -> Tensors:
    """Return second moments of the pixels over images and channels, less the mean of all pixels."""
    rows = images.flatten(2).flatten(0, 1) if images.ndim > 2 else images
    rows = rows - rows.mean()
    return Tensors({"moment": rows.T @ rows / len(rows)})
