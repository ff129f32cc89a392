"""What sites tell of their data before training: statistics, embeddings and sketches.

An algorithm that wants to know derives from `Surveyed`, says by `inquiry` which parts it needs, and
asks for them in its `setup`: ``server.ask(self.survey)``. Every kind of statistic is a part of its
own, so that a site's egress policy can allow or forbid it by name. Identifiers of cases and
patients never leave, and the order of the cases does not either: columns are sorted, rows shuffled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from collegium.core.algorithm import Client, handler
from collegium.core.dataset import Dataset, Example
from collegium.core.message import Message
from collegium.core.payloads import Features, Numbers, Part, Statistics
from collegium.core.randomness import ambient
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, DataError, ProtocolError

if TYPE_CHECKING:
    from collegium.heterogeneity.embeddings import Encoder

Array = NDArray[np.float64]
Summary = Literal["cases", "histogram", "quantiles"]
Unit = Literal["physical", "voxels"]

PARTS: Mapping[str, Part] = {
    "intensity_maxima": Statistics(says="the largest intensity of each training case, by channel"),
    "label_volumes": Statistics(says="how much of each label each training case holds"),
    "embeddings": Features(says="embeddings of the training images, or their mean"),
    "mean_image": Features(says="the mean of a few training images on a small grid"),
    "second_moment": Features(says="second moments of the pixels of a few small training images"),
    "label_histogram": Numbers(says="the share of each label in the training cases"),
}
"""What a site can be asked for, by the name that an egress policy uses."""

SCANNED = frozenset({"intensity_maxima", "label_volumes", "label_histogram"})
"""The parts for which a site looks at every voxel of every training case."""


@dataclass(frozen=True)
class Inquiry:
    """What a site is asked.

    Attributes:
        parts: names among `PARTS`.
        summary: what leaves of values that belong to one case each. "cases": every value.
            "histogram" and "quantiles": a summary (see `collegium.heterogeneity.summaries`), and of
            the embeddings their mean only.
        bins: number of bins of a histogram, or of steps between quantiles.
        units: "physical": volumes in mL and areas in mm^2 where the cases know their spacing, else
            numbers of voxels; "voxels": always these.
        encoder: the network that embeds an image; see `make_encoder`.
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


def asks(*parts: str) -> dict[str, Part]:
    """Return the entries of ``sends`` for an algorithm that may ask for these parts."""
    return {part: PARTS[part] for part in parts}


class Surveyed:
    """A mix-in for algorithms that ask the sites about their data; name it before `Algorithm`.

    The algorithm declares what it may ask for by `asks`, and what it does ask by `inquiry`.
    """

    def inquiry(self) -> Inquiry:
        """Return what this algorithm, with its hyper-parameters, asks."""
        raise NotImplementedError

    def unused_sends(self) -> Collection[str]:
        """All that the inquiry does not name."""
        return PARTS.keys() - set(self.inquiry().parts)

    @handler
    def survey(self, client: Client, request: Message) -> Message:
        """Answer the inquiry from the site's training cases."""
        return Message(answers(client, self.inquiry()))


def answers(client: Client, inquiry: Inquiry) -> dict[str, Any]:
    """Return what a site says, part by part."""
    wanted = set(inquiry.parts)
    scan = Scan.of(client.examples, inquiry.units) if wanted & SCANNED else Scan()
    takers: dict[str, Callable[[], Any]] = {
        "intensity_maxima": lambda: _table("intensity", scan.maxima, scan.cases, inquiry),
        "label_volumes": lambda: _table(scan.unit, scan.volumes, scan.cases, inquiry),
        "label_histogram": scan.shares,
        "embeddings": lambda: _embeddings(client, inquiry),
        "mean_image": lambda: _mean_image(_few(client, inquiry, "mean_image")),
        "second_moment": lambda: _second_moment(_few(client, inquiry, "second_moment")),
    }
    return {part: takers[part]() for part in inquiry.parts}


