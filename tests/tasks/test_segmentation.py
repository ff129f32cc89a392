import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from collegium.core.dataset import Example
from collegium.errors import ConfigError, DataError
from collegium.models.factory import build_model
from collegium.tasks import SegmentationTask, SupervisedTask, metrics_of
from collegium.tasks.segmentation import METRICS


class Threshold(nn.Module):
    """Class 1 where the image is positive; remembers the shapes that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(image.shape))
        return torch.cat([torch.zeros_like(image), image], dim=1)


class Strided(Threshold):
    """A network that says what its sizes must be multiples of."""

    strides = (2, 2, 2)


def example(
    image: torch.Tensor,
    label: torch.Tensor | None = None,
    spacing: tuple[float, ...] | None = None,
    **more: torch.Tensor,
) -> Example:
    label = torch.zeros_like(image[:, 0], dtype=torch.int64) if label is None else label
    return Example("case7", "patient7", {"image": image, "label": label, **more}, spacing)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_a_supervised_task_scores_minus_its_loss() -> None:
    task = SupervisedTask(functional.mse_loss)
    batch = {"image": torch.ones(2, 3), "label": torch.tensor([[0.0], [1.0]])}
    network = nn.Linear(3, 1)
    nn.init.ones_(network.weight)
    nn.init.zeros_(network.bias)
    case = Example("a", "a", batch, None)
    with torch.no_grad():
        prediction = task.predict(network, case)
    assert prediction.tolist() == [[3.0], [3.0]]
    assert float(task.loss(prediction, batch)) == pytest.approx((9 + 4) / 2)
    assert task.scores(prediction, case) == {"negative_loss": -(9 + 4) / 2}
    assert task.metric in task.units


def test_a_supervised_score_that_is_not_finite_is_undefined() -> None:
    task = SupervisedTask(functional.mse_loss)
    case = Example("a", "a", {"label": torch.zeros(1)}, None)
    assert task.scores(torch.tensor([math.inf]), case) == {"negative_loss": None}


@pytest.mark.parametrize(
    ("loss", "expected"), [("ce", math.log(2)), ("dice", 0.5), ("dice_ce", 0.5 + math.log(2))]
)
def test_the_loss_is_chosen_by_name(loss: str, expected: float) -> None:
    batch = {"label": torch.tensor([[1, 1, 0, 0]])}
    value = SegmentationTask(2, loss).loss(torch.zeros(1, 2, 4), batch)
    assert float(value) == pytest.approx(expected, abs=1e-5)


def test_the_loss_counts_only_what_is_inside_the_mask() -> None:
    logits = torch.tensor([[[0.0, 50.0], [0.0, -50.0]]])
    batch = {"label": torch.tensor([[1, 1]]), "mask": torch.tensor([[True, False]])}
    assert float(SegmentationTask(2, "ce").loss(logits, batch)) == pytest.approx(math.log(2))


def test_a_prediction_is_the_likeliest_class_at_full_size() -> None:
    image = noise(1, 1, 5, 7)
    prediction = SegmentationTask().predict(Threshold(), example(image))
    assert prediction.dtype == torch.int64
    assert torch.equal(prediction, (image[:, 0] > 0).long())


def test_an_image_smaller_than_the_window_takes_one_padded_forward_pass() -> None:
    network, image = Threshold(), noise(1, 1, 9, 16)
    prediction = SegmentationTask(window=(16, 16)).predict(network, example(image))
    assert network.shapes == [(1, 1, 16, 16)]
    assert torch.equal(prediction, (image[:, 0] > 0).long())


def test_a_monai_unet_predicts_an_image_of_any_size_in_one_forward_pass() -> None:
    network = build_model("unet", in_channels=1, channels=(2, 4, 4, 8)).eval()
    shapes: list[tuple[int, ...]] = []
    network.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    image = noise(1, 1, 492, 512)
    with torch.no_grad():
        windowed = SegmentationTask(window=(512, 512)).predict(network, example(image))
        whole = SegmentationTask().predict(network, example(image))
        padded = network(functional.pad(image, (0, 0, 10, 10))).argmax(1)[:, 10:-10]
    assert shapes[:2] == [(1, 1, 512, 512), (1, 1, 496, 512)]
    assert windowed.shape == whole.shape == (1, 492, 512)
    assert torch.equal(windowed, padded)


def test_an_image_larger_than_the_window_is_covered_by_windows() -> None:
    network, image = Threshold(), noise(1, 1, 20, 8)
    task = SegmentationTask(window=(8, 8), overlap=0.5, batch_size=3)
    prediction = task.predict(network, example(image))
    # windows start at 0, 4, 8 and 12
    assert network.shapes == [(3, 1, 8, 8), (1, 1, 8, 8)]
    assert torch.equal(prediction, (image[:, 0] > 0).long())


@pytest.mark.parametrize(
    ("shape", "window", "batch_size"),
    [
        ((1, 1, 50, 41), (16, 24), 5),
        ((2, 1, 24, 40), (16, 16), 16),
        ((1, 1, 19, 16, 24), (8,) * 3, 3),
    ],
)
def test_windows_in_batches_give_the_mean_of_single_windows(
    shape: tuple[int, ...], window: tuple[int, ...], batch_size: int
) -> None:
    network = build_model(
        "unet", spatial_dims=len(window), in_channels=1, out_channels=3, channels=(4, 8)
    ).eval()
    image, step = noise(*shape), [side // 2 for side in window]
    starts = [
        sorted({min(start, size - side) for start in range(0, size - side + by, by)})
        for size, side, by in zip(shape[2:], window, step, strict=True)
    ]
    total, count = torch.zeros(shape[0], 3, *shape[2:]), torch.zeros(shape[2:])
    with torch.no_grad():
        for corner in itertools.product(*starts):
            cut = tuple(slice(c, c + side) for c, side in zip(corner, window, strict=True))
            for of_one, single in zip(total, image, strict=True):
                of_one[:, *cut] += network(single[None, :, *cut])[0]
            count[cut] += 1
        task = SegmentationTask(3, window=window, overlap=0.5, batch_size=batch_size)
        prediction = task.predict(network, example(image))
    first, second, _ = (total / count).sort(dim=1, descending=True).values.unbind(1)
    clear = first - second > 1e-5
    assert clear.float().mean() > 0.99
    assert torch.equal(prediction[clear], total.argmax(dim=1)[clear])


def test_an_image_larger_than_the_window_along_one_axis_is_padded_along_the_other() -> None:
    network, image = Threshold(), noise(1, 1, 16, 5)
    task = SegmentationTask(window=(8, 8), overlap=0.0)
    prediction = task.predict(network, example(image))
    assert network.shapes == [(2, 1, 8, 8)]
    assert torch.equal(prediction, (image[:, 0] > 0).long())


@pytest.mark.parametrize("window", [None, (8, 8)])
def test_the_slices_of_a_volume_are_predicted_a_few_at_a_time(window: Sequence[int] | None) -> None:
    network, image = Threshold(), noise(5, 1, 8, 8)
    prediction = SegmentationTask(window=window, batch_size=2).predict(network, example(image))
    assert [shape[0] for shape in network.shapes] == [2, 2, 1]
    assert torch.equal(prediction, (image[:, 0] > 0).long())


def cases_of(*images: torch.Tensor) -> list[Example]:
    return [Example(str(k), str(k), {"image": image}, None) for k, image in enumerate(images)]


def test_small_cases_of_one_window_enter_together_and_come_out_in_order() -> None:
    network = Threshold()
    cases = cases_of(
        *(noise(1, 1, 9 - k, 16 - k) for k in range(5)), noise(3, 1, 8, 8), *[noise(1, 1, 5, 5)] * 3
    )
    found = list(SegmentationTask(window=(16, 16), batch_size=4).predict_all(network, cases))
    assert [len(example.batch["image"]) for example, _ in found] == [1, 1, 1, 1, 1, 3, 1, 1, 1]
    # four of the first five, the fifth twice, the slices of a volume as ever, and three
    assert [shape[0] for shape in network.shapes] == [4, 2, 3, 3]
    assert {shape[2:] for shape in network.shapes} == {(16, 16)}
    for case, (example, prediction) in zip(cases, found, strict=True):
        assert example is case
        assert torch.equal(prediction, (case.batch["image"][:, 0] > 0).long())


def test_cases_of_other_shapes_enter_apart() -> None:
    network = Strided()
    cases = cases_of(noise(1, 1, 8, 16), noise(1, 1, 7, 9), noise(1, 1, 8, 8), noise(1, 1, 8, 5))
    found = list(SegmentationTask().predict_all(network, cases))
    assert network.shapes == [(2, 1, 8, 16), (2, 1, 8, 8)]  # padded to multiples of 8
    for case, (_, prediction) in zip(cases, found, strict=True):
        assert torch.equal(prediction, (case.batch["image"][:, 0] > 0).long())


@pytest.mark.parametrize(
    ("shape", "window", "batch_size", "passes"),
    [
        ((512, 512), (512, 512), 4, [1, 1, 1]),  # more than 2^18 pixels in two
        ((256, 256), (256, 256), 4, [3]),
        ((96, 96, 96), (96, 96, 96), 4, [2, 2]),  # more than 2^21 voxels in three
        ((24, 16), (16, 16), 4, [2, 2, 2]),  # larger than the window
        ((16, 16), (16, 16), 1, [1, 1, 1]),
        ((16,), (16,), 4, [1, 1, 1]),
    ],
)
def test_cases_enter_alone_if_they_are_large_or_more_than_a_window(
    shape: tuple[int, ...], window: tuple[int, ...], batch_size: int, passes: list[int]
) -> None:
    network = Threshold()
    task = SegmentationTask(window=window, batch_size=batch_size)
    assert len(list(task.predict_all(network, cases_of(*[noise(1, 1, *shape)] * 3)))) == 3
    assert [found[0] for found in network.shapes] == passes


@pytest.mark.parametrize(
    ("tracked", "training", "passes"),
    [(True, False, [4]), (True, True, [1, 1, 1, 1]), (False, False, [1, 1, 1, 1])],
)
def test_no_cases_enter_a_network_together_that_normalises_by_the_batch(
    tracked: bool, training: bool, passes: list[int]
) -> None:
    seen = Threshold()
    network = nn.Sequential(nn.BatchNorm2d(1, track_running_stats=tracked), seen).train(training)
    cases = cases_of(*[noise(1, 1, 8, 8)] * 4)
    assert len(list(SegmentationTask(window=(8, 8)).predict_all(network, cases))) == 4
    assert [shape[0] for shape in seen.shapes] == passes


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("axes", [2, 3])
def test_the_outputs_for_a_case_do_not_depend_on_the_cases_beside_it(axes: int) -> None:
    network = build_model(
        "unet", spatial_dims=axes, in_channels=1, out_channels=3, channels=(4, 8)
    ).eval()
    sizes = [(16, 24, 16)[:axes], (15, 20, 13)[:axes], (9, 24, 16)[:axes]]
    cases = cases_of(*(noise(1, 1, *sizes[k % 3]) + k for k in range(7)))
    task = SegmentationTask(3, window=(16, 24, 16)[:axes])
    outputs: list[torch.Tensor] = []
    network.register_forward_hook(lambda _, inputs, found: outputs.append(found.clone()))
    with torch.no_grad():
        together = [prediction for _, prediction in task.predict_all(network, cases)]
        of_each = torch.cat(outputs)
        for number in range(7):
            outputs.clear()
            [(_, alone)] = task.predict_all(network, cases[number : number + 1])
            assert torch.equal(alone, together[number])
            assert torch.equal(outputs[0][0], of_each[number])
            assert torch.equal(outputs[0][0], outputs[0][1])


def test_a_volume_for_a_3d_network_is_one_forward_pass() -> None:
    network, image = Strided(), noise(1, 1, 3, 8, 9)
    prediction = SegmentationTask().predict(network, example(image))
    assert network.shapes == [(1, 1, 8, 8, 16)]
    assert torch.equal(prediction, (image[:, 0] > 0).long())


def test_a_structure_has_the_same_scores_alone_and_in_the_mean() -> None:
    label, found = torch.randint(3, (2, 1, 9, 8, 7), generator=torch.Generator().manual_seed(4))
    case = example(torch.zeros(1, 1, 9, 8, 7), label, (2.0, 0.5, 0.7))
    scores = SegmentationTask(("background", "a", "b")).scores(found, case)
    assert {type(value) for value in scores.values()} == {float}
    for k, name in ((1, "a"), (2, "b")):
        only = example(torch.zeros(1, 1, 9, 8, 7), (label == k).long(), case.spacing)
        alone = SegmentationTask().scores((found == k).long(), only)
        assert alone == {metric: scores[f"{metric}_{name}"] for metric in alone}
    for metric in ("dice", "iou", "hd95"):
        apart = [scores[f"{metric}_a"], scores[f"{metric}_b"]]
        assert scores[metric] == pytest.approx(np.mean(np.array(apart, float)), rel=1e-15)


def test_scores_of_one_image_are_in_pixels_without_spacing() -> None:
    label, found = torch.zeros(2, 1, 9, 9, dtype=torch.int64)
    label[0, 1, 2], found[0, 4, 6] = 1, 1
    scores = SegmentationTask().scores(found, example(torch.zeros(1, 1, 9, 9), label))
    assert scores == {"dice": 0.0, "iou": 0.0, "hd95_px": pytest.approx(5.0)}


def test_scores_of_one_image_are_in_millimetres_with_spacing() -> None:
    label, found = torch.zeros(2, 1, 9, 9, dtype=torch.int64)
    label[0, 1, 2], found[0, 4, 6] = 1, 1
    case = example(torch.zeros(1, 1, 9, 9), label, (2.0, 0.5))
    scores = SegmentationTask().scores(found, case)
    assert scores["hd95"] == pytest.approx(math.hypot(6, 2))
    assert "hd95_px" not in scores


def test_the_slices_of_a_volume_are_scored_as_one_volume() -> None:
    label, found = torch.zeros(2, 3, 4, 4, dtype=torch.int64)
    label[0, :2, 0], found[0, :2, 0] = 1, 1
    label[2, 0, 0], found[2, 3, 3] = 1, 1
    image = torch.zeros(3, 1, 4, 4)
    task = SegmentationTask()
    scores = task.scores(found, example(image, label))
    assert scores["dice"] == pytest.approx(2 * 2 / 6)
    assert scores["iou"] == pytest.approx(2 / 4)
    far = task.scores(found, example(image, label, (5.0, 1.0, 1.0)))["hd95"]
    near = task.scores(found, example(image, label, (0.1, 1.0, 1.0)))["hd95"]
    assert far is not None
    assert near is not None
    # two pixels agree, the lone ones are sqrt(18) mm from each other (0.2 mm off the others if the
    # slices are near): of distances 0, 0, d the 95th percentile is 0.9 d
    assert far == pytest.approx(0.9 * math.sqrt(18), rel=1e-5)
    assert near == pytest.approx(0.9 * math.hypot(0.2, math.hypot(2, 3)), rel=1e-5)


def test_slices_with_a_spacing_in_the_plane_only_are_measured_in_pixels() -> None:
    label = torch.ones(3, 4, 4, dtype=torch.int64)
    case = example(torch.zeros(3, 1, 4, 4), label, (0.5, 0.5))
    assert SegmentationTask().scores(label, case) == {"dice": 1.0, "iou": 1.0, "hd95_px": 0.0}


def test_a_volume_of_one_slice_uses_the_spacing_in_the_plane() -> None:
    label, found = torch.zeros(2, 1, 9, 9, dtype=torch.int64)
    label[0, 0, 0], found[0, 0, 4] = 1, 1
    case = example(torch.zeros(1, 1, 9, 9), label, (7.0, 1.0, 0.5))
    assert SegmentationTask().scores(found, case)["hd95"] == pytest.approx(2.0)


def test_scores_count_only_what_is_inside_the_mask() -> None:
    label, found = torch.tensor([[[1, 1, 0, 0]]]), torch.tensor([[[1, 0, 1, 1]]])
    mask = torch.tensor([[[True, True, False, False]]])
    case = example(torch.zeros(1, 1, 1, 4), label, mask=mask)
    scores = SegmentationTask().scores(found, case)
    assert scores == {
        "dice": pytest.approx(2 / 3),
        "iou": pytest.approx(1 / 2),
        "hd95_px": pytest.approx(0.95),  # distances 0 one way, 0 and 1 the other
    }


def test_every_score_has_a_unit() -> None:
    units = SegmentationTask().units
    assert units == {"dice": "", "iou": "", "hd95": "mm", "hd95_px": "px"}
    assert SegmentationTask(metrics=("iou",), metric="iou").units == {"iou": ""}


def test_metrics_that_are_not_asked_for_are_not_computed() -> None:
    label = torch.ones(1, 2, 2, dtype=torch.int64)
    task = SegmentationTask(("background", "disc"), metrics=("dice",))
    assert task.scores(label, example(torch.zeros(1, 1, 2, 2), label)) == {"dice": 1.0}


def test_some_of_the_metrics_may_be_scored_alone() -> None:
    label = torch.ones(1, 2, 2, dtype=torch.int64)
    case = example(torch.zeros(1, 1, 2, 2), label)
    assert SegmentationTask().scores(label, case, ("dice",)) == {"dice": 1.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"classes": ["vessel"]}, "task.classes holds 1 class"),
        ({"loss": "focal"}, "loss is 'focal': set it to one of dice, ce, dice_ce"),
        ({"metrics": ("dice", "auc")}, "no metric 'auc': choose metrics from dice, iou, hd95"),
        ({"metric": "hd95"}, "headline metric is 'hd95': set it to one of dice, iou, micro_iou, "),
        ({"metric": "label_iou"}, "headline metric is 'label_iou'.*and list it in metrics"),
        (
            {"metrics": ("dice", "surface_dice")},
            "surface_dice has no tolerance: set task.surface_tol",
        ),
        (
            {"surface_tolerance": 2.0},
            "surface_tolerance is of surface_dice: list that in task.metr",
        ),
        (
            {"metrics": ("dice", "surface_dice"), "surface_tolerance": {"x": 1.0}},
            "surface_tolerance names x: name each of 1, or give one number for all",
        ),
        (
            {"metrics": ("dice", "surface_dice"), "surface_tolerance": math.nan},
            "surface_tolerance is nan: give millimetres above 0",
        ),
        ({"lesion_overlap": 1.5}, "lesion_overlap is 1.5: set it to an IoU from 0 to 1"),
        ({"metrics": ("iou",)}, "headline metric is 'dice'"),
        ({"window": (0, 8)}, r"inference.window is \(0, 8\)"),
        ({"overlap": 1.0}, "inference.overlap is 1.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SegmentationTask(**settings)


@pytest.mark.parametrize(
    ("network", "window", "message"),
    [
        (Threshold(), (8, 8, 8), r"window is \(8, 8, 8\) for images of 2 axes"),
        (Strided(), (12, 16), "each a multiple of 8"),
    ],
)
def test_a_window_that_does_not_suit_is_refused(
    network: nn.Module, window: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        SegmentationTask(window=window).predict(network, example(noise(1, 1, 8, 8)))


def test_a_network_with_another_number_of_classes_is_refused() -> None:
    task = SegmentationTask(3)
    with pytest.raises(ConfigError, match="returns 2 channels for 3 classes: set its out_channels"):
        task.predict(Threshold(), example(noise(1, 1, 4, 4)))
    with pytest.raises(ConfigError, match="returns 2 channels for 3 classes"):
        task.loss(torch.zeros(1, 2, 4), {"label": torch.zeros(1, 4, dtype=torch.int64)})


@pytest.mark.parametrize("size", [4, 8])
def test_a_network_with_several_outputs_is_refused(size: int) -> None:
    class Deep(Threshold):
        def forward(self, image: torch.Tensor) -> Any:
            return (super().forward(image), super().forward(image))

    with pytest.raises(ConfigError, match="returns a tuple: let it return one tensor"):
        SegmentationTask(window=(4, 4)).predict(Deep(), example(noise(1, 1, size, size)))


def test_a_spacing_of_the_wrong_length_is_refused() -> None:
    case = example(torch.zeros(1, 1, 4, 4), spacing=(1.0,))
    with pytest.raises(DataError, match="'case7' has a spacing of 1 axes and an image of 2"):
        SegmentationTask().scores(torch.zeros(1, 4, 4, dtype=torch.int64), case)


# --- regions, structures, strides

NESTED = {"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,)}
CLASSES = ("background", "core", "oedema", "enhancing")


class Fixed(nn.Module):
    """Gives the same logits whatever the image."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.logits


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_the_class_of_a_pixel_is_the_first_of_the_likeliest(classes: int) -> None:
    values = torch.tensor([0.0, 1.0, -1.0, math.inf, -math.inf, math.nan])
    logits = torch.cartesian_prod(*[values] * classes).T[None, :, :, None].contiguous()
    prediction = SegmentationTask(classes).predict(Fixed(logits), example(logits[:, :1]))
    np.testing.assert_array_equal(prediction, logits.numpy().argmax(axis=1))


