"""Which cases a model is applied to, and how what is written of them is called."""

import csv
from pathlib import Path
from typing import Any

import highdicom
import nibabel as nib
import numpy as np
import pydicom
import pytest
import torch
from PIL import Image

from collegium.core.tensors import Tensors
from collegium.data.cache import PreparedCase
from collegium.data.site import Case
from collegium.deploy import OpenedModels, adapt_folder, open_model, predict_folder
from collegium.deploy.cases import write_prediction
from collegium.errors import DataError
from collegium.experiment.config.building import network_of
from collegium.experiment.config.experiment import AdapterConfig, parse_config
from collegium.models.files import export_model

Pixels = np.ndarray[Any, Any]

UNET: dict[str, Any] = {"name": "unet", "channels": [4, 8], "num_res_units": 1}
DENSENET: dict[str, Any] = {"name": "densenet", "growth": 2, "blocks": [1], "init_features": 4}

OWN = """
import torch
from torch import nn

def colours(out_channels):
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, out_channels, 1))

class Streams(nn.Module):
    def __init__(self, out_channels):
        super().__init__()
        self.body, self.stem = nn.Conv2d(4, out_channels, 1), nn.Conv2d(1, 4, 3, padding=1)

    def forward(self, images):
        return self.body(sum(self.stem(images[:, k : k + 1]) for k in range(images.shape[1])))
"""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLLEGIUM_CACHE", str(tmp_path / "cache"))


def untrained(folder: Path, model: dict[str, Any], **federation: Any) -> OpenedModels:
    """A model of random weights in a file."""
    config = parse_config(
        {
            "name": "tiny",
            "federation": {"name": "f", "sites": {"s": {"folder": "s"}}, **federation},
            "model": model,
            "training": {"batch_size": 4, "local_steps": 3, "lr": 0.02},
            "rounds": 1,
            "algorithms": ["fedavg"],
            "output": str(folder / "run"),
        }
    )
    torch.manual_seed(3)
    export_model(Tensors(network_of(config)().state_dict()), folder / "global.safetensors")
    return open_model(folder / "global.safetensors", config=config)


def draw(number: int) -> Pixels:
    """Give a bright box in noise, another for each number."""
    pixels = np.random.default_rng(number).normal(60, 10, (16, 20))
    pixels[3 : 7 + number, 4:12] += 120
    return pixels.clip(0, 255).astype(np.uint8)


def save(path: Path, pixels: Pixels) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


# --- names


@pytest.mark.parametrize("name", ["../../evil", "P/01"])
@pytest.mark.parametrize("adapted", [False, True])
def test_no_id_of_a_manifest_leads_out_of_the_output(
    tmp_path: Path, name: str, adapted: bool
) -> None:
    opened = untrained(tmp_path, UNET | {"in_channels": 1})
    save(tmp_path / "in" / "a.png", draw(1))
    manifest = tmp_path / "in" / "m.csv"
    manifest.write_text(f"image,case\na.png,{name}\n")
    before, output = sorted(tmp_path.rglob("*")), tmp_path / "in" / "out"
    says = r"m\.csv, line 2: the case id '.*' cannot be a file's name"
    if adapted:
        with pytest.raises(DataError, match=says):
            adapt_folder(opened, manifest, AdapterConfig("none"), output)
    else:
        with pytest.raises(DataError, match=says):
            predict_folder(opened, manifest, output)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["../evil", "a/b", "a\\b", "..", ""])
def test_no_mask_is_written_beside_its_folder(tmp_path: Path, name: str) -> None:
    image, folder = save(tmp_path / "a.png", draw(1)), tmp_path / "out"
    (folder / "a").mkdir(parents=True)
    case = Case("north", name, "p", (image,), None)
    prepared = PreparedCase("north", name, "p", tmp_path, (1, 16, 20), None)
    with pytest.raises(DataError, match="no file can be called as it; give it an id without / and"):
        write_prediction(case, prepared, torch.zeros(1, 16, 20), folder, ("b", "f"))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "a.png", "out"]


