"""Predictions of new cases are those that the run itself scored, on the grid of their images."""

import csv
import math
from pathlib import Path
from typing import Any

import highdicom
import nibabel as nib
import numpy as np
import pydicom
import pytest
import SimpleITK
import yaml
from PIL import Image
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from typer.testing import CliRunner

from collegium import cli
from collegium.deploy import open_model, predict_folder
from collegium.errors import ConfigError, DataError
from collegium.evaluation.scores import rows_of
from collegium.experiment.config.experiment import parse_config
from collegium.experiment.runner import collect_rows, read_run_config, run_experiment

UNET: dict[str, Any] = {"name": "unet", "in_channels": 1, "channels": [4, 8], "num_res_units": 1}
TRAINING = {"batch_size": 4, "local_steps": 3, "lr": 0.02}
SITES = ("north", "south")
AFFINE = np.array([[0, -2.0, 0, 5], [-1.5, 0, 0, 7], [0, 0, 3, -9], [0, 0, 0, 1]])


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLEGIUM_CACHE", str(tmp_path_factory.mktemp("predict-cache")))
        yield


def run(folder: Path, federation: dict[str, Any], **settings: Any) -> Path:
    whole = {"name": "f", "root": str(folder), **federation}
    plain = {
        "name": "tiny", "federation": whole, "training": TRAINING, "rounds": 1,
        "algorithms": ["fedavg"], "output": str(folder / "run"), **settings,
    }  # fmt: skip
    return run_experiment(parse_config(plain))


def run_scores(
    output: Path, site: str, metric: str, *, algorithm: str = "fedavg", model: str = "global"
) -> dict[str, float | None]:
    """What the run's own test says of a site's cases, by their own ids."""
    key = output / algorithm / "seed-0/clients" / site / "cases-test.csv"
    with key.open() as file:
        own = {row["case"]: row["own_case"] for row in csv.DictReader(file)}
    return {
        own[row.case]: None if math.isnan(row.value) else row.value
        for row in rows_of(collect_rows(read_run_config(output)))
        if (row.site, row.split, row.metric, row.model) == (site, "test", metric, model)
    }


def table(path: Path) -> dict[str, dict[str, str]]:
    with path.open() as file:
        return {row["case"]: row for row in csv.DictReader(file)}


def chances(row: dict[str, str], classes: tuple[str, ...]) -> list[float]:
    return [float(row[name]) for name in classes]


def predict(output: Path, place: Path, to: Path, **settings: Any) -> Path:
    return predict_folder(open_model(output), place, to, **settings)


# --- tables


def run_of_tables(folder: Path, ill: str, scale: str = "federation", **settings: Any) -> Path:
    for number, site in enumerate(SITES):
        rng = np.random.default_rng(number)
        lines = [
            f"{site}{place},{rng.normal(50, 9):.2f},{'I' if place % 3 else 'II'},"
            f"{('train', 'val', 'test')[place % 3]},{place % 2}"
            for place in range(24)
        ]
        (folder / f"{site}.csv").write_text("\n".join(["id,age,stage,fold,ill", *lines]) + "\n")
    columns = {
        "label": "ill", "numeric": ["age"], "categorical": {"stage": ["I", "II"]}, "case": "id",
        "split": "fold", "scale": scale,
    }  # fmt: skip
    task = {"name": "classification", "classes": ["well", ill],
            "coding": {"0": "well", "1": ill}}  # fmt: skip
    sites = {site: {"table": f"{site}.csv"} for site in SITES}
    federation = {"sites": sites, "task": task, "table": columns}
    return run(folder, federation, model={"name": "mlp", "hidden": [4]}, **settings)