def nested(label: torch.Tensor) -> torch.Tensor:
    """Whole tumour, tumour core and enhancing tumour by hand, (B, 3, *spatial)."""
    return torch.stack([label > 0, (label == 1) | (label == 3), label == 3], dim=1)


def test_regions_that_fit_together_give_back_the_classes() -> None:
    label = torch.randint(4, (1, 8, 9), generator=torch.Generator().manual_seed(0))
    task = SegmentationTask(CLASSES, regions=NESTED)
    logits = torch.where(nested(label), 0.1, -5.0)
    assert task.channels == 3
    prediction = task.predict(Fixed(logits), example(torch.zeros(1, 1, 8, 9)))
    assert prediction.dtype == torch.int64
    assert torch.equal(prediction, label)


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ((0, 0, 0), 0), ((1, 0, 0), 2), ((1, 1, 0), 1), ((1, 1, 1), 3),
        ((0, 1, 0), 0),  # one channel off background (000) and off core (110): the lower
        ((0, 0, 1), 0),  # off background by one, off enhancing (111) by two
        ((0, 1, 1), 3),  # off enhancing by one
        ((1, 0, 1), 2),  # off oedema (100) and enhancing (111) by one: the lower
    ],
)  # fmt: skip
def test_channels_that_contradict_each_other_give_the_nearest_class(
    there: tuple[int, int, int], expected: int
) -> None:
    logits = (torch.tensor(there).float() - 0.5).reshape(1, 3, 1, 1)
    task = SegmentationTask(CLASSES, regions=NESTED)
    prediction = task.predict(Fixed(logits), example(torch.zeros(1, 1, 1, 1)))
    assert prediction.tolist() == [[[expected]]]


