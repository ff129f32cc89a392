import base64
import json
import re
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from collegium.errors import DataError
from collegium.evaluation.report.overlays import draw_layers, encode_for_web, prepare_case
from collegium.evaluation.report.pictures import Overlay, PictureSheet, read_overlays


def write_index(folder, place, entries):
    cell = folder.joinpath(*place.split("/")) / "overlays"
    cell.mkdir(parents=True)
    (cell / "index.json").write_text(json.dumps(entries))
    return cell


def entry(rank, **changes):
    return {"site": "A", "model": "global", "rank": rank, "case": "c001", "metric": "dice",
            "value": 0.5, "file": f"A-global-{rank}.png"} | changes  # fmt: skip


def overlay(file, layers=None):
    return Overlay("A", "fedavg", 0, "global", "best", "c001", "dice", 0.5, file, layers or {})


def test_overlays_of_the_lowest_seed_are_found_best_first(tmp_path):
    cell = write_index(tmp_path, "fedavg/seed-2", [entry("worst", value=None), entry("best")])
    write_index(tmp_path, "fedavg/seed-10", [entry("median")])
    found = read_overlays(tmp_path)
    assert [(o.rank, o.seed, o.algorithm, o.value) for o in found] == [
        ("best", 2, "fedavg", 0.5),
        ("worst", 2, "fedavg", None),
    ]
    assert found[0] == Overlay("A", "fedavg", 2, "global", "best", "c001", "dice", 0.5,
                               cell / "A-global-best.png")  # fmt: skip
    assert read_overlays(tmp_path / "fedavg") == found


def test_each_site_shows_its_first_fold(tmp_path):
    b = entry("best", site="B")
    write_index(tmp_path, "without-C/fedavg/seed-0", [entry("best", case="c2"), b])
    write_index(tmp_path, "without-B/fedavg/seed-0", [entry("best", case="c1")])
    found = read_overlays(tmp_path)
    assert [(o.site, o.place, o.case) for o in found] == [
        ("A", ("without-B",), "c1"),
        ("B", ("without-C",), "c001"),
    ]


def test_of_a_sweep_only_the_pictures_of_the_setting_are_shown(tmp_path):
    write_index(tmp_path, "tau-1/fedavg/seed-0", [entry("best")])
    write_index(tmp_path, "tau-2/without-B/fedavg/seed-0", [entry("worst")])
    assert [o.rank for o in read_overlays(tmp_path, "tau-1")] == ["best"]
    assert [o.rank for o in read_overlays(tmp_path, "tau-2")] == ["worst"]


def test_pictures_of_a_site_outside_are_found_unadapted_first(tmp_path):
    cell = "without-A/fedavg/seed-"
    for adapter in ("tent", "none", "my own"):
        place = f"{cell}3/outside/A/{adapter}"
        write_index(tmp_path, place, [entry("best", model=adapter, case="outside-c001")])
    write_index(tmp_path, f"{cell}10/outside/A/tent", [entry("worst", model="tent")])
    write_index(tmp_path, "without-B/fedavg/seed-3", [entry("best")])
    found = read_overlays(tmp_path)
    assert [(o.where, o.name, o.rank, o.seed, o.place) for o in found] == [
        ("inside", "FedAvg global", "best", 3, ("without-B",)),
        ("outside", "FedAvg", "best", 3, ("without-A",)),
        ("outside", "FedAvg + Tent", "best", 3, ("without-A",)),
        ("outside", "FedAvg + my own", "best", 3, ("without-A",)),
    ]
    folder = tmp_path / "without-A/fedavg/seed-3/outside/A/tent/overlays"
    assert found[2].file == folder / "A-global-best.png"


@pytest.mark.parametrize("text", ["[{]", '[{"site": "A"}]', "[3]", '[{"layers": 3}]'])
def test_a_damaged_index_is_named(tmp_path, text):
    cell = write_index(tmp_path, "fedavg/seed-0", [])
    (cell / "index.json").write_text(text)
    with pytest.raises(DataError, match=r"index\.json: this is not an index of overlays"):
        read_overlays(tmp_path)


