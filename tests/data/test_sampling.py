"""Training samples and whole cases drawn from prepared cases."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from collegium.core.randomness import generator
from collegium.data.augmentation import deform
from collegium.data.cache import PreparedCase
from collegium.data.sampling import ImageDataset, SamplingConfig
from collegium.errors import ConfigError, DataError


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
    describe(entry)
    spacing = tuple(float(axis + 1) for axis in range(len(shape)))
    return PreparedCase("A", name, "p", entry, (channels, *shape), spacing)


def describe(entry: Path) -> None:
    """Write the description of an entry's arrays."""
    arrays = [*entry.glob("*.npy")]
    about = {
        "sizes": {path.name: path.stat().st_size for path in arrays},
        "digests": {path.name: sha256(path.read_bytes()).hexdigest() for path in arrays},
    }
    (entry / "case.json").write_text(json.dumps(about))


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


def beside(volume: torch.Tensor, place: int) -> torch.Tensor:
    """The slices before, at and behind a place of (C, x, y, z), channels of one after the other."""
    last = volume.shape[-1] - 1
    return torch.cat([volume[..., k] for k in (max(place - 1, 0), place, min(place + 1, last))])


def test_a_slice_has_its_neighbours_as_channels_in_training_and_in_a_whole_case(tmp_path):
    case = prepared(tmp_path, (4, 3, 5), channels=2, masked=True)
    data = ImageDataset([case], SamplingConfig((4, 3), neighbours=1))
    count = torch.arange(60.0).reshape(4, 3, 5)
    volume = torch.stack([count, count + 1000])
    wanted = torch.stack([beside(volume, place) for place in range(5)])
    example = data.example(0)
    torch.testing.assert_close(example.batch["image"], wanted, rtol=0, atol=0)
    torch.testing.assert_close(example.image, volume.permute(3, 0, 1, 2), rtol=0, atol=0)
    torch.testing.assert_close(example.batch["label"], count.permute(2, 0, 1).long() % 3)
    batch = data.batch([0] * 40, rngs(*range(40)))
    seen = set()
    for image, label in zip(batch["image"], batch["label"], strict=True):
        place = int(image[2, 0, 0])  # the first pixel of the slice itself
        seen.add(place)
        torch.testing.assert_close(image, wanted[place], rtol=0, atol=0)
        torch.testing.assert_close(label, count[..., place].long() % 3)
    assert seen == {0, 1, 2, 3, 4}


def test_a_single_slice_stands_for_its_neighbours(tmp_path):
    data = ImageDataset([prepared(tmp_path, (4, 3))], SamplingConfig((4, 3), neighbours=2))
    pixels = torch.arange(12.0).reshape(1, 4, 3)
    torch.testing.assert_close(data.example(0).batch["image"][0], pixels.repeat(5, 1, 1))
    torch.testing.assert_close(data.example(0).image[0], pixels)
    torch.testing.assert_close(data.batch([0], rngs(0))["image"][0], pixels.repeat(5, 1, 1))


@pytest.mark.parametrize("crop", [None, (4, 4, 4)])
def test_neighbours_are_of_slices(crop):
    with pytest.raises(
        ConfigError, match=r"sampling\.neighbours is of slices: give sampling\.crop"
    ):
        SamplingConfig(crop, neighbours=1)


def test_a_crop_of_three_numbers_does_not_fit_pictures(tmp_path):
    with pytest.raises(ConfigError, match=r"sampling.crop has 3 numbers, but site A, case c has 2"):
        ImageDataset([prepared(tmp_path, (4, 4))], SamplingConfig((2, 2, 2)))


@pytest.mark.parametrize(
    ("crop", "words"),
    [
        ((), r"sampling\.crop is \[\]: give two or three whole numbers above 0"),
        ((4,), r"sampling\.crop is \[4\]: give two or three whole numbers above 0"),
        ((4, 0), r"SamplingConfig\.crop: each should be at least 1, not \(4, 0\)"),
        ((1, 2, 3, 4), r"sampling\.crop is \[1, 2, 3, 4\]: give two or three whole numbers"),
    ],
)
def test_an_impossible_crop_is_refused(crop, words):
    with pytest.raises(ConfigError, match=words):
        SamplingConfig(crop)