def test_the_loss_of_regions_is_that_of_their_channels() -> None:
    label = torch.randint(4, (2, 8, 9), generator=torch.Generator().manual_seed(1))
    logits, mask = noise(2, 3, 8, 9), noise(2, 8, 9) > 0
    truth = nested(label).float()
    task = SegmentationTask(CLASSES, "ce", regions=NESTED)
    expected = functional.binary_cross_entropy_with_logits(logits, truth)
    torch.testing.assert_close(task.loss(logits, {"label": label}), expected)
    inside = mask[:, None].expand(2, 3, 8, 9)
    expected = functional.binary_cross_entropy_with_logits(logits[inside], truth[inside])
    torch.testing.assert_close(task.loss(logits, {"label": label, "mask": mask}), expected)


@pytest.mark.parametrize("regions", [None, NESTED])
@pytest.mark.parametrize("loss", ["dice", "ce", "dice_ce"])
def test_a_label_of_probabilities_has_the_loss_of_its_classes(
    regions: dict[str, tuple[int, ...]] | None, loss: str
) -> None:
    task = SegmentationTask(CLASSES, loss, regions=regions)
    label = torch.randint(len(CLASSES), (2, 6, 5), generator=torch.Generator().manual_seed(0))
    soft = torch.nn.functional.one_hot(label, len(CLASSES)).movedim(-1, 1).float()
    logits = noise(2, task.channels, 6, 5)
    torch.testing.assert_close(
        task.loss(logits, {"label": soft}), task.loss(logits, {"label": label})
    )


