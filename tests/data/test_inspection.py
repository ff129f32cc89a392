"""A look at all the data of a federation that lists all that is wrong."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from PIL import Image

from collegium.data.federation import open_federation
from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.image_statistics import LabelSize, MissingChannel
from collegium.data.inspection import inspect_federation
from collegium.data.sampling import SamplingConfig
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.errors import DataError


def case(site: Path, name: str, pixels: np.ndarray, label: np.ndarray) -> None:
    for folder, values in (("images", pixels), ("labels", label)):
        (site / folder).mkdir(parents=True, exist_ok=True)
        Image.fromarray(values.astype(np.uint8)).save(site / folder / f"{name}.png")


@pytest.fixture
def federation(tmp_path) -> FederationConfig:
    """Site A is sound; at B one label does not fit and one image has no mask; C is not there."""
    square = np.arange(16).reshape(4, 4)
    half = np.repeat([0, 0, 255, 255], 4).reshape(4, 4)
    case(tmp_path / "A", "p1", square + 10, half)
    case(tmp_path / "A", "p2", square + 100, half * 0)
    case(tmp_path / "B", "p1", square, half)
    case(tmp_path / "B", "q2", square, half[:3])
    case(tmp_path / "B", "q3", square + 100, half)
    (tmp_path / "B" / "labels" / "q3.png").unlink()
    sites = {name: SiteConfig(folder=name) for name in "ABC"}
    return FederationConfig("f", sites, root=str(tmp_path), outside=("B",))


def test_a_sound_site_is_described_by_numbers(federation):
    site = inspect_federation(federation).sites[0]
    assert (site.name, site.inside, site.cases, site.readable, site.patients) == (
        "A",
        True,
        2,
        2,
        2,
    )
    assert site.shapes == {"4x4": 2}
    assert site.channels == {"1": 2}
    assert site.spacings == {"unknown": 2}
    assert site.intensity == (10.0, 115.0)
    assert site.labels == {"0": 2, "1": 1}
    assert site.foreground == 8 / 32
    assert site.splits == {"train": 1, "val": 1, "test": 0}
    assert site.patients_per_split == {"train": 1, "val": 1, "test": 0}
    assert site.problems == ()


def test_every_problem_is_listed_with_its_place(federation):
    inspection = inspect_federation(federation)
    _, damaged, absent = inspection.sites
    assert (damaged.inside, damaged.cases, damaged.readable) == (False, 2, 1)
    assert len(damaged.problems) == 2
    assert damaged.problems[0].startswith("site B, case q3: its image")
    assert "site B, case q2: mask shape (3, 4) differs from image (4, 4)" in damaged.problems[1]
    assert "site C: there is no folder" in absent.problems[0]
    assert (absent.intensity, absent.foreground) == (None, None)
    assert not inspection.good


def test_what_sites_share_is_found(federation):
    inspection = inspect_federation(federation)
    assert inspection.shared_patients is None  # p1 is the name of a file at both
    kinds = [(finding.kind, finding.patients) for finding in inspection.findings]
    assert kinds == [("identical_files", ("p1", "q2"))]


def test_an_inspection_can_be_written_as_json(federation, tmp_path):
    inspection = inspect_federation(federation)
    back = json.loads(json.dumps(inspection.to_dict()))
    assert back["good"] is False
    assert back["sites"][0]["intensity"] == [10.0, 115.0]
    assert back["findings"][0]["files"] == [
        str(tmp_path / "B" / "images" / f"{name}.png") for name in ("p1", "q2")
    ]


def test_the_foreground_is_counted_inside_the_field_of_view(tmp_path):
    case(tmp_path / "A", "p1", np.arange(16).reshape(4, 4), np.eye(4) * 255)
    (tmp_path / "A" / "fov").mkdir()
    inside = np.repeat([255, 0], 8).reshape(4, 4).astype(np.uint8)
    Image.fromarray(inside).save(tmp_path / "A" / "fov" / "p1.png")
    config = FederationConfig("f", {"A": SiteConfig(folder="A")}, root=str(tmp_path))
    (site,) = inspect_federation(config).sites
    assert (site.foreground, site.with_fov) == (2 / 8, 1)


def test_shapes_that_do_not_fit_into_a_batch_are_a_problem_unless_cropped(tmp_path):
    for size in (4, 5):
        case(tmp_path / "A", f"p{size}", np.arange(size * 4).reshape(size, 4), np.zeros((size, 4)))
    sites = {"A": SiteConfig(folder="A")}
    loose = FederationConfig("f", sites, root=str(tmp_path))
    (problem,) = inspect_federation(loose).sites[0].problems
    assert "2 shapes and do not fit into one batch: set sampling.crop" in problem
    cropped = FederationConfig("f", sites, root=str(tmp_path), sampling=SamplingConfig((4, 4)))
    sized = FederationConfig("f", sites, root=str(tmp_path), image=ImageConfig(size=(4, 4)))
    assert inspect_federation(cropped).good
    assert inspect_federation(sized).good


def test_channels_that_differ_within_and_across_sites_are_problems(tmp_path):
    case(tmp_path / "A", "p1", np.arange(16).reshape(4, 4), np.zeros((4, 4)))
    case(tmp_path / "A", "p2", np.arange(48).reshape(4, 4, 3), np.zeros((4, 4)))
    case(tmp_path / "B", "q1", np.arange(16).reshape(4, 4), np.zeros((4, 4)))
    sites = {name: SiteConfig(folder=name) for name in "AB"}
    inspection = inspect_federation(FederationConfig("f", sites, root=str(tmp_path)))
    assert "its images have 1 and 3 channels" in inspection.sites[0].problems[0]
    assert "(A: 1/3, B: 1)" in inspection.problems[0]


def test_splits_that_cannot_be_drawn_are_a_problem_among_others(tmp_path):
    for name in ("L", "R"):
        case(tmp_path, name, np.arange(16).reshape(4, 4), np.zeros((4, 4)))
    rows = [f"{eye},p1,images/{eye}.png,labels/{eye}.png,{split}" for eye, split in
            (("L", "train"), ("R", "test"))]  # fmt: skip
    text = "\n".join(["case,patient,image,label,split", *rows])
    (tmp_path / "m.csv").write_text(text, "utf-8")
    config = FederationConfig("f", {"A": SiteConfig(manifest="m.csv")}, root=str(tmp_path))
    (site,) = inspect_federation(config).sites
    assert "its patient p1 is in the splits train and test" in site.problems[0]
    assert site.readable == 2


def test_what_was_noticed_of_many_files_is_said_once(tmp_path):
    for index, name in enumerate(["p1", "p2", "p3"]):
        case(tmp_path / "A", name, np.arange(16).reshape(4, 4) + index, np.eye(4) * 255)
    config = FederationConfig("f", {"A": SiteConfig(folder="A")}, root=str(tmp_path))
    text = "the mask's values 0 and 255 were read as classes 0 and 1"
    assert inspect_federation(config).sites[0].notes == (f"p1.png and 2 more: {text}",)


def volume(path: Path, values: np.ndarray, spacing: tuple[float, ...]) -> None:
    """Write a volume whose axes run to the left, to the back and up."""
    path.parent.mkdir(parents=True, exist_ok=True)
    affine = np.diag([-spacing[0], -spacing[1], spacing[2], 1.0])
    nib.save(nib.Nifti1Image(values.astype(np.int16), affine), path)


def test_labels_of_volumes_are_measured_in_millilitres(tmp_path):
    spacing = (0.5, 2.0, 4.0)  # 4 mm3 per voxel
    for name, count in (("p1", 10), ("p2", 30), ("p3", 20), ("p4", 0)):
        label = (np.arange(60) < count).reshape(3, 4, 5)
        volume(
            tmp_path / "A" / "images" / f"{name}.nii.gz", np.arange(60).reshape(3, 4, 5), spacing
        )
        volume(tmp_path / "A" / "labels" / f"{name}.nii.gz", label, spacing)
    (site,) = inspect_federation(
        FederationConfig("f", {"A": SiteConfig(folder="A")}, root=str(tmp_path))
    ).sites
    assert site.sizes == (LabelSize(1, "mL", 3, 0.04, 0.08, 0.12),)
    assert site.labels == {"0": 4, "1": 3}
    assert site.orientations == {"LPS": 4}
    assert site.spacings == {"0.5x2x4": 4}


def test_labels_of_pictures_are_counted_in_pixels_where_no_spacing_is_known(federation):
    site = inspect_federation(federation).sites[0]
    assert site.sizes == (LabelSize(1, "px", 1, 8.0, 8.0, 8.0),)
    assert site.orientations == {"none": 2}


def test_labels_of_slices_are_measured_in_square_millimetres(tmp_path):
    volume(tmp_path / "A" / "images" / "p.nii", np.arange(12).reshape(3, 4, 1), (0.5, 2.0, 5.0))
    volume(tmp_path / "A" / "labels" / "p.nii", np.ones((3, 4, 1)), (0.5, 2.0, 5.0))
    config = FederationConfig("f", {"A": SiteConfig(folder="A")}, root=str(tmp_path))
    assert inspect_federation(config).sites[0].sizes == (LabelSize(1, "mm2", 1, 12.0, 12.0, 12.0),)


def test_copies_in_another_format_are_found_across_sites_and_splits(tmp_path):
    square = np.arange(16).reshape(4, 4)
    rows = ["case,image,label,split"]
    for index, split in enumerate(["train", "train", "test"]):
        case(tmp_path / "A", f"p{index}", square + index, np.eye(4))
        rows.append(f"p{index},A/images/p{index}.png,A/labels/p{index}.png,{split}")
    case(tmp_path / "B", "q0", square + 9, np.eye(4))
    Image.fromarray(square.astype(np.uint8)).save(tmp_path / "A" / "images" / "p2.tif")
    Image.fromarray((square + 1).astype(np.uint8)).save(tmp_path / "B" / "images" / "q0.png")
    rows[3] = rows[3].replace("p2.png", "p2.tif", 1)
    (tmp_path / "m.csv").write_text("\n".join(rows), "utf-8")
    sites = {"A": SiteConfig(manifest="m.csv"), "B": SiteConfig(folder="B")}
    inspection = inspect_federation(FederationConfig("f", sites, root=str(tmp_path)))
    found = {finding.kind: finding for finding in inspection.findings}
    assert set(found) == {"identical_files", "identical_pixels"}
    pixels = found["identical_pixels"]
    assert (pixels.sites, pixels.patients) == (("A",), ("p0", "p2"))
    assert pixels.text.endswith("stay in one split (they are in train, test)")
    assert (found["identical_files"].sites, found["identical_files"].patients) == (
        ("A", "B"), ("p1", "q0"),
    )  # fmt: skip
    assert inspection.good


def test_spl01_is_found_by_an_inspection(tmp_path, cases):
    source = cases / "spl01_duplicate_patients"
    with (source / "manifest.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    text = ["case,site,patient,image,class"]
    text += [f"{row['image']},{row['site']},{row['patient_id']},{row['image']},x" for row in rows]
    (tmp_path / "m.csv").write_text("\n".join(text), "utf-8")
    sites = {name: SiteConfig(manifest=str(tmp_path / "m.csv")) for name in "ab"}
    task = TaskConfig("classification", ("x", "y"))
    found = inspect_federation(FederationConfig("f", sites, root=str(source), task=task))
    expected = json.loads((source / "case.json").read_text())["right_outcome"]["values"]
    assert [(site.patients, site.problems) for site in found.sites] == [
        (expected["patients_site_a"], ()), (expected["patients_site_b"], ()),
    ]  # fmt: skip
    files = [
        [path.relative_to(source).as_posix() for path in finding.files]
        for finding in found.findings
        if finding.kind == "identical_files"
    ]
    assert files == expected["identical_files"]
    patients = [f.patients[0] for f in found.findings if f.kind == "shared_patient"]
    assert patients == expected["shared_patients"]


def test_classes_are_counted_and_unknown_ones_and_missing_labels_are_problems(tmp_path):
    for index, name in enumerate(["ill", "ill", "well", "odd"]):
        case(tmp_path / "A", f"p{index}", np.arange(16).reshape(4, 4) + index, np.eye(4))
        (tmp_path / "K" / name).mkdir(parents=True, exist_ok=True)
        image = tmp_path / "A" / "images" / f"p{index}.png"
        (tmp_path / "K" / name / f"p{index}.png").write_bytes(image.read_bytes())
    rows = [f"K/{n}/p{i}.png,{n}" for i, n in enumerate(["ill", "ill", "well", "odd"])]
    (tmp_path / "m.csv").write_text("\n".join(["image,class", *rows]), "utf-8")
    sites = {"A": SiteConfig(manifest="m.csv")}
    task = TaskConfig("classification", ("well", "ill"))
    config = FederationConfig("f", sites, root=str(tmp_path), task=task)
    (site,) = inspect_federation(config).sites
    assert site.targets == {"ill": 2, "odd": 1, "well": 1}
    assert (site.sizes, site.labels, site.foreground) == ((), {}, None)
    (problem,) = site.problems
    assert problem.startswith("site A, case p3: the class 'odd' is unknown: write one of well, ill")
    plain = FederationConfig("f", sites, root=str(tmp_path))
    problems = inspect_federation(plain).sites[0].problems
    assert problems[0].startswith("site A, case p0: it has no label: add a mask")
    assert len(problems) == 4


def lacking(tmp_path: Path) -> tuple[FederationConfig, np.ndarray]:
    """Three channels at one site, the first and the last at the other; three structures."""
    label = np.zeros((4, 5, 6), np.uint8)
    label.flat[:60], label.flat[:30], label.flat[:10] = 1, 2, 3
    for site, count in (("full", 3), ("less", 2)):
        for channel in range(count):
            values = np.random.default_rng(channel).normal(size=label.shape) * 100
            volume(tmp_path / site / "imagesTr" / f"{site}_{channel:04d}.nii.gz", values, (1, 1, 1))
        volume(tmp_path / site / "labelsTr" / f"{site}.nii.gz", label, (1, 1, 1))
        names = ["T1", "T2", "FLAIR"] if count == 3 else ["T1", "FLAIR"]
        labels = {"WT": [1, 2, 3], "TC": [2, 3], "ET": 3}
        about = {"channel_names": dict(enumerate(names)), "labels": labels}
        (tmp_path / site / "dataset.json").write_text(json.dumps(about), "utf-8")
    sites = {"full": SiteConfig(folder="full"), "less": SiteConfig(folder="less", channels=(0, 2))}
    regions = {"WT": (1, 2, 3), "TC": (2, 3), "ET": (3,)}
    task = TaskConfig(classes=("background", "edema", "core", "edge"), regions=regions)
    image = ImageConfig(inputs=3)
    return FederationConfig("f", sites, str(tmp_path), task=task, image=image), label


def test_channels_that_a_site_lacks_are_told_by_number_and_name(tmp_path):
    found = inspect_federation(lacking(tmp_path)[0])
    assert found.good
    full, less = found.sites
    assert (full.missing_channels, full.channels) == ((), {"3": 1})
    assert (less.missing_channels, less.channels) == ((MissingChannel(1, "T2", 1),), {"2": 1})
    site = json.loads(json.dumps(found.to_dict()))["sites"][1]
    assert site["missing_channels"] == [{"channel": 1, "name": "T2", "cases": 1}]


def test_modalities_name_the_channels_that_a_site_lacks(tmp_path):
    config = lacking(tmp_path)[0]
    sites = config.sites | {"less": SiteConfig(folder="less", modalities=("t1", "flair"))}
    image = ImageConfig(modalities=("t1", "t2 (TSE)", "flair"))
    _, less = inspect_federation(replace(config, sites=sites, image=image)).sites
    assert less.missing_channels == (MissingChannel(1, "t2 (TSE)", 1),)


def test_the_sizes_of_regions_stand_behind_those_of_classes(tmp_path):
    config, label = lacking(tmp_path)
    site = inspect_federation(config).sites[0]
    values = {1: [1], 2: [2], 3: [3], "WT": [1, 2, 3], "TC": [2, 3], "ET": [3]}
    sizes = [(name, np.isin(label, held).sum() / 1000) for name, held in values.items()]
    assert [(size.label, size.middle) for size in site.sizes] == sizes
    assert {size.unit for size in site.sizes} == {"mL"}


def test_channels_of_one_case_that_hold_the_same_pixels_are_told(tmp_path):
    for subject, value in (("sub-1", 0), ("sub-2", 7)):
        values = np.arange(60).reshape(3, 4, 5)
        for kind, offset in (("T1w", 0), ("FLAIR", value)):
            volume(tmp_path / "A" / subject / "anat" / f"{subject}_{kind}.nii",
                   values + 100 * value + offset, (1, 1, 1))  # fmt: skip
        volume(tmp_path / "A" / subject / "anat" / f"{subject}_dseg.nii", values % 2, (1, 1, 1))
    again = tmp_path / "A" / "sub-1" / "anat" / "sub-1_FLAIR.nii"
    stored = bytearray(again.read_bytes())
    stored[148:153] = b"again"  # of the header, what describes the file
    again.write_bytes(stored)
    sites = {"A": SiteConfig(folder="A", options={"modality": "T1w, FLAIR"})}
    (finding,) = inspect_federation(FederationConfig("f", sites, str(tmp_path))).findings
    assert (finding.kind, finding.patients) == ("equal_channels", ("sub-1",))
    assert finding.text.startswith("site A, case sub-1: two of its channels are the same image (")
    again.write_bytes(again.with_name("sub-1_T1w.nii").read_bytes())
    assert inspect_federation(FederationConfig("f", sites, str(tmp_path))).findings == (finding,)


def test_files_of_a_layout_that_are_not_used_are_a_note(tmp_path):
    for kind, values in (("", np.arange(60)), ("_segmentation", np.arange(60) % 2)):
        volume(tmp_path / "HK" / f"Case00{kind}.nii.gz", values.reshape(3, 4, 5), (1, 1, 1))
    (tmp_path / "HK-index.npy").write_bytes(b"x")
    config = FederationConfig("f", {"HK": SiteConfig(folder="HK")}, root=str(tmp_path))
    (site,) = inspect_federation(config).sites
    assert site.notes[0].startswith("the split in HK-index.npy is not used")


def test_volumes_that_are_cut_across_their_slices_are_a_note(tmp_path):
    for number, spacing in enumerate([(3.3, 0.6, 0.6), (3.3, 0.6, 0.6), (0.6, 0.6, 3.3)]):
        for kind, values in (("images", np.arange(60)), ("labels", np.arange(60) % 2)):
            (tmp_path / "A" / kind).mkdir(parents=True, exist_ok=True)
            volume(tmp_path / "A" / kind / f"c{number}.nii.gz", values.reshape(3, 4, 5), spacing)
    config = FederationConfig("f", {"A": SiteConfig(folder="A")}, root=str(tmp_path))
    sliced = replace(config, sampling=SamplingConfig((2, 2)))
    turned = replace(sliced, image=ImageConfig(slices_along="acquisition"))
    found = [inspect_federation(each).sites[0].notes for each in (config, sliced, turned)]
    about_axes = [[note for note in notes if "longest" in note] for notes in found]
    assert about_axes == [
        [],
        [
            "2 of 3 cases: their voxels are longest along x, but slices are taken along z: "
            "set image.slices_along to acquisition"
        ],
        [],
    ]


def vanishing(folder: Path, image: ImageConfig) -> FederationConfig:
    """Three volumes with a large organ; the first two have a lesion of one voxel, at 8 and at 7."""
    for number in range(3):
        label = np.zeros((16, 16, 6))
        label[2:12, 2:12] = 1
        if number < 2:
            label[7 + number, 8, 3] = 2  # read from the other end
        values = np.arange(label.size).reshape(label.shape)
        for kind, array in (("images", values), ("labels", label)):
            volume(folder / "A" / kind / f"c{number}.nii.gz", array, (1.0, 1.0, 4.0))
    task = TaskConfig(classes=("background", "organ", "lesion"))
    sites = {"A": SiteConfig(folder="A")}
    return FederationConfig("f", sites, root=str(folder), task=task, image=image)


GONE = (
    "lesion is in the mask on disk and gone at the trained size or spacing: set a larger "
    "image.size or a finer image.spacing, or nothing is learnt from it there"
)


@pytest.mark.parametrize(
    ("image", "cases"),
    [
        (ImageConfig(), ""),
        (ImageConfig(size=16), ""),
        (ImageConfig(size=8), "case c0: "),  # which takes voxels 1, 3, ..
        (ImageConfig(spacing=(2.0, 2.0)), "case c0: "),
        (ImageConfig(spacing=(4.0, 4.0, 8.0)), "cases c0, c1: "),
        (ImageConfig(size=4, slices_along="x"), "cases c0, c1: "),
    ],
)
def test_structures_that_are_gone_at_the_trained_size_are_told_by_case(
    tmp_path, caplog, image, cases
):
    config = vanishing(tmp_path, image)
    inspection = inspect_federation(config)
    told = [note for note in inspection.sites[0].notes if "gone" in note]
    assert told == ([f"{cases}{GONE}"] if cases else [])
    assert inspection.good
    for _ in range(2):  # prepared first, and then taken from the cache
        caplog.clear()
        open_federation(config, tmp_path / "cache", 0, None)
        logged = [record.getMessage() for record in caplog.records if "gone" in record.getMessage()]
        assert logged == ([f"site A: {cases}{GONE}"] if cases else [])


def test_a_spacing_that_no_file_states_is_a_problem_as_it_is_of_a_run(federation, tmp_path):
    wanted = replace(federation, image=ImageConfig(spacing=(1.0, 1.0)))
    problems = inspect_federation(wanted).sites[0].problems
    with pytest.raises(DataError, match="does not state its spacing") as caught:
        open_federation(
            replace(wanted, sites={"A": wanted.sites["A"]}, outside=()), tmp_path, 0, None
        )
    assert problems[0] == str(caught.value)


def test_classes_that_a_site_has_not_labelled_are_told_and_nowhere_labelled_ones_are_a_problem(
    tmp_path,
):
    for name, value in (("A", 1), ("B", 2), ("C", 2)):
        for index in range(3):
            label = np.zeros((4, 4))
            label[index, 0] = value
            case(tmp_path / name, f"p{index}", np.arange(16).reshape(4, 4) + 20 * index, label)
    task = TaskConfig(classes=("background", "liver", "spleen", "kidney"))
    known = {"A": ("liver",), "B": ("spleen", "kidney"), "C": ("liver",)}
    sites = {name: SiteConfig(folder=name, labelled=those) for name, those in known.items()}
    config = FederationConfig("f", sites, root=str(tmp_path), task=task)
    found = inspect_federation(config)
    assert {site.name: site.labelled for site in found.sites} == known
    a, b, c = found.sites
    assert a.notes == (
        "its masks annotate liver only; spleen, kidney may be anywhere in their background",
    )
    only, none = b.notes
    assert only == (
        "its masks annotate spleen, kidney only; liver may be anywhere in their background"
    )
    assert none.startswith("none of its 3 masks holds kidney: look ")
    assert (a.problems, b.problems) == ((), ())
    assert len(c.problems) == 3
    assert "the mask holds spleen, which the site's labelled leaves out" in c.problems[0]
    assert found.problems == ()
    assert json.loads(json.dumps(found.to_dict()))["sites"][1]["labelled"] == ["spleen", "kidney"]
    alone = inspect_federation(replace(config, outside=("B",)))
    (problem,) = alone.problems
    assert problem.startswith("no site that trains has labelled spleen, kidney: nothing can be")
    everything = replace(config, sites={"A": SiteConfig("A", labelled=task.classes[1:])})
    notes = inspect_federation(everything).sites[0].notes
    assert [note[:33] for note in notes] == [
        "none of its 3 masks holds spleen:", "none of its 3 masks holds kidney:"
    ]  # fmt: skip


def test_cases_without_a_label_are_counted_by_split_and_read(tmp_path):
    lines = ["image,label,patient,split"]
    for index, (patient, split) in enumerate(
        [("a", "train"), ("b", "val"), ("c", "test"), ("c", ""), ("d", ""), ("e", "val")]
    ):
        case(tmp_path, f"p{index}", np.arange(16).reshape(4, 4) + 20 * index, np.eye(4) * 255)
        label = f"labels/p{index}.png" if index < 3 else ""
        lines.append(f"images/p{index}.png,{label},{patient},{split}")
    (tmp_path / "m.csv").write_text("\n".join(lines), "utf-8")
    sites = {"A": SiteConfig(manifest="m.csv", unlabelled=True)}
    config = FederationConfig("f", sites, root=str(tmp_path))
    (site,) = inspect_federation(config).sites
    assert (site.cases, site.patients, site.problems) == (3, 3, ())
    assert site.splits == {"train": 1, "val": 1, "test": 1}
    assert site.unlabelled == {"train": 1, "val": 1, "test": 1}
    assert site.foreground == 12 / 48
    (note,) = [note for note in site.notes if "no label" in note]
    assert note == (
        "3 cases have no label (train 1, val 1, test 1): they are kept apart, and nothing is "
        "trained or scored on them"
    )
    (tmp_path / "images" / "p4.png").write_bytes(b"x")
    (problem,) = inspect_federation(config).sites[0].problems
    assert problem.startswith("site A, case p4: ")