@pytest.fixture(scope="module")
def of_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two sites; its numbers are scaled by both together."""
    return run_of_tables(tmp_path_factory.mktemp("tables"), "ill")


def test_rows_of_a_table_get_the_probabilities_that_the_run_scored(
    of_tables: Path, tmp_path: Path
) -> None:
    place = of_tables.parent / "south.csv"
    found = table(predict(of_tables, place, tmp_path / "out") / "predictions.csv")
    assert [*found] == [f"south{number}" for number in range(24)]
    losses = run_scores(of_tables, "south", "log_loss")
    assert len(losses) == 8
    for case, row in found.items():
        both = chances(row, ("well", "ill"))
        assert sum(both) == pytest.approx(1, abs=2e-6)
        assert row["class"] == ("well", "ill")[int(np.argmax(both))]
        if case in losses:
            truth = int(case.removeprefix("south")) % 2
            assert -math.log(both[truth]) == pytest.approx(losses[case], abs=1e-5)


def test_rows_whose_class_is_named_are_scored(of_tables: Path, tmp_path: Path) -> None:
    output = predict(of_tables, of_tables.parent / "south.csv", tmp_path / "out")
    found, scores = table(output / "predictions.csv"), table(output / "scores.csv")
    assert [*scores] == [*found]
    truth = np.array([int(case.removeprefix("south")) % 2 for case in found])
    ill = np.array([float(row["ill"]) for row in found.values()])
    for case, said, one in zip(found, truth, ill, strict=True):
        loss = -math.log(one if said else 1 - one)
        assert float(scores[case]["log_loss"]) == pytest.approx(loss, abs=1e-5)
        assert float(scores[case]["accuracy"]) == ((one > 0.5) == said)
    mean = np.mean([float(row["auc"]) for row in scores.values()])
    assert mean == pytest.approx(roc_auc_score(truth, ill))
    balanced = np.mean([float(row["balanced_accuracy"]) for row in scores.values()])
    assert balanced == pytest.approx(balanced_accuracy_score(truth, ill > 0.5))


def test_new_rows_need_neither_class_nor_split_and_may_be_ordered_otherwise(
    of_tables: Path, tmp_path: Path
) -> None:
    lines = (of_tables.parent / "south.csv").read_text().splitlines()
    kept = [line.split(",")[:3] for line in lines]  # without fold and class
    (tmp_path / "new.csv").write_text("\n".join(";".join(row[::-1]) for row in kept) + "\n")
    new = predict(of_tables, tmp_path / "new.csv", tmp_path / "new") / "predictions.csv"
    old = predict(of_tables, of_tables.parent / "south.csv", tmp_path / "old") / "predictions.csv"
    assert new.read_text() == old.read_text()
    assert [path.name for path in new.parent.iterdir()] == ["predictions.csv"]


def test_a_site_s_own_model_scales_as_the_site_does(tmp_path: Path) -> None:
    output = run_of_tables(tmp_path, "ill", "site", algorithms=["ditto"])
    opened = open_model(output, site="south")
    whole = predict_folder(opened, tmp_path / "south.csv", tmp_path / "all") / "predictions.csv"
    losses = run_scores(output, "south", "log_loss", algorithm="ditto", model="personal")
    for case, loss in losses.items():
        truth = int(case.removeprefix("south")) % 2
        chance = chances(table(whole)[case], ("well", "ill"))[truth]
        assert -math.log(chance) == pytest.approx(loss, abs=1e-5)
    header, first, *_ = (tmp_path / "south.csv").read_text().splitlines()
    (tmp_path / "one.csv").write_text(f"{header}\n{first}\n")
    one = predict_folder(opened, tmp_path / "one.csv", tmp_path / "one") / "predictions.csv"
    assert table(one)["south0"] == table(whole)["south0"]
    with pytest.raises(DataError, match=r"holds one row, .* predict with a site's own model"):
        predict(output, tmp_path / "one.csv", tmp_path / "global")


def test_a_class_that_is_called_like_a_column_overwrites_none(tmp_path: Path) -> None:
    output = run_of_tables(tmp_path, "case")
    found = table(predict(output, tmp_path / "south.csv", tmp_path / "out") / "predictions.csv")
    assert [*found] == [f"south{number}" for number in range(24)]
    for row in found.values():
        assert list(row) == ["case", "class", "well", "probability of case"]
        both = chances(row, ("well", "probability of case"))
        assert sum(both) == pytest.approx(1, abs=2e-6)
        assert row["class"] == ("well", "case")[int(np.argmax(both))]


def test_a_table_is_not_a_folder_of_images(of_tables: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model learnt from tables; name a table"):
        predict(of_tables, tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match="a folder of labels scores segmentations only"):
        predict(of_tables, of_tables.parent / "south.csv", tmp_path / "out", labels=tmp_path)
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_not_written_over_and_failures_leave_nothing(
    of_tables: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="holds something already"):
        predict(of_tables, of_tables.parent / "south.csv", of_tables)
    (tmp_path / "bad.csv").write_text("id,age,stage\nx,old,I\n")
    with pytest.raises(DataError, match="row 1: column age holds no number"):
        predict(of_tables, tmp_path / "bad.csv", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.csv"]


# --- segmentations


def draw(folder: Path, seed: int, count: int, shape: tuple[int, ...]) -> None:
    """Write bright boxes in noise, as pictures or as volumes whose axes are turned."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        label = np.zeros(shape, np.uint8)
        label[4:11, 5:13] = 1
        image = (rng.normal(60, 10, shape) + 120 * label).clip(0, 255).astype(np.uint8)
        for kind, array in (("images", image), ("labels", label)):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            if len(shape) == 3:
                nib.save(nib.Nifti1Image(array, AFFINE), folder / kind / f"c{number}.nii.gz")
            else:
                Image.fromarray(array).save(folder / kind / f"c{number}.png")


