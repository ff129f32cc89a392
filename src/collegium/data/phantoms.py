"""Phantom federations: drawn scans of several sites, written as files in place of hospital data.

Every patient is a slice through a body: fat, muscle, a spine, a liver, a spleen, two kidneys and,
between them, the gland that is to be segmented, with the other organs if so wanted. The sites
differ as hospitals do: in the scanner (contrast, blur, noise, bias field, pixel size, range of the
stored integers) and in how outlines are drawn. A model that is right at one site is therefore wrong
at another.

The same arguments give the same pixels; each case draws from generators of its own, so that adding
sites or cases does not change the others.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from collegium.core.randomness import seed_of
from collegium.data.splits import SPLITS
from collegium.errors import ConfigError

Image = NDArray[np.float64]

HEADER = "# A phantom federation, drawn by `collegium phantoms`. No person was ever scanned.\n"
SMALLEST = 32
LEVELS = {8: np.uint8, 16: np.uint16}
ORGANS = ("gland", "liver", "spleen", "kidneys")
"""The structures of a federation whose sites annotate different ones; their values begin at 1."""


@dataclass(frozen=True)
class ScannerModel:
    """A site's acquisition: from anatomy to stored pixels, and the margin of the gland's outline.

    Attributes:
      gamma: exponent of the contrast curve; above 1 darkens the tissues.
      inverted: whether bright tissues are dark, as between two MR sequences.
      blur: standard deviation of the point spread, in pixels.
      noise: standard deviation of the Rician noise; tissues lie between 0 and 1.
      bias: standard deviation of the logarithm of the bias field.
      coarseness: how many stored pixels one measured pixel covers, per axis.
      zoom: size of the body in the image.
      bits: bits per stored pixel, 8 or 16.
      top: stored value of a signal of 1.2, the brightest that is kept.
      margin: pixels by which the outline of the gland is drawn too wide.
    """

    gamma: float = 1.0
    inverted: bool = False
    blur: float = 0.6
    noise: float = 0.02
    bias: float = 0.1
    coarseness: int = 1
    zoom: float = 1.0
    bits: int = 8
    top: int = 255
    margin: float = 0.0


SCANNERS = {
    "alder": ScannerModel(bits=16, top=3000),
    "birch": ScannerModel(inverted=True, noise=0.035, zoom=0.93),
    "cedar": ScannerModel(coarseness=2, bias=0.3, bits=16, top=900, margin=1.0),
    "elm": ScannerModel(gamma=1.8, blur=0.9, noise=0.07, zoom=1.06),
    "hazel": ScannerModel(gamma=0.6, bias=0.25, blur=1.1, bits=16, top=60000),
    "linden": ScannerModel(inverted=True, coarseness=2, noise=0.05, zoom=0.88, margin=1.0),
}
"""The first sites of every phantom federation; further ones are drawn."""


class PhantomSite(NamedTuple):
    """A site's scanner, and how many of its patients are in each split."""

    scanner: ScannerModel
    train: int
    validation: int
    test: int


UNEQUAL = {
    "alder": PhantomSite(
        ScannerModel(noise=0.05, bias=0.25, bits=16, top=3000), train=2, validation=6, test=20
    ),
    "birch": PhantomSite(SCANNERS["birch"], train=24, validation=8, test=20),
    "cedar": PhantomSite(
        ScannerModel(gamma=0.9, blur=0.9, noise=0.05, bias=0.25, bits=16, top=900),
        train=16,
        validation=6,
        test=4,
    ),
    "elm": PhantomSite(
        ScannerModel(gamma=1.2, blur=0.8, noise=0.05, bias=0.25, zoom=1.04),
        train=48,
        validation=8,
        test=20,
    ),
}
"""Sites to which joining means something different, as the demo shows.

alder has two patients to learn from, and cedar and elm have scanners like its own. birch has many,
but shows bright tissue dark, so that a model made for the others is wrong there. cedar has too few
test patients for any verdict. elm has patients enough to train alone.
"""