def test_a_label_of_probabilities_is_refused_where_masks_annotate_some_classes_only() -> None:
    task = SegmentationTask(ORGANS).with_labelled(["liver"])
    with pytest.raises(ConfigError, match="a label of probabilities is of all"):
        task.loss(noise(1, 4, 3, 3), {"label": torch.full((1, 4, 3, 3), 0.25)})


def test_a_network_with_another_number_of_regions_is_refused() -> None:
    with pytest.raises(ConfigError, match="returns 2 channels for 3 regions: set its out_channels"):
        SegmentationTask(CLASSES, regions=NESTED).predict(Threshold(), example(noise(1, 1, 4, 4)))


@pytest.mark.parametrize("regions", [None, NESTED])
def test_every_structure_is_scored_as_monai_scores_it(
    regions: dict[str, tuple[int, ...]] | None,
) -> None:
    monai = pytest.importorskip("monai.metrics")
    rng = torch.Generator().manual_seed(2)
    label, found = torch.randint(4, (2, 1, 8, 9, 5), generator=rng)
    task = SegmentationTask(CLASSES, metrics=("dice", "iou"), regions=regions)
    scores = task.scores(found, example(torch.zeros(1, 1, 8, 9, 5), label))
    if regions is None:
        sides = [torch.stack([x == k for k in (1, 2, 3)], dim=1) for x in (found, label)]
    else:
        sides = [nested(x) for x in (found, label)]
    names = CLASSES[1:] if regions is None else tuple(regions)
    for metric, theirs in (("dice", monai.DiceMetric()), ("iou", monai.MeanIoU())):
        (apart,) = theirs(*[side.float() for side in sides])
        for name, value in zip(names, apart.tolist(), strict=True):
            assert scores[f"{metric}_{name}"] == pytest.approx(value, abs=1e-6)
        assert scores[metric] == pytest.approx(float(apart.mean()), abs=1e-6)
    assert scores.keys() == task.units.keys()


