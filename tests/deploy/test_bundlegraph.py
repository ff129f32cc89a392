"""Bundles that cut volumes into slices, and which files they take, run by MONAI itself."""

import csv
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import SimpleITK
import torch
from PIL import Image

from collegium.core.tensors import Tensors
from collegium.deploy import OpenedModels, export_bundle, open_model, predict_folder
from collegium.experiment.config.building import network_of
from collegium.experiment.config.experiment import ExperimentConfig, parse_config
from collegium.models.files import export_model

pytestmark = pytest.mark.filterwarnings("ignore:NvImgCodecPydicomReader:UserWarning")  # MONAI's

Pixels = np.ndarray[Any, Any]

PLANE: dict[str, Any] = {"name": "unet", "channels": [4, 8], "num_res_units": 1}
SPACE = {**PLANE, "spatial_dims": 3}
OBLIQUE = np.array(
    [[0, 0.72, 2.4, 11], [0.96, 0.576, -1.08, -7.5], [-0.72, 0.768, -1.44, 4], [0, 0, 0, 1]]
)
"""A turn with voxels of 1.2 x 1.2 x 3 mm: the file's third axis, the thick one, is RAS+'s first."""

EVEN = np.array([[0, 0, 1.1, 0], [-1.2, 0, 0, 5], [0, 1, 0, 0], [0, 0, 0, 1]])
"""A quarter turn without a thick axis: the file's third axis is RAS+'s first."""

TURNED = np.array([[0, 0, -1, 9], [0, 2, 0, 0], [-1, 0, 0, 0], [0, 0, 0, 1]])
"""The thick axis is not the file's third one: it is RAS+'s second, and the third RAS+'s first."""


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLEGIUM_CACHE", str(tmp_path_factory.mktemp("bundlegraph-cache")))
        yield