def segmentations(
    folder: Path, shape: tuple[int, ...], *, model: dict[str, Any] = UNET, **settings: Any
) -> Path:
    for number, site in enumerate(SITES):
        draw(folder / site, number, 5, shape)
    sites = {site: {"folder": site} for site in SITES}
    return run(folder, {"sites": sites, **settings}, model=model)


@pytest.fixture(scope="module", params=["volumes", "pictures", "resized", "turned"])
def of_masks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "turned":  # slices along y, each with both neighbours
        sampling = {"crop": [16, 4], "neighbours": 1}
        image = {"slices_along": "y", "inputs": 1}
        model = {key: value for key, value in UNET.items() if key != "in_channels"}
        shape = (16, 18, 8)
        return segmentations(folder, shape, sampling=sampling, image=image, model=model)
    if request.param == "volumes":
        return segmentations(folder, (16, 18, 6), sampling={"crop": [16, 16]})
    size = {"image": {"size": [16, 16]}} if request.param == "resized" else {}
    return segmentations(folder, (16, 16) if not size else (20, 24), **size)


def read(path: Path) -> np.ndarray[Any, Any]:
    if path.name.endswith(".nii.gz"):
        return np.asarray(nib.load(path).dataobj)  # type: ignore[attr-defined]
    with Image.open(path) as image:
        return np.asarray(image)


def test_masks_lie_on_the_grid_of_their_images_and_score_as_in_the_run(
    of_masks: Path, tmp_path: Path
) -> None:
    site = of_masks.parent / "south"
    output = predict(of_masks, site / "images", tmp_path / "out", labels=site / "labels")
    images = sorted((site / "images").iterdir())
    masks = sorted(path for path in output.iterdir() if path.suffix != ".csv")
    assert [path.name for path in masks] == [path.name for path in images]
    for image, mask in zip(images, masks, strict=True):
        found = read(mask)
        assert found.shape == read(image).shape
        assert set(np.unique(found)) <= {0, 1}
        if mask.suffix == ".gz":
            np.testing.assert_allclose(nib.load(mask).affine, AFFINE)  # type: ignore[attr-defined]
    scores = {case: float(row["dice"]) for case, row in table(output / "scores.csv").items()}
    own = run_scores(of_masks, "south", "dice")
    assert {case: scores[case] for case in own} == pytest.approx(own)
    for mask in masks if not of_masks.parent.name.startswith("resized") else ():
        found, truth = read(mask) == 1, read(site / "labels" / mask.name) == 1
        dice = 2 * (found & truth).sum() / (found.sum() + truth.sum())
        assert scores[mask.name.partition(".")[0]] == pytest.approx(dice)


# --- classes of images