def make_federation(
    folder: str | Path,
    sites: int | Mapping[str, PhantomSite] = 4,
    *,
    cases: int = 16,
    size: int = 96,
    seed: int = 0,
    organs: bool = False,
) -> Path:
    """Write a phantom federation under ``folder`` and return the path of its ``federation.yaml``.

    Args:
      folder: the folder to write to; created if absent. An earlier phantom federation is
          overwritten.
      sites: number of sites, or scanner and patients of each by name, such as `UNEQUAL`; manifests
          then state the splits.
      cases: number of images per site, if ``sites`` is a number. Every fourth patient is scanned
          twice.
      size: pixels along each side of an image.
      seed: selects the federation that is drawn.
      organs: whether the sites annotate different structures, those of `ORGANS` in turn, instead of
          the gland all of them.

    Raises:
      ConfigError: a number is too small, or the folder describes other data.
    """
    number = sites if isinstance(sites, int) else len(sites)
    for name, value, least in (("sites", number, 1), ("cases", cases, 1), ("size", size, SMALLEST)):
        if value < least:
            raise ConfigError(f"phantoms: {name} is {value}; choose at least {least}")
    folder = Path(folder)
    description = folder / "federation.yaml"
    if description.exists() and not description.read_text(encoding="utf-8").startswith(HEADER):
        raise ConfigError(f"phantoms: {description} describes other data; name another folder")
    if isinstance(sites, int):
        names = _site_names(sites)
        drawn = {name: (scanner_of(name, seed), _scans_of(cases)) for name in names}
    else:
        drawn = {name: (site.scanner, _scans_with_splits(site)) for name, site in sites.items()}
    shown = {
        name: ORGANS[place % len(ORGANS) :: len(drawn)] if organs else None
        for place, name in enumerate(drawn)
    }
    for name, (scanner, scans) in drawn.items():
        _write_site(folder, name, scanner, scans, size=size, seed=seed, organs=shown[name])
    content = yaml.safe_dump(_federation(shown), sort_keys=False)
    description.write_text(HEADER + content, encoding="utf-8")
    return description


def is_phantom(folder: Path) -> bool:
    """Return whether a folder holds a phantom federation that `make_federation` has written.

    Args:
      folder: the root of a federation.
    """
    description = folder / "federation.yaml"
    return description.is_file() and description.read_text(encoding="utf-8").startswith(HEADER)


def scanner_of(site: str, seed: int) -> ScannerModel:
    """Return the scanner of a site: one of `SCANNERS`, or one drawn for the site's name.

    Args:
      site: the site's name.
      seed: the federation's seed.
    """
    if site in SCANNERS:
        return SCANNERS[site]
    rng = _numpy_generator(seed, site, "scanner")
    return ScannerModel(
        gamma=float(rng.uniform(0.6, 1.8)),
        inverted=bool(rng.random() < 0.3),
        blur=float(rng.uniform(0.5, 1.1)),
        noise=float(rng.uniform(0.02, 0.07)),
        bias=float(rng.uniform(0.1, 0.3)),
        zoom=float(rng.uniform(0.88, 1.06)),
    )