def test_a_sample_is_drawn_by_slice_place_flips_and_turn_in_this_order(tmp_path: Path) -> None:
    data = ImageDataset([prepared(tmp_path, (7, 8, 9))], SamplingConfig((4, 4), True, True))
    for seed in range(20):
        (rng,) = rngs(seed)
        z, x, y, flip_x, flip_y, turns = (
            int(torch.randint(count, (), generator=rng)) for count in (9, 4, 5, 2, 2, 4)
        )
        cut = torch.arange(504.0).reshape(7, 8, 9)[x : x + 4, y : y + 4, z]
        cut = cut.flip([axis for axis, flip in enumerate((flip_x, flip_y)) if flip])
        (image,) = data.batch([0], rngs(seed))["image"]
        torch.testing.assert_close(image[0], torch.rot90(cut, turns), rtol=0, atol=0)


def test_a_case_gives_several_patches_that_are_drawn_one_after_the_other(tmp_path: Path) -> None:
    cases = [prepared(tmp_path, (9, 9), name=name) for name in "ab"]
    several = ImageDataset(cases, SamplingConfig((4, 4), patches=3))
    batch = several.batch([0, 1], rngs(1, 2))
    assert batch["image"].shape == (6, 1, 4, 4)
    assert batch["label"].shape == (6, 4, 4)
    one = ImageDataset(cases, SamplingConfig((4, 4)))
    for number, seed in enumerate((1, 2)):
        (rng,) = rngs(seed)
        for patch in range(3):
            torch.testing.assert_close(
                batch["image"][3 * number + patch], one.batch([number], [rng])["image"][0]
            )
    assert not torch.equal(batch["image"][0], batch["image"][1])


def speck(folder: Path, shape: tuple[int, ...], place: tuple[int, ...] | None) -> PreparedCase:
    """A case with one pixel of foreground, or none."""
    case = prepared(folder, shape)
    label = np.zeros(shape, np.uint8)
    if place is not None:
        label[place] = 2
    np.save(case.folder / "label.npy", label)
    describe(case.folder)
    return case


@pytest.mark.parametrize(
    ("shape", "crop", "place"),
    [
        ((30, 30), (4, 5), (0, 29)),
        ((30, 30), (4, 5), (17, 3)),
        ((20, 20, 12), (4, 4, 3), (19, 7, 0)),
        ((20, 20, 12), (4, 4), (9, 0, 5)),  # only one of twelve slices has foreground
        ((3, 30), (8, 4), (1, 20)),
    ],
)
def test_a_crop_aimed_at_the_foreground_holds_it(
    tmp_path: Path, shape: tuple[int, ...], crop: tuple[int, ...], place: tuple[int, ...]
) -> None:
    data = ImageDataset([speck(tmp_path, shape, place)], SamplingConfig(crop, foreground=1.0))
    labels = data.batch([0] * 50, rngs(*range(50)))["label"]
    assert (labels.flatten(1).sum(1) == 2).all()


def test_aimed_crops_take_every_place_that_holds_the_pixel(tmp_path: Path) -> None:
    case = speck(tmp_path, (9, 9), (4, 1))
    data = ImageDataset([case], SamplingConfig((3, 3), foreground=1.0))
    firsts = data.batch([0] * 300, rngs(*range(300)))["image"][:, 0, 0, 0].int().unique()
    assert firsts.tolist() == [9 * row + column for row in (2, 3, 4) for column in (0, 1)]


def test_the_share_of_aimed_crops_is_as_asked(tmp_path: Path) -> None:
    case = speck(tmp_path, (100, 100), (50, 50))
    data = ImageDataset([case], SamplingConfig((2, 2), foreground=0.3))
    held = int(data.batch([0] * 1000, rngs(*range(1000)))["label"].flatten(1).any(1).sum())
    assert abs(held - 300) < 4 * (1000 * 0.3 * 0.7) ** 0.5


def test_a_case_without_foreground_gives_any_crop(tmp_path: Path) -> None:
    case = speck(tmp_path, (9, 9), None)
    data = ImageDataset([case], SamplingConfig((3, 3), foreground=1.0))
    firsts = data.batch([0] * 300, rngs(*range(300)))["image"][:, 0, 0, 0].unique()
    assert len(firsts) == 49


