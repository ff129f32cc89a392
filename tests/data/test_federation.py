"""From a description of a federation to its sites: manifests, folders, paths."""

import logging
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from PIL import Image

from collegium.core.randomness import generator
from collegium.data.federation import (
    find_cases,
    labels_problem,
    list_cases,
    list_unlabelled,
    open_federation,
    open_site,
)
from collegium.data.federation_config import (
    FederationConfig,
    SiteConfig,
    expand_root,
    site_channels,
    sites_of,
)
from collegium.data.sampling import SamplingConfig
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.data.site import EgressPolicy
from collegium.data.splits import SplitConfig
from collegium.errors import ConfigError, DataError


def picture(path: Path, value: int = 1, mode: str = "L") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.arange(48, dtype=np.uint8).reshape(6, 8) + np.uint8(value)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


def mask(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.eye(6, 8, dtype=np.uint8) * 255).save(path)
    return path


def folder_site(folder: Path, names: list[str], labels: str = "labels") -> Path:
    for index, name in enumerate(names):
        picture(folder / "images" / f"{name}.png", index)
        mask(folder / labels / f"{name}.png")
    return folder


def manifest(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding)
    return path


def by_manifest(root: Path, file: str = "m.csv") -> FederationConfig:
    return FederationConfig("f", {"A": SiteConfig(manifest=file)}, root=str(root))


def by_folder(root: Path, folder: str = "A") -> FederationConfig:
    return FederationConfig("f", {"A": SiteConfig(folder=folder)}, root=str(root))


# --- manifests


def test_ids_in_a_manifest_stay_text_and_a_byte_order_mark_is_no_column(tmp_path):
    for name in ("0042", "0007"):
        picture(tmp_path / f"{name}.png")
        mask(tmp_path / f"{name}_m.png")
    text = "case,patient_id,image,mask\n0042,007,0042.png,0042_m.png\n0007,1,0007.png,0007_m.png\n"
    manifest(tmp_path / "m.csv", text, "utf-8-sig")
    cases = find_cases(by_manifest(tmp_path), "A")
    assert [(case.case, case.patient) for case in cases] == [("0007", "1"), ("0042", "007")]
    assert cases[0].label == tmp_path / "0007_m.png"


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_other_delimiters_of_spreadsheets_are_understood(tmp_path, delimiter):
    picture(tmp_path / "a.png")
    mask(tmp_path / "b.png")
    rows = [["Case", "Image", "Label"], ["x", "a.png", "b.png"], ["", "", ""]]
    manifest(tmp_path / "m.csv", "\r\n".join(delimiter.join(row) for row in rows))
    (case,) = find_cases(by_manifest(tmp_path), "A")
    assert (case.case, case.patient, case.images) == ("x", "x", (tmp_path / "a.png",))


def test_only_the_rows_of_the_site_count_and_paths_may_start_at_the_manifest(tmp_path):
    picture(tmp_path / "sub" / "a.png")
    mask(tmp_path / "sub" / "b.png")
    text = "site,image,label,split\nA,a.png,b.png,Validation\nB,no.png,no.png,train\n"
    manifest(tmp_path / "sub" / "m.csv", text)
    (case,) = find_cases(by_manifest(tmp_path, "sub/m.csv"), "A")
    assert (case.case, case.split, case.fov) == ("a", "val", None)
    assert case.images == (tmp_path / "sub" / "a.png",)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("case,image\nx,a.png\n", r"site A: the manifest .*m\.csv has no column label: add it"),
        ("case,image,label\nx,no.png,b.png\n", r"site A, case x: there is no image .*no\.png"),
        ("case,image,label\nx,a.png,\n", r"site A, case x: the manifest names no label: add it"),
        ("case,image,label\nx,a.png,b.png\nx,a.png,b.png\n", r"line 3 of .*case x occurs twice"),
        ("case,image,label,split\nx,a.png,b.png,tune\n", r"the split tune is unknown: write train"),
        ("case,image,label\n,,b.png\n", r"line 2 of .* names no case and no image"),
        ("case,image,label\nx,a.png,b.png,extra\n", r"line 2 of .*: 4 cells for 3 columns"),
        ("case,image,label\n", r"site A: m\.csv holds no cases"),
        ("site,image,label\nB,a.png,b.png\n", r"site A: m\.csv holds no cases of it"),
    ],
)
def test_a_faulty_manifest_names_site_place_and_remedy(tmp_path, text, error):
    picture(tmp_path / "a.png")
    mask(tmp_path / "b.png")
    manifest(tmp_path / "m.csv", text)
    with pytest.raises(DataError, match=error):
        find_cases(by_manifest(tmp_path), "A")


