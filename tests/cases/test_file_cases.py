"""The field cases of files that are damaged or absent, and for each siblings of the same kind."""

import json
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from collegium import cli
from collegium.data.decoded_image import Array
from collegium.data.federation import find_cases, list_cases
from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.formats import decode
from collegium.data.inspection import inspect_federation
from collegium.data.settings import TaskConfig
from collegium.data.unlabelled import list_images
from collegium.errors import DataError

nib: Any = nibabel


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def inspected(*arguments: str, code: int) -> str:
    """Return what `collegium inspect` prints, in one line."""
    result = call("inspect", *arguments)
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def save(path: Path, array: Array) -> Path:
    """Write a volume or a picture of any kind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if ".nii" in path.name:
        nib.save(nib.Nifti1Image(array, np.eye(4)), path)
    elif path.suffix in (".nrrd", ".mha"):
        sitk: Any = pytest.importorskip("SimpleITK")
        compress = path.name.startswith("z")
        sitk.WriteImage(sitk.GetImageFromArray(array), str(path), useCompression=compress)
    elif path.suffix == ".npy":
        np.save(path, array)
    else:
        Image.fromarray(array).save(path)
    return path


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        decode(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert text.endswith("copy it again from its source")
    assert "\n" not in text
    return text


VOLUME = (np.arange(8 * 10 * 12).reshape(8, 10, 12) % 900).astype(np.int16)
PICTURE = np.random.default_rng(0).integers(0, 255, (40, 50)).astype(np.uint8)


def test_geo12_gzip_crc_error(place: Path, values: dict[str, Any]) -> None:
    words = inspected("f.yaml", code=3)
    for file in values["damaged"]:
        case = Path(file).name.removesuffix(".nii.gz")
        where = f"site a, case {case}: {place / file}: cannot be read"
        assert f"{where} (the checksum of its gzip stream does not agree)" in words
    assert "case p2" not in words
    assert str(values["maximum_read"]) not in words
    assert decode(place / "a/images/p2.nii.gz").array.max() < values["true_maximum_below"]


def test_geo12_sibling_a_run_refuses_what_inspect_refuses(place: Path) -> None:
    federation = "federation: {name: f, sites: {a: {folder: a}, b: {folder: a}}}"
    (place / "e.yaml").write_text(
        f"name: e\nalgorithm: fedavg\nrounds: 1\nmodel: {{name: unet, spatial_dims: 3}}\n"
        f"output: run\n{federation}\n"
    )
    result = call("run", "e.yaml")
    assert result.exit_code == 3, result.output
    words = " ".join(result.output.split())
    assert f"site a, case p0: {place / 'a/images/p0.nii.gz'}: cannot be read" in words
    assert "copy it again from its source" in words


def test_geo12_sibling_a_float_image_of_a_damaged_stream(tmp_path: Path) -> None:
    noise = np.random.default_rng(1).normal(size=(12, 10, 8)).astype(np.float32)
    path = save(tmp_path / "x.nii.gz", noise)
    content = path.read_bytes()
    silent = 0
    for place in range(400, len(content) - 8, 37):
        path.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        silent += "checksum" in refused(path)
    assert silent > 10  # streams that can be decoded, to other values


@pytest.mark.parametrize(
    "name",
    ["x.nii.gz", "x.nii", "x.nrrd", "zx.nrrd", "x.mha", "zx.mha", "x.npy", "x.png", "x.tif",
     "x.gif", "x.bmp", "x.jpg"],
)  # fmt: skip
def test_geo12_siblings_the_last_eight_bytes_are_missing(tmp_path: Path, name: str) -> None:
    volume = name.endswith((".nii.gz", ".nii", ".nrrd", ".mha"))
    path = save(tmp_path / name, VOLUME if volume else PICTURE)
    decode(path)
    path.write_bytes(path.read_bytes()[:-8])
    refused(path)


def nifti_of_fewer_slices(content: bytes) -> bytes:
    return content[:46] + struct.pack("<h", 7) + content[48:]


def nrrd_of_fewer_slices(content: bytes) -> bytes:
    return content.replace(b"sizes: 12 10 8", b"sizes: 12 10 7")


def meta_of_fewer_slices(content: bytes) -> bytes:
    return content.replace(b"DimSize = 12 10 8", b"DimSize = 12 10 7")


def numpy_of_fewer_rows(content: bytes) -> bytes:
    return content.replace(b"(40, 50)", b"(39, 50)")


def tiff_of_fewer_rows(content: bytes) -> bytes:
    return content.replace(struct.pack("<HHII", 257, 4, 1, 40), struct.pack("<HHII", 257, 4, 1, 39))


def png_of_fewer_rows(content: bytes) -> bytes:
    head = content[12:20] + struct.pack(">I", 39) + content[24:29]
    return content[:12] + head + struct.pack(">I", zlib.crc32(head)) + content[33:]


@pytest.mark.parametrize(
    ("name", "change", "stored", "needed"),
    [
        ("x.nii", nifti_of_fewer_slices, 2272, 2032),
        ("x.nrrd", nrrd_of_fewer_slices, 1920, 1680),
        ("zx.nrrd", nrrd_of_fewer_slices, 1920, 1680),
        ("x.mha", meta_of_fewer_slices, 1920, 1680),
        ("zx.mha", meta_of_fewer_slices, 1920, 1680),
        ("x.tif", tiff_of_fewer_rows, 2000, 1950),
        ("x.png", png_of_fewer_rows, 2040, 1989),
    ],
)
def test_geo12_siblings_a_size_that_disagrees_with_the_data(
    tmp_path: Path, name: str, change: Callable[[bytes], bytes], stored: int, needed: int
) -> None:
    three = VOLUME.transpose(2, 1, 0) if "nii" in name else VOLUME
    path = save(tmp_path / name, PICTURE if name in ("x.tif", "x.png") else three)
    content = path.read_bytes()
    path.write_bytes(change(content))
    assert path.read_bytes() != content
    text = refused(path)
    assert f"it holds {stored} bytes" in text
    assert f"its header's size needs {needed}" in text


def test_geo12_sibling_the_checksum_of_a_part_of_a_png(tmp_path: Path) -> None:
    path = save(tmp_path / "x.png", PICTURE)
    content = path.read_bytes()
    place = len(content) - 13  # the last byte before the part IEND
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    assert "the checksum of its part 'IDAT' does not agree" in refused(path)


def test_geo12_sibling_an_array_of_more_rows_than_its_header_says(tmp_path: Path) -> None:
    path = save(tmp_path / "x.npy", PICTURE)
    path.write_bytes(numpy_of_fewer_rows(path.read_bytes()))
    assert "it holds more than its header says" in refused(path)


def test_geo12_siblings_a_dicom_picture(cases: Path, tmp_path: Path) -> None:
    pydicom = pytest.importorskip("pydicom")
    (source,) = cases.glob("dcm05_*/site_a_mono2.dcm")
    path = tmp_path / "x.dcm"
    path.write_bytes(source.read_bytes()[:-8])
    assert "its pixels cannot be read" in refused(path)
    for key in ("Rows", "Columns"):
        dataset = pydicom.dcmread(source)
        needed = len(dataset.PixelData) * (dataset[key].value - 1) // dataset[key].value
        dataset[key].value -= 1
        dataset.save_as(path)
        stored = f"it holds {len(dataset.PixelData)} bytes of pixels"
        assert f"{stored}, and its header's size needs {needed}" in refused(path)


@pytest.mark.parametrize("name", ["rle", "jpeg2000"])
def test_geo12_siblings_a_compressed_dicom_picture(cases: Path, tmp_path: Path, name: str) -> None:
    pydicom = pytest.importorskip("pydicom")
    (source,) = cases.glob(f"dcm07_*/{name}.dcm")
    path = tmp_path / "x.dcm"
    path.write_bytes(source.read_bytes()[:-8])
    assert "its pixels cannot be read" in refused(path)
    for key in ("Rows", "Columns"):
        dataset = pydicom.dcmread(source)
        dataset[key].value -= 1
        dataset.save_as(path)
        text = refused(path)
        assert (
            name != "rle"
            or "it holds 4096 bytes of pixels, and its header's size needs 4032" in text
        )


def test_geo12_sibling_compressed_voxels_of_a_metaimage(tmp_path: Path) -> None:
    path = save(tmp_path / "zx.mha", VOLUME)
    content = path.read_bytes()
    place = len(content) - 200
    path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
    assert "its compressed voxels are damaged" in refused(path)


LINK, POINTER, LFS = (
    "is a link to a file that is not there",
    "is a pointer of git-annex, not the file itself",
    "is a pointer of Git LFS, not the file itself",
)


def test_bids01_dangling_symlink(place: Path, values: dict[str, Any]) -> None:
    result = call("inspect", "f.yaml", "--json")
    assert result.exit_code == 3
    (site,) = json.loads(result.output)["sites"]
    assert (site["cases"], site["readable"]) == (values["cases"], 1)
    assert len(site["problems"]) == len(values["named"])
    for problem, subject in zip(site["problems"], values["named"], strict=True):
        assert problem.startswith(f"site a, case {subject}: ")
    annexed, pointer, large = site["problems"]
    image = place / "bids/sub-02/anat/sub-02_T1w.nii.gz"
    assert f"{image}: is a link of git-annex to content that is not here" in annexed
    assert annexed.endswith("get its content with `datalad get` or `git annex get`")
    assert POINTER in pointer
    assert f"{LFS}: get its content with `git lfs pull`" in large


def test_bids01_sibling_a_run_names_the_first_and_counts_the_others(place: Path) -> None:
    cases = FederationConfig("f", {"a": SiteConfig("bids")}, root=str(place))
    with pytest.raises(DataError, match=r"case sub-02: .*git-annex.*and 2 more problems"):
        find_cases(cases, "a")


def test_bids01_siblings_both_dangle_and_the_mask_alone(place: Path) -> None:
    result = call("inspect", "both_dangle/f.yaml", "--json")
    assert result.exit_code == 3
    (site,) = json.loads(result.output)["sites"]
    assert site["cases"] == 4
    mask, both = site["problems"]
    assert mask.startswith("site a, case sub-02: ")
    assert f"sub-02_desc-lesion_mask.nii.gz: {LINK}" in mask
    assert both.startswith("site a, case sub-03: ")
    assert f"sub-03_T1w.nii.gz: {LINK}" in both


def test_bids01_siblings_subjects_without_an_image_are_named(place: Path) -> None:
    (place / "bids" / "sub-05").mkdir()  # a data set of DataLad that was not installed
    (place / "bids" / "sub-06").symlink_to("nowhere")
    mask = place / "bids/derivatives/manual/sub-07/anat/sub-07_desc-lesion_mask.nii.gz"
    mask.parent.mkdir(parents=True)
    shutil.copy(place / "bids/derivatives/manual/sub-01/anat/sub-01_desc-lesion_mask.nii.gz", mask)
    _, problems = list_cases(FederationConfig("f", {"a": SiteConfig("bids")}, str(place)), "a")
    lone, empty, link = problems
    assert lone.startswith(f"site a, case sub-07: its label {mask} has no image")
    assert "case sub-05: " in empty
    assert "holds no image in a folder anat" in empty
    assert "datalad get" in empty
    assert "case sub-06: " in link
    assert LINK in link


LAYOUTS: dict[str, tuple[str, str, SiteConfig]] = {
    "images-labels": ("images/{}.png", "labels/{}.png", SiteConfig("s")),
    "cases": ("{}/image.png", "{}/mask.png", SiteConfig("s")),
    "nnunet": ("imagesTr/{}_0000.png", "labelsTr/{}.png", SiteConfig("s")),
    "lists": ("{}.npy", "{}_segmentation.npy", SiteConfig("s")),
    "datalist": ("i/{}.png", "l/{}.png", SiteConfig("s/list.json")),
    "manifest": ("i/{}.png", "l/{}.png", SiteConfig(manifest="s/m.csv")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("absent", ["image", "mask", "both"])
def test_bids01_siblings_broken_links_in_every_layout(
    tmp_path: Path, layout: str, absent: str
) -> None:
    image, mask, site = LAYOUTS[layout]
    root = tmp_path / "s"
    for name in ("p1", "p2", "p3"):
        for path, what in ((image, "image"), (mask, "mask")):
            file = root / path.format(name)
            file.parent.mkdir(parents=True, exist_ok=True)
            if name == "p2" and absent in (what, "both"):
                file.symlink_to("nowhere")
            else:
                save(file, PICTURE if what == "image" else np.eye(40, 50, dtype=np.uint8))
    pairs = [{"image": image.format(n), "label": mask.format(n)} for n in ("p1", "p2", "p3")]
    (root / "list.json").write_text(json.dumps({"training": pairs}))
    lines = [f"{pair['image']},{pair['label']}" for pair in pairs]
    (root / "m.csv").write_text("\n".join(["image,label", *lines]))
    if layout == "nnunet":
        (root / "list.json").unlink()
        about = {"channel_names": {"0": "x"}, "labels": {"background": 0, "l": 1}}
        (root / "dataset.json").write_text(
            json.dumps({**about, "numTraining": 3, "file_ending": ".png"})
        )
    elif layout != "datalist":
        (root / "list.json").unlink()
    config = FederationConfig("f", {"a": site}, root=str(tmp_path))
    found = inspect_federation(config).sites[0]
    assert (found.cases, found.readable) == (3, 2)
    (problem,) = found.problems
    assert problem.startswith("site a, case p2: ")
    first = image if absent in ("image", "both") else mask
    assert f"{root / first.format('p2')}: {LINK}" in problem
    with pytest.raises(DataError, match=f"case p2: .*{LINK}"):
        find_cases(config, "a")


def test_bids01_sibling_a_slice_of_a_series(cases: Path, tmp_path: Path) -> None:
    (source,) = cases.glob("dcm08_*/series")
    series = tmp_path / "series"
    shutil.copytree(source, series, copy_function=shutil.copyfile)
    (series / "about.json").symlink_to("nowhere.json")
    decode(series)
    (series / "9.dcm").symlink_to("../.git/annex/objects/x.dcm")
    with pytest.raises(DataError, match=r"9\.dcm: is a link of git-annex"):
        decode(series)
    (series / "9.dcm").unlink()
    (series / "9").write_text("/annex/objects/SHA256E-s5--x.dcm\n")
    with pytest.raises(DataError, match="9: is a pointer of git-annex"):
        decode(series)


def test_bids01_sibling_images_to_predict(tmp_path: Path) -> None:
    save(tmp_path / "p1.png", PICTURE)
    (tmp_path / "p2.png").symlink_to("nowhere.png")
    found, _ = list_images(tmp_path)
    assert [case.case for case in found] == ["p1", "p2"]
    with pytest.raises(DataError, match=LINK):
        decode(found[1].images[0])


def test_bids01_siblings_what_has_no_place_is_named(tmp_path: Path) -> None:
    task = TaskConfig("classification", ("a", "b"))
    for name in ("a/1", "a/2", "b/3"):
        save(tmp_path / f"s/{name}.png", PICTURE)
    (tmp_path / "s/a/4.webp").write_bytes(b"RIFF")
    (tmp_path / "s/a/README").write_text("about")
    save(tmp_path / "s/b/patient5/5.png", PICTURE)
    save(tmp_path / "s/6.png", PICTURE)
    config = FederationConfig("f", {"A": SiteConfig("s")}, root=str(tmp_path), task=task)
    cases, problems = list_cases(config, "A")
    assert [case.case for case in cases] == ["1", "2", "3"]
    assert [problem.partition(": ")[0] for problem in problems] == [
        "site A, case 6",
        "site A, case 4",
        "site A, case patient5",
    ]


def test_bids01_siblings_images_of_another_ending_and_labels_alone(tmp_path: Path) -> None:
    about = {"channel_names": {"0": "x"}, "labels": {"background": 0, "l": 1}, "numTraining": 1}
    for name in ("n/imagesTr/p1_0000.nii.gz", "n/labelsTr/p1.nii.gz", "n/imagesTr/p2_0000.nii"):
        save(tmp_path / name, VOLUME)
    (tmp_path / "n/dataset.json").write_text(json.dumps({**about, "file_ending": ".nii.gz"}))
    for name in ("l/p1.npy", "l/p1_segmentation.npy", "l/p2_segmentation.npy", "l/p3.png"):
        save(tmp_path / name, PICTURE)
    sites = {"n": SiteConfig("n"), "l": SiteConfig("l")}
    config = FederationConfig("f", sites, root=str(tmp_path))
    (other,) = list_cases(config, "n")[1]
    assert "p2_0000.nii, whose names do not end in .nii.gz" in other
    kind, alone = list_cases(config, "l")[1]
    assert kind.startswith("site l, case p3: ")
    assert alone.startswith("site l, case p2: its label ")


@pytest.mark.parametrize("file", ["m.yaml", "dl.yaml"])
def test_nam02_backslashes_in_manifest(place: Path, values: dict[str, Any], file: str) -> None:
    result = call("inspect", file, "--json")
    assert result.exit_code == 0, result.output
    (site,) = json.loads(result.output)["sites"]
    assert (site["cases"], site["readable"]) == (values["cases"], values["cases"])
    how = SiteConfig(manifest="m.csv") if file == "m.yaml" else SiteConfig("dl.json")
    cases = find_cases(FederationConfig("f", {"a": how}, root=str(place)), "a")
    assert [case.case for case in cases] == ["p0", "p1", "p2", "p3"]
    assert [case.images[0].resolve() for case in cases] == [
        place / f"a/images/{case.case}.png" for case in cases
    ]


def problem_of(root: Path, image: str, kind: str) -> str:
    """Return the problem of a list whose only image is written in some way."""
    (root / "m.csv").write_text(f"image,label\n{image},a/masks/p0.png\n")
    entry = {"image": image, "label": "a/masks/p0.png"}
    (root / "dl.json").write_text(json.dumps({"training": [entry]}))
    site = SiteConfig(manifest="m.csv") if kind == "manifest" else SiteConfig("dl.json")
    (problem,) = list_cases(FederationConfig("f", {"a": site}, root=str(root)), "a")[1]
    return problem


@pytest.mark.parametrize("kind", ["manifest", "datalist"])
@pytest.mark.parametrize("image", ["a/images/p0.PNG", "A\\Images\\P0.png"])
def test_nam02_siblings_only_the_case_of_a_name_differs(place: Path, kind: str, image: str) -> None:
    problem = problem_of(place, image, kind)
    plain = image.replace("\\", "/")
    assert f"there is no image {place / plain}, but" in problem
    assert f"but {place / 'a/images/p0.png'}, which differs in upper and lower case" in problem


@pytest.mark.parametrize("kind", ["manifest", "datalist"])
@pytest.mark.parametrize(
    "image", ["C:\\data\\anna\\p0.png", "D:/anna/p0.png", "\\\\server\\anna\\p0.png"]
)
def test_nam02_siblings_a_path_of_another_machine(place: Path, kind: str, image: str) -> None:
    problem = problem_of(place, image, kind)
    assert "the image p0.png has a path of another machine: correct the" in problem
    assert "anna" not in problem
    assert "case p0" in problem or kind == "datalist"


def test_nam02_siblings_lists_to_predict_and_of_other_layouts(place: Path) -> None:
    site = SiteConfig(manifest=".\\m.csv")
    assert len(find_cases(FederationConfig("f", {"A": site}, root=str(place)), "A")) == 4
    cases, _ = list_images(place / "m.csv")
    assert [case.case for case in cases] == ["p0", "p1", "p2", "p3"]
    for name in ("X/Case00.npy", "X/Case00_segmentation.npy"):
        save(place / name, PICTURE)
    (place / "X_train.txt").write_text("X\\Case00.npy\r\n")
    found, problems = list_cases(FederationConfig("f", {"A": SiteConfig("X")}, str(place)), "A")
    assert not problems
    assert [(case.case, case.split) for case in found] == [("Case00", "train")]
    about = {"channel_names": {"0": "x"}, "labels": {"background": 0, "l": 1}}
    listed = [{"image": ".\\imagesTr\\p1.nii.gz", "label": ".\\labelsTr\\p1.nii.gz"}]
    for name in ("n/imagesTr/p1_0000.nii.gz", "n/labelsTr/p1.nii.gz"):
        save(place / name, VOLUME)
    (place / "n/dataset.json").write_text(json.dumps({**about, "training": listed}))
    found, problems = list_cases(FederationConfig("f", {"A": SiteConfig("n")}, str(place)), "A")
    assert not problems
    assert [case.case for case in found] == ["p1"]
