"""From what sites told of their data to matrices of distances between them."""

from __future__ import annotations

from collections.abc import Mapping

from collegium.core.message import Message
from collegium.core.tensors import Tensors
from collegium.errors import DataError
from collegium.heterogeneity import distances, summaries
from collegium.heterogeneity.distances import Between, Combined, Normalise
from collegium.heterogeneity.survey import Array, Inquiry, Table, gather


def of_metadata(replies: Mapping[str, Message], inquiry: Inquiry, normalise: Normalise) -> Combined:
    """Return the matrix of the channel and the label that tell the sites apart most.

    Where no case holds a label, as in regression, intensities alone decide.

    Args:
        replies: by site the parts "intensity_maxima" and "label_volumes".
        inquiry: what the sites were asked.
        normalise: see `collegium.heterogeneity.distances.emd_matrix`.

    Raises:
        DataError: a site has nothing to tell.
        ProtocolError: the sites measured in different units.
    """
    intensity = of_columns(gather(replies.items(), "intensity_maxima", inquiry), normalise)
    label = of_columns(gather(replies.items(), "label_volumes", inquiry), normalise)
    if label:
        return distances.combine(intensity, label)
    alone = distances.combine(intensity, intensity)
    return Combined(alone.matrix, alone.modality, "", alone.by_modality, {})


def of_columns(table: Table, normalise: Normalise) -> dict[str, Array]:
    """Return one matrix of earth mover's distances per column, from values or from summaries."""
    matrices = {}
    for name, told in table.columns.items():
        of_cases = all(isinstance(column, list) for column in told.values())
        make = distances.emd_matrix if of_cases else summaries.emd_matrix
        matrices[name] = make(told, normalise=normalise)
    return matrices


def of_embeddings(replies: Mapping[str, Message], between: Between) -> Array:
    """Return the distances of the sites' embeddings, of which the means may be all that is known.

    Raises:
        DataError: a site has nothing to tell.
    """
    return distances.centroid_distances(
        {site: embeddings_in(site, message) for site, message in replies.items()}, between=between
    )


def embeddings_in(site: str, message: Message) -> Array:
    """Return the rows that a site sent: one per case, or their mean.

    Raises:
        DataError: there are none.
    """
    told: Tensors = message["embeddings"]
    rows: Array = next(iter(told.values())).double().numpy()
    if not len(rows):
        raise DataError(
            f"site {site!r} has no training cases, so that nothing is known of how far it is from "
            f"the others; add cases or leave the site out"
        )
    return rows
