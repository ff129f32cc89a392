"""Counts of lesions: connected components of truth and prediction, and which of them meet."""

from dataclasses import dataclass

import numpy as np

from collegium.tasks.metrics.surface import Mask


@dataclass(frozen=True)
class LesionCounts:
    """The number of lesions, and of what was predicted of them.

    Attributes:
        lesions: The components of the truth.
        found: How many of these a predicted component finds.
        false_positives: How many predicted components find none.
    """

    lesions: int
    found: int
    false_positives: int


def count_lesions(predicted: Mask, true: Mask, least_overlap: float = 0.0) -> LesionCounts:
    """Return the counts of lesions, which are components that touch by face, edge or corner.

    A predicted component finds a lesion if both have a voxel in common and their IoU is at least
    `least_overlap`. Above 0.5 a component finds one lesion at most; below, one component may find
    several, and several may find one lesion, none of which then is a false positive.

    Args:
        predicted: Where lesions were predicted, of any shape.
        true: Where they are, of the same shape.
        least_overlap: The least IoU, in [0, 1]; 0: any common voxel suffices.
    """
    from scipy import ndimage

    neighbours = np.ones((3,) * true.ndim)
    (guesses, predictions), (lesions, count) = (
        ndimage.label(mask, structure=neighbours) for mask in (predicted, true)
    )
    common = predicted & true
    pairs, shared = np.unique(
        np.stack([lesions[common], guesses[common]]), axis=1, return_counts=True
    )
    sizes = np.bincount(lesions.ravel())[pairs[0]] + np.bincount(guesses.ravel())[pairs[1]]
    finds = shared / (sizes - shared) >= least_overlap
    found, finding = (np.unique(side[finds]).size for side in pairs)
    return LesionCounts(int(count), found, int(predictions) - finding)