def opened(sheet, name):
    (found,) = re.findall(
        rf'\.{name}{{background-image:url\("data:image/(\w+);base64,([^"]+)"', sheet.css
    )
    return found[0], Image.open(BytesIO(base64.b64decode(found[1])))


def test_an_embedded_picture_is_at_most_512_pixels(tmp_path):
    path = tmp_path / "big.png"
    Image.new("RGB", (1024, 700), (255, 0, 0)).save(path)
    sheet = PictureSheet()
    picture = sheet.add(overlay(path))
    assert picture is not None
    assert picture.size == (512, 350)
    kind, shown = opened(sheet, picture.layers["image"])
    assert (kind, shown.size) == ("webp", (512, 350))
    assert shown.convert("RGB").getpixel((5, 5))[0] > 250


def test_layers_keep_every_pixel_and_shared_ones_are_there_once(tmp_path):
    rng = np.random.default_rng(0)
    truth = rng.random((300, 300)) > 0.9
    sheet, shown, files = PictureSheet(), [], []
    for number in range(2):
        image = rng.random((1, 300, 300)) * 0 + truth
        layers = draw_layers(prepare_case(image, truth, np.roll(truth, number)))
        files.append({name: tmp_path / f"{number}-{name}.png" for name in layers})
        for name, layer in layers.items():
            layer.save(files[-1][name])
        shown.append(sheet.add(overlay(tmp_path / "absent.png", files[-1])))
    first, second = shown
    assert first is not None
    assert second is not None
    assert first.layers["image"] == second.layers["image"]
    assert first.layers["truth"] == second.layers["truth"]
    assert first.layers["prediction"] != second.layers["prediction"]
    assert sheet.css.count("background-image") == 6
    kind, layer = opened(sheet, second.layers["prediction"])
    assert kind == "png"
    stored = Image.open(files[1]["prediction"]).convert("RGBA")
    assert (np.asarray(layer.convert("RGBA")) == np.asarray(stored)).all()


def test_stored_pictures_are_embedded_as_they_are(tmp_path):
    rng = np.random.default_rng(0)
    truth = rng.random((300, 300)) > 0.9
    drawn = draw_layers(prepare_case(rng.random((1, 300, 300)), truth, np.roll(truth, 1)))
    files = {}
    for name, layer in drawn.items():
        content, kind = encode_for_web(layer)
        files[name] = tmp_path / f"{name}.{kind}"
        files[name].write_bytes(content)
    sheet = PictureSheet()
    shown = sheet.add(overlay(tmp_path / "absent.png", files))
    assert shown is not None
    for name, file in files.items():
        kind, text = re.findall(
            rf'\.{shown.layers[name]}{{background-image:url\("data:image/(\w+);base64,([^"]+)"',
            sheet.css,
        )[0]
        assert (f".{kind}", base64.b64decode(text)) == (file.suffix, file.read_bytes())


def test_pictures_beyond_the_budget_are_left_out(tmp_path):
    rng = np.random.default_rng(0)
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for file in files:
        Image.fromarray(rng.integers(0, 256, (128, 128, 3), np.uint8)).save(file)
    one = PictureSheet()
    one.add(overlay(files[0]))
    budget = round(2.5 * len(one.css) * 3 / 4)
    sheet = PictureSheet(budget)
    shown = [sheet.add(overlay(file)) for file in files]
    assert [picture is None for picture in shown] == [False, False, True]
    assert sheet.add(overlay(files[0])) == shown[0]  # costs nothing
    assert len(sheet.css) < budget * 4 / 3


def test_a_picture_that_is_absent_or_none_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.png: the overlay cannot be read"):
        PictureSheet().add(overlay(tmp_path / "gone.png"))
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(DataError, match=r"text\.png: the overlay cannot be read"):
        PictureSheet().add(overlay(tmp_path / "text.png"))