def test_a_manifest_that_is_not_there_or_not_text_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match=r"site A: there is no manifest .*m\.csv: correct the path"):
        find_cases(by_manifest(tmp_path), "A")
    (tmp_path / "m.csv").write_bytes("fälle,image".encode("latin-1"))
    with pytest.raises(DataError, match="is not UTF-8 text: save it as"):
        find_cases(by_manifest(tmp_path), "A")


def test_all_problems_of_a_manifest_are_listed_and_counted(tmp_path):
    picture(tmp_path / "a.png")
    mask(tmp_path / "b.png")
    lines = ["case,image,label", "x,a.png,b.png", "y,no.png,b.png", "z,a.png,no.png"]
    manifest(tmp_path / "m.csv", "\n".join(lines))
    cases, problems = list_cases(by_manifest(tmp_path), "A")
    assert [case.case for case in cases] == ["x"]
    assert [problem.partition(":")[0] for problem in problems] == [
        "site A, case y", "site A, case z",
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"case y: .*\(and 1 more problems at this site\)"):
        find_cases(by_manifest(tmp_path), "A")


# --- folders


@pytest.mark.parametrize("labels", ["labels", "masks", "manual", "segmentations", "Labels"])
def test_a_folder_of_images_and_masks_is_a_site(tmp_path, labels):
    folder_site(tmp_path / "A", ["p1", "p2"], labels)
    cases = find_cases(by_folder(tmp_path), "A")
    assert [(case.case, case.patient, case.split) for case in cases] == [
        ("p1", "p1", None), ("p2", "p2", None),
    ]  # fmt: skip
    assert cases[0].label == tmp_path / "A" / labels / "p1.png"


@pytest.mark.parametrize(("labels", "fovs"), [("labels", "fov"), ("1st_manual", "mask")])
def test_masks_beside_labels_are_fields_of_view(tmp_path, labels, fovs):
    folder_site(tmp_path / "A", ["p1"], labels)
    picture(tmp_path / "A" / fovs / "p1.png")
    (case,) = find_cases(by_folder(tmp_path), "A")
    assert case.label == tmp_path / "A" / labels / "p1.png"
    assert case.fov == tmp_path / "A" / fovs / "p1.png"


def test_an_image_without_a_mask_and_a_mask_without_an_image_are_named(tmp_path):
    folder_site(tmp_path / "A", ["p1", "p2"])
    picture(tmp_path / "A" / "images" / "p3.png")
    mask(tmp_path / "A" / "labels" / "p4.png")
    cases, problems = list_cases(by_folder(tmp_path), "A")
    assert [case.case for case in cases] == ["p1", "p2"]
    assert len(problems) == 2
    assert problems[0].startswith("site A, case p3: its image")
    assert problems[1].startswith("site A: the mask p4.png")
    with pytest.raises(DataError, match="site A, case p3"):
        open_site(by_folder(tmp_path), "A", tmp_path / "cache", 0, None)


@pytest.mark.parametrize(
    ("there", "error"),
    [([], r"site A: there is no folder"), (["A/labels"], r"no subfolder images"),
     (["A/images"], r"no subfolder labels \(or masks"),
     (["A/images", "A/labels"], r"site A: .*there is no image among the files")],
)  # fmt: skip
def test_a_folder_without_images_or_masks_is_a_data_error(tmp_path, there, error):
    for folder in there:
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(DataError, match=error):
        find_cases(by_folder(tmp_path), "A")


