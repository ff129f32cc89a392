"""What follows from what the sites told: distances, networks, clusters, and tests of chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from collegium.core.message import Message
from collegium.errors import CollegiumError, DataError
from collegium.heterogeneity import clusters, distances, graphs, proxy
from collegium.heterogeneity.embeddings import component_angle
from collegium.heterogeneity.evidence import Evidence, energy_test, holm, stability
from collegium.heterogeneity.survey import SurveyQuestions
from collegium.heterogeneity.survey_distances import (
    StatisticsTable,
    column_distances,
    embedding_rows,
    gather_statistics,
)

Array = NDArray[np.float64]
Drawn = Mapping[str, NDArray[np.int64]]
"""By site the numbers of the cases that were drawn."""

Kind = Literal["intensity", "label", "embedding"]
NEIGHBOURS = 3
"""Neighbours of a site in the network, as in pFedNet; fewer where there are few sites."""

LIMIT = 400
"""Cases that take part in a test; with more, each site takes part with a share of its own."""


@dataclass(frozen=True)
class Comparison:
    """One test of whether the sites differ by more than chance.

    Attributes:
        kind: what was compared.
        what: the same, for a reader.
        evidence: the test's outcome.
        p_adjusted: its p-value, adjusted for the number of tests.
        fewest: cases of the site that has the fewest.
    """

    kind: Kind
    what: str
    evidence: Evidence
    p_adjusted: float
    fewest: int


@dataclass(frozen=True)
class Column:
    """One quantity at all sites that told it.

    Attributes:
        name: of the channel or label, for a reader.
        unit: of the values.
        told: by site one value per case, sorted, or their summary.
        matrix: earth mover's distances, in the order of ``told``; empty with fewer than two sites.
    """

    name: str
    unit: str
    told: Mapping[str, Any]
    matrix: list[list[float]]


@dataclass(frozen=True)
class Geometry:
    """Distances between the sites by one kind of data.

    Attributes:
        key: "metadata", "normalised" or "embeddings".
        made_of: what the matrix is made of, for a reader.
        sites: in the order of the matrix.
        matrix: distances.
        most_distant: the site whose distances sum to the most; empty with fewer than three sites.
        stability: by site the share of resampled federations in which it is the most distant one;
            empty where cases did not leave the sites.
        edges: of the network of nearest neighbours, as names.
        neighbours: how many neighbours a site names.
        clusters: by rule two clusters; empty with fewer than four sites.
    """

    key: str
    made_of: str
    sites: list[str]
    matrix: list[list[float]]
    most_distant: str
    stability: dict[str, float]
    edges: list[tuple[str, str]]
    neighbours: int
    clusters: dict[str, list[list[str]]]


@dataclass(frozen=True)
class ComponentAngles:
    """Angles between the first principal components of the sites' images, in degrees.

    Attributes:
        sites: in the order of the matrix.
        matrix: of each two sites the angle between the directions that their components have in
            common.
        within: by site the typical angle of one of its components to that direction.
    """

    sites: list[str]
    matrix: list[list[float]]
    within: dict[str, float]


@dataclass(frozen=True)
class Findings:
    """All that the assessment found.

    Attributes:
        cases: number of training cases by site, of the sites that told it.
        intensity: a column per channel.
        labels: a column per label.
        shares: by site the share of each label among all pixels.
        geometries: distances between sites, by metadata and by embeddings.
        angles: between the sites' principal components; None where fewer than two sites told
            theirs, as of tables.
        proxy: proxy A-distances: sites and matrix; None where they cannot be computed.
        tests: of every column and of the embeddings; empty where cases did not leave the sites.
        notes: a sentence for everything that could not be found out.
    """

    cases: dict[str, int]
    intensity: list[Column]
    labels: list[Column]
    shares: dict[str, dict[str, float]]
    geometries: list[Geometry]
    angles: ComponentAngles | None
    proxy: dict[str, Any] | None
    tests: list[Comparison]
    notes: list[str]


def find(
    replies: Mapping[str, Message], questions: SurveyQuestions, classes: Sequence[str], seed: int
) -> Findings:
    """Work out all that can be worked out from what the sites told.

    Args:
        replies: by site what it told.
        questions: what the sites were asked.
        classes: names of the labels, the background first.
        seed: names the generators of the tests.
    """
    notes: list[str] = []
    intensity = _columns(replies, "intensity_maxima", questions, lambda c: f"channel {c}", notes)
    labels = _columns(replies, "label_volumes", questions, lambda v: _class(v, classes), notes)
    rows = _embeddings(replies, notes)
    samples: list[tuple[Kind, str, Mapping[str, Any]]]
    samples = [("intensity", f"the intensity of {c.name}", c.told) for c in intensity]
    samples += [("label", f"the amount of {c.name}", c.told) for c in labels]
    samples += [("embedding", "what a network sees", rows)]
    tests = _tests(samples if questions.summary == "cases" else [], seed)
    return Findings(
        _cases(replies),
        intensity,
        labels,
        _shares(replies, classes),
        _geometries(intensity, labels, rows, questions, seed),
        _angles(replies, notes),
        _proxy(rows, notes) if questions.summary == "cases" else None,
        tests,
        notes,
    )


def _columns(
    replies: Mapping[str, Message],
    part: str,
    questions: SurveyQuestions,
    name_of: Callable[[str], str],
    notes: list[str],
) -> list[Column]:
    """Return what the sites with cases told of one part, column by column."""
    told = {site: m for site, m in replies.items() if part in m and m[part]["cases"]}
    try:
        table = gather_statistics(told.items(), part, questions)
        matrices = column_distances(table, "none")
    except CollegiumError as error:
        notes.append(f"{error}.")
        return []
    return [
        Column(name_of(name), table.unit, values, matrices[name].tolist())
        for name, values in table.columns.items()
    ]


def _class(label: str, classes: Sequence[str]) -> str:
    """Return the name of a label, or the label where it has none."""
    return classes[int(label)] if int(label) < len(classes) else f"label {label}"


def _embeddings(replies: Mapping[str, Message], notes: list[str]) -> dict[str, Array]:
    rows = {}
    for site, message in sorted(replies.items()):
        if "embeddings" in message:
            try:
                rows[site] = embedding_rows(site, message)
            except DataError as error:
                notes.append(f"{error}.")
    if len({table.shape[1:] for table in rows.values()}) > 1:
        notes.append("The sites' images do not have as many channels or axes; no embeddings.")
        return {}
    return rows


def _angles(replies: Mapping[str, Message], notes: list[str]) -> ComponentAngles | None:
    """Return the angles between what the sites told of their first principal components."""
    told = {s: m["components"]["first"] for s, m in sorted(replies.items()) if "components" in m}
    found = {site: tensor.double().numpy() for site, tensor in told.items() if len(tensor)}
    if len(found) < 2:
        return None
    if len({len(direction) for direction in found.values()}) > 1:
        notes.append("The sites' images do not have as many axes; no angles between components.")
        return None
    within = {
        site: math.degrees(math.acos(min(1.0, float(np.linalg.norm(direction)))))
        for site, direction in found.items()
    }
    return ComponentAngles(
        list(found), distances.pair_matrix(found, component_angle).tolist(), within
    )


def _cases(replies: Mapping[str, Message]) -> dict[str, int]:
    """Return the numbers of training cases that can be read off what the sites told."""
    found: dict[str, int] = {}
    for site, message in sorted(replies.items()):
        tables = [message[p] for p in ("intensity_maxima", "label_volumes") if p in message]
        if tables:
            found[site] = tables[0]["cases"]
        elif "embeddings" in message and "cases" in message["embeddings"]:
            found[site] = len(message["embeddings"]["cases"])
    return found


def _shares(replies: Mapping[str, Message], classes: Sequence[str]) -> dict[str, dict[str, float]]:
    told = {s: m["label_histogram"] for s, m in sorted(replies.items()) if "label_histogram" in m}
    return {
        site: {_class(label, classes): share for label, share in shares.items()}
        for site, shares in told.items()
        if shares
    }


def _tests(samples: Sequence[tuple[Kind, str, Mapping[str, Any]]], seed: int) -> list[Comparison]:
    """Test every sample of at least two sites, and adjust for how many there are."""
    usable = [sample for sample in samples if len(sample[2]) > 1]
    dealt = min(1000 * len(usable), 10_000) - 1  # so that the adjustment leaves room below 0.01
    evidence = [
        energy_test(told, permutations=dealt, limit=LIMIT, seed=seed) for _, _, told in usable
    ]
    adjusted = holm([found.p for found in evidence])
    return [
        Comparison(kind, what, found, p, min(map(len, told.values())))
        for (kind, what, told), found, p in zip(usable, evidence, adjusted, strict=True)
    ]


def _proxy(rows: Mapping[str, Array], notes: list[str]) -> dict[str, Any] | None:
    """Return how well a classifier tells the sites apart, of the sites with enough cases."""
    enough = {site: table for site, table in rows.items() if len(table) > 1}
    if len(enough) < 2:
        notes.append("A proxy A-distance takes embeddings of two cases of each of two sites.")
        return None
    return {"sites": list(enough), "matrix": proxy.proxy_a_matrix(enough).tolist()}


def _geometries(
    intensity: Sequence[Column],
    labels: Sequence[Column],
    rows: Mapping[str, Array],
    questions: SurveyQuestions,
    seed: int,
) -> list[Geometry]:
    """Return the distances by metadata, in their units and without, and by embeddings."""
    found = []
    of_cases = questions.summary == "cases"
    told = [set(column.told) for column in (*intensity, *labels)]
    sites = sorted(set.intersection(*told)) if told else []
    if len(sites) > 1:
        first = (*intensity, *labels)[0].told
        counts = {site: len(first[site]) for site in sites} if of_cases else {}
        tables = [
            {c.name: {site: c.told[site] for site in sites} for c in columns}
            for columns in (intensity, labels)
        ]
        units: tuple[tuple[str, distances.Normalise], ...]
        units = ("metadata", "none"), ("normalised", "pooled_std")
        for key, normalise in units:
            measure = partial(_metadata_distances, tables, normalise)
            found.append(_geometry(key, sites, counts, measure, seed))
    if len(rows) > 1:
        counts = {site: len(rows[site]) for site in rows} if of_cases else {}
        measure = partial(_embedding_distances, rows)
        found.append(_geometry("embeddings", list(rows), counts, measure, seed))
    return found


def _metadata_distances(
    tables: Sequence[Mapping[str, Mapping[str, Any]]],
    normalise: distances.Normalise,
    drawn: Drawn | None = None,
) -> tuple[Array, str]:
    """Return distances by the channel and the label that tell sites apart most, and their names.

    ``tables`` holds, of channels and of labels, by column and site the values or their summary.
    """
    if drawn is not None:
        tables = [
            {
                name: {site: np.asarray(column[site])[drawn[site]].tolist() for site in column}
                for name, column in table.items()
            }
            for table in tables
        ]
    kinds = (column_distances(StatisticsTable("", {}, table), normalise) for table in tables)
    combined = distances.combine(*kinds)
    return combined.matrix, " and ".join(combined.names)


def _embedding_distances(
    rows: Mapping[str, Array], drawn: Drawn | None = None
) -> tuple[Array, str]:
    """Return the distances of the sites' mean embeddings, and what they are made of."""
    if drawn is not None:
        rows = {site: table[drawn[site]] for site, table in rows.items()}
    return distances.centroid_distances(rows), "mean embeddings"


def _geometry(
    key: str,
    sites: list[str],
    cases: Mapping[str, int],
    measure: Callable[..., tuple[Array, str]],
    seed: int,
) -> Geometry:
    """Return distances with what they say of neighbours, clusters and the most distant site.

    ``measure`` returns the distances of all cases, or of those drawn, and what they are made of;
    ``cases`` is the number of cases by site, empty if it is not known.
    """

    def farthest(drawn: Drawn | None = None) -> str:
        return sites[clusters.most_distant(measure(drawn)[0])]

    matrix, made_of = measure()
    count = len(sites)
    k = min(NEIGHBOURS, max(1, count - 2))
    near = graphs.edges(graphs.neighbours(matrix, k))
    rules = {"recommended": clusters.clusters, "printed": clusters.printed_clusters}
    groups = {
        name: [[sites[i] for i in members] for members in rule(matrix)]
        for name, rule in rules.items()
        if count >= clusters.SMALLEST
    }
    return Geometry(
        key,
        made_of,
        sites,
        matrix.tolist(),
        farthest() if count > 2 else "",
        stability(cases, farthest, seed=seed) if cases and count > 2 else {},
        [(sites[i], sites[j]) for i, j in near],
        k,
        groups,
    )