def noise(shape: tuple[int, ...], seed: int) -> Pixels:
    rng = np.random.default_rng(seed)
    field = rng.normal(60, 12, shape)
    field[tuple(slice(2, length // 2 + 2) for length in shape)] += 110
    return field.clip(0, 255).astype(np.uint8)


def volume(path: Path, affine: Pixels, shape: tuple[int, ...], seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(noise(shape, seed), affine), path)


def loaded(path: Path) -> tuple[Pixels, Pixels]:
    """Give voxels and affine of a NIfTI."""
    image: Any = nib.load(path)
    return np.asarray(image.dataobj), image.affine


def config_of(
    root: Path, model: dict[str, Any], federation: dict[str, Any], **settings: Any
) -> ExperimentConfig:
    """The settings of one site; a network of two axes sees crops of two."""
    crop = [8] * model.get("spatial_dims", 2)
    sampling = {"crop": crop, **federation.pop("sampling", {})}
    sites = {"site": {"folder": "site"}}
    whole = {"name": "f", "root": str(root), "sites": sites, "sampling": sampling, **federation}
    return parse_config(
        {"name": "tiny", "federation": whole, "model": model, "rounds": 1,
         "algorithms": ["fedavg"], "output": str(root / "run"), **settings}
    )  # fmt: skip


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
    assert workflow.check_properties() == []
    workflow.run()
    workflow.finalize()
    return output


def both(
    opened: OpenedModels, images: Path, tmp_path: Path, **how: Any
) -> dict[str, tuple[Path, Path]]:
    """Give by name what MONAI wrote with the bundle, and what `collegium predict` wrote."""
    bundle = export_bundle(opened, tmp_path / "bundle", **how)
    theirs = {path.name: path for path in run_with_monai(bundle, images, tmp_path / "t").iterdir()}
    ours = {path.name: path for path in predict_folder(opened, images, tmp_path / "o").iterdir()}
    assert theirs.keys() == ours.keys()
    return {name: (theirs[name], ours[name]) for name in sorted(ours)}


def assert_equal_masks(found: dict[str, tuple[Path, Path]], images: Path) -> None:
    """Every mask is that of predict, and lies on its image, as two libraries see it."""
    values = set()
    for name, (their, own) in found.items():
        image = images / name if (images / name).exists() else images / f"{name[:-7]}_0000.nii.gz"
        (array, affine), (wanted, _), (given, place) = map(loaded, (their, own, image))
        assert array.shape == wanted.shape == (*given.shape, 1)[:3]
        assert np.mean(array == wanted) >= 0.999
        values |= {*np.unique(array).tolist()}
        np.testing.assert_allclose(affine, place, atol=1e-4)
        if given.ndim == 3:  # of a turned file of two axes SimpleITK finds no direction
            seen, there = (SimpleITK.ReadImage(str(path)) for path in (their, image))
            for get in ("GetSize", "GetOrigin", "GetSpacing", "GetDirection"):
                np.testing.assert_allclose(getattr(seen, get)(), getattr(there, get)(), atol=1e-4)
    assert values == {0, 1}


@pytest.mark.parametrize(
    ("model", "federation", "more"),
    [
        (PLANE, {}, {}),
        (PLANE, {"image": {"size": [12, 20], "inputs": 2}}, {}),
        (PLANE, {"image": {"size": 14, "inputs": 1}}, {}),
        (PLANE, {"image": {"spacing": [1.0, 0.9], "slices_along": "x", "inputs": 1}},
         {"inference": {"window": [8, 8]}}),
        (PLANE, {"image": {"slices_along": "y", "inputs": 2}, "sampling": {"neighbours": 1}}, {}),
        (PLANE, {"image": {"slices_along": "acquisition", "normalise": "minmax", "inputs": 1}}, {}),
        (SPACE, {"image": {"slices_along": "x", "size": [10, 14, 12], "inputs": 1}},
         {"inference": {"window": [16, 8, 8], "overlap": 0.5, "batch_size": 3}}),
        (SPACE, {"image": {"slices_along": "acquisition", "spacing": [1, 1.3, 2], "inputs": 1}},
         {}),
    ],
    ids=["plain", "size", "longest", "window", "neighbours", "acquired", "space", "acquired-space"],
)  # fmt: skip
def test_slices_are_cut_predicted_and_put_back_as_predict_does(
    tmp_path: Path, model: dict[str, Any], federation: dict[str, Any], more: dict[str, Any]
) -> None:
    images, inputs = tmp_path / "site" / "images", federation.get("image", {}).get("inputs", 1)
    for number, affine in enumerate((OBLIQUE, EVEN, TURNED)):
        for channel in range(inputs):
            end = f"_{channel:04}" if inputs > 1 else ""
            shape = (13 + number, 11, 9)
            volume(images / f"c{number}{end}.nii.gz", affine, shape, 3 * channel + number)
    model = model if "image" in federation else {**model, "in_channels": 1}
    opened = random_model(config_of(tmp_path, model, {**federation}, **more), tmp_path)
    found = both(opened, images, tmp_path, pictures=False)
    assert [*found] == ["c0.nii.gz", "c1.nii.gz", "c2.nii.gz"]
    assert_equal_masks(found, images)


@pytest.mark.parametrize("image", [{"size": 24}, {"slices_along": "acquisition"}])
def test_a_single_slice_is_predicted_whichever_axis_is_across_it(
    tmp_path: Path, image: dict[str, Any]
) -> None:
    images, model = tmp_path / "images", {**PLANE, "in_channels": 1}
    for number, shape in enumerate([(1, 13, 11), (13, 1, 11), (13, 11, 1), (13, 11)]):
        volume(images / f"c{number}.nii.gz", EVEN, shape, number)
    opened = random_model(config_of(tmp_path, model, {"image": image}), tmp_path)
    assert_equal_masks(both(opened, images, tmp_path, pictures=False), images)


def test_a_single_slice_is_refused_by_a_network_that_learnt_from_volumes(tmp_path: Path) -> None:
    volume(tmp_path / "images" / "c0.nii.gz", EVEN, (13, 1, 11))
    config = config_of(tmp_path, {**SPACE, "in_channels": 1}, {})
    bundle = export_bundle(random_model(config, tmp_path), tmp_path / "bundle")
    with pytest.raises(SystemExit, match=r"c0\.nii\.gz: it holds a single slice, and the network"):
        run_with_monai(bundle, tmp_path / "images", tmp_path / "out")


def test_regions_of_slices_are_channels(tmp_path: Path) -> None:
    images = tmp_path / "images"
    volume(images / "c0.nii.gz", TURNED, (13, 11, 9))
    volume(images / "c1.nii.gz", EVEN, (13, 11, 1))
    task = {"classes": ["background", "rim", "core"], "regions": {"whole": [1, 2], "core": [2]}}
    federation = {"task": task, "image": {"slices_along": "y"}}
    config = config_of(tmp_path, {**PLANE, "in_channels": 1}, federation)
    opened = random_model(config, tmp_path)
    for their, own in both(opened, images, tmp_path, pictures=False).values():
        (masks, affine), (classes, place) = loaded(their), loaded(own)
        whole, core = np.moveaxis(masks, -1, 0)
        np.testing.assert_array_equal(classes, np.where(whole & core, 2, np.where(whole, 1, 0)))
        np.testing.assert_allclose(affine, place, atol=1e-4)
        assert 0 < whole.mean() < 1


def test_the_probabilities_of_a_volume_are_the_mean_of_its_slices(tmp_path: Path) -> None:
    images = tmp_path / "images"
    for number in range(2):
        volume(images / f"c{number}.nii.gz", OBLIQUE, (13, 11, 9 + number), number)
    model = {"name": "densenet", "growth": 2, "blocks": [1], "init_features": 4}
    task = {"name": "classification", "classes": ["well", "ill"]}
    image = {"inputs": 1, "size": [16, 16], "slices_along": "x"}
    config = config_of(tmp_path, model, {"task": task, "image": image})
    found = both(random_model(config, tmp_path), images, tmp_path, pictures=False)
    their, own = ([*csv.reader(path.read_text().splitlines())] for path in found["predictions.csv"])
    assert [Path(row[0]).name for row in their] == ["c0.nii.gz", "c1.nii.gz"]
    for (_, *theirs), (_, _, *ours) in zip(their, own[1:], strict=True):
        assert [*map(float, theirs)] == pytest.approx([*map(float, ours)], abs=1e-6)


def test_upper_case_endings_and_all_kinds_of_pictures_are_read(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    names = ["A.PNG", "b.Tif", "c.tiff", "d.JPG", "e.jpeg", "f.BMP", "g.GIF", "h.x.png"]
    for number, name in enumerate(names):
        Image.fromarray(noise((12, 14 + number), number)).save(images / name)
    (images / "notes.txt").touch()
    (images / ".hidden.png").touch()
    (images / "folder.png").mkdir()
    grey = {"image": {"channels": "grey"}}  # a GIF has a palette
    opened = random_model(config_of(tmp_path, {**PLANE, "in_channels": 1}, grey), tmp_path)
    found = both(opened, images, tmp_path, pictures=True)
    assert [*found] == [f"{name.rpartition('.')[0]}.png" for name in names]
    for number, (their, own) in enumerate(found.values()):
        theirs, ours = np.asarray(Image.open(their)), np.asarray(Image.open(own))
        assert theirs.shape == ours.shape == (12, 14 + number)
        assert np.mean(theirs == ours) >= 0.999
    assert set(np.unique(theirs)) == {0, 1}


def test_upper_case_endings_of_volumes_are_read(tmp_path: Path) -> None:
    images = tmp_path / "images"
    volume(images / "a.nii.gz", EVEN, (13, 11, 9))
    volume(images / "b.nii", EVEN, (13, 11, 9), 1)
    (images / "a.nii.gz").rename(images / "y.NII.GZ")
    (images / "b.nii").rename(images / "z.1.NII")
    opened = random_model(config_of(tmp_path, {**PLANE, "in_channels": 1}, {}), tmp_path)
    found = both(opened, images, tmp_path, pictures=False)
    assert [*found] == ["y.nii.gz", "z.1.nii.gz"]
    for their, own in found.values():
        np.testing.assert_array_equal(loaded(their)[0], loaded(own)[0])


def test_files_that_do_not_count_from_0_are_images_and_a_name_is_there_once(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    opened = random_model(config_of(tmp_path, {**PLANE, "in_channels": 1}, {}), tmp_path)
    bundle = export_bundle(opened, tmp_path / "bundle", pictures=True)
    with pytest.raises(SystemExit, match=r"images holds no image; add some of the kinds \.png, "):
        run_with_monai(bundle, images, tmp_path / "none")
    for number in (1, 2):
        Image.fromarray(noise((12, 14), number)).save(images / f"x_000{number}.png")
    written = run_with_monai(bundle, images, tmp_path / "out")
    assert sorted(path.name for path in written.iterdir()) == ["x_0001.png", "x_0002.png"]
    Image.fromarray(noise((12, 14), 1)).save(images / "x_0002.BMP")
    with pytest.raises(SystemExit, match="several images called x_0002 in"):
        run_with_monai(bundle, images, tmp_path / "twice")