def draw_case(
    scanner: ScannerModel,
    *,
    size: int,
    patient: np.random.Generator,
    visit: np.random.Generator,
    organs: Sequence[str] | None = None,
) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Return the stored pixels and the mask of one scan, (size, size) each.

    The mask holds 0 and 255, which is the gland; or the values of organs, see `ORGANS`.

    Args:
      scanner: the site's scanner.
      size: pixels along each side.
      patient: draws what belongs to the patient: the same for every scan of theirs.
      visit: draws what belongs to the scan: the slice's position, the noise and the bias field.
      organs: names of those that the mask holds; None: the gland alone, as 255.
    """
    canvas = _PhantomSlice(size, scanner.zoom)
    gland = canvas.anatomy(patient, visit)
    tissue, body = canvas.tissue, canvas.body
    signal = body * (1.05 - tissue) if scanner.inverted else tissue
    signal = np.clip(signal, 0.0, None) ** scanner.gamma
    signal = _blur(signal, scanner.blur)
    signal *= np.exp(scanner.bias * _smooth_field(visit, size, size / 4))
    pixels = _measure(signal, scanner, visit)
    mask = gland > -scanner.margin
    if organs is None:
        return pixels, mask.astype(np.uint8) * 255
    canvas.organs[mask] = 1
    held = np.isin(canvas.organs, [ORGANS.index(name) + 1 for name in organs])
    return pixels, np.where(held, canvas.organs, 0).astype(np.uint8)


def _measure(signal: Image, scanner: ScannerModel, rng: np.random.Generator) -> NDArray[Any]:
    """Return the signal as the scanner samples, disturbs and stores it."""
    size = len(signal)
    coarse = _resample(signal, max(size // scanner.coarseness, 1))
    real, imaginary = rng.normal(scale=scanner.noise, size=(2, *coarse.shape))
    noisy = _resample(np.hypot(coarse + real, imaginary), size)
    stored = np.clip(noisy / 1.2, 0, 1) * scanner.top
    return np.rint(stored).astype(LEVELS[scanner.bits])


class _PhantomSlice:
    """A square grid on which tissues are painted over each other; the body spans about [-1, 1]."""

    def __init__(self, size: int, zoom: float) -> None:
        axis = (np.arange(size) + 0.5) / size * 2 - 1
        self.y, self.x = np.meshgrid(axis / zoom, axis / zoom, indexing="ij")
        self.pixel = 2 / size / zoom
        self.tissue: Image = np.zeros((size, size))
        self.body: Image = np.zeros((size, size))
        self.organs: NDArray[np.uint8] = np.zeros((size, size), np.uint8)

    def anatomy(self, patient: np.random.Generator, visit: np.random.Generator) -> Image:
        """Paint one slice and return the distance to the gland's edge (pixels; inside > 0)."""
        wide, high = patient.uniform(0.82, 0.92), patient.uniform(0.64, 0.74)
        slice_scale = visit.uniform(0.92, 1.08)
        skin = self.outline(patient, (0.0, 0.0), (wide, high), 0.015)
        self.body = _fill(skin)
        self.paint(skin, 0.80, visit, texture=0.03)  # subcutaneous fat
        rim = patient.uniform(0.05, 0.09)
        wall = self.outline(patient, (0.0, 0.0), (wide - rim, high - rim), 0.015)
        self.paint(wall, 0.38, visit, texture=0.05)  # muscle
        cavity = self.outline(patient, (0.0, -0.06), (wide - rim - 0.08, high - rim - 0.13), 0.02)
        self.paint(cavity, 0.52, visit, texture=0.10)  # bowel and visceral fat
        organs = (
            ((-0.42, -0.14), (0.25, 0.27), 0.60, 2),  # liver
            ((0.48, -0.18), (0.15, 0.20), 0.64, 3),  # spleen
            ((-0.34, 0.26), (0.11, 0.13), 0.72, 4),  # right kidney
            ((0.36, 0.26), (0.11, 0.13), 0.72, 4),  # left kidney
            ((0.17, -0.34), (0.15, 0.09), 0.30, 0),  # stomach
        )
        for (x, y), radii, level, value in organs:
            at = (x + patient.normal(scale=0.03), y + patient.normal(scale=0.03))
            shape = self.outline(patient, at, radii, 0.08)
            self.paint(shape, level + patient.normal(scale=0.02), visit, texture=0.04)
            self.organs[shape > 0] = value
        bone = self.outline(patient, (0.0, 0.40), (0.13, 0.11), 0.03)
        self.paint(bone, 0.95, visit, texture=0.05)
        marrow = self.outline(patient, (0.0, 0.40), (0.05, 0.045), 0.0)
        self.paint(marrow, 0.25, visit, texture=0.0)
        radius = patient.uniform(0.19, 0.26) * slice_scale
        stretch = patient.uniform(0.8, 1.25)
        centre = (patient.normal(scale=0.05), 0.04 + patient.normal(scale=0.04))
        gland = self.outline(patient, centre, (radius * stretch, radius / stretch), 0.10)
        self.paint(gland, 0.86 + patient.normal(scale=0.02), visit, texture=0.05)
        return gland

    def outline(
        self,
        rng: np.random.Generator,
        centre: tuple[float, float],
        radii: tuple[float, float],
        wobble: float,
    ) -> Image:
        """Return the distance in pixels to the edge of a perturbed ellipse, positive inside it."""
        x, y = (self.x - centre[0]) / radii[0], (self.y - centre[1]) / radii[1]
        angle = np.arctan2(y, x)
        edge = np.ones_like(angle)
        for harmonic in range(2, 6):
            amplitude, phase = rng.normal(scale=wobble / (harmonic - 1)), rng.uniform(0, 2 * np.pi)
            edge += amplitude * np.cos(harmonic * angle + phase)
        distance: Image = (edge - np.hypot(x, y)) * min(radii) / self.pixel
        return distance

    def paint(
        self, shape: Image, level: float, rng: np.random.Generator, *, texture: float
    ) -> None:
        """Cover a shape with a tissue of the given brightness."""
        cover = _fill(shape)
        grain = texture * _smooth_field(rng, len(shape), len(shape) / 40)
        self.tissue = (1 - cover) * self.tissue + cover * (level + grain)


def _fill(distance: Image) -> Image:
    """Return how much of each pixel lies inside an edge, from the distance to it."""
    return np.clip(distance + 0.5, 0, 1)