@pytest.fixture(scope="module")
def of_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a site with a folder for each class and one with a manifest."""
    folder = tmp_path_factory.mktemp("classes")
    rng = np.random.default_rng(0)
    lines = ["image,class,split"]
    for number in range(12):
        name, dark = f"n{number:02}", rng.normal(60, 10, (12, 12))
        for site in SITES:
            ill = number % 2 == 1
            pixels = dark.copy()
            pixels[:, : 6 if ill else 2] += 100
            place = f"south/{name}.png"
            if site == "north":
                split = ("train", "val", "test")[number // 4]
                place = f"north/{split}/{'ill' if ill else 'well'}/{name}.png"
            else:
                lines.append(f"{name}.png,{int(ill)},{('train', 'val', 'test')[number // 4]}")
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / place)
    (folder / "south" / "m.csv").write_text("\n".join(lines) + "\n")
    task = {"name": "classification", "classes": ["well", "ill"],
            "coding": {"0": "well", "1": "ill"}, "metric": "auc"}  # fmt: skip
    sites = {"north": {"folder": "north"}, "south": {"manifest": "south/m.csv"}}
    model = {"name": "densenet", "growth": 2, "blocks": [1], "init_features": 4}
    federation = {"sites": sites, "task": task, "image": {"inputs": 1}}
    return run(folder, federation, model=model)


@pytest.mark.parametrize(("site", "place"), [("south", "south/m.csv"), ("south", "south"),
                                             ("north", "north/test/ill")])  # fmt: skip
def test_images_get_the_probabilities_that_the_run_scored(
    of_classes: Path, tmp_path: Path, site: str, place: str
) -> None:
    output = predict(of_classes, of_classes.parent / place, tmp_path / "out")
    scored = place.endswith("m.csv")  # names the classes
    names = ["predictions.csv", "scores.csv"][: 1 + scored]
    assert sorted(path.name for path in output.iterdir()) == names
    found = table(output / "predictions.csv")
    losses = run_scores(of_classes, site, "log_loss")
    for case, row in table(output / "scores.csv").items() if scored else ():
        right = found[case]["class"] == ("well", "ill")[int(case.removeprefix("n")) % 2]
        assert float(row["accuracy"]) == right
    shared = found.keys() & losses.keys()
    assert len(shared) == (4 if site == "south" else 2)
    for case in shared:
        both = chances(found[case], ("well", "ill"))
        assert sum(both) == pytest.approx(1, abs=2e-6)
        truth = int(case.removeprefix("n")) % 2
        assert -math.log(both[truth]) == pytest.approx(losses[case], abs=1e-5)


def test_the_command_writes_what_the_library_does(of_classes: Path, tmp_path: Path) -> None:
    images = of_classes.parent / "south"
    arguments = ["predict", str(of_classes), str(images), "--output", str(tmp_path / "cli")]
    done = CliRunner().invoke(cli.app, arguments)
    assert (done.exit_code, done.output.strip()) == (0, str(tmp_path / "cli"))
    own = predict(of_classes, images, tmp_path / "own") / "predictions.csv"
    assert (tmp_path / "cli/predictions.csv").read_text() == own.read_text()


# --- personal models, files of models, other kinds of images


@pytest.fixture(scope="module")
def of_slices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with personal models, on volumes that are seen slice by slice."""
    folder, settings = tmp_path_factory.mktemp("slices"), {"sampling": {"crop": [16, 16]}}
    for number, site in enumerate(SITES):
        draw(folder / site, number, 5, (16, 18, 6))
    sites = {site: {"folder": site} for site in SITES}
    return run(folder, {"sites": sites, **settings}, model=UNET, algorithms=["ditto"])


def test_images_for_a_site_s_own_model_lack_the_channels_that_the_site_lacks(
    tmp_path: Path,
) -> None:
    for number, site in enumerate(SITES):
        draw(tmp_path / site, number, 5, (16, 16))
    for path in (tmp_path / "south" / "images").iterdir():
        red = np.asarray(Image.open(path))
        Image.fromarray(np.stack([red, 255 - red, red], -1)).save(path)  # green has its own
    for path in (tmp_path / "north" / "images").iterdir():
        Image.open(path).convert("RGB").save(path)
    sites = {"north": {"folder": "north"}, "south": {"folder": "south", "channels": [0, 2]}}
    output = run(
        tmp_path, {"sites": sites, "image": {"inputs": 3}}, model=UNET | {"in_channels": 3},
        algorithms=["ditto"],
    )  # fmt: skip
    own = tmp_path / "south"
    opened = open_model(output, site="south")
    predict_folder(opened, own / "images", tmp_path / "out", labels=own / "labels")
    scores = table(tmp_path / "out" / "scores.csv")
    ran = run_scores(output, "south", "dice", algorithm="ditto", model="personal")
    assert {case: float(scores[case]["dice"]) for case in ran} == pytest.approx(ran)


def test_labels_of_a_site_mean_what_they_mean_there(tmp_path: Path) -> None:
    for number, site in enumerate(SITES):
        draw(tmp_path / site, number, 5, (16, 16))
    for path in (tmp_path / "south" / "labels").iterdir():
        Image.fromarray(np.asarray(Image.open(path)) * 7).save(path)
    sites = {"north": {"folder": "north"}, "south": {"folder": "south", "label_map": {0: 0, 7: 1}}}
    output = run(tmp_path, {"sites": sites}, model=UNET, algorithms=["ditto"])
    own = tmp_path / "south"
    opened = open_model(output, site="south")
    predict_folder(opened, own / "images", tmp_path / "out", labels=own / "labels")
    scores = table(tmp_path / "out" / "scores.csv")
    ran = run_scores(output, "south", "dice", algorithm="ditto", model="personal")
    assert {case: float(scores[case]["dice"]) for case in ran} == pytest.approx(ran)


