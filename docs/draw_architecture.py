"""Draw `architecture.svg`: the floors of the package, and who imports whom, read from the source.

    .venv/bin/python docs/draw_architecture.py           # write the picture
    .venv/bin/python docs/draw_architecture.py --check   # fail if the one there is out of date

The floors are those of the layers contract in `pyproject.toml`; the imports are those that
import-linter sees.
"""

import argparse
import colorsys
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import grimp

HERE = Path(__file__).resolve().parent
PICTURE = HERE / "architecture.svg"

JOBS = {
    "cli": "The command line",
    "diagnostics": "How different sites are",
    "deploy": "Predict, adapt, export",
    "testing": "Conformance suite, toy sites",
    "distributed": "Sites over NVIDIA FLARE",
    "experiment": "From a file to jobs and results",
    "evaluation": "Results, statistics, tables, report",
    "runtime": "Server, clients, engines, ledger",
    "algorithms": "The methods, one file each",
    "adaptation": "Adapters for hospitals outside, one file each",
    "training": "Batches, objectives, the local loop",
    "heterogeneity": "Distances, groups and spectra of sites",
    "compression": "Codecs and the session around them",
    "tasks": "Loss, prediction and scores",
    "models": "Networks and model files",
    "data": "Hospitals' files as data sets",
    "solvers": "Exact numerical solvers",
    "core": "Tensors, messages, model parts, randomness",
    "errors": "Every error that a user can cause",
}
"""One line for each package; one that is missing or too long for its box stops the drawing."""

WIDTH, GUTTER, GAP, PAD = 1000, 36, 12, 14
MONO, SANS = 0.602, 0.53  # width of a character, in units of its size: exact, and at most
NAME, JOB, CHIP = 16.0, 13.0, 12.0
CHIP_HEIGHT, CHIP_GAP = 21, 6


@dataclass(frozen=True)
class Package:
    """A box of the picture."""

    name: str
    floor: int
    imports: tuple[str, ...]


def read_floors() -> list[list[str]]:
    """Return the packages of each floor, from the top to the bottom."""
    text = (HERE.parent / "pyproject.toml").read_text("utf-8")
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return [[name.strip() for name in layer.split("|")] for layer in layers]


def read_packages(floors: Sequence[Sequence[str]]) -> dict[str, Package]:
    """Return every package with the packages that it imports, those of high floors first."""
    graph = grimp.build_graph("collegium", exclude_type_checking_imports=True, cache_dir=None)
    names = [name for floor in floors for name in floor]
    packages = {}
    for depth, floor in enumerate(floors):
        for name in floor:
            imports = tuple(
                other
                for other in names
                if other != name
                and graph.direct_import_exists(
                    importer=f"collegium.{name}", imported=f"collegium.{other}", as_packages=True
                )
            )
            packages[name] = Package(name, len(floors) - 1 - depth, imports)
    return packages


def imported_by_all(packages: Mapping[str, Package]) -> set[str]:
    """Return the packages of the lowest floor that all others import: they need no labels."""
    above = [package for package in packages.values() if package.floor > 0]
    return {
        name
        for name, package in packages.items()
        if package.floor == 0 and all(name in other.imports for other in above)
    }


def colour(hue: float, saturation: float, lightness: float) -> str:
    """Return a colour of HSL space, hue in degrees and the rest in per cent, as `#rrggbb`."""
    rgb = colorsys.hls_to_rgb(hue / 360, lightness / 100, saturation / 100)
    return "#" + "".join(f"{round(255 * value):02x}" for value in rgb)


def style(floors: int) -> Iterator[str]:
    """Yield the style sheet: one hue per floor, in a light and a dark scheme."""
    yield 'text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }'
    yield ".name, .chip text { font-family: ui-monospace, Menlo, Consolas, monospace; }"
    yield f".name {{ font-size: {NAME}px; font-weight: 600; }}"
    yield f".job {{ font-size: {JOB}px; }} .chip text {{ font-size: {CHIP}px; }}"
    yield ".number, .note { font-size: 12px; } .number { text-anchor: middle; }"
    for dark in (False, True):
        yield "@media (prefers-color-scheme: dark) {" if dark else ""
        yield f".job {{ fill: {'#c9d1d9' if dark else '#3b4252'}; }}"
        yield f".number, .note {{ fill: {'#8b949e' if dark else '#6b7280'}; }}"
        for floor in range(floors):
            hue = 150 + 170 * floor / (floors - 1)
            box, line, pill, ink = (
                ((hue, 24, 15), (hue, 28, 34), (hue, 34, 27), (hue, 62, 86))
                if dark
                else ((hue, 60, 97.5), (hue, 38, 76), (hue, 52, 89), (hue, 62, 24))
            )
            yield f".f{floor} .box {{ fill: {colour(*box)}; stroke: {colour(*line)}; }}"
            yield f".f{floor} .name, .c{floor} text {{ fill: {colour(*ink)}; }}"
            yield f".c{floor} rect {{ fill: {colour(*pill)}; }}"
        yield "}" if dark else ""


def chip_width(name: str) -> float:
    """Return the width of the label of an imported package."""
    return round(len(name) * MONO * CHIP + 16, 1)


