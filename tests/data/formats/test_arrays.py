"""Arrays of NumPy and HDF5 in the layouts that research code uses."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collegium.data.decoded_image import Array
from collegium.data.formats import write_mask
from collegium.data.formats.arrays import IMAGES, LABELS, decode
from collegium.data.reading import normalise, read_image, read_label
from collegium.errors import DataError

h5py: Any = pytest.importorskip("h5py")
RNG = np.random.default_rng(0)


def save(path: Path, **arrays: Array) -> Path:
    """Write named arrays as .npz or HDF5, or the only one as .npy."""
    if path.suffix == ".npy":
        (array,) = arrays.values()
        np.save(path, array)
    elif path.suffix == ".npz":
        np.savez(path, **arrays)  # type: ignore[arg-type]
    else:
        with h5py.File(path, "w") as file:
            for name, array in arrays.items():
                file[name] = array
    return path


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((9, 10), None),
        ((9, 10, 3), (2, 0, 1)),
        ((9, 10, 8), (2, 0, 1)),
        ((4, 9, 10), (0, 1, 2)),
        ((9, 12, 10), None),
        ((20, 9, 10), None),
    ],
)
def test_axes_are_told_by_their_lengths(
    tmp_path: Path, shape: tuple[int, ...], order: tuple[int, ...] | None
) -> None:
    array = RNG.normal(size=shape).astype(np.float32)
    decoded = decode(save(tmp_path / "x.npy", image=array))
    if order is not None:
        expected = array.transpose(order)
    else:
        expected = array[None] if array.ndim == 2 else array.transpose(1, 2, 0)[None]
    np.testing.assert_array_equal(decoded.array, expected)
    assert decoded.spacing is None
    assert decoded.affine is None


@pytest.mark.parametrize("slices", [1, 2, 5, 20])
def test_prostates_of_iop_fl_are_volumes_of_three_channels(tmp_path: Path, slices: int) -> None:
    image = RNG.normal(size=(slices, 12, 14, 3)).astype(np.float32)
    label = RNG.integers(0, 2, (slices, 12, 14)).astype(np.float32)
    read = read_image(save(tmp_path / "Case00.npy", image=image))
    mask = read_label(save(tmp_path / "Case00_segmentation.npy", label=label), classes=2, like=read)
    for index in range(slices):
        for channel in range(3):
            np.testing.assert_array_equal(
                read.array[channel, ..., index], image[index, ..., channel]
            )
        np.testing.assert_array_equal(mask.array[..., index], label[index])


def test_fundus_of_feddg_is_image_and_nested_labels_in_one(tmp_path: Path) -> None:
    picture = RNG.integers(0, 256, (12, 14, 3)).astype(np.float32)
    disc, cup = np.zeros((2, 12, 14), np.float32)
    disc[2:9, 3:11], cup[4:7, 5:8] = 1, 1
    path = save(tmp_path / "x.npy", both=np.dstack([picture, disc, cup]))
    image = read_image(path, both=True)
    np.testing.assert_array_equal(image.array, picture.transpose(2, 0, 1))
    label = read_label(path, classes=3, like=image, both=True).array
    assert (label[0, 0], label[2, 3], label[4, 5]) == (0, 1, 2)
    assert np.bincount(label.ravel()).tolist() == [12 * 14 - 56, 56 - 9, 9]


def test_one_structure_beside_an_image_is_the_label(tmp_path: Path) -> None:
    inside = (RNG.random((12, 14)) > 0.5) * 255.0
    path = save(tmp_path / "x.npy", both=np.dstack([RNG.random((12, 14, 3)), inside]))
    label = read_label(path, classes=2, like=read_image(path, both=True), both=True)
    np.testing.assert_array_equal(label.array, inside > 0)


def test_structures_that_are_not_nested_are_refused(tmp_path: Path) -> None:
    both = np.zeros((12, 14, 5))
    both[0, 0, 4] = 1
    path = save(tmp_path / "x.npy", both=both)
    with pytest.raises(DataError, match=r"x\.npy: its structures do not lie one in the other"):
        read_label(path, classes=3, both=True)
    save(path, both=both[..., :3])
    with pytest.raises(DataError, match=r"x\.npy: it has 3 channels or fewer and so no label"):
        read_label(path, classes=3, both=True)


@pytest.mark.parametrize("suffix", [".npz", ".h5", ".hdf5"])
@pytest.mark.parametrize(("image", "label"), [*zip(IMAGES[:5], LABELS[:5], strict=True)])
def test_files_name_their_arrays(tmp_path: Path, suffix: str, image: str, label: str) -> None:
    picture, truth = RNG.random((9, 10)), RNG.integers(0, 3, (9, 10))
    path = save(tmp_path / f"x{suffix}", **{image.upper(): picture, label: truth})
    np.testing.assert_array_equal(decode(path).array, picture[None])
    np.testing.assert_array_equal(read_label(path, classes=3, both=True).array, truth)


@pytest.mark.parametrize("suffix", [".npz", ".h5"])
@pytest.mark.parametrize("slices", [1, 3, 5, 8, 9])
def test_few_slices_are_told_from_channels_by_a_label_of_their_shape(
    tmp_path: Path, suffix: str, slices: int
) -> None:
    image, label = RNG.random((slices, 9, 11)), RNG.integers(0, 3, (slices, 9, 11))
    path = save(tmp_path / f"x{suffix}", image=image, label=label, spacing=np.array([4, 1, 2.0]))
    read = read_image(path, both=True)
    mask = read_label(path, classes=3, like=read, both=True)
    assert (read.array.shape, mask.array.shape) == ((1, 9, 11, slices), (9, 11, slices))
    for index in range(slices):
        np.testing.assert_array_equal(read.array[0, ..., index], image[index].astype(np.float32))
        np.testing.assert_array_equal(mask.array[..., index], label[index])
    assert read.spacing == (1, 2, 4)
    few = f"x{suffix}: has the shape ({slices}, 9, 11) of its label and was read as slices"
    assert (few in read.notes) is (slices < 9)
    np.testing.assert_array_equal(read_image(path).array, read.array)
    np.testing.assert_array_equal(read_label(path, classes=3, both=True).array, mask.array)
    np.testing.assert_array_equal(np.load(write_mask(mask.array, path, tmp_path, "mask")), label)


def test_a_label_of_another_shape_or_after_rows_and_columns_leaves_channels(tmp_path: Path) -> None:
    picture, grey = RNG.random((9, 11, 3)), RNG.integers(0, 2, (9, 11))
    last = save(tmp_path / "l.h5", image=picture, label=np.dstack([grey] * 3))
    first = save(tmp_path / "f.h5", image=picture.transpose(2, 0, 1), label=grey)
    for path in (last, first):
        image = read_image(path, both=True)
        np.testing.assert_allclose(image.array, picture.transpose(2, 0, 1), rtol=1e-6)
        label = read_label(path, classes=2, like=image, both=True)
        np.testing.assert_array_equal(label.array, grey)
        assert image.notes == ()


@pytest.mark.parametrize("suffix", [".npz", ".h5"])
def test_a_spacing_in_the_file_counts_in_the_order_of_its_axes(tmp_path: Path, suffix: str) -> None:
    volume, plane = RNG.random((20, 9, 10)), RNG.random((9, 10))
    stack = save(tmp_path / f"v{suffix}", image=volume, spacing=np.array([3.0, 0.5, 0.7]))
    assert decode(stack).spacing == (0.5, 0.7, 3.0)  # rows, columns, slices
    picture = save(tmp_path / f"p{suffix}", image=plane, spacing=np.array([0.5, 0.7]))
    assert decode(picture).spacing == (0.5, 0.7)
    wrong = save(tmp_path / f"w{suffix}", image=volume, spacing=np.array([0.5, 0.7]))
    with pytest.raises(DataError, match=r"its spacing \(0.5, 0.7\) does not give 3 lengths above"):
        decode(wrong)
    zero = save(tmp_path / f"z{suffix}", image=plane, spacing=np.array([0.5, 0.0]))
    with pytest.raises(DataError, match="does not give 2 lengths above 0"):
        decode(zero)


def test_a_file_without_the_array_says_what_it_holds(tmp_path: Path) -> None:
    path = save(tmp_path / "x.npz", pixels=np.ones((3, 4)), label=np.ones((3, 4)))
    with pytest.raises(DataError, match=r"x\.npz: it holds label, pixels and no image; name the"):
        read_image(path)


@pytest.mark.parametrize(("kind", "scale"), [(np.uint8, 255), (np.uint16, 65535)])
def test_scale_divides_by_the_range_of_the_type(tmp_path: Path, kind: Any, scale: int) -> None:
    image = read_image(save(tmp_path / "x.npy", image=np.array([[0, 51], [102, 255]], kind)))
    scaled = normalise(image.array, "scale", full_scale=image.full_scale)
    np.testing.assert_allclose(scaled[0], np.array([[0, 51], [102, 255]]) / scale, rtol=1e-6)
    real = read_image(save(tmp_path / "r.npy", image=np.eye(3)))
    with pytest.raises(DataError, match="scale needs a picture of 8 or 16 bits"):
        normalise(real.array, "scale", full_scale=real.full_scale)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4, 5, 6), (0, 4)])
def test_other_shapes_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"x\.npy: an array of shape .* is not read: save numbers"):
        read_image(save(tmp_path / "x.npy", image=np.zeros(shape)))


def test_words_and_complex_numbers_are_refused(tmp_path: Path) -> None:
    for array in (np.full((3, 4), "a"), np.ones((3, 4), complex)):
        with pytest.raises(DataError, match=r"x\.npy: an array of .*save numbers"):
            read_image(save(tmp_path / "x.npy", image=array))


class Harm:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))


def test_pickled_objects_are_refused_and_never_executed(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    harm = np.array([[Harm(trace)]], dtype=object)
    np.save(tmp_path / "a.npy", harm, allow_pickle=True)
    np.savez(tmp_path / "b.npz", image=harm)
    (tmp_path / "c.npy").write_bytes(pickle.dumps(Harm(trace)))
    (tmp_path / "d.npz").write_bytes(pickle.dumps(Harm(trace)))
    for name in ("a.npy", "b.npz", "c.npy", "d.npz"):
        for read in (read_image, lambda path: read_label(path, classes=2)):
            with pytest.raises(DataError, match=rf"{name}: it holds pickled Python objects, which"):
                read(tmp_path / name)
    assert not trace.exists()
    pickle.loads((tmp_path / "c.npy").read_bytes())  # the trap works
    assert trace.exists()


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".h5"])
@pytest.mark.parametrize("share", [0, 0.02, 0.5, 0.95])
def test_a_file_cut_short_is_one_sentence_with_its_name(
    tmp_path: Path, suffix: str, share: float
) -> None:
    path = save(tmp_path / f"x{suffix}", image=RNG.random((40, 40)))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(DataError, match="copy it again") as caught:
        read_image(path)
    assert str(caught.value).startswith(f"{path}: cannot be read (")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".h5"])
def test_text_with_an_array_s_name_is_damage_and_an_absent_file_is_absent(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"x{suffix}"
    with pytest.raises(DataError, match=rf"x\{suffix}: is not there"):
        read_image(path)
    path.write_text("<html>404</html>" * 100)
    with pytest.raises(DataError, match=rf"x\{suffix}: cannot be read"):
        read_image(path)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".h5"])
@pytest.mark.parametrize("shape", [(9, 10), (9, 10, 3), (20, 9, 10), (5, 9, 10, 3), (1, 9, 10, 1)])
def test_a_mask_is_written_in_the_order_of_the_image_s_axes(
    tmp_path: Path, suffix: str, shape: tuple[int, ...]
) -> None:
    path = save(tmp_path / f"x{suffix}", image=RNG.random(shape))
    image = read_image(path)
    labels = (image.array[0] * 4).astype(int)
    written = write_mask(labels, path, tmp_path, "mask")
    stored = np.load(written)
    plane = shape[:3] if len(shape) == 4 or shape == (20, 9, 10) else shape[:2]
    assert stored.shape == plane
    assert stored.dtype == np.uint8
    np.testing.assert_array_equal(read_label(written, classes=4, like=image).array, labels)


def test_a_mask_is_brought_back_to_the_size_of_a_resized_image(tmp_path: Path) -> None:
    path = save(tmp_path / "X.npy", image=np.zeros((20, 4, 6)))
    labels = np.zeros((2, 3, 20), int)
    labels[1, 2, 7] = 2
    stored = np.load(write_mask(labels, path.rename(tmp_path / "X.NPY"), tmp_path, "mask"))
    expected = np.zeros((20, 4, 6))
    expected[7, 2:, 4:] = 2
    np.testing.assert_array_equal(stored, expected)