def test_a_site_gets_what_its_personal_model_scored(of_slices: Path, tmp_path: Path) -> None:
    south = of_slices.parent / "south"
    for site in (None, "south"):
        opened = open_model(of_slices, site=site)
        place = tmp_path / str(site)
        predict_folder(opened, south / "images", place, labels=south / "labels")
    own = {case: float(row["dice"]) for case, row in table(tmp_path / "south/scores.csv").items()}
    others = {case: float(row["dice"]) for case, row in table(tmp_path / "None/scores.csv").items()}
    kinds = {"personal": own, "global": others}
    for model, scores in kinds.items():
        wanted = run_scores(of_slices, "south", "dice", algorithm="ditto", model=model)
        assert len(wanted) > 0
        assert {case: scores[case] for case in wanted} == pytest.approx(wanted)
    assert own != others
    with pytest.raises(ConfigError, match="has no site 'west'; choose one of north, south"):
        open_model(of_slices, site="west")


def masks_of(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    return {path.name: read(path) for path in sorted(folder.iterdir())}


def test_a_file_of_a_model_predicts_as_the_run_that_wrote_it(
    of_slices: Path, tmp_path: Path
) -> None:
    config = tmp_path / "x.yaml"
    sites = {site: {"folder": site} for site in SITES}
    federation = {"name": "f", "sites": sites, "sampling": {"crop": [16, 16]}}
    whole = {"name": "tiny", "federation": federation, "training": TRAINING, "rounds": 1,
             "model": UNET, "algorithms": ["ditto"], "output": "run"}  # fmt: skip
    config.write_text(yaml.safe_dump(whole))
    model = of_slices / "ditto/seed-0/clients/south/personal.safetensors"
    images = of_slices.parent / "north" / "images"
    arguments = ["predict", str(model), str(images), "--output", str(tmp_path / "file")]
    refused = CliRunner().invoke(cli.app, arguments)
    assert (refused.exit_code, "name its file with --config" in refused.stderr) == (2, True)
    done = CliRunner().invoke(cli.app, [*arguments, "--config", str(config)])
    assert done.exit_code == 0, done.output
    run_, place = str(of_slices), str(tmp_path / "run")
    words = ["predict", run_, str(images), "--output", place, "--site", "south"]
    assert CliRunner().invoke(cli.app, words).exit_code == 0
    ours, theirs = masks_of(tmp_path / "run"), masks_of(tmp_path / "file")
    assert [*ours] == [*theirs] == [f"c{number}.nii.gz" for number in range(5)]
    for name, mask in ours.items():
        np.testing.assert_array_equal(mask, theirs[name])


def scan(folder: Path, number: int, volume: np.ndarray[Any, Any], origin: list[float]) -> None:
    """Write (slices, rows, columns) as an axial CT of 0.8 x 0.7 x 2.5 mm, names out of order."""
    folder.mkdir(parents=True, exist_ok=True)
    for place, pixels in enumerate(volume.astype(np.uint16)):
        file = pydicom.Dataset()
        file.file_meta = pydicom.dataset.FileMetaDataset()
        file.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
        file.SOPClassUID = file.file_meta.MediaStorageSOPClassUID = pydicom.uid.CTImageStorage
        file.SOPInstanceUID = pydicom.uid.generate_uid()
        file.file_meta.MediaStorageSOPInstanceUID = file.SOPInstanceUID
        file.StudyInstanceUID, file.SeriesInstanceUID = "1.2.3", f"1.2.3.{number}"
        file.FrameOfReferenceUID, file.Modality, file.SeriesNumber = "1.2.4", "CT", number
        file.PatientID, file.PatientName, file.InstanceNumber = "7", "Doe^Jane", place + 1
        file.ImagePositionPatient = [*origin[:2], origin[2] + 2.5 * place]
        file.ImageOrientationPatient, file.PixelSpacing = [1, 0, 0, 0, 1, 0], [0.7, 0.8]
        file.SliceThickness = 2.5
        file.Rows, file.Columns = pixels.shape
        file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME2"
        file.BitsAllocated, file.BitsStored, file.HighBit, file.PixelRepresentation = 16, 16, 15, 0
        file.RescaleSlope, file.RescaleIntercept = 1, 0
        file.PixelData = pixels.tobytes()
        file.save_as(folder / f"{number}-{(place * 5) % 6}", enforce_file_format=True)


@pytest.mark.parametrize("numbers", [(4,), (4, 9)])
def test_a_dicom_series_gets_a_segmentation_on_its_points(
    of_slices: Path, tmp_path: Path, numbers: tuple[int, ...]
) -> None:
    rng, origin = np.random.default_rng(5), [-30.0, 12.0, 100.0]
    for number in numbers:
        volume = rng.normal(60, 10, (6, 17, 18)).clip(0)
        volume[1 : number // 2 + 1, 4:11, 5:13] += 120
        volume = volume.astype(np.uint16)
        scan(tmp_path / "in" / "p", number, volume, origin)
        name = "p" if len(numbers) == 1 else f"p-{number}"
        # the same voxels as (x, y, z), left and back being positive in DICOM
        affine = np.diag([-0.8, -0.7, 2.5, 1]) + np.pad(
            [[30.0], [-12.0], [100.0]], ((0, 1), (3, 0))
        )
        (tmp_path / "nii").mkdir(exist_ok=True)
        nib.save(nib.Nifti1Image(volume.T, affine), tmp_path / "nii" / f"{name}.nii.gz")
    output = predict(of_slices, tmp_path / "in", tmp_path / "out")
    wanted = masks_of(predict(of_slices, tmp_path / "nii", tmp_path / "own"))
    written = {path.stem: path for path in output.iterdir()}
    assert [f"{name}.nii.gz" for name in sorted(written)] == [*wanted]
    for name, path in written.items():
        segmentation: Any = highdicom.seg.segread(path)
        assert segmentation.Modality == "SEG"
        assert {item.SeriesInstanceUID for item in segmentation.ReferencedSeriesSequence} == {
            f"1.2.3.{4 if name == 'p' else name[2:]}"
        }
        found = np.zeros((6, 17, 18), np.uint8)
        frames = segmentation.pixel_array.reshape(-1, 17, 18)
        for frame, about in zip(frames, segmentation.PerFrameFunctionalGroupsSequence, strict=True):
            position = about.PlanePositionSequence[0].ImagePositionPatient
            assert list(position[:2]) == origin[:2]
            found[round((position[2] - origin[2]) / 2.5)] = frame
        np.testing.assert_array_equal(found.T, wanted[f"{name}.nii.gz"])
        assert 0 < found.sum() < found.size


def test_nrrd_and_metaimage_are_answered_in_kind_as_nifti_is(
    of_slices: Path, tmp_path: Path
) -> None:
    images = of_slices.parent / "south" / "images"
    wanted = masks_of(predict(of_slices, images, tmp_path / "nii"))
    for suffix in (".nrrd", ".mha"):
        (tmp_path / suffix[1:]).mkdir()
        for path in images.iterdir():
            there = tmp_path / suffix[1:] / path.name.replace(".nii.gz", suffix)
            SimpleITK.WriteImage(SimpleITK.ReadImage(str(path)), str(there))
        output = predict(of_slices, tmp_path / suffix[1:], tmp_path / f"out{suffix}")
        for name, mask in wanted.items():
            file = name.replace(".nii.gz", suffix)
            found = SimpleITK.ReadImage(str(output / file))
            source = SimpleITK.ReadImage(str(tmp_path / suffix[1:] / file))
            np.testing.assert_array_equal(SimpleITK.GetArrayFromImage(found).T, mask)
            np.testing.assert_allclose(found.GetDirection(), source.GetDirection())
            np.testing.assert_allclose(found.GetOrigin(), source.GetOrigin())
            assert found.GetSpacing() == source.GetSpacing()


def test_images_that_cannot_be_predicted_leave_nothing(of_slices: Path, tmp_path: Path) -> None:
    colours = tmp_path / "in" / "a.png"
    colours.parent.mkdir()
    Image.fromarray(np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)).save(colours)
    with pytest.raises(DataError, match="case a: its image has 3 channels, and the models were"):
        predict(of_slices, colours.parent, tmp_path / "out")
    colours.write_bytes(b"no picture")
    with pytest.raises(DataError, match="it is damaged, cut short or not what its name says"):
        predict(of_slices, colours.parent, tmp_path / "out")
    (tmp_path / "truth").mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "truth" / "b.png")
    with pytest.raises(DataError, match=r"no mask in .* belongs to an image"):
        predict(of_slices, colours.parent, tmp_path / "out", labels=tmp_path / "truth")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "truth"]
    with pytest.raises(DataError, match="holds something already; choose another output folder"):
        predict(of_slices, colours.parent, tmp_path / "in")
    assert [path.name for path in colours.parent.iterdir()] == ["a.png"]