def test_every_further_metric_is_scored_under_the_names_that_the_task_declares() -> None:
    rng = torch.Generator().manual_seed(3)
    label, found = torch.randint(3, (2, 1, 8, 9, 5), generator=rng)
    task = SegmentationTask(
        ("background", "liver", "kidney"), metrics=METRICS, metric="label_iou",
        surface_tolerance={"liver": 1.0, "kidney": 3.0},
    )  # fmt: skip
    declared = metrics_of(task)
    for spacing in ((1.0, 2.0, 0.5), None):
        scores = task.scores(found, example(torch.zeros(1, 1, 8, 9, 5), label, spacing))
        distances = {n for n in task.units if n.startswith(("hd95", "assd"))}
        unused = {n for n in distances if ("_px" in n) == (spacing is not None)}
        assert scores.keys() == task.units.keys() - unused
        for name, value in scores.items():
            if value is None:
                assert spacing is None
                assert name.startswith(("surface_dice", "volume_difference"))
            else:
                assert declared[name].holds(value, 1), name
    assert {task.units[n] for n in ("volume_difference", "volume_difference_liver")} == {"ml"}
    assert {task.units[n] for n in ("assd_liver", "assd_px_liver")} == {"mm", "px"}
    assert "label_iou_liver" not in task.units
    assert (declared["surface_dice_liver"].most, declared["volume_difference"].least) == (
        1.0, -math.inf,
    )  # fmt: skip


