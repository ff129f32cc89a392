"""Exported bundles run with MONAI alone, and say what `collegium predict` says."""

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pydicom
import pytest
import SimpleITK
import torch
from PIL import Image
from typer.testing import CliRunner

from collegium import cli
from collegium.core.tensors import Tensors
from collegium.deploy import (
    OpenedModels,
    export_bundle,
    open_model,
    open_models,
    predict_folder,
)
from collegium.errors import ConfigError, DataError
from collegium.experiment.config.building import network_of
from collegium.experiment.config.experiment import ExperimentConfig, parse_config
from collegium.experiment.runner import run_experiment
from collegium.models.files import export_model

pytestmark = pytest.mark.filterwarnings("ignore:NvImgCodecPydicomReader:UserWarning")  # MONAI's

Pixels = np.ndarray[Any, Any]

UNET: dict[str, Any] = {"name": "unet", "in_channels": 1, "channels": [4, 8, 8], "num_res_units": 1}
SPACE = {**UNET, "spatial_dims": 3, "strides": [[2, 2, 1], 2]}
LPS = np.diag([-1.25, -0.75, 3.0, 1.0])
OBLIQUE = np.array(
    [[0, 0.72, 2.4, 11], [0.96, 0.576, -1.08, -7.5], [-0.72, 0.768, -1.44, 4], [0, 0, 0, 1]]
)
"""A turn about two axes with voxels of 1.2 x 1.2 x 3 mm, its axes in another order."""


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLEGIUM_CACHE", str(tmp_path_factory.mktemp("bundle-cache")))
        yield