def test_every_channel_is_scaled_and_shifted_by_numbers_of_its_own(tmp_path: Path) -> None:
    case = prepared(tmp_path, (6, 5), channels=2)
    data = ImageDataset([case], SamplingConfig(scale=0.2, shift=3.0))
    images = data.batch([0] * 400, rngs(*range(400)))["image"].double().flatten(2)
    plain = torch.stack([torch.arange(30.0), torch.arange(30.0) + 1000]).double()
    slopes = (images[..., -1] - images[..., 0]) / 29
    shifts = images[..., 0] - slopes * plain[:, 0]
    torch.testing.assert_close(slopes[..., None] * plain + shifts[..., None], images, atol=1e-2,
                               rtol=1e-4)  # fmt: skip
    assert 0.8 <= slopes.min() < 0.81
    assert 1.19 < slopes.max() <= 1.2
    assert abs(slopes.mean() - 1) < 4 * 0.2 / (3 * 800) ** 0.5
    assert -3.1 < shifts[:, 0].min() < -2.9
    assert 2.9 < shifts[:, 0].max() < 3.1
    assert abs(torch.corrcoef(slopes.T)[0, 1]) < 0.2


def test_a_channel_that_the_site_lacks_stays_zero_and_the_others_are_shifted(
    tmp_path: Path,
) -> None:
    case = prepared(tmp_path, (6, 5), channels=3)
    image = np.load(case.folder / "image.npy")
    expected = ImageDataset([case], SamplingConfig(shift=3.0)).batch([0], rngs(1))["image"].clone()
    image[1] = 0
    np.save(case.folder / "image.npy", image)
    describe(case.folder)
    lacking = ImageDataset([case], SamplingConfig(shift=3.0)).batch([0], rngs(1))["image"]
    assert not lacking[0, 1].any()
    assert torch.equal(lacking[0, [0, 2]], expected[0, [0, 2]])
    assert torch.all(expected[0, 1] != torch.from_numpy(1000 + np.arange(30.0).reshape(6, 5)))


def test_channels_alike_share_their_numbers(tmp_path: Path) -> None:
    case = prepared(tmp_path, (6, 5), channels=2)
    config = SamplingConfig(scale=0.2, shift=3.0, channels_alike=True)
    images = ImageDataset([case], config).batch([0] * 100, rngs(*range(100)))["image"].double()
    plain = torch.stack([torch.arange(30.0), torch.arange(30.0) + 1000]).double()
    for image in images.flatten(2):
        slope, shift = np.polyfit(plain.flatten(), image.flatten(), 1)
        np.testing.assert_allclose(slope * plain + shift, image, atol=1e-3)
        assert 0.8 <= slope <= 1.2
        assert -3.01 <= shift <= 3.01
    assert len(images[:, 0, 0, 0].unique()) == 100


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"foreground": 1.5}, "foreground: should be at least 0 and at most 1, not 1.5"),
        ({"foreground": -0.1}, "foreground: should be at least 0 and at most 1, not -0.1"),
        ({"scale": 2.0}, "scale: should be at least 0 and at most 1, not 2.0"),
        ({"shift": -1.0}, "shift: should be at least 0, not -1.0"),
        ({"patches": 0}, "patches: should be at least 1, not 0"),
        ({"rotate": 181.0}, "rotate: should be at least 0 and at most 180, not 181.0"),
        ({"zoom": 0.6}, "zoom: should be at least 0 and at most 0.5, not 0.6"),
        ({"holes": -1}, "holes: should be at least 0, not -1"),
        ({"neighbours": -1}, "neighbours: should be at least 0, not -1"),
        ({"hole_side": 0}, "hole_side: should be at least 1, not 0"),
    ],
)
def test_an_impossible_sampling_is_refused(change: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"SamplingConfig\.{words}"):
        SamplingConfig(**change)  # type: ignore[arg-type]