def test_what_no_case_like_one_has_is_known_from_its_spacing() -> None:
    task = SegmentationTask(metrics=("dice", "hd95", "surface_dice", "volume_difference"),
                            surface_tolerance=1.0)  # fmt: skip
    picture, volume, stack = (torch.zeros(s) for s in ((1, 1, 4, 5), (1, 1, 4, 5, 3), (3, 1, 4, 5)))
    neither = ["surface_dice", "volume_difference"]
    for image, spacing, expected in (
        (picture, None, neither),
        (picture, (1.0, 1.0), neither[1:]),
        (picture, (2.0, 1.0, 1.0), neither[1:]),
        (volume, None, neither),
        (volume, (1.0, 1.0, 1.0), []),
        (stack, (1.0, 1.0), neither),
        (stack, (2.0, 1.0, 1.0), []),
    ):
        case = example(image, torch.ones_like(image[:, 0], dtype=torch.int64), spacing)
        assert task.undefined_at(case) == expected
        scores = task.scores(case.batch["label"], case)
        assert [name for name in scores if scores[name] is None] == expected


def test_each_structure_has_the_tolerance_of_its_name() -> None:
    label, found = torch.zeros(2, 1, 12, 12, dtype=torch.int64)
    label[0, 1:4, 1:4], found[0, 1:4, 2:5] = 1, 1
    label[0, 7:10, 1:4], found[0, 7:10, 2:5] = 2, 2
    classes = ("background", "liver", "kidney")
    task = SegmentationTask(
        classes, metrics=("dice", "surface_dice"),
        surface_tolerance={"kidney": 1.0, "liver": 0.5},
    )  # fmt: skip
    scores = task.scores(found, example(torch.zeros(1, 1, 12, 12), label, (1.0, 1.0)))
    near = scores["surface_dice_liver"]
    assert scores["surface_dice_kidney"] == 1.0
    assert near is not None
    assert near < 1
    assert scores["surface_dice"] == pytest.approx((near + 1) / 2)
    assert task.with_labelled(["kidney"]).scores(
        found, example(torch.zeros(1, 1, 12, 12), label, (1.0, 1.0))
    )["surface_dice"] == 1.0  # fmt: skip


