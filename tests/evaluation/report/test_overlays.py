from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from collegium.errors import DataError
from collegium.evaluation.report import overlays
from collegium.evaluation.report.overlays import (
    BOTH,
    PREDICTION,
    TRUTH,
    WRONG,
    choose_cases,
    encode_for_web,
    encode_png,
    prepare_case,
)


def square(top, left, side, shape=(300, 300), value=1):
    labels = np.zeros(shape, int)
    labels[top : top + side, left : left + side] = value
    return labels


def draw_overlay(*case):
    return overlays.draw_overlay(prepare_case(*case))


def draw_layers(*case):
    return overlays.draw_layers(prepare_case(*case))


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


def test_numbers_of_classes_beyond_a_byte_do_not_change_a_picture():
    rng = np.random.default_rng(3)
    truth, guess = rng.integers(0, 3, (2, 64, 64))
    image = rng.random((1, 64, 64))
    numbers = np.array([0, 300, 70_000])
    small, large = (
        prepare_case(image, mapping[truth], mapping[guess]) for mapping in (np.arange(3), numbers)
    )
    for one, other in zip(small.lines + small.labels, large.lines + large.labels, strict=True):
        np.testing.assert_array_equal(one, other)
    negative = prepare_case(image, truth - 1, guess - 1)
    assert negative.labels[0].min() == 1  # no class is the background


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
    layers = draw_layers(np.zeros((1, *shape)), labels, labels)
    assert {layer.size for layer in layers.values()} == {size}


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
        draw_layers(np.zeros((1, 8, 8, 8)), np.zeros((8, 8, 8)), np.zeros((8, 8, 8)))


def test_layers_laid_over_each_other_are_the_flat_picture():
    rng = np.random.default_rng(0)
    image = rng.random((1, 300, 300))
    truth, guess = square(50, 50, 100), square(60, 100, 100)
    layers = draw_layers(image, truth, guess)
    flat = layers["image"].convert("RGB")
    for name in ("truth", "prediction"):
        layer = layers[name].convert("RGBA")
        flat.paste(layer, mask=layer.getchannel("A"))
    expected = np.asarray(draw_overlay(image, truth, guess))
    one = ~where(expected, BOTH)  # where both run, the page blends the two colours
    assert (np.asarray(flat)[one] == expected[one]).all()
    assert one.mean() > 0.99


def test_pictures_are_stored_as_a_page_shows_them():
    rng = np.random.default_rng(0)
    case = rng.random((1, 300, 300)), square(50, 50, 100), square(60, 100, 100)
    flat, layers = draw_overlay(*case), draw_layers(*case)
    assert (np.asarray(Image.open(BytesIO(encode_png(flat)))) == np.asarray(flat)).all()
    for name, layer in layers.items():
        content, kind = encode_for_web(layer)
        stored = Image.open(BytesIO(content))
        assert (kind, stored.format) == (("webp", "WEBP") if name == "image" else ("png", "PNG"))
        found, drawn = (np.asarray(x.convert("RGBA")).astype(int) for x in (stored, layer))
        assert np.abs(found - drawn).mean() < (20 if name == "image" else 1e-9)


def test_errors_tell_missed_from_too_much_and_from_another_class():
    truth, guess = square(50, 50, 100), square(50, 100, 100)
    guess[50:60, 100:150] = 2
    mask = np.ones((300, 300), bool)
    mask[150:] = mask[:, 195:] = False
    errors = draw_layers(np.zeros((1, 300, 300)), truth, guess, mask)["errors"].convert("RGBA")
    pixels = np.asarray(errors)
    found = {colour: int((pixels[..., :3] == colour).all(-1).sum()) for colour in (TRUTH, WRONG)}
    assert found == {TRUTH: 50 * 100, WRONG: 10 * 50}
    assert tuple(pixels[100, 180, :3]) == PREDICTION
    assert pixels[100, 198, 3] == 0  # outside the mask nobody is wrong
    assert pixels[100, 120, 3] == 0  # both say the same
    assert 100 < pixels[100, 60, 3] < 255


def test_the_best_median_and_worst_case_are_drawn_and_three_for_every_method():
    values = [0.5, 0.9, None, 0.1, 0.7, 0.6, 0.3, 0.8, 0.2]
    cases = [{"case": f"c{k}", "dice": value} for k, value in enumerate(values)]
    chosen = choose_cases(reversed(cases), "dice")
    # sorted: .1 .2 .3 .5 .6 .7 .8 .9, of which number 4 is .6; by name the first, middle and last
    assert chosen == {
        "c0": ("common", 0.5), "c1": ("best", 0.9), "c3": ("worst", 0.1), "c4": ("common", 0.7),
        "c5": ("median", 0.6), "c8": ("common", 0.2),
    }  # fmt: skip


def test_of_a_few_cases_all_are_drawn_once():
    assert choose_cases([{"case": "c1", "dice": 0.4}], "dice") == {"c1": ("best", 0.4)}
    assert choose_cases([{"case": "c1", "dice": None}], "dice") == {"c1": ("common", None)}
    assert choose_cases([], "dice") == {}