def test_an_empty_folder_of_masks_names_the_first_image(tmp_path):
    picture(tmp_path / "A" / "images" / "p1.png")
    (tmp_path / "A" / "labels").mkdir()
    with pytest.raises(DataError, match="site A, case p1: it has no mask: add one"):
        find_cases(by_folder(tmp_path), "A")


def test_files_numbered_by_channel_are_one_image(tmp_path, cases):
    site = cases / "geo11_missing_channel_one_case"
    found, problems = list_cases(by_folder(site.parent, site.name), "A")
    assert [(case.case, len(case.images)) for case in found] == [("b01", 2), ("b03", 2)]
    (problem,) = problems
    assert problem.startswith("site A, case b02: channel 0001 is missing")
    assert "b02_0001.nii.gz" in problem
    assert "2 of 3 cases are complete" in problem


def test_paths_with_spaces_umlauts_and_hashes_work(tmp_path, cases):
    root = cases / "run01_odd_paths"
    config = by_folder(root, "Zürich Klinik (2)/fälle_seg #1")
    config = replace(config, image=ImageConfig(normalise="none"))
    site = open_site(config, "A", tmp_path / "ä b#c", 0, tmp_path / "ß #1" / "A.json")
    example = site.train.example(0)
    inside = example.batch["label"] == 1
    assert example.case == "pat 01_seg"
    assert int(inside.sum()) == 24
    assert float(example.batch["image"][:, 0][inside].mean()) == 500.0


# --- opening


def test_a_site_is_opened_with_its_splits_and_its_policy(tmp_path):
    folder_site(tmp_path / "A", [f"p{index}" for index in range(10)])
    site_config = SiteConfig("A", allow=("model",), share=("personal",), forbid=("spectra",))
    config = FederationConfig(
        "f", {"A": site_config}, root=str(tmp_path), sampling=SamplingConfig((4, 4)),
        splits=SplitConfig(0.2, 0.3),
    )  # fmt: skip
    site = open_site(config, "A", tmp_path / "cache", 3, tmp_path / "splits.json")
    assert (len(site.train), len(site.val), len(site.test)) == (5, 2, 3)
    allow, share, forbid = map(frozenset, ({"model"}, {"personal"}, {"spectra"}))
    assert site.policy == EgressPolicy(allow, share, forbid, case_scores=True)
    ids = [[part.example(i).case for i in range(len(part))] for part in (site.train, site.test)]
    again = open_site(config, "A", tmp_path / "cache", 4, tmp_path / "splits.json")
    assert [again.train.example(i).case for i in range(5)] == ids[0]
    batch = site.train.batch([0, 1], [generator(0, "a"), generator(0, "b")])
    assert batch["image"].shape == (2, 1, 4, 4)


def test_a_federation_opens_its_inside_sites_sorted_and_stores_a_file_for_each(tmp_path):
    names = ("C", "A", "B")
    for name in names:
        folder_site(tmp_path / name, ["p1", "p2", "p3"])
    config = FederationConfig(
        "f", {name: SiteConfig(folder=name) for name in names}, root=str(tmp_path), outside=("B",)
    )
    assert sites_of(config) == ["A", "C"]
    sites = open_federation(config, tmp_path / "cache", 0, tmp_path / "splits")
    assert list(sites) == ["A", "C"]
    assert sorted(path.name for path in (tmp_path / "splits").iterdir()) == ["A.json", "C.json"]
    assert len(open_site(config, "B", tmp_path / "cache", 0, None).train) == 1


def test_different_numbers_of_channels_are_refused_with_the_remedy(tmp_path):
    folder_site(tmp_path / "A", ["p1", "p2"])
    folder_site(tmp_path / "B", ["p1", "p2"])
    for name in ("p1", "p2"):
        picture(tmp_path / "B" / "images" / f"{name}.png", mode="RGB")
    config = FederationConfig(
        "f", {"A": SiteConfig(folder="A"), "B": SiteConfig(folder="B")}, root=str(tmp_path)
    )
    with pytest.raises(DataError, match=r"\(A 1, B 3\): set image\.channels to grey"):
        open_federation(config, tmp_path / "cache", 0, None)
    grey = replace(config, image=ImageConfig(channels="grey"))
    assert len(open_federation(grey, tmp_path / "cache", 0, None)) == 2
    picture(tmp_path / "A" / "images" / "p1.png", mode="RGB")
    with pytest.raises(DataError, match=r"site A: its images have \[1, 3\] channels"):
        open_site(config, "A", tmp_path / "cache", 0, None)


