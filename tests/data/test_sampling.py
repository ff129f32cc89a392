"""Training samples and whole cases drawn from prepared cases."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from collegium.data.cache import PreparedCase
from collegium.data.sampling import ImageDataset, SamplingConfig
from collegium.errors import ConfigError, DataError
from collegium.randomness import generator


def prepared(
    folder: Path,
    shape: tuple[int, ...],
    *,
    channels: int = 1,
    masked: bool = False,
    name: str = "c",
) -> PreparedCase:
    """Store a case whose pixels count up, so that a sample tells where it was cut out."""
    entry = folder / name
    entry.mkdir()
    count = np.arange(np.prod(shape)).reshape(shape)
    image = np.stack([count + 1000 * channel for channel in range(channels)]).astype(np.float32)
    np.save(entry / "image.npy", image)
    np.save(entry / "label.npy", (count % 3).astype(np.uint8))
    if masked:
        np.save(entry / "mask.npy", (count % 2).astype(np.uint8))
    spacing = tuple(float(axis + 1) for axis in range(len(shape)))
    return PreparedCase("A", name, "p", entry, (channels, *shape), spacing)


def rngs(*seeds: int) -> list[torch.Generator]:
    return [generator(seed, "sample") for seed in seeds]


def test_a_crop_is_a_window_of_the_case_with_its_label_and_mask(tmp_path):
    case = prepared(tmp_path, (9, 11), channels=2, masked=True)
    batch = ImageDataset([case], SamplingConfig((4, 5))).batch([0], rngs(0))
    first = int(batch["image"][0, 0, 0, 0])
    row, column = divmod(first, 11)
    count = np.arange(99).reshape(9, 11)[row : row + 4, column : column + 5]
    np.testing.assert_array_equal(batch["image"][0], np.stack([count, count + 1000]))
    np.testing.assert_array_equal(batch["label"][0], count % 3)
    np.testing.assert_array_equal(batch["mask"][0], count % 2 == 1)
    kinds = {key: value.dtype for key, value in batch.items()}
    assert kinds == {"image": torch.float32, "label": torch.int64, "mask": torch.bool}


def test_every_place_of_a_crop_is_equally_likely(tmp_path):
    data = ImageDataset([prepared(tmp_path, (5, 6))], SamplingConfig((4, 4)))
    firsts = data.batch([0] * 1200, rngs(*range(1200)))["image"][:, 0, 0, 0].int()
    places, counts = torch.unique(firsts, return_counts=True)
    assert places.tolist() == [0, 1, 2, 6, 7, 8]
    chi_square = float(((counts - 200) ** 2 / 200).sum())
    assert chi_square < 20.5  # the 99.9 % quantile for 5 degrees of freedom


@pytest.mark.parametrize(("shape", "crop"), [((9, 9), (4, 4)), ((7, 7, 6), (4, 4, 3))])
def test_a_sample_depends_on_its_generator_alone(tmp_path, shape, crop):
    cases = [prepared(tmp_path, shape, name=name) for name in "ab"]
    data = ImageDataset(cases, SamplingConfig(crop, flips=True, rotations=True))
    alone = data.batch([1], rngs(7))
    among = data.batch([0, 1, 0], rngs(1, 7, 2))
    for key, value in alone.items():
        torch.testing.assert_close(among[key][1], value[0], rtol=0, atol=0)
    assert not torch.equal(alone["image"], data.batch([1], rngs(8))["image"])


def test_flips_and_turns_reach_the_eight_orientations_of_a_square(tmp_path):
    case = prepared(tmp_path, (3, 3), masked=True)
    data = ImageDataset([case], SamplingConfig(flips=True, rotations=True))
    batch = data.batch([0] * 200, rngs(*range(200)))
    square = np.arange(9).reshape(3, 3)
    expected = {
        np.rot90(side, turns).tobytes() for side in (square, square.T) for turns in range(4)
    }
    images = batch["image"][:, 0].long()
    assert {image.numpy().tobytes() for image in images} == expected
    torch.testing.assert_close(batch["label"], images % 3)
    torch.testing.assert_close(batch["mask"], images % 2 == 1)


def test_a_volume_is_turned_in_its_plane_and_flipped_along_every_axis(tmp_path):
    data = ImageDataset([prepared(tmp_path, (2, 2, 3))], SamplingConfig(None, True, True))
    images = data.batch([0] * 300, rngs(*range(300)))["image"][:, 0]
    assert len({image.numpy().tobytes() for image in images}) == 16
    for image in images:
        steps = (image[:, :, 1] - image[:, :, 0]).abs()
        assert steps.eq(1).all()  # the third axis stays the third


def test_a_sample_that_is_not_square_is_not_turned(tmp_path):
    data = ImageDataset([prepared(tmp_path, (2, 3))], SamplingConfig(rotations=True))
    images = data.batch([0] * 20, rngs(*range(20)))["image"]
    assert images.eq(images[:1]).all()


@pytest.mark.parametrize("masked", [True, False])
def test_a_smaller_case_stands_in_the_middle_of_zeros_outside_the_mask(tmp_path, masked):
    case = prepared(tmp_path, (2, 3), masked=masked)
    batch = ImageDataset([case], SamplingConfig((5, 4))).batch([0], rngs(0))
    image = np.zeros((5, 4))
    image[1:3, :3] = np.arange(6).reshape(2, 3)
    mask = np.zeros((5, 4), bool)
    mask[1:3, :3] = np.arange(6).reshape(2, 3) % 2 if masked else True
    np.testing.assert_array_equal(batch["image"][0, 0], image)
    np.testing.assert_array_equal(batch["label"][0], image % 3)
    np.testing.assert_array_equal(batch["mask"][0], mask)


def test_whole_cases_of_different_shapes_are_refused_with_the_remedy(tmp_path):
    cases = [prepared(tmp_path, shape, name=f"{shape[0]}") for shape in ((4, 4), (5, 4))]
    data = ImageDataset(cases, SamplingConfig())
    assert data.batch([0], rngs(0))["image"].shape == (1, 1, 4, 4)
    with pytest.raises(DataError, match=r"set sampling.crop or image.size"):
        data.batch([0, 1], rngs(0, 1))


def test_an_example_is_the_whole_case_as_it_is(tmp_path):
    case = prepared(tmp_path, (3, 4), channels=2, masked=True)
    example = ImageDataset([case], SamplingConfig((2, 2), True, True)).example(0)
    assert (example.case, example.patient, example.spacing) == ("c", "p", (1.0, 2.0))
    shapes = {key: tuple(value.shape) for key, value in example.batch.items()}
    assert shapes == {"image": (1, 2, 3, 4), "label": (1, 3, 4), "mask": (1, 3, 4)}
    assert example.batch["image"].flatten().tolist() == [*range(12), *range(1000, 1012)]
    example.batch["image"].add_(1)
    assert int(ImageDataset([case], SamplingConfig()).example(0).batch["image"][0, 0, 0, 0]) == 0


def test_a_crop_of_two_numbers_draws_slices_of_a_volume(tmp_path):
    data = ImageDataset([prepared(tmp_path, (4, 4, 5), masked=True)], SamplingConfig((4, 4)))
    images = data.batch([0] * 60, rngs(*range(60)))["image"]
    volume = torch.arange(80.0).reshape(4, 4, 5)
    slices = [next(z for z in range(5) if torch.equal(volume[..., z], i[0])) for i in images]
    assert set(slices) == {0, 1, 2, 3, 4}


def test_the_slices_of_a_volume_are_one_example_with_the_slice_distance_first(tmp_path):
    data = ImageDataset([prepared(tmp_path, (4, 3, 5), masked=True)], SamplingConfig((2, 2)))
    example = data.example(0)
    volume = torch.arange(60).reshape(4, 3, 5)
    assert len(data) == 1
    torch.testing.assert_close(example.batch["label"], volume.permute(2, 0, 1) % 3)
    torch.testing.assert_close(example.batch["image"][:, 0].long(), volume.permute(2, 0, 1))
    assert example.batch["mask"].shape == (5, 4, 3)
    assert example.spacing == (3.0, 1.0, 2.0)


def test_a_crop_of_three_numbers_does_not_fit_pictures(tmp_path):
    with pytest.raises(ConfigError, match=r"sampling.crop has 3 numbers, but site A, case c has 2"):
        ImageDataset([prepared(tmp_path, (4, 4))], SamplingConfig((2, 2, 2)))


@pytest.mark.parametrize("crop", [(), (4,), (4, 0), (1, 2, 3, 4)])
def test_an_impossible_crop_is_refused(crop):
    with pytest.raises(ConfigError, match=r"sampling\.crop is"):
        SamplingConfig(crop)


def test_a_sample_takes_far_less_time_than_decoding_a_file(tmp_path):
    case = prepared(tmp_path, (512, 512), channels=3, masked=True)
    data = ImageDataset([case], SamplingConfig((128, 128), True, True))
    times = []
    for attempt in range(10):
        start = time.perf_counter()
        data.batch([0] * 8, rngs(*range(attempt, attempt + 8)))
        times.append((time.perf_counter() - start) / 8)
    assert min(times) < 0.003