def disc(folder: Path, size: int = 41) -> PreparedCase:
    """A case whose label and mask are where its image is above 1/2: a disc beside the middle."""
    case = prepared(folder, (size, size), masked=True)
    rows, columns = np.ogrid[:size, :size]
    image = 1 / (1 + np.exp(np.hypot(rows - 12, columns - 20) - 6))
    np.save(case.folder / "image.npy", image[None].astype(np.float32))
    describe(case.folder)
    for name in ("label", "mask"):
        np.save(case.folder / f"{name}.npy", (image > 0.5).astype(np.uint8))
        describe(case.folder)
    return case


def test_a_turned_and_zoomed_label_stays_on_its_image(tmp_path: Path) -> None:
    data = ImageDataset([disc(tmp_path)], SamplingConfig((30, 30), rotate=50.0, zoom=0.2))
    batch = data.batch([0] * 40, rngs(*range(40)))
    image, label = batch["image"][:, 0], batch["label"]
    assert torch.equal(label == 1, batch["mask"])
    clear = (image - 0.5).abs() > 0.15  # the nearest pixel may differ at the very edge
    assert torch.equal(label[clear] == 1, image[clear] > 0.5)
    areas = label.flatten(1).sum(1)
    assert len(areas.unique()) > 10


def test_angles_and_factors_are_drawn_evenly_before_the_crop(tmp_path: Path) -> None:
    case = disc(tmp_path)
    data = ImageDataset([case], SamplingConfig(rotate=40.0, zoom=0.1))
    angles, areas = [], []
    for seed in range(300):
        label = data.batch([0], rngs(seed))["label"][0]
        row, column = label.nonzero().double().mean(0)
        angles.append(np.degrees(np.arctan2(20.0 - float(column), 20.0 - float(row))))
        areas.append(int(label.sum()))
    assert -41 < min(angles) < -38
    assert 38 < max(angles) < 41
    assert abs(np.mean(angles)) < 4 * 40 / (3 * 300) ** 0.5
    factors = np.sqrt(np.array(areas) / (np.pi * 36))
    assert 0.86 < factors.min() < 0.93
    assert 1.07 < factors.max() < 1.13
    data = ImageDataset([case], SamplingConfig((20, 20), rotate=40.0, zoom=0.1))
    (rng,) = rngs(5)
    degrees, zoom = (float(2 * torch.rand((), generator=rng) - 1) * most for most in (40, 0.1))
    whole = deform(case.arrays(), degrees, zoom=1 + zoom).image
    row, column = (int(torch.randint(22, (), generator=rng)) for _ in range(2))
    found = data.batch([0], rngs(5))["image"][0].numpy()
    np.testing.assert_array_equal(found, whole[:, row : row + 20, column : column + 20])


