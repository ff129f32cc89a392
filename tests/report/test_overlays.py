import base64
import json
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from collegium.errors import DataError
from collegium.report.overlays import (
    BOTH,
    PREDICTION,
    TRUTH,
    Overlay,
    draw_overlay,
    embed,
    read_overlays,
)


def square(top, left, side, shape=(300, 300), value=1):
    labels = np.zeros(shape, int)
    labels[top : top + side, left : left + side] = value
    return labels


def where(picture, colour):
    return (np.asarray(picture) == colour).all(-1)


def test_contours_lie_inside_the_labels_and_coincide_in_white():
    truth, guess = square(50, 50, 100), square(50, 100, 100)
    picture = draw_overlay(np.zeros((1, 300, 300)), truth, guess)
    blue, orange, white = (where(picture, colour) for colour in (TRUTH, PREDICTION, BOTH))
    assert picture.size == (300, 300)
    assert blue[100, 50]
    assert blue[100, 51]  # two pixels wide, for squares are not thin
    assert not blue[100, 52]
    assert not blue[100, 49]
    assert orange[100, 199]
    assert white[50, 120]
    assert (truth[blue | white] > 0).all()
    assert (guess[orange | white] > 0).all()


def test_a_thin_structure_has_a_contour_of_one_pixel():
    truth = np.zeros((300, 300), int)
    truth[100:105] = 1
    picture = draw_overlay(np.zeros((1, 300, 300)), truth, truth * 0)
    assert where(picture, TRUTH).any(axis=1).nonzero()[0].tolist() == [100, 104]


def test_the_border_of_the_image_is_no_contour():
    picture = draw_overlay(np.zeros((1, 300, 300)), np.ones((300, 300), int), square(0, 0, 0))
    assert not where(picture, TRUTH).any()


def test_each_class_has_a_contour_whatever_its_number():
    truth = square(50, 50, 100, value=1000)
    truth[50:150, 100:150] = 7
    picture = draw_overlay(np.zeros((1, 300, 300)), truth, truth * 0)
    columns = where(picture, TRUTH)[100].nonzero()[0].tolist()
    assert columns == [50, 51, 98, 99, 100, 101, 148, 149]


def test_outside_the_mask_it_is_dark_and_nothing_is_drawn():
    image = np.tile(np.linspace(0, 1, 300), (1, 300, 1))
    mask = np.zeros((300, 300), bool)
    mask[:, 150:] = True
    inside = np.asarray(draw_overlay(image, square(50, 100, 100), square(0, 0, 0), mask))
    assert not (inside[:, :150] == TRUTH).all(-1).any()
    assert (inside[:, 150:] == TRUTH).all(-1).any()
    assert inside[290, 290].max() > 150
    whole = np.asarray(draw_overlay(image, image[0] * 0, image[0] * 0))
    assert inside[10, 140].max() < whole[10, 140].max()


@pytest.mark.parametrize(
    ("shape", "size"),
    [((1000, 2000), (512, 256)), ((100, 50), (150, 300)), ((300, 400), (400, 300))],
)
def test_the_longer_side_has_256_to_512_pixels(shape, size):
    labels = np.zeros(shape, int)
    assert draw_overlay(np.zeros((1, *shape)), labels, labels).size == size


def test_three_channels_are_seen_as_luminance_and_noise_values_do_no_harm():
    image = np.zeros((3, 300, 300))
    image[1, :, 200:] = 1.0  # green is bright, blue is dark
    image[2, :, :100] = 1.0
    image[0, 0, 0] = np.nan
    pixels = np.asarray(draw_overlay(image, np.zeros((300, 300)), np.zeros((300, 300))))
    assert pixels[150, 250, 0] > pixels[150, 50, 0] > pixels[150, 150, 0]
    assert (pixels[..., 0] == pixels[..., 1]).all()


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match=r"\(1, 8, 8\), \(8, 8\) and \(8, 9\)"):
        draw_overlay(np.zeros((1, 8, 8)), np.zeros((8, 8)), np.zeros((8, 9)))
    with pytest.raises(DataError, match="one 2-D slice"):
        draw_overlay(np.zeros((1, 8, 8, 8)), np.zeros((8, 8, 8)), np.zeros((8, 8, 8)))


def write_index(folder, label, seed, entries):
    cell = folder / label / f"seed-{seed}" / "overlays"
    cell.mkdir(parents=True)
    (cell / "index.json").write_text(json.dumps(entries))
    return cell


def entry(rank, **changes):
    return {"site": "A", "model": "global", "rank": rank, "case": "c001", "metric": "dice",
            "value": 0.5, "file": f"A-global-{rank}.png"} | changes  # fmt: skip


def test_overlays_of_the_lowest_seed_are_found_best_first(tmp_path):
    cell = write_index(tmp_path, "fedavg", 2, [entry("worst", value=None), entry("best")])
    write_index(tmp_path, "fedavg", 10, [entry("median")])
    found = read_overlays(tmp_path)
    assert [(o.rank, o.seed, o.algorithm, o.value) for o in found] == [
        ("best", 2, "fedavg", 0.5),
        ("worst", 2, "fedavg", None),
    ]
    assert found[0] == Overlay("A", "fedavg", 2, "global", "best", "c001", "dice", 0.5,
                               cell / "A-global-best.png")  # fmt: skip
    assert read_overlays(tmp_path / "fedavg") == []


@pytest.mark.parametrize("text", ["[{]", '[{"site": "A"}]', "[3]"])
def test_a_damaged_index_is_named(tmp_path, text):
    cell = write_index(tmp_path, "fedavg", 0, [])
    (cell / "index.json").write_text(text)
    with pytest.raises(DataError, match=r"index\.json: this is not an index of overlays"):
        read_overlays(tmp_path)


def test_an_embedded_picture_is_at_most_512_pixels(tmp_path):
    path = tmp_path / "big.png"
    Image.new("RGB", (1024, 700), (255, 0, 0)).save(path)
    head, _, data = embed(path).partition(",")
    assert head == "data:image/jpeg;base64"
    with Image.open(BytesIO(base64.b64decode(data))) as picture:
        assert picture.size == (512, 350)
        assert picture.getpixel((5, 5))[0] > 250


def test_a_picture_that_is_absent_or_none_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.png: the overlay cannot be read"):
        embed(tmp_path / "gone.png")
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(DataError, match=r"text\.png: the overlay cannot be read"):
        embed(tmp_path / "text.png")