def draw(shape: tuple[int, ...], seed: int) -> tuple[Pixels, Pixels]:
    """Give a bright box in noise, and where it is."""
    rng = np.random.default_rng(seed)
    label = np.zeros(shape, np.uint8)
    label[tuple(slice(2 + seed % 3, length // 2 + 2) for length in shape)] = 1
    return (rng.normal(60, 12, shape) + 110 * label).clip(0, 255).astype(np.uint8), label


def volumes(folder: Path, affine: Pixels, count: int = 5) -> Path:
    """Write volumes of different sizes, none of which the network's strides divide."""
    for number in range(count):
        arrays = draw((17 + number, 15, 9), number)
        for kind, array in zip(("images", "labels"), arrays, strict=True):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            nib.save(nib.Nifti1Image(array, affine), folder / kind / f"c{number}.nii.gz")
    return folder


def pictures(folder: Path, mode: str = "L", count: int = 5) -> Path:
    for number in range(count):
        pixels, label = draw((19, 26 + number), number)
        if mode == "RGB":
            pixels = np.stack([pixels, pixels // 2, 255 - pixels], axis=-1)
        if mode == "I;16":
            pixels = pixels.astype(np.uint16) * 250
        for kind, array in (("images", pixels), ("labels", label)):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            Image.fromarray(array).save(folder / kind / f"c{number}.png")
    return folder


def experiment(root: Path, sites: dict[str, Any], **settings: Any) -> ExperimentConfig:
    model = settings.pop("model")
    training = {"batch_size": 4, "local_steps": 12, "lr": 0.02}
    federation = {"name": "f", "root": str(root), "sites": sites, **settings.pop("federation", {})}
    plain = {
        "name": "tiny", "federation": federation, "model": model, "training": training, "rounds": 1,
        "algorithms": ["fedavg"], "output": str(root / "run"), **settings,
    }  # fmt: skip
    return parse_config(plain)


def random_model(config: ExperimentConfig, folder: Path) -> OpenedModels:
    """A model of random weights in a file."""
    torch.manual_seed(4)
    module = network_of(config)()
    with torch.no_grad():  # so that both classes are found
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0, 0.1)
    export_model(Tensors(module.state_dict()), folder / "random.safetensors")
    return open_model(folder / "random.safetensors", config=config)


def run_with_monai(bundle: Path, images: Path, output: Path) -> Path:
    from monai.bundle.workflows import ConfigWorkflow

    workflow = ConfigWorkflow(
        str(bundle / "configs" / "inference.json"), str(bundle / "configs" / "metadata.json"),
        workflow_type="inference", bundle_root=str(bundle), dataset_dir=str(images),
        output_dir=str(output),
    )  # fmt: skip
    workflow.initialize()
    assert workflow.check_properties() == []  # nothing that MONAI requires is missing
    workflow.run()
    workflow.finalize()
    return output


def array_of(path: Path) -> Pixels:
    if path.suffix == ".png":
        with Image.open(path) as image:
            return np.asarray(image)
    return np.asarray(nib.load(path).dataobj)  # type: ignore[attr-defined]


def assert_equal_masks(opened: OpenedModels, images: Path, tmp_path: Path) -> list[Path]:
    bundle = export_bundle(opened, tmp_path / "bundle")
    theirs = sorted(run_with_monai(bundle, images, tmp_path / "monai").iterdir())
    ours = sorted(predict_folder(opened, images, tmp_path / "own").iterdir())
    assert [path.name for path in theirs] == [path.name for path in ours]
    assert len(ours) == len([*images.iterdir()])
    values = set()
    for their, own in zip(theirs, ours, strict=True):
        np.testing.assert_array_equal(array_of(their), array_of(own))
        values |= {*np.unique(array_of(own)).tolist()}
    assert values == {0, 1}
    return theirs


@pytest.fixture(scope="module")
def of_volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on volumes that are stored as LPS at one site and obliquely at the other."""
    folder = tmp_path_factory.mktemp("volumes")
    volumes(folder / "north", LPS)
    volumes(folder / "south", OBLIQUE)
    sites = {site: {"folder": site} for site in ("north", "south")}
    sampling = {"sampling": {"crop": [8, 8, 8]}}
    return run_experiment(experiment(folder, sites, model=SPACE, federation=sampling))


@pytest.mark.parametrize("site", ["north", "south"])
def test_masks_of_volumes_equal_those_of_predict_and_lie_on_their_images(
    of_volumes: Path, tmp_path: Path, site: str
) -> None:
    images = of_volumes.parent / site / "images"
    for mask in assert_equal_masks(open_model(of_volumes), images, tmp_path):
        for image in (mask, tmp_path / "own" / mask.name):
            np.testing.assert_allclose(
                nib.load(image).affine,  # type: ignore[attr-defined]
                LPS if site == "north" else OBLIQUE,
                atol=1e-5,
            )
        found, wanted = (SimpleITK.ReadImage(str(path)) for path in (mask, images / mask.name))
        assert found.GetSize() == wanted.GetSize()
        for one, other in (
            (found.GetOrigin(), wanted.GetOrigin()),
            (found.GetSpacing(), wanted.GetSpacing()),
            (found.GetDirection(), wanted.GetDirection()),
        ):
            np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.fixture(scope="module")
def of_pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    pictures(folder / "north")
    pictures(folder / "south")
    sites = {site: {"folder": site} for site in ("north", "south")}
    sampling = {"sampling": {"crop": [16, 16]}}
    return run_experiment(experiment(folder, sites, model=UNET, federation=sampling))


def test_masks_of_pictures_equal_those_of_predict(of_pictures: Path, tmp_path: Path) -> None:
    images = of_pictures.parent / "north" / "images"
    masks = assert_equal_masks(open_model(of_pictures), images, tmp_path)
    for mask in masks:
        assert array_of(mask).shape == array_of(images / mask.name).shape


@pytest.mark.parametrize(
    ("image", "more"),
    [
        ({"clip": [30, 150], "normalise": "minmax"}, {}),
        ({"normalise": "zscore_nonzero"}, {"inference": {"window": [8, 8, 4]}}),
        ({"normalise": "symmetric"}, {"inference": {"window": [24, 8, 12], "overlap": 0.5}}),
        ({"spacing": [1.0, 0.9, 2.0]}, {}),
        ({"spacing": [2.0, 1.5]}, {}),
        ({"size": [12, 20]}, {}),
        ({"size": 14, "normalise": "none"}, {}),
    ],
)
def test_recipes_of_volumes_are_kept(
    tmp_path: Path, image: dict[str, Any], more: dict[str, Any]
) -> None:
    images = volumes(tmp_path / "site", OBLIQUE, count=2) / "images"
    federation = {"image": image, "sampling": {"crop": [8, 8, 8]}}
    sites = {"site": {"folder": "site"}}
    config = experiment(tmp_path, sites, model=SPACE, federation=federation, **more)
    assert_equal_masks(random_model(config, tmp_path), images, tmp_path)


@pytest.mark.parametrize(("unit", "scale"), [("mm", 1.0), ("meter", 1000.0)])
def test_the_sform_decides_also_where_the_voxel_sizes_are_those_of_the_qform(
    tmp_path: Path, unit: str, scale: float
) -> None:
    images, affine = tmp_path / "site" / "images", np.diag([1 / scale] * 3 + [1]) @ OBLIQUE
    images.mkdir(parents=True)
    image = nib.Nifti1Image(draw((17, 15, 9), 1)[0], affine)
    image.set_sform(affine, 1)
    image.set_qform(np.diag([2.0, 2.0, 2.0, 1.0]), 1)  # which sets the voxel sizes
    image.header.set_xyzt_units(unit)
    nib.save(image, images / "c0.nii.gz")
    federation = {"image": {"spacing": [1.0, 0.9, 2.0]}, "sampling": {"crop": [8, 8, 8]}}
    sites = {"site": {"folder": "site"}}
    config = experiment(tmp_path, sites, model=SPACE, federation=federation)
    (mask,) = assert_equal_masks(random_model(config, tmp_path), images, tmp_path)
    for found in (mask, tmp_path / "own" / mask.name):
        np.testing.assert_allclose(nib.load(found).affine, affine, rtol=1e-5)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("mode", "inputs", "image"),
    [
        ("RGB", 1, {"channels": "grey"}),
        ("RGB", 1, {"channels": "green", "normalise": "scale"}),
        ("RGB", 3, {"size": 17}),
        ("RGB", 3, {"size": 17, "side": "shortest", "colour_constancy": 6, "normalise": "scale"}),
        ("L", 3, {"channels": "rgb", "normalise": "minmax"}),
        ("I;16", 3, {"channels": "rgb", "normalise": "scale"}),
        ("I;16", 1, {"size": [24, 16], "normalise": "symmetric"}),
    ],
)
def test_recipes_of_pictures_are_kept(
    tmp_path: Path, mode: str, inputs: int, image: dict[str, Any]
) -> None:
    images = pictures(tmp_path / "site", mode, count=3) / "images"
    sites, model = {"site": {"folder": "site"}}, {**UNET, "in_channels": inputs}
    config = experiment(tmp_path, sites, model=model, federation={"image": image})
    assert_equal_masks(random_model(config, tmp_path), images, tmp_path)


def test_a_network_with_a_norm_that_monai_lacks_is_built_by_collegium(tmp_path: Path) -> None:
    images = pictures(tmp_path / "site", count=2) / "images"
    model = {**UNET, "norm": "population"}
    config = experiment(tmp_path, {"site": {"folder": "site"}}, model=model)
    assert_equal_masks(random_model(config, tmp_path), images, tmp_path)
    needs = json.loads((tmp_path / "bundle/configs/metadata.json").read_text())
    assert "collegium" in needs["required_packages_version"]


def test_adapters_are_added_to_the_weights_that_monai_loads(tmp_path: Path) -> None:
    images = pictures(tmp_path / "site", count=3) / "images"
    model = {**UNET, "lora": {"rank": 2}}
    config = experiment(tmp_path, {"site": {"folder": "site"}}, model=model)
    torch.manual_seed(4)
    module = network_of(config)()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.3)
    export_model(Tensors(module.state_dict()), tmp_path / "adapted.safetensors")
    opened = open_model(tmp_path / "adapted.safetensors", config=config)
    assert_equal_masks(opened, images, tmp_path)
    network = json.loads((tmp_path / "bundle/configs/inference.json").read_text())["network_def"]
    assert network["_target_"] == "monai.networks.nets.UNet"
    assert "collegium" not in required(tmp_path / "bundle")
    again = open_models(tmp_path / "bundle")  # whose network has no adapters
    assert "lora" not in again.config.model.params
    bare = experiment(tmp_path, {"site": {"folder": "site"}}, model=UNET)
    assert again.models["global"].keys() == network_of(bare)().state_dict().keys()


@pytest.mark.parametrize(
    ("whole", "channels"), [(True, [2, 0]), (False, [2, 0]), (True, [1, 2, 0])]
)
def test_files_of_one_image_are_its_channels_and_a_site_may_lack_or_turn_some(
    tmp_path: Path, whole: bool, channels: list[int]
) -> None:
    numbers = (0, 1, 2) if whole else (0, 2)
    images = tmp_path / "images"
    images.mkdir()
    for case in range(2):
        for number in numbers:
            array, _ = draw((17 + case, 15, 9), 3 * case + number)
            image = nib.Nifti1Image(array, OBLIQUE)
            nib.save(image, images / f"c{case}_{numbers.index(number):04}.nii.gz")
    sites = {"site": {"folder": "site", "channels": channels}}
    model = {**SPACE, "in_channels": 3}
    federation = {"image": {"inputs": 3}, "sampling": {"crop": [8, 8, 8]}}
    config = experiment(tmp_path, sites, model=model, federation=federation)
    opened = random_model(config, tmp_path)
    own = replace(opened, models={"site": opened.models["random"]})
    bundle = export_bundle(own, tmp_path / "bundle")
    theirs = sorted(run_with_monai(bundle, images, tmp_path / "monai").iterdir())
    ours = sorted(predict_folder(own, images, tmp_path / "own").iterdir())
    assert [path.name for path in theirs] == ["c0.nii.gz", "c1.nii.gz"]
    for their, mask in zip(theirs, ours, strict=True):
        assert {*np.unique(array_of(mask)).tolist()} == {0, 1}
        np.testing.assert_array_equal(array_of(their), array_of(mask))
        assert their.name == mask.name


def test_regions_are_channels_that_give_the_classes_of_predict(tmp_path: Path) -> None:
    images = volumes(tmp_path / "site", LPS, count=2) / "images"
    task = {"classes": ["background", "rim", "core"], "regions": {"whole": [1, 2], "core": [2]}}
    federation = {"task": task, "sampling": {"crop": [8, 8, 8]}}
    config = experiment(tmp_path, {"site": {"folder": "site"}}, model=SPACE, federation=federation)
    opened = random_model(config, tmp_path)
    bundle = export_bundle(opened, tmp_path / "bundle")
    theirs = sorted(run_with_monai(bundle, images, tmp_path / "monai").iterdir())
    ours = sorted(predict_folder(opened, images, tmp_path / "own").iterdir())
    assert len(theirs) == len(ours) == 2
    for their, own in zip(theirs, ours, strict=True):
        whole, core = np.moveaxis(array_of(their), -1, 0)
        # (whole, core): neither is background, both are core; else the lowest class that errs least
        wanted = np.where(whole & core, 2, np.where(whole, 1, 0))
        np.testing.assert_array_equal(array_of(own), wanted)
    described = json.loads((bundle / "configs" / "metadata.json").read_text())
    pred = described["network_data_format"]["outputs"]["pred"]
    assert (pred["num_channels"], pred["channel_def"]) == (2, {"0": "whole", "1": "core"})


def test_probabilities_of_classes_equal_those_of_predict(tmp_path: Path) -> None:
    images = pictures(tmp_path / "site") / "images"
    model = {"name": "densenet", "growth": 2, "blocks": [1], "init_features": 4}
    task = {"name": "classification", "classes": ["well", "ill"]}
    federation = {"task": task, "image": {"inputs": 1, "size": [16, 16]}}
    config = experiment(tmp_path, {"site": {"folder": "site"}}, model=model, federation=federation)
    opened = random_model(config, tmp_path)
    bundle = export_bundle(opened, tmp_path / "bundle")
    written = run_with_monai(bundle, images, tmp_path / "monai") / "predictions.csv"
    theirs = {Path(row[0]).stem: [float(x) for x in row[1:]] for row in rows(written)}
    own = predict_folder(opened, images, tmp_path / "own") / "predictions.csv"
    header, *ours = rows(own)
    assert header == ["case", "class", "well", "ill"]
    assert [*theirs] == [row[0] for row in ours] == [f"c{number}" for number in range(5)]
    for case, _, *chances in ours:
        assert theirs[case] == pytest.approx([float(x) for x in chances], abs=1e-6)
    assert "collegium" in required(bundle)


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return [*csv.reader(file)]


def required(bundle: Path) -> dict[str, str]:
    described = json.loads((bundle / "configs" / "metadata.json").read_text())
    packages: dict[str, str] = described["required_packages_version"]
    return packages


def test_what_a_method_adds_for_training_stays_out(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "site")
    plain = experiment(
        tmp_path, {"site": {"folder": "site"}}, model=UNET, algorithms=["ttt"],
        federation={"sampling": {"crop": [16, 16]}},
    )  # fmt: skip
    output = run_experiment(plain)
    assert any(name.startswith("rotation.") for name in open_model(output).models["global"])
    assert_equal_masks(open_model(output), folder / "images", tmp_path)


def test_a_bundle_holds_what_monai_asks_for_and_no_pickle(of_volumes: Path, tmp_path: Path) -> None:
    from monai.bundle.properties import MetaProperties
    from monai.utils.enums import BundlePropertyConfig

    bundle = export_bundle(open_model(of_volumes), tmp_path / "bundle")
    files = sorted(str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file())
    assert files == [
        "configs/collegium.json", "configs/inference.json", "configs/metadata.json",
        "docs/README.md", "models/model.safetensors",
    ]  # fmt: skip
    described = json.loads((bundle / "configs" / "metadata.json").read_text())
    for entry in MetaProperties.values():
        value = described
        for key in str(entry[BundlePropertyConfig.ID]).removeprefix("_meta_::").split("::"):
            value = value[key]
        assert value
    # mandatory in MONAI's specification of bundles
    assert described.keys() >= {
        "version", "monai_version", "pytorch_version", "numpy_version",
        "required_packages_version", "task", "description", "authors", "copyright",
        "network_data_format",
    }  # fmt: skip
    tensor = {
        "type", "format", "modality", "num_channels", "spatial_shape", "dtype", "value_range",
        "is_patch_data", "channel_def",
    }  # fmt: skip
    for side, name in (("inputs", "image"), ("outputs", "pred")):
        assert described["network_data_format"][side][name].keys() == tensor
    assert required(bundle).keys() == {"nibabel", "pytorch-ignite", "safetensors"}
    assert not [path for path in tmp_path.iterdir() if path != bundle]


def test_what_cannot_be_a_bundle_is_refused(tmp_path: Path) -> None:
    volumes(tmp_path / "site", LPS, count=2)
    pictures(tmp_path / "other", count=1)
    sites = {"other": {"folder": "other"}, "site": {"folder": "site"}}
    slices = experiment(tmp_path, sites, model=UNET, federation={"sampling": {"crop": [8, 8]}})
    both = r"pictures \(site other\) and from slices of volumes \(site site\), and a bundle reads"
    with pytest.raises(ConfigError, match=both):
        export_bundle(random_model(slices, tmp_path), tmp_path / "bundle")
    scaled = {"image": {"normalise": "scale"}, "sampling": {"crop": [8, 8]}}
    slices = experiment(tmp_path, sites, model=UNET, federation=scaled)
    with pytest.raises(ConfigError, match="scale, which needs pictures, and a bundle reads"):
        export_bundle(random_model(slices, tmp_path), tmp_path / "bundle", pictures=False)
    columns = {"label": "ill", "numeric": ["age"]}
    task = {"name": "classification", "classes": ["well", "ill"]}
    tables = experiment(
        tmp_path, {"site": {"table": "t.csv"}}, model={"name": "mlp", "hidden": [4]},
        federation={"task": task, "table": columns},
    )  # fmt: skip
    with pytest.raises(ConfigError, match="a model for tables stays safetensors"):
        export_bundle(random_model(tables, tmp_path), tmp_path / "bundle")
    space = experiment(tmp_path, sites, model=SPACE)
    with pytest.raises(DataError, match="holds something already"):
        export_bundle(random_model(space, tmp_path), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "other",
        "random.safetensors",
        "site",
    ]


def xray(path: Path, pixels: Pixels) -> None:
    """Write a radiograph of 12 bits, whose low values are bright."""
    file = pydicom.Dataset()
    file.file_meta = pydicom.dataset.FileMetaDataset()
    file.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    file.SOPClassUID = pydicom.uid.ComputedRadiographyImageStorage
    numbers = [f"1.2.{kind}.{path.stem[1:]}" for kind in (3, 4, 5)]
    file.SOPInstanceUID, file.SeriesInstanceUID, file.StudyInstanceUID = numbers
    for name in ("PatientID", "PatientName", "PatientBirthDate", "PatientSex", "StudyDate"):
        setattr(file, name, "")
    file.StudyTime = file.AccessionNumber = file.StudyID = file.ReferringPhysicianName = ""
    file.Modality, (file.Rows, file.Columns) = "CR", pixels.shape
    file.BitsAllocated, file.BitsStored, file.HighBit, file.PixelRepresentation = 16, 12, 11, 0
    file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME1"
    file.PixelData = (4095 - pixels.astype(np.uint16)).tobytes()
    file.save_as(path, enforce_file_format=True)


def test_the_bundle_of_dicom_pictures_reads_png_as_its_readme_says(tmp_path: Path) -> None:
    pictures(tmp_path / "site", "I;16", count=3)
    scans, other = tmp_path / "site" / "images", tmp_path / "png"
    scans.rename(other)
    scans.mkdir()
    for path in other.iterdir():
        pixels = array_of(path) // 16
        xray(scans / f"{path.stem}.dcm", pixels)
        Image.fromarray(5 * pixels + 3).save(path)  # of such scaling zscore is independent
    sites, sampling = {"site": {"folder": "site"}}, {"sampling": {"crop": [8, 8]}}
    opened = random_model(experiment(tmp_path, sites, model=UNET, federation=sampling), tmp_path)
    bundle = export_bundle(opened, tmp_path / "bundle")
    theirs = sorted(run_with_monai(bundle, other, tmp_path / "monai").iterdir())
    assert [path.name for path in theirs] == ["c0.png", "c1.png", "c2.png"]
    ours = predict_folder(opened, scans, tmp_path / "own")
    for path in theirs:
        own = pydicom.dcmread(ours / f"{path.stem}.dcm")
        found = array_of(path)
        assert 0 < found.mean() < 1
        assert np.mean(found == own.pixel_array.reshape(found.shape)) >= 0.999
    told = " ".join((bundle / "docs" / "README.md").read_text().split())
    assert "Save other kinds, such as DICOM, NRRD or NumPy, as PNG with 8 or 16 bits" in told
    assert "multiplied by a number above 0 or shifted by one gives the same" in told


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ({"normalise": "scale"}, "divided by 255 (8 bits) or 65535 (16 bits): a converted image "
         "has to fill the same share of its range"),
        ({"clip": [-100, 300]}, "cut off below -100 and above 300, then brought to mean 0 and "
         "deviation 1, image by image: a converted image has to hold the same numbers"),
        ({"channels": "rgb", "colour_constancy": 6}, "The colour of the light is taken out, then "
         "intensities are brought to mean 0"),
        ({"normalise": "zscore_nonzero"}, "gives the same, a shifted one not"),
        ({"normalise": "none"}, "taken as they are: a converted image has to hold the same"),
    ],
)  # fmt: skip
def test_the_readme_says_how_intensities_have_to_be_written(
    tmp_path: Path, image: dict[str, Any], said: str
) -> None:
    sites, federation = {"site": {"folder": "site"}}, {"image": image}
    opened = random_model(experiment(tmp_path, sites, model=UNET, federation=federation), tmp_path)
    bundle = export_bundle(opened, tmp_path / "bundle")
    assert said in " ".join((bundle / "docs" / "README.md").read_text().split())


@pytest.mark.parametrize(
    ("shape", "kind", "sees"),
    [
        ((19, 17), ".npy", "SimpleInferer"),
        ((12, 19, 17), ".npy", "SliceInferer"),
        ((19, 17), ".nrrd", "SimpleInferer"),
        ((1, 19, 17), ".nrrd", "SliceInferer"),  # a slice in space
        (None, "", "SliceInferer"),  # there is no image, and the settings tell
    ],
)
def test_whether_the_network_sees_pictures_is_told_by_the_images(
    tmp_path: Path, shape: tuple[int, ...] | None, kind: str, sees: str
) -> None:
    for part in ("images", "labels"):
        (tmp_path / "site" / part).mkdir(parents=True)
    if shape is not None:
        path, array = tmp_path / "site" / "images" / f"c1{kind}", draw(shape, 1)[0]
        if kind == ".npy":
            np.save(path, array)
        else:
            SimpleITK.WriteImage(SimpleITK.GetImageFromArray(array), str(path))
        (tmp_path / "site" / "labels" / f"c1{kind}").touch()
        path.with_name(f"c0{kind}").touch()  # one that cannot be read comes first
        (tmp_path / "site" / "labels" / f"c0{kind}").touch()
    sampling = {"crop": [8, 8], "neighbours": int(shape is None)}
    sites, model = {"site": {"folder": "site"}}, {**UNET, "in_channels": 3}
    config = experiment(tmp_path, sites, model=model, federation={"sampling": sampling})
    bundle = export_bundle(random_model(config, tmp_path), tmp_path / "bundle")
    inference = json.loads((bundle / "configs" / "inference.json").read_text())
    assert inference["inferer"]["_target_"] == sees


def test_a_network_of_the_user_s_own_has_the_axes_of_its_convolutions(tmp_path: Path) -> None:
    code = "from torch import nn\ndef make(out_channels):\n"
    code += "    return nn.Conv3d(1, out_channels, 3, padding=1)\n"
    (tmp_path / "own.py").write_text(code)
    images = volumes(tmp_path / "site", LPS, count=1) / "images"
    model, sites = {"name": f"{tmp_path / 'own.py'}:make"}, {"site": {"folder": "site"}}
    opened = random_model(experiment(tmp_path, sites, model=model), tmp_path)
    assert_equal_masks(opened, images, tmp_path)
    inference = (tmp_path / "bundle" / "configs" / "inference.json").read_text()
    targets = [step["_target_"] for step in json.loads(inference)["preprocessing"]["transforms"]]
    assert "Orientationd" in targets  # of volumes only
    assert (tmp_path / "bundle" / "scripts" / "own.py").read_text() == code
    assert str(tmp_path) not in inference  # the code goes with the bundle, its path does not


@pytest.mark.slow
def test_the_documented_command_runs_a_bundle(of_pictures: Path, tmp_path: Path) -> None:
    images = of_pictures.parent / "south" / "images"
    exported = ["export", str(of_pictures), "--output", str(tmp_path / "bundle")]
    assert CliRunner().invoke(cli.app, exported).exit_code == 0
    arguments = {"config_file": "configs/inference.json", "bundle_root": ".",
                 "dataset_dir": str(images), "output_dir": str(tmp_path / "out")}  # fmt: skip
    words = [word for key, value in arguments.items() for word in (f"--{key}", value)]
    subprocess.run(
        [sys.executable, "-m", "monai.bundle", "run", *words],
        cwd=tmp_path / "bundle", check=True, capture_output=True,
    )  # fmt: skip
    ours = sorted(predict_folder(open_model(of_pictures), images, tmp_path / "own").iterdir())
    assert len(ours) == 5
    for own in ours:
        np.testing.assert_array_equal(array_of(tmp_path / "out" / own.name), array_of(own))