def test_any_id_will_do_where_no_file_is_named_by_it(tmp_path: Path) -> None:
    task = {"name": "classification", "classes": ["well", "ill"]}
    opened = untrained(tmp_path, DENSENET, task=task, image={"inputs": 1})
    save(tmp_path / "a.png", draw(1))
    (tmp_path / "m.csv").write_text("image,case\na.png,P/01\n")
    output = predict_folder(opened, tmp_path / "m.csv", tmp_path / "out")
    assert [path.name for path in output.iterdir()] == ["predictions.csv"]
    with (output / "predictions.csv").open() as file:
        assert [row["case"] for row in csv.DictReader(file)] == ["P/01"]


# --- channels


@pytest.mark.parametrize("model", [UNET, DENSENET, {"name": "own.py:colours"}])
def test_a_network_that_takes_colours_by_default_gets_no_grey_images(
    tmp_path: Path, model: dict[str, Any]
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    name = model["name"].replace("own.py", str(tmp_path / "own.py"))
    kind = "classification" if model is DENSENET else "segmentation"
    task = {"name": kind, "classes": ["background", "lesion"]}
    opened = untrained(tmp_path, {**model, "name": name}, task=task)
    save(tmp_path / "in" / "a.png", draw(1))
    says = "case a: its image has 1 channels, and the models were trained on 3; export it as"
    with pytest.raises(DataError, match=says):
        predict_folder(opened, tmp_path / "in", tmp_path / "out")
    if kind == "segmentation":
        with pytest.raises(DataError, match=says):
            adapt_folder(opened, tmp_path / "in", AdapterConfig("none"), tmp_path / "out")
    save(tmp_path / "in" / "a.png", np.stack([draw(1)] * 3, -1))
    assert predict_folder(opened, tmp_path / "in", tmp_path / "out").exists()


def test_a_network_that_takes_any_number_of_channels_gets_them(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    opened = untrained(tmp_path, {"name": f"{tmp_path / 'own.py'}:Streams"})
    for channel in range(2):
        save(tmp_path / "in" / f"a_000{channel}.png", draw(channel))
    output = predict_folder(opened, tmp_path / "in", tmp_path / "out")
    assert [path.name for path in output.iterdir()] == ["a.png"]


# --- axes


FLAT = """
from torch import nn

def layer(in_channels, out_channels, spatial_dims):
    return {2: nn.Conv2d, 3: nn.Conv3d}[spatial_dims](in_channels, out_channels, 1)

class Slices(nn.Module):
    def __init__(self, out_channels):
        super().__init__()
        self.body = nn.Conv2d(1, out_channels, 1)

    def forward(self, images):
        if images.ndim == 4:
            return self.body(images)
        flat = images.movedim(-1, 1).flatten(0, 1)
        return self.body(flat).unflatten(0, (len(images), -1)).movedim(1, -1)
"""


def volume(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    values = np.random.default_rng(0).normal(60, 10, (16, 16, 8)).astype(np.float32)
    nib.save(nib.Nifti1Image(values, np.eye(4)), path)
    return path


@pytest.mark.parametrize("model", [UNET, {"name": "own.py:layer"}])
@pytest.mark.parametrize(
    ("axes", "says"),
    [
        (2, "case v: its image is a volume, and the models were trained on pictures; give"),
        (3, "case a: its image is a picture, and the models were trained on volumes; give"),
    ],
)
def test_volumes_and_pictures_are_told_apart(
    tmp_path: Path, axes: int, says: str, model: dict[str, Any]
) -> None:
    (tmp_path / "own.py").write_text(FLAT)
    name = model["name"].replace("own.py", str(tmp_path / "own.py"))
    opened = untrained(tmp_path, {**model, "name": name, "in_channels": 1, "spatial_dims": axes})
    images = tmp_path / "in"
    _ = volume(images / "v.nii.gz") if axes == 2 else save(images / "a.png", draw(1))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=says):
        predict_folder(opened, images, tmp_path / "out")
    with pytest.raises(DataError, match=says):
        adapt_folder(opened, images, AdapterConfig("none"), tmp_path / "out")
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "cache"] == before


def test_a_model_of_slices_takes_volumes_and_pictures(tmp_path: Path) -> None:
    opened = untrained(tmp_path, UNET | {"in_channels": 1}, sampling={"crop": [16, 16]})
    volume(tmp_path / "in" / "v.nii.gz")
    save(tmp_path / "in" / "a.png", draw(1))
    output = predict_folder(opened, tmp_path / "in", tmp_path / "out")
    assert sorted(path.name for path in output.iterdir()) == ["a.png", "v.nii.gz"]


def test_a_network_that_cuts_volumes_itself_gets_them(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FLAT)
    opened = untrained(tmp_path, {"name": f"{tmp_path / 'own.py'}:Slices"})
    volume(tmp_path / "in" / "v.nii.gz")
    output = predict_folder(opened, tmp_path / "in", tmp_path / "out")
    mask = nib.load(output / "v.nii.gz").get_fdata()  # type: ignore[attr-defined]
    assert mask.shape == (16, 16, 8)


# --- DICOM


def xray(path: Path, pixels: Pixels, number: int) -> None:
    """Write a view of one series; the numbers run against the names."""
    path.parent.mkdir(exist_ok=True)
    file = pydicom.Dataset()
    file.file_meta = pydicom.dataset.FileMetaDataset()
    file.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    file.SOPClassUID = pydicom.uid.ComputedRadiographyImageStorage
    file.file_meta.MediaStorageSOPClassUID = file.SOPClassUID
    file.SOPInstanceUID = f"1.2.3.{9 - number}"
    file.file_meta.MediaStorageSOPInstanceUID = file.SOPInstanceUID
    file.StudyInstanceUID, file.SeriesInstanceUID = "1.2.3", "1.2.4"
    file.Modality, file.SeriesNumber, file.InstanceNumber = "CR", 1, 9 - number
    file.PatientID, file.PatientName, file.PatientBirthDate, file.PatientSex = "7", "", "", ""
    file.StudyDate = file.StudyTime = file.StudyID = file.AccessionNumber = ""
    file.ReferringPhysicianName = file.Manufacturer = ""
    file.Rows, file.Columns = pixels.shape
    file.ImagerPixelSpacing = [0.2, 0.2]
    file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME2"
    file.BitsAllocated, file.BitsStored, file.HighBit, file.PixelRepresentation = 8, 8, 7, 0
    file.PixelData = pixels.tobytes()
    file.save_as(path, enforce_file_format=True)


def scores(output: Path) -> dict[str, str]:
    with (output / "scores.csv").open() as file:
        return {row["case"]: row["dice"] for row in csv.DictReader(file)}


def test_x_rays_of_a_folder_get_masks_by_their_names_and_are_scored(tmp_path: Path) -> None:
    opened = untrained(tmp_path, UNET | {"in_channels": 1})
    for number in range(3):
        pixels = draw(number)
        save(tmp_path / "png" / f"c{number}.png", pixels)
        save(tmp_path / "truth" / f"c{number}.png", (pixels > 120).astype(np.uint8))
        xray(tmp_path / "dcm" / f"c{number}.dcm", pixels, number)
    labels = tmp_path / "truth"
    plain = predict_folder(opened, tmp_path / "png", tmp_path / "plain", labels=labels)
    output = predict_folder(opened, tmp_path / "dcm", tmp_path / "out", labels=labels)
    names = sorted(path.name for path in output.iterdir())
    assert names == ["c0.dcm", "c1.dcm", "c2.dcm", "scores.csv"]
    assert scores(output) == scores(plain)
    assert len({*scores(output).values()}) == 3
    for number in range(3):
        segmentation: Any = highdicom.seg.segread(output / f"c{number}.dcm")
        (image,) = segmentation.ReferencedSeriesSequence[0].ReferencedInstanceSequence
        assert image.ReferencedSOPInstanceUID == f"1.2.3.{9 - number}"
        with Image.open(plain / f"c{number}.png") as mask:
            wanted = np.asarray(mask)
        np.testing.assert_array_equal(segmentation.pixel_array.reshape(wanted.shape), wanted)
        assert 0 < wanted.sum() < wanted.size
