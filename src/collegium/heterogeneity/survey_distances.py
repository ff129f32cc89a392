"""The server's side of a survey: from the sites' replies to matrices of distances."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collegium.core.message import Message
from collegium.core.tensors import Tensors
from collegium.errors import DataError, ProtocolError
from collegium.heterogeneity import distances, summaries
from collegium.heterogeneity.distances import Between, CombinedDistances, Normalise
from collegium.heterogeneity.survey import SurveyQuestions

Array = NDArray[np.float64]


@dataclass(frozen=True)
class StatisticsTable:
    """One kind of statistic at all sites.

    Attributes:
        unit: in which all sites measured.
        cases: number of cases by site.
        columns: by column and site the values of the cases, or a summary of them.
    """

    unit: str
    cases: Mapping[str, int]
    columns: Mapping[str, Mapping[str, Any]]


def gather_statistics(
    replies: Iterable[tuple[str, Message]], part: str, questions: SurveyQuestions
) -> StatisticsTable:
    """Put the statistics of all sites side by side.

    A label that a site does not have counts 0 in each of its cases.

    Args:
        replies: pairs of site and reply.
        part: "intensity_maxima" or "label_volumes".
        questions: what the sites were asked for.

    Raises:
        DataError: a site has no training cases, or lacks a channel that others have.
        ProtocolError: the sites measured in different units.
    """
    by_site = {site: message[part] for site, message in replies}
    cases = {site: statistics["cases"] for site, statistics in by_site.items()}
    for site, count in cases.items():
        if not count:
            raise _no_cases(site)
    units = {site: statistics["unit"] for site, statistics in by_site.items()}
    if len(set(units.values())) > 1:
        words = ", ".join(f"{site} in {unit}" for site, unit in units.items())
        raise ProtocolError(
            f"the sites measure in different units ({words}); give all cases a spacing, or set "
            f"units to voxels"
        )
    sent = {site: statistics["columns"] for site, statistics in by_site.items()}
    columns: dict[str, dict[str, Any]] = {name: {} for name in sorted(set().union(*sent.values()))}
    for name, site in itertools.product(columns, sent):
        absent = name not in sent[site]
        if absent and part != "label_volumes":
            raise DataError(
                f"the images of site {site!r} have no channel {name}, which others have; "
                f"set image.channels to grey, rgb or green"
            )
        columns[name][site] = questions.column([0.0] * cases[site]) if absent else sent[site][name]
    return StatisticsTable(next(iter(units.values()), ""), cases, columns)


def metadata_distances(
    replies: Mapping[str, Message], questions: SurveyQuestions, normalise: Normalise
) -> CombinedDistances:
    """Return the distances by the channel and the label in which the sites differ most.

    If no case holds a label, as in regression, intensities alone decide.

    Args:
        replies: by site the parts "intensity_maxima" and "label_volumes".
        questions: what the sites were asked for.
        normalise: see `collegium.heterogeneity.distances.emd_matrix`.

    Raises:
        DataError: a site has no training cases, or lacks a channel that others have.
        ProtocolError: the sites measured in different units.
    """
    tables = [
        gather_statistics(replies.items(), part, questions)
        for part in ("intensity_maxima", "label_volumes")
    ]
    return distances.combine(*(column_distances(table, normalise) for table in tables))


def column_distances(table: StatisticsTable, normalise: Normalise) -> dict[str, Array]:
    """Return one matrix of earth mover's distances per column, from values or from summaries.

    Args:
        table: statistics of all sites.
        normalise: see `collegium.heterogeneity.distances.emd_matrix`.
    """
    matrices = {}
    for name, by_site in table.columns.items():
        of_cases = all(isinstance(column, list) for column in by_site.values())
        emd_matrix = distances.emd_matrix if of_cases else summaries.emd_matrix
        matrices[name] = emd_matrix(by_site, normalise=normalise)
    return matrices


def embedding_distances(replies: Mapping[str, Message], between: Between) -> Array:
    """Return the distances between the sites' embeddings, or between means if only these came.

    Args:
        replies: by site the part "embeddings".
        between: see `collegium.heterogeneity.distances.centroid_distances`.

    Raises:
        DataError: a site has no training cases.
    """
    rows = {site: embedding_rows(site, message) for site, message in replies.items()}
    return distances.centroid_distances(rows, between=between)


def embedding_rows(site: str, reply: Message) -> Array:
    """Return the rows that a site sent: one per case, or their mean.

    Args:
        site: its name.
        reply: holds the part "embeddings".

    Raises:
        DataError: there are none.
    """
    sent: Tensors = reply["embeddings"]
    rows: Array = next(iter(sent.values())).double().numpy()
    if not len(rows):
        raise _no_cases(site)
    return rows


def sketch_distances(replies: Mapping[str, Message], part: str) -> Array:
    """Return the distances between the sites' sketches.

    Shares of labels are compared by Euclidean distance, images and moments by the sum of absolute
    differences.

    Args:
        replies: by site a message that holds the sketch.
        part: "mean_image", "second_moment" or "label_histogram".

    Raises:
        DataError: a sketch is empty, or holds NaN or infinite values.
        ProtocolError: the sketches have different shapes.
    """
    vectors = sketch_vectors(replies.items(), part)
    if part == "label_histogram":
        return distances.euclidean_distances(vectors)
    return distances.l1_distances(vectors)


def sketch_vectors(replies: Iterable[tuple[str, Message]], part: str) -> dict[str, Array]:
    """Return one float64 vector per site from a sketch or a histogram of labels.

    Args:
        replies: pairs of site and reply.
        part: name of the sketch.

    Raises:
        ProtocolError: the sketches have different shapes.
    """
    sketches = {site: message[part] for site, message in replies}
    labels = sorted({label for sketch in sketches.values() for label in sketch})
    vectors = {}
    for site, sketch in sketches.items():
        if isinstance(sketch, Tensors):
            vectors[site] = next(iter(sketch.values())).double().numpy().reshape(-1)
        else:
            vectors[site] = np.array([sketch.get(label, 0.0) for label in labels])
    if len({len(vector) for vector in vectors.values()}) > 1:
        sizes = ", ".join(f"{site} {len(vector)}" for site, vector in vectors.items())
        raise ProtocolError(
            f"the sites' parts {part!r} have different sizes ({sizes}); their images must have as "
            f"many channels and axes"
        )
    return vectors


def _no_cases(site: str) -> DataError:
    return DataError(
        f"site {site!r} has no training cases, so that nothing is known of how far it is from the "
        f"others; add cases or leave the site out"
    )