@pytest.mark.parametrize("shape", [(24, 24), (12, 12, 6)])
def test_augmented_samples_depend_on_their_generator_alone(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    config = SamplingConfig((8, 8), rotate=30.0, zoom=0.1, holes=3, hole_side=2)
    data = ImageDataset([prepared(tmp_path, shape, name=name) for name in "ab"], config)
    alone, among = data.batch([1], rngs(7)), data.batch([0, 1, 0], rngs(1, 7, 2))
    for key, value in alone.items():
        torch.testing.assert_close(among[key][1], value[0], rtol=0, atol=0)


def test_a_crop_aimed_at_the_foreground_holds_it_after_turning(tmp_path: Path) -> None:
    case = prepared(tmp_path, (30, 30, 4))
    label = np.zeros((30, 30, 4), np.uint8)
    label[12:15, 20:23, 2] = 1
    np.save(case.folder / "label.npy", label)
    describe(case.folder)
    data = ImageDataset([case], SamplingConfig((5, 5), foreground=1.0, rotate=180.0))
    labels = data.batch([0] * 40, rngs(*range(40)))["label"]
    assert labels.flatten(1).any(1).all()


def test_holes_are_in_the_image_only_and_last(tmp_path: Path) -> None:
    case = disc(tmp_path)
    plain = ImageDataset([case], SamplingConfig((30, 30), shift=0.5)).batch([0], rngs(4))
    holes = SamplingConfig((30, 30), shift=0.5, holes=4, hole_side=6)
    batch = ImageDataset([case], holes).batch([0], rngs(4))
    torch.testing.assert_close(batch["label"], plain["label"])
    torch.testing.assert_close(batch["mask"], plain["mask"])
    changed = batch["image"] != plain["image"]
    assert 36 <= changed.sum() <= 4 * 36
    assert (batch["image"][changed] == 0).all()


def test_shear_is_drawn_after_angle_and_zoom(tmp_path: Path) -> None:
    case = disc(tmp_path)
    data = ImageDataset([case], SamplingConfig(rotate=40.0, shear=15.0))
    (rng,) = rngs(5)
    degrees, _, *shear = (float(2 * torch.rand((), generator=rng) - 1) for _ in range(4))
    whole = deform(case.arrays(), 40 * degrees, shear=(15 * shear[0], 15 * shear[1]))
    found = data.batch([0], rngs(5))
    np.testing.assert_array_equal(found["image"][0].numpy(), whole.image)
    np.testing.assert_array_equal(found["label"][0].numpy(), whole.label)


EVERYTHING: dict[str, Any] = {
    "flips": True, "rotations": True, "rotate": 40.0, "zoom": 0.1, "shear": 5.0, "scale": 0.5,
    "shift": 0.5, "holes": 2, "hole_side": 3,
}  # fmt: skip


def test_with_probability_0_a_sample_is_the_case_as_it_is(tmp_path: Path) -> None:
    case = disc(tmp_path)
    batch = ImageDataset([case], SamplingConfig(**EVERYTHING, probability=0.0)).batch([0], rngs(3))
    np.testing.assert_array_equal(batch["image"][0].numpy(), case.arrays().image)


@pytest.mark.parametrize(("change", "kinds"), [({"flips": True}, 3), ({"rotations": True}, 3)])
def test_flips_and_quarter_turns_that_are_made_change_the_sample(
    tmp_path: Path, change: dict[str, Any], kinds: int
) -> None:
    case = prepared(tmp_path, (4, 4))
    image = case.arrays().image
    for chance, least, most in ((1.0, 0, 0), (0.5, 165, 235)):  # of 400: 200, and 3.5 deviations
        data = ImageDataset([case], SamplingConfig(**change, probability=chance))
        found = [data.batch([0], rngs(seed))["image"][0].numpy() for seed in range(400)]
        same = sum(np.array_equal(one, image) for one in found)
        assert least <= same <= most
        seen, counts = np.unique([one.tobytes() for one in found], return_counts=True)
        changed = counts[[one != image.tobytes() for one in seen]]
        assert len(changed) == kinds
        expected = (400 - same) / kinds
        assert ((changed - expected) ** 2 / expected).sum() < 13.8  # 99.9 % for 2 degrees


@pytest.mark.parametrize(
    "change",
    [{"rotate": 40.0}, {"zoom": 0.3}, {"shear": 20.0}, {"scale": 0.5, "shift": 0.5}, {"holes": 1}],
)
def test_every_change_is_made_with_its_probability(tmp_path: Path, change: dict[str, Any]) -> None:
    case = disc(tmp_path)
    data = ImageDataset([case], SamplingConfig(**change, hole_side=42, probability=0.3))
    image = case.arrays().image
    found = [data.batch([0], rngs(seed))["image"][0].numpy() for seed in range(300)]
    made = sum(not np.array_equal(one, image) for one in found)
    assert 90 - 3.5 * 63**0.5 < made < 90 + 3.5 * 63**0.5


def test_changes_are_made_independently_of_each_other(tmp_path: Path) -> None:
    case = disc(tmp_path)
    config = SamplingConfig(shift=1.0, holes=1, hole_side=2, probability=0.5)
    data, image = ImageDataset([case], config), case.arrays().image
    counts = np.zeros((2, 2))
    for seed in range(400):
        found = data.batch([0], rngs(seed))["image"][0].numpy()
        moved = not np.isclose(np.median(found - image), 0)
        holes = (found == (0 if moved else found)).sum() == 4 if moved else (found != image).any()
        counts[int(moved), int(holes)] += 1
    assert ((counts - 100) ** 2 / 100).sum() < 16.3  # the 99.9 % quantile for 3 degrees of freedom