def test_ious_of_all_classes_count_inside_the_mask_and_need_every_class_annotated() -> None:
    label = torch.tensor([[[0, 0, 1, 1, 2, 2]]])
    found = torch.tensor([[[0, 1, 1, 1, 2, 0]]])
    mask = torch.tensor([[[True, True, True, True, True, False]]])
    task = SegmentationTask(3, metrics=("label_iou", "micro_iou"), metric="label_iou")
    case = example(torch.zeros(1, 1, 1, 6), label, mask=mask)
    # inside 4 of 5 are right; without class 0, of equal frequency with 1: 3 right of 4
    expected = {"label_iou": 3 / 4, "micro_iou": 4 / (10 - 4)}
    assert task.scores(found, case) == pytest.approx(expected)
    assert task.scores(found, case, ["label_iou"]) == pytest.approx({"label_iou": 3 / 4})
    assert task.with_labelled(["1"]).scores(found, case) == {"label_iou": None, "micro_iou": None}


def test_the_least_overlap_of_lesions_is_that_of_the_task() -> None:
    label, found = torch.zeros(2, 1, 3, 9, dtype=torch.int64)
    label[0, 1, 1:5], found[0, 1, 4:8] = 1, 1
    names = ("dice", "lesion_sensitivity", "lesion_false_positives")
    for least, expected in ((0.0, (1.0, 0.0)), (0.5, (0.0, 1.0))):
        task = SegmentationTask(2, metrics=names, lesion_overlap=least)
        scores = task.scores(found, example(torch.zeros(1, 1, 3, 9), label))
        assert tuple(scores[name] for name in names[1:]) == expected


def test_a_structure_that_is_nowhere_is_undefined_alone() -> None:
    label, found = torch.zeros(2, 1, 9, 9, dtype=torch.int64)
    label[0, 0, 0], found[0, 0, 4] = 2, 2
    task = SegmentationTask(CLASSES, regions=NESTED)
    scores = task.scores(found, example(torch.zeros(1, 1, 9, 9), label, (1.0, 0.5)))
    assert scores["hd95_WT"] == pytest.approx(2.0)
    assert scores["dice_WT"] == 0.0
    assert scores["dice_TC"] is scores["hd95_ET"] is None
    assert scores.keys() < task.units.keys()
    assert task.units["hd95_WT"] == "mm"
    pixels = task.scores(found, example(torch.zeros(1, 1, 9, 9), label))
    assert pixels["hd95_px_WT"] == pytest.approx(4.0)
    assert task.units["hd95_px_WT"] == "px"


@pytest.mark.parametrize(("classes", "apart"), [(2, 0), (3, 2), (9, 8), (10, 0)])
def test_two_to_eight_structures_are_also_scored_one_by_one(classes: int, apart: int) -> None:
    task = SegmentationTask(classes, metrics=("dice",))
    label = torch.ones(1, 4, 4, dtype=torch.int64)
    scores = task.scores(label, example(torch.zeros(1, 1, 4, 4), label))
    assert len(scores) == len(task.units) == 1 + apart
    assert len(task.scores(label, example(torch.zeros(1, 1, 4, 4), label), ["dice"])) == 1


ORGANS = ("background", "liver", "spleen", "kidney")


