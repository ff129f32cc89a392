"""The command `patches`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from collegium.cli.base import app, guarded, print_table


@app.command()
@guarded
def patches(
    volumes: Annotated[
        Path,
        typer.Argument(help="The folder of the volumes (MetaImage, NRRD, NIfTI), named by series."),
    ],
    candidates: Annotated[
        Path, typer.Argument(help="The CSV file: seriesuid, coordX, coordY, coordZ, class.")
    ],
    *,
    output: Annotated[Path, typer.Option(help="The folder to write.")] = Path("patches"),
    size: Annotated[int, typer.Option(help="The side of a patch in pixels.")] = 32,
    spacing: Annotated[
        float, typer.Option(help="The side of its pixels in mm; 0: the voxels as they are.")
    ] = 1.0,
    coordinates: Annotated[
        Literal["LPS", "RAS"],
        typer.Option(help="Where the coordinates grow: LPS (ITK, DICOM, LUNA16) or RAS (NIfTI)."),
    ] = "LPS",
    patient: Annotated[str, typer.Option(help="The column that names the patient.")] = "seriesuid",
    leave_out: Annotated[
        bool,
        typer.Option(
            "--leave-out",
            help="List candidates without a volume or outside it in left-out.csv, and go on.",
        ),
    ] = False,
) -> None:
    """Cut patches around candidates in volumes, and write them with a manifest of their classes."""
    from collegium.data.candidates import PatchConfig, write_patches

    config = PatchConfig(size, spacing, coordinates, patient)
    found = write_patches(volumes, candidates, output, config, leave_out=leave_out)
    for sentence in found.left_out[:10]:
        typer.echo(sentence, err=True)
    if len(found.left_out) > 10:
        typer.echo(f"... {len(found.left_out)} in all, see {output / 'left-out.csv'}", err=True)
    print_table(([name, str(n)] for name, n in found.classes.items()), ["class", "patches"])
    typer.echo(output / "manifest.csv")