def _smooth_field(rng: np.random.Generator, size: int, scale: float) -> Image:
    """Return a smooth random field with mean 0 and standard deviation 1."""
    field = _blur(rng.normal(size=(size, size)), scale)
    standardised: Image = (field - field.mean()) / field.std()
    return standardised


def _blur(image: Image, sigma: float) -> Image:
    """Return the image convolved with a Gaussian (periodic; the borders are air)."""
    rows = np.fft.fftfreq(image.shape[0])[:, None]
    columns = np.fft.rfftfreq(image.shape[1])[None, :]
    gain = np.exp(-2 * (np.pi * sigma) ** 2 * (rows**2 + columns**2))
    return np.fft.irfft2(np.fft.rfft2(image) * gain, s=image.shape)


def _resample(image: Image, size: int) -> Image:
    """Return the square image at another size: means of blocks downwards, linear upwards."""
    old = image.shape[0]
    if size == old:
        return image
    centres = (np.arange(size) + 0.5) * old / size - 0.5
    distance = np.abs(centres[:, None] - np.arange(old)[None, :])
    weights = np.clip(1 - distance / max(old / size, 1), 0, None)
    weights /= weights.sum(axis=1, keepdims=True)
    resampled: Image = weights @ image @ weights.T
    return resampled


class _Scan(NamedTuple):
    """A scan by the numbers of case, patient and visit, from 1; its split, if that is stated."""

    case: int
    patient: int
    visit: int
    split: str | None = None


def _write_site(
    folder: Path,
    site: str,
    scanner: ScannerModel,
    scans: list[_Scan],
    *,
    size: int,
    seed: int,
    organs: Sequence[str] | None,
) -> None:
    from PIL import Image as PILImage

    rows = []
    for kind in ("images", "masks"):
        (folder / site / kind).mkdir(parents=True, exist_ok=True)
    for number, patient, visit, split in scans:
        case = f"{site}_{number:03d}"
        pixels, mask = draw_case(
            scanner,
            size=size,
            patient=_numpy_generator(seed, site, "patient", patient),
            visit=_numpy_generator(seed, site, "patient", patient, "visit", visit),
            organs=organs,
        )
        files = {"image": f"{site}/images/{case}.png", "label": f"{site}/masks/{case}.png"}
        PILImage.fromarray(pixels).save(folder / files["image"])
        PILImage.fromarray(mask).save(folder / files["label"])
        row = {"site": site, "case": case, "patient": f"{site}_p{patient:03d}", **files}
        rows.append(row if split is None else {**row, "split": split})
    with (folder / site / "manifest.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _scans() -> Iterator[_Scan]:
    """Yield scans without end; every fourth patient comes twice."""
    case = count(1)
    for patient in count(1):
        for visit in (1, 2) if patient % 4 == 0 else (1,):
            yield _Scan(next(case), patient, visit)


def _scans_of(cases: int) -> list[_Scan]:
    return list(islice(_scans(), cases))


def _scans_with_splits(site: PhantomSite) -> list[_Scan]:
    """Return the scans of the site's patients, those of the training first."""
    _, *counts = site
    splits = [split for split, number in zip(SPLITS, counts, strict=True) for _ in range(number)]
    scans = takewhile(lambda scan: scan.patient <= len(splits), _scans())
    return [scan._replace(split=splits[scan.patient - 1]) for scan in scans]


def _site_names(count: int) -> list[str]:
    known = list(SCANNERS)[:count]
    return known + [f"site_{number:02d}" for number in range(len(known) + 1, count + 1)]


def _federation(sites: Mapping[str, Sequence[str] | None]) -> dict[str, Any]:
    """Return the description of a federation, given the organs that each site annotates."""
    gland = {"classes": ["background", "gland"], "label_map": {0: 0, 255: 1}}
    several = {"classes": ["background", *ORGANS]}
    return {
        "name": "phantoms",
        "root": ".",
        "sites": {
            site: {"manifest": f"{site}/manifest.csv"}
            | ({} if organs is None else {"labelled": [*organs]})
            for site, organs in sites.items()
        },
        "task": {"name": "segmentation", **(several if any(sites.values()) else gland)},
        "image": {"channels": "grey", "normalise": "zscore"},
        "sampling": {"flips": True, "rotations": False},
        "splits": {"validation": 0.2, "test": 0.4},
    }


def _numpy_generator(seed: int, *path: str | int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed_of(seed, "phantoms", *path)))
