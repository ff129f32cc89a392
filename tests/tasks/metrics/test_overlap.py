from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import ndimage
from scipy.spatial.distance import directed_hausdorff

from collegium.tasks.metrics import overlap
from collegium.tasks.metrics.overlap import (
    box_plot_summary,
    sdwd,
    structures_of,
)


def blobs(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A smooth random structure."""
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).numpy()
    return torch.from_numpy(ndimage.gaussian_filter(noise, 2) > 0.5).long()


def dice(prediction: torch.Tensor, label: torch.Tensor, **more: Any) -> float | None:
    return overlap.dice(structures_of(prediction, label, **more))


def iou(prediction: torch.Tensor, label: torch.Tensor, **more: Any) -> float | None:
    return overlap.iou(structures_of(prediction, label, **more))


def hd95(prediction: torch.Tensor, label: torch.Tensor, **more: Any) -> float | None:
    return overlap.hd95(structures_of(prediction, label, **more))


def surface(structure: np.ndarray) -> np.ndarray:
    edge: np.ndarray = structure & ~ndimage.binary_erosion(structure)
    return edge


def hd95_by_distance_transform(
    found: np.ndarray, true: np.ndarray, spacing: tuple[float, ...]
) -> float:
    a, b = surface(found), surface(true)
    to_b = ndimage.distance_transform_edt(~b, sampling=spacing)[a]
    to_a = ndimage.distance_transform_edt(~a, sampling=spacing)[b]
    return float(max(np.percentile(to_b, 95), np.percentile(to_a, 95)))


def test_dice_is_that_of_the_foreground(golden) -> None:
    case = golden("dice_conventions")
    pred, true = (torch.tensor(case["inputs"][key]) for key in ("pred", "gt"))
    expected = case["expected"]
    assert dice(pred, true) == pytest.approx(expected["volume_fg"], abs=1e-9)
    per_slice = [dice(p, t) for p, t in zip(pred, true, strict=True)]
    assert per_slice == pytest.approx(expected["per_slice_fg"], abs=1e-9)


def test_overlap_of_known_sets() -> None:
    found, true = torch.tensor([1, 1, 1, 0, 0]), torch.tensor([0, 1, 1, 1, 1])
    assert dice(found, true) == pytest.approx(2 * 2 / (3 + 4))
    assert iou(found, true) == pytest.approx(2 / 5)


def test_overlap_counts_only_what_is_inside_the_mask() -> None:
    found, true = torch.tensor([1, 1, 1, 0, 0]), torch.tensor([0, 1, 1, 1, 1])
    mask = torch.tensor([True, True, False, True, False])
    # inside: found 2, true 2, both 1
    assert dice(found, true, mask=mask) == pytest.approx(2 / 4)
    assert iou(found, true, mask=mask) == pytest.approx(1 / 3)


def test_overlap_is_the_mean_over_the_classes_that_are_present() -> None:
    found, true = torch.tensor([1, 1, 2, 0]), torch.tensor([1, 0, 0, 0])
    # class 1: 2/3 and 1/2; class 2: a false alarm; class 3: absent from both
    assert dice(found, true, regions=[(1,), (2,), (3,)]) == pytest.approx((2 / 3 + 0) / 2)
    assert iou(found, true, regions=[(1,), (2,), (3,)]) == pytest.approx((1 / 2 + 0) / 2)


def test_iou_is_dice_over_two_minus_dice() -> None:
    found, true = blobs(1, (20, 20)), blobs(2, (20, 20))
    d, j = dice(found, true), iou(found, true)
    assert d is not None
    assert 0 < d < 1
    assert j == pytest.approx(d / (2 - d))


@pytest.mark.parametrize("spacing", [(1.0, 1.0), (0.5, 3.0)])
def test_hd95_agrees_with_distance_transforms(spacing: tuple[float, float]) -> None:
    found, true = blobs(1, (40, 30)), blobs(2, (40, 30))
    expected = hd95_by_distance_transform(found.numpy() > 0, true.numpy() > 0, spacing)
    assert expected > 1
    assert hd95(found, true, spacing=spacing) == pytest.approx(expected, rel=1e-5)


def test_hd95_agrees_with_distance_transforms_in_volumes() -> None:
    found, true, spacing = blobs(3, (8, 16, 12)), blobs(4, (8, 16, 12)), (3.0, 0.7, 0.7)
    expected = hd95_by_distance_transform(found.numpy() > 0, true.numpy() > 0, spacing)
    assert hd95(found, true, spacing=spacing) == pytest.approx(expected, rel=1e-5)


def test_hd95_of_single_pixels_is_their_distance() -> None:
    found, true = torch.zeros(2, 9, 9, dtype=torch.int64)
    found[1, 2], true[4, 6] = 1, 1
    assert hd95(found, true) == pytest.approx(5.0)
    assert hd95(found, true) == directed_hausdorff([[1, 2]], [[4, 6]])[0]
    assert hd95(found, true, spacing=(2.0, 0.5)) == pytest.approx(np.hypot(6, 2))


def test_hd95_ignores_five_percent_of_outliers() -> None:
    found = torch.zeros(3, 60, dtype=torch.int64)
    found[1, :40] = 1
    true = found.clone()
    true[1, 59] = 1  # 1 of 41 surface pixels is 20 pixels away
    assert hd95(found, true) == 0.0


def test_hd95_counts_only_what_is_inside_the_mask() -> None:
    found, true = torch.zeros(2, 9, 9, dtype=torch.int64)
    found[1, 2], true[1, 3] = 1, 1
    found[8, 8] = 1
    mask = torch.ones(9, 9, dtype=torch.bool)
    assert hd95(found, true, mask=mask) == pytest.approx(np.percentile([1, np.hypot(7, 5)], 95))
    mask[8] = False
    assert hd95(found, true, mask=mask) == pytest.approx(1.0)


def test_hd95_is_the_mean_over_the_classes_that_are_present() -> None:
    found, true = torch.zeros(2, 9, 9, dtype=torch.int64)
    found[0, 0], true[0, 3] = 1, 1
    found[8, 0], true[8, 1] = 2, 2
    assert hd95(found, true, regions=[(1,), (2,), (3,)]) == pytest.approx((3 + 1) / 2)


def test_hd95_of_a_case_with_one_missed_class_is_undefined() -> None:
    found, true = torch.zeros(2, 9, 9, dtype=torch.int64)
    found[0, 0], true[0, 3] = 1, 1
    true[8, 1] = 2
    assert hd95(found, true, regions=[(1,), (2,)]) is None
    assert dice(found, true, regions=[(1,), (2,)]) == 0.0


def test_a_case_whose_mask_is_empty_is_undefined() -> None:
    everything, nowhere = torch.ones(4, 4, dtype=torch.int64), torch.zeros(4, 4, dtype=torch.bool)
    scores = [metric(everything, everything, mask=nowhere) for metric in (dice, iou, hd95)]
    assert scores == [None, None, None]


def volumes(
    found: torch.Tensor, true: torch.Tensor, *spacing: float, **more: Any
) -> tuple[float | None, float | None]:
    structures = structures_of(found, true, spacing=spacing or None, **more)
    return overlap.volume_difference(structures), overlap.relative_volume_difference(structures)


@pytest.mark.parametrize("seed", range(10))
def test_volume_differences_are_those_of_counted_voxels(seed: int) -> None:
    found, true, spacing = blobs(seed, (8, 9, 7)), blobs(seed + 20, (8, 9, 7)), (3.0, 0.5, 0.7)
    more = np.count_nonzero(found.numpy()) - np.count_nonzero(true.numpy())
    ml, relative = volumes(found, true, *spacing)
    assert ml == pytest.approx(more * 3.0 * 0.5 * 0.7 / 1000)
    assert relative == pytest.approx(more / np.count_nonzero(true.numpy()))


def test_volume_differences_of_empty_structures() -> None:
    some, nothing = torch.ones(10, 10, 5, dtype=torch.int64), torch.zeros(10, 10, 5).long()
    assert volumes(some, nothing, 1.0, 1.0, 2.0) == (1.0, None)
    assert volumes(nothing, some, 1.0, 1.0, 2.0) == (-1.0, -1.0)
    assert volumes(nothing, nothing, 1.0, 1.0, 2.0) == (None, None)
    assert volumes(some, some) == (None, 0.0)
    assert volumes(some[0], some[0], 1.0, 1.0) == (None, 0.0)


def test_volume_differences_are_means_over_the_structures_that_are_present() -> None:
    found, true = torch.zeros(2, 5, 5, 5, dtype=torch.int64)
    found[0, 0], true[0, 0, :2] = 1, 1  # 5 instead of 2
    true[4] = 2  # 0 instead of 25
    ml, relative = volumes(found, true, 10.0, 10.0, 10.0, regions=[(1,), (2,), (3,)])
    assert ml == pytest.approx((3 - 25) / 2)
    assert relative == pytest.approx((1.5 - 1) / 2)
    found[2, 2] = 3  # a false alarm, which no relative difference shows
    assert volumes(found, true, 10.0, 10.0, 10.0, regions=[(1,), (2,), (3,)])[1] is None


def test_lesions_are_counted_by_structure() -> None:
    found, true = torch.zeros(2, 9, 9, dtype=torch.int64)
    true[0, 0], true[0, 4], found[0, 0] = 1, 1, 1  # one of two
    true[8, 8] = found[8, 8] = 2
    found[6, 0], found[8, 0] = 2, 2  # two false ones
    found[4, 4] = 3  # a false one where no lesion is
    structures = structures_of(found, true, regions=[(1,), (2,), (3,), (4,)])
    assert overlap.lesion_sensitivity(structures) == pytest.approx((0.5 + 1) / 2)
    assert overlap.lesion_false_positives(structures) == pytest.approx((0 + 2 + 1 + 0) / 4)
    assert overlap.lesion_sensitivity(structures[2:]) is None
    assert overlap.lesion_false_positives(structures[3:]) == 0.0
    assert overlap.lesion_false_positives([]) is None


def test_sdwd_is_the_population_deviation_over_sites(
    golden: Callable[[str], dict[str, Any]],
) -> None:
    case = golden("sdwd")
    columns = torch.tensor(case["inputs"]["Z"], dtype=torch.float64).T
    found = sdwd([{"a": column[:1], "b": column[1:, None]} for column in columns])
    np.testing.assert_allclose(found, case["expected"]["sdwd"], atol=case["atol"])
    assert not sdwd([{"a": column} for column in columns[:1]]).any()


def test_a_box_holds_what_numpy_says() -> None:
    values = torch.tensor([3.0, 1.0, 2.0, 10.0])
    expected = {"min": 1.0, "q1": 1.75, "median": 2.5, "q3": 4.75, "max": 10.0, "mean": 4.0}
    assert box_plot_summary(values) == expected
    assert box_plot_summary(torch.zeros(0)) == {}