@dataclass
class Scan:
    """What one pass over the cases of a site finds.

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
    def of(cls, data: Dataset, units: Unit) -> Scan:
        """Look at every whole case, inside its field of view where it has one.

        Raises:
            DataError: intensities are NaN or infinite, or only some cases know their spacing.
        """
        scan = cls()
        for index in range(len(data)):
            scan._add(data.example(index), units)
        scan.unit = scan.unit or "voxels"
        return scan

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

    def shares(self) -> dict[str, float]:
        """Return the share of each label among all voxels, the background included."""
        total = sum(self.voxels.values())
        return {str(value): count / total for value, count in sorted(self.voxels.items())}


def _label_counts(label: Tensor, inside: Tensor | None) -> dict[int, int]:
    """Count voxels by label; labels that are not whole numbers are none."""
    if label.is_floating_point():
        return {}
    values = label[inside] if inside is not None and inside.shape == label.shape else label
    found, counts = torch.unique(values, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def voxel_size(spacing: tuple[float, ...] | None, units: Unit) -> tuple[str, float]:
    """Return the unit of a volume and how much one voxel is of it.

    Args:
        spacing: millimetres per spatial axis (two or three); None where unknown.
        units: see `Inquiry`.
    """
    if units == "voxels" or spacing is None:
        return "voxels", 1.0
    return ("mL", math.prod(spacing) / 1000) if len(spacing) == 3 else ("mm2", math.prod(spacing))


def _table(
    unit: str, columns: Mapping[str, list[float]], cases: int, inquiry: Inquiry
) -> dict[str, Any]:
    """Write columns of case values as a `Statistics` part: sorted values, or summaries of them."""
    told: dict[str, Any] = {}
    for name, values in sorted(columns.items()):
        told[name] = sorted(values)
        if inquiry.summary != "cases":
            told[name] = _summarised(told[name], inquiry)
    return {"unit": unit, "cases": cases, "columns": told}


def _summarised(values: list[float], inquiry: Inquiry) -> dict[str, list[float]]:
    """Return a histogram or quantiles: edges and counts."""
    from collegium.heterogeneity import summaries

    make = summaries.histogram if inquiry.summary == "histogram" else summaries.quantiles
    return make(values, inquiry.bins)


def embeddings_of(data: Dataset, encoder: Encoder, grid: int) -> Tensor:
    """Return one embedding per case, in the order of the cases: (n, D) float32.

    Args:
        data: whole cases. A volume is embedded as one, whether or not it is trained on in slices;
            what has no spatial axes is its own embedding.
        encoder: takes images (1, channels, *spatial) and gives feature maps (1, C, *spatial').
        grid: see `collegium.heterogeneity.embeddings.embed_image`.
    """
    from collegium.heterogeneity.embeddings import embed_image

    rows = []
    for index in range(len(data)):
        image = data.example(index).image.float()
        if image.ndim > 2:
            whole = image.movedim(0, 1) if len(image) > 1 else image[0]
            rows.append(torch.from_numpy(embed_image(whole, encoder, grid)).float())
        else:
            rows.append(image[0])
    return torch.stack(rows) if rows else torch.zeros(0, 0)


def make_encoder(name: str) -> Encoder:
    """Return an encoder in evaluation mode; random weights are the same at every site.

    Args:
        name: a built-in model such as "resnet18_encoder", or the user's own as "file.py:factory",
            with its default parameters; "resnet18_encoder@file.safetensors" with trained weights.
            Empty: `collegium.heterogeneity.embeddings.SeededEncoder`.

    Raises:
        ConfigError: there is no such model, or the user's factory or the weights cannot be used.
    """
    from collegium.models.factory import MODELS, build_model

    if not name:
        from collegium.heterogeneity.embeddings import SeededEncoder

        return SeededEncoder()
    built_in, _, weights = name.partition("@")
    try:
        with ambient(0, "encoder"):
            if weights and built_in in MODELS:
                return build_model(built_in, weights=weights).eval()
            encoder: Encoder = build_model(name).eval()
    except ConfigError as error:
        raise ConfigError(f"encoder: {error}") from error
    return encoder


def _embeddings(client: Client, inquiry: Inquiry) -> Tensors:
    """One row per case, shuffled; or, where a summary is asked for, their mean alone."""
    rows = embeddings_of(client.examples, make_encoder(inquiry.encoder), inquiry.grid)
    if inquiry.summary != "cases":
        return Tensors({"mean": rows.double().mean(0, keepdim=True).float()[: len(rows)]})
    order = torch.randperm(len(rows), generator=client.rng("embeddings"))
    return Tensors({"cases": rows[order]})


def _few(client: Client, inquiry: Inquiry, purpose: str) -> Tensor:
    """Return a few training images on a small grid: (n, channels, *grid), slices one by one."""
    data = client.examples
    drawn = torch.randperm(len(data), generator=client.rng(purpose))[: inquiry.items]
    images = [data.example(int(index)).image.float() for index in drawn]
    if not images:
        raise ProtocolError(
            f"site {client.id!r} has no training cases to tell of; add some or leave the site out"
        )
    return torch.cat([_on_grid(image, inquiry.size) for image in images])


def _on_grid(image: Tensor, side: int) -> Tensor:
    """Resize (B, C, *spatial) by averaging over areas; what has no spatial axes stays as it is."""
    axes = image.ndim - 2
    if not axes:
        return image
    return torch.nn.functional.interpolate(image, (side,) * axes, mode="area")


def _mean_image(images: Tensor) -> Tensors:
    return Tensors({"mean": images.mean(0)})


def _second_moment(images: Tensor) -> Tensors:
    """Second moments of the pixels over images and channels, the mean of all pixels removed."""
    rows = images.flatten(2).flatten(0, 1) if images.ndim > 2 else images
    rows = rows - rows.mean()
    return Tensors({"moment": rows.T @ rows / len(rows)})


@dataclass(frozen=True)
class Table:
    """What all sites said of one kind of statistic.

    Attributes:
        unit: in which all sites measured.
        cases: number of cases by site.
        columns: by column and site the values of the cases, or a summary of them.
    """

    unit: str
    cases: Mapping[str, int]
    columns: Mapping[str, Mapping[str, Any]]


def gather(replies: Iterable[tuple[str, Message]], part: str, inquiry: Inquiry) -> Table:
    """Put the statistics of all sites side by side.

    A label that a site does not have counts 0 in each of its cases.

    Raises:
        DataError: a site has no training cases, or lacks a channel that others have.
        ProtocolError: the sites measured in different units.
    """
    told = {client: message[part] for client, message in replies}
    empty = [client for client, table in told.items() if not table["cases"]]
    if empty:
        raise DataError(
            f"site {empty[0]!r} has no training cases, so that nothing is known of how far it is "
            f"from the others; add cases or leave the site out"
        )
    units = {client: table["unit"] for client, table in told.items()}
    if len(set(units.values())) > 1:
        words = ", ".join(f"{client} in {unit}" for client, unit in units.items())
        raise ProtocolError(
            f"the sites measure in different units ({words}); give all cases a spacing, or set "
            f"units to voxels"
        )
    columns: dict[str, dict[str, Any]] = {}
    for name in sorted({name for table in told.values() for name in table["columns"]}):
        for client, table in told.items():
            if name not in table["columns"] and part == "intensity_maxima":
                raise DataError(
                    f"the images of site {client!r} have no channel {name}, which others have; "
                    f"set image.channels to grey, rgb or green"
                )
            absent = _table("", {name: [0.0] * table["cases"]}, table["cases"], inquiry)
            column = table["columns"].get(name, absent["columns"][name])
            columns.setdefault(name, {})[client] = column
    return Table(next(iter(units.values()), ""), {c: t["cases"] for c, t in told.items()}, columns)


def vectors(replies: Iterable[tuple[str, Message]], part: str) -> dict[str, Array]:
    """Return one float64 vector per site from a sketch or a histogram of labels.

    Raises:
        ProtocolError: the sketches have different shapes.
    """
    told = {client: message[part] for client, message in replies}
    names = sorted({name for value in told.values() for name in value})
    found = {}
    for client, value in told.items():
        if isinstance(value, Tensors):
            found[client] = next(iter(value.values())).double().numpy().reshape(-1)
        else:
            found[client] = np.array([value.get(name, 0.0) for name in names])
    if len({len(vector) for vector in found.values()}) > 1:
        sizes = ", ".join(f"{client} {len(vector)}" for client, vector in found.items())
        raise ProtocolError(
            f"the sites' parts {part!r} have different sizes ({sizes}); their images must have as "
            f"many channels and axes"
        )
    return found