def chip_lines(names: Sequence[str], width: float) -> list[list[str]]:
    """Return the labels of imported packages, broken into lines of at most ``width``."""
    lines: list[list[str]] = [[]]
    used = 0.0
    for name in names:
        needed = chip_width(name) + CHIP_GAP
        if lines[-1] and used + needed > width + CHIP_GAP:
            lines.append([])
            used = 0.0
        lines[-1].append(name)
        used += needed
    return lines if names else []


class Drawing:
    """The picture, floor under floor."""

    def __init__(self, floors: Sequence[Sequence[str]]) -> None:
        self.floors = floors
        self.packages = read_packages(floors)
        self.silent = imported_by_all(self.packages)
        self.parts: list[str] = []
        self.top = 12.0

    def labels(self, package: Package) -> list[str]:
        """Return the imported packages to show in a box."""
        return [name for name in package.imports if name not in self.silent]

    def chips(self, lines: Sequence[Sequence[str]], left: float, top: float) -> None:
        """Draw lines of labels."""
        for row, line in enumerate(lines):
            x, y = left, top + row * (CHIP_HEIGHT + CHIP_GAP)
            for name in line:
                width = chip_width(name)
                self.parts.append(
                    f'<g class="chip c{self.packages[name].floor}">'
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{width}" height="{CHIP_HEIGHT}" '
                    f'rx="{CHIP_HEIGHT / 2}"/>'
                    f'<text x="{x + 8:.1f}" y="{y + 15:.1f}">{name}</text></g>'
                )
                x += width + CHIP_GAP

    def box(self, package: Package, left: float, width: float, height: float, room: float) -> None:
        """Draw one package with its name and its job, which must fit into ``room``."""
        job = JOBS[package.name]
        if len(job) * SANS * JOB > room:
            sys.exit(f"the line about {package.name} is longer than its box: shorten {job!r}")
        self.parts.append(
            f'<rect class="box" x="{left:.1f}" y="{self.top:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}" rx="8"/>'
            f'<text class="name" x="{left + PAD:.1f}" y="{self.top + 25:.1f}">{package.name}</text>'
            f'<text class="job" x="{left + PAD:.1f}" y="{self.top + 45:.1f}">{escape(job)}</text>'
        )

    def floor(self, names: Sequence[str]) -> None:
        """Draw one floor: a box over its whole width, or several beside each other."""
        packages = [self.packages[name] for name in names]
        count, number = len(packages), packages[0].floor
        width = (WIDTH - GUTTER - 2 - GAP * (count - 1)) / count
        alone = count == 1
        inner = 0.69 * width if alone else width - 2 * PAD
        lines = [chip_lines(self.labels(package), inner) for package in packages]
        deepest = max(len(line) for line in lines)
        labels = deepest * (CHIP_HEIGHT + CHIP_GAP) - (CHIP_GAP if deepest else 0)
        height = max(60, labels + 20) if alone else 60 + (labels + 8 if deepest else 0)
        self.parts.append(f'<g class="f{number}">')
        self.parts.append(
            f'<text class="number" x="{GUTTER / 2:.1f}" y="{self.top + height / 2 + 4:.1f}">'
            f"{number}</text>"
        )
        for index, (package, chips) in enumerate(zip(packages, lines, strict=True)):
            left = GUTTER + index * (width + GAP)
            room = width - inner - 3 * PAD if alone and chips else width - 2 * PAD
            self.box(package, left, width, height, room)
            if alone:
                self.chips(chips, left + width - inner - PAD, self.top + (height - labels) / 2)
            else:
                self.chips(chips, left + PAD, self.top + 58)
            if package.name in self.silent:
                self.parts.append(
                    f'<text class="note" x="{left + width - inner - PAD:.1f}" '
                    f'y="{self.top + height / 2 + 4:.1f}">imported by every package above</text>'
                )
        self.parts.append("</g>")
        self.top += height + GAP

    def svg(self) -> str:
        """Return the whole picture."""
        for floor in self.floors:
            self.floor(floor)
        self.parts.append(
            f'<text class="note" x="{GUTTER}" y="{self.top + 8:.1f}">The labels in a box are the '
            "packages that it imports: always of a lower floor, never of its own.</text>"
        )
        height = round(self.top + 20)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
                f'width="{WIDTH}" height="{height}" role="img" aria-labelledby="title">',
                '<title id="title">The packages of Collegium on their floors; each box lists the '
                "packages that it imports, all from floors below</title>",
                "<style>",
                *[line for line in style(len(self.floors)) if line],
                "</style>",
                *self.parts,
                "</svg>",
                "",
            ]
        )


def main() -> int:
    """Write or check the picture; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if out of date")
    check = parser.parse_args().check
    floors = read_floors()
    strangers = set(JOBS) ^ {name for floor in floors for name in floor}
    if strangers:
        sys.exit(f"packages of pyproject.toml and jobs here differ: {', '.join(sorted(strangers))}")
    picture = Drawing(floors).svg()
    if not check:
        PICTURE.write_text(picture, "utf-8")
    elif not PICTURE.is_file() or PICTURE.read_text("utf-8") != picture:
        sys.exit(f"{PICTURE.name} is out of date: run python docs/draw_architecture.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