def test_a_task_of_some_labelled_classes_has_the_marginal_loss_and_the_exclusion_loss() -> None:
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 4, 6, 5, generator=rng, dtype=torch.float64)
    label = 2 * torch.randint(2, (2, 6, 5), generator=rng)
    mask = torch.rand(2, 6, 5, generator=rng) < 0.7
    p = logits.softmax(1).movedim(1, -1)[mask].numpy()
    spleen = label[mask].numpy() == 2
    ce = -np.log(np.where(spleen, p[:, 2], 1 - p[:, 2])).mean()
    apart = np.mean([2 * p[spleen, c].sum() / (p[:, c].sum() + spleen.sum()) for c in (1, 3)])
    logs = (spleen[:, None] * np.log(1 + p[:, [1, 3]])).sum() / len(p)
    batch = {"label": label, "mask": mask}
    for exclusion, form, expected in (
        (0.0, "dice", ce), (0.5, "dice", ce + 0.5 * apart), (2.0, "ce", ce + 2 * logs),
    ):  # fmt: skip
        task = SegmentationTask(ORGANS, "ce", exclusion=exclusion, exclusion_form=form)  # type: ignore[arg-type]
        found = task.with_labelled(["spleen"]).loss(logits, batch)
        assert float(found) == pytest.approx(expected, rel=1e-12)
        plain = functional.cross_entropy(logits.movedim(1, -1)[mask], label[mask])
        torch.testing.assert_close(task.loss(logits, batch), plain)


def test_a_task_of_all_labelled_classes_is_the_task_itself() -> None:
    task = SegmentationTask(ORGANS, exclusion=1.0)
    assert task.with_labelled(["kidney", "liver", "spleen"]) is task
    regions = SegmentationTask(ORGANS, regions={"all": (1, 2, 3), "liver": (1,)})
    assert regions.with_labelled(["all", "liver"]) is regions


def test_scores_of_classes_that_are_not_labelled_are_undefined_and_in_no_mean() -> None:
    label, found = torch.zeros(2, 1, 9, 9, dtype=torch.int64)
    label[0, :3], found[0, 1:4] = 1, 1  # liver: 18 of 27 pixels
    label[0, 8, :2], found[0, 8, :2] = 3, 3  # kidney
    found[0, 6] = 2  # spleen, which may well be there
    case = example(torch.zeros(1, 1, 9, 9), label, (1.0, 1.0))
    task = SegmentationTask(ORGANS, metrics=("dice", "hd95")).with_labelled(["kidney", "liver"])
    scores = task.scores(found, case)
    assert scores["dice_liver"] == pytest.approx(2 / 3)
    assert (scores["dice_kidney"], scores["dice_spleen"], scores["hd95_spleen"]) == (1, None, None)
    assert scores["dice"] == pytest.approx((2 / 3 + 1) / 2)
    assert scores["hd95"] == pytest.approx(0.5)
    assert scores.keys() | {"hd95_px"} == {k for k in task.units if "px_" not in k}
    every = SegmentationTask(ORGANS, metrics=("dice", "hd95")).scores(found, case)
    assert every["dice"] == pytest.approx((2 / 3 + 1) / 3)
    assert every["hd95"] is None


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["lung"], "labelled names 'lung', which is no structure: choose from liver, spleen, k"),
        (["background", "liver"], "labelled names 'background', which is no structure"),
        ([], "labelled is empty: choose from liver, spleen, kidney"),
    ],
)
def test_labelled_classes_that_cannot_be_meant_are_refused(names: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SegmentationTask(ORGANS).with_labelled(names)


def test_some_of_several_regions_cannot_be_labelled_alone() -> None:
    task = SegmentationTask(ORGANS, regions={"all": (1, 2, 3), "liver": (1,)})
    with pytest.raises(ConfigError, match="the loss of regions has no form that leaves some"):
        task.with_labelled(["liver"])


class Flat(Threshold):
    """A network that halves the planes twice and the slices once."""

    strides = ((2, 2, 1), (2, 2, 2))


def test_each_axis_is_padded_to_its_own_strides() -> None:
    network, image = Flat(), noise(1, 1, 9, 4, 3)
    prediction = SegmentationTask().predict(network, example(image))
    assert network.shapes == [(1, 1, 12, 4, 4)]
    assert torch.equal(prediction, (image[:, 0] > 0).long())
    SegmentationTask(window=(8, 8, 2)).predict(network, example(image))
    with pytest.raises(ConfigError, match=r"each a multiple of \(4, 4, 2\)"):
        SegmentationTask(window=(8, 8, 3)).predict(network, example(image))


def test_a_monai_unet_with_strides_by_axis_predicts_a_flat_volume() -> None:
    nets: Any = pytest.importorskip("monai.networks.nets")
    network = nets.UNet(3, 1, 2, (2, 2, 4), ((2, 2, 1), (2, 2, 1))).eval()
    with torch.no_grad():
        prediction = SegmentationTask().predict(network, example(noise(1, 1, 6, 9, 3)))
        padded = network(functional.pad(noise(1, 1, 6, 9, 3), (0, 0, 1, 2, 1, 1)))
    assert torch.equal(prediction, padded.argmax(1)[:, 1:-1, 1:-2])
