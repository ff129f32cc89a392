"""DICOM files that tests write with pydicom, and an independent reading of them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, generate_uid

CLASSES = {
    "CT": "1.2.840.10008.5.1.4.1.1.2",
    "MR": "1.2.840.10008.5.1.4.1.1.4",
    "PT": "1.2.840.10008.5.1.4.1.1.128",
    "DX": "1.2.840.10008.5.1.4.1.1.1.1",
    "US": "1.2.840.10008.5.1.4.1.1.6.1",
    "OP": "1.2.840.10008.5.1.4.1.1.77.1.5.1",
    "CT enhanced": "1.2.840.10008.5.1.4.1.1.2.1",
    "MR enhanced": "1.2.840.10008.5.1.4.1.1.4.1",
}

Write = Callable[..., Path]


def uid(*what: object) -> str:
    return generate_uid(entropy_srcs=[str(part) for part in what])


def header(modality: str, series: int, **attributes: Any) -> Dataset:
    """The attributes that every image has; those given replace them, None takes them out."""
    dataset = Dataset()
    values: dict[str, Any] = {
        "SOPClassUID": CLASSES[modality],
        "Modality": modality.partition(" ")[0],
        "PatientName": "Doe^Jane",
        "PatientID": "SECRET-7",
        "PatientBirthDate": "",
        "PatientSex": "",
        "StudyDate": "20200101",
        "StudyTime": "000000",
        "StudyID": "",
        "AccessionNumber": "",
        "ReferringPhysicianName": "",
        "StudyInstanceUID": uid("study"),
        "SeriesInstanceUID": uid("series", series),
        "SeriesNumber": series,
        "SeriesDescription": "Doe^Jane head",
        "FrameOfReferenceUID": uid("frame of reference"),
        "InstanceNumber": 1,
        **attributes,
    }
    for keyword, value in values.items():
        if value is not None:
            setattr(dataset, keyword, value)
    return dataset


def fill(
    dataset: Dataset, pixels: np.ndarray, *, colour: bool = False, **attributes: Any
) -> Dataset:
    """Put pixels (rows, columns), (frames, rows, columns) or colours (rows, columns, 3) in."""
    bits = 8 * pixels.dtype.itemsize
    values: dict[str, Any] = {
        "SamplesPerPixel": 3 if colour else 1,
        "PhotometricInterpretation": "RGB" if colour else "MONOCHROME2",
        "Rows": pixels.shape[0] if colour else pixels.shape[-2],
        "Columns": pixels.shape[1] if colour else pixels.shape[-1],
        "BitsAllocated": bits,
        "BitsStored": bits,
        "HighBit": bits - 1,
        "PixelRepresentation": int(pixels.dtype.kind == "i"),
        **({"PlanarConfiguration": 0} if colour else {}),
        **({"NumberOfFrames": len(pixels)} if pixels.ndim == 3 and not colour else {}),
        "PixelData": pixels.tobytes() + b"\0" * (pixels.nbytes % 2),
        **attributes,
    }
    for keyword, value in values.items():
        if value is not None:
            setattr(dataset, keyword, value)
    return dataset


def save(dataset: Dataset, path: Path) -> Path:
    dataset.SOPInstanceUID = uid(path)
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset.save_as(path, enforce_file_format=True)
    return path


@pytest.fixture
def write_picture(tmp_path: Path) -> Write:
    """Write one picture."""

    def write(
        name: str, pixels: np.ndarray, *, modality: str = "DX", series: int = 1, **attributes: Any
    ) -> Path:
        dataset = header(modality, series, FrameOfReferenceUID=None)
        colour = pixels.shape[-1] == 3 and pixels.ndim == 3
        return save(fill(dataset, pixels, colour=colour, **attributes), tmp_path / name)

    return write


@pytest.fixture
def write_series(tmp_path: Path) -> Write:
    """Write a stack (slices, rows, columns) as one file a slice, its names in another order.

    `step` leads from slice to slice in LPS; None: `gap` along the normal. `each` holds attributes
    of every slice.
    """

    def write(
        name: str,
        volume: np.ndarray,
        *,
        modality: str = "CT",
        series: int = 1,
        orientation: Sequence[float] = (1, 0, 0, 0, 1, 0),
        origin: Sequence[float] = (0, 0, 0),
        spacing: Sequence[float] = (1, 1),
        gap: float = 2.5,
        step: Sequence[float] | None = None,
        each: Sequence[Mapping[str, Any]] = (),
        skip: Sequence[int] = (),
        prefix: str = "",
        **attributes: Any,
    ) -> Path:
        normal = np.cross(orientation[:3], orientation[3:])
        way = gap * normal if step is None else np.asarray(step, float)
        names = np.random.default_rng(len(volume)).permutation(len(volume))
        for index, pixels in enumerate(volume):
            if index in skip:
                continue
            dataset = header(
                modality,
                series,
                ImagePositionPatient=[round(float(x), 9) for x in origin + index * way],
                ImageOrientationPatient=[round(float(x), 9) for x in orientation],
                PixelSpacing=list(spacing),
                SliceThickness=1,
            )
            own = each[index] if each else {}
            fill(dataset, pixels, **{**attributes, **own})
            save(dataset, tmp_path / name / f"{prefix}{names[index]:03d}")
        return tmp_path / name

    return write


def item(**attributes: Any) -> Dataset:
    dataset = Dataset()
    for keyword, value in attributes.items():
        setattr(dataset, keyword, value)
    return dataset


@pytest.fixture
def write_enhanced(tmp_path: Path) -> Write:
    """Write frames (frames, rows, columns) as one enhanced file.

    `positions` are those of the frames; `rescale` their slopes and intercepts; `temporal` the
    indices of their volumes.
    """

    def write(
        name: str,
        frames: np.ndarray,
        *,
        positions: Sequence[Sequence[float]],
        modality: str = "MR enhanced",
        orientation: Sequence[float] = (1, 0, 0, 0, 1, 0),
        spacing: Sequence[float] = (1, 1),
        rescale: Sequence[tuple[float, float]] = (),
        temporal: Sequence[int] = (),
        shared_orientation: bool = True,
        **attributes: Any,
    ) -> Path:
        dataset = header(modality, 1)
        plane = item(ImageOrientationPatient=[round(float(x), 9) for x in orientation])
        measures = item(PixelSpacing=list(spacing), SliceThickness=1)
        common = item(PixelMeasuresSequence=[measures])
        if shared_orientation:
            common.PlaneOrientationSequence = [plane]
        dataset.SharedFunctionalGroupsSequence = [common]
        groups = []
        for index in range(len(frames)):
            place = [round(float(x), 9) for x in positions[index]]
            group = item(PlanePositionSequence=[item(ImagePositionPatient=place)])
            if not shared_orientation:
                group.PlaneOrientationSequence = [plane]
            content = item(FrameAcquisitionNumber=1, StackID="1", InStackPositionNumber=1)
            if temporal:
                content.TemporalPositionIndex = temporal[index]
            group.FrameContentSequence = [content]
            if rescale:
                slope, intercept = rescale[index]
                values = item(RescaleSlope=slope, RescaleIntercept=intercept, RescaleType="US")
                group.PixelValueTransformationSequence = [values]
            groups.append(group)
        dataset.PerFrameFunctionalGroupsSequence = groups
        return save(fill(dataset, frames, **attributes), tmp_path / name)

    return write


@pytest.fixture
def rewrite() -> Callable[..., None]:
    """Change attributes of files that are there; None takes one out."""

    def change(*paths: Path, **attributes: Any) -> None:
        for path in paths:
            dataset = pydicom.dcmread(path)
            for keyword, value in attributes.items():
                if value is None:
                    dataset.pop(keyword, None)
                else:
                    setattr(dataset, keyword, value)
            dataset.save_as(path)

    return change


@pytest.fixture(scope="session")
def oblique() -> tuple[float, ...]:
    """Direction cosines of a plane that is turned about all three axes, by hand."""
    a, b, c = np.radians([25.0, -15.0, 40.0])
    x = np.array([[1, 0, 0], [0, np.cos(a), -np.sin(a)], [0, np.sin(a), np.cos(a)]])
    y = np.array([[np.cos(b), 0, np.sin(b)], [0, 1, 0], [-np.sin(b), 0, np.cos(b)]])
    z = np.array([[np.cos(c), -np.sin(c), 0], [np.sin(c), np.cos(c), 0], [0, 0, 1]])
    turned = x @ y @ z
    return (*turned[:, 0], *turned[:, 1])