def test_volumes_are_worked_on_in_slices_where_the_crop_has_two_numbers(tmp_path):
    for kind in ("images", "masks"):
        (tmp_path / "A" / kind).mkdir(parents=True)
        values = np.arange(60).reshape(5, 4, 3) % 2
        image = nib.Nifti1Image(values.astype(np.uint8), np.diag([1.0, 2.0, 3.0, 1.0]))
        nib.save(image, tmp_path / "A" / kind / "v.nii.gz")
    config = replace(by_folder(tmp_path), sampling=SamplingConfig((4, 4)))
    site = open_site(config, "A", tmp_path / "cache", 0, None)
    assert site.train.batch([0], [generator(0)])["image"].shape == (1, 1, 4, 4)
    example = site.train.example(0)
    assert example.batch["image"].shape == (3, 1, 5, 4)
    assert example.spacing == (3.0, 1.0, 2.0)


@pytest.fixture(params=["invented", pytest.param("real", marks=pytest.mark.slow)])
def retinas(request, tmp_path):
    """A root that holds CHASE_DB1, or invented pictures that are listed, named and sized alike."""
    if request.param == "real":
        return request.getfixturevalue("shared_data")
    rows = ["case,patient,split,image,label,fov"]
    for number in range(1, 15):
        for eye in "LR":
            name = f"Image_{number:02}{eye}"
            files = [f"vessel/chase_db1/{kind}/{name}.png" for kind in ("images", "labels", "fov")]
            rows.append(
                f"{name},{number:02},{'train' if number < 11 else 'test'},{','.join(files)}"
            )
            stripes = np.zeros((492, 512), np.uint8)
            stripes[:, 5 * number :: 100] = stripes[:, 5 * number + 1 :: 100] = 255
            arrays = (np.stack([stripes, 255 - stripes, stripes // 2], axis=-1), stripes)
            for file, array in zip(files, (*arrays, np.full_like(stripes, 255)), strict=True):
                (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(tmp_path / file)
    manifest(tmp_path / "vessel" / "chase_db1" / "manifest.csv", "\n".join(rows))
    return tmp_path


def test_retinas_are_split_by_child_and_keep_the_manifests_test(retinas, tmp_path, caplog):
    caplog.set_level(logging.INFO, "collegium")
    config = FederationConfig(
        "vessel",
        {"chase_db1": SiteConfig(manifest="vessel/chase_db1/manifest.csv")},
        root=str(retinas),
        task=TaskConfig(classes=("background", "vessel")),
        image=ImageConfig(channels="rgb", size=64),
        sampling=SamplingConfig((32, 32), flips=True, rotations=True),
    )
    site = open_site(config, "chase_db1", tmp_path / "cache", 0, None)
    parts = {"train": site.train, "val": site.val, "test": site.test}
    patients = {
        split: [part.example(index).patient for index in range(len(part))]
        for split, part in parts.items()
    }
    assert {split: len(ids) for split, ids in patients.items()} == {
        "train": 16, "val": 4, "test": 8,
    }  # fmt: skip
    assert sorted(set(patients["test"])) == ["11", "12", "13", "14"]
    eyes = [patient for ids in patients.values() for patient in sorted(set(ids))]
    assert sorted(eyes) == [f"{number:02}" for number in range(1, 15)]
    example = site.test.example(0)
    assert example.case == "Image_11L"
    assert example.batch["image"].shape == (1, 3, 62, 64)  # 492 x 512, longest side 64
    assert 0.03 < float(example.batch["label"].float().mean()) < 0.2
    assert "28 cases (train 16, val 4, test 8)" in caplog.text


# --- the description


def test_an_unset_variable_in_the_root_is_named(monkeypatch):
    monkeypatch.delenv("HOSPITAL_DATA", raising=False)
    with pytest.raises(
        ConfigError, match=r"variable HOSPITAL_DATA is not set: set it, or pass fed"
    ):
        expand_root("$HOSPITAL_DATA/a")
    monkeypatch.setenv("HOSPITAL_DATA", "x y")
    assert expand_root("${HOSPITAL_DATA}/a") == Path("x y/a")


def test_the_home_folder_is_expanded_in_the_root(monkeypatch):
    monkeypatch.setenv("HOME", "/somebody")
    assert expand_root("~/data") == Path("/somebody/data")


@pytest.mark.parametrize(
    "both", [{}, {"folder": "a", "table": "b"}, {"manifest": "a", "table": "b"}]
)
def test_a_site_has_either_images_or_a_table(both):
    with pytest.raises(ConfigError, match="give one of them, or a folder of images and a manifest"):
        SiteConfig(**both)


def test_modalities_of_a_site_are_its_channels_by_name(tmp_path):
    pixels = np.random.default_rng(0).integers(1, 255, (6, 8, 3), dtype=np.uint8)
    for folder, bands in (("all", [0, 1, 2]), ("two", [2, 0])):
        (tmp_path / folder / "images").mkdir(parents=True)
        for place, band in enumerate(bands):
            file = tmp_path / folder / "images" / f"c_{place:04d}.png"
            Image.fromarray(pixels[..., band]).save(file)
        mask(tmp_path / folder / "labels" / "c.png")
    sites = {
        "all": SiteConfig(folder="all"),
        "some": SiteConfig(folder="all", modalities=("flair",)),
        "two": SiteConfig(folder="two", modalities=("flair", "t1")),
    }
    image = ImageConfig(modalities=("t1", "t2", "flair"), normalise="none")
    config = FederationConfig("f", sites, str(tmp_path), image=image)
    assert image.inputs == 3
    assert {name: site_channels(config, name) for name in sites} == {
        "all": None, "some": (2,), "two": (2, 0),
    }  # fmt: skip
    opened = open_federation(replace(config, splits=SplitConfig(0, 0)), tmp_path / "c", 0, None)
    expected = np.moveaxis(pixels, 2, 0).astype(float)
    for name, kept in (("all", [0, 1, 2]), ("some", [2]), ("two", [0, 2])):
        found = opened[name].train.example(0).batch["image"][0]
        wanted = np.zeros_like(expected)
        wanted[kept] = expected[kept]
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("image", "site", "message"),
    [
        ({}, {"modalities": ("t1",)}, "site A has the modality 't1', which is not in image.mod"),
        (
            {"modalities": ("t1", "flair")}, {"modalities": ("flare",)},
            "site A has the modality 'flare', which is not in image.modalities; did you mean 'fla",
        ),
        ({"modalities": ("t1",)}, {"modalities": ("t1",), "channels": (0,)}, "give one of them"),
        ({"modalities": ("t1",)}, {"modalities": ("t1", "t1")}, "name each once"),
        ({"modalities": ("t1",)}, {"modalities": ()}, "name each once"),
        ({"modalities": ("t1", "t1")}, {}, "name every channel of the network once"),
        ({"modalities": ()}, {}, "name every channel of the network once"),
        ({"modalities": ("t1",), "inputs": 2}, {}, "names 1 channels and image.inputs is 2"),
    ],
)  # fmt: skip
def test_modalities_that_cannot_be_meant_are_refused(image, site, message):
    with pytest.raises(ConfigError, match=message):
        FederationConfig("f", {"A": SiteConfig("a", **site)}, image=ImageConfig(**image))


def test_unknown_sites_are_refused():
    with pytest.raises(ConfigError, match=r"federation\.outside names D"):
        FederationConfig("f", {"A": SiteConfig(folder="a")}, outside=("D",))
    with pytest.raises(ConfigError, match="the federation f has no site D: choose one of A"):
        find_cases(FederationConfig("f", {"A": SiteConfig(folder="a")}), "D")


# --- sites whose masks annotate some of the classes only

ORGANS = TaskConfig(classes=("background", "liver", "spleen"))


def organs(root: Path, values: dict[str, list[int]], **sites: object) -> FederationConfig:
    """Sites with three cases each, whose masks hold the values given for the site."""
    for name, held in values.items():
        for number in range(3):
            picture(root / name / "images" / f"p{number}.png", number)
            mask = np.zeros((6, 8), np.uint8)
            mask.flat[: len(held)] = held
            (root / name / "labels").mkdir(parents=True, exist_ok=True)
            Image.fromarray(mask).save(root / name / "labels" / f"p{number}.png")
    named = {name: SiteConfig(folder=name, **{"labelled": sites.get(name)}) for name in values}  # type: ignore[arg-type]
    return FederationConfig("f", named, root=str(root), task=ORGANS)


def test_a_site_has_the_classes_that_it_has_labelled(tmp_path):
    config = organs(tmp_path, {"A": [1], "B": [0, 1, 2]}, A=("liver",))
    found = open_federation(config, tmp_path / "cache", 0, None)
    assert {name: site.labelled for name, site in found.items()} == {"A": ("liver",), "B": None}
    assert [case.labelled for case in find_cases(config, "A")] == [(1,)] * 3


def test_a_mask_that_holds_a_class_which_is_not_labelled_is_refused_also_if_it_is_cached(tmp_path):
    config = organs(tmp_path, {"A": [1, 2], "B": [1, 2]})
    open_federation(config, tmp_path / "cache", 0, None)
    partial = replace(config, sites={**config.sites, "A": SiteConfig("A", labelled=("liver",))})
    words = r"site A, case p0: .*p0\.png: the mask holds spleen, which the site's labelled leaves"
    with pytest.raises(DataError, match=words):
        open_federation(partial, tmp_path / "cache", 0, None)
    mapped = SiteConfig("A", labelled=("liver",), label_map={2: 0})
    opened = open_federation(
        replace(config, sites={**config.sites, "A": mapped}), tmp_path / "cache", 0, None
    )
    label = opened["A"].train.example(0).batch["label"]
    assert (int((label == 1).sum()), int((label == 2).sum())) == (1, 0)


def test_classes_that_no_site_inside_has_labelled_are_named(tmp_path):
    config = organs(tmp_path, {"A": [1], "B": [0], "C": [2]}, A=("liver",), B=("liver",))
    assert labels_problem(config) is None
    problem = labels_problem(replace(config, outside=("C",)))
    assert problem is not None
    assert problem.startswith("no site that trains has labelled spleen: nothing can be learnt")
    away = {**config.sites, "B": SiteConfig(remote=True)}
    assert labels_problem(replace(config, outside=("C",), sites=away)) is None


@pytest.mark.parametrize(
    ("labelled", "task", "words"),
    [
        (("lung",), ORGANS, "site A has labelled 'lung': choose from liver, spleen; the backgr"),
        (("background",), ORGANS, "site A has labelled 'background': choose from liver, spleen"),
        ((), ORGANS, "site A has labelled nothing: choose from liver, spleen"),
        (("liver",), TaskConfig("classification"), "site A says which classes it has labelled"),
        (
            ("liver",),
            replace(ORGANS, regions={"all": (1, 2)}),
            r"the task is no segmentation into classes \(task\.name, task\.regions\): leave",
        ),
    ],
)
def test_labelled_classes_that_cannot_be_meant_are_refused(labelled, task, words):
    with pytest.raises(ConfigError, match=words):
        FederationConfig("f", {"A": SiteConfig("A", labelled=labelled)}, task=task)


def test_a_site_may_mean_a_class_by_what_is_ignored_elsewhere(tmp_path):
    config = organs(tmp_path, {"A": [1, 255], "B": [1, 255]})
    ignoring = replace(ORGANS, ignore=255)
    meant = {**config.sites, "B": replace(config.sites["B"], label_map={255: 2})}
    opened = open_federation(
        replace(config, task=ignoring, sites=meant), tmp_path / "cache", 0, None
    )
    a, b = (opened[name].train.example(0).batch for name in "AB")
    assert (int((~a["mask"]).sum()), int((a["label"] == 2).sum())) == (1, 0)
    assert ("mask" in b, int((b["label"] == 2).sum())) == (False, 1)
    with pytest.raises(ConfigError, match="makes a class of 255, which nobody annotated"):
        replace(config, task=replace(ignoring, label_map={255: 2}))


def test_the_exclusion_loss_of_what_has_no_labelled_classes_is_refused():
    for task in ({"name": "classification"}, {"regions": {"all": (1,)}}):
        with pytest.raises(ConfigError, match=r"task\.exclusion is for segmentations into classes"):
            TaskConfig(**task, exclusion=1.0)
    with pytest.raises(ConfigError, match="a remote site is described in its own file"):
        SiteConfig(remote=True, labelled=("liver",))


# --- cases without a label


def half_labelled(
    root: Path, *, task: TaskConfig | None = None, unlabelled: bool = False
) -> FederationConfig:
    """Seven images of six patients; of patients held out one case has no label, and two others."""
    rows = [
        ("a", "1", "yes", "train"), ("b", "2", "yes", "val"), ("c", "3", "yes", "test"),
        ("d", "3", "", ""), ("e", "1", "", "test"), ("f", "4", "", ""), ("g", "5", "", "val"),
    ]  # fmt: skip
    column = "label" if task is None else "class"
    lines = [f"image,patient,{column},split"]
    for number, (case, patient, label, split) in enumerate(rows):
        picture(root / f"{case}.png", number)
        mask(root / f"{case}_m.png")
        named = label and (f"{case}_m.png" if task is None else label)
        lines.append(f"{case}.png,{patient},{named},{split}")
    manifest(root / "m.csv", "\n".join(lines))
    sites = {"A": SiteConfig(manifest="m.csv", unlabelled=unlabelled)}
    return FederationConfig("f", sites, root=str(root), task=task or TaskConfig())


@pytest.mark.parametrize(
    "task", [None, TaskConfig("classification", ("no", "yes"))], ids=["masks", "classes"]
)
def test_cases_without_a_label_are_kept_apart_where_a_site_may_have_them(tmp_path, task):
    config = half_labelled(tmp_path, task=task, unlabelled=True)
    assert [case.case for case in find_cases(config, "A")] == ["a", "b", "c"]
    assert [case.case for case in list_unlabelled(config, "A")] == ["d", "e", "f", "g"]
    site = open_federation(config, tmp_path / "cache", 0, tmp_path / "splits")["A"]
    assert [len(part) for part in (site.train, site.val, site.test)] == [1, 1, 1]
    # d belongs to a test patient, and g to the validation; e to a patient who is trained on
    examples = [site.unlabelled.example(index) for index in range(len(site.unlabelled))]
    assert [example.case for example in examples] == ["e", "f"]
    assert all("label" not in example.batch for example in examples)
    batch = site.unlabelled.batch([0, 1], [generator(0, "a"), generator(0, "b")])
    assert "label" not in batch
    assert batch["image"].shape == (2, 1, 6, 8)
    assert "label" in site.train.batch([0], [generator(0, "a")])
    again = open_federation(config, tmp_path / "cache", 0, tmp_path / "splits")["A"]
    assert len(again.unlabelled) == 2


def test_cases_without_a_label_are_refused_elsewhere(tmp_path):
    with pytest.raises(DataError, match=r"case d: the manifest names no label: add it or remove"):
        find_cases(half_labelled(tmp_path), "A")
    assert list_unlabelled(half_labelled(tmp_path), "A") == []


def test_cases_without_a_label_are_of_manifests_of_images_and_of_tables():
    with pytest.raises(ConfigError, match="unlabelled is of a manifest that names images, or of a"):
        SiteConfig(folder="A", unlabelled=True)
    with pytest.raises(ConfigError, match="a remote site is described in its own file"):
        SiteConfig(remote=True, unlabelled=True)
