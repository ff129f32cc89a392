"""Counts of lesions, against components and overlaps that scipy and numpy find lesion by lesion."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage

from collegium.tasks.metrics.lesions import LesionCounts, count_lesions

Mask = NDArray[np.bool_]


def spots(seed: int, shape: tuple[int, ...], share: float) -> Mask:
    noise = ndimage.gaussian_filter(np.random.default_rng(seed).random(shape), 0.8)
    found: Mask = noise > np.quantile(noise, 1 - share)
    return found


def components(mask: Mask) -> list[Mask]:
    every = ndimage.generate_binary_structure(mask.ndim, mask.ndim)
    labels, count = ndimage.label(mask, structure=every)
    return [labels == number for number in range(1, count + 1)]


def one_by_one(predicted: Mask, true: Mask, least: float) -> LesionCounts:
    """The same from every pair of components."""

    def meet(a: Mask, b: Mask) -> bool:
        return bool((a & b).any()) and (a & b).sum() / (a | b).sum() >= least

    lesions, guesses = components(true), components(predicted)
    found = sum(any(meet(lesion, guess) for guess in guesses) for lesion in lesions)
    wrong = sum(not any(meet(lesion, guess) for lesion in lesions) for guess in guesses)
    return LesionCounts(len(lesions), found, wrong)


@pytest.mark.parametrize("least", [0.0, 0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(40, 30), (12, 10, 9)])
def test_counts_are_those_of_every_pair(shape: tuple[int, ...], least: float) -> None:
    for seed in range(12):
        true = spots(seed, shape, 0.15)
        predicted = true & spots(seed + 50, shape, 0.6) | spots(seed + 100, shape, 0.03)
        expected = one_by_one(predicted, true, least)
        assert expected.lesions > 3
        assert count_lesions(predicted, true, least) == expected


def test_components_that_touch_at_a_corner_are_one_lesion() -> None:
    true = np.eye(4, dtype=bool)
    assert count_lesions(true, true) == LesionCounts(1, 1, 0)
    cube = np.zeros((2, 2, 2), bool)
    cube[0, 0, 0] = cube[1, 1, 1] = True
    assert count_lesions(cube, cube).lesions == 1


def test_one_common_voxel_finds_a_lesion_unless_an_overlap_is_asked_for() -> None:
    true, predicted = np.zeros((2, 3, 12), bool)
    true[1, 1:5] = True
    predicted[1, 4:8] = True  # 1 of 7
    true[1, 9:11] = predicted[1, 9:12] = True  # 2 of 3
    assert count_lesions(predicted, true) == LesionCounts(2, 2, 0)
    assert count_lesions(predicted, true, 1 / 7) == LesionCounts(2, 2, 0)
    assert count_lesions(predicted, true, 0.2) == LesionCounts(2, 1, 1)
    assert count_lesions(predicted, true, 1.0) == LesionCounts(2, 0, 2)


def test_one_component_may_find_several_lesions_and_several_may_find_one() -> None:
    true, predicted = np.zeros((2, 3, 9), bool)
    true[1, [1, 3, 5]] = True
    predicted[1, 1:6] = True
    assert count_lesions(predicted, true) == LesionCounts(3, 3, 0)
    assert count_lesions(true, predicted) == LesionCounts(1, 1, 0)


@pytest.mark.parametrize("shape", [(0, 0), (4, 5), (3, 4, 2)])
def test_where_nothing_is_nothing_is_counted(shape: tuple[int, ...]) -> None:
    nothing, everything = np.zeros(shape, bool), np.ones(shape, bool)
    some = int(everything.any())
    assert count_lesions(nothing, nothing) == LesionCounts(0, 0, 0)
    assert count_lesions(everything, nothing) == LesionCounts(0, 0, some)
    assert count_lesions(nothing, everything) == LesionCounts(some, 0, 0)
